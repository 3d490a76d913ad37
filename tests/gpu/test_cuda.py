"""On a real CUDA device: the laws that the CPU can only stand in for."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.optim import AdamW
from torch.utils.data import DataLoader
from zoo import FAMILIES, first_batch
from zoo.plain import gradients_of, relative_error

import memfit
from memfit._units import GiB, MiB

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
DEVICE = torch.device("cuda", 0)
WITHOUT_BATCH_NORM = [name for name, family in FAMILIES.items() if not family.mixes]


def on_device(batch: object) -> object:
    from memfit.capture.workloads import moved

    return moved(batch, DEVICE)


def wrapped(name: str, *, size: str = "tiny", n: int = 64, **settings: object) -> tuple[memfit.Run, torch.nn.Module]:
    family = FAMILIES[name]
    model = family.build(size).to(DEVICE)
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    loader = DataLoader(family.dataset(size=size, n=n), batch_size=8, collate_fn=family.collate)
    return memfit.wrap(model, optimizer, loader, loss_fn=family.loss, **settings), model  # type: ignore[arg-type]


@pytest.mark.parametrize("name", WITHOUT_BATCH_NORM)
def test_gradients_are_those_of_the_whole_batch(name: str) -> None:
    family = FAMILIES[name]
    pytest.importorskip("transformers") if "transformers" in family.requires else None
    model = family.build("tiny", dtype=torch.float64).to(DEVICE)
    plain, batch = copy.deepcopy(model), on_device(first_batch(family, 11, dtype=torch.float64))
    family.script_loss(plain, batch).backward()
    run = memfit.wrap(model, AdamW([p for p in model.parameters() if p.requires_grad]), micro_batch=3)
    family.script_loss(model, batch).backward()
    run.undo()
    assert relative_error(gradients_of(model), gradients_of(plain)) <= (1e-6 if name == "t5" else 1e-12)


@pytest.mark.parametrize("name", ["gpt", "vit", "bert"])
def test_the_peak_stays_within_the_budget_and_near_the_prediction(name: str) -> None:
    pytest.importorskip("transformers") if "transformers" in FAMILIES[name].requires else None
    torch.cuda.empty_cache()
    run, _ = wrapped(name, size="bench", n=256, target_batch=128, budget="3GiB")
    for batch in run.loader:
        run.step(batch)
    torch.cuda.reset_peak_memory_stats(DEVICE)
    for batch in run.loader:
        run.step(batch)
    assert run.plan is not None and not [event for event in run.events if event.kind == "out of memory"]
    measured = run.stats()["peak_measured"]
    assert measured is not None and measured <= 3 * GiB
    predicted = run.plan.predicted.peak + run.plan.held
    assert abs(predicted / measured - 1) <= 0.1 or abs(predicted - measured) <= 128 * MiB


def test_running_out_of_memory_is_survived_and_the_batch_trains_once() -> None:
    family = FAMILIES["mlp"]
    run, model = wrapped("mlp", n=32, target_batch=32, micro_batch=16)
    plain = copy.deepcopy(model)
    optimizer = AdamW(plain.parameters(), lr=1e-4)
    fraction = torch.cuda.mem_get_info(DEVICE)[1]
    failing = {"left": 1}

    def once(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if failing["left"]:
            failing["left"] -= 1
            torch.empty(4 * fraction, dtype=torch.uint8, device=DEVICE)  # more than the device has: the real error

    next(iter(model.children())).register_forward_pre_hook(once)
    for batch in run.loader:
        run.step(batch)
    family.script_loss(plain, on_device(first_batch(family, 32))).backward()
    optimizer.step()
    assert [event.kind for event in run.events].count("out of memory") == 1
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(model.parameters(), plain.parameters()))


def test_planning_leaves_the_device_as_it_was() -> None:
    torch.cuda.manual_seed(3)
    before = torch.cuda.get_rng_state(DEVICE)
    _, model = wrapped("gpt", target_batch=32, micro_batch=4)
    assert torch.equal(torch.cuda.get_rng_state(DEVICE), before)
    assert all(p.grad is None for p in model.parameters())


def test_verify_passes_with_dropout() -> None:
    run, _ = wrapped("gpt", target_batch=32, micro_batch=5)
    assert memfit.verify(run).passed
