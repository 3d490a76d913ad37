"""Applies CUDA's autocast to tensors that are not on CUDA: which functions compute in which precision.

The lists follow aten/src/ATen/autocast_mode.h (AT_FORALL_LOWER_PRECISION_FP, AT_FORALL_FP32, ...). Inside `available()`, while
a step is traced for a GPU, a script's own `torch.autocast` of "cuda" or "cpu" acts as CUDA's.
Not covered: functions that C++ calls inside another; `custom_fwd`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_LOWER = frozenset(
    """_convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution
    cudnn_convolution prelu addmm addmv addr matmul __matmul__ __rmatmul__ einsum mm mv linalg_vecdot linear addbmm baddbmm
    bmm chain_matmul
    linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    scaled_dot_product_attention lstm gru rnn_tanh rnn_relu multi_dot""".split()
)
_FLOAT = frozenset(
    """__rpow__ __rdiv__ acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow __pow__ softplus
    layer_norm native_layer_norm group_norm norm frobenius_norm nuclear_norm cosine_similarity poisson_nll_loss
    cosine_embedding_loss nll_loss nll_loss2d nll_loss_nd hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss
    margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss
    binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d upsample_nearest2d upsample_nearest3d
    upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d""".split()
)
SETS_DTYPE = frozenset("prod softmax log_softmax cumprod cumsum linalg_vector_norm linalg_matrix_norm sum".split())
"""Functions with a `dtype` argument, which becomes float32 if the script gives none."""
_PROMOTED = frozenset(
    "addcdiv addcmul atan2 bilinear cross dot vdot grid_sample grid_sampler index_put tensordot scatter_add".split()
)


class Casts:
    """Casts function arguments as CUDA's autocast does, and caches the cast weights for as long."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[Any, torch.Tensor]] = {}

    def forget(self) -> None:
        """Drop the cached weights, because the outermost autocast ended."""
        self._copies.clear()

    def cast(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments that the function called `name` gets inside the active autocast."""
        if name in _LOWER:
            return self._all_to(torch.get_autocast_dtype("cuda"), args, kwargs)
        if name in _FLOAT:
            return self._all_to(torch.float32, args, kwargs)
        if name in SETS_DTYPE:
            first = args[0] if args else kwargs.get("input")
            given = kwargs.get("dtype") is not None or any(isinstance(a, torch.dtype) for a in args)
            return args, ({**kwargs, "dtype": torch.float32} if _is_low(first) and not given else kwargs)
        if name in _PROMOTED:
            widest = any(t.dtype is torch.float32 for t in _tensors((*args, *kwargs.values())))
            return self._all_to(torch.float32, args, kwargs) if widest else (args, kwargs)
        return args, kwargs

    def _all_to(self, dtype: torch.dtype, args: Any, kwargs: Any) -> Any:
        return self._mapped(args, dtype), {name: self._mapped(value, dtype) for name, value in kwargs.items()}

    def _mapped(self, value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, torch.Tensor):
            return self._to(value, dtype)
        return type(value)(self._mapped(v, dtype) for v in value) if type(value) in (tuple, list) else value

    def _to(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if not tensor.is_floating_point() or tensor.dtype in (torch.float64, dtype):
            return tensor
        lasting = dtype is not torch.float32 and tensor.is_leaf and tensor.requires_grad and tensor.dtype is torch.float32
        if not lasting or not torch.is_autocast_cache_enabled() or tensor._is_view():
            return tensor.to(dtype)
        known = self._copies.get(id(tensor))
        if known is None or known[0]() is not tensor or known[1].dtype is not dtype:
            self._copies[id(tensor)] = known = (weakref.ref(tensor), tensor.to(dtype))
        return known[1]


_OWN_INIT, _OWN_EXIT = torch.autocast.__init__, torch.autocast.__exit__
_OWN_IS_ENABLED, _OWN_DTYPE = torch.is_autocast_enabled, torch.get_autocast_dtype
_LOCK = threading.Lock()
_tracing = threading.local()
_traces = 0
"""Number of threads that are tracing."""


@contextmanager
def available(ended: Callable[[], None]) -> Iterator[None]:
    """Let this thread enter autocast on "cuda" without a GPU, and treat autocast on "cpu" as "cuda". Calls `ended` whenever the
    outermost autocast ends."""
    before = getattr(_tracing, "ended", None)
    _patch(1)
    _tracing.ended = ended
    try:
        yield
    finally:
        _tracing.ended = before
        _patch(-1)
        ended()


def _patch(more: int) -> None:
    global _traces
    with _LOCK:
        _traces += more
        init, leave = (_begun, _left) if _traces else (_OWN_INIT, _OWN_EXIT)
        torch.autocast.__init__, torch.autocast.__exit__ = init, leave  # pyright: ignore[reportAttributeAccessIssue]
        # Code that queries the CPU's state does so to enter it again, as activation checkpointing does.
        enabled, dtype = (_is_enabled, _dtype) if _traces else (_OWN_IS_ENABLED, _OWN_DTYPE)
        torch.is_autocast_enabled, torch.get_autocast_dtype = enabled, dtype  # pyright: ignore[reportAttributeAccessIssue]


def _is_tracing() -> bool:
    return getattr(_tracing, "ended", None) is not None


def _is_enabled(*device_type: str) -> bool:
    return _OWN_IS_ENABLED("cuda") if device_type == ("cpu",) and _is_tracing() else _OWN_IS_ENABLED(*device_type)


def _dtype(device_type: str) -> torch.dtype:
    return _OWN_DTYPE("cuda" if device_type == "cpu" and _is_tracing() else device_type)


def _begun(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None) -> None:
    if not _is_tracing() or device_type not in ("cpu", "cuda"):
        _OWN_INIT(self, device_type, dtype, enabled, cache_enabled)
        return
    self.device, self._enabled = "cuda", enabled
    self.fast_dtype = dtype if dtype is not None else torch.get_autocast_dtype("cuda")
    self._cache_enabled = torch.is_autocast_cache_enabled() if cache_enabled is None else cache_enabled
    self.custom_backend_name = torch._C._get_privateuse1_backend_name()


def _left(self: Any, *raised: Any) -> Any:
    try:
        return _OWN_EXIT(self, *raised)
    finally:
        if _is_tracing() and not torch.is_autocast_enabled("cuda"):
            _tracing.ended()


def _is_low(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)


def _tensors(values: tuple[Any, ...]) -> list[torch.Tensor]:
    flat = [item for v in values for item in (v if isinstance(v, (tuple, list)) else (v,))]
    return [t for t in flat if isinstance(t, torch.Tensor)]
