"""Ends a command: what goes to stderr, and the exit code.

0    done
1    the user's own code raised an exception, or a verification failed
2    memfit could not do it: a MemfitError, printed in its three parts
130  Ctrl-C
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import typer

from memfit._errors import MemfitError
from memfit.reporting.words import printable

FAILED, NOT_DONE, INTERRUPTED = 1, 2, 130
"""Exit codes."""


@contextmanager
def ending(user_file: Path | None = None) -> Iterator[None]:
    """Turn exceptions raised inside into messages on stderr and exit codes.

    Exceptions from the code in `user_file` are printed as Python does, without memfit's frames above it. Raises typer.Exit.
    """
    try:
        yield
    except MemfitError as error:
        print("\n".join(map(printable, f"memfit: {error}".splitlines())), file=sys.stderr)
        raise typer.Exit(NOT_DONE) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except (typer.Exit, BrokenPipeError):  # typer exits quietly if the reader is gone
        raise
    except Exception as error:
        if user_file is None:
            raise
        traceback.print_exception(type(error), error, _from(user_file, error))
        raise typer.Exit(FAILED) from None


def _from(file: Path, error: BaseException) -> TracebackType | None:
    """The traceback from the first frame in `file`; without one, all of it, but nothing for a SyntaxError."""
    frames = error.__traceback__
    while frames is not None and os.path.abspath(frames.tb_frame.f_code.co_filename) != os.path.abspath(file):
        frames = frames.tb_next
    return error.__traceback__ if frames is None and not isinstance(error, SyntaxError) else frames
