"""Whole and parts are compared in full precision, and the script's settings come back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from memfit.equivalence.tolerances import TOLERANCE, full_precision

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
