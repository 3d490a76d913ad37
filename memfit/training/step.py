"""Step mode: the optimizer step is memfit's. Micro-batches are collated by themselves, longest samples first.

Not covered: optimizers that need a closure. Losses that need all samples together run through script mode's replay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from memfit._errors import Refused, UsageError
from memfit.batches.cut import candidate_layouts, refuse_no_batch, shared_samples, uncuttable
from memfit.batches.pieces import next_size
from memfit.batches.samples import SampleBatch
from memfit.batches.tree import tensors
from memfit.batches.weights import Count
from memfit.engine.accumulate import CountOf, Weighting, WeightsChanged, Work, checked_loss, wide
from memfit.engine.handover import hand_over
from memfit.engine.terms import Terms, is_only_term
from memfit.levers.checkpoint import checkpointed
from memfit.planning.plan import Plan
from memfit.planning.search import Demand, search, with_blocks
from memfit.planning.sizes import by_size, peak_of, peaks_of, profile_between
from memfit.profiling.build import CHECK
from memfit.profiling.fake import FakeWorld
from memfit.profiling.profile import Profile
from memfit.profiling.sandbox import leave_no_trace
from memfit.profiling.trace import MakeWork, TraceFailed, telling_failures
from memfit.training.alone import loss_alone
from memfit.training.core import Core, MadeReference
from memfit.training.learn import Shapes, no_larger, shapes_per_sample
from memfit.training.ordered import Ordered
from memfit.training.planner import Task
from memfit.training.prove import comparable, parts_of
from memfit.training.recover import on_fewer, surviving
from memfit.training.tune import Tuner
from memfit.training.weigh import PROBED, infer_weighting
from memfit.training.works import LossFn, StepWork, moved

PROOF_SAMPLES = 5
"""Samples that proofs run on."""
KEPT_SAMPLES = 32
"""Samples kept for verifying."""
PROVE_AGAIN = 4
"""An inferred weighting is proven again at the next batch, and then whenever this many times as many steps were done."""
BY_SAMPLES = Weighting("samples", "by samples")


@dataclass
class Planned:
    """A plan and the batches it is good for."""

    shapes: Shapes | None
    """Shapes per sample of an ordinary batch; None where samples are collated."""
    largest: int
    """Elements of the largest sample."""
    samples: int
    """Samples in a batch."""
    plan: Plan
    """The plan."""
    profile: Profile | None
    """What it rests on."""

    def covers(self, batch: Ordered) -> bool:
        """Whether the batch needs no more room than was planned for."""
        if batch.samples > self.samples and self.plan.accumulation == 1:
            return False  # planned to run whole, without gradients of other micro-batches beside it
        if batch.shapes is None or self.shapes is None:
            return batch.shapes is self.shapes and batch.largest <= self.largest
        return len(batch.shapes) == len(self.shapes) and no_larger(batch.shapes, self.shapes)

    def changed(self, plan: Plan) -> None:
        """Another size of micro-batch turned out to be faster, or the one planned too large."""
        self.plan = plan


class Stepper:
    """Runs effective batches through `loss_fn`, planning when it meets samples it has no plan for.

    `whole_loss(batch)` is the loss through the intercepted model, for losses that need all samples together. `samples` is
    how many there are in the latest batch.
    """

    def __init__(self, core: Core, loss_fn: LossFn, whole_loss: Callable[[Any], torch.Tensor]) -> None:
        self.samples: int | None = None
        self._core, self._loss_fn, self._whole_loss = core, loss_fn, whole_loss
        self._weighting: Weighting | None = None
        self._proven_ragged = False
        self._prove_at = 0
        self._together = False
        self._share = 1
        self._plans: list[Planned] = []
        self._in_force: Planned | None = None

    def ordered(self, batch: Any) -> Ordered:
        """The batch as it will be cut."""
        return Ordered.of_samples(batch) if isinstance(batch, SampleBatch) else self._cut_from(batch)

    def prepare(self, like: Ordered, share: int | None) -> None:
        """Plan for effective batches of `share` samples (None: as many) like those in `like`, without running any."""
        self._decide(like, share or like.samples)

    def task(self, batch: Any) -> Task:
        """What there is to profile in a batch like this one."""
        ordered = self.ordered(batch)
        return self._task(ordered, 0, Demand(ordered.samples))

    def loss(self, batch: Any) -> torch.Tensor:
        """The loss of an effective batch, its gradients gathered, as a tensor whose backward hands them over."""
        ordered = self.ordered(batch)
        self.samples = ordered.samples
        self._decide(ordered, ordered.samples)
        doubted = False
        while not self._together:
            try:
                return self._accumulated(ordered)
            except WeightsChanged:
                self._weigh_again(ordered, doubted)
                doubted = True
        return self._all_at_once(batch)

    def _accumulated(self, batch: Ordered) -> torch.Tensor:
        core, plan = self._core, self._core.plan
        assert plan is not None
        work = self._work(batch.piece, batch.samples, plan.precision, there=batch.devices == {core.device})

        def pieces_for(largest: int, tuner: Tuner | None) -> Sequence[int]:
            pieces = self._pieces(batch, largest, plan, tuner)
            batch.cut_at(pieces)
            return pieces

        weighting = self._weighting or BY_SAMPLES
        return hand_over(core.accumulated(work, weighting, pieces_for, largest=core.limit(plan)))

    def _all_at_once(self, batch: Any) -> torch.Tensor:
        whole = batch.collate() if isinstance(batch, SampleBatch) else batch
        return checked_loss(self._whole_loss(moved(whole, self._core.device)))

    def _pieces(self, batch: Ordered, largest: int, plan: Plan, tuner: Tuner | None) -> tuple[int, ...]:
        """Sizes of the micro-batches; where samples differ in size, each as large as planned for its first sample."""
        if not plan.by_size:
            return self._core.tuned_pieces(batch.samples, largest, tuner)
        found: list[int] = []
        start = 0
        while start < batch.samples:
            size, left = max(batch.sizes[start:]), batch.samples - start
            usual, most = next(((n, m) for elements, n, m in plan.by_size if size <= elements), plan.by_size[-1][1:])
            if tuner is None:
                count = min(left, max(1, usual * largest // plan.micro_batch))
            else:
                choice = tuner.next_choice()
                count = min(left, most, max(1, round(choice / max(1, size))))
                tuner.expect(choice, sum(batch.sizes[start : start + next_size(left, count, self._core.least)]))
            found.append(next_size(left, count, self._core.least))
            start += found[-1]
        return tuple(found)

    # ---- what a batch is

    def _cut_from(self, batch: Any) -> Ordered:
        """An ordinary batch handed to `step`: cut along its samples."""
        settings, tree = self._core.settings, ((batch,), {})
        if settings.split is not None:
            samples = settings.share or shared_samples(batch)
            if samples is None:
                raise _uncounted()
            elements = sum(tensor.numel() for tensor in tensors(batch))
            return Ordered.of_split(batch, samples, settings.split, ((-(-elements // samples),),))
        refuse_no_batch(batch)
        samples = shared_samples(batch) or (1 if all(tensor.numel() == 1 for tensor in tensors(batch)) else None)
        layout = None if samples is None else next(candidate_layouts(tree, samples), None)
        if layout is None:
            raise uncuttable("its tensors do not share a first dimension")
        return Ordered.of_tree(batch, layout, shapes_per_sample(tree, layout))

    # ---- deciding

    def _decide(self, batch: Ordered, share: int) -> None:
        """Have a weighting, and a plan in force that covers the batch."""
        self._share = max(share, self._share)
        profile = None
        if not self._together and (self._weighting is None or (batch.ragged and not self._proven_ragged)):
            profile = self._weigh(batch)  # padding differs between parts only where samples differ in size
        elif not self._together and self._core.steps >= self._prove_at and self._inferred:
            self._prove_again(batch)
        if not self._together and self._core.fixed is None:
            self._plan(batch, profile)

    def _plan(self, batch: Ordered, profile: Profile | None) -> None:
        if self._in_force is not None and self._in_force.covers(batch):
            return
        known = next((planned for planned in self._plans if planned.covers(batch)), None)
        if known is not None:
            self._core.readopt(known.plan, known.profile, known.changed)
            self._in_force = known
            return
        if self._plans:
            self._core.note("replan", "samples larger than any before, or more of them: planned anew before they run")
        plan, profile = self._planned(batch, profile)
        self._in_force = found = Planned(batch.shapes, batch.largest, self._share, plan, profile)
        self._plans = [planned for planned in self._plans if not _outdone(planned, batch)] + [found]
        self._core.adopt(plan, profile, found.changed)

    # ---- weighting

    @property
    def _inferred(self) -> bool:
        """Whether the weighting rests on a proof alone: that of one known mean is looked at in every micro-batch."""
        return self._core.settings.weight is None and self._weighting is not None and self._weighting.kind != "term"

    def _weigh(self, batch: Ordered, before: Weighting | None = None) -> Profile | None:
        """How micro-batches are weighted, proven on a few samples, such as tell `before` from its rivals; returns the
        profile made to know how many fit."""
        core = self._core
        self._proven_ragged = self._proven_ragged or batch.ragged
        self._look_alone(batch)
        if core.settings.weight is not None:
            self._weighting = Weighting("count", "by weight=", count=_by_hand(core.settings.weight, core.device))
            self._remember(batch)
            return None
        if batch.samples < 2 * core.least:
            return None  # one micro-batch weighs what it weighs; the next batch decides
        profile = self._profile(batch)
        few, blocks = self._provable(batch, profile)
        if few < 2 * core.least:
            self._weigh_unproven(batch)
        else:
            with checkpointed(core.model, blocks), core.planner.sparing_kernels():
                self._weigh_by_proof(batch, few, before)
        if self._together:
            core.reference = None  # what there was to compare with does not hold; the two passes leave their own
        else:
            self._remember(batch)
        return profile

    def _look_alone(self, batch: Ordered) -> None:
        """Know whether the loss of a single sample can be computed. Raises Refused where single samples were prescribed."""
        core = self._core
        if core.least > 1 or batch.samples < 2:
            return
        with core.staging.swapped():  # no hook of the user's fires
            why = loss_alone(self._work(batch.piece, batch.samples, "off"), core.model)
        if why is not None:
            core.need_company(why)

    def _prove_again(self, batch: Ordered) -> None:
        """An inferred weighting looked at on a later batch, on samples of its own."""
        core = self._core
        if core.plan is None:
            return
        most = min(PROOF_SAMPLES, batch.samples, core.limit(core.plan))
        if core.profile is not None:
            room = core.planner.budget().room - 2 * min(PROBED, core.profile.model.gradient_bytes)
            cheaper = with_blocks(core.profile, core.plan.checkpoint)
            most = max((n for n in range(2, most + 1) if cheaper.peak(n, accumulates=False).upper <= room), default=0)
        before = self._weighting

        def unrepeated(text: str) -> None:
            self._weighting = before
            core.events.add(core.steps, "out of memory", f"the proof of how micro-batches weigh was not repeated ({text})")

        if most >= 2 * core.least:
            with core.planner.sparing_kernels():
                surviving(lambda: self._weigh_on(batch, most, None, again=before), core.device, unrepeated)

    def _weigh_by_proof(self, batch: Ordered, few: int, before: Weighting | None) -> None:
        core = self._core
        surviving(
            lambda: on_fewer(lambda n: self._weigh_on(batch, n, before), few, core.device, core.proof_ran_out),
            core.device,
            lambda text: self._weigh_unproven(batch),
        )

    def _weigh_on(
        self, batch: Ordered, few: int, before: Weighting | None, *, again: Weighting | None = None
    ) -> None:
        """`again`: what was proven on an earlier batch. A loss that is not finite says nothing against it."""
        core = self._core
        parts = parts_of(few, core.least)
        pieces = batch.spread(parts) if before is None else batch.spread(parts, before.rivals, before.count)
        work = self._work(pieces, few, "off")
        self._prove_at = PROVE_AGAIN * core.steps or 1
        self._weighting, deviation = infer_weighting(work, parts, core.staging, core.model)
        if self._weighting is None:
            if again is not None and not math.isfinite(deviation.relative):
                self._weighting = again
                return
            if math.isnan(deviation.relative):
                self._refuse_not_finite(work, few)
            self._run_together(f"its parts differ from the whole by {deviation.relative:.2g}")

    def _weigh_unproven(self, batch: Ordered) -> None:
        """Two samples do not fit at once: only a loss that is one known mean needs no proof of its weighting."""
        if not self._is_one_mean(batch):
            self._run_together("two samples do not fit at once, so another way could not be proven")
            return
        self._weighting = Weighting("term", "by what its mean divides by")
        self._core.note("note", "two samples do not fit at once: not proven that the model keeps samples apart")

    def _is_one_mean(self, batch: Ordered) -> bool:
        """Whether the loss is one known mean, told on fake tensors."""
        core, world = self._core, FakeWorld()
        try:
            with leave_no_trace(core.model, core.device, buffers=False), telling_failures(world), world.replacing(core.model):
                few = core.least
                work = self._task(batch, 0, Demand(few)).make_work("off")(world.twin, few)
                with world.entered(), Terms(alone=False) as terms:
                    inputs, _ = work.inputs(0, few, None)
                    loss = checked_loss(work.loss(work.forward(inputs)))
                    return len(terms.found) == 1 and is_only_term(loss, terms.found[0])
        except TraceFailed:
            return False

    def _weigh_again(self, batch: Ordered, doubted: bool) -> None:
        """The weighting did not hold: prove it anew on samples that tell its rivals apart."""
        before = self._weighting
        if not doubted and before is not None:
            self._weigh(batch, before)
        if doubted or self._weighting == before:
            self._run_together("its weighting did not hold for a later batch")
            self._core.reference = None

    def _run_together(self, why: str) -> None:
        self._weighting, self._together = None, True
        self._core.note("note", f"the loss needs all samples together ({why}): the model runs in two passes")

    def _refuse_not_finite(self, work: Work, samples: int) -> None:
        core = self._core
        with comparable(core.model, core.device), torch.no_grad():
            inputs, _ = work.inputs(0, samples, None)
            value = float(work.loss(work.forward(inputs)))
        if not math.isfinite(value):
            raise UsageError(
                "planning with this loss_fn and data",
                found=f"the loss of {samples} samples is {value}",
                next_move="make it finite first: look at these samples, and for divisions and logarithms of zero",
            )

    def _provable(self, batch: Ordered, profile: Profile | None) -> tuple[int, tuple[str, ...]]:
        """(samples to prove with that fit at once, blocks to checkpoint for that)."""
        most = min(PROOF_SAMPLES, batch.samples)
        if profile is None:  # a plan made elsewhere says what fits
            plan = self._core.plan
            return (most if plan is None else min(most, max(2 * self._core.least, plan.micro_batch))), ()
        kept = 2 * min(PROBED, profile.model.gradient_bytes)
        room = self._core.planner.budget().room - kept
        for blocks in ((), profile.blocks):
            cheaper = with_blocks(profile, blocks)
            fitting = [n for n in range(2, most + 1) if cheaper.peak(n, accumulates=False).upper <= room]
            if fitting:
                return max(fitting), blocks
        return 0, ()

    def _remember(self, batch: Ordered) -> None:
        """Keep a few samples to verify with."""
        few = batch.few(KEPT_SAMPLES)

        def make(samples: int, backwards: bool) -> Work:
            ordered = few.backwards(samples) if backwards else few
            return self._work(ordered.piece, samples, "off")

        weighting = self._weighting or BY_SAMPLES
        self._core.reference = MadeReference(few.samples, weighting, make, reversible=not batch.in_order)

    # ---- planning

    def _profile(self, batch: Ordered) -> Profile | None:
        """What the largest sample costs; memory does not depend on the weighting."""
        if self._core.fixed is not None:
            return None
        return self._core.planner.profile(self._task(batch, 0, Demand(self._share)), "off")

    def _planned(self, batch: Ordered, profile: Profile | None) -> tuple[Plan, Profile]:
        planner = self._core.planner
        demand = Demand(self._share, self._core.settings.target_batch)
        longest = self._task(batch, 0, demand)
        if not batch.ragged or planner.constrained(demand).micro_batch is not None:
            return planner.plan(longest, profile=profile)
        return self._planned_by_size(batch, longest, profile)

    def _planned_by_size(self, batch: Ordered, longest: Task, profile: Profile | None) -> tuple[Plan, Profile]:
        """Micro-batches by size of sample: memory from the longest and a short one, speed from the median."""
        planner, demand = self._core.planner, longest.demand
        plan, at_most = planner.plan(longest, timed=False, profile=profile)
        short, middle = batch.samples * 3 // 4, batch.samples // 2
        shorter = self._task(batch, short, demand)
        if at_most is profile:  # it was traced before there was a weighting
            shorter = replace(shorter, weighting=BY_SAMPLES)
        at_least = planner.profile(shorter, plan.precision, like=at_most)
        ends = (
            (batch.sizes[short], with_blocks(at_least, plan.checkpoint)),
            (batch.sizes[0], with_blocks(at_most, plan.checkpoint)),
        )
        fixed = replace(demand, checkpoint=())  # the blocks are part of both profiles
        between = profile_between(ends, batch.sizes[middle], demand.share)
        timed = planner.timed(self._task(batch, middle, fixed), between)
        found = search([timed], planner.budget(), replace(planner.constrained(fixed), checkpoint=()))
        table = by_size(ends, found, planner.budget().room, batch.sizes[middle])
        peak, peaks = peak_of(ends, table), peaks_of(ends, table)
        cost = replace(found.predicted, peak=peak.expected, upper=peak.upper)
        notes = (*plan.notes, "samples differ in size: micro-batches are made of samples of similar size")
        checkpoint = plan.checkpoint
        plan = replace(found, by_size=table, size_peaks=peaks, median=batch.sizes[middle])
        return replace(plan, checkpoint=checkpoint, predicted=cost, notes=notes), timed

    def _task(self, batch: Ordered, index: int, demand: Demand) -> Task:
        def make_work(precision: str) -> MakeWork:
            def build(twin: Callable[[torch.Tensor], torch.Tensor], samples: int) -> Work:
                tree = batch.twins(index, samples, twin)
                return self._work(lambda start, stop: tree, samples, precision)

            return build

        def real_work(precision: str) -> Work:
            return self._work(batch.around(index), demand.share, precision)

        available = batch.available or max(demand.share, CHECK)  # samples may be repeated where they need not be neighbours
        return Task(make_work, real_work, self._weighting or BY_SAMPLES, available, demand, self._core.compiled)

    def _work(
        self, piece: Callable[[int, int], Any], samples: int, precision: str, *, there: bool = False
    ) -> StepWork:
        core = self._core
        return StepWork(core.model, self._loss_fn, piece, samples, core.device, precision=precision, there=there)


def _outdone(planned: Planned, batch: Ordered) -> bool:
    """Whether every batch that `planned` is good for is no larger than this one."""
    if batch.shapes is None or planned.shapes is None:
        return batch.shapes is planned.shapes and planned.largest <= batch.largest
    return len(batch.shapes) == len(planned.shapes) and no_larger(planned.shapes, batch.shapes)


def _by_hand(weight: Callable[[Any], float], device: torch.device) -> CountOf:
    """`weight=` as a count."""

    def count(piece: Any) -> Count:
        value = weight(piece)
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            return value.detach().reshape(()).to(device)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise UsageError(
                "weighting micro-batches by weight=",
                found=f"it returned {value!r}",
                next_move="return a number of at least 0: what the loss of this part counts for, such as its valid labels",
            )
        # A weight of zero stays a number, so that the micro-batch is skipped without asking the device.
        return 0 if value == 0 else torch.as_tensor(value, dtype=wide(device), device=device)

    return count


def _uncounted() -> Refused:
    return Refused(
        "cutting the batch with split=",
        found="its tensors do not share a first dimension, so the number of its samples is not known",
        next_move="pass target_batch=, the samples in each batch",
    )
