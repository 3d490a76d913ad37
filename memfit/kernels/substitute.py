"""A mode in which functions run the kernels that CUDA would run, on fake tensors of any device.

torch's Python functions are entered again under the mode, so that it sees the functions they call.
Not covered: kernels that C++ chooses inside another function; scripted functions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from memfit.kernels.alike import note
from memfit.kernels.attention import attend, kernel_of
from memfit.kernels.autocast import Casts, available
from memfit.kernels.fused import CudnnRNN, FusedRMSNorm, SoftmaxToFloat
from memfit.kernels.target import Target


class CudaKernels(TorchFunctionMode):
    """Substitutes the kernels of a CUDA device, including its autocast."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self._target, self.casts = target, Casts()
        self._own: dict[Any, Callable[..., Any]] = {
            F.scaled_dot_product_attention: self._attention,
            torch.dropout: _dropout,
            torch.rms_norm: _rms_norm,
            F.cross_entropy: _cross_entropy,
            torch.Tensor.backward: _backward,
            **{f: _softmax(f) for f in (torch.softmax, torch.Tensor.softmax, torch.log_softmax, torch.Tensor.log_softmax)},
            **{getattr(torch, kind): _recurrent(kind) for kind in CudnnRNN.GATES},
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        own = self._own.get(func)
        entered = own if own is not None and isinstance(func, FunctionType) else _reentered(func)
        if entered is not None:
            with self:
                return entered(*args, **kwargs)
        if torch.is_autocast_enabled("cuda"):
            name = getattr(func, "__name__", "")
            with self:
                args, kwargs = self.casts.cast(name, args, kwargs)
        return (own or func)(*args, **kwargs)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def _attention(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        given = _named(_ATTENTION, args, kwargs)
        given["dropout_p"] = float(given["dropout_p"])
        inputs = (given["query"], given["key"], given["value"], given["attn_mask"])
        choice = partial(kernel_of, *inputs, given["dropout_p"], given["is_causal"], given["enable_gqa"])
        kernel = choice(self._target)
        note(choice, kernel)
        return attend(kernel, given)


@contextmanager
def cuda_kernels(target: Target | None) -> Iterator[None]:
    """Run the code inside with the kernels of `target`; None keeps those of the tensors' device."""
    if target is None:
        yield
        return
    mode = CudaKernels(target)
    with available(mode.casts.forget), mode:
        yield


_ATTENTION = {
    **dict.fromkeys(("query", "key", "value", "attn_mask", "scale")),
    "dropout_p": 0.0,
    "is_causal": False,
    "enable_gqa": False,
}
_ATTENTION = {
    name: _ATTENTION[name] for name in "query key value attn_mask dropout_p is_causal scale enable_gqa".split()
}
"""Parameters of `scaled_dot_product_attention`, in order, with their defaults."""


def _named(defaults: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**defaults, **dict(zip(defaults, args)), **kwargs}


def _dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Dropout saves one byte per element on CUDA (`is_fused_kernel_acceptable` in aten/src/ATen/native/Dropout.cpp)."""
    if train and 0 < p < 1 and input.numel():
        return torch.native_dropout(input, p, True)[0]
    return torch.dropout(input, p, train)


def _rms_norm(input: torch.Tensor, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    if input.is_floating_point() and (weight is None or weight.dtype == input.dtype):
        return FusedRMSNorm.apply(input.contiguous(), weight, len(tuple(normalized_shape)))
    return torch.rms_norm(input, normalized_shape, weight, eps)


def _backward(
    self: torch.Tensor,
    gradient: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """Run backward under the mode, so that recomputation runs the same kernels."""
    torch.autograd.backward(self, gradient, retain_graph, create_graph, inputs=inputs)


def _softmax(func: Any) -> Callable[..., torch.Tensor]:
    def softmax(input: torch.Tensor, dim: Any, dtype: Any = None, **rest: Any) -> torch.Tensor:
        if dtype is torch.float32 and input.dtype in (torch.float16, torch.bfloat16):
            return SoftmaxToFloat.apply(input)  # pyright: ignore[reportReturnType]
        return func(input, dim, dtype=dtype, **rest)

    return softmax


def _cross_entropy(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Split cross entropy over class indices into its two parts, so that autocast reaches log_softmax as it does on CUDA."""
    given = inspect.signature(_CROSS_ENTROPY).bind(*args, **kwargs)
    given.apply_defaults()
    found = given.arguments
    input, target = found["input"], found["target"]
    plain = found["label_smoothing"] == 0 and not target.is_floating_point()
    if not plain or found["size_average"] is not None or found["reduce"] is not None:
        return (_reentered(_CROSS_ENTROPY) or _CROSS_ENTROPY)(*args, **kwargs)
    logs = torch.log_softmax(input, 0 if input.dim() == 1 else 1)
    return F.nll_loss(logs, target, found["weight"], ignore_index=found["ignore_index"], reduction=found["reduction"])


_CROSS_ENTROPY = F.cross_entropy


def _recurrent(kind: str) -> Callable[..., Any]:
    own = getattr(torch, kind)

    def recurrent(input: torch.Tensor, hx: Any, weights: Any, *rest: Any) -> Any:
        if len(rest) != 6 or isinstance(rest[0], (tuple, list)):  # packed sequences
            return own(input, hx, weights, *rest)
        has_bias, layers, _, train, bidirectional, batch_first = rest
        states = tuple(hx) if isinstance(hx, (tuple, list)) else (hx,)
        if not has_bias or not train or input.dim() != 3:
            return own(input, hx, weights, *rest)
        given = input.transpose(0, 1).contiguous() if batch_first else input
        directions = 2 if bidirectional else 1
        hidden = states[0].shape[-1]
        out, *last = CudnnRNN.apply(kind, hidden, layers, directions, given, *states, *weights)  # pyright: ignore[reportGeneralTypeIssues]
        return (out.transpose(0, 1) if batch_first else out, *last)

    return recurrent


@cache
def _reentered(func: Any) -> Callable[..., Any] | None:
    """Return the function without its has_torch_function check, which the mode has answered. None for functions that are not
    written in Python, or check in another way."""
    asked = [name for name in getattr(func, "__globals__", ()) if name.startswith("has_torch_function")]
    if not asked or not isinstance(func, FunctionType) or "__class__" in func.__code__.co_freevars:
        return None  # a function that calls `super()` would come back here as itself
    globals_ = {**func.__globals__, **dict.fromkeys(asked, _nobody)}
    found = FunctionType(func.__code__, globals_, func.__name__, func.__defaults__, func.__closure__)
    found.__kwdefaults__ = func.__kwdefaults__
    return found


def _nobody(*args: Any) -> bool:
    return False
