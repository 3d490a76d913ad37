"""Parses the CUDA caching allocator's settings from PYTORCH_ALLOC_CONF as torch 2.13 does.

torch reads the text by position and is lenient: anything may follow a number ("25abc" is 25), a negative number wraps around,
and the segment size is read before all other keys. This parser does the same, because the numbers matter. Unlike torch's CPU
build, it rejects an item that is not `key:value` (torch's CUDA build rejects it too).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from memfit._errors import UsageError
from memfit._units import MiB

INTERVALS = 16
"""Powers of two with their own number of divisions, from 1 MiB to 32 GiB; sizes below or above use the nearest."""
UNLIMITED = 2**64 - 1
"""The max_split_size if none is set: every block may be split."""
LARGE_SEGMENT = 20 * MiB
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The environment variables; the first takes precedence."""

_MOST_MIB = UNLIMITED // MiB
_WHOLE = re.compile(r"[+-]?\d+")
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")


@dataclass(frozen=True)
class AllocatorSettings:
    """Settings of the caching allocator: rounding, splitting, caching and limits. The defaults are torch's."""

    max_split_size: int = UNLIMITED
    """Blocks of at least this many bytes are never split."""
    max_non_split_rounding: int = LARGE_SEGMENT
    """Bytes by which a block that is never split may exceed the request."""
    roundup_power2_divisions: tuple[int, ...] = (0,) * INTERVALS
    """Rounding divisions of each power of two; 0 or 1: multiples of 512 bytes."""
    expandable_segments: bool = False
    """Whether segments grow page by page."""
    garbage_collection_threshold: float = 0.0
    """Fraction of the allowed memory above which old cached segments are released; 0: never."""
    large_segment_size: int = LARGE_SEGMENT
    """Bytes of a segment for requests of more than 1 and less than 10 MiB; with expandable segments, of a page."""
    per_process_memory_fraction: float = 1.0
    """Fraction of the device's memory that the process may reserve."""
    backend: str = "native"
    """"native", or "cudaMallocAsync", which is not simulated."""
    ignored: tuple[str, ...] = field(default=(), compare=False)
    """Keys of the text without effect here: unknown, or about pinned memory and locks."""

    @classmethod
    def from_text(cls, text: str, *, variable: str = VARIABLES[0]) -> AllocatorSettings:
        """Parse a text such as "expandable_segments:True,max_split_size_mb:128".

        Raises UsageError for what torch rejects.
        """
        return _Parser(text, variable).settings(cls())

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> AllocatorSettings:
        """Return the settings that the environment puts in force.

        PYTORCH_ALLOC_CONF takes precedence, except for the memory fraction and the backend, where PYTORCH_CUDA_ALLOC_CONF does.
        """
        found = [name for name in VARIABLES if name in environ]
        if not found:
            return cls()
        first, last = (cls.from_text(environ[name], variable=name) for name in (found[0], found[-1]))
        return replace(first, per_process_memory_fraction=last.per_process_memory_fraction, backend=last.backend)

    @property
    def splits_everything(self) -> bool:
        """Whether no max_split_size is set."""
        return self.max_split_size == UNLIMITED

    @property
    def rounds_to_powers(self) -> bool:
        """Whether any power of two is rounded by divisions."""
        return max(self.roundup_power2_divisions) > 1


class _Parser:
    """Parses one text, split into tokens as torch splits it, from left to right."""

    def __init__(self, text: str, variable: str) -> None:
        self.text, self.variable = text, variable
        self.tokens = re.findall(r"[,:\[\]]|[^,:\[\]]+", "".join(text.split()))
        self.values: dict[str, object] = {}
        self.ignored: list[str] = []

    def settings(self, default: AllocatorSettings) -> AllocatorSettings:
        self.large = default.large_segment_size
        items = self._items()
        for key, value in items:
            if key == "large_segment_size_mb":
                self._large_segment(value)
        for key, value in items:
            self._read(key, value)
        return replace(default, **self.values, ignored=tuple(self.ignored))  # type: ignore[arg-type]

    def _items(self) -> list[tuple[str, list[str]]]:
        """Return each key with the tokens of its value: one, or a list with its brackets."""
        items, at = [], 0
        while at < len(self.tokens):
            key, end = self.tokens[at], at + 3
            if key in ",:[]" or self.tokens[at + 1 : at + 2] != [":"] or at + 2 >= len(self.tokens):
                raise self._error(f"{''.join(self.tokens[at : at + 3])!r} is not an item of the form key:value")
            if self.tokens[at + 2] == "[":
                if "]" not in self.tokens[at:]:
                    raise self._error(f"the list of {key} has no closing bracket")
                end = self.tokens.index("]", at) + 1
            items.append((key, self.tokens[at + 2 : end]))
            if end < len(self.tokens) and self.tokens[end] != ",":
                raise self._error(f"{self.tokens[end]!r} after {key} where a comma belongs")
            at = end + 1
        return items

    def _read(self, key: str, value: list[str]) -> None:
        if key == "max_split_size_mb":
            self.values["max_split_size"] = self._mib(key, value)
        elif key == "max_non_split_rounding_mb":
            self.values["max_non_split_rounding"] = self._mib(key, value)
        elif key == "garbage_collection_threshold":
            self.values[key] = self._share(key, value, open_ended=True)
        elif key == "per_process_memory_fraction":
            self.values[key] = self._share(key, value, open_ended=False)
        elif key == "roundup_power2_divisions":
            self.values[key] = self._divisions(value)
        elif key == "expandable_segments":
            self.values[key] = self._flag(key, value)
        elif key == "backend":
            self.values[key] = self._backend(value[0])
        elif key != "large_segment_size_mb":
            self.ignored.append(key)

    def _large_segment(self, value: list[str]) -> None:
        size = min(self._whole("large_segment_size_mb", value), _MOST_MIB)
        if size <= 10:
            raise self._error(f"large_segment_size_mb is {size}, and it must be more than 10")
        self.large = size * MiB
        self.values["large_segment_size"] = self.values["max_non_split_rounding"] = self.large

    def _mib(self, key: str, value: list[str]) -> int:
        size = self._whole(key, value)
        if size < self.large // MiB:
            raise self._error(f"{key} is {size}, less than a large segment's {self.large // MiB} MiB")
        return min(size, _MOST_MIB) * MiB

    def _whole(self, key: str, value: list[str]) -> int:
        found = _WHOLE.match(value[0])
        if found is None:
            raise self._error(f"{key} is {''.join(value)!r}, not a whole number")
        number = int(found[0])
        if abs(number) > UNLIMITED:
            raise self._error(f"{key} is {number}, more than 64 bits hold")
        return number % 2**64  # wraps around like an unsigned number

    def _share(self, key: str, value: list[str], *, open_ended: bool) -> float:
        found = _NUMBER.match(value[0])
        if found is None:
            raise self._error(f"{key} is {''.join(value)!r}, not a number")
        number = float(found[0])
        if not (0 < number < 1 if open_ended else 0 <= number <= 1):
            between = "more than 0 and less than 1" if open_ended else "from 0 to 1"
            raise self._error(f"{key} is {number:g}, and it must be {between}")
        return number

    def _flag(self, key: str, value: list[str]) -> bool:
        if value not in (["True"], ["False"]):
            raise self._error(f"{key} is {''.join(value)!r}, neither 'True' nor 'False'")
        return value == ["True"]

    def _backend(self, name: str) -> str:
        if name not in ("native", "cudaMallocAsync", "hipMallocAsync"):
            raise self._error(f"backend is {name!r}, neither 'native' nor 'cudaMallocAsync'")
        return name

    def _divisions(self, value: list[str]) -> tuple[int, ...]:
        if value[0] != "[":
            return (self._power_of_two("roundup_power2_divisions", value[0], zero=False),) * INTERVALS
        pairs = [pair for pair in "".join(value[1:-1]).split(",") if pair]
        divisions, last, first = [0] * INTERVALS, 0, True
        for pair in pairs:
            boundary, colon, parts = pair.partition(":")
            if not colon or not parts:
                raise self._error(f"{pair!r} in roundup_power2_divisions is not of the form size:divisions")
            count = self._power_of_two("roundup_power2_divisions", parts, zero=True)
            if boundary == ">":
                divisions[last + 1 :] = [count] * (INTERVALS - last - 1)
                continue
            size = self._power_of_two("a size in roundup_power2_divisions", boundary, zero=False)
            last = min(size.bit_length() - 1, INTERVALS - 1)
            if first:
                divisions[:last] = [count] * last
            divisions[last], first = count, False
        return tuple(divisions)

    def _power_of_two(self, what: str, text: str, *, zero: bool) -> int:
        number = self._whole(what, [text])
        if number & (number - 1) or (number == 0 and not zero):
            raise self._error(f"{what} is {number}, not a power of two")
        return number

    def _error(self, found: str) -> UsageError:
        return UsageError(
            f"{self.variable}={self.text!r}",
            found=found,
            next_move="write it like 'expandable_segments:True,max_split_size_mb:128', or unset it",
        )
