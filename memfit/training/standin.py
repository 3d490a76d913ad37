"""Stand-ins: tensors that stand for outputs of micro-batches that have not run yet.

A stand-in knows its shape, dtype and device. A loss with a known reduction that consumes it, directly or through the steps
of `route.py`, runs in accumulate. Any other use materialises it, differentiably: the stand-in is an output of an autograd
node whose backward replays the call, so no gradient is ever lost, whichever way the tensor is used.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch

from memfit._errors import Refused
from memfit.batches.cut import Axis
from memfit.batches.weights import all_arguments, known_loss
from memfit.engine.context import without_inference_mode
from memfit.engine.handover import give, refuse_create_graph
from memfit.training.call import Call
from memfit.training.route import Step, step


class Owner(Protocol):
    """What stand-ins ask of the script mode that made them."""

    def accumulate_known_loss(self, standin: StandIn, function: Any, bound: dict[str, Any]) -> torch.Tensor | None:
        """The loss by accumulate, or None where that is not possible."""
        ...

    def accumulate_own_loss(self, call: Call) -> torch.Tensor:
        """The model's own loss by accumulate."""
        ...

    def values(self, call: Call) -> list[Any]:
        """The joined outputs' leaves, computed on first use."""
        ...

    def replayed(self, call: Call, gradients: tuple[torch.Tensor | None, ...]) -> Any:
        """A Total with the gradients of the receivers for these gradients of the outputs."""
        ...

    def receivers(self, call: Call) -> list[torch.Tensor]:
        """What gradients of the outputs flow into."""
        ...

    def like_after(self, standin: StandIn, following: Step) -> torch.Tensor | None:
        """A tensor without data like the result of a step on the stand-in; None where it cannot be told."""
        ...


class StandIn(torch.Tensor):
    """A tensor that has not been computed yet."""

    _call: Call
    _owner: Owner
    _leaf: int
    _steps: tuple[Step, ...]
    _axis: Axis | None
    _computed: torch.Tensor | None
    _parent: StandIn | None

    @staticmethod
    def make(
        owner: Owner,
        call: Call,
        leaf: int,
        shape: tuple[int, ...],
        like: torch.Tensor | Any,
        axis: Axis | None,
        *,
        steps: tuple[Step, ...] = (),
        parent: StandIn | None = None,
    ) -> StandIn:
        """A stand-in of this shape, with the dtype and device of `like`."""
        standin = torch.Tensor._make_wrapper_subclass(StandIn, shape, dtype=like.dtype, device=like.device)  # type: ignore[attr-defined]
        standin._owner, standin._call, standin._leaf, standin._axis = owner, call, leaf, axis
        standin._steps, standin._parent, standin._computed = steps, parent, None
        call.standins.add(standin)
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
        # Reached from C++ alone (custom autograd functions); autograd has recorded its edge to the stand-in already.
        return func(*_map_standins(StandIn.detached, args), **_map_standins(StandIn.detached, kwargs or {}))

    def detached(self) -> torch.Tensor:
        """What it stands for, without a graph."""
        if self._computed is not None:
            return self._computed.detach()
        if self._parent is not None:
            value = self._parent.detached()  # where nothing has run yet, this plans, which takes graphs
            with torch.no_grad():
                return self.from_parent(value)
        return self._owner.values(self._call)[self._leaf]

    def read(self) -> torch.Tensor:
        """What it stands for, to be looked at. A loss is looked at before its backward: its gradients gather at the same
        time, so that it is not computed twice."""
        before_backward = self._is_loss and self._parent is None and self._call.values is None
        return self.computed() if before_backward else self.detached()

    @property
    def _is_loss(self) -> bool:
        """Whether it is what the model returns as its loss."""
        return self._call.outputs.loss == self._leaf

    def from_parent(self, value: torch.Tensor) -> torch.Tensor:
        """The last step of the way on the whole batch."""
        with torch._C.DisableTorchFunctionSubclass():
            return self._steps[-1].apply(value, self._call.samples)

    def computed(self) -> torch.Tensor:
        """What it stands for, differentiable; the same tensor at every call."""
        if self._computed is None:
            with without_inference_mode(), torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
                self._computed = self._materialise()
        return self._computed

    def settle(self) -> None:
        """Before it is written to: compute what was derived from it while it had its old values."""
        for other in list(self._call.standins):
            if isinstance(other, StandIn) and other._leaf == self._leaf:
                other.computed()

    def without_data(self) -> torch.Tensor:
        """A tensor of its shape, dtype and device, for questions that no value matters to."""
        return torch.empty((), dtype=self.dtype, device=self.device).expand(self.shape)

    def _materialise(self) -> torch.Tensor:
        if self._parent is not None:
            return self.from_parent(self._parent.computed())
        if self._is_loss:
            return self._owner.accumulate_own_loss(self._call)
        about = self._call.outputs.leaves[self._leaf]
        value = self._owner.values(self._call)[self._leaf]
        return _Unwrap.apply(self, value) if about.differentiable else value  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.computed().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        return self.computed().__deepcopy__(memo)


def _answer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a torch function gives for arguments among which there are stand-ins."""
    if func in _METADATA:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if func in _DETACHING and isinstance(args[0], StandIn):
        return args[0].read().detach()
    if func in _LIKE and isinstance(args[0], StandIn):
        with torch._C.DisableTorchFunctionSubclass():
            return func(args[0].without_data(), *args[1:], **kwargs)
    result = _known_loss(func, args, kwargs)
    if result is None:
        result = _next_step(func, args, kwargs)
    if result is not None:
        return result
    if func is torch.autograd.grad:
        _refuse_as_goal(kwargs.get("inputs", args[1] if len(args) > 1 else ()))
    if _writes(func, kwargs):
        _map_standins(StandIn.settle, (args, kwargs))
    return func(*_map_standins(StandIn.computed, args), **_map_standins(StandIn.computed, kwargs))


@functools.cache
def _opaque() -> Callable[..., Any]:
    """`_answer` for scripts that compile: compiled callers break their graph here instead of tracing into it."""
    from torch._dynamo import config

    getattr(config, "nontraceable_tensor_subclasses", set()).add(StandIn)
    return torch._dynamo.disable(_answer)


def stand_ins(owner: Owner, call: Call) -> Any:
    """The call's output with stand-ins for its tensors, connected to what gradients flow into."""
    wanted = call.outputs.tensors
    made = _Replay.apply(owner, call, wanted, *owner.receivers(call))
    by_leaf = dict(zip(wanted, made if isinstance(made, tuple) else (made,)))
    return call.outputs.filled([by_leaf.get(i, _plain(leaf)) for i, leaf in enumerate(call.outputs.leaves)])


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, owner: Owner, call: Call, wanted: tuple[int, ...], *receivers: torch.Tensor) -> Any:
        ctx.owner, ctx.call, ctx.wanted = owner, call, wanted
        ctx.set_materialize_grads(False)
        # A saved tensor makes autograd itself raise its own error on a second backward through a freed graph.
        ctx.save_for_backward(torch.empty(0))
        made = []
        for i in wanted:
            leaf = call.outputs.leaves[i]
            made.append(StandIn.make(owner, call, i, leaf.shape_for(call.samples), leaf, leaf.axis))
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
        total = ctx.owner.replayed(ctx.call, tuple(by_leaf))
        given = give(total, total.factor, keep=False)
        needed = ctx.needs_input_grad[3:]
        return (None, None, None, *(g if need else None for g, need in zip(given, needed)))


class _Unwrap(torch.autograd.Function):
    """From a stand-in to its value; the gradient goes on to the replay."""

    @staticmethod
    def forward(ctx: Any, standin: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        # The same storage but no view: autograd forbids in-place operations on views made in here.
        return value.new_empty(0).set_(value) if value.layout is torch.strided else value.clone()  # pyright: ignore[reportArgumentType]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None]:  # type: ignore[override]
        return gradient, None


class _Then(torch.autograd.Function):
    """One step of the way as an autograd node, for stand-ins that are consumed from C++."""

    @staticmethod
    def forward(ctx: Any, parent: StandIn, make: Callable[[StandIn], StandIn]) -> StandIn:
        ctx.parent, made = parent, make(parent)
        ctx.last = made._steps[-1]
        return made

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None]:  # type: ignore[override]
        with torch.enable_grad():
            start = ctx.parent.detached().detach().requires_grad_()
            made = ctx.last.apply(start, ctx.parent._call.samples)
            return torch.autograd.grad(made, start, gradient)[0], None


def _known_loss(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    known = known_loss(func)
    if known is None or not torch.is_grad_enabled() or _watching_saved_tensors():
        return None
    bound = known.bind(args, kwargs)
    if bound is None:
        return None
    standins = [name for name, value in bound.items() if isinstance(value, StandIn)]
    if standins == ["target"] and func in _SYMMETRIC:
        bound["input"], bound["target"], standins = bound["target"], bound["input"], ["input"]
    if standins != ["input"]:
        return None
    standin: StandIn = bound["input"]
    return standin._owner.accumulate_known_loss(standin, func, bound)


def _watching_saved_tensors() -> bool:
    """Whether the script has hooks on what is saved for backward (a checkpointed loss counts it): then only the loss itself
    may save anything here."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # pyright: ignore[reportAttributeAccessIssue]
    return top is not None and top(False) is not None


def _next_step(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StandIn | None:
    standin = args[0] if args else None
    if not isinstance(standin, StandIn) or standin._computed is not None or standin._axis is None:
        return None
    following = step(func, tuple(standin.shape), standin._axis, args[1:], kwargs, standin.device)
    like = None if following is None else standin._owner.like_after(standin, following)
    if following is None or like is None:
        return None

    def make(parent: StandIn) -> StandIn:
        return StandIn.make(
            parent._owner, parent._call, parent._leaf, tuple(like.shape), like, following.axis,
            steps=(*parent._steps, following), parent=parent,
        )  # fmt: skip

    return _Then.apply(standin, make) if torch.is_grad_enabled() and standin.requires_grad else make(standin)  # type: ignore[no-any-return]


def _writes(func: Any, kwargs: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in _WRITING or bool(kwargs.get("inplace")) or kwargs.get("out") is not None


def _refuse_as_goal(goals: Any) -> None:
    found = [g for g in (goals if isinstance(goals, (tuple, list)) else (goals,)) if isinstance(g, StandIn)]
    if any(goal._computed is None for goal in found):
        raise Refused(
            "torch.autograd.grad with respect to the model's output",
            found="the batch ran in micro-batches with its loss, and the whole output was never made",
            next_move="call output.retain_grad() before computing the loss from it",
        )


def _plain(leaf: Any) -> Any:
    from memfit.batches.tree import path_name
    from memfit.training.outputs import NotJoined

    return NotJoined(path_name(leaf.path, "output"), leaf.value) if leaf.kind == "opaque" else leaf.value


def _map_standins(function: Callable[[StandIn], Any], tree: Any) -> Any:
    if isinstance(tree, StandIn):
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
