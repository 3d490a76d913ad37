"""Several models and several optimizers, in one line or one by one."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import Forwards, mlp
from torch import Tensor, nn

import memfit

Models = dict[str, Any]
N, STEPS = 10, 4


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def net(*widths: int, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).double()


def sgd(*models: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1, momentum=0.9)


def adversaries() -> Models:
    made: Models = {"D": net(6, 16, 1), "G": net(4, 8, 6, seed=1)}
    return {**made, "opts": [sgd(made["D"]), sgd(made["G"])]}


def train_adversaries(m: Models, step: int) -> Tensor:
    real, z = numbers(step, N, 6), numbers(100 + step, N, 4)
    d, g = m["opts"]
    d.zero_grad()
    (F.softplus(-m["D"](real)).mean() + F.softplus(m["D"](m["G"](z).detach())).mean()).backward()
    d.step()
    if step % 2:  # another cadence
        return torch.zeros(())
    m["D"].requires_grad_(False)
    g.zero_grad()
    loss = F.softplus(-m["D"](m["G"](z))).mean()
    loss.backward()
    g.step()
    m["D"].requires_grad_(True)
    return loss.detach()


def encoder_and_decoder() -> Models:
    made: Models = {"encoder": net(6, 12, 5), "decoder": net(5, 12, 3, seed=1)}
    return {**made, "opts": [sgd(made["encoder"], made["decoder"])]}


def train_both(m: Models, step: int) -> Tensor:
    m["opts"][0].zero_grad()
    loss = F.cross_entropy(m["decoder"](m["encoder"](numbers(step, N, 6))), torch.arange(N) % 3)
    loss.backward()
    m["opts"][0].step()
    return loss.detach()


def student_and_teacher() -> Models:
    made: Models = {"teacher": net(6, 12, 3).requires_grad_(False), "student": net(6, 8, 3, seed=1)}
    return {**made, "opts": [sgd(made["student"])]}


def train_student(m: Models, step: int) -> Tensor:
    x = numbers(step, N, 6)
    loss = F.kl_div(m["student"](x).log_softmax(1), m["teacher"](x).softmax(1), reduction="batchmean")
    m["opts"][0].zero_grad()
    loss.backward()
    m["opts"][0].step()
    return loss.detach()


def one_with_two_optimizers() -> Models:
    model = net(6, 12, 3)
    return {"model": model, "opts": [sgd(model[0]), torch.optim.Adam(model[2].parameters(), lr=0.01)]}


def train_parts(m: Models, step: int) -> Tensor:
    loss = F.cross_entropy(m["model"](numbers(step, N, 6)), torch.arange(N) % 3)
    for optimizer in m["opts"]:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in m["opts"]:
        optimizer.step()
    return loss.detach()


SCRIPTS: dict[str, tuple[Callable[[], Models], Callable[[Models, int], Tensor]]] = {
    "adversaries": (adversaries, train_adversaries),
    "an encoder and a decoder with one optimizer": (encoder_and_decoder, train_both),
    "a student and a frozen teacher": (student_and_teacher, train_student),
    "one model with two optimizers": (one_with_two_optimizers, train_parts),
}


def trained(name: str, *, wrapped: bool) -> tuple[list[float], Tensor, Any]:
    build, train = SCRIPTS[name]
    m = build()
    models, run = [model for model in m.values() if isinstance(model, nn.Module)], None
    if wrapped:
        run = memfit.wrap(models if len(models) > 1 else models[0], m["opts"], micro_batch=3)
        given, optimizers, loader = run
        assert (given == models if len(models) > 1 else given is models[0]) and optimizers is m["opts"] and loader is None
    losses = [float(train(m, step)) for step in range(STEPS)]
    return losses, torch.cat([p.detach().flatten() for model in models for p in model.parameters()]), run


@pytest.mark.parametrize("name", SCRIPTS)
def test_in_one_line(name: str) -> None:
    losses, parameters, run = trained(name, wrapped=True)
    want, wanted, _ = trained(name, wrapped=False)
    assert losses == pytest.approx(want, rel=1e-12) and float((parameters - wanted).norm() / wanted.norm()) <= 1e-12
    assert any(each.plan is not None for each in run.runs)
    assert "micro-batches of" in str(run.report())
    run.undo()
    assert all("forward" not in vars(model) for model in (each.model for each in run.runs))


def test_what_is_frozen_is_cut_where_gradients_go_through_it() -> None:
    model, trained = net(6, 16, 1), net(4, 6, seed=1)
    memfit.wrap([model, trained], [sgd(model), sgd(trained)], micro_batch=3)
    for step in range(2):
        model.requires_grad_(False)
        seen = Forwards(model[0])
        F.softplus(-model(trained(numbers(step, N, 4)))).mean().backward()
    assert seen.sizes == [3, 3, 2, 2]
    assert model[0].weight.grad is None and trained[0].weight.grad is not None


def test_the_loader_and_its_target_are_shared() -> None:
    m = adversaries()
    data = torch.utils.data.TensorDataset(numbers(0, 40, 6), numbers(1, 40, 4))
    loader = torch.utils.data.DataLoader(data, batch_size=5)
    (d, g), (opt_d, opt_g), batches = memfit.wrap([m["D"], m["G"]], m["opts"], loader, target_batch=20, micro_batch=4)
    counted = 0
    for real, z in batches:
        assert len(real) == 20
        opt_d.zero_grad()
        (F.softplus(-d(real)).mean() + F.softplus(d(g(z).detach())).mean()).backward()
        opt_d.step()
        opt_g.zero_grad()
        F.softplus(-d(g(z))).mean().backward()
        opt_g.step()
        counted += 1
    assert counted == 2


def test_states_of_other_optimizers_have_their_room() -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    first, second = (torch.optim.Adam(layer.parameters()) for layer in model)
    x = torch.randn(8, 512)
    run = memfit.wrap(model, [first, second], micro_batch=4)
    memory = run.runs[0]._core.memory  # type: ignore[union-attr]
    before = memory.budget().held
    memory.expect_states_of(())
    assert before - memory.budget().held >= 1.9 * 512 * 512 * 4
    memory.expect_states_of([second])
    model(x).square().mean().backward()
    second.step()  # now they are there, and not expected any more
    assert memory.budget().held < before + 512 * 512 * 4


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"model": []}, "there is no model"),
        ({"model": [mlp(), 3]}, "of type int"),
        ({"model": "twice"}, "listed twice"),
        ({"loss_fn": lambda m, b: m(b)}, "loss_fn= is about one model"),
        ({"optimizer": "another's"}, "holds no parameter of any"),
        ({"model": "frozen"}, "none of their parameters"),
        ({"shard": "optimizer", "optimizer": "two"}, "one optimizer's state"),
    ],
)
def test_what_cannot_be_meant(change: dict[str, Any], found: str) -> None:
    model, other = mlp(), mlp()
    named = {"twice": [model, model], "frozen": [mlp().requires_grad_(False), mlp().requires_grad_(False)]}
    optimizers = {"another's": [sgd(model), sgd(mlp())], "two": [sgd(model), sgd(other)]}
    models = change.pop("model", [model, other])
    optimizer = change.pop("optimizer", [sgd(model), sgd(other)])
    models = named.get(models, models) if isinstance(models, str) else models
    with pytest.raises(memfit.UsageError, match=found) as raised:
        memfit.wrap(models, optimizers.get(optimizer, optimizer) if isinstance(optimizer, str) else optimizer, **change)
    assert "next:" in str(raised.value) and "forward" not in vars(model)


def test_a_later_model_that_is_refused_leaves_the_first_as_it_was() -> None:
    model, lazy = mlp(), nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2))
    with pytest.raises(memfit.UsageError, match="lazy"):
        memfit.wrap([model, lazy], [sgd(model), torch.optim.SGD(lazy[1].parameters(), lr=0.1)])
    assert "forward" not in vars(model)


def test_switched_off() -> None:
    m = adversaries()
    run = memfit.wrap([m["D"], m["G"]], m["opts"], enabled=False)
    train_adversaries(m, 0)
    assert all(not each.enabled for each in run.runs)
