"""Deciding on training calls: whole or cut, proven how, planned how. One entry per kind of call that is met.

Not covered: calls of different kinds that together do not fit; each is planned by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import torch

from memfit._errors import DoesNotFit, Refused
from memfit._units import format_bytes
from memfit.batches.cut import Layout, refuse_packed, shared_samples, uncuttable
from memfit.batches.tree import tensors
from memfit.engine.accumulate import Weighting, Work
from memfit.levers.checkpoint import checkpointed
from memfit.planning.search import Demand, search, with_blocks
from memfit.profiling.build import CHECK
from memfit.profiling.profile import Profile
from memfit.profiling.trace import MakeWork
from memfit.training.call import Call, Tree
from memfit.training.consumers import Consumer, OwnLoss, Twin
from memfit.training.core import Core
from memfit.training.kind import BY_SAMPLES, Kind, Planned
from memfit.training.learn import (
    Shapes,
    no_larger,
    samples_by,
    shapes_per_sample,
    structure_of,
    twin_call,
    ways_to_cut,
)
from memfit.training.outputs import Outputs
from memfit.training.planner import Task
from memfit.training.prove import Deviation, frozen_norms, infer_weighting, joined_outputs, mixing_module
from memfit.training.recover import on_fewer, surviving
from memfit.training.sidedoors import look_for_side_doors
from memfit.training.works import CallWork

LOSS_BOUND = 3
"""Copies of a model's output that an unseen loss is taken to need at once: log-probabilities, their gradient, a temporary."""
PROVE_AGAIN = 4
"""A proof is repeated at the next batch, and then whenever this many times as many optimizer steps have been done."""
PROOF_SAMPLES = 5
"""Samples that proofs run on."""

OWN_LOSS = OwnLoss()


class Kinds:
    """All kinds of training calls that a model was called with."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._kinds: dict[Hashable, Kind] = {}
        self._unknown: set[Hashable] = set()

    def to_cut(self, plain: Callable[..., Any], tree: Tree, hint: int | None) -> tuple[Call | None, int | None]:
        """(the call if it has to be cut, else None; the samples in it, if they can be told). `hint`: samples in the
        loader's batch."""
        by_split = self._core.settings.split is not None
        key = structure_of(tree, self._core.model, self._core.device, by_split=by_split)
        kind = self._kinds.get(key)
        samples = self._told(tree, hint) if by_split else None if kind is None else samples_by(tree, kind.layout)
        if kind is not None and samples is not None:
            call = self._known(kind, plain, tree, samples)
        else:
            samples = self._told(tree, hint)
            if samples is None:
                self._runs_unknown(key, tree, hint)
            if samples == 1 and self._core.plan is None:
                self._core.note("note", "a batch of one sample cannot be cut: it runs whole, as the script wrote it")
            if samples is None or samples < 2:
                return None, samples
            call = self._first(key, plain, tree, samples)
        if call is not None:
            call.key = key
        return call, samples

    def _told(self, tree: Tree, hint: int | None) -> int | None:
        """Samples in a call that nothing is known about: the loader's, where they fit its tensors, or those it shows."""
        fits = hint is not None and (self._core.settings.split is not None or _has_dimension(tree, hint))
        return hint if fits else shared_samples(tree)

    def _runs_unknown(self, key: Hashable, tree: Tree, hint: int | None) -> None:
        """A call whose samples cannot be told: raise Refused if a prescribed micro-batch means it to be cut, else say that it
        runs whole."""
        core = self._core
        prescribed = core.fixed.micro_batch if core.fixed is not None else core.settings.micro_batch
        if key in self._unknown or not tensors(tree):
            return
        if hint is not None and prescribed is not None and prescribed < hint:
            refuse_packed(tree)
            raise uncuttable(f"none of the call's tensors has a dimension of {hint}, the samples in the batch")
        self._unknown.add(key)
        core.note("note", "a call whose tensors do not show how many samples it has runs whole; split= says how to cut it")

    def task(self, plain: Callable[..., Any], tree: Tree) -> Task:
        """What there is to profile in a call with these arguments, whole or cut."""
        core = self._core
        samples = shared_samples(tree)
        if samples is None:
            raise uncuttable("its tensors do not share a first dimension")
        call = next(ways_to_cut(core.model, plain, tree, samples, core.device, core.settings.split))
        return self._task(call, OWN_LOSS, Demand(samples), BY_SAMPLES)

    def weighting(self, call: Call) -> Weighting:
        """How the call's own loss is weighted."""
        return self._kinds[call.key].weighting

    def prove_again(self, call: Call) -> None:
        """The weighting of the call's own loss did not hold on this batch: infer it anew. Raises Refused."""
        kind = self._kinds[call.key]
        before, (few, blocks) = kind.weighting, self._provable(kind, call)
        with checkpointed(self._core.model, blocks):
            deviation = self._on_fewer(lambda n: self._infer(kind, call, n), few)
        if deviation is not None or kind.weighting == before:
            raise self._mixes(call, deviation or Deviation("the loss", float("nan"), 0.0))

    def _first(self, key: Hashable, plain: Callable[..., Any], tree: Tree, samples: int) -> Call | None:
        core = self._core
        worst: tuple[Call, Deviation] | None = None
        for call in ways_to_cut(core.model, plain, tree, samples, core.device, core.settings.split):
            shapes = shapes_per_sample(tree, call.layout)
            kind = Kind(call.layout, shapes, {shapes: call.outputs}, None if core.fixed else self._bound(call))
            if self._runs_whole(kind, call):
                self._kinds[key] = kind
                return None
            deviation = self._prove(kind, call, shapes)
            if deviation is None:
                self._kinds[key] = kind
                return call
            if worst is None or deviation.relative < worst[1].relative:
                worst = call, deviation
        assert worst is not None  # ways_to_cut raises where there is none
        raise self._mixes(*worst)

    def _known(self, kind: Kind, plain: Callable[..., Any], tree: Tree, samples: int) -> Call | None:
        shapes = shapes_per_sample(tree, kind.layout)
        fits = no_larger(shapes, kind.shapes)
        if fits and samples <= kind.whole:
            return None
        core = self._core
        layout = Layout(kind.layout.axes, samples)
        call = Call(core.model, plain, tree, layout, Outputs(None, ()), core.device, split=core.settings.split)
        call.copies = kind.writes_input
        call.outputs = kind.outputs_of(call, shapes)
        if not fits:
            self._grew(kind, call, shapes)
        if self._runs_whole(kind, call):
            return None
        if kind.proven is None or core.steps >= kind.prove_at:
            self._prove_known(kind, call, shapes)
        return call

    def _prove_known(self, kind: Kind, call: Call, shapes: Shapes) -> None:
        """The first proof of a kind that ran whole so far, or the second one, on a later batch. Raises Refused."""
        core, again = self._core, kind.proven is not None

        def unrepeated(text: str) -> Deviation | None:
            core.events.add(core.steps, "out of memory", f"the proof that samples stay apart was not repeated ({text})")

        if again:
            deviation = surviving(lambda: self._prove(kind, call, shapes), core.device, unrepeated)
            kind.prove_at = PROVE_AGAIN * core.steps
        else:
            deviation = self._prove(kind, call, shapes)
        if deviation is not None:
            raise self._mixes(call, deviation)

    def _grew(self, kind: Kind, call: Call, shapes: Shapes) -> None:
        """The inputs are larger than any planned for: everything is planned anew, before they run."""
        if self._core.fixed is not None:
            return
        kind.shapes, kind.whole, kind.planned, kind.bound = shapes, 0, {}, self._bound(call)
        sizes = " ".join("x".join(map(str, shape)) for shape in shapes if shape)
        self._core.note("replan", f"inputs larger than any before ({sizes} per sample): planned anew before they run")

    # ---- whole or cut

    def _bound(self, call: Call) -> Profile:
        task = self._task(call, OWN_LOSS, Demand(call.samples), BY_SAMPLES)
        return self._core.planner.profile(task, "off")

    def _runs_whole(self, kind: Kind, call: Call) -> bool:
        core, settings = self._core, self._core.settings
        if core.fixed is not None:
            return core.fixed.micro_batch >= call.samples and core.fixed.precision == "off"
        assert kind.bound is not None
        if settings.micro_batch is not None and settings.micro_batch < call.samples:
            return False
        if settings.precision not in ("auto", "off", "float32"):
            return False  # a prescribed precision is applied around micro-batches
        demand = Demand(call.samples, settings.target_batch, micro_batch=call.samples, checkpoint=settings.checkpoint or ())
        if call.outputs.loss is None:
            demand = replace(demand, standing_per_sample=LOSS_BOUND * output_bytes(call))
        try:
            plan = search([kind.bound], core.planner.budget(), demand)
        except DoesNotFit:
            if settings.whole:
                raise
            return False
        if core.plan is None:
            core.adopt(replace(plan, notes=(*plan.notes, "fits as is: it runs whole, as the script wrote it")), kind.bound)
        kind.whole = max(kind.whole, call.samples)
        return True

    # ---- proofs

    def _prove(self, kind: Kind, call: Call, shapes: Shapes) -> Deviation | None:
        """None if the call may be cut this way; else how far its parts are from the whole."""
        few, blocks = self._provable(kind, call)
        with checkpointed(self._core.model, blocks):
            return self._on_fewer(lambda n: self._prove_on(n, kind, call, shapes), few)

    def _on_fewer(self, attempt: Callable[[int], Deviation | None], few: int) -> Deviation | None:
        return on_fewer(attempt, few, self._core.device, self._core.proof_ran_out)

    def _provable(self, kind: Kind, call: Call) -> tuple[int, tuple[str, ...]]:
        """(samples to prove with that fit at once, blocks to checkpoint for that)."""
        core, most = self._core, min(PROOF_SAMPLES, call.samples)
        if kind.bound is None:
            return most, ()
        room = core.planner.budget().room
        applied = () if core.plan is None else core.plan.checkpoint
        for blocks in (applied,) if applied else ((), kind.bound.blocks):
            cheaper = with_blocks(kind.bound, blocks)
            fitting = [n for n in range(2, most + 1) if cheaper.peak(n, accumulates=False).upper <= room]
            if fitting:
                return max(fitting), () if applied else blocks
        return min(2, most), () if applied else kind.bound.blocks

    def _prove_on(self, few: int, kind: Kind, call: Call, shapes: Shapes) -> Deviation | None:
        """The same, on the first `few` samples."""
        allowed = self._core.settings.allow_inexact
        outputs, deviation = joined_outputs(call, few)
        if not deviation.agrees:
            if not self._is_allowed(deviation, call, few):
                return deviation
            self._accept(deviation)
        kind.outputs[shapes] = call.outputs = outputs
        entrances = look_for_side_doors(call, few, allowed)
        self._core.staging.stage_also(entrances.parameters)
        kind.writes_input = call.copies = entrances.writes_input
        if outputs.loss is not None:
            found = self._infer(kind, call, few)
            if found is not None:
                if not self._is_allowed(found, call, few):
                    return found
                self._accept(found)
        kind.proven, kind.prove_at = outputs, self._core.steps + 1
        return None

    def _infer(self, kind: Kind, call: Call, few: int) -> Deviation | None:
        assert call.outputs.loss is not None
        work = CallWork(frozen_norms(call), call.outputs.loss, draws=False)
        weighting, deviation = infer_weighting(work, few, self._core.staging, self._core.model)
        kind.weighting = weighting or BY_SAMPLES
        return deviation if weighting is None else None

    def _is_allowed(self, deviation: Deviation, call: Call, few: int) -> bool:
        """Whether the user accepted this deviation by its own name, or by those of the modules it comes from."""
        allowed = self._core.settings.allow_inexact
        if not allowed or deviation.where in allowed:
            return bool(allowed)
        return mixing_module(call, few, ()) is not None and mixing_module(call, few, allowed) is None

    def _accept(self, deviation: Deviation) -> None:
        self._core.note(
            "not equal",
            f"{deviation.where} differs by {deviation.relative:.2g} between the whole batch and its parts; accepted by "
            "allow_inexact",
        )

    def _mixes(self, call: Call, deviation: Deviation) -> Refused:
        few = min(PROOF_SAMPLES, call.samples)
        allowed = self._core.settings.allow_inexact
        found = surviving(lambda: mixing_module(call, few, allowed), self._core.device, lambda text: None) or deviation
        micro_batch = self._core.settings.micro_batch
        budget = format_bytes(self._core.planner.budget().limit)
        why = f"{budget} require" if micro_batch is None else f"micro_batch={micro_batch} asks"
        return Refused(
            f"cutting a batch of {call.samples} into micro-batches, as {why}",
            found=f"{found.where} mixes samples: its value for {few} samples together differs by {found.relative:.2g} from "
            "that for the same samples in two parts",
            next_move=f"accept that with allow_inexact=[{found.where!r}], compute what needs all samples together outside the "
            "model, or give it a budget in which the batch runs whole",
        )

    # ---- planning for what consumes the output

    def planned(
        self,
        call: Call,
        consumer: Consumer,
        weighting: Weighting,
        *,
        mode: str = "accumulate",
        standing_per_sample: int = 0,
    ) -> Planned:
        """The plan for this consumer of the call's output: made at its first use, and again where there is more room."""
        core, kind = self._core, self._kinds[call.key]
        if core.fixed is not None:
            return Planned(core.fixed, None, Demand(call.samples))
        demand = Demand(
            call.samples,
            core.settings.target_batch,
            mode=mode,
            standing=core.old_gradient_bytes(),
            standing_per_sample=standing_per_sample,
        )
        found = kind.planned.get(consumer.name)
        if found is None or call.samples > found.demand.share:
            there = kind.bound if isinstance(consumer, OwnLoss) else None
            plan, profile = core.planner.plan(self._task(call, consumer, demand, weighting), profile=there)
            found = kind.planned[consumer.name] = Planned(plan, profile, demand)
            core.adopt(plan, profile, found.tuned)
        elif demand.standing < found.demand.standing and found.profile is not None:
            self._roomier(found, demand.standing)
        return found

    def _roomier(self, planned: Planned, standing: int) -> None:
        """The script zeroes its gradients before the batch runs: their room can be used from now on."""
        core = self._core
        planned.demand = replace(planned.demand, standing=standing)
        demand = replace(planned.demand, micro_batch=core.settings.micro_batch, checkpoint=planned.plan.checkpoint)
        assert planned.profile is not None
        plan = search([planned.profile], core.planner.budget(), demand)
        if plan.micro_batch > planned.plan.micro_batch and core.largest == planned.plan.micro_batch:
            planned.plan = plan
            core.adopt(plan, planned.profile, planned.tuned)

    def _task(self, call: Call, consumer: Consumer, demand: Demand, weighting: Weighting) -> Task:
        def make_work(precision: str) -> MakeWork:
            def build(twin: Twin, samples: int) -> Work:
                other, made = twin_call(call, twin, samples)
                its, more = consumer.twin(twin, samples)
                return its.work(other, precision, (*made, *more))

            return build

        def real_work(precision: str) -> Work:
            return consumer.work(call, precision)

        return Task(make_work, real_work, weighting, _traceable(call), demand, self._core.compiled)


def _has_dimension(tree: Tree, size: int) -> bool:
    return any(size in tensor.shape for tensor in tensors(tree))


def _traceable(call: Call) -> int:
    """Samples to trace with: more than a small call has, so that what one sample costs can be told from what all do."""
    if call.split is not None or call.samples < 2 or any(t.layout is not torch.strided for t in tensors(call.tree)):
        return call.samples
    return max(call.samples, CHECK)


def output_bytes(call: Call) -> int:
    """Bytes per sample of the differentiable outputs, in float32 as losses compute."""
    batch = [leaf for leaf in call.outputs.leaves if leaf.kind == "batch" and leaf.differentiable]
    return sum(leaf.bytes_for(1) * max(1, 4 // leaf.dtype.itemsize) for leaf in batch)
