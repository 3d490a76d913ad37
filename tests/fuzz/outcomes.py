"""What running a script with memfit comes to, held against running it plain."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from fuzz import running
from fuzz.grammar import Choices, the
from fuzz.script import source_of
from fuzz.snapshot import apart

TOLERANCE = 1e-10
ROUNDING = 1e-7
"""What differs by more from parameters that differ in their last digit is no rounding."""
FREE, TWICE, WHOLE, INEXACT, REFUSED, UNTRUE, DIFFERENT, CRASHED, INVALID, UNSTEADY = (
    "free", "two passes", "whole", "inexact", "refused", "refused without need", "different", "crashed", "plain raises",
    "rounding decides",
)  # fmt: skip
WRITTEN = "modify it after backward"
"""Said where a script writes what a pass still reads, which `docs/guarantees.md` lists among what is refused."""
ON_FEW = ("on a few samples the model says", "it cannot be computed on a few")
"""Said where a model takes batches of some sizes only, which `docs/guarantees.md` lists as well."""
BAD = (DIFFERENT, CRASHED, UNTRUE)


@dataclass(frozen=True)
class Outcome:
    """What a script came to in one mode."""

    kind: str
    what: str = ""
    """Which refusal, error or difference, in words that are the same for all of its kind."""
    detail: str = ""
    """The same with this script's own numbers."""

    @property
    def bad(self) -> bool:
        """Whether it is a finding."""
        return self.kind in BAD


def outcome(choices: Choices, *, step: bool) -> Outcome:
    """Run a script in both ways and compare."""
    source = source_of(choices, step=step)
    want = running.plain(source)
    got = running.with_memfit(source)
    if want.error is not None:
        return Outcome(INVALID, words(want.error), want.trace[-1500:])
    if got.error is not None:
        return _of_error(choices, got, source, want)
    far = {path: value for path, value in apart(want.left, got.left).items() if value > TOLERANCE}
    if step:  # its step leaves no gradients; the script keeps what they were before
        far = {path: value for path, value in far.items() if not path.endswith(".grad")}
    if far:
        drift = running.drift(source, want)
        far = {path: value for path, value in far.items() if not value <= 10 * drift.get(path, 0.0) <= ROUNDING}
        if far and all(value <= 10 * drift.get(path, 0.0) for path, value in far.items()):
            return Outcome(UNSTEADY)
    if far and _accepted(choices, got):
        return Outcome(INEXACT, ", ".join(sorted({kind for kind, _ in got.events if kind == "not equal"})) or "batch statistics")
    if far:
        listed = sorted(far.items(), key=lambda item: item[0])
        detail = "\n".join(f"{path}: {value:.1e} apart; {_short(want.left.get(path))} is {_short(got.left.get(path))}" for path, value in listed[:12])
        return Outcome(DIFFERENT, ", ".join(sorted({_place(path) for path in far})), f"mode {got.mode}\n{detail}\n{_events(got)}")
    return Outcome(_how(choices, got))


BY_VALUES = ("twist", "loss", "state", "pack")
"""Dimensions with options that other values than a script's would have parts decide otherwise than the whole."""


def _of_error(choices: Choices, got: running.Ran, source: str, want: running.Ran) -> Outcome:
    from memfit import MemfitError

    assert got.error is not None
    if WRITTEN in str(got.error) and "writes" in the(choices, "between").tags:
        return Outcome(REFUSED, f"{type(got.error).__name__}: what a deferred pass reads was written before backward", str(got.error))
    if choices["fault"] != "none" and isinstance(got.error, torch.OutOfMemoryError):
        return Outcome(REFUSED, "memory ran out", str(got.error))  # (in one sample, or in what runs as the script wrote it)
    if not isinstance(got.error, MemfitError):
        return Outcome(CRASHED, words(got.error), got.trace[-3500:])
    said = f"{type(got.error).__name__}: {normal(got.error.asked)} / {normal(got.error.found)}"
    cut = running.cut_by_hand(source)
    decides = any(not {"decides", "values"}.isdisjoint(the(choices, name).tags) for name in BY_VALUES)
    decides = decides or ("fixed" in the(choices, "twist").tags and any(said in got.error.found for said in ON_FEW))
    same = not decides and cut.error is None and not any(value > TOLERANCE for value in apart(want.left, cut.left).values())
    whole = 'micro_batch="auto"' in source or "micro_batch='auto'" in source or "micro_batch='off'" in source
    return Outcome(UNTRUE if same or whole else REFUSED, said, f"{got.error}\n{got.trace[-2500:]}")


def _accepted(choices: Choices, got: running.Ran) -> bool:
    statistics = "batchnorm" in the(choices, "twist").tags
    kinds = {kind for kind, _ in got.events}
    return (statistics and (got.mode != "whole" or "out of memory" in kinds)) or "not equal" in kinds


def _how(choices: Choices, got: running.Ran) -> str:
    if any("two passes" in message or "twice" in message for _, message in got.events) or got.mode == "replay":
        return TWICE
    if got.mode == "whole" or not got.mode or choices["micro"] in ("auto", "off"):
        return WHOLE
    return FREE


def _events(ran: running.Ran) -> str:
    return "\n".join(f"event: {kind}: {message}" for kind, message in ran.events)


def words(error: BaseException) -> str:
    return f"{type(error).__name__}: {normal(str(error))}"


def normal(text: str) -> str:
    """The text without what differs from script to script."""
    first = text.strip().splitlines()[0] if text.strip() else ""
    first = re.sub(r"0x[0-9a-f]+", "ADDRESS", first)
    first = re.sub(r"<fuzz_script>:\d+", "LINE", first)
    return re.sub(r"\d+(\.\d+)?(e-?\d+)?", "#", first)[:200]


def _place(path: str) -> str:
    """What a path leads to, in a word that is the same for all of its kind."""
    for part, word in ((".grad", "gradients"), ("_parameters", "parameters"), (".params[", "parameters"), ("_buffers", "buffers"),
                       (".state[", "optimizer state"), ("printed", "printed")):  # fmt: skip
        if part in path:
            return word
    return re.sub(r"\[\d+\]", "[]", path)


def _short(value: object) -> str:
    text = str(value).replace("\n", " ")
    return text if len(text) <= 80 else text[:77] + "..."
