"""Defines the work of a micro-batch in each mode of memfit. All of them run through `engine.accumulate`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from memfit.batches.tree import copied_tensors, map_tensors, tensors
from memfit.batches.weights import Count, known_loss
from memfit.capture.call import Call
from memfit.capture.expression import Node, Step, leaves_in, used_again
from memfit.capture.noted_loss import NotedLoss
from memfit.capture.sample_range import SampleRange
from memfit.engine.compose_state import Composition
from memfit.engine.totals import wide
from memfit.engine.weighting import CountOf
from memfit.levers.precision import precision_applied

LossFn = Callable[[nn.Module, Any], torch.Tensor]
Piece = Callable[[int, int], Any]
"""Maps (start, stop) to those samples as `loss_fn` takes them, on the host or the device."""


class StepWork:
    """Runs `loss_fn(model, piece)` on the pieces of an effective batch of `samples` (step mode). `there`: they are on the
    device; `on_copies`: it gets copies of them, which it may write to."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        piece: Piece,
        samples: int,
        device: torch.device,
        *,
        precision: str = "off",
        there: bool = False,
        on_copies: bool = False,
    ) -> None:
        self._model, self._loss_fn, self._piece, self._precision = model, loss_fn, piece, precision
        self.samples, self.device, self._there = samples, device, there
        self._on_copies, self._copies = on_copies, list[torch.Tensor]()
        self.composition = Composition()

    def inputs(self, start: int, stop: int, count: CountOf | None) -> tuple[Any, Count | None]:
        piece = self._piece(start, stop)
        if self._on_copies:
            piece = copied_tensors(piece)
            self._copies = tensors(piece)
        return piece if self._there else moved(piece, self.device), None if count is None else count(piece)

    def counted(self, start: int, stop: int, count: CountOf) -> Count | None:
        return count(self._piece(start, stop)) if self._there and self.device.type != "cpu" else None

    def wrote(self) -> bool:
        """Whether the latest copies were written to."""
        return any(tensor._version for tensor in self._copies)

    def forward(self, inputs: Any) -> Any:
        return inputs

    def loss(self, outputs: Any) -> torch.Tensor:
        with precision_applied(self._precision, self.device):
            return self._loss_fn(self._model, outputs)

    def extra_receivers(self) -> Sequence[torch.Tensor]:
        return ()

    def extra_gradients(self) -> list[torch.Tensor | None]:
        return []


class CallWork:
    """Runs one call of the model and the loss that its output goes into (script mode).

    `leaf` is the output leaf that is the loss. With `draws`, each micro-batch's random state is recorded, or replayed.
    Attributes: `keeps` (output leaves whose values are kept), `values` (those of each micro-batch, detached), `noted_loss` (the
    model's own loss, if its value is kept while another one trains).
    `borrowed` are the tensors that stand for views of the batch during tracing.
    """

    def __init__(
        self,
        call: Call,
        leaf: int,
        *,
        precision: str = "off",
        draws: bool = True,
        borrowed: Sequence[torch.Tensor] = (),
    ) -> None:
        self.borrowed = borrowed
        self.call, self._leaf, self._precision, self.draws = call, leaf, precision, draws
        self.keeps: frozenset[int] = frozenset()
        self.values: list[dict[int, torch.Tensor]] = []
        self.noted_loss: NotedLoss | None = None
        self.composition = Composition()
        self.samples, self.device = call.samples, call.device
        self._index = 0

    def inputs(self, start: int, stop: int, count: CountOf | None) -> tuple[Any, Count | None]:
        if start == 0:
            self._index = 0
            self.call.inputs.forget()
        if self.draws:
            self.call.draw_from(self._index)
        self._index += 1
        arguments = self.call.arguments(start, stop)
        return (arguments, start, stop), None if count is None else count(arguments)

    def counted(self, start: int, stop: int, count: CountOf) -> Count | None:
        return None if self.device.type == "cpu" else count(self.call.samples_of(start, stop))

    def forward(self, inputs: Any) -> Any:
        return inputs  # the model computes its own loss, so all of it is searched for known means

    def _value(self, arguments: Any) -> Any:
        with precision_applied(self._precision, self.device):
            found = self.call.checked(arguments)
        if self.keeps:
            self.values.append({leaf: found[leaf].detach() for leaf in self.keeps})
        return found[self._leaf]

    def loss(self, outputs: Any) -> torch.Tensor:
        arguments, _, _ = outputs
        return self._value(arguments)

    def extra_receivers(self) -> Sequence[torch.Tensor]:
        return self.call.inputs.wanted

    def extra_gradients(self) -> list[torch.Tensor | None]:
        return self.call.inputs.take()


class OutputsWork(CallWork):
    """Runs a call whose loss is unknown: all its differentiable outputs count, as if they were summed."""

    def __init__(
        self, call: Call, *, precision: str = "off", draws: bool = True, borrowed: Sequence[torch.Tensor] = ()
    ) -> None:
        super().__init__(call, 0, precision=precision, draws=draws, borrowed=borrowed)

    def forward(self, inputs: Any) -> Any:
        arguments, start, stop = inputs
        with precision_applied(self._precision, self.device):
            found = self.call.checked(arguments)
        wanted = [v for v, leaf in zip(found, self.call.outputs.leaves) if leaf.differentiable]
        return wanted, start, stop

    def loss(self, outputs: Any) -> torch.Tensor:
        return torch.stack([value.sum().float() for value in outputs[0]]).sum()


class ExpressionWork(CallWork):
    """Runs a call whose output goes into `node`, an expression that is a sum over micro-batches or a known mean."""

    def __init__(
        self,
        call: Call,
        node: Node,
        offsets: Mapping[int, int],
        *,
        precision: str = "off",
        draws: bool = True,
        borrowed: Sequence[torch.Tensor] = (),
    ) -> None:
        super().__init__(call, 0, precision=precision, draws=draws, borrowed=borrowed)
        self.node, self._shared = node, used_again(node)
        self._compute = node.told if isinstance(node, Step) and known_loss(node.function) is not None else node.of
        self._leaves = {leaf: offsets[leaf[0]] + leaf[1] for leaf in leaves_in(node)}
        self._offsets = offsets
        self._notes: Sequence[Node] = ()
        self.noted: dict[int, tuple[Node, torch.Tensor]] = {}
        """Accumulated values of nodes, by their ids."""

    def note(self, nodes: Sequence[Node]) -> None:
        """Accumulates these nodes, sums over samples, during the pass, beside the loss."""
        self._notes = nodes
        self._shared |= {id(node) for node in nodes}
        self._leaves |= {leaf: self._offsets[leaf[0]] + leaf[1] for node in self._notes for leaf in leaves_in(node)}

    def _take_note(self, part: SampleRange) -> None:
        for node in self._notes:
            value = part.value(node).detach().to(wide(self.device))
            before = self.noted.get(id(node))
            self.noted[id(node)] = node, value if before is None else before[1] + value

    def forward(self, inputs: Any) -> Any:
        arguments, start, stop = inputs
        with precision_applied(self._precision, self.device):
            found = self.call.checked(arguments) if self.noted_loss is None else self.noted_loss.run(arguments, stop - start)
        if self.keeps:
            self.values.append({leaf: found[leaf].detach() for leaf in self.keeps})
        if self.draws:  # not during tracing, where sizes may be guesses
            for leaf in self._leaves.values():
                self.call.outputs.leaves[leaf].check([found[leaf]], [stop - start])
        return SampleRange({leaf: found[i] for leaf, i in self._leaves.items()}, start, stop, self._shared)

    def loss(self, outputs: Any) -> torch.Tensor:
        with precision_applied(self._precision, self.device):
            loss = self._compute(outputs)
            with torch.no_grad():
                self._take_note(outputs)
            return loss


def moved(tree: Any, device: torch.device) -> Any:
    """Moves a batch to the model's device."""
    return map_tensors(lambda tensor: tensor if tensor.device == device else tensor.to(device, non_blocking=True), tree)
