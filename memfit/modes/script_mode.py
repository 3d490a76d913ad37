"""Script mode: keeps the user's training loop and cuts the model's training calls into micro-batches behind stand-in outputs.

Not covered: methods called from outside and not listed in `methods=` (reported if `forward` is not called), and tensors that
leave the forward in another way than its output (detected and refused).
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from memfit._errors import Refused
from memfit.autotune.active_plan import Planned
from memfit.autotune.task import LOSS_BOUND
from memfit.autotune.tuner import Tuner
from memfit.batches.pieces import sizes
from memfit.batches.tree import flat, rebuild, tensors
from memfit.capture.bypassed import OutsideForward
from memfit.capture.call import Call, Tree
from memfit.capture.consumers import AllOutputs, Consumer, Expression
from memfit.capture.expression import (
    BatchTensor,
    Node,
    SampleRange,
    Step,
    Sum,
    Term,
    all_nodes,
    as_factor,
    leaves_in,
    look_of,
    name_of,
)
from memfit.capture.joint_call import joint
from memfit.capture.lazy_functions import stand_ins
from memfit.capture.lazy_tensor import LazyTensor, settle_looks
from memfit.capture.masked_mean import count_of
from memfit.capture.side_outputs import through
from memfit.capture.workloads import ExpressionWork
from memfit.distributed.rank_reports import divisor_of
from memfit.distributed.reduction import OF_SHARES, StepReduction
from memfit.distributed.stray_gradients import StrayGradients
from memfit.engine.accumulate import Work
from memfit.engine.call_context import in_checkpoint, outside_transforms, without_inference_mode, without_saved_tensors_hooks
from memfit.engine.handover import ALMOST, Factor, Total, graph_is_kept, hand_over
from memfit.engine.joined_handover import joined
from memfit.engine.random_state import RandomState
from memfit.engine.user_line import line_of_script
from memfit.engine.weighting import BY_SAMPLES, BY_TERM, BY_TOLD_TERM, Weighting, WeightsChanged
from memfit.hardware.exhausted import drop_frames, free_unused, is_out_of_memory
from memfit.modes.call_kinds import CallKinds
from memfit.modes.call_plans import OWN_LOSS
from memfit.modes.evaluation import Evaluations
from memfit.modes.pending_calls import UNDERWAY
from memfit.planning.plan import Plan
from memfit.runtime.accumulation_guard import AccumulationGuard
from memfit.runtime.core import KEPT_SAMPLES, Core, MadeReference

DIVISORS = "what the losses of a step divide by"
KEPT_VALUES = 16 << 20
"""Minimum bytes of output values kept from the accumulation pass, for metrics read after the loss."""
LOOKS = 512
"""Maximum number of operations whose result shape is cached."""


class Script:
    """Handles the model's intercepted calls and the operations on their stand-in outputs."""

    def __init__(
        self,
        core: Core,
        batch_samples: Callable[[], int | None],
        batch_number: Callable[[], int],
        guard: AccumulationGuard | None,
    ) -> None:
        self.samples_seen = self.calls = 0
        self._waiting: weakref.WeakSet[Call] = weakref.WeakSet()
        self._core, self._guard = core, guard
        self._batch_samples, self._batch_number = batch_samples, batch_number
        self._kinds, self._evaluations = CallKinds(core), Evaluations(core, self.aside)
        core.on_forget.append(self._kinds.forget)
        core.on_parameters.append(self._kinds.rebuild)
        self._busy = False
        self._shapes: dict[Any, Any] = {}
        self._lines = {""}
        self._joint: Callable[[], Call | None] = lambda: None
        self.outside = OutsideForward(core.model, core.tell)
        self._strays: StrayGradients | None = None
        if core.team.reduction is not None:
            said = partial(core.note, "note")
            self._strays = StrayGradients(core.team.reduction, core.model, said, batch_samples, lambda: self._busy)

    def answer(self, name: str, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of an intercepted method."""
        if self._busy:
            return plain(*args, **kwargs)
        self.outside.called()
        if in_checkpoint():
            self._core.tell("a call of the model inside the script's own checkpoint runs whole, as it is")
            return plain(*args, **kwargs)
        if not self._is_training_call((args, kwargs)):
            output = self.evaluate(name, plain, args, kwargs)
            self._rest(alone=True)
            return output
        self.calls += 1
        core = self._core
        core.caches.trains()
        args, kwargs = _all_computed((args, kwargs))  # inputs may be outputs of another call
        with self.aside(), self._core.team.announcing():
            call, samples = self._kinds.to_cut(name, plain, (args, kwargs), self._batch_samples())
            self.samples_seen += samples or 0
            if call is None:
                output, call = self._whole_or_cut(name, plain, (args, kwargs))
                if call is None:
                    self._guard_whole(output)
                    if core.team.ranks is not None:
                        core.team.ranks.rest()  # its graph needs the all-gathered parameters
                    return output
            self._rest()
        self._waiting.add(call)
        for place in call.composition.trained[:1]:  # the script may read it, so all samples must have written it
            core.tell(f"the forward writes {place.label}, which is trained: it runs at the call, and again for gradients")
            with self.aside():
                self._compute_values(call)
        return through(call.plain, stand_ins(self, call))

    def evaluate(self, name: str, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of an intercepted method that computes no gradients of the model."""
        if self._busy:
            return plain(*args, **kwargs)
        args, kwargs = _all_computed((args, kwargs))
        self._run_earlier()
        with self._going_through():
            output = self._evaluations.answer(name, plain, args, kwargs)
        self._core.caches.evaluated()
        return output

    def _rest(self, *, alone: bool = False) -> None:
        """Return control to the script; `alone`: after work that other ranks need not do."""
        self._core.team.rest(alone=alone)

    def _whole_or_cut(self, name: str, plain: Callable[..., Any], tree: Tree) -> tuple[Any, Call | None]:
        """Return (output of a call that runs whole, None), or (None, call to cut) if it runs out of memory."""
        core, (args, kwargs) = self._core, tree
        self._run_earlier()
        UNDERWAY.make_room(None)
        if not core.team.alone:
            return self._whole_of_all(lambda: plain(*args, **kwargs)), None
        put_back = core.accumulator.recovery.watched()
        try:
            return plain(*args, **kwargs), None
        except BaseException as error:
            if not is_out_of_memory(error):
                raise
            drop_frames(error)
            failed = error
        free_unused(core.device)
        call = self._kinds.cut_instead(name, plain, tree, self._batch_samples(), failed) if put_back() else None
        if call is None:
            raise failed
        return None, call

    def _whole_of_all(self, run: Callable[[], Any]) -> Any:
        """Run a call whole on several ranks. Its gradients are reduced across all ranks."""
        core = self._core

        def finish(gradients: list[torch.Tensor | None], receivers: Sequence[torch.Tensor]) -> Total:
            with core.team.announcing():
                total = Total(torch.zeros((), device=core.device), receivers, gradients, weight=weight, unseen=True)
                total.factor = core.staging.relative_to(weight)
                self._combine(total, BY_SAMPLES)
            return total

        core.accumulator.prepare(1)
        weight = self._own_weight(1)
        return joined(run, core.staging, finish, weight)

    def _say_how(self, reduction: StepReduction) -> None:
        """Tell the user if memfit does not weight the last batch's loss across ranks, or sees only part of it."""
        if reduction.part is None:
            self._say_added(reduction)
        if reduction.apart:
            self._core.tell(f"the loss has a factor that differs between processes, such as its own value: {OF_SHARES}")
        if reduction.unseen:
            self._core.tell(
                "each process computes the loss of its own samples, in a way memfit cannot see: processes are weighted by "
                "their samples, as means in DistributedDataParallel (a loss_fn= that memfit calls is weighted exactly)"
            )

    def _say_added(self, reduction: StepReduction) -> None:
        """Tell the user that sums add up across ranks. memfit cannot tell them from means whose divisor it does not see."""
        if not reduction.mean:
            size = reduction.ranks.size
            self._core.tell(
                f"the loss is a sum over samples as far as memfit sees: sums add up over the {size} processes, where "
                "DistributedDataParallel would take their mean. If each process divides it by a count from its own batch (a "
                f"shape, a mask's .item(), weights that add up to 1), gradients are up to {size} times too large: use .mean(), "
                "divide by a tensor that was summed over the batch, or pass loss_fn="
            )

    def _combining(self, total: Total, weighting: Weighting) -> Callable[[Factor], Factor]:
        """Return a function that reduces the total across ranks once. Its factor is reduced, too, as ranks may differ in it."""
        first: list[Factor] = []

        def combine(factor: Factor) -> Factor:
            if first:
                return factor / first[0]  # another backward through a retained graph
            first.append(total.incoming)  # combine leaves no other factor
            total.factor = factor
            divided = isinstance(factor, float) and abs(factor * total.samples - 1.0) < ALMOST
            with self._core.team.announcing():
                self._combine(total, weighting, divided=divided)
            return 1.0

        return combine

    def _combine(self, total: Total, weighting: Weighting, *, divided: bool = False) -> None:
        """Reduce a call's total across ranks. Raises Refused if they weight it differently."""
        if self._core.accumulator.combine(total, weighting, divided=divided) is not None:
            raise Refused(
                "one loss over all processes",
                found="the denominator of its mean is visible on some of them only, so they cannot weight it alike",
                next_move="give every process at least two samples of each batch, or pass loss_fn= to memfit.wrap",
            )
        if self._core.team.reduction is not None:
            self._say_how(self._core.team.reduction)
        if self._strays is not None and self._core.staging.parts is None:
            self._strays.combined()

    def _own_weight(self, samples: int) -> float:
        """The weight of a call among the ranks: 0 if its batch is a placeholder for an empty one."""
        told = self._batch_samples()
        return float(samples if told is None else min(told, samples) if samples > 1 else told)

    def _guard_whole(self, output: Any) -> None:
        """Guard a call that runs whole: the script may accumulate its gradients, too. Its activations stay allocated until
        backward."""
        found = list(tensors(output))
        UNDERWAY.ran_whole(self, found)
        for tensor in found:
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self._about_to_hand_over(list(self._core.known.values())))

    def watch_strays(self) -> Callable[[], None]:
        """Average gradients that bypass the forward, from the first backward on. Returns a function that stops this."""
        if self._strays is None or self._core.staging.parts is not None:
            return lambda: None
        self._strays.watch()
        return self._strays.undo

    def stepping(self, *_: object) -> None:
        """Handle the start of an optimizer step: compute unused outputs with the parameters before the step."""
        for call in list(self._waiting):
            if not call.pieces and call.values is None and any(isinstance(s, LazyTensor) for s in call.standins):
                self.values(call)
        self._waiting = weakref.WeakSet()
        if self._strays is not None and self._core.staging.parts is None:
            self._strays.level_before_step()

    def stepped(self) -> None:
        """Handle the end of an optimizer step."""
        self._kinds.ended()
        UNDERWAY.stepped(self)

    def _is_training_call(self, tree: Any) -> bool:
        """Whether gradients flow into its parameters or through it into its inputs."""
        if not torch.is_grad_enabled():
            return False
        if not self._core.knows_parameters():
            said = "a call with parameters other than those wrapped ran whole; if they were replaced, add them to the optimizer"
            self._core.note("note", said)
            return False
        return any(p.requires_grad for p in self._core.known.values()) or any(t.requires_grad for t in tensors(tree))

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Do not intercept calls of the model, as memfit makes them itself."""
        # A script may read an output, which runs the model, in either of these.
        with self._going_through(), outside_transforms(), without_inference_mode():
            yield

    @contextmanager
    def _in_pass(self, call: Call) -> Iterator[None]:
        """Context for micro-batches of a call. The script's hooks for saved tensors (a checkpoint around a loss counts them)
        do not see theirs, which are not part of the script's graph."""
        with self.aside(), call.as_called(), without_saved_tensors_hooks():
            yield

    @contextmanager
    def _going_through(self) -> Iterator[None]:
        before, self._busy = self._busy, True
        try:
            yield
        finally:
            self._busy = before

    # ---- what stand-ins ask for

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
            node = Sum(self.over_all(call, terms))
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
        """Rescale the terms so that the ranks' values, weighted by samples, give the value over all samples: sums add up, and
        other terms are divided by counts over all ranks."""
        reduction = self._core.team.reduction
        if reduction is None:
            return tuple(terms)
        own = self._own_weight(call.samples)
        counted = [replace(term, count=count_of(term)).counting(call.samples) for term in terms]
        told = reduction.ranks.agree([own, *(count if own else math.nan for count, _ in counted)], DIVISORS)
        samples, *counts = zip(*told)
        divisors = [divisor_of(numbers) for numbers in counts]
        if None in divisors:
            self._say_added(reduction)
        part = own / sum(samples) if own else 1.0
        sums = part * (reduction.ranks.size if reduction.mean else 1)
        return tuple(
            replace(term, count=sums, known=None) if divisor is None else replace(other, count=divisor * part, known=None)
            for term, (_, other), divisor in zip(terms, counted, divisors)
        )

    def accumulate_own_loss(self, call: Call) -> torch.Tensor:
        """Accumulate the model's own loss."""
        with self._core.team.announcing():
            while True:
                try:
                    return self._accumulated(call, OWN_LOSS, self._kinds.weighting(call))
                except WeightsChanged:
                    with self.aside():
                        self._kinds.prove_again(call)  # raises if the result is the same

    def values(self, call: Call) -> list[Any]:
        """Return the joined output leaves, computed on first use."""
        if call.values is None:
            self._say_where(call)
            self._compute_values(call)
        assert call.values is not None
        return call.values

    def _compute_values(self, call: Call) -> None:
        self._after_earlier(call)
        with self._core.team.announcing(), self._in_pass(call), torch.enable_grad():
            self._first_pass(call)
            self._rest(alone=True)
        self._ran(call)

    def _after_earlier(self, call: Call) -> None:
        """Run earlier forwards with side effects first, as these run in the order of their calls."""
        if call.composition.moved:
            self._run_earlier(min(each.number for each in call.calls))

    def _run_earlier(self, first: float = math.inf) -> None:
        """Run the forwards of calls before `first` that have side effects."""
        for earlier in sorted(self._waiting, key=lambda each: each.number):
            waits = not earlier.pieces and earlier.values is None and earlier.whole is None
            if earlier.number < first and waits and earlier.composition.moved:
                self.values(earlier)

    def _ran(self, call: Call) -> None:
        """Note the end of a pass. Its forwards may have written inputs and parameters."""
        if written := call.ran():
            for other in list(self._waiting):
                other.accept(written)

    def _say_where(self, call: Call) -> None:
        """Tell the user which line makes the forward run once more."""
        line = line_of_script()
        if not call.samples or line in self._lines or self._core.settings.rank:
            return
        self._lines.add(line)
        when = "after" if call.gathered else "before"
        self._core.note("note", f"{line} reads values of an output {when} its loss ran: the forward runs again for them")

    def _first_pass(self, call: Call) -> None:
        UNDERWAY.make_room(call)
        core, planned, repeated = self._core, self._replay_plan(call), bool(call.pieces)
        call.activate, tries = partial(core.in_force.activate, planned), itertools.count()

        def attempt(largest: int) -> None:
            call.kept.clear()
            if next(tries):
                self._ran(call)  # up to where memory ran out
            if not repeated:
                call.forget_pass()
            # Passes over sharded parameters need the same order on all ranks. A forward that writes parameters invalidates the
            # graphs kept of earlier micro-batches.
            keep = 0 if core.staging.parts is not None or call.composition.moved else planned.plan.keep
            pieces = core.accumulator.pieces(call.samples, largest)
            cut = partial(sizes, largest=largest, least=core.least)
            with nullcontext() if repeated else core.accumulator.norms_of(len(pieces)):
                call.compute_values(pieces, keep, core.staging, core.buffers, cut, core.in_force.heap.check)

        try:
            with core.team.computing():
                core.accumulator.recovery.run(attempt, core.in_force.limit(planned.plan))
            core.accumulator.apply_norms()
        except BaseException as error:
            begun, ran = call.random[:1], call.values is not None
            if not repeated:
                call.forget_pass()
            if repeated or not self._runs_whole_after(call, error, begun, ran):
                raise

    def replayed(self, call: Call, gradients: tuple[torch.Tensor | None, ...]) -> Total:
        """Return the gradients of the receivers, given those of the outputs, by running the call again."""
        if call.whole is not None:
            return self._backward_of_whole(call, gradients)
        if call.values is None:  # else this would be reported as a read by the script
            self._lines.add(line_of_script())
        self.values(call)
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
                self._ran(call)  # up to where memory ran out
            core.accumulator.prepare(len(call.pieces))
            weight = self._own_weight(call.samples)
            factor = core.staging.relative_to(weight)
            incoming = gradients if factor == 1.0 else tuple(None if g is None else g * weight for g in gradients)
            with core.staging.counting():
                cut = partial(sizes, largest=largest, least=core.least)
                call.replay(incoming, core.staging, core.buffers, cut, core.in_force.heap.check)
                parameters = len(receivers) - len(call.inputs.wanted)
                staged = [*core.staging.take(receivers[:parameters]), *call.inputs.take()]
            value = torch.zeros((), device=core.device)
            return Total(value, receivers, staged, factor, weight=weight, samples=call.samples, unseen=True)

        with self.aside(), core.team.announcing(), call.as_called():
            largest = max(call.pieces)
            with core.team.computing(again=True):
                total = attempt(largest) if core.staging.parts is not None else core.accumulator.recovery.run(attempt, largest)
            self._combine(total, BY_SAMPLES)
        self._ran(call)
        settle_looks(call.calls)
        return total

    def _backward_of_whole(self, call: Call, gradients: tuple[torch.Tensor | None, ...]) -> Total:
        """Like `replayed`, for a call that ran whole after all: backward through its own graph."""
        assert call.whole is not None
        found = [(leaf, gradient) for leaf, gradient in zip(call.whole, gradients) if gradient is not None]
        with self.aside():
            torch.autograd.backward(*map(list, zip(*found)), retain_graph=graph_is_kept())
        receivers = self.receivers(call)
        return Total(torch.zeros((), device=self._core.device), receivers, [None] * len(receivers))

    def like_after(self, call: Call, following: Node, parents: Sequence[LazyTensor]) -> torch.Tensor | None:
        """Return a fake tensor like the result of an operation on stand-ins, or None if unknown."""
        key = look_of(following, {id(p.node): (tuple(p.shape), p.dtype, p.device) for p in parents}, call.samples)
        if key not in self._shapes:
            if len(self._shapes) >= LOOKS:
                self._shapes.clear()
            self._shapes[key] = self._result_of(following, parents, call.samples)
        return self._shapes[key]

    def _result_of(self, following: Node, parents: Sequence[LazyTensor], samples: int) -> torch.Tensor | None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        known = {id(parent.node): parent for parent in parents}
        try:
            with FakeTensorMode():
                part = SampleRange({}, 0, samples)
                for node in all_nodes(following):
                    like = known.get(id(node)) if not isinstance(node, BatchTensor) else node.tensor
                    if like is not None:
                        part.put(node, torch.empty(tuple(like.shape), dtype=like.dtype, device=like.device))
                return part.value(following)
        except (RuntimeError, TypeError, ValueError, IndexError):
            return None  # the real operation raises its own error

    # ---- passes

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
        first, total = not call.pieces, None
        if first:
            self._after_earlier(call)
        call.kept.clear()  # accumulation runs its own forwards
        self._gathers(call)
        try:
            with self._in_pass(call), nullcontext() if first else call.drawing_again():
                total = self._pass(call, consumer, weighting, first)
                self._rest()
                if self._batch_samples() == 0:
                    total.weight = 0.0
                then, receivers = total.on_handover, total.receivers  # the total itself would create a reference cycle

                def handing_over(incoming: torch.Tensor) -> None:
                    then(incoming)
                    call.check_data()
                    for labels in consumer.labels:
                        labels.check_data("has computed the gradients with the loss")
                    self._about_to_hand_over(receivers)
                    for each in () if graph_is_kept() else call.calls:
                        each.pending -= 1

                for each in call.calls:
                    each.pending += 1
                total.on_handover = handing_over
                if not self._core.team.alone:
                    combined = BY_SAMPLES if weighting is BY_SHARE else weighting
                    if weight is not None:
                        combined, total.weight = BY_TERM, weight if total.weight else 0.0
                    total.combine = self._combining(total, combined)
                return hand_over(total)
        except BaseException as error:
            begun, ran = call.random[:1], total is not None
            if first:
                call.forget_pass()
            if not first or not self._runs_whole_after(call, error, begun, ran):
                raise
        return consumer.of_whole(call)

    def _runs_whole_after(self, call: Call, error: BaseException, begun: Sequence[RandomState], ran: bool) -> bool:
        """Whether a call runs whole, as the script wrote it, because its first pass in micro-batches failed before the
        handover. If the model raises then, too, the error is the script's own. `begun`: the random state at the start, if it
        started; `ran`: whether its micro-batches finished, so that no state was restored."""
        core = self._core
        if not self._kinds.runs_whole_after(call, error) or (ran and (call.composition.moved or core.buffers.written)):
            return False
        core.staging.discard()
        for state in begun:
            state.restore(core.device)
        with self.aside():
            call.run_whole()
        self._kinds.say_whole(call, error)
        return True

    def _pass(self, call: Call, consumer: Consumer, weighting: Weighting, first: bool) -> Total:
        core = self._core
        call.check_unchanged()
        UNDERWAY.make_room(call)
        planned = self._kinds.planned(call, consumer, weighting)
        call.activate = partial(core.in_force.activate, planned)
        if core.reference is None:
            core.reference = _reference(call, consumer, weighting)
        work = consumer.work(call, planned.plan.precision)
        work.draws = True
        work.composition = call.composition if first else call.composition.repeated()
        work.keeps = self._worth_keeping(call, consumer, planned.plan) if first else frozenset()
        if isinstance(work, ExpressionWork):
            terms = [term for number in _numbers(call) for term in number.terms if term.known is not work.node]
            work.note(list({id(term.node): term.node for term in terms}.values()))

        def begin(pieces: Sequence[int]) -> None:
            work.values.clear()
            if isinstance(work, ExpressionWork):
                work.noted.clear()
            if first:
                call.forget_pass()
                call.begin(pieces)

        def pieces_for(largest: int, tuner: Tuner | None) -> Sequence[int]:
            return core.accumulator.tuned_pieces(call.samples, largest, tuner) if first else call.pieces

        with core.buffers.kept(not first):
            limit = core.in_force.limit(planned.plan)
            total = core.accumulator.run(work, weighting, pieces_for, largest=limit, begin=begin, autocast=call.autocast)
        self._ran(call)
        for node, value in work.noted.values() if isinstance(work, ExpressionWork) else ():
            call.note(node, value)
        if work.values:
            whole = call.joined(work.values)
            for each in call.calls:
                offset = call.offsets[each.number]
                each.values = whole[offset : offset + len(each.outputs.leaves)]
            settle_looks(call.calls)
        return total

    def _replay_plan(self, call: Call) -> Planned:
        standing = (1 + LOSS_BOUND) * call.outputs.bytes_per_sample
        planned = self._kinds.planned(call, REPLAY, BY_SAMPLES, mode="replay", standing_per_sample=standing)
        if self._core.reference is None:
            self._core.reference = _reference(call, REPLAY, BY_SUM)
        return planned

    def _worth_keeping(self, call: Call, consumer: Consumer, plan: Plan) -> frozenset[int]:
        """The outputs to keep: those that the script still holds, smallest first, as far as they fit beside the plan's peak.
        Not a loss that is being computed."""
        numbers = set(map(id, _numbers(call)))  # the pass sums these up
        standins = [standin for each in call.calls for standin in each.standins if isinstance(standin, LazyTensor)]
        leaves = {leaf for standin in standins if id(standin) not in numbers for leaf in standin.leaves}
        held = {call.offsets[number] + leaf for number, leaf in leaves if number in call.offsets}
        held -= {call.outputs.loss} if consumer is OWN_LOSS else set()
        size = {i: call.outputs.leaves[i].bytes_for(call.samples) for i in held}
        left, kept = max(KEPT_VALUES, plan.room // 2), set()  # parts and joined outputs are allocated together
        for i in sorted(held, key=size.__getitem__):
            left -= size[i]
            kept |= {i} if left >= 0 else set()
        return frozenset(kept)

    def _about_to_hand_over(self, receivers: Sequence[torch.Tensor]) -> None:
        self._kinds.ended()
        if self._guard is not None:
            self._guard.handing_over(self._batch_number(), receivers)


def _numbers(call: Call) -> list[LazyTensor]:
    """Deferred losses of the call, or parts of them, that may be read after the pass that computes the gradients."""
    found = [standin for each in call.calls for standin in each.standins if isinstance(standin, LazyTensor)]
    numbers = [standin for standin in dict.fromkeys(found) if standin.is_loss_that_waits]
    return [each for each in numbers if all(leaf[0] in call.offsets for term in each.terms for leaf in leaves_in(term.node))]


def _all_computed(tree: Any) -> Any:
    found = flat(tree)
    if not any(isinstance(leaf, LazyTensor) for leaf in found):
        return tree
    return rebuild(tree, iter([leaf.computed() if isinstance(leaf, LazyTensor) else leaf for leaf in found]))


REPLAY = AllOutputs()
BY_SUM = Weighting("sum", "as a sum")
BY_SHARE = Weighting("share", "as what they add to the whole")


def _reference(call: Call, consumer: Consumer, weighting: Weighting) -> MadeReference:
    """Copy a few samples of this call for verification."""
    samples = min(KEPT_SAMPLES, call.samples)
    kept, its, composition = call.first(samples), consumer.first(samples, backwards=False), call.composition.afresh()

    def work(count: int, backwards: bool) -> Work:
        made = its.first(count, backwards=backwards).work(kept.first(count, backwards=backwards), "off")
        made.composition = composition.afresh()
        return made

    return MadeReference(samples, weighting, work, reversible=call.split is None)
