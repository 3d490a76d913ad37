"""Stand-ins: lazy tensors for the outputs of micro-batches that have not run yet.

A stand-in knows its shape, dtype and device. A known loss, a sum or a mean of it, direct or through the operations in
`route.py`, runs as gradient accumulation. If several use one call's output, these are stand-ins themselves until their sum is
needed. Any other use materializes the stand-in as an output of an autograd node whose backward replays the call, so that no
gradient is lost.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import torch

from memfit._errors import Refused
from memfit.batches.cut import Axis
from memfit.batches.weights import all_arguments, known_loss
from memfit.capture.call import Call
from memfit.capture.expression import Leaf, Node, Output, SampleRange, Sized, Step, Sum, Term, leaves_in
from memfit.capture.lazy_ops import PAIRED, known, step, term_of, total, unreduced
from memfit.capture.lazy_scalar import OUT_OF_PLACE, Scalar, combined
from memfit.capture.lazy_views import Operand
from memfit.engine.call_context import without_inference_mode
from memfit.engine.handover import give, given_within, refuse_create_graph


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
    """A lazy tensor: its values are computed on first use."""

    _call: Call
    _owner: Owner
    _node: Node
    _axis: Axis | None
    _computed: torch.Tensor | None
    _parents: Mapping[LazyTensor, Node]
    _scalar: Scalar | None
    _looks: bool

    @staticmethod
    def make(
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
        standin = torch.Tensor._make_wrapper_subclass(LazyTensor, shape, dtype=like.dtype, device=like.device)  # type: ignore[attr-defined]
        standin._owner, standin._call, standin._node, standin._axis = owner, call, node, axis
        standin._parents, standin._computed, standin._scalar, standin._looks = parents, None, scalar, looks
        for each in call.calls:
            each.standins.add(standin)
        return standin

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if "torch._dynamo" in sys.modules:
            return _opaque()(func, args, all_arguments(func, kwargs or {}))
        return _answer(func, args, all_arguments(func, kwargs or {}))

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Called only from C++ (custom autograd functions, scripted functions). Autograd has already recorded the edge to the
        # stand-in. Its values are computed from here, where C++ has autograd disabled, too.
        with torch.overrides.enable_reentrant_dispatch():
            given, named = _map_standins(LazyTensor.detached, args), _map_standins(LazyTensor.detached, kwargs or {})
        return func(*given, **named)

    @property
    def terms(self) -> tuple[Term, ...]:
        """The terms of a scalar."""
        return () if self._scalar is None else self._scalar.terms

    @property
    def is_loss_that_waits(self) -> bool:
        """Whether it is a deferred scalar that gradients may flow through."""
        return bool(self.terms) and not self._looks

    def noted(self) -> torch.Tensor | None:
        """Return the detached value of a scalar that was summed in a pass for another loss, or None."""
        terms = self.terms if self.is_loss_that_waits else ()
        known = {key: value for call in self._call.calls for key, (_, value) in call.noted.items()}
        if not terms or any(id(term.node) not in known for term in terms):
            return None
        with torch.no_grad():
            value = sum(term.of_sum(known[id(term.node)]) for term in terms)
            return self._scalar.and_others(value.to(self.dtype)).detach()  # type: ignore[union-attr]

    def detached(self) -> torch.Tensor:
        """Return the values without a graph."""
        if self._computed is not None:
            return self._computed.detach()
        if (noted := self.noted()) is not None:
            return noted
        if self._parents:
            # if nothing has run yet, this plans, which needs graphs
            values = [parent.detached() for parent in self._parents]
            with torch.no_grad():
                value = self.from_parents(values)
                return value if self._scalar is None else self._scalar.and_others(value)
        if self._is_loss:
            return self.computed().detach()  # micro-batches are weighted, and gradients accumulate along the way
        return self._owner.values(self._call)[self._leaf]

    def read(self) -> torch.Tensor:
        """Return the values for reading only."""
        if self._computed is None and (noted := self.noted()) is not None:
            return noted
        if self._scalar is not None and not self._looks:
            # only some ranks may read it, so this must not communicate
            return self.computed() if self._owner.alone or self._scalar.is_known else self.detached()
        return self.detached()

    @property
    def leaves(self) -> frozenset[Leaf]:
        """The output leaves that it is computed from."""
        return leaves_in(self._node)

    @property
    def is_there(self) -> bool:
        """Whether the values that it depends on are computed."""
        calls = {call.number: call for call in self._call.calls}
        made = {number: call.values for number, call in calls.items()}
        return all((values := made[number]) is not None and values[leaf] is not None for number, leaf in self.leaves)

    @property
    def is_in_graph(self) -> bool:
        """Whether all its gradients arrive at the stand-in itself, also those of results computed in C++."""
        return isinstance(self._node, Output) and self._call.whole is None and not self._parents and not self._is_loss

    @property
    def _leaf(self) -> int:
        """Index of its output leaf, or -1."""
        return self._node.leaf[1] if isinstance(self._node, Output) else -1

    @property
    def _is_loss(self) -> bool:
        """Whether it is the loss that the model returns."""
        return self._call.outputs.loss == self._leaf

    def from_parents(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Apply the last operation to the full batch, given its parents' values."""
        return _last(self._node, self._parents, values, self._call.samples)

    def computed(self) -> torch.Tensor:
        """Return the differentiable values; the same tensor each time."""
        if self._computed is None:
            with without_inference_mode(), torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
                self._computed = self._materialise()
        return self._computed

    def settle(self) -> None:
        """Before an in-place write, compute the stand-ins that depend on the old values."""
        for other in [standin for call in self._call.calls for standin in call.standins]:
            if isinstance(other, LazyTensor) and other.leaves & self.leaves:
                other.computed()

    def without_data(self) -> torch.Tensor:
        """Return a tensor of its shape, dtype and device, for operations that ignore the values."""
        return torch.empty((), dtype=self.dtype, device=self.device).expand(self.shape)

    def _materialise(self) -> torch.Tensor:
        if self._looks:
            value = self.detached()
            return _Unwrap.apply(self, value) if self.requires_grad else value  # type: ignore[no-any-return]
        if isinstance(self._node, Output) and self._call.whole is not None:
            return self._call.whole[self._leaf]
        if self._scalar is not None:
            noted = self.noted()
            if noted is not None and not self._call.is_unchanged:  # for reading only; backward raises torch's own error
                return _Unwrap.apply(self, noted)  # type: ignore[no-any-return]
            return self._scalar.and_others(self._gathered(self._scalar.terms))
        if self._parents:
            return self.from_parents([parent.computed() for parent in self._parents])
        if self._is_loss:
            return self._owner.accumulate_own_loss(self._call)
        about = self._call.outputs.leaves[self._leaf]
        value = self._owner.values(self._call)[self._leaf]
        return _Unwrap.apply(self, value) if about.differentiable else value  # type: ignore[no-any-return]

    def _gathered(self, terms: tuple[Term, ...]) -> torch.Tensor:
        """The sum of terms, with all gradients of the call accumulated at once."""
        if self._owner.accumulates(self._call, Sum(terms)):
            return self._owner.accumulate_terms(self._call, terms)
        node = Sum(self._owner.over_all(self._call, terms))
        return _last(node, self._parents, [parent.computed() for parent in self._parents], self._call.samples)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.computed().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        return self.computed().__deepcopy__(memo)


def _answer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of a torch function with stand-ins as arguments."""
    args, kwargs = _map_standins(_looked_at, args), _map_standins(_looked_at, kwargs)
    if any(type(argument).__name__ == "DTensor" for argument in args):
        _refuse_part(func)
    if func in _METADATA:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if func in _DETACHING and isinstance(args[0], LazyTensor) and (args[0]._axis is None or args[0].is_there):
        return args[0].read().detach()  # a list of losses kept as stand-ins would keep their batches
    if func in _LIKE and isinstance(args[0], LazyTensor):
        with torch._C.DisableTorchFunctionSubclass():
            return func(args[0].without_data(), *args[1:], **kwargs)
    if func in _WATCHING:
        _refuse_watching(args[0])
        _refuse_late(args[0])
        _map_standins(LazyTensor.computed, args[0])
    if func in _WATCHING | _GRADIENT and isinstance(args[0], LazyTensor) and args[0].is_in_graph:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    result = _free_pair(func, args, kwargs) if func in PAIRED else _free(func, args, kwargs)
    if result is not None:
        return result
    if func in OUT_OF_PLACE and _rewritten(func, args, kwargs):
        return args[0]
    if func is torch.autograd.grad:
        return _gradients(*args, **kwargs)
    if _writes(func, kwargs):
        _map_standins(LazyTensor.settle, (args, kwargs))
    return func(*_map_standins(LazyTensor.computed, args), **_map_standins(LazyTensor.computed, kwargs))


@functools.cache
def _opaque() -> Callable[..., Any]:
    """`_answer` for scripts that compile: compiled callers get a graph break instead of tracing into it."""
    from torch._dynamo import config

    getattr(config, "nontraceable_tensor_subclasses", set()).add(LazyTensor)
    return torch._dynamo.disable(_answer)


def stand_ins(owner: Owner, call: Call) -> Any:
    """Return the call's output with stand-ins as its tensors, connected to the receivers of gradients."""
    wanted = call.outputs.tensors
    made = _ReplayFunction.apply(owner, call, wanted, *owner.receivers(call))
    outputs = zip(wanted, made if isinstance(made, tuple) else (made,))
    by_leaf = {i: _one_of_several(standin) for i, standin in outputs}
    leaves = enumerate(call.outputs.leaves)
    return call.outputs.filled([by_leaf.get(i, leaf.without_tensor(call.samples)) for i, leaf in leaves])


def _one_of_several(standin: LazyTensor) -> LazyTensor:
    """A loss returned among other outputs, proven to be the mean or sum of its parts, as a scalar that can be added to
    others."""
    call, leaf = standin._call, standin._call.outputs.leaves[standin._leaf]
    if leaf.kind != "loss" or standin._is_loss or not standin.requires_grad:
        return standin
    weighed = Step(torch.mul, (standin._node, Sized(int)), {}, None)
    term = Term(weighed, call.samples) if leaf.joined == "mean" else Term(standin._node)
    scalar = _scalar(call, term, (standin,))
    return scalar if isinstance(scalar, LazyTensor) else standin


def settle_looks(calls: Sequence[Call]) -> None:
    """Compute predictions and scalars for reading while the pass's values are there, and drop their references to the batch:
    scripts collect them in lists."""
    alive = {id(s): s for call in calls for s in call.standins if isinstance(s, LazyTensor) and s._parents}
    looks = [standin for standin in alive.values() if standin._looks and not standin.requires_grad]
    for standin in looks:
        standin.computed()
    for standin in looks:
        standin._parents, standin._scalar, standin._node = {}, None, Output((-1, -1))
        del standin._call


class _ReplayFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, owner: Owner, call: Call, wanted: tuple[int, ...], *receivers: torch.Tensor) -> Any:
        ctx.owner, ctx.call, ctx.wanted = owner, call, wanted
        ctx.set_materialize_grads(False)
        # With a saved tensor, autograd raises its own error on a second backward through a freed graph.
        ctx.save_for_backward(torch.empty(0))
        made = []
        for i in wanted:
            leaf = call.outputs.leaves[i]
            made.append(LazyTensor.make(owner, call, Output((call.number, i)), leaf.shape_for(call.samples), leaf, leaf.axis))
        frozen = [s for s, i in zip(made, wanted) if not call.outputs.leaves[i].differentiable]
        ctx.mark_non_differentiable(*frozen)
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        _ = ctx.saved_tensors
        refuse_create_graph()
        by_leaf: list[torch.Tensor | None] = [None] * len(ctx.call.outputs.leaves)
        for i, gradient in zip(ctx.wanted, gradients):
            by_leaf[i] = gradient
        given = _given_of_loss(ctx.owner, ctx.call, by_leaf)
        if given is None or any(gradient is not None for gradient in by_leaf):
            total = ctx.owner.replayed(ctx.call, tuple(by_leaf))
            given = _both(given, give(total, total.factor, keep=False))
        needed = ctx.needs_input_grad[3:]
        return (None, None, None, *(g if need else None for g, need in zip(given, needed)))


def _given_of_loss(
    owner: Owner, call: Call, by_leaf: list[torch.Tensor | None]
) -> Sequence[torch.Tensor | None] | None:
    """Gradients of the model's own loss, if C++ code used it unseen. It is weighted, while outputs are joined."""
    own = call.outputs.loss
    if own is None or by_leaf[own] is None or call.whole is not None:
        return None
    incoming, by_leaf[own] = by_leaf[own], None
    with torch.enable_grad():
        loss = owner.accumulate_own_loss(call)
    assert incoming is not None
    return given_within(loss, owner.receivers(call), incoming)


def _both(
    some: Sequence[torch.Tensor | None] | None, more: Sequence[torch.Tensor | None]
) -> Sequence[torch.Tensor | None]:
    if some is None:
        return more
    return [b if a is None else a if b is None else a + b for a, b in zip(some, more)]


class _Unwrap(torch.autograd.Function):
    """Returns a stand-in's values. The gradient goes on to the replay."""

    @staticmethod
    def forward(ctx: Any, standin: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        # Same storage, but not a view: autograd forbids in-place operations on views made here.
        return value.new_empty(0).set_(value) if value.layout is torch.strided else value.clone()  # pyright: ignore[reportArgumentType]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None]:  # type: ignore[override]
        return gradient, None


class _Rewritten(torch.autograd.Function):
    """Replaces a stand-in by another one after an in-place operation."""

    @staticmethod
    def forward(ctx: Any, standin: LazyTensor, made: LazyTensor) -> LazyTensor:
        ctx.mark_dirty(standin)
        ctx.set_materialize_grads(False)
        return standin

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[None, torch.Tensor | None]:  # type: ignore[override]
        return None, gradient


class _Then(torch.autograd.Function):
    """One operation as an autograd node, for stand-ins used in C++. Inputs are the parents of what `make` returns, then other
    tensors added to it."""

    @staticmethod
    def forward(ctx: Any, make: Callable[[], LazyTensor], *inputs: torch.Tensor) -> LazyTensor:
        made = make()
        ctx.node, ctx.samples, ctx.parents = made._node, made._call.samples, made._parents
        return made

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        parents, needed = ctx.parents, ctx.needs_input_grad[1:]
        with torch.enable_grad():
            starts = [parent.detached().detach() for parent in parents]
            wanted = [start.requires_grad_() for start, need in zip(starts, needed) if need]
            value = _last(ctx.node, parents, starts, ctx.samples)
            found = iter(torch.autograd.grad(value, wanted, gradient, allow_unused=True))
        own = [next(found) if need else None for need in needed[: len(parents)]]
        return None, *own, *(gradient if need else None for need in needed[len(parents) :])


def _last(node: Node, parents: Mapping[LazyTensor, Node], values: Sequence[torch.Tensor], samples: int) -> torch.Tensor:
    """Apply the last operation of a route to the full batch, given its parents' values."""
    part = SampleRange({}, 0, samples)
    for place, value in zip(parents.values(), values):
        part.put(place, value)
    with torch._C.DisableTorchFunctionSubclass():
        return part.value(node)


def _free(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """A result without running the full batch; None if only a replay is right."""
    standins = _standins((args, kwargs))
    if not standins or any(s._computed is not None or s._owner is not standins[0]._owner for s in standins):
        return None
    if any(s._looks and s.requires_grad for s in standins):
        return None  # has a backward of the script's own
    call = _common(standins)
    if call is None:
        return None
    if all(s._scalar is not None for s in standins):
        return _added(call, func, args, kwargs, standins)
    if any(s._axis is None for s in standins) or not isinstance(func, Hashable):
        return None
    made = _known_loss(call, func, args, kwargs, standins)
    if made is None:
        made = _next_step(call, func, args, kwargs, standins)
    return made


def _free_pair(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Like `_free`, for a function that returns values and indices."""
    values, indices = (_free(part, args, kwargs) for part in PAIRED[func])
    if values is None or indices is None:
        return None
    made = torch.return_types.max if "max" in func.__name__ else torch.return_types.min  # pyright: ignore[reportAttributeAccessIssue]
    return made((values, indices))


def _looked_at(standin: LazyTensor) -> torch.Tensor:
    """The computed tensor of a stand-in for reading only, else the stand-in."""
    return standin if standin._computed is None or not standin._looks else standin._computed


def _common(standins: Sequence[LazyTensor]) -> Call | None:
    """The call whose micro-batches compute all of these; None if there is none."""
    call = standins[0]._call
    calls = tuple({each.number: each for standin in standins for each in standin._call.calls}.values())
    return call if len(calls) == len(call.calls) else standins[0]._owner.joint(calls)


def _known_loss(
    call: Call, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], standins: Sequence[LazyTensor]
) -> torch.Tensor | None:
    about = known_loss(func)
    first = standins[0]
    if about is None or not _gathers() or not first.requires_grad:
        return None
    bound = about.bind(args, kwargs)
    if bound is None:
        return None
    if func in _SYMMETRIC and not isinstance(bound["input"], LazyTensor):
        bound["input"], bound["target"] = bound["target"], bound["input"]
    if not isinstance(bound["input"], LazyTensor) or any(map(_requires, bound.values())):
        return None
    loss = known(func, bound, _operand, first.device)
    if loss is None or not first._owner.accumulates(call, loss):
        return None
    if not first._owner.defers(call):
        return first._owner.accumulate_known_loss(call, loss)
    with torch._C.DisableTorchFunctionSubclass():
        term = term_of(loss, bound)
    return _scalar(call, term, standins)


def _next_step(
    call: Call, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], standins: Sequence[LazyTensor]
) -> torch.Tensor | None:
    first = standins[0]
    arguments, keywords = _map_standins(_operand, args), _map_standins(_operand, kwargs)
    loss = unreduced(func, arguments, keywords, first.device)
    if loss is not None and loss.reduction != "none":
        return _gathered(call, loss.term(), standins)
    following = step(func, arguments, keywords, first.device) if loss is None else loss.each
    if following is None:
        term = total(func, arguments, keywords, first.device)
        return None if term is None else _gathered(call, term, standins)
    like = first._owner.like_after(call, following, standins)
    if like is None:
        return None
    differentiable = like.dtype.is_floating_point or like.dtype.is_complex
    trains = differentiable and following.function is not torch.Tensor.detach and _flows(standins)
    if not trains and all(standin.is_there for standin in standins):
        return None

    def make() -> LazyTensor:
        return LazyTensor.make(
            first._owner,
            call,
            following,
            tuple(like.shape),
            like,
            following.axis,
            parents=_nodes_of(standins),
            looks=not trains,
        )

    return _linked(make, standins if trains else ())


def _gathered(call: Call, term: Term, standins: Sequence[LazyTensor]) -> torch.Tensor | None:
    """A sum or mean over all samples: accumulated if gradients flow through it, else for reading later."""
    first = standins[0]
    if not _flows(standins):
        return None if all(standin.is_there for standin in standins) else _scalar(call, term, standins)
    if not _gathers() or not first._owner.accumulates(call, term):
        return None
    return _scalar(call, term, standins) if first._owner.defers(call) else first._owner.accumulate_terms(call, [term])


def _nodes_of(standins: Sequence[LazyTensor]) -> dict[LazyTensor, Node]:
    """Their current nodes: a stand-in for reading only may have changed after it was computed."""
    return {standin: standin._node for standin in standins}


def _scalar(call: Call, term: Term, standins: Sequence[LazyTensor]) -> torch.Tensor | None:
    first, node = standins[0], Sum((term,))
    like, looks = first._owner.like_after(call, term.node, standins), not _flows(standins)
    if like is None:
        return None

    def make() -> LazyTensor:
        about = Scalar((term,))
        return LazyTensor.make(
            first._owner, call, node, (), like, None, parents=_nodes_of(standins), scalar=about, looks=looks
        )

    return _linked(make, standins)


def _added(
    call: Call, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], standins: Sequence[LazyTensor]
) -> torch.Tensor | None:
    """Sums of scalars, and products with a number that does not depend on the batch."""
    found, first = combined(func, args, kwargs, _scalar_of), standins[0]
    if found is None or any(tensor.dtype != first.dtype for tensor in (*standins, *found.constants)):
        return None
    parents = {parent: place for standin in standins for parent, place in standin._parents.items()}
    looks = not _flows((*standins, *found.constants))

    def make() -> LazyTensor:
        node = Sum(found.terms)
        return LazyTensor.make(first._owner, call, node, (), first, None, parents=parents, scalar=found, looks=looks)

    return _linked(make, tuple(parents), found.constants)


def _rewritten(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an in-place operation on a deferred scalar could be deferred, too. Stand-ins derived from the scalar before keep
    its old terms."""
    standin = args[0]
    if not isinstance(standin, LazyTensor) or standin._scalar is None:
        return False
    if standin.requires_grad and not torch.is_grad_enabled():
        return False
    made = _free(OUT_OF_PLACE[func], args, kwargs)
    if made is None:
        return False
    with torch._C.DisableTorchFunctionSubclass():
        standin.detach_()
        if made.requires_grad:
            _Rewritten.apply(standin, made)
    assert isinstance(made, LazyTensor)
    before = standin._call.calls
    standin._call, standin._node, standin._scalar = made._call, made._node, made._scalar
    standin._parents, standin._looks = made._parents, made._looks
    for each in made._call.calls:
        if each not in before:  # `in` on a set of references would call the stand-in's `__eq__`
            each.standins.add(standin)
    return True


def _scalar_of(value: Any) -> Scalar | None:
    return value._scalar if isinstance(value, LazyTensor) else None


def _flows(standins: Sequence[torch.Tensor]) -> bool:
    """Whether gradients flow through results computed from these."""
    return torch.is_grad_enabled() and any(standin.requires_grad for standin in standins)


def _linked(make: Callable[[], LazyTensor], parents: Sequence[LazyTensor], others: Sequence[torch.Tensor] = ()) -> LazyTensor:
    inputs = (*parents, *others)
    graph = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    return _Then.apply(make, *inputs) if graph else make()  # type: ignore[no-any-return]


def _operand(value: Any) -> Operand | None:
    if not isinstance(value, LazyTensor) or value._axis is None:
        return None
    return Operand(value._node, tuple(value.shape), value._axis)


def _standins(tree: Any) -> list[LazyTensor]:
    found: list[LazyTensor] = []
    _map_standins(found.append, tree)
    return list(dict.fromkeys(found))


def _requires(value: Any) -> bool:
    """Whether it is an ordinary tensor that requires gradients."""
    return isinstance(value, torch.Tensor) and not isinstance(value, LazyTensor) and value.requires_grad


def _gathers() -> bool:
    """Whether gradients may accumulate now."""
    return torch.is_grad_enabled() and not _watching_saved_tensors()


def _watching_saved_tensors() -> bool:
    """Whether the script has saved tensors hooks (a checkpointed loss counts saved tensors). Then only the loss itself may
    save tensors here."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # pyright: ignore[reportAttributeAccessIssue]
    return top is not None and top(False) is not None


def _writes(func: Any, kwargs: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in _WRITING or bool(kwargs.get("inplace")) or kwargs.get("out") is not None


def _gradients(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.autograd.grad` of, or with respect to, stand-ins."""
    _refuse_as_goal(inputs)
    outputs, args, kwargs = _map_standins(LazyTensor.computed, (outputs, args, kwargs))
    inputs = _map_standins(lambda goal: goal if goal.is_in_graph else goal.computed(), inputs)
    with torch._C.DisableTorchFunctionSubclass():
        return torch.autograd.grad(outputs, inputs, *args, **kwargs)


def _refuse_as_goal(goals: Any) -> None:
    found = [g for g in (goals if isinstance(goals, (tuple, list)) else (goals,)) if isinstance(g, LazyTensor)]
    if any(goal._computed is None for goal in found):
        raise Refused(
            "torch.autograd.grad with respect to the model's output",
            found="the batch ran in micro-batches with its loss, so the whole output never existed",
            next_move="call output.retain_grad() before computing the loss from it",
        )


def _refuse_part(func: Any) -> None:
    """An operation on an output and a sharded parameter. torch has no gradients for it either."""
    raise Refused(
        f"{func.__name__} of a model output and a sharded parameter",
        found='shard="parameters" makes parameters torch.distributed.tensor.DTensor outside the forward, which do not mix '
        "with other tensors",
        next_move="use the optimizer's weight_decay, compute this inside the model's forward or in loss_fn=, or pass "
        'shard="optimizer"',
    )


def _refuse_watching(output: Any) -> None:
    """A model that returns its loss computes it from its outputs inside, where their gradients are not available."""
    cut = isinstance(output, LazyTensor) and output._call.whole is None
    if cut and output._call.outputs.loss is not None and not output._is_loss:
        raise Refused(
            "the gradient of an output beside the model's own loss",
            found="the batch runs in micro-batches with its loss, which hides what the loss adds to that gradient",
            next_move="compute the loss from the output in the script, or let the batch run whole",
        )


def _refuse_late(output: Any) -> None:
    """A loss computed from it before has already accumulated its gradients, past any hook."""
    if isinstance(output, LazyTensor) and output._call.pending and output._computed is None:
        raise Refused(
            "reading the gradient of the model's output",
            found="the batch ran in micro-batches with its loss, so the whole gradient of the output never existed",
            next_move="call output.retain_grad() or output.register_hook() before computing the loss from it",
        )


def _map_standins(function: Callable[[LazyTensor], Any], tree: Any) -> Any:
    if isinstance(tree, LazyTensor):
        return function(tree)
    if isinstance(tree, dict):
        return {key: _map_standins(function, value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_map_standins(function, item) for item in tree)
    return tree


_T = torch.Tensor
_SYMMETRIC = (torch.nn.functional.mse_loss, torch.nn.functional.l1_loss)
_WRITING = {f"__{name}__" for name in (
    "setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor",
    "ilshift", "irshift",
)}  # fmt: skip
_LIKE = {
    torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like,
    torch.randint_like, _T.new_empty, _T.new_zeros, _T.new_ones, _T.new_full, _T.new_tensor,
}  # fmt: skip
_WATCHING = {_T.retain_grad, _T.register_hook}
_GRADIENT = {_T.grad.__get__, _T.grad.__set__, _T.grad.__delete__, _T.retains_grad.__get__}  # type: ignore[attr-defined]
_DETACHING = {_T.detach, _T.data.__get__}  # type: ignore[attr-defined]
_METADATA = {
    getattr(_T, name).__get__
    for name in (
        "shape", "dtype", "device", "ndim", "requires_grad", "grad_fn", "is_leaf", "layout", "is_cuda", "is_cpu", "is_mps",
        "is_xpu", "is_meta", "is_sparse", "is_quantized", "is_nested", "itemsize", "output_nr", "_version",
    )
    if hasattr(_T, name)
} | {
    _T.size, _T.dim, _T.numel, _T.nelement, _T.__len__, _T.is_floating_point, torch.is_floating_point, _T.is_complex,
    torch.is_complex, _T.get_device, _T.element_size, _T.__hash__, _T.ndimension, torch.numel, _T.__dir__,
}  # fmt: skip
