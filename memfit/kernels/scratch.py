"""Predicts the scratch bytes that CUDA kernels allocate inside a call and free before it returns, by operation.

Each rule names its source (aten/src/ATen/native of torch 2.6 to 2.13). `UNKNOWN` lists operations that allocate an unknown
amount: reports name them, and predictions that use them get a wider interval.
Not covered: operations of libraries other than torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten

DIRECT_INDICES, ROWS_PER_THREAD = 3072, 10
"""Embedding backward: up to this many indices are added directly; more are sorted, and added in runs of this many rows."""
SORTED_IN_PLACE, SORTED_ALONE = 4096, 1_000_000
"""Sort: rows up to the first length use no buffer; rows of at least the second length are sorted one by one."""
CHUNK = 65536
"""Elements per chunk in kernels over lists of tensors."""
BACKWARD = 1.5
"""Scratch of a convolution's backward, as a multiple of its operands' bytes (see `_convolution_backward`)."""


def scratch(func: Any, args: tuple[Any, ...], out: Any) -> int:
    """Return the bytes that the kernel of `func` holds beside its arguments and results."""
    rule = _RULES.get(func)
    return 0 if rule is None else rule(args, out)


def is_unknown(func: Any) -> bool:
    """Whether the operation allocates an amount that no rule predicts."""
    return func in UNKNOWN or func.namespace not in ("aten", "prims", "prim", "profiler")


def _flash_backward(args: Any, out: Any) -> int:
    """Float32 accumulators of query gradients, one number per row, and gradients of shared keys and values before their sum
    (transformers/cuda/flash_attn/flash_api.cpp, mha_bwd)."""
    _, query, key = args[:3]
    batch, heads, rows, head = query.shape
    rounded = _up(rows, 128)
    gathered = 4 * batch * heads * rounded * (_up(head, 32) if head <= 128 else _up(head, 64))
    shared = 2 * batch * heads * key.shape[2] * head * key.element_size() if heads != key.shape[1] else 0
    return gathered + 4 * batch * heads * rounded + shared


def _efficient(args: Any, out: Any) -> int:
    """For heads that do not fit into registers, the output accumulates in float32 (kNeedsOutputAccumulatorBuffer in
    mem_eff_attention/kernel_forward.h)."""
    query, value = args[0], args[2]
    gathers = query.dtype is not torch.float32 and _widest(query, value) > 128
    return 4 * query.shape[0] * query.shape[1] * query.shape[2] * value.shape[3] if gathers else 0


def _efficient_backward(args: Any, out: Any) -> int:
    """One sum per row, which float32 computes with separate operations first. Then query gradients by tile, and key and value
    gradients where heads do not fit into registers (transformers/cuda/attention_backward.cu, workspace_size in
    mem_eff_attention/kernel_backward.h). Tiles are those of data center cards since sm_80 (kernels/generate_kernels.py). Tiles
    of other cards round up to less, and cards with little shared memory accumulate more for heads above 64."""
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
    """Sorted indices, runs of equal indices, and a sum per run (cuda/Embedding.cu, cuda/EmbeddingBackwardKernel.cu)."""
    grad, indices, weights, padding = args[:4]
    count = indices.numel()
    if count <= DIRECT_INDICES and padding < 0:
        return 0
    segments = min(count, weights)
    runs = count // ROWS_PER_THREAD + segments
    width = grad.shape[-1]
    return 8 * (2 * count + 3 * segments + runs) + runs * width * max(4, grad.element_size())


def _index_put(args: Any, out: Any) -> int:
    """Accumulation needs the linear indices, their order, both sorted, and a second sort buffer. Broadcast values are expanded
    (index_put_with_sort_kernel in cuda/Indexing.cu)."""
    target, indices, values = args[:3]
    given = [i for i in indices if i is not None]
    if not (len(args) > 3 and args[3]) or not given or given[0].dtype is torch.bool:
        return 0
    count = torch.broadcast_shapes(*(i.shape for i in given)).numel()
    indexed = [target.shape[d] for d, i in enumerate(indices) if i is not None]
    spread = count * (target.numel() // max(1, torch.Size(indexed).numel()))
    return 6 * 8 * count + (spread * values.element_size() if values.numel() < spread else 0)


def _product_of_gradient_and_output(args: Any, out: Any) -> int:
    """`grad * output` is computed first (cuda/SoftMax.cu, softmax_backward_cuda_out)."""
    return args[0].numel() * args[0].element_size()


def _safe_softmax(args: Any, out: Any) -> int:
    """One byte per element for whether it is masked, and one per row for whether all of it is (_safe_softmax in SoftMax.cpp,
    torch 2.5 and later). Attention uses it where no fused kernel runs."""
    dim = args[1]
    return out.numel() + (out.numel() // out.shape[dim] if out.numel() else 0)


def _group_norm(args: Any, out: Any) -> int:
    """A scale and a shift per sample and channel (cuda/group_norm_kernel.cu)."""
    given, weight, bias, batch, channels, pixels = args[:6]
    return 0 if pixels == 1 or (weight is None and bias is None) else _exact(given) * 2 * batch * channels


def _group_norm_backward(args: Any, out: Any) -> int:
    """Per sample, two sums per channel; for the input gradient also two factors per group, and one per channel if there are
    weights (GroupNormBackwardKernelImplInternal in cuda/group_norm_kernel.cu)."""
    given, weight, batch, channels, pixels, groups = args[1], *args[4:9]
    found = 2 * channels if pixels > 1 else 0
    if args[9][0]:
        found += 2 * groups + (channels if weight is not None and pixels > 1 else 0)
    return _exact(given) * batch * found


def _layer_norm_backward(args: Any, out: Any) -> int:
    """Many short rows: partial sums of 32 rows each for weight and bias, in at most 32,768 warps
    (LaunchGammaBetaBackwardCUDAKernel in cuda/layer_norm_kernel.cu, torch 2.8 and later). How short they must be depends on the
    number of multiprocessors, assumed to be 108."""
    given, weight, mask = args[1], args[5], args[7]
    if weight is None or not any(mask[1:]):
        return 0
    width = weight.numel()
    rows = given.numel() // width
    if rows <= 65536 or width // 32 >= 108 // 2:
        return 0
    return min(32768 // _pieces(width, 32), _pieces(rows, 32)) * width * weight.element_size() * sum(mask[1:])


def _convolution(args: Any, out: Any) -> int:
    """cuDNN's tensor-core kernels compute in channels-last. They transpose other layouts into the workspace and back (NVIDIA,
    Convolutional Layers User's Guide, "Tensor layouts"): the input and the output. 1x1 convolutions are matrix products, and
    convolutions with one channel per group have their own kernels; neither transposes."""
    given, weight, groups = args[0], args[1], args[8]
    return _bytes(given) + _bytes(out) if _transposes(given, weight, groups) else 0


def _convolution_backward(args: Any, out: Any) -> int:
    """As in forward, with the output's gradient. Of the factors tried on 19 rows that others published, 1.5 has the least mean
    error (`benchmarks/prediction_timm.py`)."""
    grad, given, weight, groups = args[0], args[1], args[2], args[9]
    return int(BACKWARD * (_bytes(grad) + _bytes(given))) if _transposes(given, weight, groups) else 0


def _transposes(given: torch.Tensor, weight: torch.Tensor, groups: int) -> bool:
    window = weight.shape[2:].numel()
    last = given.dim() == 4 and given.is_contiguous(memory_format=torch.channels_last) and not given.is_contiguous()
    return window > 1 and groups < given.shape[1] and not last


def _sort(args: Any, out: Any) -> int:
    """Short rows are sorted in place. Long rows need initial indices, and a second buffer for keys and values. Fewer than 128
    rows are sorted as a whole, with the row number beside each index. Input that is not contiguous along `dim` is copied
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
    """Return the bytes of one accumulator for sums over the tensor."""
    return max(4, tensor.element_size())


def _foreach_norm(args: Any, out: Any) -> int:
    """One sum per chunk of each tensor, with as many chunks for all as the largest has (cuda/ForeachReduceOp.cu; kChunkSize in
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
