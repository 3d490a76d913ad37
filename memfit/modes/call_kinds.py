"""Decides on training calls: whole or cut, how proven, how planned. Keeps one entry per kind (call signature).

Calls that wait for one backward hold their activations together, and a script's loss shows its memory only when it runs. So at
first a call runs whole only if that leaves room for what may come. Otherwise it is cut, until a step was seen to need no more
than planned. Not covered: calls of several models that each fit whole but not together, where the last one takes what the first
one's backward needs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch

from memfit._errors import DoesNotFit, MemfitError, Refused, first_line
from memfit.autotune.active_plan import Planned
from memfit.autotune.measure_sizes import UNSEEN
from memfit.autotune.task import LOSS_BOUND, Task
from memfit.batches.cut import Layout, common_size, refuse_packed, second_size, shared_samples, uncuttable, unread
from memfit.batches.lists import cut_lists, samples_in_lists
from memfit.batches.shapes import Shapes, no_larger, samples_by, shapes_per_sample
from memfit.batches.tree import tensors
from memfit.capture.call import Call, Split, Tree
from memfit.capture.consumers import Consumer, OwnLoss, Twin
from memfit.capture.find_side_outputs import FoundDoors
from memfit.capture.infer_layout import look_of, structure_of, twin_call, ways_to_cut
from memfit.capture.outputs import Otherwise, Outputs
from memfit.capture.side_outputs import Door, Doorway
from memfit.engine.accumulate import Work
from memfit.engine.buffers import beside_statistics
from memfit.engine.call_context import without_saved_tensors_hooks
from memfit.engine.recovery import surviving
from memfit.engine.version_checks import Modified
from memfit.engine.weighting import BY_SAMPLES, BY_TERM, Weighting, WeightsChanged
from memfit.equivalence.tolerances import Deviation
from memfit.hardware.exhausted import is_out_of_memory, said_by
from memfit.modes.call_kind import CallKind, PlannedCall
from memfit.modes.call_proofs import Prover
from memfit.modes.pending_calls import UNDERWAY
from memfit.modes.whole_calls import UncutCalls
from memfit.planning.plan import Plan
from memfit.planning.search import Demand, keepable, search
from memfit.profiling.profile import Profile
from memfit.runtime.core import Core
from memfit.runtime.faults import is_fault, report_fault, strict
from memfit.tracing.build_profile import CHECK
from memfit.tracing.trace import MakeWork

RESERVE = 5
"""Until a step was seen, a call runs whole only if one part in this many of the available memory stays free."""
PAIRS = 8
"""float32 matrices over all pairs of samples that an unseen loss may hold at once (contrastive losses: similarities, their
logarithms both ways, and the gradients of all these), capped at half of the available memory."""
PROVE_AGAIN = 4
"""A proof is repeated at the next batch, and then whenever the optimizer step count has grown by this factor."""

OWN_LOSS = OwnLoss()


RECOGNISED = 1000
"""Call signatures that are remembered."""


@dataclass(frozen=True)
class Recognised:
    """What the signature of a call tells."""

    key: tuple[Any, ...]
    """The key of its kind."""
    kind: CallKind | None
    """Its kind; None if it is new."""
    samples: int | None
    """Its number of samples; None if unknown."""
    shapes: Shapes
    """Its shapes per sample."""


class CallKinds:
    """All kinds of training calls of a model."""

    def __init__(self, core: Core) -> None:
        self._core, self._prover = core, Prover(core)
        self._kinds: dict[tuple[Any, ...], CallKind] = {}
        self._recognised: dict[Hashable, Recognised] = {}
        self._doors: dict[str, tuple[Door, ...]] = {}
        self._unknown: set[Hashable] = set()
        self._untrained: set[Hashable] = set()
        self._uncut = UncutCalls(core)
        self._open = self._most_open = 0
        self._time_first = any(getattr(module, "batch_first", True) is False for module in core.model.modules())

    def forget(self) -> None:
        """Drop all plans."""
        for kind in self._kinds.values():
            kind.whole, kind.refused, kind.planned = 0, None, {}

    def rebuild(self) -> None:
        """Drop all that is known of calls: the model has changed."""
        for known in (self._kinds, self._recognised, self._doors, self._unknown, self._untrained):
            known.clear()

    def ended(self) -> None:
        """Note that backward reached the calls since the last one, or that the optimizer stepped."""
        self._open = 0

    def to_cut(
        self, name: str, plain: Callable[..., Any], tree: Tree, hint: int | None
    ) -> tuple[Call | None, int | None]:
        """Return (the call of method `name` if it has to be cut, else None; its number of samples, if known). `hint`: samples
        in the loader's batch."""
        self._open += 1
        self._most_open = max(self._most_open, self._open)
        try:
            with without_saved_tensors_hooks():
                try:
                    return self._through_doors(name, plain, tree, hint)
                except Otherwise:  # the call is of another kind
                    self._kinds.pop(self._recognise(name, tree, hint).key, None)
                    return self._through_doors(name, plain, tree, hint)
        except Exception as error:
            found = self._recognise(name, tree, hint)
            samples = found.samples if found.samples is not None else next(iter(self._told(tree, hint)), None)
            with without_saved_tensors_hooks():
                if self._uncut.accept(found.key, plain, tree, samples, error):
                    return None, samples
            raise

    def cut_instead(
        self, name: str, plain: Callable[..., Any], tree: Tree, hint: int | None, error: BaseException
    ) -> Call | None:
        """Return the call to be cut after it ran out of memory as a whole. None if that would train something else: it cannot
        be cut, or its first run left side effects."""
        core, found = self._core, self._recognise(name, tree, hint)
        if found.kind is None or found.samples is None or found.samples < 2 or core.settings.whole:
            return None
        found.kind.whole, found.kind.too_many = 0, found.samples
        self._open -= 1
        call, _ = self.to_cut(name, plain, tree, hint)
        if call is None or call.composition.moved or call.copies:
            return None
        core.planner.measurer.ran_out(found.samples)
        if core.in_force.fixed is not None and core.in_force.active is not None:
            core.in_force.active.largest = min(core.in_force.active.largest, found.samples // 2)
        said = f"{found.samples} samples ran out of memory as a whole ({said_by(error)}): such batches are cut from now on"
        core.events.add(core.steps, "out of memory", said)
        return call

    def _through_doors(
        self, name: str, plain: Callable[..., Any], tree: Tree, hint: int | None
    ) -> tuple[Call | None, int | None]:
        """`to_cut`, and find what side effects the forward leaves besides its output."""
        doors = self._doors.get(name)
        try:
            return self._to_cut(name, Doorway(plain, doors) if doors else plain, tree, hint)
        except FoundDoors as found:
            self._doors[name] = found.doors
        self._kinds = {key: kind for key, kind in self._kinds.items() if key[0] != name}
        return self._to_cut(name, Doorway(plain, self._doors[name]), tree, hint)

    def _to_cut(
        self, name: str, plain: Callable[..., Any], tree: Tree, hint: int | None
    ) -> tuple[Call | None, int | None]:
        found = self._recognise(name, tree, hint)
        key, samples = found.key, found.samples
        if self._uncut.covers(key, tree):
            return None, samples if samples is not None else next(iter(self._told(tree, hint)), None)
        if found.kind is not None and samples is not None:
            call = self._known(found.kind, plain, tree, samples, found.shapes)
        else:
            call, samples = (None, None) if key in self._untrained else self._met(key, plain, tree, hint)
        if call is not None:
            call.key = key if key in self._kinds else ("single", key)
            call.host_draws = self._core.accumulator.host_draws
            call.composition = self._kinds[call.key].composition.afresh()
        return call, samples

    def _recognise(self, name: str, tree: Tree, hint: int | None) -> Recognised:
        """Return a call's kind and its number of samples."""
        core, flags = self._core, self._core.flags.now()
        look = None if core.split is not None else look_of(tree, core.model, core.device, flags)
        before = None if look is None else self._recognised.get((name, look))
        if before is not None and self._kinds.get(before.key) is before.kind:
            return before
        split = self._split(tree, hint)
        key = name, structure_of(tree, core.model, core.device, split, flags)
        kind = self._kinds.get(key)
        if split is not None:
            told = self._told(tree, hint)
            samples = shared_samples(tree) if kind is not None and kind.counted else next(iter(told), None)
        else:
            samples = None if kind is None else samples_by(tree, kind.layout)
        found = Recognised(key, kind, samples, () if kind is None else shapes_per_sample(tree, kind.layout))
        if look is not None and kind is not None:
            self._recognised = {} if len(self._recognised) >= RECOGNISED else self._recognised
            self._recognised[name, look] = found
        return found

    def _met(
        self, key: tuple[Any, ...], plain: Callable[..., Any], tree: Tree, hint: int | None
    ) -> tuple[Call | None, int | None]:
        """`to_cut` for a call of an unknown kind."""
        told = self._told(tree, hint)
        if not told:
            self._runs_unknown(key, tree, hint)
            return None, None
        refusal: Refused | None = None
        for samples in told:
            if samples < 2 and not self._core.team.alone:
                return self._single(key, plain, tree), samples
            if samples < 2:
                if self._core.plan is None:
                    self._core.note("note", "a batch of one sample cannot be cut: it runs whole, as the script wrote it")
                return None, samples
            try:
                return self._first(key, plain, tree, samples), samples
            except Refused as refused:
                refusal = refusal or refused
        assert refusal is not None
        raise refusal

    def _told(self, tree: Tree, hint: int | None) -> tuple[int, ...]:
        """Return how many samples a call of an unknown kind may have, likeliest first: the loader's, if they fit its tensors;
        their common first dimension; the only size that all of them have; the second dimension, if time may come first."""
        split = self._split(tree, hint)
        if split is cut_lists:
            hint = samples_in_lists(tree, hint)
        fits = hint is not None and (split is not None or _has_dimension(tree, hint))
        found = [hint if fits else shared_samples(tree)]
        if split is not None and split is not cut_lists:
            found.append(shared_samples(tree))
        if split is None:  # (a script may pass a part of its batch, with as many features as the loader has samples)
            found += [shared_samples(tree), common_size(tree), second_size(tree) if self._time_first else None]
        return tuple(dict.fromkeys(samples for samples in found if samples is not None))

    def _split(self, tree: Tree, hint: int | None) -> Split | None:
        """Return what cuts these arguments, if it is not the dimensions of their tensors."""
        given = self._core.split
        return given if given is not None or samples_in_lists(tree, hint) is None else cut_lists

    def _runs_unknown(self, key: Hashable, tree: Tree, hint: int | None) -> None:
        """Handle a call whose samples are unknown: raise Refused if a prescribed micro-batch requires a cut, else report that
        it runs whole."""
        core, kinds = self._core, unread(tree)
        if key in self._unknown or not (tensors(tree) or kinds):
            return
        if hint is not None and core.in_force.prescribed is not None and core.in_force.prescribed < hint:
            refuse_packed(tree)
            if not tensors(tree):
                raise uncuttable(f"the call is given a {kinds[0]}, in which memfit does not see the batch's {hint} samples")
            raise uncuttable(f"none of the call's tensors has a dimension of {hint}, the samples in the batch")
        self._unknown.add(key)
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors(tree)[:4])
        what = f"whose tensors {shapes} do" if shapes else f"given a {kinds[0]}, which does"
        core.tell(f"a call {what} not show how many samples it has runs whole; split= says how to cut it")

    def task(self, plain: Callable[..., Any], tree: Tree) -> Task:
        """Return the task to profile for a call with these arguments, whole or cut."""
        core = self._core
        samples = shared_samples(tree)
        if samples is None:
            raise uncuttable("its tensors do not share a first dimension")
        call = next(ways_to_cut(core.model, plain, tree, samples, core.device, self._split(tree, None)))
        return self._task(call, OWN_LOSS, Demand(samples), BY_SAMPLES)

    def of(self, call: Call) -> CallKind:
        """Return what is known of calls like this one."""
        return self._kinds[call.key]

    def add(self, call: Call) -> None:
        """Add a joint call, whose calls are all known and proven."""
        if call.key not in self._kinds:
            shapes = call.shapes
            self._kinds[call.key] = CallKind(call.layout, shapes, {shapes: call.outputs}, proven=call.outputs)

    def weighting(self, call: Call) -> Weighting:
        """Return how the call's own loss is weighted."""
        return self._kinds[call.key].weighting

    def runs_whole_after(self, call: Call, error: BaseException) -> bool:
        """Return whether a call may run whole after its pass in pieces raised `error`."""
        if isinstance(error, Otherwise):
            self._kinds = {key: kind for key, kind in self._kinds.items() if key not in {c.key for c in call.calls}}
        if not isinstance(error, Exception) or isinstance(error, (MemfitError, Modified, WeightsChanged)):
            return False
        if is_out_of_memory(error):
            return False
        if strict() and is_fault(error):
            return False
        if not self._core.team.alone or any(c.several or c.values is not None for c in call.calls):
            return False
        bounds = [self._kinds[c.key].bound for c in call.calls]
        needs = [bound.peak(c.samples, accumulates=False).upper for c, bound in zip(call.calls, bounds) if bound is not None]
        return sum(needs) <= self._core.memory.budget().room

    def say_whole(self, call: Call, error: BaseException) -> None:
        """Report that calls like this one, which failed in pieces, run whole from now on."""
        for each in call.calls:
            kind = self._kinds[each.key]
            kind.whole = kind.beside = sys.maxsize
        what = f"{type(error).__name__}: {first_line(error)}"
        self._core.tell(f"a batch failed in pieces; it and batches like it run whole, as the script wrote them: {what}")
        report_fault(self._core, error)

    def prove_again(self, call: Call) -> None:
        """Infer the weighting of the call's own loss again: it did not hold on this batch. Raises Refused."""
        kind = self._kinds[call.key]
        if call.samples < 2:
            kind.weighting = BY_SAMPLES
            return
        before = kind.weighting
        deviation = self._prover.weigh_again(kind, call)
        if deviation is not None or kind.weighting == before:
            raise self._prover.mixes(call, deviation or Deviation("the loss", float("inf"), 0.0))

    def _first(self, key: tuple[Any, ...], plain: Callable[..., Any], tree: Tree, samples: int) -> Call | None:
        core = self._core
        worst: tuple[Call, Deviation] | None = None
        for call in ways_to_cut(core.model, plain, tree, samples, core.device, self._split(tree, samples)):
            if not self._trains(call):
                self._untrained.add(key)
                return None
            shapes = call.shapes
            self._prover.look_at_single_samples(call)
            kind = CallKind(call.layout, shapes, {shapes: call.outputs}, None if core.in_force.fixed else self._bound(call))
            kind.counted = core.split is not None and shared_samples(tree) == samples
            whole = self._runs_whole(kind, call)
            if whole and core.team.alone:
                self._kinds[key] = kind
                return None
            # With several ranks a known loss is weighted over all of them: then the call is cut, even if into one piece.
            deviation = self._prover.prove(kind, call, shapes)
            if deviation is None:
                kind.whole = 0
                self._kinds[key] = kind
                return call
            if whole:
                core.tell("samples of one process's share are not independent: each process runs its share whole")
                self._kinds[key] = kind
                return None
            if worst is None or deviation.relative < worst[1].relative:
                worst = call, deviation
        assert worst is not None  # ways_to_cut raises where there is none
        raise self._prover.mixes(*worst)

    def _single(self, key: tuple[Any, ...], plain: Callable[..., Any], tree: Tree) -> Call | None:
        """Return a rank's one-sample share of an unknown kind, in one piece. Its loss is weighted by its denominator, if that
        shows without another sample to prove it on."""
        core = self._core
        call = next(ways_to_cut(core.model, plain, tree, 1, core.device, self._split(tree, 1)))
        if not self._trains(call):
            return None
        shapes = call.shapes
        bound = None if core.in_force.fixed else self._bound(call)
        kind = CallKind(call.layout, shapes, {shapes: call.outputs}, bound, weighting=BY_TERM)
        self._kinds[("single", key)] = kind
        return call

    def _trains(self, call: Call) -> bool:
        """Return whether a backward can go through the call's outputs, as far as memfit sees. Raises Refused if a prescribed
        micro-batch requires a cut."""
        try:
            return call.outputs.trains
        except Refused as refused:
            if self._core.in_force.prescribed is not None and self._core.in_force.prescribed < call.samples:
                raise
            self._core.tell(f"the model runs whole: {refused.found}")
            return False

    def _known(
        self, kind: CallKind, plain: Callable[..., Any], tree: Tree, samples: int, shapes: Shapes
    ) -> Call | None:
        fits = no_larger(shapes, kind.shapes)
        if fits and samples <= kind.whole and UNDERWAY.whole <= kind.beside:
            return None
        core = self._core
        layout = Layout(kind.layout.axes, samples)
        call = Call(core.model, plain, tree, layout, Outputs(None, ()), core.device, split=self._split(tree, samples))
        call.copies, call.shapes = kind.writes_input, shapes
        call.outputs = kind.outputs_of(call, shapes)
        if not fits:
            self._grew(kind, call, shapes)
        if core.team.alone and self._runs_whole(kind, call):
            return None
        if call.samples > 1 and (kind.proven is None or core.steps >= kind.prove_at or call.samples > kind.alike):
            self._prove_known(kind, call, shapes)
        return call

    def _prove_known(self, kind: CallKind, call: Call, shapes: Shapes) -> None:
        """Prove a kind that always ran whole, or repeat its proof on a later batch. Raises Refused."""
        core, again = self._core, kind.proven is not None

        def unrepeated(text: str) -> Deviation | None:
            core.events.add(core.steps, "out of memory", f"the proof that samples do not mix was not repeated ({text})")

        if again:
            deviation = surviving(lambda: self._prover.prove(kind, call, shapes), core.device, unrepeated)
            kind.prove_at = core.steps if kind.mute else PROVE_AGAIN * core.steps
        else:
            deviation = self._prover.prove(kind, call, shapes)
        if deviation is not None:
            raise self._prover.mixes(call, deviation)

    def _grew(self, kind: CallKind, call: Call, shapes: Shapes) -> None:
        """Plan again, before the call runs: its inputs are larger than any planned for."""
        if self._core.in_force.fixed is not None:
            return
        kind.shapes, kind.whole, kind.refused, kind.planned, kind.bound = shapes, 0, None, {}, self._bound(call)
        sizes = " ".join("x".join(map(str, shape)) for shape in shapes if shape)
        self._core.note("replan", f"inputs larger than any before ({sizes} per sample): replanned before they run")

    # ---- whole or cut

    def _bound(self, call: Call) -> Profile:
        task = self._task(call, OWN_LOSS, Demand(call.samples), BY_SAMPLES)
        return self._core.planner.profile(task, "off")

    def _runs_whole(self, kind: CallKind, call: Call) -> bool:
        core, settings = self._core, self._core.settings
        if call.samples >= kind.too_many:
            return False
        if core.in_force.fixed is not None:
            return core.in_force.fixed.micro_batch >= call.samples and core.in_force.fixed.precision == "off"
        assert kind.bound is not None
        if settings.micro_batch is not None and settings.micro_batch < call.samples:
            return False
        if settings.precision not in ("auto", "off", "float32"):
            return False  # a prescribed precision is applied around micro-batches
        waiting = UNDERWAY.whole
        circumstances = core.in_force.settled, call.samples, waiting, self._most_open
        if kind.refused == circumstances or (kind.planned and kind.refused and kind.refused[0] == core.in_force.settled):
            return False  # (a cut call stays cut until more is known: checking takes time and memory)
        demand = Demand(call.samples, settings.target_batch, checkpoint=settings.checkpoint or ())
        if call.outputs.loss is None:
            demand = replace(demand, standing_per_sample=LOSS_BOUND * call.outputs.bytes_per_sample)
        try:
            plan, kind.bound = core.planner.whole(self._task(call, OWN_LOSS, demand, BY_SAMPLES), kind.bound)
        except DoesNotFit:
            if settings.whole:
                raise
            plan = None
        if plan is None or not (settings.whole or self._leaves_room(call, plan, kind.bound)):
            kind.whole, kind.refused = 0, circumstances
            return False
        if core.plan is None or (core.plan.share, core.plan.accumulation > 1) == (call.samples, True):
            plan = replace(plan, notes=(*plan.notes, "fits as is: it runs whole, as the script wrote it"))
            core.in_force.adopt(Planned(plan, kind.bound))
        kind.whole, kind.beside = max(kind.whole, call.samples), waiting
        return True

    def _leaves_room(self, call: Call, plan: Plan, profile: Profile) -> bool:
        """Return whether room is left beside this whole call for those that will wait for the same backward and, before a step
        was seen, for what may come."""
        core, grows = self._core, profile.added_by(call.samples)
        reserve = 0
        if not core.in_force.settled and not core.normalises_batches():  # (cutting changes batch norm's statistics)
            there = plan.room + grows
            pairs = 0 if call.outputs.loss is not None else PAIRS * 4 * call.samples**2
            reserve = max(there // RESERVE, min(pairs, there // 2))
        ran = any(timing.samples == call.samples for timing in profile.timings)
        unseen = grows // UNSEEN if core.device.type == "cpu" and not ran else 0
        return grows * (self._most_open - self._open) + max(reserve, unseen) <= plan.room

    # ---- planning for a consumer of the output

    def planned(
        self,
        call: Call,
        consumer: Consumer,
        weighting: Weighting,
        *,
        mode: str = "accumulate",
        standing_per_sample: int = 0,
    ) -> Planned:
        """Return the plan for this consumer of the call's output and put it in force. It is made at the first use, and again if
        there is more room."""
        if self._core.in_force.fixed is not None:
            assert self._core.in_force.active is not None
            return self._core.in_force.active
        with without_saved_tensors_hooks():
            planned = self._planned(call, consumer, weighting, mode, standing_per_sample)
        self._core.in_force.activate(planned)
        return planned

    def _planned(
        self, call: Call, consumer: Consumer, weighting: Weighting, mode: str, standing_per_sample: int
    ) -> PlannedCall:
        core, kind = self._core, self._kinds[call.key]
        found, shapes = kind.planned.get(consumer.name), call.shapes
        if found is not None and not no_larger(shapes, found.shapes):
            found = None
        if found is not None and call.samples <= found.demand.share and not found.demand.standing:
            return found
        demand = Demand(
            call.samples,
            core.settings.target_batch,
            mode=mode,
            standing=core.old_gradient_bytes(),
            standing_per_sample=standing_per_sample,
        )
        if found is not None and call.samples > found.demand.share:
            found = self._for_more(found, demand)
        elif found is not None and demand.standing < found.demand.standing:
            found = self._roomier(found, demand.standing)
        if found is None:
            there = kind.bound if isinstance(consumer, OwnLoss) else None
            plan, profile = core.planner.plan(self._task(call, consumer, demand, weighting), profile=there)
            found = self._adopted(plan, profile, demand, shapes)
        kind.planned[consumer.name] = found
        return found

    def _adopted(self, plan: Plan, profile: Profile, demand: Demand, shapes: Shapes) -> PlannedCall:
        made = PlannedCall(keepable(plan, profile, self._most_kept(profile)), profile, demand, shapes)
        self._core.in_force.adopt(made)
        return made

    def _for_more(self, planned: PlannedCall, demand: Demand) -> PlannedCall | None:
        """Return the plan for a call with more samples, none larger than planned for, or None if nothing fits. It reuses the
        profile: the call's own would tell less about larger samples."""
        core = self._core
        assert planned.profile is not None
        try:
            possible = core.planner.measurer.possible(core.planner.constrained(demand), planned.profile)
            plan = search([planned.profile], core.memory.budget(), replace(possible, equal=core.compiled))
        except DoesNotFit:
            return None
        return self._adopted(plan, planned.profile, demand, planned.shapes)

    def _roomier(self, planned: PlannedCall, standing: int) -> PlannedCall:
        """Return the plan now that the script zeroes its gradients before the batch runs, which frees their memory."""
        core = self._core
        planned.demand = replace(planned.demand, standing=standing)
        demand = replace(planned.demand, micro_batch=core.settings.micro_batch, checkpoint=planned.plan.checkpoint)
        assert planned.profile is not None
        try:
            plan = search([planned.profile], core.memory.budget(), demand)
        except DoesNotFit:
            return planned  # less memory is free now; the current plan stays
        if plan.micro_batch > planned.plan.micro_batch == planned.largest:
            return self._adopted(plan, planned.profile, planned.demand, planned.shapes)
        return planned

    def _most_kept(self, profile: Profile) -> int | None:
        """Return how many micro-batches may keep activations at once: one if the next would write what its graph has saved."""
        return 1 if beside_statistics(self._core.model, profile.written_buffers) else None

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
    """Return the samples to trace with: more than a small call has, to tell the cost per sample from the fixed cost."""
    if call.split is not None or call.samples < 2 or any(t.layout is not torch.strided for t in tensors(call.tree)):
        return call.samples
    return max(call.samples, CHECK)


