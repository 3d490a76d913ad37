"""The loss scale while gathering in float16: no overflow of ours is handed over, and one of the gradient's own is."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import wrapped
from torch import Tensor, nn
from torch.optim import SGD
from zoo.plain import Gradients, gradients_of, relative_error

from memfit.runtime.loss_scale import SMALLEST, START

Batch = tuple[Tensor, Tensor]


def half_model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(7, 3).half()


def batch(inputs: float, slope: float) -> Batch:
    """Inputs of about that size, and the gradient of each output."""
    generator = torch.Generator().manual_seed(1)
    return inputs * torch.randn(12, 7, generator=generator), slope * (1 + torch.rand(12, 3, generator=generator))


def steep(model: nn.Module, samples: Batch) -> Tensor:
    """A loss whose gradient with respect to the model's outputs is `samples[1]`."""
    x, slopes = samples
    return (model(x.to(model.weight.dtype)).float() * slopes).sum()  # type: ignore[arg-type]


def wanted(samples: Batch) -> Gradients:
    """The gradient in float64, where nothing overflows."""
    model = half_model().double()
    steep(model, samples).backward()
    return {"weight": gradients_of(model)["weight"]}


def taken(samples: list[Batch]) -> tuple[list[Gradients], list[float]]:
    """The weight's gradient after each batch, and the scale in use then."""
    model = half_model()
    optimizer = SGD(model.parameters(), lr=0.0)
    run = wrapped(model, 5, optimizer=optimizer, loss_fn=steep)
    assert run._core is not None
    gradients, scales = [], []
    for one in samples:
        run.step(one)
        gradients.append({"weight": gradients_of(model)["weight"]})
        scales.append(run._core.accumulator.scale.scale)
    return gradients, scales


def overflows_plain(samples: Batch) -> bool:
    model = half_model()
    steep(model, samples).backward()
    return not bool(torch.isfinite(gradients_of(model)["weight"]).all())  # type: ignore[arg-type]


def test_gradients_that_overflow_at_a_scale_of_one_are_gathered_below_it() -> None:
    """On the way they are larger than float16 holds; in the end they are not."""
    samples = batch(1e-3, 1e6)
    assert overflows_plain(samples)
    (got,), (scale,) = taken([samples])
    assert relative_error(got, wanted(samples)) < 2e-2
    assert SMALLEST <= scale < 1.0


def test_ordinary_gradients_are_gathered_at_the_first_scale_that_holds_them() -> None:
    samples = batch(1.0, 1.0)
    (got, again), scales = taken([samples, samples])
    assert relative_error(got, wanted(samples)) < 2e-2 and relative_error(again, wanted(samples)) < 2e-2
    assert scales[0] == scales[1] and 1.0 < scales[0] <= START


def test_a_gradient_that_is_itself_too_large_is_handed_over_as_it_is() -> None:
    """And the next batch is gathered as if it had not been."""
    good, bad = batch(1.0, 1.0), batch(1e3, 1e6)
    (_, huge, after), scales = taken([good, bad, good])
    assert not torch.isfinite(huge["weight"]).all()  # type: ignore[arg-type]
    assert relative_error(after, wanted(good)) < 2e-2
    assert scales[2] <= scales[0]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_no_reason_to_run_again(value: float) -> None:
    good = batch(1.0, 1.0)
    bad = (good[0], torch.full_like(good[1], value))
    (_, broken, after), scales = taken([good, bad, good])
    assert not torch.isfinite(broken["weight"]).all()  # type: ignore[arg-type]
    assert scales[0] == scales[1] == scales[2]
    assert relative_error(after, wanted(good)) < 2e-2


FACTOR = 2.0**16
"""The scale that a script's GradScaler begins with."""


class Casting(nn.Module):
    """Casts by itself, as a model does that accelerate prepared."""

    def __init__(self, *, own: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.own = nn.Linear(7, 3), own

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16, enabled=self.own or torch.is_autocast_enabled("cpu")):
            return self.layer(x)


@pytest.mark.parametrize("where", ["model", "call", "loss_fn", "model, loss_fn"])
def test_small_gradients_survive_wherever_autocast_is_entered(where: str) -> None:
    """At a scale of one float16 holds nothing of them."""
    samples = batch(1.0, 1e-9)
    model = Casting(own="model" in where)
    x, slopes = samples

    def loss_fn(model: nn.Module, samples: Batch) -> Tensor:
        with torch.autocast("cpu", torch.float16, enabled=where == "loss_fn"):
            out = model(samples[0])
        return (out.float() * samples[1]).sum()

    plain = Casting(own=False)
    (plain(x) * slopes).sum().backward()
    want = plain.layer.weight.grad
    assert want is not None
    run = wrapped(model, 5, optimizer=SGD(model.parameters(), lr=0.0), loss_fn=loss_fn if "loss_fn" in where else None)
    for _ in range(3):
        model.zero_grad()
        if "loss_fn" in where:
            run.step(samples)
        else:
            with torch.autocast("cpu", torch.float16, enabled=where == "call"):
                out = model(x)
            ((out.float() * slopes).sum() * FACTOR).backward()
        got = {"weight": model.layer.weight.grad}
        assert relative_error(got, {"weight": want * (1.0 if "loss_fn" in where else FACTOR)}) < 2e-2
