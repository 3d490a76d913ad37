"""Lazy tensors for the outputs of micro-batches that have not run yet (stand-ins), and how they get their values.

A stand-in knows its shape, dtype and device. A known loss, a sum or a mean of it, direct or through operations that memfit
follows, runs as gradient accumulation. If several use one call's output, these are stand-ins themselves until their sum is
needed. Any other use materializes the stand-in as an output of an autograd node whose backward replays the call, so that no
gradient is lost.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import torch

from memfit.batches.cut import Axis
from memfit.capture.call import Call
from memfit.capture.expression import Node, Output, Step, Sum, Term, leaves_in
from memfit.capture.lazy_scalar import Scalar
from memfit.capture.sample_range import Leaf, SampleRange
from memfit.engine.call_context import without_inference_mode

_NUMBERS = itertools.count()


class Owner(Protocol):
    """What stand-ins need from script mode, which creates them."""

    def joint(self, calls: tuple[Call, ...]) -> Call | None:
        """Return these calls joined to one, or None if they do not run together."""
        ...

    def accumulates(self, call: Call, node: Node) -> bool:
        """Whether the gradients of `node` can be accumulated with its loss."""
        ...

    def defers(self, call: Call) -> bool:
        """Whether losses of calls like this one are deferred until all of them are known."""
        ...

    def accumulate_known_loss(self, call: Call, loss: Step) -> torch.Tensor:
        """Accumulate a known loss."""
        ...

    def accumulate_terms(self, call: Call, terms: Sequence[Term]) -> torch.Tensor:
        """Accumulate the sum of terms."""
        ...

    def over_all(self, call: Call, terms: Sequence[Term]) -> tuple[Term, ...]:
        """Rescale the terms to this rank's part of their value over all ranks. Communicates if there are several."""
        ...

    @property
    def alone(self) -> bool:
        """Whether this process trains alone, without other ranks."""
        ...

    def accumulate_own_loss(self, call: Call) -> torch.Tensor:
        """Accumulate the model's own loss."""
        ...

    def values(self, call: Call) -> list[Any]:
        """Return the joined output leaves, computed on first use."""
        ...

    def replayed(self, call: Call, gradients: tuple[torch.Tensor | None, ...]) -> Any:
        """Return a Total with the gradients of the receivers, given those of the outputs."""
        ...

    def receivers(self, call: Call) -> list[torch.Tensor]:
        """Return the tensors that gradients of the outputs flow into."""
        ...

    def like_after(self, call: Call, following: Node, parents: Sequence[LazyTensor]) -> torch.Tensor | None:
        """Return a tensor without data like the result of an operation on stand-ins, or None if unknown."""
        ...


class LazyTensor(torch.Tensor):
    """A lazy tensor: its values are computed on first use. What operations on it return is in `lazy_functions.py`.

    Attributes: `call` and `node` (what computes it), `axis` (its samples'; None: it has none), `parents` (what its last
    operation is applied to), `scalar` (its terms, if it is a sum), `looks` (whether it is for reading only), `materialized`
    (its values, once computed), `owner` (script mode), `number` (larger than those of tensors made before).
    """

    call: Call
    owner: Owner
    node: Node
    axis: Axis | None
    materialized: torch.Tensor | None
    parents: Mapping[LazyTensor, Node]
    scalar: Scalar | None
    looks: bool
    number: int

    @classmethod
    def make(
        cls,
        owner: Owner,
        call: Call,
        node: Node,
        shape: tuple[int, ...],
        like: torch.Tensor | Any,
        axis: Axis | None,
        *,
        parents: Mapping[LazyTensor, Node] = MappingProxyType({}),
        scalar: Scalar | None = None,
        looks: bool = False,
    ) -> LazyTensor:
        """Create a stand-in for `node` with this shape and the dtype and device of `like`. `looks`: for reading only, without
        a graph, unless a custom autograd function of the script returns it."""
        standin = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)  # type: ignore[attr-defined]
        standin.owner, standin.call, standin.node, standin.axis = owner, call, node, axis
        standin.parents, standin.materialized, standin.scalar, standin.looks = parents, None, scalar, looks
        standin.number = next(_NUMBERS)
        for each in call.calls:
            each.standins.add(standin)
        return standin

    @property
    def terms(self) -> tuple[Term, ...]:
        """The terms of a scalar."""
        return () if self.scalar is None else self.scalar.terms

    @property
    def is_loss_that_waits(self) -> bool:
        """Whether it is a deferred scalar that gradients may flow through."""
        return bool(self.terms) and not self.looks

    def noted(self) -> torch.Tensor | None:
        """Return the detached value of a scalar that was summed in a pass for another loss, or None."""
        terms = self.terms if self.is_loss_that_waits else ()
        known = {key: value for call in self.call.calls for key, (_, value) in call.noted.items()}
        if not terms or any(id(term.node) not in known for term in terms):
            return None
        with torch.no_grad():
            value = sum(term.of_sum(known[id(term.node)]) for term in terms)
            return self.scalar.and_others(value.to(self.dtype)).detach()  # type: ignore[union-attr]

    @property
    def is_apart(self) -> bool:
        """Whether it is a deferred scalar whose gradients flow through itself only: no term was gathered in the sum of another
        one, or is part of one that was made since."""
        if not self.is_loss_that_waits or any(id(term.node) in self._summed for term in self.terms):
            return False
        own = {id(term.node) for term in self.terms}
        others = {id(s): s for call in self.call.calls for s in call.standins if isinstance(s, LazyTensor)}.values()
        later = (s for s in others if s.number > self.number and s.is_loss_that_waits and s.materialized is None)
        return not any(id(term.node) in own for other in later for term in other.terms)

    @property
    def _summed(self) -> set[int]:
        """The nodes whose gradients are part of a loss that was computed, by id."""
        return {key for call in self.call.calls for key in call.summed}

    @property
    def _was_handed_over(self) -> bool:
        """Whether its gradients went to the parameters with those of the sum that it is part of."""
        summed = self._summed
        return not any(call.pending for call in self.call.calls) and all(id(term.node) in summed for term in self.terms)

    def detached(self) -> torch.Tensor:
        """Return the values without a graph."""
        if self.materialized is not None:
            return self.materialized.detach()
        if (noted := self.noted()) is not None:
            return noted
        if self.parents:
            # if nothing has run yet, this plans, which needs graphs
            values = [parent.detached() for parent in self.parents]
            with torch.no_grad():
                value = self.from_parents(values)
                return value if self.scalar is None else self.scalar.and_others(value)
        if self.is_own_loss and self.call.noted_loss is not None:
            return self.call.noted_loss
        if self.is_own_loss:
            return self.computed().detach()  # micro-batches are weighted, and gradients accumulate along the way
        return self.owner.values(self.call)[self.leaf]

    def read(self) -> torch.Tensor:
        """Return the values for reading only."""
        if self.materialized is None and (noted := self.noted()) is not None:
            return noted
        if self.scalar is not None and not self.looks:
            # only some ranks may read it, so this must not communicate
            return self.computed() if self.owner.alone or self.scalar.is_known else self.detached()
        return self.detached()

    @property
    def leaves(self) -> frozenset[Leaf]:
        """The output leaves that it is computed from."""
        return leaves_in(self.node)

    @property
    def is_there(self) -> bool:
        """Whether the values that it depends on are computed."""
        calls = {call.number: call for call in self.call.calls}
        made = {number: call.values for number, call in calls.items()}
        return all((values := made[number]) is not None and values[leaf] is not None for number, leaf in self.leaves)

    @property
    def is_in_graph(self) -> bool:
        """Whether all its gradients arrive at the stand-in itself, also those of results computed in C++."""
        return isinstance(self.node, Output) and self.call.whole is None and not self.parents and not self.is_own_loss

    @property
    def leaf(self) -> int:
        """Index of its output leaf, or -1."""
        return self.node.leaf[1] if isinstance(self.node, Output) else -1

    @property
    def is_own_loss(self) -> bool:
        """Whether it is the loss that the model returns."""
        return self.call.outputs.loss == self.leaf

    def from_parents(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Apply the last operation to the full batch, given its parents' values."""
        return last_operation(self.node, self.parents, values, self.call.samples)

    def computed(self) -> torch.Tensor:
        """Return the differentiable values; the same tensor each time."""
        if self.materialized is None:
            with without_inference_mode(), torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
                self.materialized = self._materialise()
        return self.materialized

    def settle(self) -> None:
        """Before an in-place write, compute the stand-ins that depend on the old values."""
        for other in [standin for call in self.call.calls for standin in call.standins]:
            if isinstance(other, LazyTensor) and other.leaves & self.leaves:
                other.computed()

    def without_data(self) -> torch.Tensor:
        """Return a tensor of its shape, dtype and device, for operations that ignore the values."""
        return torch.empty((), dtype=self.dtype, device=self.device).expand(self.shape)

    def _materialise(self) -> torch.Tensor:
        if self.looks:
            value = self.detached()
            return Unwrap.apply(self, value) if self.requires_grad else value  # type: ignore[no-any-return]
        if isinstance(self.node, Output) and self.call.whole is not None:
            return self.call.whole[self.leaf]
        if self.scalar is not None:
            noted = self.noted()
            # For reading only; backward raises torch's own error.
            if noted is not None and (self._was_handed_over or not self.call.is_unchanged):
                return Unwrap.apply(self, noted)  # type: ignore[no-any-return]
            return self.scalar.and_others(self._gathered(self.scalar.terms))
        if self.parents:
            return self.from_parents([parent.computed() for parent in self.parents])
        if self.is_own_loss:
            noted = self.call.noted_loss
            if noted is not None and not (any(call.pending for call in self.call.calls) and self.call.is_unchanged):
                return Unwrap.apply(self, noted.view(self.shape))  # type: ignore[no-any-return]
            loss = self.owner.accumulate_own_loss(self.call)
            return loss.view(self.shape) if self.dim() else loss
        about = self.call.outputs.leaves[self.leaf]
        value = self.owner.values(self.call)[self.leaf]
        if self.call.whole is not None:  # they could not be computed in pieces: all outputs have this graph in common now
            return self.call.whole[self.leaf]
        return Unwrap.apply(self, value) if about.differentiable else value  # type: ignore[no-any-return]

    def _gathered(self, terms: tuple[Term, ...]) -> torch.Tensor:
        """The sum of terms, with all gradients of the call accumulated at once."""
        if self.owner.accumulates(self.call, Sum(terms)):
            made = self.owner.accumulate_terms(self.call, terms)
        else:
            node, values = Sum(self.owner.over_all(self.call, terms)), [parent.computed() for parent in self.parents]
            made = last_operation(node, self.parents, values, self.call.samples)
        for call in self.call.calls:
            call.summed.update({id(term.node): term.node for term in terms})
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.computed().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        return self.computed().__deepcopy__(memo)


def settle_looks(calls: Sequence[Call]) -> None:
    """Compute predictions and scalars for reading while the pass's values are there, and drop their references to the batch:
    scripts collect them in lists."""
    alive = {id(s): s for call in calls for s in call.standins if isinstance(s, LazyTensor) and s.parents}
    looks = [standin for standin in alive.values() if standin.looks and not standin.requires_grad]
    for standin in looks:
        standin.computed()
    for standin in looks:
        standin.parents, standin.scalar, standin.node = {}, None, Output((-1, -1))
        del standin.call


class Unwrap(torch.autograd.Function):
    """Returns a stand-in's values. The gradient goes on to the replay."""

    @staticmethod
    def forward(ctx: Any, standin: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        # Same storage, but not a view: autograd forbids in-place operations on views made here.
        return value.new_empty(0).set_(value) if value.layout is torch.strided else value.clone()  # pyright: ignore[reportArgumentType]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None]:  # type: ignore[override]
        return gradient, None


def last_operation(
    node: Node, parents: Mapping[LazyTensor, Node], values: Sequence[torch.Tensor], samples: int
) -> torch.Tensor:
    """Apply the last operation of a route to the full batch, given its parents' values."""
    part = SampleRange({}, 0, samples, in_script=True)
    for place, value in zip(parents.values(), values):
        part.put(place, value)
    with torch._C.DisableTorchFunctionSubclass():
        return part.value(node)


def map_standins(function: Callable[[LazyTensor], Any], tree: Any) -> Any:
    """Returns the tree (of lists, tuples and dicts) with the function applied to its stand-ins."""
    if isinstance(tree, LazyTensor):
        return function(tree)
    if isinstance(tree, dict):
        return {key: map_standins(function, value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(map_standins(function, item) for item in tree)
    return tree
