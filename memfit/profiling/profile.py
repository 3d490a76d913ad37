"""The cost of one optimizer step as numbers: what the planner needs, whatever it was got from.

Pure values: a Profile holds no tensor and no module. Not covered: time on a device that is not here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace

from memfit._units import format_bytes, format_count, format_seconds
from memfit.profiling.allocator import HEAP_WASTE, Peak, peak_on
from memfit.profiling.seconds import Timing
from memfit.profiling.timeline import Timeline, fit

NOISE = 64 << 10
"""Bytes up to which more measured than traced is no sign of hidden memory: the kernel counts in pages, some at a time."""


@dataclass(frozen=True)
class ModelFacts:
    """What identifies a model and its optimizer to a plan."""

    name: str
    """The model's class."""
    parameters: int
    """Elements in its parameters, shared ones once."""
    trainable: int
    """Those that receive gradients."""
    parameter_bytes: int
    """Bytes of parameters and buffers."""
    gradient_bytes: int
    """Bytes of one full set of gradients."""
    optimizer: str
    """The optimizer's class."""
    fingerprint: str
    """A digest of parameter names, shapes, dtypes and the optimizer's class."""


@dataclass(frozen=True)
class Profile:
    """What a step costs, for any micro-batch size."""

    model: ModelFacts
    """The model and optimizer it is about."""
    device: str
    """Kind of device: cpu, cuda, ..."""
    capability: tuple[int, int] | None
    """Compute capability of a CUDA device."""
    precision: str
    """The precision it was taken in."""
    precision_is_lever: bool
    """Whether memfit's autocast made it so, and not the script."""
    checkpoint: tuple[str, ...]
    """Blocks that were checkpointed while it was taken."""
    timeline: Timeline | None
    """The traced step for any size, or None where the trace is not affine in the size or could not be made."""
    points: tuple[tuple[int, int], ...]
    """(samples, peak bytes) as traced or measured, ascending."""
    peaks: tuple[tuple[int, Peak], ...] = ()
    """(samples, peak) where peaks were worked out for single sizes, ascending; used instead of `points`."""
    source: str = "traced"
    """traced; traced at single sizes; or measured."""
    standing: int = 0
    """Where it was measured: bytes of parameters, gradients and optimizer state, on which micro-batches come."""
    blocks: tuple[str, ...] = ()
    """Blocks that could be checkpointed."""
    script_blocks: tuple[str, ...] = ()
    """Blocks that the script checkpoints itself."""
    written_buffers: tuple[str, ...] = ()
    """Buffers that training forwards write."""
    timings: tuple[Timing, ...] = ()
    """Micro-batches as timed, one per size."""
    optimizer_seconds: float = 0.0
    """Seconds of the optimizer's step."""
    excess: tuple[tuple[int, int], ...] = ()
    """(samples, bytes) by which measured micro-batches exceeded the trace: scratch inside kernels, mostly."""
    kept_per_size: int = 0
    """Bytes that stay with the first micro-batch of every size: kernels made for it."""
    without_rule: tuple[str, ...] = ()
    """Operations whose kernels allocate what no rule tells: predictions with them are less sure."""
    notes: tuple[str, ...] = ()
    """What the reader should know about these numbers."""
    heap_waste: float = HEAP_WASTE
    """How much of its heap the C library may keep beyond the tensors in it."""

    def peak(self, micro_batch: int, *, accumulates: bool = True) -> Peak:
        """The peak of a step with micro-batches of that many samples, parameters and all included.

        `accumulates=False`: with a single micro-batch, during which gradients are only being born.
        """
        if self.timeline is not None:
            return self.priced(self.timeline, micro_batch, accumulates=accumulates)
        if self.peaks:
            return next((peak for n, peak in self.peaks if n >= micro_batch), self.peaks[-1][1])
        size = _interpolated(self.points, micro_batch)
        return Peak(size, size, size + size // 8)

    def priced(self, timeline: Timeline, micro_batch: int, *, accumulates: bool = True) -> Peak:
        """The peak of a timeline of this step with other levers, corrected by what was measured."""
        peak = peak_on(
            self.device, timeline, micro_batch, accumulates=accumulates, capability=self.capability, waste=self.heap_waste
        )
        return peak.plus(self.excess_at(micro_batch))

    def excess_at(self, micro_batch: int) -> int:
        """Bytes to add to the trace at that size: between measured sizes by a line, and never less than at a smaller one;
        beyond the last by the line through the last two. (Not by the steepest: where kernels change between one sample and
        two, what they take jumps there.)"""
        if not self.excess:
            return 0
        least = max((more for n, more in self.excess if n <= micro_batch), default=self.excess[0][1])
        slope = 0.0
        for (low, at_low), (high, at_high) in itertools.pairwise(self.excess):
            slope = (at_high - at_low) / (high - low)
            if low <= micro_batch <= high:
                return max(least, int(at_low + slope * (micro_batch - low)))
        last, at_last = self.excess[-1]
        return least if micro_batch <= last else max(least, int(at_last + slope * (micro_batch - last)))

    def kept_for(self, sizes: Iterable[int]) -> int:
        """Bytes that kernels for micro-batches of these sizes will keep, as far as they have not run."""
        return self.kept_per_size * len(set(sizes) - {timing.samples for timing in self.timings})

    def __str__(self) -> str:
        model = self.model
        lines = [
            f"memfit profile of {model.name} ({format_count(model.parameters)} parameters) with {model.optimizer} on "
            f"{self.device}, {self.precision}, {self.source}",
            f"  held anyway       parameters {format_bytes(model.parameter_bytes)}, gradients "
            f"{format_bytes(model.gradient_bytes)}",
        ]
        lines += [f"  micro-batch {n:<5} {self._of_size(n)}" for n in self._shown()]
        if self.optimizer_seconds:
            lines.append(f"  optimizer's step  {format_seconds(self.optimizer_seconds)}")
        if self.blocks:
            names = f"{self.blocks[0]} to {self.blocks[-1]}"
            lines.append(f"  blocks            {len(self.blocks)} that could be checkpointed: {names}")
        if self.script_blocks:
            lines.append(f"  checkpointed      {len(self.script_blocks)} by the script itself")
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    def _shown(self) -> tuple[int, ...]:
        measured = [t.samples for t in self.timings if t.growth is not None]
        known = measured or [n for n, _ in self.points] or [n for n, _ in self.peaks]
        return tuple(known) if measured or self.timeline is None else (1, 2, 4, 8, 16)

    def _of_size(self, samples: int) -> str:
        peak = self.peak(samples)
        at_most = f", at most {format_bytes(peak.upper)}" if peak.upper > peak.expected else ""
        took = next((f", {format_seconds(t.seconds)}" for t in self.timings if t.samples == samples), "")
        return f"{format_bytes(peak.expected)}{at_most}{took}"

    def with_timings(self, timings: tuple[Timing, ...], optimizer_seconds: float) -> Profile:
        """The same with measured times, and corrected where more memory was measured than traced."""
        excess: tuple[tuple[int, int], ...] = ()
        if self.timeline is not None:
            traced = self.timeline
            measured = [(t.samples, t.growth - t.kept - traced.growth(t.samples)) for t in timings if t.growth is not None]
            excess = tuple((n, max(0, more)) for n, more in measured) if any(more > NOISE for _, more in measured) else ()
        kept = max((t.kept for t in timings), default=0)
        return replace(
            self,
            timings=timings,
            optimizer_seconds=optimizer_seconds,
            excess=excess,
            kept_per_size=kept,
            points=self._points_with(timings) if self.source == "measured" else self.points,
        )

    def _points_with(self, timings: tuple[Timing, ...]) -> tuple[tuple[int, int], ...]:
        """The points and what these measured; no size takes less than a smaller one, or than the optimizer's step, which may
        need another copy of the parameters while it computes (foreach, the default)."""
        known = dict(self.points)
        for timing in timings:
            known[timing.samples] = max(known.get(timing.samples, 0), self.standing + (timing.growth or 0))
        least, found = self.standing + self.model.gradient_bytes, []
        for samples in sorted(known):
            least = max(least, known[samples])
            found.append((samples, least))
        return tuple(found)


def affine(small: Timeline, large: Timeline, third: Timeline, sizes: tuple[int, int, int]) -> Timeline | None:
    """One timeline for all sizes from two, if it gives the peak of a step with a single micro-batch of the third size to
    the byte; else None."""
    whole = fit(small, sizes[0], large, sizes[1])
    if whole is None or whole.peak(sizes[2], accumulates=False) != third.peak(sizes[2]):
        return None
    return whole


def _interpolated(points: tuple[tuple[int, int], ...], samples: int) -> int:
    """The peak between, below or beyond known points; beyond the last by the steepest slope seen."""
    if len(points) == 1:
        return int(points[0][1] * max(1.0, samples / points[0][0]))
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.pairwise(points)]
    for (low, at_low), slope, (high, _) in zip(points, slopes, points[1:]):
        if samples <= high:
            return int(at_low + slope * (samples - low)) if samples >= low else at_low
    last, at_last = points[-1]
    return int(at_last + max(0.0, *slopes) * (samples - last))
