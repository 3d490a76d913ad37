"""Explains the peak memory of a step: the operation at which the most bytes are alive, and what these bytes are.

Pure values from a Profile. The moment is where the most bytes of tensors are alive; the caching allocator of a GPU may reach
its peak a little later. Not covered: memory outside tensors, except for its size.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from memfit.profiling.allocator import Peak
from memfit.profiling.describe import NAMES, explanation_lines
from memfit.profiling.timeline import CATEGORIES, Timeline
from memfit.profiling.tree import ITSELF, ModuleCost, check_samples, module_tree, together, unfollowed

if TYPE_CHECKING:
    from memfit.profiling.profile import Profile

MODULES, TENSORS = 16, 10
"""Maximum number of modules, and of kinds of tensors, that an explanation names."""
LARGE = 0.1
"""A module with more than this share of the peak is split into its children."""
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True)
class StepMoment:
    """A point in the step."""

    event: int
    """The event of the timeline after which the most bytes are alive."""
    phase: str
    """present, input, forward, backward, hand over, clip or optimizer."""
    micro_batch: int
    """The traced micro-batch it lies in, counted from 1; 0 outside of micro-batches."""
    micro_batches: int
    """Number of traced micro-batches; with two, the second stands for all later ones."""
    operation: str
    """The operation that allocates at that point; "" if unknown."""
    module: str
    """The module it runs for; "" outside any."""

    def __str__(self) -> str:
        if self.phase == "present":
            return "before the step begins"
        words = f"in {NAMES.get(self.phase, self.phase)}"
        if self.micro_batch and self.micro_batches > 1:
            words += " of the first micro-batch" if self.micro_batch == 1 else " of a later micro-batch"
        words += f", in {self.operation}" if self.operation else ""
        return f"{words} of {self.module}" if self.module else words


@dataclass(frozen=True)
class Share:
    """What one module, or several identical modules, hold at the peak."""

    module: str
    """Dotted name, with "0-11" for several modules and "(itself)" without their children; "" for what lies outside modules."""
    alike: int
    """Number of modules."""
    holds: tuple[tuple[str, int], ...]
    """(category, bytes)."""

    @property
    def size(self) -> int:
        """Bytes over all categories."""
        return sum(size for _, size in self.holds)


@dataclass(frozen=True)
class Largest:
    """Tensors of one size alive at the peak, created by the same operation in modules whose names differ only in numbers."""

    size: int
    """Bytes of each tensor."""
    count: int
    """Number of tensors."""
    category: str
    """What they are for."""
    module: str
    """The module that created them, with "0-11" for several; "" outside any."""
    operation: str
    """The operation that created them; "" if unknown."""
    phase: str
    """The phase they were created in; "present" if they existed before the step."""


@dataclass(frozen=True)
class Evaluation:
    """The memory of an evaluation, including what training leaves in place."""

    samples: int
    """Samples per evaluation batch."""
    peak: Peak
    """The most memory the device holds."""
    exceeds: bool
    """Whether that exceeds the peak of the training step."""


@dataclass(frozen=True)
class Explanation:
    """Explains the peak of a step with micro-batches of one size. Print it."""

    samples: int
    """Samples per micro-batch."""
    peak: Peak
    """The most memory the device holds."""
    smallest_budget: int | None
    """Bytes with which the caching allocator of a GPU still completes the step; None without a caching allocator."""
    tensors: int
    """Most bytes of tensors alive at the same time; 0 if unknown."""
    moment: StepMoment | None
    """When that is; None if unknown."""
    holds: tuple[tuple[str, int], ...]
    """(category, bytes) of the tensors alive then, largest first."""
    modules: tuple[Share, ...]
    """The modules these tensors belong to, largest first; together they cover all of them."""
    largest: tuple[Largest, ...]
    """The largest tensors among them."""
    unknown: str = ""
    """Why the contents of the peak are unknown; "" if they are known."""
    evaluation: Evaluation | None = None
    """The evaluation, if one was requested and traced."""

    @property
    def beside(self) -> int:
        """Bytes of the allocated peak that no tensor accounts for: rounding, and workspaces of libraries."""
        return self.peak.allocated - self.tensors

    def __str__(self) -> str:

        return "\n".join(explanation_lines(self))


def explain(profile: Profile, micro_batch: int, *, accumulates: bool = True) -> Explanation:
    """Explains the peak with micro-batches of `micro_batch` samples. Raises UsageError for an invalid number of samples."""
    check_samples(micro_batch)
    peak = profile.peak(micro_batch, accumulates=accumulates)
    least = None if peak.narrowest is None else peak.smallest_budget
    timeline = profile.traced_at(micro_batch)
    if timeline is None:
        return Explanation(micro_batch, peak, least, 0, None, (), (), (), unfollowed(profile))
    event = timeline.peak_event(micro_batch, accumulates=accumulates)
    holds = sorted(timeline.at(event, micro_batch).items(), key=lambda held: -held[1])
    root = module_tree(profile, micro_batch, accumulates=accumulates).root
    return Explanation(
        samples=micro_batch,
        peak=peak,
        smallest_budget=least,
        tensors=timeline.peak(micro_batch, accumulates=accumulates),
        moment=_moment(timeline, event, accumulates),
        holds=tuple(holds),
        modules=tuple(_shares(root)),
        largest=tuple(_largest(timeline, event, micro_batch))[:TENSORS],
        evaluation=_evaluation(profile, micro_batch, peak),
    )


def _evaluation(profile: Profile, micro_batch: int, training: Peak) -> Evaluation | None:
    if profile.evaluated is None or profile.loop.evaluation is None:
        return None
    peak = profile.evaluation(micro_batch=micro_batch)
    return Evaluation(profile.loop.evaluation, peak, peak.expected > training.expected)


def _moment(timeline: Timeline, event: int, accumulates: bool) -> StepMoment:
    which = int(timeline.event[event])
    phase = timeline.phase_of(event)
    inside = sum(1 for start in timeline.window if start <= event) if phase in ("input", "forward", "backward") else 0
    traced = len(timeline.window) if accumulates else 1
    return StepMoment(event, phase, inside, traced, made_by(timeline, which), timeline.owners[int(timeline.owner[which])])


def made_by(timeline: Timeline, allocation: int) -> str:
    """Returns the operation that created an allocation; "" if unknown."""
    return "" if timeline.operation is None else timeline.operation_names[int(timeline.operation[allocation])]


def _shares(root: ModuleCost) -> Iterator[Share]:
    """Splits the model where most bytes are, until no part is large or the maximum number of parts is reached."""
    parts = [root]
    while divisible := [part for part in parts if part.children and part.at_peak > LARGE * root.at_peak]:
        largest = max(divisible, key=lambda part: part.at_peak)
        inside = [child for child in largest.children if child.at_peak]
        if len(parts) + len(inside) - 1 > MODULES:
            break
        parts = [part for part in parts if part is not largest] + inside
    for part in sorted(parts, key=lambda part: -part.at_peak):
        name = f"{part.path} {ITSELF}" if part.name == ITSELF else part.path
        yield Share(name, part.alike, tuple(sorted(part.holds, key=lambda held: -held[1])))


def _largest(timeline: Timeline, event: int, samples: int) -> Iterator[Largest]:
    """The tensors alive after `event`, largest first; equal ones are grouped."""
    alive = timeline.alive(event)
    sizes = np.rint(timeline.sizes(samples)).astype(np.int64)
    births, _ = timeline.lifetimes()
    found: dict[tuple[int, str, str, str, str], list[str]] = {}
    for one in alive[np.argsort(-sizes[alive], kind="stable")].tolist():
        owner = timeline.owners[int(timeline.owner[one])]
        key = (
            int(sizes[one]),
            CATEGORIES[int(timeline.category[one])],
            _NUMBER.sub("*", owner),
            made_by(timeline, one),
            timeline.phase_of(int(births[one])),
        )
        found.setdefault(key, []).append(owner)
    for (size, category, _, operation, phase), owners in found.items():
        yield Largest(size, len(owners), category, together(owners), operation, phase)
