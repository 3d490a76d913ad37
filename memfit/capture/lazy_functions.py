"""What torch functions return for lazy tensors: another lazy tensor, an accumulated loss, or the result on their values."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from memfit._errors import MemfitError
from memfit.batches.weights import all_arguments, known_loss
from memfit.capture.call import Call
from memfit.capture.expression import Node, Sized, Step, Sum, Term
from memfit.capture.lazy_nodes import ReplayFunction, Rewritten, Then
from memfit.capture.lazy_ops import PAIRED, known, step, term_of, total, unreduced
from memfit.capture.lazy_refusals import refuse_as_goal, refuse_late, refuse_part, refuse_watching
from memfit.capture.lazy_scalar import OUT_OF_PLACE, Scalar, combined
from memfit.capture.lazy_tensor import LazyTensor, Owner, map_standins
from memfit.capture.lazy_views import Operand


class StandIn(LazyTensor):
    """A lazy tensor that torch functions see."""

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
        try:
            with torch.overrides.enable_reentrant_dispatch():
                given, named = map_standins(LazyTensor.detached, args), map_standins(LazyTensor.detached, kwargs or {})
        except MemfitError as error:
            warnings.warn(str(error), RuntimeWarning, stacklevel=2)  # TorchScript raises a RuntimeError without any text
            raise
        return func(*given, **named)


def _answer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of a torch function with stand-ins as arguments."""
    args, kwargs = map_standins(_looked_at, args), map_standins(_looked_at, kwargs)
    if func is torch.Tensor.__getitem__:
        args = args[0], _with_numbers(args[1])
    if any(type(argument).__name__ == "DTensor" for argument in args):
        refuse_part(func)
    if func in _METADATA:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if func in _DETACHING and isinstance(args[0], LazyTensor) and (args[0].axis is None or args[0].is_there):
        return args[0].read().detach()  # a list of losses kept as stand-ins would keep their batches
    if func in _LIKE and isinstance(args[0], LazyTensor):
        with torch._C.DisableTorchFunctionSubclass():
            return func(args[0].without_data(), *args[1:], **kwargs)
    if func in _WATCHING:
        refuse_watching(args[0])
        refuse_late(args[0])
        map_standins(LazyTensor.computed, args[0])
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
        map_standins(LazyTensor.settle, (args, kwargs))
    return func(*map_standins(LazyTensor.computed, args), **map_standins(LazyTensor.computed, kwargs))


@functools.cache
def _opaque() -> Callable[..., Any]:
    """`_answer` for scripts that compile: compiled callers get a graph break instead of tracing into it."""
    from torch._dynamo import config

    getattr(config, "nontraceable_tensor_subclasses", set()).add(StandIn)
    return torch._dynamo.disable(_answer)


def stand_ins(owner: Owner, call: Call) -> Any:
    """Return the call's output with stand-ins as its tensors, connected to the receivers of gradients."""
    wanted = call.outputs.tensors
    made = ReplayFunction.apply(StandIn, owner, call, wanted, *owner.receivers(call))
    outputs = zip(wanted, made if isinstance(made, tuple) else (made,))
    by_leaf = {i: _one_of_several(standin) for i, standin in outputs}
    leaves = enumerate(call.outputs.leaves)
    return call.outputs.filled([by_leaf.get(i, leaf.without_tensor(call.samples)) for i, leaf in leaves])


def _one_of_several(standin: LazyTensor) -> LazyTensor:
    """A loss returned among other outputs, proven to be the mean or sum of its parts, as a scalar that can be added to
    others."""
    call, leaf = standin.call, standin.call.outputs.leaves[standin.leaf]
    if leaf.kind != "loss" or standin.is_own_loss or not standin.requires_grad:
        return standin
    weighed = Step(torch.mul, (standin.node, Sized(int)), {}, None)
    term = Term(weighed, call.samples) if leaf.joined == "mean" else Term(standin.node)
    scalar = _scalar(call, term, (standin,))
    return scalar if isinstance(scalar, LazyTensor) else standin


def _free(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """A result without running the full batch; None if only a replay is right."""
    standins = _standins((args, kwargs))
    if not standins or any(s.materialized is not None or s.owner is not standins[0].owner for s in standins):
        return None
    if any(s.looks and s.requires_grad for s in standins):
        return None  # has a backward of the script's own
    call = _common(standins)
    if call is None:
        return None
    if all(s.scalar is not None for s in standins):
        return _added(call, func, args, kwargs, standins)
    if any(s.axis is None for s in standins) or not isinstance(func, Hashable):
        return None
    made = _known_loss(call, func, args, kwargs, standins)
    if made is None:
        made = _next_step(call, func, args, kwargs, standins)
    return made


def _with_numbers(index: Any) -> Any:
    """Return an index whose slices have numbers as bounds: `out[:, : lengths.max()]` reads the value of that tensor."""
    if isinstance(index, tuple):
        return tuple(map(_with_numbers, index))
    if isinstance(index, slice):
        bounds = (index.start, index.stop, index.step)
        return slice(*(int(bound) if isinstance(bound, torch.Tensor) else bound for bound in bounds))
    return index


def _free_pair(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Like `_free`, for a function that returns values and indices."""
    values, indices = (_free(part, args, kwargs) for part in PAIRED[func])
    if values is None or indices is None:
        return None
    made = torch.return_types.max if "max" in func.__name__ else torch.return_types.min  # pyright: ignore[reportAttributeAccessIssue]
    return made((values, indices))


def _looked_at(standin: LazyTensor) -> torch.Tensor:
    """The computed tensor of a stand-in for reading only, else the stand-in."""
    return standin if standin.materialized is None or not standin.looks else standin.materialized


def _common(standins: Sequence[LazyTensor]) -> Call | None:
    """The call whose micro-batches compute all of these; None if there is none."""
    call = standins[0].call
    calls = tuple({each.number: each for standin in standins for each in standin.call.calls}.values())
    return call if len(calls) == len(call.calls) else standins[0].owner.joint(calls)


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
    if loss is None or not first.owner.accumulates(call, loss):
        return None
    if not first.owner.defers(call):
        return first.owner.accumulate_known_loss(call, loss)
    with torch._C.DisableTorchFunctionSubclass():
        term = term_of(loss, bound)
    return _scalar(call, term, standins)


def _next_step(
    call: Call, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], standins: Sequence[LazyTensor]
) -> torch.Tensor | None:
    first = standins[0]
    arguments, keywords = map_standins(_operand, args), map_standins(_operand, kwargs)
    loss = unreduced(func, arguments, keywords, first.device)
    if loss is not None and loss.reduction != "none":
        return _gathered(call, loss.term(), standins)
    following = step(func, arguments, keywords, first.device) if loss is None else loss.each
    if following is None:
        term = total(func, arguments, keywords, first.device)
        return None if term is None else _gathered(call, term, standins)
    like = first.owner.like_after(call, following, standins)
    if like is None:
        return None
    differentiable = like.dtype.is_floating_point or like.dtype.is_complex
    trains = differentiable and following.function is not torch.Tensor.detach and _flows(standins)
    if not trains and all(standin.is_there for standin in standins):
        return None

    def make() -> LazyTensor:
        return StandIn.make(
            first.owner,
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
    if not _gathers() or not first.owner.accumulates(call, term):
        return None
    return _scalar(call, term, standins) if first.owner.defers(call) else first.owner.accumulate_terms(call, [term])


def _nodes_of(standins: Sequence[LazyTensor]) -> dict[LazyTensor, Node]:
    """Their current nodes: a stand-in for reading only may have changed after it was computed."""
    return {standin: standin.node for standin in standins}


def _scalar(call: Call, term: Term, standins: Sequence[LazyTensor]) -> torch.Tensor | None:
    first, node = standins[0], Sum((term,))
    like, looks = first.owner.like_after(call, term.node, standins), not _flows(standins)
    if like is None:
        return None

    def make() -> LazyTensor:
        about = Scalar((term,))
        return StandIn.make(
            first.owner, call, node, (), like, None, parents=_nodes_of(standins), scalar=about, looks=looks
        )

    return _linked(make, standins)


def _added(
    call: Call, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], standins: Sequence[LazyTensor]
) -> torch.Tensor | None:
    """Sums of scalars, and products with a number that does not depend on the batch."""
    found, first = combined(func, args, kwargs, _scalar_of), standins[0]
    if found is None or any(tensor.dtype != first.dtype for tensor in (*standins, *found.constants)):
        return None
    parents = {parent: place for standin in standins for parent, place in standin.parents.items()}
    looks = not _flows((*standins, *found.constants))

    def make() -> LazyTensor:
        node = Sum(found.terms)
        return StandIn.make(first.owner, call, node, (), first, None, parents=parents, scalar=found, looks=looks)

    return _linked(make, tuple(parents), found.constants)


def _rewritten(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an in-place operation on a deferred scalar could be deferred, too. Stand-ins derived from the scalar before keep
    its old terms."""
    standin = args[0]
    if not isinstance(standin, LazyTensor) or standin.scalar is None:
        return False
    if standin.requires_grad and not torch.is_grad_enabled():
        return False
    made = _free(OUT_OF_PLACE[func], args, kwargs)
    if made is None:
        return False
    with torch._C.DisableTorchFunctionSubclass():
        standin.detach_()
        if made.requires_grad:
            Rewritten.apply(standin, made)
    assert isinstance(made, LazyTensor)
    before = standin.call.calls
    standin.call, standin.node, standin.scalar = made.call, made.node, made.scalar
    standin.parents, standin.looks = made.parents, made.looks
    for each in made.call.calls:
        if each not in before:  # `in` on a set of references would call the stand-in's `__eq__`
            each.standins.add(standin)
    return True


def _scalar_of(value: Any) -> Scalar | None:
    return value.scalar if isinstance(value, LazyTensor) else None


def _flows(standins: Sequence[torch.Tensor]) -> bool:
    """Whether gradients flow through results computed from these."""
    return torch.is_grad_enabled() and any(standin.requires_grad for standin in standins)


def _linked(make: Callable[[], LazyTensor], parents: Sequence[LazyTensor], others: Sequence[torch.Tensor] = ()) -> LazyTensor:
    inputs = (*parents, *others)
    graph = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    return Then.apply(make, *inputs) if graph else make()  # type: ignore[no-any-return]


def _operand(value: Any) -> Operand | None:
    if not isinstance(value, LazyTensor) or value.axis is None:
        return None
    return Operand(value.node, tuple(value.shape), value.axis)


def _standins(tree: Any) -> list[LazyTensor]:
    found: list[LazyTensor] = []
    map_standins(found.append, tree)
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
    refuse_as_goal(inputs)
    outputs, args, kwargs = map_standins(LazyTensor.computed, (outputs, args, kwargs))
    inputs = map_standins(lambda goal: goal if goal.is_in_graph else goal.computed(), inputs)
    with torch._C.DisableTorchFunctionSubclass():
        return torch.autograd.grad(outputs, inputs, *args, **kwargs)


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
