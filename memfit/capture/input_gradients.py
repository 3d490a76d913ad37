"""Gradients of a call's arguments, where the script asks for them."""

from __future__ import annotations

from typing import Any

import torch

from memfit.batches.cut import Axis, Layout
from memfit.batches.tree import first_same, leaves, rebuild


class InputGradients:
    """Gathers the gradients of arguments that require them from the micro-batches of one pass."""

    def __init__(self, tree: Any, layout: Layout) -> None:
        found = [leaf for _, leaf in leaves(tree)]
        self._axes = {
            i: axis
            for i, (leaf, axis) in enumerate(zip(found, layout.axes))
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        }
        same = first_same(found)
        self._again = {i: same[i] for i in self._axes}
        self._axes = {i: axis for i, axis in self._axes.items() if self._again[i] == i}
        self.wanted: list[torch.Tensor] = [found[i] for i in self._axes]
        """The arguments that gradients flow into."""
        self._own: dict[int, dict[int, torch.Tensor]] = {}
        self.forget()

    def forget(self) -> None:
        """Begin another pass: drop what an earlier one (a proof, a failed attempt) left."""
        self._own = {i: {} for i in self._axes}

    def own(self, piece: Any, start: int) -> Any:
        """Give the arguments that require gradients in `piece`, which starts at sample `start`, leaf tensors of their own."""
        found = [leaf for _, leaf in leaves(piece)]
        for i, axis in self._axes.items():
            made = found[i].detach().requires_grad_()
            if axis is None:  # not cut: all micro-batches share its leaf
                made = self._own[i].setdefault(0, made)
            self._own[i][0 if axis is None else start] = found[i] = made
        for i, first in self._again.items():  # one tensor stays one: a forward may ask whether its query is its key
            found[i] = found[first]
        return rebuild(piece, iter(found))

    def at(self, start: int) -> dict[int, torch.Tensor]:
        """Return the leaf tensors of the piece that starts at `start`."""
        return {i: self._own[i][0 if axis is None else start] for i, axis in self._axes.items()}

    def put_back(self, own: dict[int, torch.Tensor], start: int) -> None:
        """Put back leaf tensors of an earlier pass whose activations were kept."""
        for i, leaf in own.items():
            self._own[i][start if self._axes[i] is not None else -1] = leaf

    def take(self) -> list[torch.Tensor | None]:
        """Return the gradient of each wanted argument, None if none arrived, and forget them."""
        gradients = [self._joined(i, axis) for i, axis in self._axes.items()]
        self.forget()
        return gradients

    def _joined(self, index: int, axis: Axis | None) -> torch.Tensor | None:
        pieces = [piece for _, piece in sorted(self._own[index].items())]
        known = [piece.grad for piece in pieces if piece.grad is not None]
        if not known:
            return None
        if axis is None:
            return sum(known[1:], start=known[0])
        return axis.join([torch.zeros_like(piece) if piece.grad is None else piece.grad for piece in pieces])
