"""Predicts which kernel `scaled_dot_product_attention` runs on CUDA, and calls that kernel on fake tensors.

The rules follow aten/src/ATen/native/transformers/cuda/sdp_utils.cpp. torch prefers cuDNN's kernel on sm_90 and sm_100 since
cuDNN 9.15. That kernel returns and saves the same as flash attention, and is traced as flash attention.
Not covered: nested tensors; masks passed to kernels as their causal bias.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from memfit.kernels.target import Target

FLASH_HEAD, MASK_ALIGNMENT = 256, 16
_EXTENDS_SM86 = ((8, 6), (8, 9), (12, 0), (12, 1))


def kernel_of(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    causal: bool,
    grouped: bool,
    target: Target,
) -> str:
    """Return the kernel: "flash", "efficient" or "math"."""
    tensors = (query, key, value)
    if any(t.dim() != 4 for t in tensors) or len({t.dtype for t in tensors}) > 1 or 0 in (query.shape[2], key.shape[2]):
        return "math"
    if not _same_heads(query, key, value, grouped) or query.shape[0] != key.shape[0]:
        return "math"
    backends = torch.backends.cuda
    if backends.flash_sdp_enabled() and mask is None and _flash_runs(tensors, dropout, causal, target):
        return "flash"
    if backends.mem_efficient_sdp_enabled() and not grouped and _efficient_runs(tensors, target):
        return "efficient"
    return "math"


def attend(kernel: str, arguments: dict[str, Any]) -> torch.Tensor:
    """Run that kernel and return its output; `arguments` are those of `scaled_dot_product_attention`, by name."""
    query, key, value, mask = (arguments[name] for name in ("query", "key", "value", "attn_mask"))
    dropout, causal, scale = (arguments[name] for name in ("dropout_p", "is_causal", "scale"))
    if kernel == "flash":
        return _flash(query, key, value, dropout, causal, scale)
    if kernel == "efficient":
        recorded = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        bias = None if mask is None else _bias(mask, query, key)
        found = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, recorded, dropout, causal, scale=scale
        )
        return found[0]
    found = torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, mask, dropout, causal, None, scale=scale, enable_gqa=arguments["enable_gqa"]
    )
    return found[0]


def _same_heads(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, grouped: bool) -> bool:
    heads = {t.shape[1] for t in (query, key, value)}
    return len(heads) == 1 or (grouped and key.shape[1] == value.shape[1] and query.shape[1] % key.shape[1] == 0)


def _flash_runs(tensors: tuple[torch.Tensor, ...], dropout: float, causal: bool, target: Target) -> bool:
    query, key, _ = tensors
    head = query.shape[3]
    if target.capability < (8, 0) or query.dtype not in (torch.float16, torch.bfloat16):
        return False
    if {t.shape[3] for t in tensors} != {head} or head > FLASH_HEAD or any(t.stride(-1) != 1 for t in tensors):
        return False
    if causal and query.shape[2] != key.shape[2]:
        return False
    trained = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    return not (trained and target.capability in _EXTENDS_SM86 and (192 < head <= 224 or (head > 192 and dropout > 0)))


def _efficient_runs(tensors: tuple[torch.Tensor, ...], target: Target) -> bool:
    query, key, value = tensors
    half = query.dtype in (torch.float16, torch.bfloat16)
    if query.dtype not in (torch.float16, torch.float32, torch.bfloat16) or target.capability < (5, 0):
        return False
    if query.dtype is torch.bfloat16 and not target.has_bfloat16:
        return False
    tensor_cores = target.capability >= (8, 0) or (target.capability >= (7, 0) and half)
    alignment = max(4 if target.capability >= (8, 0) else 1, (8 if half else 4) if tensor_cores else 1)
    return query.shape[3] == key.shape[3] and query.shape[3] % alignment == 0 and value.shape[3] % alignment == 0


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float, causal: bool, scale: float | None
) -> torch.Tensor:
    head = query.shape[3]
    missing = -head % 8
    if missing:  # the kernel needs multiples of 8; torch pads (pad_last_dim in attention.cpp)
        scale = head**-0.5 if scale is None else scale
        query, key, value = (F.pad(t, (0, missing)) for t in (query, key, value))
    found = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout, causal, False, scale=scale)
    return found[0][..., :head] if missing else found[0]


def _bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Convert the mask for the memory-efficient kernel: additive, aligned, expanded to every head (preprocess_mask)."""
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    missing = -mask.shape[-1] % MASK_ALIGNMENT
    if missing:
        mask = F.pad(mask, (0, missing))[..., : mask.shape[-1]]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
