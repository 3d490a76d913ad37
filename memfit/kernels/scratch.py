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
SORTED_IN_PLACE, SORTED_ALONE = 4096, 1_000_000
"""Sorting: rows up to that long take no buffer; rows from that length on are sorted one by one."""
CHUNK = 65536
"""Elements that kernels over lists of tensors take at a time."""
BACKWARD = 1.5
"""Times the operands' bytes that the backward of a convolution takes (see `_convolution_backward`)."""


def scratch(func: Any, args: tuple[Any, ...], out: Any) -> int:
    """Bytes that the kernel of `func` holds beside its arguments and what it returns."""
    rule = _RULES.get(func)
    return 0 if rule is None else rule(args, out)


def is_unknown(func: Any) -> bool:
    """Whether that operation allocates an amount no rule tells."""
    return func in UNKNOWN or func.namespace not in ("aten", "prims", "prim", "profiler")


def _flash_backward(args: Any, out: Any) -> int:
    """Gradients of queries gather in float32; one number per row; gradients of shared keys before they are summed
    (transformers/cuda/flash_attn/flash_api.cpp, mha_bwd)."""
    _, query, key = args[:3]
    batch, heads, rows, head = query.shape
    rounded = _up(rows, 128)
    gathered = 4 * batch * heads * rounded * (_up(head, 32) if head <= 128 else _up(head, 64))
    shared = 2 * batch * heads * key.shape[2] * head * key.element_size() if heads != key.shape[1] else 0
    return gathered + 4 * batch * heads * rounded + shared


def _efficient(args: Any, out: Any) -> int:
    """Heads that do not fit into registers: the output gathers in float32 (kNeedsOutputAccumulatorBuffer in
    mem_eff_attention/kernel_forward.h)."""
    query, value = args[0], args[2]
    gathers = query.dtype is not torch.float32 and _widest(query, value) > 128
    return 4 * query.shape[0] * query.shape[1] * query.shape[2] * value.shape[3] if gathers else 0


def _efficient_backward(args: Any, out: Any) -> int:
    """One sum per row, which float32 makes by single operations before; then gradients of queries by tile, and those of keys
    and values where heads do not fit into registers (transformers/cuda/attention_backward.cu, workspace_size in
    mem_eff_attention/kernel_backward.h). Tiles are those of data centre cards since sm_80 (kernels/generate_kernels.py); those
    of others round up to less, and cards with little shared memory gather more for heads above 64."""
    query, key, value = args[1:4]
    (batch, heads, rows, head), columns = query.shape, key.shape[2]
    half, widest = query.dtype is not torch.float32, _widest(query, value)
    high, wide = 64 if widest <= 64 else 128, 128 if half and 64 < widest <= 128 else 64
    sums, held = 4 * batch * heads * rows, _pieces(rows, high) * _pieces(head, wide) * (4 * high * wide + 16)
    if half and widest > 128:
        splits = max(1, min(_pieces(columns, 64), 200 // (batch * heads)))
        held += 4 * splits * 64 * (_up(head, 128) + _up(value.shape[3], 128))
    product = 0 if half else 4 * batch * heads * rows * value.shape[3] + sums
    return sums + max(product, batch * heads * held)


def _widest(query: torch.Tensor, value: torch.Tensor) -> int:
    return max(query.shape[3], value.shape[3])


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
    """Accumulating takes the linear indices, their order, both sorted, and a second buffer to sort them with; values that are
    broadcast are spread (index_put_with_sort_kernel in cuda/Indexing.cu)."""
    target, indices, values = args[:3]
    given = [i for i in indices if i is not None]
    if not (len(args) > 3 and args[3]) or not given or given[0].dtype is torch.bool:
        return 0
    count = torch.broadcast_shapes(*(i.shape for i in given)).numel()
    indexed = [target.shape[d] for d, i in enumerate(indices) if i is not None]
    spread = count * (target.numel() // max(1, torch.Size(indexed).numel()))
    return 6 * 8 * count + (spread * values.element_size() if values.numel() < spread else 0)


def _product_of_gradient_and_output(args: Any, out: Any) -> int:
    """`grad * output` is made first (cuda/SoftMax.cu, softmax_backward_cuda_out)."""
    return args[0].numel() * args[0].element_size()


def _safe_softmax(args: Any, out: Any) -> int:
    """Whether an element is masked, and whether all of its row is, one byte each (_safe_softmax in SoftMax.cpp, torch 2.5 and
    later): what attention takes that no fused kernel computes."""
    dim = args[1]
    return out.numel() + (out.numel() // out.shape[dim] if out.numel() else 0)


def _group_norm(args: Any, out: Any) -> int:
    """A factor and a summand per sample and channel (cuda/group_norm_kernel.cu)."""
    given, weight, bias, batch, channels, pixels = args[:6]
    return 0 if pixels == 1 or (weight is None and bias is None) else _exact(given) * 2 * batch * channels


def _group_norm_backward(args: Any, out: Any) -> int:
    """Two sums per sample and channel; for the gradient of the input two factors per sample and group, and one per channel
    where there are weights (GroupNormBackwardKernelImplInternal in cuda/group_norm_kernel.cu)."""
    given, weight, batch, channels, pixels, groups = args[1], *args[4:9]
    found = 2 * channels if pixels > 1 else 0
    if args[9][0]:
        found += 2 * groups + (channels if weight is not None and pixels > 1 else 0)
    return _exact(given) * batch * found


def _layer_norm_backward(args: Any, out: Any) -> int:
    """Many short rows: sums of 32 rows at a time, for weight and bias, at most 32,768 by warp
    (LaunchGammaBetaBackwardCUDAKernel in cuda/layer_norm_kernel.cu, torch 2.8 and later). How short they have to be depends on
    the number of multiprocessors, which is taken to be 108."""
    given, weight, mask = args[1], args[5], args[7]
    if weight is None or not any(mask[1:]):
        return 0
    width = weight.numel()
    rows = given.numel() // width
    if rows <= 65536 or width // 32 >= 108 // 2:
        return 0
    return min(32768 // _pieces(width, 32), _pieces(rows, 32)) * width * weight.element_size() * sum(mask[1:])


def _convolution(args: Any, out: Any) -> int:
    """cuDNN's tensor cores compute with channels last; other layouts are transposed into its workspace, and back (NVIDIA,
    Convolutional Layers User's Guide, "Tensor layouts"): the input and the output. Windows of one pixel are matrix products,
    and convolutions of single channels have kernels of their own; neither is transposed."""
    given, weight, groups = args[0], args[1], args[8]
    return _bytes(given) + _bytes(out) if _transposes(given, weight, groups) else 0


def _convolution_backward(args: Any, out: Any) -> int:
    """As for the forward, with the gradient of the output. Of the factors tried on 19 rows that others published, one and a
    half has the least mean error (`benchmarks/prediction_timm.py`)."""
    grad, given, weight, groups = args[0], args[1], args[2], args[9]
    return int(BACKWARD * (_bytes(grad) + _bytes(given))) if _transposes(given, weight, groups) else 0


def _transposes(given: torch.Tensor, weight: torch.Tensor, groups: int) -> bool:
    window = weight.shape[2:].numel()
    last = given.dim() == 4 and given.is_contiguous(memory_format=torch.channels_last) and not given.is_contiguous()
    return window > 1 and groups < given.shape[1] and not last


def _sort(args: Any, out: Any) -> int:
    """Short rows are sorted in place. Long ones take the indices to begin with, and keys and values in a second buffer; a few
    at once are sorted as a whole, with their number beside the index; what does not lie row by row is copied
    (sort_cuda_kernel in cuda/Sort.cpp, cuda/SortStable.cu)."""
    given, dim = args[0], args[1] if len(args) > 1 and isinstance(args[1], int) else -1
    count, size = given.numel(), given.element_size()
    length = given.shape[dim] if given.dim() else 1
    if length <= SORTED_IN_PLACE:
        return 0
    copied = 0 if given.stride(dim) == 1 else count * (2 * size + 8)
    segments = count // length
    if segments == 1 or length >= SORTED_ALONE:
        return copied + length * (8 + size + 8)
    return copied + count * (8 + size + 8 + (8 + size if segments < 128 else 0))


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _exact(tensor: torch.Tensor) -> int:
    """Bytes of a number that sums over such a tensor are kept in."""
    return max(4, tensor.element_size())


def _foreach_norm(args: Any, out: Any) -> int:
    """A sum for each chunk of each tensor, as many for all as the largest has (cuda/ForeachReduceOp.cu; kChunkSize in
    cuda/MultiTensorApply.cuh)."""
    tensors = args[0]
    return _exact(tensors[0]) * len(tensors) * max(_pieces(t.numel(), CHUNK) for t in tensors) if tensors else 0


def _pieces(size: int, each: int) -> int:
    return -(-size // each)


def _up(size: int, multiple: int) -> int:
    return _pieces(size, multiple) * multiple


_RULES: dict[Any, Callable[[Any, Any], int]] = {
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_efficient_attention.default: _efficient,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten.index_put.default: _index_put,
    aten.index_put_.default: _index_put,
    aten._index_put_impl_.default: _index_put,
    aten._safe_softmax.default: _safe_softmax,
    aten._softmax_backward_data.default: _product_of_gradient_and_output,
    aten.native_group_norm.default: _group_norm,
    aten.native_group_norm_backward.default: _group_norm_backward,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten._foreach_norm.Scalar: _foreach_norm,
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
        aten._ctc_loss.Tensor,
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
