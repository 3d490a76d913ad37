"""The facts of a report: small frozen values, in bytes, seconds and names.

Nothing here knows how it is printed. Not covered: the plan, a value in `planning/plan.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from memfit.planning.plan import RankPlan


@dataclass(frozen=True)
class Allowance:
    """The memory budget of the training at the time of the report."""

    limit: int
    """Bytes the process may hold."""
    margin: int
    """Bytes of the limit kept free."""
    source: str
    """Where the limit comes from, in words."""
    device: str
    """The device's name."""
    kind: str
    """cpu, cuda, mps or xpu."""
    notes: tuple[str, ...] = ()
    """What the reader should know about these numbers."""
    here: bool = True
    """False for a device from the catalogue, on which nothing can be measured."""


@dataclass(frozen=True)
class Pace:
    """The measured time and peak memory of training."""

    steps: int
    """Optimizer steps done."""
    seconds: tuple[float, ...]
    """Seconds of each of the last optimizer steps."""
    waits: tuple[float, ...]
    """Seconds of waiting for each of the last batches from the loader."""
    samples_per_second: float | None
    """Samples per second in the last step; None if not known."""
    peak: int | None
    """Peak bytes held, on the budget's scale; None where the platform cannot tell."""


@dataclass(frozen=True)
class PhasePeak:
    """The memory peak of one phase of the step."""

    phase: str
    """input, forward, backward, hand over (accumulated gradients go to autograd) or optimizer."""
    micro_batch: int
    """The drawn micro-batch it lies in, counted from 1; 0 outside them."""
    start: int
    """The event at which the phase begins, as the curve counts events."""
    where: str
    """The module that allocates at that moment; "" outside any."""
    holds: tuple[tuple[str, int], ...]
    """Allocated bytes at that moment, by category."""

    @property
    def total(self) -> int:
        """Allocated bytes at that moment."""
        return sum(size for _, size in self.holds)


@dataclass(frozen=True)
class Curve:
    """Allocated bytes of tensors over one optimizer step, by category, at a selection of events."""

    samples: int
    """Samples per micro-batch."""
    micro_batches: int
    """Micro-batches drawn: with gradient accumulation, 2 stand for all."""
    events: tuple[int, ...]
    """The points' positions: allocations and frees of tensors, counted from the step's start."""
    layers: tuple[tuple[str, tuple[int, ...]], ...]
    """(category, bytes at each point), from the bottom up."""
    moments: tuple[PhasePeak, ...]
    """Each phase's peak, in order."""

    @property
    def totals(self) -> tuple[int, ...]:
        """Allocated bytes at each point."""
        return tuple(sum(sizes) for sizes in zip(*(sizes for _, sizes in self.layers)))

    @property
    def peak(self) -> PhasePeak:
        """The peak of the whole step."""
        return max(self.moments, key=lambda moment: moment.total)


@dataclass(frozen=True)
class BlockCost:
    """The memory and recomputation time of one block of the model."""

    name: str
    """The block's name; "" is everything outside the blocks."""
    kept: int
    """Bytes that its forward saves for backward, per micro-batch."""
    transient: int
    """Peak bytes of its temporary tensors, per micro-batch."""
    recompute: float | None = None
    """Seconds per optimizer step to recompute its forward; None if not timed."""
    checkpointed: str = ""
    """Who checkpoints it: memfit, the script, or "" for nobody."""


@dataclass(frozen=True)
class Offer:
    """An alternative choice of one lever, compared with the plan."""

    lever: str
    """micro-batch, checkpoint or precision; budget for what more memory would allow."""
    micro_batch: int
    """Samples per forward."""
    accumulation: int
    """Micro-batches per optimizer step."""
    checkpoint: int
    """Blocks checkpointed."""
    precision: str
    """off, or the dtype of autocast."""
    block: str
    """The block it concerns; "" for none."""
    more: int
    """Its upper bound in bytes minus the plan's."""
    seconds: float | None
    """Its seconds per optimizer step minus the plan's; None if not known."""
    missing: int
    """Bytes it lacks; 0 if it fits."""


@dataclass(frozen=True)
class BatchChange:
    """An effective batch other than the script's, with the learning rates used for it."""

    before: int
    """Samples per optimizer step over all ranks, as the script asked."""
    now: int
    """Samples per optimizer step over all ranks, with memfit."""
    rates: tuple[float, ...]
    """The distinct learning rates of the optimizer's parameter groups, unchanged."""

    @property
    def factor(self) -> float:
        """The ratio of this batch to the script's."""
        return self.now / self.before


@dataclass(frozen=True)
class RankFacts:
    """The state of one rank, as of the last exchange among the ranks."""

    rank: int
    """The rank."""
    host: str
    """The machine's name."""
    device: str
    """The device's name."""
    limit: int
    """Bytes it may hold."""
    steps: int
    """Optimizer steps done by then."""
    plan: RankPlan | None
    """How it runs its share; None until it has planned."""
    peak: int | None
    """Peak bytes it held, on the budget's scale; None where not known."""
    computing: float | None
    """Seconds per step in its micro-batches: the median of the latest steps; None where not timed."""
    exchange: float | None
    """Seconds per step of waiting for the other ranks and reducing the gradients; median and None as above."""
    ran_out: int
    """Number of out-of-memory errors on it."""
    latest: str = ""
    """The message of the latest of these errors."""


@dataclass(frozen=True)
class Happening:
    """An event during planning or training."""

    step: int
    """Optimizer steps done before it."""
    kind: str
    """plan, replan, out of memory, not equal or note."""
    message: str
    """What happened, in one sentence."""
