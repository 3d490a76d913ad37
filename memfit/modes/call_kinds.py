"""Decides on training calls: whole or cut, and how proven. Keeps one entry per kind (call signature)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from memfit._errors import MemfitError, first_line
from memfit.autotune.active_plan import Planned
from memfit.autotune.task import Task
from memfit.batches.cut import shared_samples, uncuttable
from memfit.batches.shapes import Shapes, no_larger
from memfit.capture.call import Call, Tree
from memfit.capture.consumers import Consumer
from memfit.capture.find_side_outputs import FoundDoors
from memfit.capture.infer_layout import ways_to_cut
from memfit.capture.outputs import Otherwise
from memfit.capture.side_outputs import Door, Doorway
from memfit.engine.batch_dependent import BatchDependent
from memfit.engine.branches import Act
from memfit.engine.call_attributes import Attributes
from memfit.engine.call_context import without_saved_tensors_hooks
from memfit.engine.planning_scope import reaching
from memfit.engine.recovery import surviving
from memfit.engine.unseen_moves import UnseenMoves
from memfit.engine.weighting import BY_SAMPLES, Weighting, WeightsChanged
from memfit.equivalence.tolerances import Deviation
from memfit.hardware.exhausted import is_out_of_memory, said_by
from memfit.modes.call_kind import CallKind
from memfit.modes.call_plans import OWN_LOSS, CallPlans
from memfit.modes.call_proofs import Prover
from memfit.modes.call_signatures import Signatures
from memfit.modes.call_variants import CallVariants, not_repeated
from memfit.modes.first_calls import FirstCalls
from memfit.modes.whole_calls import UncutCalls
from memfit.planning.search import Demand
from memfit.runtime.core import Core
from memfit.runtime.faults import is_fault, report_fault, strict

PROVE_AGAIN = 4
"""A proof is repeated at the next batch, and then whenever the optimizer step count has grown by this factor."""


class CallKinds:
    """All kinds of training calls of a model."""

    def __init__(self, core: Core) -> None:
        self._core, self._prover = core, Prover(core)
        self._signatures = Signatures(core)
        self._kinds = self._signatures.kinds
        self._variants = CallVariants(core, self._signatures, self._prover)
        self._doors: dict[str, tuple[Door, ...]] = {}
        self._uncut = UncutCalls(core)
        self._plans = CallPlans(core)
        self._firsts = FirstCalls(core, self._signatures, self._prover, self._plans)

    def forget(self) -> None:
        """Drop all plans."""
        for kind in self._kinds.values():
            kind.whole, kind.refused, kind.planned = 0, None, {}

    def rebuild(self) -> None:
        """Drop all that is known of calls: the model has changed."""
        for known in (self._signatures, self._firsts, self._variants, self._doors):
            known.clear()

    def ended(self) -> None:
        """Note that backward reached the calls since the last one, or that the optimizer stepped."""
        self._plans.ended()

    def to_cut(
        self, name: str, plain: Callable[..., Any], tree: Tree, hint: int | None, attributes: Attributes
    ) -> tuple[Call | None, int | None]:
        """Return (the call of method `name` if it has to be cut, else None; its number of samples, if known). `hint`: samples
        in the loader's batch; `attributes`: the model's."""
        self._plans.opens()
        self._variants.attributes = attributes
        try:
            with without_saved_tensors_hooks(), reaching(tree):
                try:
                    return self._through_doors(name, plain, tree, hint)
                except Otherwise:  # the call is of another kind
                    self._kinds.pop(self._variants.current(name, tree, hint).key, None)
                    return self._through_doors(name, plain, tree, hint)
        except Exception as error:
            found = self._variants.current(name, tree, hint)
            samples = found.samples if found.samples is not None else next(iter(self._signatures.samples(tree, hint)), None)
            with without_saved_tensors_hooks(), reaching(tree):
                if self._uncut.accept(found.key, plain, tree, samples, error):
                    return None, samples
            raise

    def cut_instead(
        self, name: str, plain: Callable[..., Any], tree: Tree, hint: int | None, error: BaseException
    ) -> Call | None:
        """Return the call to be cut after it ran out of memory as a whole. None if that would train something else: it cannot
        be cut, or its first run left side effects."""
        core, found = self._core, self._variants.current(name, tree, hint)
        if found.kind is None or found.samples is None or found.samples < 2 or core.settings.whole:
            return None
        found.kind.whole, found.kind.too_many = 0, found.samples
        self._plans.reopens()
        call, _ = self.to_cut(name, plain, tree, hint, self._variants.attributes)
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
        if doors and any(isinstance(door, Door) and door.is_registered_now for door in doors):
            self.rebuild()
            doors = None
        try:
            return self._to_cut(name, Doorway(plain, doors) if doors else plain, tree, hint)
        except FoundDoors as found:
            self._doors[name] = found.doors
        mine = {key: kind for key, kind in self._kinds.items() if key[0] == name}
        self._firsts.ran_out |= {key: kind.too_many for key, kind in mine.items()}
        self._drop(mine)
        return self._through_doors(name, plain, tree, hint)

    def _to_cut(
        self, name: str, plain: Callable[..., Any], tree: Tree, hint: int | None
    ) -> tuple[Call | None, int | None]:
        found = self._variants.current(name, tree, hint, plain)
        key, samples = found.key, found.samples
        if self._uncut.covers(key, tree):
            return None, samples if samples is not None else next(iter(self._signatures.samples(tree, hint)), None)
        if found.kind is not None and samples is not None:
            call = self._known(found.kind, plain, tree, samples, found.shapes)
        elif key in self._firsts.untrained:
            return None, None
        else:
            graphs = self._variants.attributes.have_graphs()
            self._variants.attributes.forget()
            call, samples = self._firsts.meet(key, plain, tree, hint, graphs=graphs)
            if call is not None and key in self._kinds:
                self._variants.look_at_state(self._kinds[key])
        if call is not None:
            call.key = key if key in self._kinds else ("single", key)
            call.host_draws = self._core.accumulator.host_draws
            self._compose(call)
        return call, samples

    def _compose(self, call: Call) -> None:
        """Give a call the composition of the state that its kind moves."""
        kind = self._kinds[call.key]
        watch = partial(UnseenMoves, self._variants.attributes, call.model) if kind.findings.branching is not None else None
        call.composition = kind.composition.afresh(watch)
        call.composition.expected = self._variants.expected(call.key, kind)

    def _drop(self, keys: Iterable[tuple[Any, ...]]) -> None:
        """Forget these kinds."""
        for key in keys:
            self._kinds.pop(key, None)

    def task(self, plain: Callable[..., Any], tree: Tree) -> Task:
        """Return the task to profile for a call with these arguments, whole or cut."""
        core = self._core
        samples = shared_samples(tree)
        if samples is None:
            raise uncuttable("its tensors do not share a first dimension")
        call = next(ways_to_cut(core.model, plain, tree, samples, core.device, self._signatures.split(tree, None)))
        return self._plans.task(call, OWN_LOSS, Demand(samples), BY_SAMPLES)

    def of(self, call: Call) -> CallKind:
        """Return what is known of calls like this one."""
        return self._kinds[call.key]

    def add(self, call: Call) -> None:
        """Add a joint call, whose calls are all known and proven."""
        if call.key not in self._kinds:
            shapes = call.shapes
            self._kinds[call.key] = CallKind(call.layout, shapes, {shapes: call.outputs}, proven=call.outputs)

    def planned(
        self,
        call: Call,
        consumer: Consumer,
        weighting: Weighting,
        *,
        mode: str = "accumulate",
        standing_per_sample: int = 0,
    ) -> Planned:
        """Return the plan for this consumer of the call's output and put it in force."""
        in_force = self._core.in_force
        if in_force.fixed is not None:
            assert in_force.active is not None
            return in_force.active
        kind = self._kinds[call.key]
        with reaching(*(each.tree for each in call.calls)):
            planned = self._plans.planned(kind, call, consumer, weighting, mode, standing_per_sample)
        in_force.activate(planned)
        return planned

    def weighting(self, call: Call) -> Weighting:
        """Return how the call's own loss is weighted."""
        return self._kinds[call.key].weighting

    def runs_whole_after(self, call: Call, error: BaseException) -> bool:
        """Return whether a call may run whole after its pass in pieces raised `error`."""
        if isinstance(error, Otherwise):  # the next call is proven anew
            self._drop({each.key for each in call.calls})
        own = isinstance(error, (MemfitError, WeightsChanged)) and not isinstance(error, BatchDependent)
        if own or not isinstance(error, Exception):
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

    def may_differ(self, call: Call, differing: Collection[Act]) -> bool:
        """Prove a call again on samples that differ in these acts, in which its micro-batches differ. Return whether they
        may."""
        kind = self._kinds[call.key]
        before = replace(kind.findings)
        if self._proven_to_differ(kind, call, differing):
            self._compose(call)
            return True
        kind.findings = before
        return False

    def _proven_to_differ(self, kind: CallKind, call: Call, differing: Collection[Act]) -> bool:
        left: Collection[Act] = differing
        while left:
            kind.findings.differing = before = left
            try:
                prove = partial(self._prover.prove, kind, call, call.shapes)
                deviation = surviving(prove, self._core.device, lambda text: Deviation(text, float("inf"), 0.0))
                if deviation is not None:
                    return False
            except Exception as error:  # (then the batch runs whole, and raises what is the script's own)
                if strict() and is_fault(error):
                    raise
                return False
            finally:
                kind.findings.differing = ()
            left = [each for each in before if not kind.findings.allows(each)]
            if len(left) == len(before):
                return False
        return all(kind.findings.allows(each) for each in differing)  # a proof forgets what its samples do not move

    def say_whole(self, call: Call, error: BaseException) -> None:
        """Report that calls like this one, which failed in pieces, run whole from now on."""
        for each in call.calls:
            kind = self._kinds[each.key]
            if isinstance(error, BatchDependent):
                kind.proven = None  # the next one is proven again
            else:
                kind.whole = kind.beside = sys.maxsize
        if isinstance(error, BatchDependent):
            self._core.tell(f"a batch runs whole: {error.found}")
            return
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
        with reaching(call.tree):
            deviation = self._prover.weigh_again(kind, call)
        if deviation is not None or kind.weighting == before:
            raise self._prover.mixes(call, deviation or Deviation("the loss", float("inf"), 0.0))

    def _known(
        self, kind: CallKind, plain: Callable[..., Any], tree: Tree, samples: int, shapes: Shapes
    ) -> Call | None:
        if samples == 0:
            return None
        fits = no_larger(shapes, kind.shapes)
        if kind.is_known_whole(samples, shapes):
            return None
        core, call = self._core, self._signatures.call_of(kind, plain, tree, samples, shapes)
        call.outputs = kind.outputs_of(call, shapes)
        self._variants.look_at_state(kind)
        if not fits:
            self._plans.grew(kind, call, shapes)
        if core.team.alone and self._plans.runs_whole(kind, call):
            return None
        due = kind.proven is None or core.steps >= kind.prove_at or call.samples > kind.alike
        if call.samples > 1 and (due or self._prover.has_new_pairs(kind, call)):
            self._prove_known(kind, call, shapes)
        return call

    def _prove_known(self, kind: CallKind, call: Call, shapes: Shapes) -> None:
        """Prove a kind that always ran whole, or repeat its proof on a later batch. Raises Refused."""
        core, again = self._core, kind.proven is not None
        self._variants.attributes.forget()
        if again:
            deviation = surviving(lambda: self._prover.prove(kind, call, shapes), core.device, partial(not_repeated, core))
            deviation = None if deviation is True else deviation
            kind.prove_at = core.steps if kind.mute else PROVE_AGAIN * core.steps
        else:
            deviation = self._prover.prove(kind, call, shapes)
        if deviation is not None:
            raise self._prover.mixes(call, deviation)
        self._variants.look_at_state(kind)
