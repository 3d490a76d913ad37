"""Runs a model on fake tensors: shapes and operators without memory or arithmetic.

Where a forward reads a *value* (of a mask, of a length), the real value is returned as long as it follows from small inputs and
constants alone. Otherwise a fixed guess is returned and recorded in `guesses`. Not covered: operators without shape functions,
and output shapes that depend on computed values; those traces fail.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from memfit.engine.gradients import AS_GIVEN
from memfit.engine.staged import refresh_flat_weights
from memfit.tracing.op_cache import Recall
from memfit.tracing.op_results import CTC, as_held, of_longest

_SMALL = 1 << 16
"""Maximum number of elements of a tensor whose real value is tracked; masks and index tensors are smaller."""


class FakeWorld:
    """Makes fake twins of real tensors, and provides the fake mode to compute with them."""

    def __init__(self) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        self.mode = FakeTensorMode()
        # A fake tensor has no valid data pointer: reading from it (DLPack, kernels of other libraries) would crash the process.
        self.mode._allow_unsafe_data_ptr_access = False
        self.values = _Values(self.mode)
        self._recurs = False
        """Whether a model with recurrent networks runs here."""

    def twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the fake tensor for `tensor`: same shape, strides, dtype, device, aliasing and requires_grad."""
        if tensor.is_meta or in_parts(tensor):
            return self._from_meta(tensor)
        fake = self.mode.from_tensor(tensor)
        if not tensor.requires_grad or tensor.dtype in (torch.bool, torch.int64, torch.int32):
            self.values.remember(fake, tensor)
        return fake

    def parameter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the fake tensor for a parameter: like the original, a leaf with its own gradient."""
        own = tensor.is_meta or in_parts(tensor)
        fake = self._from_meta(tensor) if own else self.mode.from_tensor(tensor.detach())
        twin = nn.Parameter(fake, requires_grad=tensor.requires_grad)
        twin.__dict__.update({k: v for k, v in tensor.__dict__.items() if not k.startswith("_memfit")})  # pyright: ignore[reportAttributeAccessIssue]
        return twin

    def _from_meta(self, tensor: torch.Tensor) -> torch.Tensor:
        """Twins of meta tensors are on the CPU, because the meta device cannot compute. Twins of DTensors are not sharded."""
        device = "cpu" if tensor.is_meta else tensor.device
        with self.mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)

    @property
    def guesses(self) -> list[str]:
        """Operations whose values were guessed."""
        return self.values.guesses

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Context manager in which operations on fake tensors compute shapes only."""
        with _without_cudnn() if self._recurs else nullcontext(), self.mode, self.values, _not_looking_traced():
            yield

    @contextmanager
    def replacing(self, model: nn.Module) -> Iterator[dict[int, torch.Tensor]]:
        """Replaces the parameters and buffers of `model` with fake tensors; yields the fakes by the id of their originals."""
        twins: dict[int, torch.Tensor] = {}
        changed: list[tuple[dict[str, Any], str, Any]] = []
        with model.__dict__.get(AS_GIVEN, nullcontext)():
            yield from self._replacing(model, twins, changed)

    def _replacing(
        self, model: nn.Module, twins: dict[int, torch.Tensor], changed: list[tuple[dict[str, Any], str, Any]]
    ) -> Iterator[dict[int, torch.Tensor]]:
        self._recurs = self._recurs or any(isinstance(module, nn.RNNBase) for module in model.modules())
        try:
            for module in model.modules():
                for entries in (module._parameters, module._buffers):
                    for name, original in entries.items():
                        if original is not None:
                            changed.append((entries, name, original))
                            entries[name] = self._twin_of(original, twins)  # pyright: ignore[reportArgumentType]
            refresh_flat_weights(model.modules())
            yield twins
        finally:
            for entries, name, original in reversed(changed):
                entries[name] = original
            refresh_flat_weights(model.modules())

    def _twin_of(self, original: torch.Tensor, twins: dict[int, torch.Tensor]) -> torch.Tensor:
        if id(original) not in twins:
            is_parameter = isinstance(original, nn.Parameter)
            twins[id(original)] = self.parameter(original) if is_parameter else self.twin(original)
        return twins[id(original)]


@contextmanager
def _without_cudnn() -> Iterator[None]:
    """cuDNN's recurrent networks compare the addresses of weights, which fake tensors do not have: the trace would fail."""
    enabled = torch._C._get_cudnn_enabled()
    torch._C._set_cudnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_cudnn_enabled(enabled)


class ZeroArrays(TorchFunctionMode):
    """Converts fake tensors to NumPy arrays of zeros: enough to see what a model calls where values do not decide. Attribute:
    `made`, whether there were any."""

    def __init__(self) -> None:
        super().__init__()
        self.made = False

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func not in (torch.Tensor.numpy, torch.Tensor.__array__) or not isinstance(args[0], _fake_tensor_type()):
            return func(*args, **(kwargs or {}))
        self.made = True
        with torch.utils._python_dispatch._disable_current_modes():  # pyright: ignore[reportAttributeAccessIssue]
            return torch.zeros(args[0].shape, dtype=args[0].dtype).numpy()


def in_parts(tensor: torch.Tensor) -> bool:
    """Whether the tensor is sharded over several processes (a DTensor)."""
    return hasattr(tensor, "to_local")


MOST_GUESSES = 20_000
"""Values of one trace that may be guessed."""


class _Values(TorchDispatchMode):
    """Tracks the real values of small tensors that depend on inputs and constants alone, to answer value reads."""

    def __init__(self, fakes: Any) -> None:
        super().__init__()
        self.guesses: list[str] = []
        self._fakes = fakes
        self._fake_type = _fake_tensor_type()
        self._recall = Recall(fakes, self._fake_type)
        self._real = WeakTensorKeyDictionary()
        self._likely = WeakTensorKeyDictionary()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch imports dynamo, which takes a second, to exclude this class from it

    def remember(self, fake: torch.Tensor, real: torch.Tensor) -> None:
        if real.numel() <= _SMALL and real.layout is torch.strided and not real.is_meta:
            with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():  # pyright: ignore[reportAttributeAccessIssue]
                self._real[fake] = real.detach().to("cpu", copy=True)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in QUESTIONS:
            return answered(func, args)
        args, kwargs, given = self._as_fakes(args, kwargs or {})
        known = self._known(func, args, kwargs, given)
        if func in _READS:
            return self._read(func, args, known)
        if func in _UNCACHED:
            return self._without_cache(func, args, kwargs)
        if _makes_sparse(func, args):
            raise NotImplementedError("a sparse gradient has the rows that the samples name")
        if known is None and func in CTC:
            found = of_longest(func, args)
            return func(*args, **kwargs) if found is None else found
        if known is None:
            out = as_held(func, args, self._recall(func, args, kwargs, given))
            self._forget_written(func, args)
            return self._with_likely_answer(func, args, out)
        real = _run_for_real(func, *known)
        out = self._shaped_by_value(real) if torch.Tag.dynamic_output_shape in func.tags else func(*args, **kwargs)  # pyright: ignore[reportCallIssue]
        self._remember_all(out, real)
        return out

    def _as_fakes(self, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any], list[torch.Tensor]]:
        """The arguments with every tensor replaced by a fake, and those fakes."""
        given = _tensors_in(args) + (_tensors_in(tuple(kwargs.values())) if kwargs else [])
        if all(isinstance(t, self._fake_type) for t in given):
            return args, kwargs, given
        args, kwargs = _map_tensors(self._twin, args), _map_tensors(self._twin, kwargs)
        return args, kwargs, _tensors_in(args) + _tensors_in(tuple(kwargs.values()))

    def _twin(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, self._fake_type):
            return tensor
        fake = self._fakes.from_tensor(tensor)
        self.remember(fake, tensor)
        return fake

    def _known(self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor]) -> tuple[Any, Any] | None:
        """The arguments with real values for the fakes, or None if any is unknown or the operation is random."""
        if any(t not in self._real for t in given) or torch.Tag.nondeterministic_seeded in func.tags:
            return None
        if not given:
            return None if _elements_asked(args) > _SMALL else (args, _on_cpu(kwargs))
        real = self._real.__getitem__
        return _map_tensors(real, args), _on_cpu(_map_tensors(real, kwargs))

    def _read(self, func: Any, args: Any, known: tuple[Any, Any] | None) -> Any:
        if known is not None:
            return _run_for_real(func, *known)
        self.guesses.append(str(func))
        if len(self.guesses) > MOST_GUESSES:
            raise RuntimeError(f"{MOST_GUESSES} values were guessed: a loop that ends by values of the batch does not end")
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype is not torch.bool:
            return 1
        return bool(self._likely.get(args[0], False)) if isinstance(args[0], torch.Tensor) else False

    def _with_likely_answer(self, func: Any, args: Any, out: Any) -> Any:
        """Guesses that value checks pass: nothing is NaN or too large, and everything is finite."""
        if not isinstance(out, torch.Tensor) or out.dtype is not torch.bool:
            return out
        if func in _ALL:
            self._likely[out] = True
        elif func in _NOT and args[0] in self._likely:
            self._likely[out] = not self._likely[args[0]]
        return out

    def _without_cache(self, func: Any, args: Any, kwargs: Any) -> Any:
        enabled, self._fakes.cache_enabled = self._fakes.cache_enabled, False
        try:
            return func(*args, **kwargs)
        finally:
            self._fakes.cache_enabled = enabled

    def _remember_all(self, out: Any, real: Any) -> None:
        for fake, value in zip(_flat(out), _flat(real)):
            if isinstance(fake, torch.Tensor) and isinstance(value, torch.Tensor) and value.numel() <= _SMALL:
                self._real[fake] = value

    def _forget_written(self, func: Any, args: Any) -> None:
        if func._schema.is_mutable and args:
            for written in _flat(args[0]):
                if isinstance(written, torch.Tensor):
                    self._real.pop(written, None)

    def _shaped_by_value(self, real: Any) -> Any:
        return torch.utils._pytree.tree_map_only(torch.Tensor, self._fakes.from_tensor, real)  # pyright: ignore[reportAttributeAccessIssue]


_LOOKING = (("transformers.masking_utils", "is_tracing"),)
"""Functions by which libraries detect tracing; they then take a path that differs from the real run."""


@contextmanager
def _not_looking_traced() -> Iterator[None]:
    changed = []
    try:
        for module_name, name in _LOOKING:
            module = sys.modules.get(module_name)
            if module is not None and hasattr(module, name):
                changed.append((module, name, getattr(module, name)))
                setattr(module, name, lambda *args, **kwargs: False)
        yield
    finally:
        for module, name, original in changed:
            setattr(module, name, original)


QUESTIONS = (torch.ops.prim.device.default, torch.ops.prim.layout.default)
"""Queries about a tensor that torch dispatches more often than anything else; they compute nothing."""


def answered(func: Any, args: tuple[Any, ...]) -> Any:
    """Answers one of `QUESTIONS` on the shortest path."""
    device = getattr(args[0], "fake_device", None)
    return device if device is not None and func is torch.ops.prim.device.default else func(*args)


_UNCACHED = (torch.ops.aten.mkldnn_rnn_layer_backward.default,)
"""Operators that return one tensor twice: from the second call on, the cache of fake mode would return two tensors."""

_SPARSE = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors.default
_BAG_BACKWARD, _BAG_SPARSE = torch.ops.aten._embedding_bag_backward.default, 9
"""An operator, and the index of the argument that says whether its gradient is sparse."""


def _makes_sparse(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether the operator makes a sparse gradient: a fake one has no rows, and its bytes would be missing."""
    return func is _SPARSE or (func is _BAG_BACKWARD and bool(args[_BAG_SPARSE]))


_READS = (
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.allclose.default,
)


_ALL = (
    torch.ops.aten.all.default, torch.ops.aten.all.dim, torch.ops.aten.all.dims, torch.ops.aten._is_all_true.default,
)  # fmt: skip
_NOT = (torch.ops.aten.logical_not.default, torch.ops.aten.bitwise_not.default)


def _fake_tensor_type() -> type:
    from torch._subclasses.fake_tensor import FakeTensor

    return FakeTensor


def _run_for_real(func: Any, args: Any, kwargs: Any) -> Any:
    with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():  # pyright: ignore[reportAttributeAccessIssue]
        return func(*args, **kwargs)


def _flat(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def _tensors_in(args: Any) -> list[torch.Tensor]:
    found = []
    for a in args:
        if isinstance(a, torch.Tensor):
            found.append(a)
        elif isinstance(a, (list, tuple)):
            found.extend(item for item in a if isinstance(item, torch.Tensor))
    return found


def _map_tensors(function: Any, tree: Any) -> Any:
    """`tree` with `function` applied to its tensors; operator arguments nest one level deep at most."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, dict):
        return {key: _map_tensors(function, value) for key, value in tree.items()} if tree else tree
    if isinstance(tree, (list, tuple)):
        return type(tree)(
            _map_tensors(function, item) if isinstance(item, (torch.Tensor, list, tuple)) else item for item in tree
        )
    return tree


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "device": torch.device("cpu")} if "device" in kwargs else kwargs


def _elements_asked(args: Any) -> int:
    """An upper bound of the elements that a factory function creates for these arguments."""
    product = 1
    for a in args:
        for item in a if isinstance(a, (list, tuple)) else (a,):
            if isinstance(item, int) and not isinstance(item, bool) and item > 0:
                product *= item
    return product
