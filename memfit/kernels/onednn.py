"""What oneDNN's kernels hold on the CPU beside the tensors that go in and come out.

A convolution copies its weights, and inputs that are not channels-last, into blocks of 16 channels; in backward the gradients
of half precision weights gather in float32 first. Figures are those of processors with AVX-512, measured operation by operation
(peak of resident memory): within 5 % above 1 MiB. Not covered: other libraries' kernels, float64, where torch unfolds inputs.
"""

from __future__ import annotations

from typing import Any

import torch

BLOCK = 16
"""Channels are filled up to multiples of this."""
TURNED = 1.5
"""In half precision, weights' gradients are computed from inputs that are turned as well, in parts."""
_HALF = (torch.bfloat16, torch.float16)
_ATEN = torch.ops.aten


def stages(func: Any, args: tuple[Any, ...], out: Any) -> tuple[int, ...]:
    """Bytes that one operation on the CPU holds beside arguments and results, in each of its stages; for most there is none.

    Each grows evenly with the samples; which of them is the largest may change.
    """
    if func is _ATEN.convolution.default and _is_onednn(args[0], args[1]):
        return _forward(args[0], args[1], args[6], args[8], out)
    if func is _ATEN.convolution_backward.default and _is_onednn(args[1], args[2]):
        return _backward(args[0], args[1], args[2], args[9])
    return ()


def _forward(x: torch.Tensor, weight: torch.Tensor, transposed: bool, groups: int, out: torch.Tensor) -> tuple[int, ...]:
    """Computing on copies, then putting the result back in order."""
    last = _channels_last(x)
    given, made = (0, 0) if last else (_blocked(x), _blocked(out))
    weights = _size(weight) if _is_depthwise(weight, groups) else _blocked_weights(weight, groups, transposed)
    if last and not _is_depthwise(weight, groups):
        weights += _size(weight)
    return (weights + 2 * made,) if transposed else (weights + given, made)


def _backward(gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, groups: int) -> tuple[int, ...]:
    """Gathering the gradient of the weights, then putting it back in order; that of the inputs takes no more."""
    last, half = _channels_last(x), x.dtype in _HALF
    moved = 0 if last else _blocked(gradient) + _blocked(x)
    blocked = _blocked_weights(weight, groups, False)
    gathered = blocked + (2 * blocked if half else 0) - _size(weight)
    own = _size(weight) if last and not _is_depthwise(weight, groups) else 0
    return int((TURNED if half else 1.0) * moved) + gathered + own, blocked + own


def _is_onednn(x: torch.Tensor, weight: torch.Tensor) -> bool:
    kinds = x.dtype in (torch.float32, *_HALF) and weight.dtype is x.dtype
    return kinds and torch.backends.mkldnn.enabled and torch.backends.mkldnn.is_available() and weight.dim() in (4, 5)


def _is_depthwise(weight: torch.Tensor, groups: int) -> bool:
    return groups > 1 and weight.shape[0] == groups


def _channels_last(x: torch.Tensor) -> bool:
    kind = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    return x.is_contiguous(memory_format=kind) and not x.is_contiguous()


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _blocked(tensor: torch.Tensor) -> int:
    return _size(tensor) // max(1, tensor.shape[1]) * _filled(tensor.shape[1])


def _blocked_weights(weight: torch.Tensor, groups: int, transposed: bool) -> int:
    first, second = weight.shape[0], weight.shape[1]
    first, second = (first, second) if transposed else (first // groups, second)
    elements = (1 if transposed else groups) * _filled(first) * _filled(second) * weight[0, 0].numel()
    return elements * weight.element_size()


def _filled(channels: int) -> int:
    return -(-channels // BLOCK) * BLOCK
