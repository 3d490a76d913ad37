"""Runs the passes over a script's calls: for a loss, for values that it reads, for gradients of its outputs."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from memfit.autotune.active_plan import Planned
from memfit.autotune.task import LOSS_BOUND
from memfit.autotune.tuner import Tuner
from memfit.batches.pieces import sizes
from memfit.capture.call import Call
from memfit.capture.call_copies import first_samples
from memfit.capture.consumers import AllOutputs, Consumer, Expression
from memfit.capture.expression import Node, Step, Sum, Term, as_factor, leaves_in, name_of
from memfit.capture.joint_call import joint
from memfit.capture.lazy_tensor import LazyTensor, settle_looks
from memfit.capture.masked_mean import count_of
from memfit.capture.noted_loss import NotedLoss
from memfit.capture.replay import Replay
from memfit.capture.result_shapes import ResultShapes
from memfit.capture.workloads import ExpressionWork
from memfit.engine.batch_dependent import BatchDependent
from memfit.engine.handover import Factor, Total, graph_is_kept, hand_over
from memfit.engine.weighting import BY_SAMPLES, BY_TERM, BY_TOLD_TERM, Weighting, WeightsChanged
from memfit.engine.work import Work
from memfit.modes.call_kinds import CallKinds
from memfit.modes.call_plans import OWN_LOSS
from memfit.modes.failed_passes import FailedPasses
from memfit.modes.kept_outputs import waiting_losses, worth_keeping
from memfit.modes.losses_over_ranks import LossesOverRanks
from memfit.modes.pending_calls import UNDERWAY
from memfit.modes.waiting_calls import WaitingCalls
from memfit.runtime.core import KEPT_SAMPLES, Core, MadeReference

REPLAY = AllOutputs()
BY_SUM = Weighting("sum", "as a sum")
BY_SHARE = Weighting("share", "as what they add to the whole")


class ScriptPasses:
    """What lazy tensors ask for (`lazy_tensor.Owner`). `waiting`: calls whose outputs are not computed yet, or may be used
    again."""

    def __init__(
        self,
        core: Core,
        kinds: CallKinds,
        batch_samples: Callable[[], int | None],
        about_to_hand_over: Callable[[Sequence[torch.Tensor]], None],
    ) -> None:
        self._core, self._kinds, self._batch_samples = core, kinds, batch_samples
        self._about_to_hand_over = about_to_hand_over
        self.waiting = WaitingCalls(core, self.compute_values)
        self.losses = self._losses = LossesOverRanks(core, batch_samples, lambda: self.waiting.busy)
        self._results = ResultShapes()
        self._joint: Callable[[], Call | None] = lambda: None
        self._failed = FailedPasses(core, kinds, self.waiting.aside, self._run_whole)

    def receivers(self, call: Call) -> list[torch.Tensor]:
        """Return the tensors that gradients of the call's outputs flow into."""
        if call.receivers is None:
            call.receivers = [*self._core.staging.parameters(), *call.inputs.wanted]
        return list(call.receivers)

    def joint(self, calls: tuple[Call, ...]) -> Call | None:
        """Return these calls joined to one, or None if they do not run together."""
        if len({call.samples for call in calls}) > 1 or any(call.gathered or call.split for call in calls):
            return None
        if self.alone and any(call.values is not None for call in calls):
            return None  # see `accumulates`
        if sum(bool(call.composition.moved) for call in calls) > 1:
            return None  # the second forward starts with the state after the first one's full batch
        made = self._joint()
        if made is None or [call.number for call in made.calls] != [call.number for call in calls]:
            made = joint(calls)
            self._joint = weakref.ref(made)
            self._kinds.add(made)
        return made

    def accumulates(self, call: Call, node: Node) -> bool:
        """Whether the gradients of `node` can be accumulated with its loss. Not if one of its outputs was computed before, as
        a backward through it suffices. Several ranks accumulate all the same, as only some may look at outputs."""
        by_number = {each.number: each for each in call.calls}
        if self.alone and any(by_number[number].values is not None for number, _ in leaves_in(node)):
            return False
        return all(by_number[number].outputs.leaves[leaf].differentiable for number, leaf in leaves_in(node))

    @property
    def alone(self) -> bool:
        """Whether this process trains alone, without other ranks."""
        return self._core.team.alone

    def defers(self, call: Call) -> bool:
        """Whether losses of calls like this one are deferred until their use is known. They are if there are several, unless
        the script could notice that a forward with side effects has not run. On several ranks they always are, as ranks add up
        sums, not quotients by a rank's own counts."""
        several = self._kinds.of(call).several and not call.composition.moved
        return several or not self.alone

    def accumulate_known_loss(self, call: Call, loss: Step) -> torch.Tensor:
        """Accumulate a known loss."""
        reduction = loss.keywords["reduction"]
        weighting = BY_SUM if reduction == "sum" else BY_TOLD_TERM
        with self._core.team.announcing():
            return self._accumulated(call, Expression(f"{name_of(loss)} {reduction}", loss, call.offsets), weighting)

    def accumulate_terms(self, call: Call, terms: Sequence[Term]) -> torch.Tensor:
        """Accumulate the sum of terms."""
        if len(terms) == 1 and terms[0].known is not None:
            loss = self.accumulate_known_loss(call, terms[0].known)
            call.note(terms[0].node, loss if terms[0].count is None else loss * terms[0].count)
            return loss * terms[0].coefficient
        if len(terms) == 1 and not self.alone and self._core.staging.parts is None:
            return self._accumulate_term(call, terms[0]) * terms[0].coefficient
        with self._core.team.announcing():
            node = Sum(self._losses.over_all(call, terms))
            return self._accumulated(call, Expression(name_of(node), node, call.offsets), BY_SHARE)

    def _accumulate_term(self, call: Call, term: Term) -> torch.Tensor:
        """Accumulate the only term of a loss. Its weight among the ranks is its denominator."""
        made = term.without_coefficient()
        with self._core.team.announcing():
            consumer = Expression(name_of(made), made, call.offsets)
            count = count_of(term)
            if count is None:
                return self._accumulated(call, consumer, BY_SUM)
            return self._accumulated(call, consumer, BY_SHARE, weight=as_factor(count))

    def over_all(self, call: Call, terms: Sequence[Term]) -> tuple[Term, ...]:
        """Rescale the terms to this rank's part of their value over all ranks; see `LossesOverRanks.over_all`."""
        return self._losses.over_all(call, terms)

    def accumulate_own_loss(self, call: Call) -> torch.Tensor:
        """Accumulate the model's own loss."""
        with self._core.team.announcing():
            while True:
                try:
                    return self._accumulated(call, OWN_LOSS, self._kinds.weighting(call))
                except WeightsChanged:
                    with self.waiting.aside():
                        self._kinds.prove_again(call)  # raises if the result is the same

    def values(self, call: Call) -> list[Any]:
        """Return the joined output leaves, computed on first use."""
        self.waiting.run(call)
        assert call.values is not None
        return call.values

    def compute_values(self, call: Call) -> None:
        """Compute the output leaves."""
        self.waiting.run_before(call)
        with self._core.team.announcing(), self.waiting.in_pass(call), torch.enable_grad():
            self._first_pass(call)
            self._core.team.rest(alone=True)
        self.waiting.ran(call)

    def _first_pass(self, call: Call) -> None:
        UNDERWAY.make_room(call)
        core, planned, repeated = self._core, self._replay_plan(call), bool(call.pieces)
        call.activate, tries = partial(core.in_force.activate, planned), itertools.count()

        def attempt(largest: int) -> None:
            call.kept.clear()
            if next(tries):
                self.waiting.ran(call)  # up to where memory ran out
                call.undo_writes()
            if not repeated:
                call.forget_pass()
            # Passes over sharded parameters need the same order on all ranks. A forward that writes parameters or its input
            # invalidates the graphs kept of earlier micro-batches.
            repeats = core.staging.parts is not None or call.composition.moved or call.writing
            keep = 0 if repeats else planned.plan.keep
            pieces = core.accumulator.pieces(call.samples, largest)
            with nullcontext() if repeated else core.accumulator.norms_of(len(pieces)):
                self._replay(call, largest).compute_values(pieces, keep)

        then = None
        try:
            with core.team.computing():
                core.accumulator.recovery.run(attempt, core.in_force.limit(planned.plan))
            call.check_limits()
            core.accumulator.apply_norms()
        except BaseException as error:
            then = None if repeated else self._failed.after(call, error, ran=call.values is not None)
            if then is None:
                raise
            if then == "whole":
                self._kinds.say_whole(call, error)
        if then == "again":
            self._first_pass(call)

    def replayed(self, call: Call, gradients: tuple[torch.Tensor | None, ...]) -> Total:
        """Return the gradients of the receivers, given those of the outputs, by running the call again."""
        if call.values is None:
            self.compute_values(call)
        gradients = call.past_hooks(gradients)
        UNDERWAY.make_room(call)
        self._gathers(call)
        core = self._core
        if call.activate is not None:
            call.activate()
        receivers = self.receivers(call)
        self._about_to_hand_over(receivers)
        tries = itertools.count()

        def attempt(largest: int) -> Total:
            if next(tries):  # after out of memory: free what is kept, so that it can be cut further, too
                call.kept.clear()
                self.waiting.ran(call)  # up to where memory ran out
            core.accumulator.prepare(len(call.pieces))
            weight = self._losses.own_weight(call.samples)
            factor = core.staging.relative_to(weight)
            incoming = gradients if factor == 1.0 else tuple(None if g is None else g * weight for g in gradients)
            with core.staging.counting():
                self._replay(call, largest).backward(incoming)
                parameters = len(receivers) - len(call.inputs.wanted)
                staged = [*core.staging.take(receivers[:parameters]), *call.inputs.take()]
            value = torch.zeros((), device=core.device)
            return Total(value, receivers, staged, factor, weight=weight, samples=call.samples, unseen=True)

        with self.waiting.aside(), core.team.announcing(), call.as_called():
            largest = max(call.pieces) if call.whole is None else 1  # it is not cut further where memory runs out
            with core.team.computing(again=True):
                total = attempt(largest) if core.staging.parts is not None else core.accumulator.recovery.run(attempt, largest)
            self._losses.combine(total, BY_SAMPLES)
        self.waiting.ran(call)
        settle_looks(call.calls)
        return total

    def like_after(self, call: Call, following: Node, parents: Sequence[LazyTensor]) -> torch.Tensor | None:
        """Return a fake tensor like the result of an operation on stand-ins, or None if unknown."""
        return self._results.like_after(following, parents, call.samples)

    def _gathers(self, call: Call) -> None:
        """Note that a call's gradients start to accumulate. If some did before, losses of such calls are deferred from now
        on."""
        if call.gathered or any(each.gathered for each in call.calls):
            self._kinds.of(call).several = True
        for each in (call, *call.calls):
            each.gathered = True

    def _accumulated(
        self, call: Call, consumer: Consumer, weighting: Weighting, weight: Factor | None = None
    ) -> torch.Tensor:
        """Accumulate the call's gradients and return its loss as a tensor whose backward hands them over. `weight`: its weight
        as a mean among the ranks."""
        core, first, total = self._core, not call.pieces, None
        if first:
            self.waiting.run_before(call)
        call.kept.clear()  # accumulation runs its own forwards
        self._gathers(call)
        try:
            with self.waiting.in_pass(call), nullcontext() if first else call.drawing_again():
                try:
                    total = self._pass(call, consumer, weighting, first)
                except WeightsChanged as changed:
                    if changed.unshown or weighting.idle:
                        raise BatchDependent.of_loss(str(changed)) from None
                    raise
                call.check_limits()
                core.team.rest()
                if core.staging.parts is not None:  # no rank is in a pass now: what comes next belongs to another loss
                    total.parts = core.staging.take_parts()
                if self._batch_samples() == 0:
                    total.weight = 0.0
                then, receivers = total.on_handover, total.receivers  # the total itself would create a reference cycle
                unused = [tensor for tensor, gradient in zip(receivers, total.gradients) if gradient is None]

                def handing_over(incoming: torch.Tensor) -> None:
                    then(incoming)
                    call.check_handed_over(unused)
                    for labels in consumer.labels:
                        labels.check_handed_over()
                    self._about_to_hand_over(receivers)
                    for each in () if graph_is_kept() else call.calls:
                        each.pending -= 1
                        if each.attributes is not None and not each.pending:
                            each.attributes.let_go()

                for each in call.calls:
                    each.pending += 1
                total.on_handover = handing_over
                if not core.team.alone:
                    total.calls = len(call.calls)
                    combined = BY_SAMPLES if weighting is BY_SHARE else weighting
                    if weight is not None:
                        combined, total.weight = BY_TERM, weight if total.weight else 0.0
                    total.combine = self._losses.combining(total, combined)
                return hand_over(total)
        except BaseException as error:
            then = self._failed.after(call, error, ran=total is not None) if first else None
            if then is None:
                raise
            failed = None if then == "again" else error
        try:
            if failed is None:
                weighting = self._kinds.weighting(call) if consumer is OWN_LOSS else weighting  # proven again, too
                return self._accumulated(call, consumer, weighting, weight)
            found = consumer.of_whole(call)  # raises an error that is the script's own: the next batch may have none
            self._kinds.say_whole(call, failed)
        finally:
            del failed  # (its traceback holds this frame)
        return found

    def _run_whole(self, call: Call) -> None:
        with self.waiting.aside(), self.waiting.telling_others(call):
            call.run_whole()
        self.waiting.ran(call)

    def _pass(self, call: Call, consumer: Consumer, weighting: Weighting, first: bool) -> Total:
        core = self._core
        call.check_unchanged()
        call.compare()
        UNDERWAY.make_room(call)
        planned = self._kinds.planned(call, consumer, weighting)
        call.activate = partial(core.in_force.activate, planned)
        if core.reference is None:
            core.reference = _reference(call, consumer, weighting)
        work = consumer.work(call, planned.plan.precision)
        work.draws = True
        work.composition = call.composition if first else call.composition.repeated()
        keeps = worth_keeping(call, consumer, planned.plan) if first else frozenset()
        own, noted_loss = call.outputs.loss, None
        work.keeps = keeps - {own}
        if isinstance(work, ExpressionWork) and own in keeps and call.calls == (call,):
            noted_loss = partial(NotedLoss, call, self._kinds.weighting(call), core.staging)
        if isinstance(work, ExpressionWork):
            terms = [term for number in waiting_losses(call) for term in number.terms if term.known is not work.node]
            work.note(list({id(term.node): term.node for term in terms}.values()))

        def begin(pieces: Sequence[int]) -> None:
            work.values.clear()
            if isinstance(work, ExpressionWork):
                work.noted.clear()
                work.noted_loss = None if noted_loss is None else noted_loss()
            if first:
                call.forget_pass()
                call.begin(pieces)

        def pieces_for(largest: int, tuner: Tuner | None) -> Sequence[int]:
            return core.accumulator.tuned_pieces(call.samples, largest, tuner) if first else call.pieces

        with core.buffers.kept(not first):
            limit = core.in_force.limit(planned.plan)
            total = core.accumulator.run(work, weighting, pieces_for, largest=limit, begin=begin, autocast=call.autocast)
        self.waiting.ran(call)
        if work.noted_loss is not None:
            call.noted_loss = work.noted_loss.value()
        for node, value in work.noted.values() if isinstance(work, ExpressionWork) else ():
            call.note(node, value)
        if work.values:
            whole = call.outputs.joined(work.values, call.pieces)
            for each in call.calls:
                offset = call.offsets[each.number]
                each.values = whole[offset : offset + len(each.outputs.leaves)]
            settle_looks(call.calls)
        return total

    def _replay(self, call: Call, largest: int) -> Replay:
        core = self._core

        def cut(size: int) -> Sequence[int]:
            return sizes(size, largest, core.least) if call.whole is None else (size,)

        return Replay(call, core.staging, core.buffers, cut, core.in_force.heap.check)

    def _replay_plan(self, call: Call) -> Planned:
        standing = (1 + LOSS_BOUND) * call.outputs.bytes_per_sample
        planned = self._kinds.planned(call, REPLAY, BY_SAMPLES, mode="replay", standing_per_sample=standing)
        if self._core.reference is None:
            self._core.reference = _reference(call, REPLAY, BY_SUM)
        return planned


def _reference(call: Call, consumer: Consumer, weighting: Weighting) -> MadeReference:
    """Copy a few samples of this call for verification."""
    samples = min(KEPT_SAMPLES, call.samples)
    kept, its, composition = first_samples(call, samples), consumer.first(samples, backwards=False), call.composition.afresh()

    def work(count: int, backwards: bool) -> Work:
        made = its.first(count, backwards=backwards).work(first_samples(kept, count, backwards=backwards), "off")
        made.composition = composition.afresh()
        return made

    return MadeReference(samples, weighting, work, reversible=call.split is None)
