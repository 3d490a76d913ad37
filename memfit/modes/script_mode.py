"""Script mode: keeps the user's training loop and cuts the model's training calls into micro-batches behind stand-in outputs.

Not covered: methods called from outside and not listed in `methods=` (reported if `forward` is not called), and tensors that
leave the forward in another way than its output (detected and refused).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from memfit.batches.cut import shared_samples
from memfit.batches.entries import Entries, also_in
from memfit.batches.tree import flat, rebuild, tensors
from memfit.capture.bypassed import OutsideForward
from memfit.capture.call import Call, Tree
from memfit.capture.lazy_functions import stand_ins
from memfit.capture.lazy_tensor import LazyTensor
from memfit.capture.not_joined import NotJoined
from memfit.capture.side_outputs import through
from memfit.engine.call_attributes import Attributes
from memfit.engine.call_context import transforming
from memfit.engine.handover import Total
from memfit.engine.joined_handover import joined
from memfit.engine.modules import modules_of
from memfit.engine.version_checks import Modified
from memfit.engine.weighting import BY_SAMPLES
from memfit.hardware.exhausted import drop_frames, free_unused, is_out_of_memory
from memfit.modes.call_kinds import CallKinds
from memfit.modes.evaluation import Evaluations
from memfit.modes.pending_calls import UNDERWAY
from memfit.modes.script_passes import ScriptPasses
from memfit.runtime.accumulation_guard import AccumulationGuard
from memfit.runtime.core import Core


class Script:
    """Handles the model's intercepted calls."""

    def __init__(
        self,
        core: Core,
        batch_samples: Callable[[], int | None],
        batch_number: Callable[[], int],
        guard: AccumulationGuard | None,
    ) -> None:
        self.samples_seen = self.calls = 0
        self._core, self._guard = core, guard
        self._batch_samples, self._batch_number = batch_samples, batch_number
        self._kinds = CallKinds(core)
        self._passes = ScriptPasses(core, self._kinds, batch_samples, self._about_to_hand_over)
        self._waiting = self._passes.waiting
        self._evaluations = Evaluations(core, self._waiting.aside)
        core.on_forget.append(self._kinds.forget)
        core.on_parameters.append(self._kinds.rebuild)
        self.outside = OutsideForward(core.model, core.tell)

    def aside(self) -> AbstractContextManager[None]:
        """Return the context manager in which calls of the model are not intercepted."""
        return self._waiting.aside()

    def answer(self, name: str, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of an intercepted method."""
        if self._waiting.busy:
            return plain(*args, **kwargs)
        self._waiting.release_state()
        self.outside.called()
        inside = transforming()
        if inside is not None:
            self._core.tell(f"a call of the model inside {inside} runs whole, as it is")
            self._passes.losses.runs_whole(shared_samples((args, kwargs)))
            return plain(*args, **kwargs)
        if not self._is_training_call((args, kwargs)):
            output = self.evaluate(name, plain, args, kwargs)
            self._core.team.rest(alone=True)
            return output
        self.calls += 1
        core = self._core
        core.caches.trains()
        given = args, kwargs
        args, kwargs = _all_computed(given)  # inputs may be outputs of another call
        self._waiting.run_counters()
        self._waiting.reads.roots.add(name)
        attributes = Attributes(modules_of(core.model), self._waiting.reads, (), flat((args, kwargs)))
        with self._waiting.aside(), self._core.team.announcing():
            call, samples = self._kinds.to_cut(name, plain, (args, kwargs), self._batch_samples(), attributes)
            self.samples_seen += samples or 0
            if call is None:
                attributes.forget()  # it may hold the graph of the call before
                with also_in(given, (args, kwargs)):
                    output, call = self._whole_or_cut(name, plain, (args, kwargs))
                if call is None:
                    self._guard_whole(output)
                    if core.team.ranks is not None:
                        core.team.ranks.rest()  # its graph needs the all-gathered parameters
                    return output
            self._core.team.rest()
        call.detach_from_script(attributes.at_call())
        self._say_backward_hooks()
        self._waiting.calls.add(call)
        if call.copies and not call.inputs.wanted and call.split is None:  # the script may go on with what its input is then
            core.tell("the forward writes into its input: it runs at the call, and again for gradients")
            with self._waiting.aside(), call.writing_arguments():
                self._passes.compute_values(call)
        for place in call.composition.trained[:1]:  # the script may read it, so all samples must have written it
            core.tell(f"the forward writes {place.label}, which is trained: it runs at the call, and again for gradients")
            with self._waiting.aside():
                self._passes.compute_values(call)
        made = through(call.plain, stand_ins(self._passes, call), given)
        self._waiting.await_state(call)
        return made

    def _say_backward_hooks(self) -> None:
        """Tell the user once that backward hooks of modules see micro-batches."""
        if any(module._backward_hooks or module._backward_pre_hooks for module in modules_of(self._core.model)):
            self._core.tell("backward hooks of modules run once per micro-batch, with its part of the gradients")

    def evaluate(self, name: str, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of an intercepted method that computes no gradients of the model."""
        if self._waiting.busy:
            return plain(*args, **kwargs)
        given = args, kwargs
        args, kwargs = _all_computed(given)
        self._waiting.run_earlier()
        with self._waiting.going_through(), also_in(given, (args, kwargs)):
            output = self._evaluations.answer(name, plain, args, kwargs)
        self._core.caches.evaluated()
        return output

    def _whole_or_cut(self, name: str, plain: Callable[..., Any], tree: Tree) -> tuple[Any, Call | None]:
        """Return (output of a call that runs whole, None), or (None, call to cut) if it runs out of memory."""
        core, (args, kwargs) = self._core, tree
        self._waiting.run_earlier()
        UNDERWAY.make_room(None)
        if not core.team.alone:
            return self._whole_of_all(lambda: plain(*args, **kwargs)), None
        put_back, entries = core.accumulator.recovery.watched(), Entries(tree)
        try:
            return plain(*args, **kwargs), None
        except BaseException as error:
            if not is_out_of_memory(error):
                raise
            drop_frames(error)
            failed = error
        free_unused(core.device)
        entries.restore()
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
                self._passes.losses.combine(total, BY_SAMPLES)
            return total

        core.accumulator.prepare(1)
        weight = self._passes.losses.own_weight(1)
        return joined(run, core.staging, finish, weight)

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
        return self._passes.losses.watch_strays()

    def stepping(self, *_: object) -> None:
        """Handle the start of an optimizer step: compute unused outputs with the parameters before the step."""
        self._waiting.end()
        self._passes.losses.before_step()

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

    def _about_to_hand_over(self, receivers: Sequence[torch.Tensor]) -> None:
        self._kinds.ended()
        if self._guard is not None:
            self._guard.handing_over(self._batch_number(), receivers)


def _all_computed(tree: Any) -> Any:
    """Return arguments with the tensors that outputs of earlier calls stand for."""
    found = flat(tree)
    if not any(isinstance(leaf, LazyTensor) for leaf in found):
        return tree
    return rebuild(tree, iter([_computed(leaf) if isinstance(leaf, LazyTensor) else leaf for leaf in found]))


def _computed(leaf: LazyTensor) -> Any:
    try:
        value = leaf.computed()
    except Modified as error:  # mostly of an earlier step, and never read: its parameters have been updated
        return NotJoined("an output of an earlier call", "tensor", error.with_traceback(None))
    with torch._C.DisableTorchFunctionSubclass():
        node = leaf.grad_fn
    try:  # (without the script's hooks for saved tensors)
        getattr(node, "_raw_saved_tensors", None)
    except RuntimeError:  # autograd's own "a second time": a backward has freed its graph, so no gradient can flow into it
        return value.detach()
    return value
