"""Predicts what convolutions hold on the CPU beside their input and output tensors.

oneDNN copies weights, and tensors that are not channels-last, into blocks of 16 channels. In half precision, weight gradients
accumulate in float32 first. Where torch does not use oneDNN for a convolution (float64, a single small image, oneDNN disabled),
it unfolds the images. Figures are for processors with AVX-512, measured operation by operation (peak resident memory).
Not covered: other libraries' kernels, dilated or transposed convolutions without oneDNN, partial sums of many threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

BLOCK = 16
"""Channels are padded to a multiple of this."""
FEW, FEWEST = 8, 4
"""Input channels up to which float32 uses blocks of half the width, and below which it does not copy the images."""
WIDE = 4
"""Depthwise kernels of at least this width run in a separate implementation: 3 does not, 5 and 7 do."""
_ONEDNN = ("Mkldnn", "MkldnnTranspose", "???")
"""torch's names for oneDNN's backends. "???" is the transposed one, left unnamed by python_enum (torch/csrc/Module.cpp)."""
_HALF = (torch.bfloat16, torch.float16)
_ATEN = torch.ops.aten


def stages(func: Any, args: tuple[Any, ...], out: Any) -> tuple[int, ...]:
    """Return the bytes that one CPU operation holds beside its arguments and results, per stage; empty for most operations.

    Each grows linearly with the samples; which one is the largest may change.
    """
    if func is _ATEN.convolution.default:
        call = _Call.of(args[0], args[1], args[3:9])
        return _forward(call, out)
    if func is _ATEN.convolution_backward.default:
        call = _Call.of(args[1], args[2], args[4:10])
        return _backward(call, args[0], args[10])
    return ()


@dataclass(frozen=True)
class _Call:
    """A convolution, and how torch runs it."""

    x: torch.Tensor
    weight: torch.Tensor
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    transposed: bool
    groups: int
    by_onednn: bool
    unfolds: bool
    """Whether torch unfolds the images into patches."""
    layout: torch.memory_format
    """The memory format to which operands are converted first, if they do not have it."""

    @staticmethod
    def of(x: torch.Tensor, weight: torch.Tensor, options: tuple[Any, ...]) -> _Call:
        stride, padding, dilation, transposed, beyond, groups = options
        backend = torch._C._select_conv_backend(x, weight, None, stride, padding, dilation, transposed, beyond, groups, None)
        layout = torch.contiguous_format
        if x.dim() > 3:  # the images of a 1d convolution have a height of 1
            layout = torch._C._conv_determine_backend_memory_format(x, weight, backend)
        unfolds = backend.name == "Slow2d" and groups == 1
        return _Call(x, weight, tuple(stride), tuple(padding), transposed, groups, backend.name in _ONEDNN, unfolds, layout)

    @property
    def channels_last(self) -> bool:
        return self.layout in (torch.channels_last, torch.channels_last_3d)

    @property
    def half(self) -> bool:
        return self.x.dtype in _HALF

    @property
    def depthwise(self) -> bool:
        return self.groups > 1 and self.weight.shape[0] == self.groups

    @property
    def points(self) -> int:
        """Kernel elements per pair of channels."""
        return self.weight.shape[2:].numel()

    @property
    def wide(self) -> bool:
        return self.depthwise and self.weight.shape[-1] >= WIDE

    def ordered(self, tensor: torch.Tensor) -> int:
        """Return the bytes of the copy that converts an operand to the layout; 0 if it has it."""
        return 0 if tensor.is_contiguous(memory_format=self.layout) else _size(tensor)

    def blocked(self, tensor: torch.Tensor) -> int:
        """Return the bytes of images in blocks of channels; 0 if they are not copied."""
        return 0 if self.channels_last else _filled(tensor, BLOCK)

    def blocked_input(self) -> int:
        channels = self.x.shape[1]
        if self.transposed or self.groups > 1 or self.points == 1 or channels >= BLOCK:
            return self.blocked(self.x)
        if self.channels_last or self.half or channels < FEWEST:
            return 0
        return _filled(self.x, FEW if channels <= FEW else BLOCK)

    def blocked_weights(self) -> int:
        first, second = self.weight.shape[:2]
        if self.depthwise and not (self.wide and self.channels_last):
            return _size(self.weight)
        if not self.transposed:
            first //= self.groups
        elements = (1 if self.transposed else self.groups) * _up(first) * _up(second) * self.points
        return elements * self.weight.element_size()


def _forward(call: _Call, out: torch.Tensor) -> tuple[int, ...]:
    """Stages of forward: computing on copies, then reordering the result."""
    if not call.by_onednn:
        return (_patches(call, out),) if call.unfolds else ()
    copies = call.ordered(call.x) + call.ordered(call.weight)
    weights = 0 if call.depthwise and call.channels_last else call.blocked_weights()
    made = call.blocked(out)
    back = made * (2 if call.transposed and max(call.stride) > 1 else 1)
    return copies + weights + call.blocked_input() + max(0, made - _size(out)), copies + back


def _backward(call: _Call, gradient: torch.Tensor, wanted: Any) -> tuple[int, ...]:
    """Stages of backward: the image gradient, accumulating the weight gradient, and reordering it."""
    if not call.by_onednn:
        return (_patches(call, gradient),) if call.unfolds else ()
    copies = call.ordered(gradient) + call.ordered(call.x) + call.ordered(call.weight)
    weights, own = call.blocked_weights(), _size(call.weight)
    found: list[int] = []
    if wanted[0]:
        more = max(0, call.blocked(call.x) - _size(call.x)) - (own if wanted[1] else 0)
        used = 0 if call.depthwise and call.channels_last else weights
        found.append(copies + call.blocked(gradient) + used + more)
    if wanted[1]:
        found += _weights_gradient(call, gradient, copies, weights, own)
    return tuple(found)


def _weights_gradient(call: _Call, gradient: torch.Tensor, copies: int, weights: int, own: int) -> tuple[int, int]:
    if (call.depthwise and not call.wide) or (call.wide and not call.channels_last):
        moved = 0 if call.wide else call.blocked(gradient) + call.blocked(call.x)
        return copies + moved, copies
    gathered = weights + (2 * weights if call.half else 0) - own
    moved = call.blocked(gradient) + call.blocked_input()
    back = own if call.channels_last and not call.depthwise else 0
    return copies + moved + _turned(call, gradient) + gathered, copies + weights + back


def _turned(call: _Call, gradient: torch.Tensor) -> int:
    """In half precision, every thread transposes the images it works on, to multiply pairs of neighbors. Threads divide the
    groups among themselves first."""
    few = call.x.shape[1] < BLOCK
    if not call.half or call.channels_last or call.transposed or call.points == 1 or few or not len(call.x):
        return 0
    images = max(1, torch.get_num_threads() // call.groups)
    return min(images, len(call.x)) * ((call.blocked(call.x) + call.blocked(gradient)) // len(call.x))


def _patches(call: _Call, out: torch.Tensor) -> int:
    if call.points == 1 and max(call.stride) == 1 and not any(call.padding):
        return 0
    return call.x.shape[0] * call.weight.shape[1] * call.points * out.shape[2:].numel() * out.element_size()


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _filled(tensor: torch.Tensor, block: int) -> int:
    """Return the bytes of images with their channels padded to whole blocks."""
    return _size(tensor) // max(1, tensor.shape[1]) * _up(tensor.shape[1], block)


def _up(channels: int, block: int = BLOCK) -> int:
    return -(-channels // block) * block
