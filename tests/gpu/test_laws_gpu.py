"""Law 1 on a device, real or simulated: gradients with memfit are those of one whole batch, whatever the family, loss and mode.

Plans are fixed here; tests/gpu/test_cuda.py lets memfit plan.
"""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import mlp, wrapped
from torch import Tensor, nn
from torch.optim import SGD
from zoo import FAMILIES, Family
from zoo.losses import Variant, variants_for
from zoo.plain import relative_error
from zoo.sides import Loss, batches, built, of_logits, script_gradients, step_gradients, tolerance

import memfit

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
DEVICES = [torch.device("cuda", index) for index in range(min(torch.cuda.device_count(), 2))]
"""The second one, where there is one, while the first is the current one."""
QUICK = ("mlp", "gpt", "superres")
AT_ONCE = (("mlp", 0), ("mlp", 1), ("gpt", 0), ("lstm", 1))
MODES = ("accumulate", "replay", "step")


def error(family: Family, loss: Loss, mode: str, device: torch.device) -> float:
    """The largest relative error of a batch's gradients, in micro-batches of 5."""
    model, data = built(family, device=device), batches(family, device=device)
    want = script_gradients(copy.deepcopy(model), loss, data)
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    if mode == "step":
        got = step_gradients(wrapped(model, 5, optimizer=optimizer, loss_fn=loss, fields={"device": str(device)}), data)
    else:
        wrapped(model, 5, optimizer=optimizer, fields={"device": str(device)})
        got = script_gradients(model, loss, data)
    assert all(any(g is not None and g.any() for g in gradients.values()) for gradients in want)
    assert all(g is None or g.device == device for gradients in got for g in gradients.values())
    return max(relative_error(one, other) for one, other in zip(got, want, strict=True))


@pytest.mark.parametrize("mode", ["script", "step"])
@pytest.mark.parametrize(
    ("name", "device"),
    [
        pytest.param(name, device, id=f"{name}-{device}", marks=() if (name, i) in AT_ONCE else pytest.mark.slow)
        for name in FAMILIES
        for i, device in enumerate(DEVICES)
    ],
)
def test_the_familys_own_loss(name: str, mode: str, device: torch.device) -> None:
    family = FAMILIES[name]
    assert error(family, family.script_loss, mode, device) <= tolerance(family)


def quick(family: Family, i: int, at: int) -> bool:
    return family.name in QUICK and i % len(MODES) == at


EVERY = [(family, variant) for family in FAMILIES.values() for variant in variants_for(family)]


@pytest.mark.parametrize(
    ("family", "variant", "mode"),
    # Each loss of a quick family in one of the modes; the others are slow.
    [
        pytest.param(f, v, mode, id=f"{mode}-{f.name}-{v.name}", marks=() if quick(f, i, at) else pytest.mark.slow)
        for i, (f, v) in enumerate(EVERY)
        for at, mode in enumerate(MODES)
    ],
)
def test_every_loss(family: Family, variant: Variant, mode: str) -> None:
    assert error(family, of_logits(family, variant, mode), mode, DEVICES[0]) <= tolerance(family)


class Flooded(nn.Module):
    """Its output, or its own loss, has a limit of what the samples make together."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.net, self.own = mlp(), own

    def forward(self, x: Tensor) -> Tensor:
        h = self.net(x)
        return h.square().mean().clamp(min=0.2) + h.sum(1).mean() if self.own else h / h.abs().max().clamp(min=0.6)


@pytest.mark.parametrize("own", [False, True])
def test_a_batch_across_a_limit_runs_whole(own: bool) -> None:
    torch.manual_seed(5)
    model = Flooded(own).to(DEVICES[0])
    plain = copy.deepcopy(model)
    run = memfit.wrap(model, SGD(model.parameters(), lr=0.0), micro_batch=4)
    for large in (1, 400):
        x = 0.1 * torch.randn(12, 7, device=DEVICES[0]).double()
        x[8:] *= large
        for each in (plain, model):
            each.zero_grad()
            each(x).square().mean().backward()
        got, want = ({name: p.grad for name, p in each.named_parameters()} for each in (model, plain))
        assert relative_error(got, want) <= 1e-12
    assert sum("a batch runs whole" in event.message for event in run.events) == 1
