"""Describes what a model returns for any number of samples, learnt from its outputs for two small numbers.

Not covered: outputs with two dimensions that grow with the batch (similarity matrices). They are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from memfit._errors import Refused
from memfit.batches.cut import Axis
from memfit.batches.tree import AttributeKey, Path, leaves, rebuild
from memfit.capture.not_joined import NUMBERS
from memfit.capture.output_leaf import Leaf, Named, name_in, turned
from memfit.engine.batch_limits import LimitedCall
from memfit.engine.branches import Branching


class Otherwise(Refused):
    """Raised if a model returns another structure, or another non-tensor value, than it did for calls like this one."""


@dataclass(frozen=True)
class Outputs:
    """Describes an output: its nesting and its leaves."""

    tree: Any
    """An output with None in place of tensors and opaque objects, for its containers."""
    leaves: tuple[Leaf, ...]
    """The leaves, in order."""
    same: tuple[tuple[int, int], ...] = ()
    """Pairs of leaves that are one tensor: the later one, the first one."""
    limits: tuple[LimitedCall, ...] = ()
    """Limits of what several samples make that they depend on."""
    branching: Branching | None = None
    """What is known of branches on values of the batch, if there may be some."""

    def check(self, output: Any, found: Sequence[Any]) -> None:
        """Raises Otherwise if an output with the leaves `found` differs from this structure or its values."""
        if not self._is_nested_like(output):
            raise otherwise(f"a {type(output).__name__}")
        self.check_count(found)
        for i, value in self._values:
            if type(found[i]) is not type(value) or found[i] != value:
                raise otherwise(f"{found[i]!r} as {name_in(self.leaves[i].path)}, where it was {value!r}")
        for again, first in self.same:
            if found[again] is not found[first]:
                names = [name_in(self.leaves[i].path) for i in (first, again)]
                raise otherwise(f"different tensors as {' and '.join(names)}")

    def check_count(self, found: Sequence[Any]) -> None:
        """Raises Otherwise if an output has more or fewer leaves."""
        if len(found) != len(self.leaves):
            raise otherwise(f"{len(found)} values")

    @cached_property
    def shared(self) -> tuple[int, ...]:
        """The tensors that all micro-batches have in common, as far as is known."""
        return tuple(i for i, leaf in enumerate(self.leaves) if leaf.is_tensor and leaf.alike)

    @property
    def watched(self) -> bool:
        """Whether micro-batches are compared."""
        return bool(self.shared or self.limits or self.branching is not None)

    @cached_property
    def _values(self) -> tuple[tuple[int, Any], ...]:
        return tuple((i, leaf.value) for i, leaf in enumerate(self.leaves) if leaf.kind == "value")

    def _is_nested_like(self, output: Any) -> bool:
        if isinstance(output, torch.Tensor) or self.tree is None:
            return isinstance(output, torch.Tensor) and self.tree is None
        if isinstance(output, SideOutput) and any(not _has_names_of(output.beside[n], v) for n, v in self.tree.beside.items()):
            return False
        return type(output) is type(self.tree) and _has_names_of(output, self.tree)

    @property
    def bytes_per_sample(self) -> int:
        """Bytes of the differentiable outputs per sample, in at least float32, as losses compute."""
        batch = [leaf for leaf in self.leaves if leaf.kind == "batch" and leaf.differentiable]
        return sum(leaf.bytes_for(1) * max(1, 4 // leaf.dtype.itemsize) for leaf in batch)

    @property
    def loss(self) -> int | None:
        """The index of the model's own loss, if its output has exactly one."""
        found = [i for i, leaf in enumerate(self.leaves) if leaf.kind == "loss" and not leaf.is_beside]
        return found[0] if len(found) == 1 else None

    @property
    def has_samples(self) -> bool:
        """Whether an output is cut, or a loss."""
        return any(leaf.kind in ("batch", "loss") for leaf in self.leaves)

    def with_alike_loss(self) -> Outputs:
        """Returns these outputs where the model's own loss is the same (0) for all samples that it was seen for."""
        leaves = [replace(leaf, alike=True) if i == self.loss else leaf for i, leaf in enumerate(self.leaves)]
        return replace(self, leaves=tuple(leaves))

    @property
    def trains(self) -> bool:
        """Whether gradients can flow through any leaf. Raises Refused if an opaque leaf may hide tensors."""
        if any(leaf.differentiable for leaf in self.leaves):
            return True
        hidden = next((leaf for leaf in self.leaves if leaf.kind == "opaque" and leaf.value not in NUMBERS), None)
        if hidden is not None:
            raise Refused(
                "joining the outputs of micro-batches",
                found=f"it returns a {hidden.value} ({name_in(hidden.path)}), with no tensors memfit sees",
                next_move="return tensors, in tuples, lists, dictionaries, dataclasses or as attributes of an object; or pass "
                "loss_fn= and call run.step(batch)",
            )
        return False

    @property
    def tensors(self) -> tuple[int, ...]:
        """The indices of tensor leaves."""
        return tuple(i for i, leaf in enumerate(self.leaves) if leaf.is_tensor)

    def joined(self, parts: Sequence[dict[int, torch.Tensor]], sizes: Sequence[int]) -> list[torch.Tensor | None]:
        """Returns the leaves of the whole output, joined from what micro-batches of these sizes kept; None for other leaves."""
        whole: list[torch.Tensor | None] = [None] * len(self.leaves)
        for i in parts[0]:
            leaf, found = self.leaves[i], [part[i] for part in parts]
            leaf.check(found, sizes)
            whole[i] = leaf.join(found, sizes)
        return whole

    def parts_of_gradients(
        self, found: Sequence[Any], gradients: Sequence[torch.Tensor | None], start: int, stop: int, samples: int
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Returns what backward starts from for the samples `start:stop` of so many: the leaves `found` that require gradients,
        and their parts of the whole's `gradients`."""
        parts = [leaf.gradient_part(g, start, stop, samples) for leaf, g in zip(self.leaves, gradients)]
        pairs = [(leaf, part) for leaf, part in zip(found, parts) if part is not None]
        trained = [(leaf, part) for leaf, part in pairs if getattr(leaf, "requires_grad", False)]
        return [leaf for leaf, _ in trained], [part for _, part in trained]

    def filled(self, values: Sequence[Any]) -> Any:
        """Returns an output with these leaves."""
        values = list(values)
        for again, first in self.same:
            values[again] = values[first]
        return rebuild(self.tree, iter(values))

    def settled_like(self, proven: Outputs) -> Outputs | None:
        """Returns these outputs, for inputs of another size, joined as `proven` ones are, or None if those do not tell how."""
        if [leaf.path for leaf in self.leaves] != [leaf.path for leaf in proven.leaves]:
            return None
        made = [_settled_like(mine, its) for mine, its in zip(self.leaves, proven.leaves)]
        if None in made:
            return None
        known = tuple(leaf for leaf in made if leaf is not None)
        return replace(self, leaves=known, limits=proven.limits, branching=proven.branching)

    def looks_like(self, other: Outputs) -> bool:
        """Whether both have the same leaves, of the same shapes per sample, joined alike, and the same values."""
        mine, its = ([_look_of(leaf) for leaf in each.leaves] for each in (self, other))
        return mine == its and all(
            one.kind == "opaque" or one.value == two.value for one, two in zip(self.leaves, other.leaves)
        )


def _look_of(leaf: Leaf) -> tuple[Any, ...]:
    return leaf.kind, leaf.path, leaf.shape_for(1), leaf.dtype, leaf.differentiable, leaf.axis, leaf.joined


@dataclass
class SideOutput:
    """An output, and by name the values that left the forward as side effects."""

    output: Any
    beside: dict[str, Any]


def _has_names_of(value: Any, other: Any) -> bool:
    return not isinstance(value, dict) or (isinstance(other, dict) and list(value) == list(other))


def _paths(output: Any) -> Iterator[tuple[Path, Any]]:
    """Yield an output's leaves with their paths."""
    if not isinstance(output, SideOutput):
        yield from leaves(output)
        return
    yield from leaves(output.output)
    for name, value in output.beside.items():
        yield from leaves(value, (Named(name),))


def learn_outputs(small: Any, few: int, large: Any, many: int) -> Outputs:
    """Infers the outputs for any number of samples from those for `few` and for `many`. Raises Refused with the leaf's name."""
    first, second = list(_paths(small)), list(_paths(large))
    if [path for path, _ in first] != [path for path, _ in second]:
        raise Refused(
            "joining the outputs of micro-batches",
            found=f"the model returns different structures for {few} and {many} samples",
            next_move="return tensors with one entry per sample, or compute the loss inside the model",
        )
    found = tuple(_learn(path, a, few, b, many) for (path, a), (_, b) in zip(first, second))
    same, its = _same([leaf for _, leaf in first]), _same([leaf for _, leaf in second])
    return Outputs(rebuild(small, map(_without_values, found)), found, same if same == its else ())


def _same(found: Sequence[Any]) -> tuple[tuple[int, int], ...]:
    """Return pairs of leaves that are one tensor."""
    met: dict[int, int] = {}
    firsts = [met.setdefault(id(leaf), i) if isinstance(leaf, torch.Tensor) else i for i, leaf in enumerate(found)]
    return tuple((i, first) for i, first in enumerate(firsts) if i != first)


def _without_values(leaf: Leaf) -> Any:
    """Return the leaf's placeholder in `Outputs.tree`. The script's own objects are recognized by the tensors they hold."""
    if leaf.kind in ("value", "size"):
        return leaf.value
    return torch.empty(0, device="meta") if leaf.path and isinstance(leaf.path[-1], AttributeKey) else None


def _learn(path: Path, small: Any, few: int, large: Any, many: int) -> Leaf:
    if not isinstance(small, torch.Tensor):
        simple = isinstance(small, (int, float, str, bool, type(None))) or _is_fixed_transform(small)
        same = simple and type(small) is type(large) and small == large
        if _is_batch_shape(path) and not same and isinstance(small, int) and small * many == large * few:
            return Leaf("size", path, value=small // few)
        return Leaf("value", path, value=small) if same else Leaf("opaque", path, value=type(small).__name__)
    about = {
        "shape": tuple(small.shape),
        "dtype": small.dtype,
        "device": small.device,
        "differentiable": small.requires_grad,
    }
    if small.shape == large.shape:
        scalar = small.numel() == 1 and small.requires_grad and small.is_floating_point()
        return Leaf("loss", path, joined="mean", **about) if scalar else Leaf("constant", path, **about)
    grown = [dim for dim in range(small.dim()) if small.dim() == large.dim() and small.shape[dim] != large.shape[dim]]
    if len(grown) == 1:
        inner, rest = divmod(small.shape[grown[0]], few)
        if rest == 0 and large.shape[grown[0]] == inner * many:
            return Leaf("batch", path, **about, axis=Axis(grown[0], inner=inner))
    raise Refused(
        "joining the outputs of micro-batches",
        found=f"{name_in(path)} has the shape {tuple(small.shape)} for {few} samples and {tuple(large.shape)} "
        f"for {many}: it does not have one entry per sample",
        next_move="compute what needs all samples together outside the model, from outputs with one entry per sample",
    )


def otherwise(what: str) -> Otherwise:
    """Return the error for a forward that returned this, unlike before."""
    return Otherwise(
        "running a call of the model in micro-batches",
        found=f"the forward returned {what}; earlier calls like this one did not",
        next_move="let an argument of the call decide what the forward returns, or a bool or str attribute of the module, or "
        'pass micro_batch="off"',
    )


def _is_fixed_transform(value: Any) -> bool:
    """Whether it is a transform of a distribution without any computed parameter (tanh)."""
    return isinstance(value, torch.distributions.Transform) and not any(
        isinstance(held, torch.Tensor) for held in vars(value).values()
    )


def _is_batch_shape(path: Path) -> bool:
    """Whether the path leads to an entry of a distribution's `batch_shape`."""
    return len(path) > 1 and path[-2] == "_batch_shape" and isinstance(path[-2], AttributeKey)


def _settled_like(mine: Leaf, its: Leaf) -> Leaf | None:
    if its.kind == "opaque":
        return replace(mine, kind="opaque", value=its.value)
    if mine.kind != its.kind:
        return None
    if mine.axis is None or its.axis is None or mine.axis.inner == 1:
        return replace(mine, joined=its.joined, alike=its.alike)
    if its.axis.outer > 1:
        return replace(mine, axis=turned(mine.axis))
    return mine if its.axis.inner > 1 else None
