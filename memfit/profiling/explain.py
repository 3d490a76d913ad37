"""Why a step takes as much memory as it does: at which operation the most is alive, and what that is.

Pure values from a Profile. The moment is that at which most bytes of tensors are alive; a card's allocator may be at its
fullest a little later. Not covered: memory that is no tensor's, beyond its size.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from memfit.profiling.allocator import Peak
from memfit.profiling.profile import Profile
from memfit.profiling.timeline import CATEGORIES, Timeline
from memfit.profiling.tree import ITSELF, ModuleCost, check_samples, module_tree, together, unfollowed

MODULES, TENSORS = 16, 10
"""How many modules and kinds of tensors an explanation names."""
LARGE = 0.1
"""Share of the peak from which on a module is taken apart."""
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
NAMES = {
    "input": "the input",
    "hand over": "the hand-over of gradients",
    "clip": "the clipping of gradients",
    "optimizer": "the optimizer's step",
}
"""Phases of the step, for people."""


@dataclass(frozen=True)
class Moment:
    """A place in the step."""

    event: int
    """The event of the timeline after which most is alive."""
    phase: str
    """present, input, forward, backward, hand over, clip or optimizer."""
    micro_batch: int
    """Which of the traced micro-batches it lies in, counted from 1; 0 outside of them."""
    micro_batches: int
    """How many were traced: with two, the second stands for all further ones."""
    operation: str
    """The operation that allocates then; "" if not known."""
    module: str
    """The module it is for; "" outside any."""

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
    """What some modules hold at the peak."""

    module: str
    """Their dotted name, with "0-11" for several, and "(itself)" without those inside; "" is what lies outside any."""
    alike: int
    """How many modules these are."""
    holds: tuple[tuple[str, int], ...]
    """(category, bytes)."""

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(size for _, size in self.holds)


@dataclass(frozen=True)
class Largest:
    """Tensors of one size that are alive at the peak, made by the same operation in modules alike."""

    size: int
    """Bytes of each."""
    count: int
    """How many there are."""
    category: str
    """What they are for."""
    module: str
    """The module they were born in, with "0-11" for several; "" outside any."""
    operation: str
    """What made them; "" if not known."""
    phase: str
    """Where in the step: "present" if they were there before."""


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation takes beside what the training leaves there."""

    samples: int
    """Samples per batch of it."""
    peak: Peak
    """What the device holds at most."""
    exceeds: bool
    """Whether that is more than the training step takes."""


@dataclass(frozen=True)
class Explanation:
    """The peak of a step with micro-batches of one size. Print it."""

    samples: int
    """Samples per micro-batch."""
    peak: Peak
    """What the device holds at most."""
    smallest_budget: int | None
    """Bytes with which a card's allocator still completes the step; None where there is none to be asked."""
    tensors: int
    """Most bytes of tensors alive at once; 0 if not known."""
    moment: Moment | None
    """When; None if not known."""
    holds: tuple[tuple[str, int], ...]
    """(category, bytes) of the tensors alive then, the largest first."""
    modules: tuple[Share, ...]
    """Whose they are, the largest first; together they are all of them."""
    largest: tuple[Largest, ...]
    """The largest tensors among them."""
    unknown: str = ""
    """Why nothing is told of what lies in the peak; "" where it is."""
    evaluation: Evaluation | None = None
    """The evaluation, where one was asked for and traced."""

    @property
    def beside(self) -> int:
        """Bytes of the peak as allocated that no tensor accounts for: rounding, and workspaces of libraries."""
        return self.peak.allocated - self.tensors

    def __str__(self) -> str:
        from memfit.profiling.telling import explanation_lines

        return "\n".join(explanation_lines(self))


def explain(profile: Profile, micro_batch: int, *, accumulates: bool = True) -> Explanation:
    """The peak with micro-batches of that many samples, explained. Raises UsageError for what is no number of samples."""
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


def _moment(timeline: Timeline, event: int, accumulates: bool) -> Moment:
    which = int(timeline.event[event])
    phase = timeline.phase_of(event)
    inside = sum(1 for start in timeline.window if start <= event) if phase in ("input", "forward", "backward") else 0
    traced = len(timeline.window) if accumulates else 1
    return Moment(event, phase, inside, traced, made_by(timeline, which), timeline.owners[int(timeline.owner[which])])


def made_by(timeline: Timeline, allocation: int) -> str:
    """The operation that made an allocation; "" if not known."""
    return "" if timeline.operation is None else timeline.operation_names[int(timeline.operation[allocation])]


def _shares(root: ModuleCost) -> Iterator[Share]:
    """The whole, taken apart where most of it is, until no part is large or there are enough of them."""
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
    """What is alive then, the largest first; those alike together."""
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
