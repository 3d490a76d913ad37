"""The cost of one optimizer step as numbers: everything the planner needs, whether traced, measured or modelled.

Pure values: a Profile holds no tensor and no module. Not covered: time on a device that is not present.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from memfit._units import format_bytes, format_count, format_seconds
from memfit.hardware.catalogue import Card
from memfit.profiling.allocator import HEAP_WASTE, Peak, peak_on, thresholds_pinned
from memfit.profiling.heap_pages import in_pages
from memfit.profiling.intervals import GIVEN_BACK, Interval
from memfit.profiling.loop import MEMFITS, Loop
from memfit.profiling.seconds import Timing
from memfit.profiling.timeline import CATEGORIES, Timeline, fit

if TYPE_CHECKING:
    from memfit.profiling.explain import Explanation
    from memfit.profiling.tree import ModuleTree

HIDDEN_SHARE = 0.1
"""If a micro-batch exceeds its tensors by more than this share of them, its kernels are taken to allocate hidden memory
(transformers exceed them by 3 %, convolutions by 50 % for 2 samples)."""
NOISE = 64 << 10
"""Bytes by which a measurement may exceed the trace without a sign of hidden memory: the kernel counts pages in batches."""

MEASURED_WASTE = 0.4
"""Share of its measured growth by which a micro-batch may grow further in training, where the C library's heap keeps freed
memory: the heap is emptied before timing, and in training other sizes and lengths fragment it. Measured: up to 0.24 for a GRU
with batches of 20 to 44 frames, 0.27 for a VAE, 0.29 for convolutions, 0.32 for a small MLP."""


@dataclass(frozen=True)
class ModelFacts:
    """Identifies a model and its optimizer to a plan."""

    name: str
    """The model's class."""
    parameters: int
    """Elements in its parameters, shared ones once."""
    trainable: int
    """Elements that receive gradients."""
    parameter_bytes: int
    """Bytes of parameters and buffers."""
    gradient_bytes: int
    """Bytes of one full set of gradients."""
    optimizer: str
    """The optimizer's class, and whether its step is fused."""
    fingerprint: str
    """A digest of parameter names, shapes, dtypes and the optimizer's class."""


@dataclass(frozen=True)
class ModuleFacts:
    """One module of a model, without its children."""

    name: str
    """Its dotted name; "" for the model itself."""
    kind: str
    """Its class."""
    parameters: int
    """Elements in its own parameters; shared ones count where they come first."""
    trainable: int
    """Elements that receive gradients."""


@dataclass(frozen=True)
class Profile:
    """The cost of a step, for any micro-batch size."""

    model: ModelFacts
    """The model and optimizer of the step."""
    device: str
    """Device type: cpu, cuda, ..."""
    capability: tuple[int, int] | None
    """Compute capability of a CUDA device."""
    precision: str
    """Precision the step computes in."""
    precision_is_lever: bool
    """Whether memfit's autocast set that precision, and not the script."""
    checkpoint: tuple[str, ...]
    """Blocks under activation checkpointing in this step."""
    timeline: Timeline | None
    """The traced step for any size; None if the trace is not affine in the size, or could not be made."""
    points: tuple[tuple[int, int], ...]
    """(samples, peak bytes) as traced or measured, ascending."""
    peaks: tuple[tuple[int, Peak], ...] = ()
    """(samples, peak) computed for single sizes, ascending; used instead of `points`."""
    source: str = "traced"
    """traced; traced at single sizes; or measured."""
    standing: int = 0
    """If measured: bytes of parameters, gradients and optimizer state. Micro-batches add to them."""
    stepping: int = 0
    """If measured: temporary bytes of the optimizer step besides these."""
    blocks: tuple[str, ...] = ()
    """Blocks that can be checkpointed."""
    script_blocks: tuple[str, ...] = ()
    """Blocks that the script checkpoints itself."""
    written_buffers: tuple[str, ...] = ()
    """Buffers that a training forward writes."""
    timings: tuple[Timing, ...] = ()
    """Timed micro-batches, one per size."""
    optimizer_seconds: float = 0.0
    """Seconds of the optimizer step."""
    excess: tuple[tuple[int, int], ...] = ()
    """(samples, bytes) by which measured micro-batches exceed the trace: mostly scratch memory inside kernels."""
    single: Timeline | None = None
    """The step with one sample per micro-batch, if traced separately: some operators treat one sample differently."""
    kept_per_size: int = 0
    """Bytes that remain after the first micro-batch of every size: kernels created for that size."""
    without_rule: tuple[str, ...] = ()
    """Operations whose kernels allocate scratch memory that no rule predicts: predictions with them are less certain."""
    notes: tuple[str, ...] = ()
    """What the reader should know about these numbers."""
    heap_waste: float = HEAP_WASTE
    """What the C library's heap may keep beyond its tensors, as a share of their bytes."""
    modules: tuple[ModuleFacts, ...] = ()
    """The model's modules, parents first; empty if not recorded."""
    card: Card | None = None
    """The GPU of the profile, if that is not present."""
    accumulate_in: str = "float32"
    """Dtype in which gradients of half-precision parameters accumulate: float32, or param for their own."""
    interval: Interval | None = None
    """Error bounds of predictions where nothing can be measured."""
    loop: Loop = MEMFITS
    """What the script's own loop does around forward and backward."""
    evaluated: Timeline | None = None
    """An evaluation with batches of any size; None if not requested, or not traceable."""

    def peak(self, micro_batch: int, *, accumulates: bool = True) -> Peak:
        """Returns the peak of a step with micro-batches of `micro_batch` samples, parameters included.

        With `accumulates=False` the step has one micro-batch, so gradients come into existence during it. Raises UsageError for
        an invalid number of samples.
        """
        if type(micro_batch) is not int or not 0 < micro_batch < 1 << 40:
            from memfit.profiling.tree import check_samples

            check_samples(micro_batch)
        timeline = self.traced_at(micro_batch)
        if timeline is not None:
            return self.priced(timeline, micro_batch, accumulates=accumulates)
        if self.peaks:
            return next((peak for n, peak in self.peaks if n >= micro_batch), self.peaks[-1][1])
        size = max(self.standing + self.stepping, _interpolated(self.points, micro_batch))
        return Peak(size, size, size + self._more_than_measured(size), size - size // 8)

    @property
    def batch_norms(self) -> tuple[str, ...]:
        """Modules whose training forward writes running statistics of its batch, as far as the trace shows."""
        ends = ".running_mean"
        return tuple(name.removesuffix(ends) for name in self.written_buffers if name.endswith(ends))

    @property
    def optimizer_bytes(self) -> int | None:
        """Bytes of optimizer state; None if only whole steps are known."""
        if self.timeline is not None:
            return int(self.timeline.fixed[self.timeline.category == CATEGORIES.index("optimizer")].sum())
        return self.standing - self.model.parameter_bytes - self.model.gradient_bytes if self.standing else None

    def traced_at(self, micro_batch: int) -> Timeline | None:
        """Returns the timeline for this micro-batch size, if there is one."""
        return self.timeline if micro_batch > 1 or self.timeline is None else self.single or self.timeline

    def priced(self, timeline: Timeline, micro_batch: int, *, accumulates: bool = True) -> Peak:
        """Returns the peak of a timeline of this step with other levers, corrected by what was measured."""
        taken = in_pages(timeline, micro_batch) if self._gives_back() else timeline
        peak = peak_on(
            self.device, taken, micro_batch, accumulates=accumulates, capability=self.capability, waste=self.heap_waste
        )
        if taken is not timeline:
            peak = replace(peak, allocated=timeline.peak(micro_batch, accumulates=accumulates))
        peak = peak.plus(self.excess_at(micro_batch))
        interval = GIVEN_BACK if self.interval is None and self._gives_back() else self.interval
        return peak if interval is None else peak.within(interval)

    def evaluation(self, samples: int | None = None, *, micro_batch: int | None = None) -> Peak:
        """Returns the peak of an evaluation with batches of `samples` (None: the requested size).

        The peak includes parameters, optimizer state and the gradients that `zero_grad` left. `micro_batch` is the size used in
        training before: what a plain loop's variables still hold of it is included, too. Raises UsageError for an invalid
        number of samples, and if no evaluation was traced.
        """
        from memfit.profiling.phases import evaluation_peak

        return evaluation_peak(self, samples, micro_batch)

    def explain(self, micro_batch: int, *, accumulates: bool = True) -> Explanation:
        """Explains the peak with micro-batches of `micro_batch` samples: its point in the step, and the tensors alive there.

        Raises UsageError for an invalid number of samples. For a measured profile, it says that no tensor was followed.
        """
        from memfit.profiling.explain import explain

        return explain(self, micro_batch, accumulates=accumulates)

    def tree(self, micro_batch: int, *, accumulates: bool = True) -> ModuleTree:
        """Returns the costs of all modules, nested like the modules, with micro-batches of `micro_batch` samples. Raises
        UsageError for an invalid number of samples."""
        from memfit.profiling.tree import module_tree

        return module_tree(self, micro_batch, accumulates=accumulates)

    def excess_at(self, micro_batch: int) -> int:
        """Returns the bytes to add to the trace at that size. Between measured sizes they are interpolated; beyond the last
        they follow the line through the last two. (Not the steepest line: the excess jumps where kernels change between one and
        two samples.) If one size was measured and kernels take much, they are proportional to the size. They are never below
        those of a smaller size, which may have freed memory that a larger one reused, unless freed memory goes back at once."""
        if not self.excess:
            return 0
        least = 0 if self._gives_back() else max((more for n, more in self.excess if n <= micro_batch), default=0)
        slope = 0.0
        for (low, at_low), (high, at_high) in itertools.pairwise(self.excess):
            slope = (at_high - at_low) / (high - low)
            if low <= micro_batch <= high:
                return max(least, int(at_low + slope * (micro_batch - low)))
        (first, at_first), (last, at_last) = self.excess[0], self.excess[-1]
        if micro_batch <= first:
            return at_first
        if len(self.excess) == 1 and self.takes_much(first, at_first):
            slope = at_first / first
        return max(least, int(at_last + max(0.0, slope) * (micro_batch - last)))

    def added_by(self, samples: int) -> int:
        """Returns the bytes that a micro-batch of that many samples adds, at its peak, to the memory held before it."""
        timeline = self.traced_at(samples)
        if timeline is not None:
            return timeline.growth(samples) + self.excess_at(samples)
        return max(0, self.peak(samples).expected - (self.standing or self.model.parameter_bytes))

    def takes_much(self, samples: int, more: int) -> bool:
        """Whether `more` bytes beyond the trace of that size count as scratch memory of kernels."""
        return self.timeline is not None and more > HIDDEN_SHARE * self.timeline.growth(samples)

    def kept_for(self, sizes: Iterable[int]) -> int:
        """Returns the bytes that kernels for micro-batches of these sizes will keep, for sizes that have not run."""
        return self.kept_per_size * len(set(sizes) - {timing.samples for timing in self.timings})

    def __str__(self) -> str:
        model = self.model
        lines = [
            f"memfit profile of {model.name} ({format_count(model.parameters)} parameters) with {model.optimizer} on "
            f"{self.device}, {self.precision}, {self.source}",
            f"  held anyway       parameters {format_bytes(model.parameter_bytes)}, gradients "
            f"{format_bytes(model.gradient_bytes)}, {self._state()}",
        ]
        lines += [f"  the loop          {self.loop}"] if str(self.loop) else []
        lines += [f"  micro-batch {n:<5} {self._of_size(n)}" for n in self._shown()]
        if self.evaluated is not None and self.loop.evaluation is not None:
            lines.append(f"  evaluation {self.loop.evaluation:<6} {format_bytes(self.evaluation().expected)}")
        if self.optimizer_seconds:
            lines.append(f"  optimizer's step  {format_seconds(self.optimizer_seconds)}")
        if self.blocks:
            names = f"{self.blocks[0]} to {self.blocks[-1]}"
            lines.append(f"  blocks            {len(self.blocks)} that could be checkpointed: {names}")
        if self.script_blocks:
            lines.append(f"  checkpointed      {len(self.script_blocks)} by the script itself")
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    def _state(self) -> str:
        known = self.optimizer_bytes
        return "optimizer's state unknown" if known is None else f"optimizer's state {format_bytes(known)}"

    def _shown(self) -> tuple[int, ...]:
        measured = [t.samples for t in self.timings if t.growth is not None]
        known = measured or [n for n, _ in self.points] or [n for n, _ in self.peaks]
        return tuple(known) if measured or self.timeline is None else (1, 2, 4, 8, 16)

    def _of_size(self, samples: int) -> str:
        peak = self.peak(samples)
        at_most = f", at most {format_bytes(peak.upper)}" if peak.upper > peak.expected else ""
        timing = next((t for t in self.timings if t.samples == samples), None)
        took = "" if timing is None else f", {format_seconds(timing.seconds)}"
        took += f" (from micro-batches of {timing.told_from})" if timing is not None and timing.told_from else ""
        return f"{format_bytes(peak.expected)}{at_most}{took}"

    def with_timings(self, timings: tuple[Timing, ...], optimizer_seconds: float) -> Profile:
        """Returns this profile with measured times, corrected where more memory was measured than traced."""
        return replace(
            self,
            timings=timings,
            optimizer_seconds=optimizer_seconds,
            excess=self._excess_of(timings),
            kept_per_size=max((t.kept for t in timings), default=0),
            points=self._points_with(timings) if self.source == "measured" else self.points,
        )

    def with_single(self, single: Timeline) -> Profile:
        """Returns this profile with a separate trace of one sample per micro-batch, which explains part of the excess there."""
        found = replace(self, single=single)
        if self.timeline is None or not self.excess or self.excess[0][0] != 1:
            return found
        less = single.growth(1) - self.timeline.growth(1)
        return replace(found, excess=((1, max(0, self.excess[0][1] - less)), *self.excess[1:]))

    def _excess_of(self, timings: tuple[Timing, ...]) -> tuple[tuple[int, int], ...]:
        measured = []
        for timing in timings:
            traced = self.traced_at(timing.samples)
            if traced is not None and timing.growth is not None:
                traced = in_pages(traced, timing.samples) if self._gives_back() else traced
                measured.append((timing.samples, timing.growth - timing.kept - traced.growth(timing.samples)))
        return tuple((n, max(0, more)) for n, more in measured) if any(more > NOISE for _, more in measured) else ()

    def _gives_back(self) -> bool:
        """Whether freed memory goes back at once, so that held memory follows the tensors page by page."""
        return self.device == "cpu" and thresholds_pinned()

    def _more_than_measured(self, size: int) -> int:
        """Bytes by which training may exceed a measured peak of `size`."""
        kept = 0.0 if self.device != "cpu" or thresholds_pinned() else MEASURED_WASTE * (size - self.standing)
        return max(size // 8, int(kept))

    def _points_with(self, timings: tuple[Timing, ...]) -> tuple[tuple[int, int], ...]:
        """The points, updated with these measurements; no size takes less than a smaller one."""
        known = dict(self.points)
        for timing in timings:
            known[timing.samples] = max(known.get(timing.samples, 0), self.standing + (timing.growth or 0) - timing.kept)
        least, found = self.standing, []
        for samples in sorted(known):
            least = max(least, known[samples])
            found.append((samples, least))
        return tuple(found)


def affine(small: Timeline, large: Timeline, third: Timeline, sizes: tuple[int, int, int]) -> Timeline | None:
    """Fits one timeline for all sizes to two; None unless it gives, to the byte, the peak of a step with a single micro-batch
    of the third size."""
    whole = fit(small, sizes[0], large, sizes[1])
    if whole is None or whole.peak(sizes[2], accumulates=False) != third.peak(sizes[2]):
        return None
    return whole


def _interpolated(points: tuple[tuple[int, int], ...], samples: int) -> int:
    """The peak between, below or beyond known points. Beyond the last it follows the line through the last and one with at most
    half as many samples, if there is one: neighbors differ by less than the noise of a measurement."""
    if len(points) == 1:
        return int(points[0][1] * max(1.0, samples / points[0][0]))
    for (low, at_low), (high, at_high) in itertools.pairwise(points):
        if samples <= high:
            return int(at_low + (at_high - at_low) / (high - low) * max(0, samples - low))
    last, at_last = points[-1]
    half, at_half = next(((n, size) for n, size in reversed(points) if 2 * n <= last), points[0])
    return int(at_last + max(0.0, (at_last - at_half) / (last - half)) * (samples - last))
