"""Recognises training calls by their signatures, and tells how many samples they have."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from memfit.batches.cut import Layout, common_size, second_size, shared_samples
from memfit.batches.lists import cut_lists, samples_in_lists
from memfit.batches.shapes import Shapes, samples_by, shapes_per_sample
from memfit.batches.split import Split
from memfit.batches.tree import tensors
from memfit.capture.call import Call, Tree
from memfit.capture.infer_layout import look_of, structure_of
from memfit.capture.outputs import Outputs
from memfit.modes.call_kind import CallKind
from memfit.runtime.core import Core

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


class Signatures:
    """All kinds of training calls by their signatures."""

    def __init__(self, core: Core) -> None:
        self.kinds: dict[tuple[Any, ...], CallKind] = {}
        self._core = core
        self._recognised: dict[Hashable, Recognised] = {}
        self._time_first = any(getattr(module, "batch_first", True) is False for module in core.model.modules())

    def clear(self) -> None:
        """Forget all kinds."""
        self.kinds.clear()
        self._recognised.clear()

    def recognise(self, name: str, tree: Tree, hint: int | None) -> Recognised:
        """Return a call's kind and its number of samples."""
        core, flags = self._core, self._core.flags.now()
        look = None if core.split is not None else look_of(tree, core.model, core.device, flags)
        before = None if look is None else self._recognised.get((name, look))
        if before is not None and self.kinds.get(before.key) is before.kind:
            return before
        split = self.split(tree, hint)
        key = name, structure_of(tree, core.model, core.device, split, flags)
        kind = self.kinds.get(key)
        if split is not None:
            told = self.samples(tree, hint)
            samples = shared_samples(tree) if kind is not None and kind.counted else next(iter(told), None)
        else:
            samples = None if kind is None else samples_by(tree, kind.layout)
        found = Recognised(key, kind, samples, () if kind is None else shapes_per_sample(tree, kind.layout, samples))
        if look is not None and kind is not None:
            self._recognised = {} if len(self._recognised) >= RECOGNISED else self._recognised
            self._recognised[name, look] = found
        return found

    def samples(self, tree: Tree, hint: int | None) -> tuple[int, ...]:
        """Return how many samples a call of an unknown kind may have, likeliest first: the loader's, if they fit its tensors;
        their common first dimension; the only size that all of them have; the second dimension, if time may come first."""
        split = self.split(tree, hint)
        if split is cut_lists:
            hint = samples_in_lists(tree, hint)
        fits = hint is not None and (split is not None or _has_dimension(tree, hint))
        found = [hint if fits else shared_samples(tree)]
        if split is not None and split is not cut_lists:
            found.append(shared_samples(tree))
        if split is None:  # (a script may pass a part of its batch, with as many features as the loader has samples)
            found += [shared_samples(tree), common_size(tree), second_size(tree) if self._time_first else None]
        return tuple(dict.fromkeys(samples for samples in found if samples is not None))

    def split(self, tree: Tree, hint: int | None) -> Split | None:
        """Return what cuts these arguments, if it is not the dimensions of their tensors."""
        given = self._core.split
        return given if given is not None or samples_in_lists(tree, hint) is None else cut_lists

    def call_of(self, kind: CallKind, plain: Callable[..., Any], tree: Tree, samples: int, shapes: Shapes) -> Call:
        """Return a call of a known kind. What its outputs are is left open."""
        layout = Layout(kind.layout.axes, samples)
        split = self.split(tree, samples)
        call = Call(self._core.model, plain, tree, layout, Outputs(None, ()), self._core.device, split=split)
        call.copies, call.shapes = kind.writes_input, shapes
        return call


def _has_dimension(tree: Tree, size: int) -> bool:
    return any(size in tensor.shape for tensor in tensors(tree))
