"""Law 1 on a device, real or simulated: gradients with memfit are those of one whole batch, whatever the family, loss and mode.

Plans are fixed here; tests/gpu/test_cuda.py lets memfit plan.
"""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import wrapped
from torch.optim import SGD
from zoo import FAMILIES, Family
from zoo.losses import Variant, variants_for
from zoo.plain import relative_error
from zoo.sides import Loss, batches, built, of_logits, script_gradients, step_gradients, tolerance

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
