"""What a report is made of: small frozen values, in bytes, seconds and names.

Nothing here knows how it is printed. Not covered: the plan, which is a value of its own (`planning/plan.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from memfit.planning.plan import RankPlan


@dataclass(frozen=True)
class Allowance:
    """The memory the training may have, as it was when the report was made."""

    limit: int
    """Bytes the process may hold."""
    margin: int
    """Bytes of it kept free."""
    source: str
    """Where the limit comes from, in words."""
    device: str
    """The device's name."""
    kind: str
    """cpu, cuda, mps or xpu."""
    notes: tuple[str, ...] = ()
    """What the reader should know about these numbers."""
    here: bool = True
    """False for a device of the catalogue: nothing was or can be measured on it."""


@dataclass(frozen=True)
class Pace:
    """How long training took, as measured."""

    steps: int
    """Optimizer steps done."""
    seconds: tuple[float, ...]
    """Seconds of each of the last optimizer steps."""
    waits: tuple[float, ...]
    """Seconds that each of the last batches was waited for."""
    samples_per_second: float | None
    """Samples per second in the last step; None if not known."""
    peak: int | None
    """Most bytes held, on the budget's scale; None where the platform cannot tell."""


@dataclass(frozen=True)
class Moment:
    """The fullest moment of a phase of the step."""

    phase: str
    """input, forward, backward, hand over or optimizer."""
    micro_batch: int
    """Which of the drawn micro-batches it lies in, counted from 1; 0 outside of them."""
    start: int
    """Where the phase begins, in the curve's own counting of events."""
    where: str
    """The module that allocates at that moment; "" outside any."""
    holds: tuple[tuple[str, int], ...]
    """Bytes alive at that moment, by category."""

    @property
    def total(self) -> int:
        """Bytes alive at that moment."""
        return sum(size for _, size in self.holds)


@dataclass(frozen=True)
class Curve:
    """Bytes of tensors alive over one optimizer step, by category, at events worth drawing."""

    samples: int
    """Samples per micro-batch."""
    micro_batches: int
    """Micro-batches drawn: 2 stand for all of a step that accumulates."""
    events: tuple[int, ...]
    """Where the points lie: births and deaths of tensors, counted from the step's start."""
    layers: tuple[tuple[str, tuple[int, ...]], ...]
    """(category, bytes at each point), from the bottom up."""
    moments: tuple[Moment, ...]
    """The phases in order, each at its fullest."""

    @property
    def totals(self) -> tuple[int, ...]:
        """Bytes alive at each point."""
        return tuple(sum(sizes) for sizes in zip(*(sizes for _, sizes in self.layers)))

    @property
    def peak(self) -> Moment:
        """The fullest moment of all."""
        return max(self.moments, key=lambda moment: moment.total)


@dataclass(frozen=True)
class BlockCost:
    """What one block of the model takes in one micro-batch."""

    name: str
    """The block's name; "" is everything outside the blocks."""
    kept: int
    """Bytes that its forward leaves saved for backward."""
    transient: int
    """Most bytes at once that come and go while it computes."""
    recompute: float | None = None
    """Seconds per optimizer step that running its forward once more takes; None if not timed."""
    checkpointed: str = ""
    """"" if it is not; by memfit; by the script."""


@dataclass(frozen=True)
class Offer:
    """Another choice of one lever, against the plan."""

    lever: str
    """micro-batch, checkpoint, precision; or budget, for what more memory would allow."""
    micro_batch: int
    """Samples per forward."""
    accumulation: int
    """Micro-batches per optimizer step."""
    checkpoint: int
    """Blocks checkpointed."""
    precision: str
    """off, or what autocast would compute in."""
    block: str
    """The block it is about; "" if it is about none."""
    more: int
    """Bytes that it may come to need beyond what the plan may."""
    seconds: float | None
    """Seconds per optimizer step that it takes beyond the plan's; None if not known."""
    missing: int
    """Bytes that are not there for it; 0 if it fits."""


@dataclass(frozen=True)
class BatchChange:
    """Another batch than the script had, and the learning rates it is trained with."""

    before: int
    """Samples per optimizer step over all processes, as the script asked."""
    now: int
    """Samples per optimizer step over all processes, with memfit."""
    rates: tuple[float, ...]
    """Learning rates of the optimizer's parameter groups, as they are; those that are alike once."""

    @property
    def factor(self) -> float:
        """How many times the script's batch this one is."""
        return self.now / self.before


@dataclass(frozen=True)
class RankFacts:
    """One of several processes, as it was when they last told each other."""

    rank: int
    """Its number."""
    host: str
    """The machine's name."""
    device: str
    """The device's name."""
    limit: int
    """Bytes it may hold."""
    steps: int
    """Optimizer steps done then."""
    plan: RankPlan | None
    """How it runs its share; None as long as it has not planned."""
    peak: int | None
    """Most bytes it held, on the budget's scale; None where that is not known."""
    computing: float | None
    """Seconds per step in its micro-batches, the median of the latest; None where they were not timed."""
    exchange: float | None
    """Seconds per step until all had gathered their gradients and those were added up, likewise."""
    ran_out: int
    """How often memory ran out on it."""
    latest: str = ""
    """What was said when it last did."""


@dataclass(frozen=True)
class Happening:
    """One thing that happened on the way."""

    step: int
    """Optimizer steps done before it."""
    kind: str
    """plan, replan, out of memory, not equal, note."""
    message: str
    """What happened, in one sentence."""
