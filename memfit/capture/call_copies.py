"""Calls on copies of some samples of a call, as proofs and verification run them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from memfit.batches.cut import Axis, Layout, cut_samples
from memfit.batches.tree import copied_tensors, leaves, rebuild
from memfit.capture.call import Call


def first_samples(call: Call, samples: int, *, backwards: bool = False) -> Call:
    """Return a call on copies of the first `samples` samples, in reverse order if `backwards` (not if only `split` can cut
    them). The copies require no gradients, unless `split` makes them."""
    layout = Layout(call.layout.axes, samples)
    if call.split is not None:
        tree = copied_tensors(call.arguments(0, samples))
        return Call(call.model, call.plain, tree, layout, call.outputs, call.device, autocast=call.autocast, split=call.split)
    found = [leaf for _, leaf in leaves(call.arguments(0, samples))]
    copies = {id(leaf): _copied(leaf, axis, backwards) for leaf, axis in zip(found, call.layout.axes)}
    tree = rebuild(call.tree, iter([copies[id(leaf)] for leaf in found]))
    made = Call(call.model, call.plain, tree, layout, call.outputs, call.device, autocast=call.autocast)
    made.copies = True  # they may be run more than once
    return made


def chosen_samples(call: Call, indices: Sequence[int]) -> Call:
    """Return a call on copies of these samples, in the same modes and autocast. Not for calls that only `split` can cut."""
    tree = copied_tensors(cut_samples(call.tree, call.layout, indices))
    layout = Layout(call.layout.axes, len(indices))
    made = Call(call.model, call.plain, tree, layout, call.outputs, call.device, autocast=call.autocast)
    made.modes, made.requires, made.copies = call.modes, call.requires, True
    return made


def _copied(leaf: Any, axis: Axis | None, backwards: bool) -> Any:
    if not isinstance(leaf, torch.Tensor) or axis is None:
        return leaf
    return axis.reversed(leaf.detach()) if backwards else leaf.detach().clone()
