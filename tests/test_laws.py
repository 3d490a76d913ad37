"""Law 1, transparency, over levers x models: gradients with memfit are the gradients of one whole batch.

The plans are fixed, so that a failure is the engine's and not the planner's; `test_planned_*` let memfit plan. Families that
normalise by batch statistics run with those frozen: what they couple is the one accepted exception.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers import fixed_plan, wrapped
from pairwise import marked
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader
from zoo import FAMILIES, Family, first_batch
from zoo.losses import Variant, variants_for
from zoo.plain import Gradients, optimizer_and_schedule, relative_error, train_plain
from zoo.sides import Loss, batches, built, of_logits, script_gradients, step_gradients, tolerance

import memfit


def named(families: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("family", [pytest.param(family, id=family.name) for family in families])


@pytest.fixture(autouse=True)
def required(request: pytest.FixtureRequest) -> None:
    """Skips families whose packages are not here."""
    callspec = getattr(request.node, "callspec", None)
    family = callspec.params.get("family") if callspec else None
    for package in family.requires if family else ():
        pytest.importorskip(package)


def worst(got: list[Gradients], want: list[Gradients]) -> float:
    assert all(any(g is not None and g.any() for g in gradients.values()) for gradients in want)
    return max(relative_error(a, b) for a, b in zip(got, want, strict=True))


def frozen_rate(model: nn.Module) -> SGD:
    return SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)


def compare(family: Family, loss: Loss, mode: str) -> float:
    model, data = built(family), batches(family)
    want = script_gradients(copy.deepcopy(model), loss, data)
    if mode == "step":
        return worst(step_gradients(wrapped(model, 5, optimizer=frozen_rate(model), loss_fn=loss), data), want)
    wrapped(model, 5)
    return worst(script_gradients(model, loss, data), want)


@named(FAMILIES.values())
@pytest.mark.parametrize("mode", ["script", "step"])
def test_the_familys_own_loss(family: Family, mode: str) -> None:
    assert compare(family, family.script_loss, mode) <= tolerance(family)


EVERY = [(f, v, mode) for f in FAMILIES.values() for v in variants_for(f) for mode in ("accumulate", "replay", "step")]


@pytest.mark.parametrize(
    ("family", "variant", "mode"),
    marked(
        [pytest.param(f, v, mode, id=f"{mode}-{f.name}-{v.name}") for f, v, mode in EVERY],
        [(f.name, v.name, mode) for f, v, mode in EVERY],
    ),
)
def test_every_loss_in_every_mode(family: Family, variant: Variant, mode: str) -> None:
    assert compare(family, of_logits(family, variant, mode), mode) <= tolerance(family)


@pytest.mark.parametrize(
    ("family", "mode"),
    # Each family in one mode; in the other one it is slow.
    [
        pytest.param(family, mode, id=f"{mode}-{family.name}", marks=() if i % 2 == at else pytest.mark.slow)
        for i, family in enumerate(FAMILIES.values())
        for at, mode in enumerate(("script", "step"))
    ],
)
def test_twenty_steps_with_clipping_and_a_schedule(family: Family, mode: str) -> None:
    data = [first_batch(family, n, dtype=torch.float64, seed=seed) for seed, n in enumerate([12] * 9 + [7] + [12] * 9 + [7])]
    plain, model = built(family), built(family)
    before = [p.detach().clone() for p in plain.parameters()]
    losses = train_plain(plain, data, family.script_loss)
    if mode == "script":
        wrapped(model, 5)
        assert train_plain(model, data, family.script_loss) == pytest.approx(losses, rel=max(1e-9, tolerance(family)))
    else:
        optimizer, scheduler = optimizer_and_schedule(model)
        run = wrapped(
            model,
            5,
            optimizer=optimizer,
            loss_fn=family.loss,
            before_step=lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        )
        for batch in data:
            run.step(batch)
            scheduler.step()
    limit = 1e-6 if family.name == "t5" else 1e-10
    assert any(not torch.equal(p, q) for p, q in zip(plain.parameters(), before))
    assert parameter_error(model, plain) <= limit


def parameter_error(model: nn.Module, plain: nn.Module) -> float:
    got = {name: p.detach() for name, p in model.named_parameters()}
    return relative_error(got, {name: p.detach() for name, p in plain.named_parameters()})


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *(("mlp", "script"), ("mlp", "step"), ("superres", "script"), pytest.param("gpt", "step", marks=pytest.mark.slow)),
        *(
            pytest.param(name, "script", marks=pytest.mark.slow)
            for name in ("gpt", "bert", "vit", "resnet_group", "frozen", "lora")
        ),
    ],
)
def test_bfloat16_parameters_in_64_micro_batches(name: str, mode: str) -> None:
    """The distance to the float64 gradient is no larger than the whole batch's own, over a few draws of the weights."""
    family = FAMILIES[name]
    for package in family.requires:
        pytest.importorskip(package)
    found = [bfloat16_distances(family, mode, seed) for seed in range(3)]
    parts, whole = (sum(distance**2 for distance in side) ** 0.5 for side in zip(*found))
    assert parts <= 1.05 * whole


def bfloat16_distances(family: Family, mode: str, seed: int) -> tuple[float, float]:
    """How far the gradient in 64 micro-batches, and the whole batch's, are from that in float64."""
    model = family.build(dtype=torch.bfloat16, seed=seed)
    batch = first_batch(family, 64, dtype=torch.bfloat16, seed=seed)
    exact = script_gradients(copy.deepcopy(model).double(), family.script_loss, [doubled(batch)])[0]
    whole = script_gradients(copy.deepcopy(model), family.script_loss, [batch])[0]
    if mode == "script":
        wrapped(model, 1, share=64)
        parts = script_gradients(model, family.script_loss, [batch])[0]
    else:
        run = wrapped(model, 1, share=64, optimizer=frozen_rate(model), loss_fn=family.loss)
        parts = step_gradients(run, [batch])[0]
    assert all(g is None or g.dtype is torch.bfloat16 for g in parts.values())
    return relative_error(parts, exact), relative_error(whole, exact)


def doubled(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {key: doubled(value) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch)(doubled(value) for value in batch)
    return batch.double() if batch.is_floating_point() else batch


@pytest.mark.parametrize("name", ["gpt", "superres"])
def test_planned_training_with_a_loader(name: str) -> None:
    """Everything real: the loader's effective batches with a short last one, the plan made in the first call."""
    family = FAMILIES[name]
    for package in family.requires:
        pytest.importorskip(package)
    plain, model = built(family), built(family)
    samples = family.dataset(n=28, dtype=torch.float64)
    whole = DataLoader(samples, batch_size=12, collate_fn=family.collate)
    train_plain(plain, whole, family.script_loss)
    optimizer, scheduler = optimizer_and_schedule(model)
    model, optimizer, loader = memfit.wrap(
        model, optimizer, DataLoader(samples, batch_size=4, collate_fn=family.collate), target_batch=12, micro_batch=3
    )
    assert len(loader) == 3
    for batch in loader:
        optimizer.zero_grad()
        family.script_loss(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    assert parameter_error(model, plain) <= 1e-10


@pytest.mark.parametrize("name", ["gpt", "vit"])
def test_recomputed_blocks_leave_the_gradient(name: str) -> None:
    family = FAMILIES[name]
    model, data = built(family), batches(family)
    want = script_gradients(copy.deepcopy(model), family.script_loss, data)
    optimizer = frozen_rate(model)
    blocks = tuple(n for n, m in model.named_modules() if type(m).__name__ in ("Block", "ViTLayer"))
    assert blocks
    plan = fixed_plan(model, optimizer, 12, 5, checkpoint=blocks)
    memfit.wrap(model, optimizer, plan=plan)
    assert worst(script_gradients(model, family.script_loss, data), want) <= tolerance(family)
