"""What a micro-batch does, in each of the ways memfit is used; all of them run through `engine.accumulate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from memfit.batches.cut import Axis
from memfit.batches.tree import map_leaves, tensors
from memfit.batches.weights import Count, known_loss
from memfit.engine.accumulate import CountOf
from memfit.levers.precision import precision_applied
from memfit.training.call import Call, copied
from memfit.training.learn import twin_of_part
from memfit.training.route import Step

LossFn = Callable[[nn.Module, Any], torch.Tensor]
Piece = Callable[[int, int], Any]
"""From (start, stop) to those samples as `loss_fn` takes them, on the host or the device."""


class StepWork:
    """Step mode: `loss_fn(model, piece)` on the pieces of an effective batch of `samples`; `there`: they lie on the device;
    `on_copies`: it gets copies of them, which it may write into."""

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

    def inputs(self, start: int, stop: int, count: CountOf | None) -> tuple[Any, Count | None]:
        piece = self._piece(start, stop)
        if self._on_copies:
            piece = map_leaves(copied, piece)
            self._copies = tensors(piece)
        return piece if self._there else moved(piece, self.device), None if count is None else count(piece)

    def wrote(self) -> bool:
        """Whether the latest copies were written into."""
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
    """Script mode: one call of the model, and the loss its output goes into.

    `leaf` is the output leaf the loss is computed from, `steps` the way there, `finish(value, start, stop)` the loss
    itself (None: the leaf is the loss). With `draws`, the random state of each micro-batch is remembered, or repeated.
    Attributes: `keeps` (output leaves whose values are kept), `values` (those of each micro-batch, detached).
    `borrowed` are the tensors that stand for views of the batch while tracing.
    """

    def __init__(
        self,
        call: Call,
        leaf: int,
        steps: Sequence[Step] = (),
        finish: Callable[[torch.Tensor, int, int], torch.Tensor] | None = None,
        *,
        precision: str = "off",
        draws: bool = True,
        borrowed: Sequence[torch.Tensor] = (),
    ) -> None:
        self.borrowed = borrowed
        self.call, self._leaf, self._steps, self._finish = call, leaf, steps, finish
        self._precision, self.draws = precision, draws
        self.keeps: frozenset[int] = frozenset()
        self.values: list[dict[int, torch.Tensor]] = []
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

    def forward(self, inputs: Any) -> Any:
        if self._finish is None and not self._steps:
            return inputs  # the model computes its loss itself: all of it is looked at for known means
        arguments, start, stop = inputs
        value = self._value(arguments)
        if self.draws:  # not while tracing, where sizes may be guessed
            self.call.outputs.leaves[self._leaf].check([value], [stop - start])
        return value, start, stop

    def _value(self, arguments: Any) -> Any:
        with precision_applied(self._precision, self.device):
            found = self.call.run(arguments)
        if self.keeps:
            self.values.append({leaf: found[leaf].detach() for leaf in self.keeps})
        return found[self._leaf]

    def loss(self, outputs: Any) -> torch.Tensor:
        value, start, stop = outputs
        if self._finish is None and not self._steps:
            return self._value(value)
        with precision_applied(self._precision, self.device):
            for step in self._steps:
                value = step.apply(value, stop - start)
            return value if self._finish is None else self._finish(value, start, stop)

    def extra_receivers(self) -> Sequence[torch.Tensor]:
        return self.call.inputs.wanted

    def extra_gradients(self) -> list[torch.Tensor | None]:
        return self.call.inputs.take()


class OutputsWork(CallWork):
    """A call whose loss is not known: all its differentiable outputs count, as if they were summed."""

    def __init__(
        self, call: Call, *, precision: str = "off", draws: bool = True, borrowed: Sequence[torch.Tensor] = ()
    ) -> None:
        super().__init__(call, 0, precision=precision, draws=draws, borrowed=borrowed)

    def forward(self, inputs: Any) -> Any:
        arguments, start, stop = inputs
        with precision_applied(self._precision, self.device):
            found = self.call.run(arguments)
        wanted = [v for v, leaf in zip(found, self.call.outputs.leaves) if leaf.differentiable]
        return wanted, start, stop

    def loss(self, outputs: Any) -> torch.Tensor:
        return torch.stack([value.sum().float() for value in outputs[0]]).sum()


class KnownLossEnd:
    """The end of the way: a loss of torch.nn.functional, its per-sample arguments cut like the value that goes in."""

    def __init__(self, function: Any, bound: dict[str, Any], shape: tuple[int, ...], axis: Axis) -> None:
        self._function, self._bound = function, bound
        known = known_loss(function)
        assert known is not None
        self._compete = "ignore_index" in bound and axis.dim == (0 if len(shape) == 1 else 1)
        self._axes = {
            name: axis_of_argument(bound[name], shape, axis, classes=_takes_classes(bound))
            for name in known.cut_with_input
            if isinstance(bound.get(name), torch.Tensor)
        }

    @property
    def cuts_target(self) -> bool:
        """Whether the target has one entry per sample, as the value has, and samples are not the classes of the loss."""
        return self._axes.get("target") is not None and not self._compete

    def __call__(self, value: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        pieces = {
            name: axis.narrow(self._bound[name], start, stop) for name, axis in self._axes.items() if axis is not None
        }
        return self._function(**{**self._bound, **pieces, "input": value})

    def first(self, samples: int, *, backwards: bool = False) -> KnownLossEnd:
        """The same on copies of the first `samples` samples' arguments, in the opposite order if `backwards`."""
        other = object.__new__(KnownLossEnd)
        other._function, other._axes, other._compete = self._function, self._axes, self._compete
        other._bound = {name: value for name, value in self._bound.items() if name != "input"}
        for name, axis in self._axes.items():
            if axis is not None:
                part = axis.narrow(self._bound[name], 0, samples)
                other._bound[name] = axis.reversed(part) if backwards else part.clone()
        return other

    def twin(self, twin: Callable[[torch.Tensor], torch.Tensor], samples: int) -> tuple[KnownLossEnd, list[torch.Tensor]]:
        """The same on twins of the first `samples` samples' arguments, and those twins."""
        other = object.__new__(KnownLossEnd)
        other._function, other._axes, other._compete = self._function, self._axes, self._compete
        other._bound = {name: value for name, value in self._bound.items() if name != "input"}
        made = []
        for name, value in other._bound.items():
            if isinstance(value, torch.Tensor):
                other._bound[name] = twin_of_part(_first(value, self._axes.get(name), samples), twin)
                made.append(other._bound[name])
        return other, made


def axis_of_argument(argument: torch.Tensor, shape: tuple[int, ...], axis: Axis, *, classes: bool) -> Axis | None:
    """Where the samples lie in a loss's argument that goes with a value of `shape`; None if it is the same for all."""
    if classes and argument.dim() == len(shape) - 1:
        dim = 0 if axis.dim == 0 else axis.dim - 1  # class indices lack the value's dimension 1
    else:
        dim = axis.dim - (len(shape) - argument.dim())  # broadcasting aligns the last dimensions
    if dim < 0 or dim >= argument.dim() or argument.shape[dim] != shape[axis.dim]:
        return None
    return Axis(dim, axis.outer, axis.inner)


def moved(tree: Any, device: torch.device) -> Any:
    """A batch on the device the model computes on."""
    def move(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.device == device:
            return leaf
        return leaf.to(device, non_blocking=True)

    return map_leaves(move, tree)


def _takes_classes(bound: dict[str, Any]) -> bool:
    return "ignore_index" in bound and not bound["target"].is_floating_point()


def _first(value: torch.Tensor, axis: Axis | None, samples: int) -> torch.Tensor:
    return value if axis is None else axis.like_first(value, samples)
