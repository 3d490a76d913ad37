"""The plan: memfit's decision as a value that can be printed, compared, saved, edited and loaded again (`plan_file.py`)."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from memfit._errors import PlanFileError, UsageError
from memfit._reading import text_of
from memfit.planning import wording
from memfit.planning.plan_file import built, unreadable

VERSION = 1
"""Version of the plan file format that this code writes; later versions are refused."""


@dataclass(frozen=True)
class Cost:
    """The predicted memory and time of one way of running an optimizer step."""

    peak: int
    """Expected peak memory in bytes, everything included."""
    upper: int
    """Upper bound of the peak in bytes; this is what has to fit."""
    seconds: float | None = None
    """Seconds per optimizer step; None if not known."""


@dataclass(frozen=True)
class Option:
    """A candidate: one way of running the step that was considered."""

    micro_batch: int
    """Samples per forward."""
    accumulation: int
    """Micro-batches per optimizer step."""
    precision: str
    """off, or the dtype of autocast."""
    checkpoint: int
    """Number of blocks checkpointed."""
    cost: Cost
    """Its predicted memory and time."""
    fits: bool
    """Whether its upper bound is within the budget."""
    reason: str = ""
    """Why it was not chosen; empty if it was."""
    measured: bool = False
    """Whether its seconds were measured during training; otherwise they were timed during planning."""


@dataclass(frozen=True)
class RankPlan:
    """How one rank of several runs its part of an optimizer step."""

    rank: int
    """The rank."""
    device: str
    """Its device's name."""
    limit: int
    """Its budget: bytes it may hold."""
    margin: int
    """Bytes of the budget kept free."""
    held: int
    """Bytes of the budget held by what the profile does not count."""
    share: int
    """Samples of an effective batch that it runs."""
    micro_batch: int
    """Samples per forward."""
    accumulation: int
    """Micro-batches per optimizer step."""
    precision: str
    """off, or the dtype of autocast."""
    checkpoint: tuple[str, ...]
    """Names of checkpointed blocks."""
    predicted: Cost
    """Its predicted memory and time."""


@dataclass(frozen=True)
class Plan:
    """How one optimizer step runs: micro-batches, gradient accumulation, checkpointing, precision and sharding."""

    mode: str
    """whole: one forward and backward. accumulate: gradient accumulation over weighted micro-batches. replay: two passes, a
    forward and then its recomputation with backward, for a loss that needs the whole output."""
    target_batch: int | None
    """Effective batch: samples per optimizer step over all ranks; None for the script's own batches."""
    share: int
    """Samples of the effective batch that this rank runs."""
    micro_batch: int
    """Samples per forward."""
    accumulation: int
    """Micro-batches per optimizer step."""
    precision: str
    """off for the script's own precision, or the dtype of autocast around each micro-batch."""
    checkpoint: tuple[str, ...]
    """Names of checkpointed blocks."""
    shard: str
    """What is sharded: off, optimizer (its state), gradients (and that state), parameters (and both)."""
    offload: str
    """off in this version."""
    predicted: Cost
    """Predicted memory and time of this plan."""
    asked: Cost
    """Predicted memory and time of the script's own settings: the whole share at once."""
    limit: int
    """The budget: bytes the process may hold."""
    margin: int
    """Bytes of the budget kept free for what cannot be predicted."""
    held: int
    """Bytes of the budget held by what the profile does not count."""
    device: str
    """The device's name."""
    model: str
    """The model's class."""
    optimizer: str
    """The optimizer's class, and whether its step is fused."""
    fingerprint: str
    """Digest of the model and optimizer that this plan is for."""
    by_size: tuple[tuple[int, int, int], ...] = ()
    """For samples of different sizes (step mode), ascending: (elements of the largest sample, samples per micro-batch, most
    that would fit)."""
    size_peaks: tuple[tuple[int, int, int, int], ...] = ()
    """For each row of by_size: (expected, upper) bytes at one sample per micro-batch, then at the most that would fit."""
    median: int = 0
    """Elements of the median sample where samples differ in size."""
    overhead: float = 0.0
    """Seconds of a step outside its micro-batches (the optimizer's), where they were timed."""
    accumulate_in: str = "float32"
    """Dtype in which gradients of half-precision parameters accumulate: float32, or param for the parameters' own."""
    keep: int = 0
    """replay: micro-batches whose activations stay from the first pass, so that their forward does not run again."""
    options: tuple[Option, ...] = ()
    """The candidates considered; the rejected ones have a reason."""
    notes: tuple[str, ...] = ()
    """What the reader should know."""
    ranks: tuple[RankPlan, ...] = ()
    """How each rank that has planned runs its share, by rank; the same in the plan of every rank."""
    version: int = field(default=VERSION)
    """Version of the file format."""

    @property
    def room(self) -> int:
        """Bytes left above the plan's upper bound."""
        return self.limit - self.margin - self.held - self.predicted.upper

    @property
    def rejected(self) -> tuple[Option, ...]:
        """The options that were rejected, with reasons."""
        return tuple(option for option in self.options if option.reason)

    @property
    def runs_whole(self) -> bool:
        """Whether one forward and backward takes the whole share, however long its samples are."""
        return self.accumulation == 1 and all(samples >= self.share for _, samples, _ in self.by_size)

    @property
    def unit(self) -> int:
        """The unit of micro-batch sizes: 1 for samples, or the median sample's elements where samples differ in size."""
        return self.median or 1

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of an effective batch that each rank runs, by rank."""
        return tuple(each.share for each in self.ranks) or (self.share,)

    def sizes_with_same_levers(self) -> tuple[int, ...]:
        """Return the micro-batch sizes of the options that fit with this plan's precision and checkpointed blocks."""
        return tuple(sorted({o.micro_batch for o in self.fitting_with_same_levers()}))

    def fitting_with_same_levers(self) -> tuple[Option, ...]:
        """Return the options that fit with this plan's precision and checkpointed blocks."""
        return tuple(option for option in self._same_levers() if option.fits)

    def of_rank(self, rank: int) -> RankPlan:
        """Return the part of this plan that `rank`, whose plan it is, shares with the other ranks."""
        same = {name: getattr(self, name) for f in dataclasses.fields(RankPlan) if (name := f.name) != "rank"}
        return RankPlan(rank=rank, **same)

    def on_rank(self, rank: int, ranks: int) -> Plan:
        """Return the plan of `rank` out of `ranks`, or this plan unchanged if it does not know that rank or world size."""
        own = next((each for each in self.ranks if each.rank == rank), None)
        if own is None or len(self.ranks) != ranks:
            return self
        same = {f.name: getattr(own, f.name) for f in dataclasses.fields(own) if f.name != "rank"}
        return replace(self, mode=self._mode_of(own.accumulation), **same)

    def with_share(self, share: int) -> Plan:
        """Return the plan for another share, split into micro-batches of the same size."""
        if share == self.share:
            return self
        times = share / self.share

        def scaled(cost: Cost) -> Cost:
            return cost if cost.seconds is None else replace(cost, seconds=cost.seconds * times)

        def anew(option: Option) -> Option:
            return replace(option, accumulation=-(-share // option.micro_batch), cost=scaled(option.cost))

        micro = min(self.micro_batch, share)
        count = -(-share // micro)
        return replace(
            self,
            mode=self._mode_of(count),
            share=share,
            micro_batch=micro,
            accumulation=count,
            predicted=scaled(self.predicted),
            asked=scaled(self.asked),
            keep=min(self.keep, max(0, count - 1)),
            options=tuple(anew(option) for option in self.options if option.micro_batch <= share),
        )

    def measured(self, micro_batch: int, rates: dict[int, float]) -> Plan:
        """Return the plan with another micro-batch size and measured seconds. `rates` maps micro-batch sizes to seconds per
        sample, or per element where samples differ in size (see `unit`)."""
        rest = 0.0 if self.predicted.seconds is None else self.overhead
        seconds = {n: rate * self.unit * self.share + rest for n, rate in rates.items()}
        same, best = set(self._same_levers()), seconds.get(micro_batch)
        timed = next((o.cost.seconds for o in same if o.micro_batch == micro_batch), None)
        drift = best / timed if best and timed else 1.0  # seconds in training per second timed during planning

        def anew(option: Option) -> Option:
            own = seconds.get(option.micro_batch) if option in same else None
            option = option if own is None else replace(option, cost=replace(option.cost, seconds=own), measured=True)
            taken = option.micro_batch == micro_batch and (own is not None or option in same)
            return replace(option, reason="" if taken else _reason_now(option, own is not None, best, drift))

        options = tuple(anew(option) for option in self.options)
        taken = next((o for o in options if o.micro_batch == micro_batch and o.fits), None)
        predicted = self.predicted if taken is None else replace(taken.cost, seconds=seconds.get(micro_batch))
        elements = micro_batch * self.unit
        table = tuple((size, min(most, max(1, elements // max(1, size))), most) for size, _, most in self.by_size)
        return replace(
            self,
            micro_batch=micro_batch,
            accumulation=-(-self.share // micro_batch),
            predicted=replace(predicted, **self._peak_by_size(table)) if self.by_size else predicted,
            by_size=table,
            options=options,
        )

    def _mode_of(self, accumulation: int) -> str:
        """The mode of this plan with `accumulation` micro-batches."""
        return self.mode if self.mode == "replay" else "accumulate" if accumulation > 1 else "whole"

    def _same_levers(self) -> list[Option]:
        """The options with this plan's precision and checkpointed blocks."""
        same = [o for o in self.options if o.precision == self.precision]
        if self.by_size:  # the options' profiles have the blocks checkpointed already
            return same
        return [o for o in same if o.checkpoint == len(self.checkpoint)]

    def _peak_by_size(self, table: tuple[tuple[int, int, int], ...]) -> dict[str, int]:
        """The peak under another table: the current prediction, scaled by the ratio of the tables' largest micro-batches."""
        before, after = self._largest_by_size(self.by_size), self._largest_by_size(table)
        if before is None or after is None:
            return {"peak": self.predicted.peak, "upper": self.predicted.upper}
        return {"peak": int(after[0] * self.predicted.peak / max(1, before[0])), "upper": after[1]}

    def _largest_by_size(self, table: tuple[tuple[int, int, int], ...]) -> tuple[int, int] | None:
        """(expected, upper) bytes of the largest micro-batch in a table; None where the plan does not know."""
        found = []
        for (_, n, most), (low, low_most, high, high_most) in zip(table, self.size_peaks):
            share = (n - 1) / max(1, most - 1)
            found.append((int(low + (high - low) * share), int(low_most + (high_most - low_most) * share)))
        return max(found, key=lambda pair: pair[1], default=None)

    def summary(self) -> str:
        """Return one line that says what runs, and its memory and time."""
        return wording.summary(self)

    def words_for_peak(self) -> str:
        """Return the expected peak in words, with the upper bound where that is much more."""
        return wording.peak(self)

    def __str__(self) -> str:
        return wording.told(self)

    def diff(self, other: Plan) -> dict[str, tuple[Any, Any]]:
        """Return the fields in which two plans differ, as a dict from name to (here, there)."""
        pairs = ((f.name, getattr(self, f.name), getattr(other, f.name)) for f in dataclasses.fields(self))
        return {name: (here, there) for name, here, there in pairs if here != there}

    def to_json(self) -> str:
        """Return the plan as JSON that people can read and edit."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the plan to a JSON file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan from a JSON file. Raises PlanFileError for a file that is damaged, not a plan, or of a later version."""
        try:
            text = text_of(Path(path))
        except (OSError, ValueError) as error:  # ValueError: not text, or an impossible file name
            raise unreadable(path, str(error)) from error
        return Plan.from_json(text, source=str(path))

    @staticmethod
    def from_json(text: str, source: str = "the text") -> Plan:
        """Read a plan from JSON. Raises PlanFileError."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise unreadable(source, f"it is not JSON ({error})") from error
        if not isinstance(data, dict) or "micro_batch" not in data:
            raise unreadable(source, "it is JSON, but not a plan")
        if isinstance(data.get("version"), int) and data["version"] > VERSION:
            raise PlanFileError(
                f"reading the plan {source}",
                found=f"it has version {data['version']}, but this memfit knows versions up to {VERSION}",
                next_move="update memfit, or plan again",
            )
        return _consistent(built(Plan, data, source))

    def export(self, tool: str) -> str:
        """Export the plan as code for another tool: "torch", "accelerate", "transformers" or "lightning". Comments in it say
        what that tool cannot express. Raises UsageError for other names."""
        from memfit.planning.export import EXPORTS

        if tool not in EXPORTS:
            raise UsageError(f"export({tool!r})", found="no such tool", next_move=f"use one of {', '.join(EXPORTS)}")
        return EXPORTS[tool](self)

    def _repr_html_(self) -> str:
        from html import escape

        return f"<pre>{escape(str(self))}</pre>"


def _consistent(plan: Plan) -> Plan:
    """Recompute accumulation and mode of a plan whose micro-batch was edited by hand."""
    accumulation = -(-plan.share // plan.micro_batch)
    if accumulation == plan.accumulation or plan.by_size:
        return plan
    mode = "whole" if accumulation == 1 else "accumulate" if plan.mode == "whole" else plan.mode
    return replace(plan, accumulation=accumulation, mode=mode)


def _reason_now(option: Option, measured: bool, best: float | None, drift: float) -> str:
    """Why an option is rejected once others were measured. `best` are the chosen option's seconds. Seconds that were timed
    during planning count `drift` times."""
    planned = option.cost.seconds
    if not option.fits:
        return option.reason
    if planned is None or best is None:
        return option.reason or "was in force before"
    slower = (planned if measured else planned * drift) / best - 1
    how = "measured while training" if measured else "estimated"
    if abs(slower) <= 0.02:
        return f"as fast, {how}"
    return f"{slower:.0%} slower, {how}" if slower > 0 else f"{-slower:.0%} faster, {how}"
