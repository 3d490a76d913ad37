"""Models of kernels that only CUDA has: what they return, save for backward, and allocate in backward.

They compute nothing and are for fake tensors only. Not covered: double backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch

KERNEL: ContextVar[str] = ContextVar("memfit_kernel", default="")
"""The kernel whose allocations are being modeled; "" outside of one."""


def _called(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Mark a function as the model of the kernel of that name."""

    def named(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any) -> Any:
            token = KERNEL.set(name)
            try:
                return function(*args)
            finally:
                KERNEL.reset(token)

        return run

    return named


class FusedRMSNorm(torch.autograd.Function):
    """Models `rms_norm` as one kernel, which saves its input and one float32 (float64 for float64) per row
    (aten/src/ATen/native/cuda/layer_norm_kernel.cu, `_fused_rms_norm_cuda`)."""

    @staticmethod
    @_called("_fused_rms_norm")
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor | None, normalized: int) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        rows = input.shape[: input.dim() - normalized]
        rstd = torch.empty((*rows, *[1] * normalized), dtype=_statistics_of(input), device=input.device)
        ctx.save_for_backward(input, weight, rstd)
        return torch.empty_like(input)

    @staticmethod
    @_called("_fused_rms_norm_backward")
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        input, weight, _ = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return (
            torch.empty_like(input) if wanted[0] else None,
            torch.empty_like(weight) if wanted[1] else None,
            None,
        )


class SoftmaxToFloat(torch.autograd.Function):
    """Models softmax or log_softmax of a half-precision tensor in float32 as one kernel (`half_to_float` in
    aten/src/ATen/native/cuda/SoftMax.cu)."""

    @staticmethod
    @_called("_softmax")
    def forward(ctx: Any, input: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        out = torch.empty_like(input, dtype=torch.float32)
        ctx.half = input.dtype
        ctx.save_for_backward(out)
        return out

    @staticmethod
    @_called("_softmax_backward_data")
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (out,) = ctx.saved_tensors
        return torch.empty_like(out, dtype=ctx.half)


class CudnnRNN(torch.autograd.Function):
    """Models a recurrent network as one cuDNN call. The content of its reserve space is internal to cuDNN. It is assumed to
    hold the gates and the states of every layer, direction and step, which cuDNN's interface has to keep for backward."""

    GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}

    @staticmethod
    @_called("_cudnn_rnn")
    def forward(ctx: Any, kind: str, hidden: int, layers: int, directions: int, input: torch.Tensor, *rest: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        rows = input.shape[0] * input.shape[1]
        states = 2 if kind == "lstm" else 1
        kept = rows * layers * directions * hidden * (CudnnRNN.GATES[kind] + states)
        reserve = torch.empty(kept * input.element_size(), dtype=torch.uint8, device=input.device)
        out = input.new_empty((*input.shape[:2], hidden * directions))
        last = [torch.empty_like(state) for state in rest[:states]]
        ctx.states = states
        ctx.save_for_backward(input, out, reserve, *rest)
        return (out, *last)

    @staticmethod
    @_called("_cudnn_rnn_backward")
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        input, _, _, *rest = ctx.saved_tensors
        wanted = ctx.needs_input_grad[4:]
        made = [torch.empty_like(t) if needed else None for t, needed in zip((input, *rest), wanted)]
        return (None, None, None, None, *made)


def _statistics_of(input: torch.Tensor) -> torch.dtype:
    return torch.float32 if input.dtype in (torch.float16, torch.bfloat16) else input.dtype
