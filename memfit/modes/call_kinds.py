"""Decides on training calls: whole or cut, and how proven. Keeps one entry per kind (call signature)."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any, Literal

from memfit._errors import MemfitError, Refused, first_line
from memfit.autotune.active_plan import Planned
from memfit.autotune.task import Task
from memfit.batches.cut import Layout, common_size, first_size, refuse_packed, second_size, shared_samples, uncuttable, unread
from memfit.batches.lists import cut_lists, samples_in_lists
from memfit.batches.shapes import Shapes, no_larger, samples_by, shapes_per_sample
from memfit.batches.split import Split
from memfit.batches.tree import tensors
from memfit.capture.call import Call, Tree
from memfit.capture.consumers import Consumer
from memfit.capture.find_side_outputs import FoundDoors
from memfit.capture.infer_layout import look_of, outputs_of, structure_of, ways_to_cut
from memfit.capture.outputs import Otherwise, Outputs
from memfit.capture.side_outputs import Door, Doorway
from memfit.engine.batch_dependent import BatchDependent
from memfit.engine.call_attributes import Attributes
from memfit.engine.call_context import without_saved_tensors_hooks
from memfit.engine.planning_scope import reaching
from memfit.engine.read_numbers import Variants
from memfit.engine.recovery import surviving
from memfit.engine.weighting import BY_SAMPLES, BY_TERM, Weighting, WeightsChanged
from memfit.equivalence.tolerances import Deviation
from memfit.hardware.exhausted import is_out_of_memory, said_by
from memfit.modes.call_kind import CallKind
from memfit.modes.call_plans import OWN_LOSS, CallPlans
from memfit.modes.call_proofs import Prover
from memfit.modes.pending_calls import UNDERWAY
from memfit.modes.whole_calls import UncutCalls
from memfit.planning.search import Demand
from memfit.runtime.core import Core
from memfit.runtime.faults import is_fault, report_fault, strict

PROVE_AGAIN = 4
"""A proof is repeated at the next batch, and then whenever the optimizer step count has grown by this factor."""
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
        self._variants: defaultdict[Hashable, Variants] = defaultdict(Variants)
        self._attributes: Attributes
        self._doors: dict[str, tuple[Door, ...]] = {}
        self._ran_out: dict[Hashable, int] = {}
        self._unknown: set[Hashable] = set()
        self._untrained: set[Hashable] = set()
        self._uncut = UncutCalls(core)
        self._plans = CallPlans(core)
        self._time_first = any(getattr(module, "batch_first", True) is False for module in core.model.modules())

    def forget(self) -> None:
        """Drop all plans."""
        for kind in self._kinds.values():
            kind.whole, kind.refused, kind.planned = 0, None, {}

    def rebuild(self) -> None:
        """Drop all that is known of calls: the model has changed."""
        for known in (self._kinds, self._recognised, self._variants, self._doors, self._unknown, self._untrained):
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
        self._attributes = attributes
        try:
            with without_saved_tensors_hooks(), reaching(tree):
                try:
                    return self._through_doors(name, plain, tree, hint)
                except Otherwise:  # the call is of another kind
                    self._kinds.pop(self._current(name, tree, hint).key, None)
                    return self._through_doors(name, plain, tree, hint)
        except Exception as error:
            found = self._current(name, tree, hint)
            samples = found.samples if found.samples is not None else next(iter(self._told(tree, hint)), None)
            with without_saved_tensors_hooks(), reaching(tree):
                if self._uncut.accept(found.key, plain, tree, samples, error):
                    return None, samples
            raise

    def cut_instead(
        self, name: str, plain: Callable[..., Any], tree: Tree, hint: int | None, error: BaseException
    ) -> Call | None:
        """Return the call to be cut after it ran out of memory as a whole. None if that would train something else: it cannot
        be cut, or its first run left side effects."""
        core, found = self._core, self._current(name, tree, hint)
        if found.kind is None or found.samples is None or found.samples < 2 or core.settings.whole:
            return None
        found.kind.whole, found.kind.too_many = 0, found.samples
        self._plans.reopens()
        call, _ = self.to_cut(name, plain, tree, hint, self._attributes)
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
        mine = {key: kind for key, kind in self._kinds.items() if key[0] == name}
        self._ran_out |= {key: kind.too_many for key, kind in mine.items()}
        self._kinds = {key: kind for key, kind in self._kinds.items() if key not in mine}
        return self._through_doors(name, plain, tree, hint)

    def _to_cut(
        self, name: str, plain: Callable[..., Any], tree: Tree, hint: int | None
    ) -> tuple[Call | None, int | None]:
        found = self._current(name, tree, hint, plain)
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
        found = Recognised(key, kind, samples, () if kind is None else shapes_per_sample(tree, kind.layout, samples))
        if look is not None and kind is not None:
            self._recognised = {} if len(self._recognised) >= RECOGNISED else self._recognised
            self._recognised[name, look] = found
        return found

    def _current(self, name: str, tree: Tree, hint: int | None, plain: Callable[..., Any] | None = None) -> Recognised:
        """Return a call's kind and its number of samples, under the numbers that the forward may branch on. `plain` is run to
        tell what new ones change."""
        found = self._recognise(name, tree, hint)
        kind = found.kind
        if kind is not None and _runs_whole(kind, found.samples or 0, found.shapes):
            return found
        variants = self._variants[found.key]
        numbers = self._attributes.numbers(frozenset() if kind is None else kind.composition.keys)
        variant = variants.of(numbers)
        if variant is None and plain is not None:
            variant = variants.choose(numbers, lambda each: self._does_the_same(_of_variant(found.key, each), plain, tree))
        key = _of_variant(found.key, variant or 0)
        if key == found.key:
            return found
        kind = self._kinds.get(key)
        samples = found.samples if kind is None else samples_by(tree, kind.layout)
        return Recognised(key, kind, samples, () if kind is None else shapes_per_sample(tree, kind.layout, samples))

    def _look_at_state(self, kind: CallKind) -> None:
        """Have a kind proven again if the script has replaced what its forward moves something in."""
        if kind.composition.moved and kind.composition.is_elsewhere(self._attributes.numbers(kind.composition.keys).held):
            kind.proven = None

    def _does_the_same(self, key: tuple[Any, ...], plain: Callable[..., Any], tree: Tree) -> bool | None:
        """Return whether calls of this kind return the same outputs under other numbers, and may be cut alike. None: a call of
        one sample does not tell."""
        kind = self._kinds.get(key)
        samples = None if kind is None else samples_by(tree, kind.layout)
        if kind is None or kind.proven is None or not samples:
            return True
        if samples < 2:
            return None
        shapes = shapes_per_sample(tree, kind.layout, samples)
        call = self._call_of(kind, plain, tree, samples, shapes)
        self._attributes.forget()
        known, trial = kind.proven, replace(kind, outputs={}, alike=0, planned={})

        def same() -> bool:
            found = outputs_of(call).settled_like(known)
            call.outputs = kind.outputs_of(call, shapes)
            if found is None or not found.looks_like(call.outputs):
                return False
            return self._prover.prove(trial, call, shapes) is None and kind.agrees_with(trial, shapes)

        try:
            return surviving(same, self._core.device, self._not_repeated)
        except Exception as error:
            if strict() and is_fault(error):
                raise
            return False

    def _not_repeated(self, text: str) -> Literal[True]:
        """Note that a proof ran out of memory."""
        self._core.events.add(
            self._core.steps, "out of memory", f"the proof that samples do not mix was not repeated ({text})"
        )
        return True

    def _met(
        self, key: tuple[Any, ...], plain: Callable[..., Any], tree: Tree, hint: int | None
    ) -> tuple[Call | None, int | None]:
        """`to_cut` for a call of an unknown kind."""
        self._attributes.forget()
        told = self._told(tree, hint)
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
        guess = self._guessed(key, tree, hint, told)
        if guess is not None:
            try:
                return self._first(key, plain, tree, guess), guess
            except Exception as error:
                if is_out_of_memory(error):
                    raise
        if refusal is not None:
            raise refusal
        self._runs_unknown(key, tree, hint)
        return None, None

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

    def _guessed(self, key: Hashable, tree: Tree, hint: int | None, told: tuple[int, ...]) -> int | None:
        """Return how many samples the first tensor may have, where no loader tells and others (a mask over positions, a table)
        have other sizes. None: no guess."""
        if hint is not None or key in self._unknown or self._split(tree, hint) is not None or not self._core.team.alone:
            return None
        guess = first_size(tree) if told or self._core.in_force.prescribed is not None else None
        return None if guess is None or guess < 2 or guess in told else guess

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
            self._kinds = {key: kind for key, kind in self._kinds.items() if key not in {c.key for c in call.calls}}
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

    def _first(self, key: tuple[Any, ...], plain: Callable[..., Any], tree: Tree, samples: int) -> Call | None:
        """Return the call to be cut in the first way that is proven. Raises Refused for the closest one if none is."""
        failed: list[tuple[Call, Deviation]] = []
        try:
            return self._first_proven(key, plain, tree, samples, failed)
        except Exception as error:
            if not failed or isinstance(error, MemfitError) or is_out_of_memory(error):
                raise
            raise self._prover.mixes(*failed[0]) from error  # a less likely way does not even run

    def _first_proven(
        self, key: tuple[Any, ...], plain: Callable[..., Any], tree: Tree, samples: int, failed: list[tuple[Call, Deviation]]
    ) -> Call | None:
        core = self._core
        for call in ways_to_cut(core.model, plain, tree, samples, core.device, self._split(tree, samples)):
            if not self._trains(call):
                self._untrained.add(key)
                return None
            shapes = call.shapes
            self._prover.look_at_single_samples(call)
            bound = None if core.in_force.fixed else self._plans.bound(call)
            kind = CallKind(call.layout, shapes, {shapes: call.outputs}, bound)
            kind.too_many = self._ran_out.pop(key, kind.too_many)
            kind.counted = core.split is not None and shared_samples(tree) == samples
            whole = self._plans.runs_whole(kind, call)
            if whole and core.team.alone:
                self._kinds[key] = kind
                return None
            # With several ranks a known loss is weighted over all of them: then the call is cut, even if into one piece.
            deviation = self._prover.prove(kind, call, shapes)
            if deviation is None:
                kind.whole = 0
                self._kinds[key] = kind
                self._look_at_state(kind)
                return call
            if whole:
                core.tell("samples of one process's share are not independent: each process runs its share whole")
                self._kinds[key] = kind
                return None
            failed.append((call, deviation))
        raise self._prover.mixes(*min(failed, key=lambda each: each[1].relative))  # (ways_to_cut raises where there is none)

    def _single(self, key: tuple[Any, ...], plain: Callable[..., Any], tree: Tree) -> Call | None:
        """Return a rank's one-sample share of an unknown kind, in one piece. Its loss is weighted by its denominator, if that
        shows without another sample to prove it on."""
        core = self._core
        call = next(ways_to_cut(core.model, plain, tree, 1, core.device, self._split(tree, 1)))
        if not self._trains(call):
            return None
        shapes = call.shapes
        bound = None if core.in_force.fixed else self._plans.bound(call)
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
        if samples == 0:
            return None
        fits = no_larger(shapes, kind.shapes)
        if _runs_whole(kind, samples, shapes):
            return None
        core, call = self._core, self._call_of(kind, plain, tree, samples, shapes)
        call.outputs = kind.outputs_of(call, shapes)
        self._look_at_state(kind)
        if not fits:
            self._plans.grew(kind, call, shapes)
        if core.team.alone and self._plans.runs_whole(kind, call):
            return None
        if call.samples > 1 and (kind.proven is None or core.steps >= kind.prove_at or call.samples > kind.alike):
            self._prove_known(kind, call, shapes)
        return call

    def _call_of(self, kind: CallKind, plain: Callable[..., Any], tree: Tree, samples: int, shapes: Shapes) -> Call:
        layout = Layout(kind.layout.axes, samples)
        call = Call(
            self._core.model, plain, tree, layout, Outputs(None, ()), self._core.device, split=self._split(tree, samples)
        )
        call.copies, call.shapes = kind.writes_input, shapes
        return call

    def _prove_known(self, kind: CallKind, call: Call, shapes: Shapes) -> None:
        """Prove a kind that always ran whole, or repeat its proof on a later batch. Raises Refused."""
        core, again = self._core, kind.proven is not None
        self._attributes.forget()
        if again:
            deviation = surviving(lambda: self._prover.prove(kind, call, shapes), core.device, self._not_repeated)
            deviation = None if deviation is True else deviation
            kind.prove_at = core.steps if kind.mute else PROVE_AGAIN * core.steps
        else:
            deviation = self._prover.prove(kind, call, shapes)
        if deviation is not None:
            raise self._prover.mixes(call, deviation)
        self._look_at_state(kind)


def _runs_whole(kind: CallKind, samples: int, shapes: Shapes) -> bool:
    """Whether such a call is known to run whole beside the whole calls that wait for their backward."""
    return samples <= kind.whole and UNDERWAY.whole <= kind.beside and no_larger(shapes, kind.shapes)


def _of_variant(key: tuple[Any, ...], variant: int) -> tuple[Any, ...]:
    return (*key, "variant", variant) if variant else key


def _has_dimension(tree: Tree, size: int) -> bool:
    return any(size in tensor.shape for tensor in tensors(tree))



