"""Decides on the first training call of a kind: in which way it is cut, or that it runs whole."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from memfit._errors import MemfitError, Refused
from memfit.batches.cut import first_size, refuse_packed, shared_samples, uncuttable, unread
from memfit.batches.tree import tensors
from memfit.capture.call import Call, Tree
from memfit.capture.earlier_graphs import refuse_earlier_graphs_of
from memfit.capture.infer_layout import ways_to_cut
from memfit.engine.weighting import BY_TERM
from memfit.equivalence.tolerances import Deviation
from memfit.hardware.exhausted import is_out_of_memory
from memfit.modes.call_kind import CallKind
from memfit.modes.call_plans import CallPlans
from memfit.modes.call_proofs import Prover
from memfit.modes.call_signatures import Signatures
from memfit.runtime.core import Core


class FirstCalls:
    """Meets calls of unknown kinds. `ran_out`: how many samples ran out of memory as a whole, by key of a kind. `untrained`:
    the keys of kinds that no backward can go through."""

    def __init__(self, core: Core, signatures: Signatures, prover: Prover, plans: CallPlans) -> None:
        self._core, self._signatures, self._prover, self._plans = core, signatures, prover, plans
        self.ran_out: dict[Hashable, int] = {}
        self._unknown: set[Hashable] = set()
        self._graphs = False
        self.untrained: set[Hashable] = set()

    def clear(self) -> None:
        """Forget which calls have no known number of samples, and which do not train."""
        self._unknown.clear()
        self.untrained.clear()

    def meet(
        self, key: tuple[Any, ...], plain: Callable[..., Any], tree: Tree, hint: int | None, *, graphs: bool
    ) -> tuple[Call | None, int | None]:
        """Return (the call if it has to be cut, else None; its number of samples, if known). `graphs`: whether the model holds
        tensors with a graph."""
        self._graphs = graphs
        told = self._signatures.samples(tree, hint)
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

    def _guessed(self, key: Hashable, tree: Tree, hint: int | None, told: tuple[int, ...]) -> int | None:
        """Return how many samples the first tensor may have, where no loader tells and others (a mask over positions, a table)
        have other sizes. None: no guess."""
        known = hint is not None or key in self._unknown or self._signatures.split(tree, hint) is not None
        if known or not self._core.team.alone:
            return None
        guess = first_size(tree) if told or self._core.in_force.prescribed is not None else None
        return None if guess is None or guess < 2 or guess in told else guess

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
        for call in ways_to_cut(core.model, plain, tree, samples, core.device, self._signatures.split(tree, samples)):
            if not self._trains(call):
                self.untrained.add(key)
                return None
            shapes = call.shapes
            if self._graphs:
                refuse_earlier_graphs_of(call)
            self._prover.look_at_single_samples(call)
            bound = None if core.in_force.fixed else self._plans.bound(call)
            kind = CallKind(call.layout, shapes, {shapes: call.outputs}, bound)
            kind.too_many = self.ran_out.pop(key, kind.too_many)
            kind.counted = core.split is not None and shared_samples(tree) == samples
            whole = self._plans.runs_whole(kind, call)
            if whole and core.team.alone:
                self._signatures.kinds[key] = kind
                return None
            # With several ranks a known loss is weighted over all of them: then the call is cut, even if into one piece.
            deviation = self._prover.prove(kind, call, shapes)
            if deviation is None:
                kind.whole = 0
                self._signatures.kinds[key] = kind
                return call
            if whole:
                core.tell("samples of one process's share are not independent: each process runs its share whole")
                self._signatures.kinds[key] = kind
                return None
            failed.append((call, deviation))
        raise self._prover.mixes(*min(failed, key=lambda each: each[1].relative))  # (ways_to_cut raises where there is none)

    def _single(self, key: tuple[Any, ...], plain: Callable[..., Any], tree: Tree) -> Call | None:
        """Return a rank's one-sample share of an unknown kind, in one piece. Its loss is weighted by its denominator, if that
        shows without another sample to prove it on."""
        core = self._core
        call = next(ways_to_cut(core.model, plain, tree, 1, core.device, self._signatures.split(tree, 1)))
        if not self._trains(call):
            return None
        shapes = call.shapes
        bound = None if core.in_force.fixed else self._plans.bound(call)
        kind = CallKind(call.layout, shapes, {shapes: call.outputs}, bound, weighting=BY_TERM)
        self._signatures.kinds[("single", key)] = kind
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
