"""Writes reports to files atomically, and validates them field by field when it reads them.

Not covered: files that change while they are read.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import types
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from memfit._errors import UsageError
from memfit._reading import text_of
from memfit._units import is_readable
from memfit.planning.plan import Plan

T = TypeVar("T")
FORMATS = (".html", ".json", ".md")
"""File suffixes for saving a report."""
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_MAY_BE_NOT_FINITE = "report.verification."
"""Prefix of the fields that may be non-finite: differences between non-finite gradients are so too."""


def write_text(path: Path, text: str, what: str = "the report") -> None:
    """Write a file atomically, by way of a temporary file beside it. Raises UsageError with the system's reason; `what` names
    the content in the message."""
    with _writing(path, what) as beside:
        # A lone surrogate in a name cannot be encoded: it is written as an escape.
        beside.write_bytes(text.encode("utf-8", "backslashreplace"))
        os.replace(beside, path)


def check_writable(path: Path, what: str = "the report", suffixes: Collection[str] = ()) -> None:
    """Check that a file can be written, before the work whose result goes there. Raises the UsageError that writing would
    raise, or one for a suffix outside a non-empty `suffixes`."""
    if suffixes and path.suffix.lower() not in suffixes:
        raise _no_format(path, suffixes)
    with _writing(path, what) as beside:
        beside.write_bytes(b"")


@contextmanager
def _writing(path: Path, what: str) -> Iterator[Path]:
    """A temporary file beside `path`, removed afterwards. Turns an OSError into a UsageError."""
    beside = path.parent / f".{path.name}.{os.getpid()}.tmp"
    try:
        if not path.name or path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        try:
            yield beside
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(
            f"writing {what} {str(path)!r}",
            found=error.strerror or str(error),
            next_move="name a file in an existing, writable directory",
        ) from error


def write_in_format(path: str | Path, formats: dict[str, Callable[[], str]]) -> None:
    """Write a file with the function for its suffix. Raises UsageError for another suffix, and as `write_text` does."""
    if not isinstance(path, (str, os.PathLike)) or "\0" in str(path):
        raise UsageError(
            f"saving a report as {path!r}",
            found="no file can have that name",
            next_move='pass a name such as "report.html"',
        )
    path = Path(path)
    make = formats.get(path.suffix.lower())
    if make is None:
        raise _no_format(path, formats)
    write_text(path, make())


def _no_format(path: Path, suffixes: Collection[str]) -> UsageError:
    return UsageError(
        f"a report in {str(path)!r}",
        found=f"the suffix {path.suffix!r} names no format",
        next_move=f"end the name in {' or '.join(suffixes)}",
    )


def read_text(path: Path) -> str:
    """Return the text of a report file. Raises UsageError."""
    try:
        return text_of(path)
    except OSError as error:
        raise unreadable(str(path), error.strerror or str(error)) from error
    except UnicodeDecodeError as error:
        raise unreadable(str(path), f"it is not text ({error.reason})") from error


def strict(value: Any) -> Any:
    """Return a JSON-compatible copy of `value`: non-finite floats become strings."""
    if isinstance(value, dict):
        return {key: strict(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(entry) for entry in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def restored(kind: type[T], text: str, source: str, latest: int, mark: str = "report") -> T:
    """Build a report dataclass from JSON, and validate each field. `mark` is the key that identifies such files. Raises
    UsageError, and PlanFileError for a plan inside."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise unreadable(source, f"it is not JSON ({error})") from error
    if not isinstance(data, dict) or data.pop(mark, None) != "memfit":
        raise unreadable(source, f"it is JSON, but not a {mark}")
    found = data.get("version")
    if type(found) is int and found > latest:
        raise UsageError(
            f"reading the report {source}",
            found=f"it has version {found}, but this memfit knows versions up to {latest}",
            next_move="update memfit, or make the report again",
        )
    return _Restoring(source).value(kind, data, "report")


class _Restoring:
    """Builds values of annotated types from plain JSON."""

    def __init__(self, source: str) -> None:
        self._source = source

    def value(self, kind: Any, data: Any, name: str) -> Any:
        """Convert `data` to the type `kind`; `name` is its path in the file, for messages."""
        if kind is Plan:
            return Plan.from_json(json.dumps(data), source=f"inside {self._source}")
        if dataclasses.is_dataclass(kind):
            return self._instance(kind, data, name)
        origin, arguments = get_origin(kind), get_args(kind)
        if origin in (Union, types.UnionType):
            return None if data is None else self.value(next(a for a in arguments if a is not type(None)), data, name)
        if origin is tuple:
            return self._tuple(arguments, data, name)
        if kind is float and isinstance(data, str) and data in _NOT_FINITE and name.startswith(_MAY_BE_NOT_FINITE):
            return _NOT_FINITE[data]
        if isinstance(data, (int, float)) and not is_readable(data):
            raise unreadable(self._source, f"{name} is not a plausible number")
        if kind is float and type(data) in (int, float):
            return float(data)
        if type(data) is not kind:
            raise self._wrong(name, data)
        return data

    def _instance(self, kind: Any, data: Any, name: str) -> Any:
        if not isinstance(data, dict):
            raise self._wrong(name, data)
        types_ = get_type_hints(kind)
        fields = [f.name for f in dataclasses.fields(kind) if f.name in data or _required(f)]
        unknown, missing = sorted(set(data) - set(fields)), sorted(set(fields) - set(data))
        if unknown or missing:
            what = f"{unknown[0]!r} of {name} is unknown" if unknown else f"{missing[0]!r} of {name} is missing"
            raise unreadable(self._source, f"the field {what}")
        return kind(**{field: self.value(types_[field], data[field], f"{name}.{field}") for field in fields})

    def _tuple(self, arguments: tuple[Any, ...], data: Any, name: str) -> tuple[Any, ...]:
        any_length = len(arguments) == 2 and arguments[1] is Ellipsis
        if not isinstance(data, list) or (not any_length and len(data) != len(arguments)):
            raise self._wrong(name, data)
        kinds = [arguments[0]] * len(data) if any_length else arguments
        return tuple(self.value(kind, entry, f"{name}[{i}]") for i, (kind, entry) in enumerate(zip(kinds, data)))

    def _wrong(self, name: str, data: Any) -> UsageError:
        return unreadable(self._source, f"{name} is {json.dumps(data)[:60]}")


def _required(field: dataclasses.Field[Any]) -> bool:
    """Whether every file has this field: fields added to the format later have a default."""
    optional = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
    return field.name == "version" or not optional


def unreadable(source: str, what: str) -> UsageError:
    """Return the error for a file that is not a report."""
    return UsageError(f"reading the report {source}", found=what, next_move="save one with run.report().save('report.json')")
