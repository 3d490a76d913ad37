"""Law 1 on a device, real or simulated: gradients with memfit are those of one whole batch, whatever the family, loss and mode.

Plans are fixed here; tests/gpu/test_cuda.py lets memfit plan.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import wrapped
from torch import Tensor, nn
from torch.optim import SGD
from zoo import FAMILIES, Family, first_batch
from zoo.losses import Variant, variants_for
from zoo.plain import Gradients, gradients_of, relative_error

from memfit import Run
from memfit.training.works import moved

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
DEVICES = [torch.device("cuda", index) for index in range(min(torch.cuda.device_count(), 2))]
"""The second one, where there is one, while the first is the current one."""
BATCHES = (12, 7)
QUICK = ("mlp", "gpt", "superres")
AT_ONCE = (("mlp", 0), ("mlp", 1), ("gpt", 0), ("lstm", 1))
MODES = ("accumulate", "replay", "step")

Loss = Callable[[nn.Module, Any], Tensor]


def built(family: Family, device: torch.device) -> nn.Module:
    for package in family.requires:
        pytest.importorskip(package)
    model = family.build(dtype=torch.float64).to(device)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
    return model


def batches(family: Family, device: torch.device) -> list[Any]:
    return [moved(first_batch(family, n, dtype=torch.float64, seed=i), device) for i, n in enumerate(BATCHES)]


def script_gradients(model: nn.Module, loss: Loss, data: list[Any]) -> list[Gradients]:
    """What an ordinary loop leaves after each batch."""
    found = []
    for batch in data:
        model.zero_grad()
        loss(model, batch).backward()
        found.append(gradients_of(model))
    return found


def step_gradients(run: Run, data: list[Any]) -> list[Gradients]:
    found = []
    for batch in data:
        run.step(batch)
        found.append(gradients_of(run.model))
    return found


def error(family: Family, loss: Loss, mode: str, device: torch.device) -> float:
    """The largest relative error of a batch's gradients, in micro-batches of 5."""
    model, data = built(family, device), batches(family, device)
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


def tolerance(family: Family) -> float:
    return 1e-6 if family.name == "t5" else 1e-12  # T5's softmax runs in float32 whatever its parameters are


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


def of_logits(family: Family, variant: Variant, mode: str) -> Loss:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        logits = family.logits(model, batch)
        if mode == "replay":
            logits.detach().sum()  # whoever reads the output before the loss gets it, and its gradient by replay
        return variant.loss(logits, batch)

    return loss


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
