"""Step mode: memfit runs the optimizer step. Each micro-batch is collated by itself, longest samples first.

Not covered: optimizers that need a closure. Losses that need all samples together run through script mode's replay.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from memfit._errors import MemfitError, Refused, UsageError
from memfit.autotune.active_plan import Planned
from memfit.autotune.task import Task
from memfit.autotune.tuner import Tuner
from memfit.batches.cut import Layout, candidate_layouts, look_of, refuse_no_batch, shared_samples, uncuttable, usual_samples
from memfit.batches.extents import Scale
from memfit.batches.pieces import pieces_by_size
from memfit.batches.samples import SampleBatch
from memfit.batches.shapes import Shapes, no_larger, shapes_per_sample
from memfit.batches.tree import copied_tensors, first_same, flat, tensors
from memfit.capture.workloads import LossFn, moved
from memfit.distributed.reduction import WholeShares
from memfit.engine.accumulate import SharesDiffer
from memfit.engine.batch_dependent import BatchDependent
from memfit.engine.branches import Act
from memfit.engine.call_attributes import Attributes
from memfit.engine.forward_reads import ForwardReads
from memfit.engine.gradients import is_sharded
from memfit.engine.handover import Total, hand_over
from memfit.engine.modules import modules_of
from memfit.engine.planning_scope import reaching
from memfit.engine.read_numbers import Variants
from memfit.engine.recovery import surviving
from memfit.engine.unseen_moves import UnseenMoves
from memfit.engine.weighting import BY_SAMPLES, Weighting, WeightsChanged
from memfit.engine.work import checked_loss
from memfit.equivalence.infer_weighting import without_idle_rivals
from memfit.equivalence.weighting_codes import way_of
from memfit.modes.ordered_batch import Ordered
from memfit.modes.step_weighting import Weigher
from memfit.modes.step_workload import Tasks
from memfit.planning.plan import Plan
from memfit.planning.search import Demand
from memfit.profiling.profile import Profile
from memfit.runtime.core import Core
from memfit.runtime.faults import is_fault, strict


@dataclass
class PlannedBatch(Planned):
    """A plan and the batches it covers."""

    shapes: Shapes | None
    """Shapes per sample of an ordinary batch; None if samples are collated."""
    scale: Scale
    """Sizes of samples relative to those used for planning."""
    samples: int
    """Samples in a batch."""

    def covers(self, batch: Ordered) -> bool:
        """Whether the batch needs no more memory than planned."""
        if batch.samples > self.samples and self.plan.accumulation == 1:
            return False  # planned to run whole, without accumulated gradients beside it
        if batch.shapes is None or self.shapes is None:
            return batch.shapes is self.shapes and all(self.scale.covers(extent) for extent in batch.extents[:1])
        return len(batch.shapes) == len(self.shapes) and no_larger(batch.shapes, self.shapes)


class Stepper:
    """Runs effective batches through `loss_fn` and plans for samples that no plan covers.

    `whole_loss(batch)` computes the loss with the intercepted model, for losses that need all samples together. `samples` is
    the size of the latest batch.
    """

    def __init__(self, core: Core, loss_fn: LossFn, whole_loss: Callable[[Any], torch.Tensor]) -> None:
        self.samples: int | None = None
        self._core, self._whole_loss = core, whole_loss
        self._tasks = Tasks(core, loss_fn)
        core.reached = (loss_fn, core.settings.weight, core.settings.split)
        core.split = None  # split= cuts batches here, not the model's arguments
        self._kinds: dict[Hashable, tuple[Weigher, list[PlannedBatch]]] = {}
        self._variants: defaultdict[Hashable, Variants] = defaultdict(Variants)
        self._reads, self._code = ForwardReads(), (loss_fn,)
        self._share = 1
        self._look()
        core.on_forget.append(self.plan_again)
        core.on_parameters.append(self._begin_anew)
        self._shared: dict[int, tuple[int, ...]] = {}
        """By leaf of a batch: the shape if all samples share that tensor."""
        self._latest: tuple[Hashable, tuple[Layout, Shapes]] = (None, (Layout((), 0), ()))

    def ordered(self, batch: Any) -> Ordered:
        """Order the batch for cutting."""
        if isinstance(batch, SampleBatch):
            return Ordered.of_samples(batch, by_size=not self._weights.composition.in_sequence)
        return self._cut_from(batch)

    def prepare(self, like: Ordered, share: int | None) -> None:
        """Plan for effective batches of `share` samples (None: as many as `like` has) without running any."""
        self._look()
        with reaching(*self._core.reached):
            self._decide(like, share or like.samples)

    def plan_again(self) -> None:
        """Drop the plans after a change of what they are based on."""
        for _, plans in self._kinds.values():
            plans.clear()
        self._share = 1

    def _begin_anew(self) -> None:
        """Drop all that is known about the loss, as the model was replaced."""
        self._kinds.clear()
        self._variants.clear()
        self._look()

    def _look(self) -> None:
        """Select what is known about the loss under the model's current flags."""
        flags = self._core.flags.now()
        if flags not in self._kinds:
            self._kinds[flags] = Weigher(self._core, self._tasks), []
        self._weights, self._plans = self._kinds[flags]
        self._core.team.loss_is_whole(self._weights.together)

    def _look_at_numbers(self, batch: Ordered) -> None:
        """Select what is known about the loss under the numbers that it may branch on, too."""
        core, flags = self._core, self._core.flags.now()
        if self._weights.together:
            return
        variants, attributes, moved = self._variants[flags], self._attributes(), self._weights.composition.keys
        numbers = attributes.numbers(moved)
        if self._weights.known and (wanted := variants.unasked(numbers)):
            variants.learn(wanted, self._weights.asks(batch, attributes.places(wanted)))
        variant = variants.of(numbers)
        if variant is None:
            if attributes.have_graphs() and not is_sharded(core.model):
                self._weights.refuse_earlier_graphs(batch)
            fresh = Weigher(core, self._tasks)
            variant = variants.choose(numbers, lambda each: self._weighs_the_same(fresh, (flags, each), batch))
            self._kinds.setdefault((flags, variant), (fresh, []) if variant else (self._weights, self._plans))
        self._weights, self._plans = self._kinds[flags, variant]
        if self._is_state_elsewhere():
            self._kinds[flags, variant] = self._weights, self._plans = Weigher(core, self._tasks), []
        core.team.loss_is_whole(self._weights.together)

    def _is_state_elsewhere(self) -> bool:
        """Whether the script has replaced what the loss moves something in."""
        composition = self._weights.composition
        return bool(composition.moved) and composition.is_elsewhere(self._attributes().numbers(composition.keys).held)

    def _attributes(self) -> Attributes:
        """What the loss may branch on, and where what it moves is."""
        return Attributes(modules_of(self._core.model), self._reads, self._code)

    def _weighs_the_same(self, fresh: Weigher, key: Hashable, batch: Ordered) -> bool | None:
        known, core = self._kinds[key][0], self._core
        if known.together or not known.known:
            return True

        def unrepeated(text: str) -> bool:
            core.events.add(core.steps, "out of memory", f"the proof of micro-batch weights was not repeated ({text})")
            return True

        try:
            return surviving(lambda: fresh.agrees_with(known, batch), core.device, unrepeated)
        except MemfitError:
            raise
        except Exception as error:
            if strict() and is_fault(error):
                raise
            return True  # the pass raises it, if it is the script's

    def task(self, batch: Any) -> Task:
        """Return the task to profile for a batch like this one."""
        ordered = self.ordered(batch)
        return self._tasks.task(ordered, 0, Demand(ordered.samples), self._weights.weighting or BY_SAMPLES)

    def loss(self, batch: Any) -> torch.Tensor:
        """Accumulate an effective batch and return its loss as a tensor whose backward hands the gradients over."""
        with self._core.team.announcing(), reaching(*self._core.reached):
            return self._loss(batch)

    def _loss(self, batch: Any) -> torch.Tensor:
        self._core.knows_parameters()
        self._look()
        ordered = self.ordered(batch)
        self.samples = ordered.samples
        self._look_at_numbers(ordered)
        before = self._weights.composition
        self._decide(ordered, ordered.samples)
        if self._weights.composition is not before:
            self._is_state_elsewhere()  # (remembers where it is)
        if ordered.ragged and self._weights.composition.in_sequence:
            ordered = self.ordered(batch)
        doubted, proven_for = False, set[Act]()
        while not self._weights.together:
            try:
                return self._accumulated(ordered)
            except WeightsChanged as changed:
                if changed.differing and self._core.staging.parts is not None:  # a proof would need all ranks
                    raise BatchDependent.of_loss(str(changed)) from None
                self._weights.weigh_again(ordered, doubted, changed.differing)
                doubted = not changed.differing  # (else each proof shows more of its branches, or is the last)
            except WholeShares:
                self._weights.run_together("it does on another process")
            except BatchDependent as error:
                if error.differing <= proven_for or self._core.staging.parts is not None:
                    self._weights.run_together(error.found)
                    continue
                proven_for |= error.differing
                self._weights.weigh_again(ordered, doubted, error.differing)
            except SharesDiffer:
                self._weights.run_together("its terms divide by counts of their own, over all samples")
        return self._all_at_once(batch)

    def _accumulated(self, batch: Ordered) -> torch.Tensor:
        core, plan = self._core, self._core.plan
        assert plan is not None
        work = self._tasks.work(batch.piece, batch.samples, plan.precision, there=batch.devices == {core.device})
        weighting = self._weights.of(batch)
        watch = partial(UnseenMoves, self._attributes(), core.model) if weighting.branching else None
        work.composition = self._weights.composition.afresh(watch)

        def pieces_for(largest: int, tuner: Tuner | None) -> Sequence[int]:
            pieces = self._pieces(batch, largest, plan, tuner)
            batch.cut_at(pieces)
            return pieces

        def gathered(weighting: Weighting) -> Total:
            if batch.is_whole:
                weighting = without_idle_rivals(weighting, lambda: batch.piece(0, batch.samples))
            load = batch.load if self._weights.known else None
            repeats = not batch.is_whole  # a batch given as samples is collated again, in the same pieces
            largest = core.in_force.limit(plan)
            return core.accumulator.run(work, weighting, pieces_for, largest=largest, load=load, repeats=repeats)

        def combined(total: Total, weighting: Weighting) -> Weighting | None:
            try:
                return core.accumulator.combine(total, weighting, unproven=not self._weights.known)
            except WholeShares:
                begin_again()
                raise

        begin_again = core.accumulator.beginning(work.composition, unsure=self._weights.mute)
        with core.staging.also(batch.wanted):
            total = gathered(weighting)
            if self._weights.mute and bool(total.value != 0):
                begin_again()
                raise WeightsChanged("the loss of the samples examined was zero, and that of others is not")
            while (other := combined(total, weighting)) is not None:
                if way_of(other) != way_of(weighting):
                    begin_again()
                    total = gathered(other)
                self._weights.weighting = weighting = other
            return hand_over(total)

    def _all_at_once(self, batch: Any) -> torch.Tensor:
        self._core.team.agree_whole()
        whole = batch.collate() if isinstance(batch, SampleBatch) else batch
        whole = copied_tensors(whole) if self._tasks.writes else whole
        return checked_loss(self._whole_loss(moved(whole, self._core.device)))

    def _pieces(self, batch: Ordered, largest: int, plan: Plan, tuner: Tuner | None) -> tuple[int, ...]:
        """Micro-batch sizes. If samples differ in size, the first sample of each determines its planned size."""
        if not plan.by_size:
            return self._core.accumulator.tuned_pieces(batch.samples, largest, tuner)
        choice = None if tuner is None else tuner.next_choice()

        def samples_for(size: int) -> int:
            usual, most = next(((n, m) for elements, n, m in plan.by_size if size <= elements), plan.by_size[-1][1:])
            return usual * largest // plan.micro_batch if choice is None else min(most, choice // max(1, size))

        active = self._core.in_force.active
        sizes = [active.scale.size(extent) for extent in batch.extents] if isinstance(active, PlannedBatch) else batch.sizes
        found = pieces_by_size(sizes, samples_for, self._core.least)
        if tuner is not None and choice is not None:
            tuner.expect_batch(choice, sum(sizes), len(found))
        return found

    # ---- what a batch is

    def _cut_from(self, batch: Any) -> Ordered:
        """Cut an ordinary batch passed to `step` along its samples."""
        settings = self._core.settings
        _check_tensors(tensors(batch))
        if settings.split is not None:
            samples = settings.share or shared_samples(batch)
            if samples is None:
                raise _uncounted()
            elements = sum(tensor.numel() for tensor in tensors(batch))
            return Ordered.of_split(batch, samples, settings.split, ((-(-elements // samples),),))
        return Ordered.of_tree(batch, *self._recognised(batch))

    def _recognised(self, batch: Any) -> tuple[Layout, Shapes]:
        """How an ordinary batch is cut, and its shapes per sample. Cached for the latest one."""
        looks = look_of(batch)
        if looks is None or looks != self._latest[0]:
            self._latest = looks, self._layout_of(batch)
        return self._latest[1]

    def _layout_of(self, batch: Any) -> tuple[Layout, Shapes]:
        """How a new kind of batch is cut. A tensor that all samples shared in another batch stays shared for any number of
        samples."""
        found = _likeliest_layout(batch)
        shapes = [tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else None for leaf in flat(batch)]
        kept = [self._shared.get(i) != shape or shape is None for i, shape in enumerate(shapes)]
        axes = [axis if keeps else None for axis, keeps in zip(found.axes, kept)]
        layout = Layout(tuple(axes[i] for i in first_same(flat(batch))), found.samples)
        self._shared |= {i: shape for i, (axis, shape) in enumerate(zip(layout.axes, shapes)) if axis is None and shape}
        return layout, shapes_per_sample(batch, layout, layout.samples)

    # ---- deciding

    def _decide(self, batch: Ordered, share: int) -> None:
        """Ensure a weighting and an active plan that covers the batch."""
        self._share = max(share, self._share)
        profile = self._weights.decide(batch, self._share)
        doubted = False
        while not self._weights.together and self._core.in_force.fixed is None:
            try:
                return self._plan(batch, profile)
            except WeightsChanged as changed:  # from samples used for timing
                self._weights.weigh_again(batch, doubted, changed.differing)
                doubted = not changed.differing

    def _plan(self, batch: Ordered, profile: Profile | None) -> None:
        known = next((planned for planned in reversed(self._plans) if planned.covers(batch)), None)
        if known is not None:
            self._core.in_force.activate(known)
            return
        if self._plans:
            self._core.note("replan", "samples larger than any before, or more of them: replanned before they run")
        weighting = self._weights.weighting or BY_SAMPLES
        plan, profile = self._tasks.planned(batch, self._share, weighting, profile)
        found = PlannedBatch(plan, profile, batch.shapes, Scale(batch.extents[::-1]), self._share)
        self._plans[:] = [planned for planned in self._plans if not _outdone(planned, batch)] + [found]
        self._core.in_force.adopt(found)


def _outdone(planned: PlannedBatch, batch: Ordered) -> bool:
    """Whether no batch that `planned` covers is larger than this one."""
    if batch.shapes is None or planned.shapes is None:
        return batch.shapes is planned.shapes and planned.scale.within(batch.extents[0])
    return len(batch.shapes) == len(planned.shapes) and no_larger(planned.shapes, batch.shapes)


def _likeliest_layout(batch: Any) -> Layout:
    refuse_no_batch(batch)
    single = 1 if all(tensor.numel() == 1 for tensor in tensors(batch)) else None
    samples = shared_samples(batch) or usual_samples(batch) or single
    layout = None if samples is None else next(candidate_layouts(batch, samples), None)
    if layout is None:
        raise uncuttable("its tensors do not share a first dimension")
    return layout


def _check_tensors(found: Sequence[torch.Tensor]) -> None:
    """Raise Refused or UsageError for tensors that nothing can cut."""
    if any(not tensor.is_leaf for tensor in found):
        raise Refused(
            "cutting a batch that was computed with gradients",
            found="a tensor in it has a graph of its own, which every micro-batch's backward would go through",
            next_move="compute it inside loss_fn, or detach() it",
        )
    if any(tensor.is_nested or tensor.layout is not torch.strided for tensor in found):
        raise uncuttable("a tensor in it is sparse or nested")
    if found and all(not tensor.is_nested and tensor.numel() == 0 for tensor in found):
        raise UsageError(
            "a step over a batch",
            found="it is empty: " + ", ".join(str(tuple(tensor.shape)) for tensor in found),
            next_move="skip empty batches",
        )


def _uncounted() -> Refused:
    return Refused(
        "cutting the batch with split=",
        found="its tensors do not share a first dimension, so its number of samples is unknown",
        next_move="pass target_batch=, the samples in each batch",
    )
