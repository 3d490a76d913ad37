"""How far two results differ, and how far they may."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.engine.suspended_autocast import autocast_is_off, stays_on

TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-4, torch.bfloat16: 6e-2, torch.float16: 2e-2}
"""Relative difference up to which whole and parts count as equal. Rounding of two summation orders stays an order of magnitude
below, mixing of samples lies above. float64 models often compute a softmax or a loss in float32 internally."""

SOME = 1 << 17
"""Elements compared at a time: 1 MiB in float64."""


@dataclass(frozen=True)
class Deviation:
    """How far parts deviate from the whole."""

    where: str
    """The output or module that deviates most."""
    relative: float
    """Relative L2 difference."""
    limit: float
    """Tolerance: the largest difference that counts as equal."""
    others: tuple[str, ...] = ()
    """Other outputs or modules that deviate by more than their limit."""
    by: Literal["mixing", "backward", "inner", "moving", "reading", "counting"] = "mixing"
    """The cause: samples mix (`mixing`), only gradients differ (`backward`), the forward runs a
    backward of its own (`inner`), parts move state differently (`moving`), or code branches on values that it reads off
    the batch (`reading`) or on the number of samples (`counting`)."""

    @property
    def agrees(self) -> bool:
        """Whether parts and whole count as equal."""
        return self.relative <= self.limit


def relative_difference(wanted: torch.Tensor, made: torch.Tensor) -> float:
    """Return the relative L2 difference: infinity if shapes differ, NaN if NaNs are in different places."""
    if wanted.shape != made.shape:
        return float("inf")
    squares = norm = 0.0
    for a, b in in_double(wanted, made):
        same = (a == b) | (a.isnan() & b.isnan())
        difference = torch.where(same, torch.zeros_like(a), a - b)  # equal infinities (masks) do not differ
        squares += float(difference.square().sum())
        norm += float(torch.where(a.isfinite(), a, torch.zeros_like(a)).square().sum())
    return math.sqrt(squares) / max(math.sqrt(norm), 1e-30)


def in_double(*tensors: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Yield the entries of same-shape tensors in float64, in chunks: all at once would take more memory than the tensors."""
    flat = [tensor.detach().reshape(-1) for tensor in tensors]
    for at in range(0, max(1, flat[0].numel()), SOME):
        yield [tensor[at : at + SOME].double() for tensor in flat]


def tolerance(dtype: torch.dtype) -> float:
    """Return the relative difference up to which tensors of this precision count as equal."""
    return TOLERANCE.get(dtype, TOLERANCE[torch.float32])


_HALF = (torch.bfloat16, torch.float16)
FLOORS = 4.0
"""Multiples of the floor (what the last bits of parameters change) that count as rounding, as errors of several summation
orders add up."""
MOST = 5e-2
"""The floor raises the tolerance up to this. Beyond it counts for nothing: mixing could not be told from it."""


@contextmanager
def last_bits_flipped(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Flips the last bit of parameters inside, and restores them exactly. Kernels for other numbers of samples round as much.
    Deep models may make more of it: near a ReLU's edge, or in a softmax that saturates."""
    bits = {torch.float32: torch.int32, torch.float64: torch.int64}
    flipped: list[torch.Tensor] = []
    try:
        for p in parameters:
            if p.dtype in bits and p.layout is torch.strided:
                flipped.append(p.data.view(bits[p.dtype]).bitwise_xor_(1))
        yield
    finally:
        for view in flipped:
            view.bitwise_xor_(1)


def floor_from(difference: float) -> float:
    """Return the tolerance that follows from what the last bits of the parameters change, relative: 0 if that is more than
    rounding (a branch that flips, NaN)."""
    return FLOORS * difference if FLOORS * difference <= MOST else 0.0


LOOSE = 1e-2
"""Minimum tolerance of a proof that is reported to the user."""


def note_loose(limit: float, note: Callable[[str, str], None]) -> None:
    """Records that a proof has this tolerance if a user should know."""
    if limit >= LOOSE:
        why = "the model or its loss computes in half precision, or multiplies rounding"
        note("note", f"{why}: sample independence is proven to {limit:.0%} only")


class Arithmetic(TorchDispatchMode):
    """The precision in which a forward computed: kernels for other numbers of samples round differently, and a float32 tensor
    may come out of autocast, or of a cast of the model's own."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._low: set[torch.dtype] = set()
        self._thread = threading.get_ident()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch imports dynamo

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, (list, tuple)) else (out,):
            if isinstance(each, torch.Tensor) and each.dtype in _HALF:
                self._low.add(each.dtype)
        return out

    def tolerance(self, dtype: torch.dtype) -> float:
        """Return the relative difference up to which tensors of this dtype count as equal."""
        return max(tolerance(dtype), *(tolerance(low) for low in self._low), 0.0)

    def note(self, kinds: tuple[str, ...]) -> None:
        """Note the precision in which a module is about to compute, or have it compute in that of its parameters."""
        if threading.get_ident() != self._thread:
            return
        for kind in kinds:
            if torch.is_autocast_enabled(kind) and not stays_on():
                torch.set_autocast_enabled(kind, False)  # until the script leaves the context that enabled it
        self._low.update(torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind))


def is_dtype_of(dtype: torch.dtype, found: torch.dtype) -> bool:
    """Whether a result of this dtype is one of `dtype`. Without autocast results have more bits."""
    return dtype == found or (dtype.is_floating_point and found.is_floating_point and autocast_is_off())


@contextmanager
def full_precision(device: torch.device) -> Iterator[Arithmetic]:
    """Computes float32 products in float32 inside, whatever the script allows. TF32 keeps 10 bits and rounds differently for
    another number of samples, which would look like mixing (on an H100: a U-Net's convolutions, by more than 2e-4). Yields what
    modules computed in. The script's settings are restored on exit."""
    arithmetic, kinds = Arithmetic(), tuple(dict.fromkeys((device.type, "cpu")))
    with ExitStack() as stack:
        stack.callback(_with_products("highest"))
        stack.callback(_without_cudnn_tf32())
        hook = nn.modules.module.register_module_forward_pre_hook(lambda module, args: arithmetic.note(kinds))
        stack.callback(hook.remove)
        stack.enter_context(arithmetic)
        yield arithmetic


def _with_products(precision: str) -> Callable[[], Any]:
    """Sets the precision of float32 matrix products; returns a function that restores it."""
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # the script has set it by torch.backends.cuda.matmul.fp32_precision
        return _without_tf32("matmul")
    if before == precision:
        return _nothing
    torch.set_float32_matmul_precision(precision)
    return lambda: torch.set_float32_matmul_precision(before)


def _without_cudnn_tf32() -> Callable[[], Any]:
    """Lets cuDNN compute without TF32; returns a function that restores it. Not by `torch.backends.cudnn.allow_tf32`, which a
    script may have frozen."""
    try:
        allowed = torch._C._get_cudnn_allow_tf32()
    except RuntimeError:  # the script has set convolutions and recurrent networks apart
        undo = [_without_tf32(operation) for operation in ("conv", "rnn")]
        return lambda: [restore() for restore in undo]
    if not allowed:
        return _nothing
    torch._C._set_cudnn_allow_tf32(False)
    return lambda: torch._C._set_cudnn_allow_tf32(True)


def _without_tf32(operation: str) -> Callable[[], Any]:
    """By the settings of torch 2.9 and later, which have one for each operation."""
    before = torch._C._get_fp32_precision_getter("cuda", operation)
    if before in ("none", "ieee"):
        return _nothing
    torch._C._set_fp32_precision_setter("cuda", operation, "ieee")
    return lambda: torch._C._set_fp32_precision_setter("cuda", operation, before)


def _nothing() -> None:
    pass
