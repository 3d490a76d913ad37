"""Whole and parts are compared in full precision, and the script's settings come back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memfit
from memfit.equivalence.tolerances import FLOORS, MOST, TOLERANCE, floor_from, full_precision, last_bits_flipped

CPU = torch.device("cpu")
NEW = hasattr(torch._C, "_get_fp32_precision_getter")


def settings() -> list[object]:
    """What torch says of TF32, by every name that it has for it."""
    asked: list[Callable[[], object]] = [torch._C._get_cudnn_allow_tf32, torch._C._get_cublas_allow_tf32]
    asked.append(torch.get_float32_matmul_precision)
    if NEW:
        asked += [lambda op=op: torch._C._get_fp32_precision_getter("cuda", op) for op in ("all", "conv", "rnn", "matmul")]
    found: list[object] = []
    for ask in asked:
        try:
            found.append(ask())
        except RuntimeError:
            found.append("torch raises: old and new names are mixed")
    return found


def allowed() -> bool:
    """Whether anything may use TF32."""
    return any(value in (True, "tf32", "high", "medium") for value in settings())


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    torch._C._set_cudnn_allow_tf32(True)
    torch.set_float32_matmul_precision("highest")
    if NEW:
        for operation, value in (("conv", "tf32"), ("rnn", "tf32"), ("matmul", "none")):
            torch._C._set_fp32_precision_setter("cuda", operation, value)


def nothing() -> None:
    pass


def by_new_names() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.cudnn.conv.fp32_precision = "ieee"  # pyright: ignore


@pytest.mark.parametrize(
    "choose",
    [
        pytest.param(nothing, id="as torch comes"),
        pytest.param(lambda: torch.set_float32_matmul_precision("high"), id="matrix products"),
        pytest.param(lambda: torch._C._set_cudnn_allow_tf32(False), id="no convolutions"),
        pytest.param(by_new_names, id="new names", marks=pytest.mark.skipif(not NEW, reason="torch before 2.9")),
    ],
)
def test_nothing_uses_tf32_inside_and_the_settings_come_back(choose: Callable[[], None]) -> None:
    choose()
    before = settings()
    with full_precision(CPU):
        assert not allowed()
    assert settings() == before


def test_they_come_back_after_an_error() -> None:
    before = settings()
    with pytest.raises(ZeroDivisionError), full_precision(CPU):
        raise ZeroDivisionError
    assert settings() == before


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_what_comes_out_of_autocast_may_differ_by_as_much_as_that_rounds(dtype: torch.dtype | None) -> None:
    model = nn.Linear(2, 2)
    with full_precision(CPU) as arithmetic, nullcontext() if dtype is None else torch.autocast("cpu", dtype):
        model(torch.ones(1, 2))
    assert arithmetic.tolerance(torch.float32) == TOLERANCE[dtype or torch.float32]


@torch.library.custom_op("memfit_tests::product", mutates_args=())
def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A kernel that rounds by the number of samples, as those of an accelerator do."""
    return (x @ w) * (1 + 1.2e-7 * (len(x) % 3 > 0))


@product.register_fake
def _(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w


def _keep(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _back(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x, w = ctx.saved_tensors
    return grad @ w.T, x.T @ grad


product.register_autograd(_back, setup_context=_keep)


class Amplifying(nn.Module):
    """Its output moves `by` times as much as its weights do, relative to them; `mixing` lets the samples see each other."""

    def __init__(self, by: float, mixing: float = 0.0, *, owns: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w, self.by, self.mixing, self.owns = nn.Parameter(torch.randn(6, 3)), by, mixing, owns

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        out = torch.sin(self.by * product(x, self.w))
        out = out + self.mixing * out.mean(0).square()
        return out if y is None else F.mse_loss(out, y) * 2


class Counting(Amplifying):
    """Its output also depends on a buffer that each forward moves by the mean of its samples."""

    def __init__(self, by: float, mixing: float = 0.0, *, owns: bool) -> None:
        super().__init__(by, mixing, owns=owns)
        self.register_buffer("center", torch.zeros(6))

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        with torch.no_grad():
            before = self.center.clone()
            self.center.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return super().forward(x + before, y)


class Halved(Amplifying):
    """Its product is in half precision."""

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        out = x.bfloat16() @ self.w.bfloat16()
        return out if y is None else F.mse_loss(out, y)


def trained(model: Amplifying, x: torch.Tensor, y: torch.Tensor) -> memfit.Run:
    """A step in micro-batches of 3."""

    def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return model(*batch)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    if model.owns:
        run = memfit.wrap(model, optimizer, loss_fn=loss_fn, sample=(x, y), micro_batch=3)
        run.step((x, y))
        return run
    run = memfit.wrap(model, optimizer, micro_batch=3)
    model(x).square().sum().backward()
    return run


@pytest.mark.parametrize("owns", [True, False])
@pytest.mark.parametrize("kind", [Amplifying, Counting])
def test_what_a_model_makes_of_its_last_digits_is_no_mixing(kind: type[Amplifying], owns: bool) -> None:
    run = trained(kind(2e3, owns=owns), torch.randn(12, 6), torch.randn(12, 3))
    assert not any("two passes" in event.message for event in run.events)


@pytest.mark.parametrize("owns", [True, False])
def test_a_proof_that_is_loose_is_said_to_be(owns: bool) -> None:
    x, y = torch.randn(12, 6), torch.randn(12, 3)
    assert not any("proven to" in event.message for event in trained(Amplifying(1.0, owns=owns), x, y).events)
    run = trained(Halved(1.0, owns=owns), x, y)
    assert sum("proven to 6%" in event.message for event in run.events) == 1


@pytest.mark.parametrize("owns", [True, False])
def test_mixing_is_seen_where_a_model_makes_little_of_them(owns: bool) -> None:
    with pytest.raises(memfit.Refused, match="mixes samples"):
        trained(Amplifying(1.0, 1e-2, owns=owns), torch.randn(12, 6), torch.randn(12, 3))


@pytest.mark.parametrize("difference", [float("nan"), float("inf"), MOST])
def test_what_is_more_than_rounding_is_no_floor(difference: float) -> None:
    assert floor_from(difference) == 0.0 and floor_from(1e-4) == FLOORS * 1e-4


def test_bits_come_back_if_a_parameter_cannot_be_flipped() -> None:
    first, second = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(1).expand(3))
    before = first.detach().clone()
    with pytest.raises(RuntimeError), last_bits_flipped([first, second]):
        raise AssertionError
    assert torch.equal(first, before)
