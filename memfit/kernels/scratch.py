"""What CUDA kernels allocate inside a call and free before it returns, in bytes, by operation.

Each rule names the source it was read in (aten/src/ATen/native of torch 2.6 to 2.13). Operations that are known to allocate,
but not how much, are in `UNKNOWN`: reports name them, and predictions that rest on them get a wider interval.
Not covered: operations of other libraries than torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten

DIRECT_INDICES, ROWS_PER_THREAD = 3072, 10
"""Embedding backward: up to that many indices are added directly; more are sorted, and added in runs of that many rows."""


def scratch(func: Any, args: tuple[Any, ...], out: Any) -> int:
    """Bytes that the kernel of `func` holds beside its arguments and what it returns."""
    rule = _RULES.get(func)
    return 0 if rule is None else rule(args, out)


def is_unknown(func: Any) -> bool:
    """Whether that operation allocates an amount no rule tells."""
    return func in UNKNOWN or func.namespace not in ("aten", "prims", "prim")


def _flash_backward(args: Any, out: Any) -> int:
    """Gradients of queries gather in float32; one number per row; gradients of shared keys before they are summed
    (transformers/cuda/flash_attn/flash_api.cpp, mha_bwd)."""
    _, query, key = args[:3]
    batch, heads, rows, head = query.shape
    rounded = _up(rows, 128)
    gathered = 4 * batch * heads * rounded * (_up(head, 32) if head <= 128 else _up(head, 64))
    shared = 2 * batch * heads * key.shape[2] * head * key.element_size() if heads != key.shape[1] else 0
    return gathered + 4 * batch * heads * rounded + shared


def _efficient_backward(args: Any, out: Any) -> int:
    """One number per row, and half precision gradients gather in float32 (transformers/cuda/attention_backward.cu)."""
    query, key, value = args[1:4]
    batch, heads, rows, head = query.shape
    found = 4 * batch * heads * rows
    if query.dtype is not torch.float32:
        found += 4 * batch * heads * (_up(rows, 64) * head + _up(key.shape[2], 64) * (head + value.shape[3]))
    return found


def _embedding_backward(args: Any, out: Any) -> int:
    """Sorted indices, runs of equal ones, and a sum per run (cuda/Embedding.cu, cuda/EmbeddingBackwardKernel.cu)."""
    grad, indices, weights, padding = args[:4]
    count = indices.numel()
    if count <= DIRECT_INDICES and padding < 0:
        return 0
    segments = min(count, weights)
    runs = count // ROWS_PER_THREAD + segments
    width = grad.shape[-1]
    return 8 * (2 * count + 3 * segments + runs) + runs * width * max(4, grad.element_size())


def _index_put(args: Any, out: Any) -> int:
    """Accumulating takes the linear indices, a sorted copy, the original order and the sort's own (cuda/Indexing.cu)."""
    indices = args[1]
    accumulate = args[3] if len(args) > 3 else False
    given = [i for i in indices if i is not None]
    if not accumulate or not given or given[0].dtype is torch.bool:
        return 0
    return 4 * 8 * max(i.numel() for i in given)


def _product_of_gradient_and_output(args: Any, out: Any) -> int:
    """`grad * output` is made first (cuda/SoftMax.cu, softmax_backward_cuda_out)."""
    return args[0].numel() * args[0].element_size()


def _group_norm_backward(args: Any, out: Any) -> int:
    """Two sums per sample and channel, and three factors per sample and group (cuda/group_norm_kernel.cu)."""
    batch, channels, groups = args[5], args[6], args[8]
    return 4 * batch * (2 * channels + 3 * groups)


def _sort(args: Any, out: Any) -> int:
    """Segments are sorted as keys and values in a second buffer (cuda/Sort.cpp)."""
    return args[0].numel() * (args[0].element_size() + 8)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


_RULES: dict[Any, Callable[[Any, Any], int]] = {
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten.index_put.default: _index_put,
    aten.index_put_.default: _index_put,
    aten._index_put_impl_.default: _index_put,
    aten._softmax_backward_data.default: _product_of_gradient_and_output,
    aten.native_group_norm_backward.default: _group_norm_backward,
    aten.sort.default: _sort,
    aten.sort.stable: _sort,
}

UNKNOWN = frozenset(
    {
        aten.convolution.default,
        aten.convolution_backward.default,
        aten.cudnn_batch_norm.default,
        aten._cudnn_rnn.default,
        aten.topk.default,
        aten._unique2.default,
        aten.unique_consecutive.default,
        aten._ctc_loss.default,
        aten._fft_r2c.default,
        aten._fft_c2r.default,
        aten._fft_c2c.default,
        aten.linalg_lu_factor_ex.default,
        aten.linalg_inv_ex.default,
        aten._linalg_svd.default,
        aten._linalg_eigh.default,
        aten._cdist_backward.default,
    }
)
