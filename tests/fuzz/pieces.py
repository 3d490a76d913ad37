"""What a choice adds to a script: lines of source, by the section of the script that they belong to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

SECTIONS = (
    "imports", "classes", "setup", "params", "after", "epoch", "before", "call", "metrics", "loss", "terms", "arithmetic",
    "between", "backward", "gradients", "clip", "stepped", "end_step", "end_epoch", "end",
)  # fmt: skip
"""In the order in which they stand in a script; `params` are expressions, given to the optimizer beside the model's."""


@dataclass(frozen=True)
class Piece:
    """What one option of one dimension adds."""

    lines: dict[str, str] = field(default_factory=dict)
    """Source by section."""
    holds: str = ""
    """The name of the object with state that the loss reads, for options that say how it is reached."""
    sums: bool = False
    """Whether the loss is one term of one call, which step mode can serve."""
    tags: frozenset[str] = frozenset()
    """Facts that rules of the grammar ask for."""


def piece(*tags: str, holds: str = "", sums: bool = False, **lines: str) -> Piece:
    """A piece with its lines given by section."""
    unknown = set(lines) - set(SECTIONS) - {"init", "forward", "returns", "suffix", "data", "unpack", "loader", "width"}
    assert not unknown, unknown
    return Piece(lines, holds, sums, frozenset(tags))


def indented(text: str, by: int) -> str:
    """The text with every line moved to the right."""
    return "\n".join(" " * by + line if line.strip() else "" for line in text.strip("\n").splitlines())


def together(texts: Sequence[str]) -> str:
    """Texts one below the other, without empty ones."""
    return "\n".join(text.strip("\n") for text in texts if text.strip())
