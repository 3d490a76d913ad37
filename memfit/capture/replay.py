"""The two passes of a call whose outputs are needed before any gradient: the first computes their values, the second runs each
micro-batch again for its gradients (replay)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from memfit.batches.pieces import bounds
from memfit.capture.call import Call
from memfit.capture.joining import Joining
from memfit.engine.buffers import WrittenBuffers
from memfit.engine.call_context import without_autocast
from memfit.engine.staged import Staging


@dataclass(frozen=True)
class Replay:
    """Runs the passes of `call`. `cut` maps the size of one of the first pass's micro-batches to the sizes that it is cut into
    now. `before_each` is called before each of these."""

    call: Call
    staging: Staging
    buffers: WrittenBuffers
    cut: Callable[[int], Sequence[int]]
    before_each: Callable[[], None]

    def compute_values(self, pieces: Sequence[int], keep: int) -> None:
        """Run the first pass: compute the whole output, and keep the activations of the last `keep` micro-batches only. If
        another pass came before, its micro-batches run again."""
        call = self.call
        call.check_unchanged()
        call.compare()
        first = call.begin(pieces)
        call.inputs.forget()
        ran = [tuple(self.cut(size)) for size in call.pieces]
        joins = [Joining(leaf, tuple(itertools.chain.from_iterable(ran))) for leaf in call.outputs.leaves]
        moving = call.composition.over_pass() if first else call.composition.kept()
        written = self.staging.versions
        with moving, self.buffers.kept(not first), nullcontext() if first else call.drawing_again():
            for index, (start, _) in enumerate(bounds(call.pieces)):
                call.draw_from(index)
                kept = index >= len(call.pieces) - keep and len(ran[index]) == 1
                for low, high in bounds(ran[index]):
                    self.before_each()
                    call.composition.before_micro_batch()
                    with torch.set_grad_enabled(kept):
                        found = self._forward_of(start + low, start + high)
                    call.composition.after_forward()
                    call.composition.after_micro_batch(high - low)
                    if kept and self.staging.versions != written:  # the next forward would invalidate the graph
                        keep, kept = 0, False
                        call.kept.clear()
                    if kept:
                        call.kept[index] = found, call.inputs.at(start)
                    for i, join in enumerate(joins):
                        join.add(found[i].detach() if isinstance(found[i], torch.Tensor) else found[i])
                    del found
        call.values = [join.whole() for join in joins]

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Run the second pass: run each micro-batch again and backpropagate the gradients of its outputs. Random draws continue
        from the start of each of the first pass's micro-batches."""
        call = self.call
        call.check_unchanged()
        call.compare()
        call.inputs.forget()
        kept = sorted(call.kept)
        # (backward recomputes checkpointed blocks)
        with self.buffers.kept(True), call.drawing_again(), self.staging.swapped():
            # Kept micro-batches go first: that frees their memory before anything reruns, and their graphs may hold state that
            # must stay where their forward left it.
            with call.composition.kept(from_call=False):
                for index in kept:
                    self.before_each()
                    start = sum(call.pieces[:index])
                    self._backward_of(index, start, start + call.pieces[index], gradients)
            with call.composition.kept():
                for index in sorted(set(range(len(call.pieces))).difference(kept)):
                    start = sum(call.pieces[:index])
                    call.random[index].restore(call.device)
                    for low, high in bounds(self.cut(call.pieces[index])):
                        self.before_each()
                        call.composition.before_micro_batch()
                        self._backward_of(index, start + low, start + high, gradients)

    def _forward_of(self, start: int, stop: int) -> list[Any]:
        with self.staging.swapped() if torch.is_grad_enabled() else nullcontext():
            return self.call.checked(self.call.arguments(start, stop))

    def _backward_of(self, index: int, start: int, stop: int, gradients: Sequence[torch.Tensor | None]) -> None:
        call = self.call
        if index in call.kept:
            found, own = call.kept.pop(index)
            call.inputs.put_back(own, start)
        else:
            with torch.enable_grad():
                found = self._forward_of(start, stop)
        roots, incoming = call.outputs.parts_of_gradients(found, gradients, start, stop, call.samples)
        del found
        with without_autocast(call.device):
            torch.autograd.backward(roots, incoming)
