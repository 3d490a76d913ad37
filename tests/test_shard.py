"""Sharding: the same training with a part of everything on each process, whole state dicts, and rank 0 acting alone."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from pairwise import once
from processes import Processes
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

import memfit
from memfit.levers import shard
from memfit.levers.fsdp_units import check_shardable

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.05),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01, centered=True),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, lr=0.01),
}


@pytest.fixture(scope="module", params=(2, *(pytest.param(size, marks=pytest.mark.slow) for size in (3, 4))))
def processes(request: pytest.FixtureRequest) -> Iterator[Processes]:
    found = Processes(request.param)
    yield found
    found.end()


@pytest.fixture(scope="module")
def two() -> Iterator[Processes]:
    found = Processes(2)
    yield found
    found.end()


def model_of(kind: str = "plain") -> nn.Module:
    torch.manual_seed(3)
    model: nn.Module = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 3)).double()
    if kind == "mixed":
        model[4].bias.requires_grad_(False)
        model[0] = model[0].to(memory_format=torch.preserve_format)
        model[2].weight = nn.Parameter(model[2].weight.detach().t().contiguous().t())
    return model


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    linear = [m for m in model if isinstance(m, nn.Linear)]  # type: ignore[attr-defined]
    return [
        {"params": [m.weight for m in linear], "weight_decay": 0.01},
        {"params": [m.bias for m in linear if m.bias.requires_grad], "lr": 0.02},
    ]


def loader_of() -> DataLoader[Any]:
    torch.manual_seed(5)
    data = TensorDataset(torch.randn(44, 6, dtype=torch.float64), torch.randint(0, 3, (44,)))
    return DataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1))


def trained(optimizer: str, mode: str, shard: str, kind: str = "plain", steps: int = 4) -> dict[str, Any]:
    """Parameters, the optimizer's state and what was said after some steps."""
    model = model_of(kind)
    made = OPTIMIZERS[optimizer](groups_of(model))
    before = torch.optim.lr_scheduler.StepLR(made, 2, 0.5)  # built before, it knows the optimizer's own groups
    loss_fn = (lambda m, b: F.cross_entropy(m(b[0]), b[1])) if mode == "step" else None
    run = memfit.wrap(model, made, loader_of(), target_batch=11, loss_fn=loss_fn, micro_batch=2, shard=shard)
    assert run.optimizer is made
    done = 0
    while done < steps:
        for x, y in run.loader if mode == "script" else ():
            made.zero_grad()
            F.cross_entropy(model(x), y).backward()
            made.step()
            before.step()
            done += 1
        for batch in run.loader if mode == "step" else ():
            run.step(batch)
            before.step()
            done += 1
    held = [t for state in made.state.values() for t in state.values() if torch.is_tensor(t)]
    own = sum(t.numel() * t.element_size() for t in (getattr(t, "to_local", lambda t=t: t)() for t in held))
    state = copy.deepcopy(made.state_dict())
    found = {
        "parameters": [value.clone() for value in model.state_dict().values()],
        "state": state,
        "own": own,
        "plan": run.plan.shard if run.plan else "",
        "said": [event.message for event in run.events],
    }
    run.undo()
    found["after"] = copy.deepcopy(made.state_dict())
    return found


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.allclose(one, other, rtol=1e-10, atol=1e-13)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other or one == pytest.approx(other)


LEVELS = ("optimizer", "gradients", "parameters")


def check_same(found: list[dict[str, Any]], alone: dict[str, Any], level: str) -> None:
    for each in found:
        assert each["plan"] == level
        assert same(each["parameters"], alone["parameters"])
        assert same(each["state"], alone["state"])
        assert same(each["after"], alone["state"])
        assert each["own"] < alone["own"]
    held_by_all = len(alone["state"]["state"]) * (len(found) - 1) * 4  # counters of steps are not divided
    assert 0 <= sum(each["own"] for each in found) - alone["own"] <= (0 if level == "optimizer" else held_by_all)


@pytest.mark.parametrize(("optimizer", "mode"), once(product(OPTIMIZERS, ("script", "step"))))
def test_the_same_training_with_a_part_of_the_state(processes: Processes, optimizer: str, mode: str) -> None:
    check_same(processes.run(trained, optimizer, mode, "optimizer"), trained(optimizer, mode, "auto"), "optimizer")


@pytest.mark.parametrize("mode", ("script", "step"))
@pytest.mark.parametrize("optimizer", ("sgd", "adamw"))
@pytest.mark.parametrize("level", ("gradients", "parameters"))
def test_the_same_training_with_parts_of_everything(processes: Processes, level: str, optimizer: str, mode: str) -> None:
    check_same(processes.run(trained, optimizer, mode, level), trained(optimizer, mode, "auto"), level)


def tried(fits: tuple[str, bool]) -> list[tuple[str, bool]]:
    """(level, whether precision may be lower) in the order in which `shard="auto"` tries them, up to what fits."""
    from memfit.engine.gradients import is_sharded
    from memfit.training.sharding import Sharding

    model = model_of().float()
    data = TensorDataset(torch.randn(8, 6), torch.randint(3, (8,)))
    run = memfit.wrap(model, torch.optim.AdamW(model.parameters()), DataLoader(data, batch_size=4), shard="off")
    core = run._core
    assert core is not None and core.team.reduction is not None
    sharding, found = Sharding(core, core.team.reduction.ranks, "auto"), list[tuple[str, bool]]()

    def prepare() -> None:
        found.append((sharding.level, core.planner.settings.lowers))
        if found[-1] != fits:
            raise memfit.DoesNotFit("a test", found="nothing fits", next_move="go on")

    sharding.begin(prepare, lambda: None)
    assert core.planner.settings.lowers
    sharding.undo()
    run.undo()
    assert not any(is_sharded(module) for module in model.modules())
    return found


def test_more_is_sharded_before_the_precision_is_lowered(two: Processes) -> None:
    kept = [(level, False) for level in ("off", *LEVELS)]
    assert two.run(tried, ("parameters", False)) == [kept, kept]
    lowered = [*kept, ("off", True), ("optimizer", True)]
    assert two.run(tried, ("optimizer", True)) == [lowered, lowered]


def test_parameters_that_cannot_be_flat_are_sharded_by_torch(two: Processes) -> None:
    alone = trained("adamw", "script", "auto", "mixed")
    for each in two.run(trained, "adamw", "script", "optimizer", "mixed"):
        assert same(each["parameters"], alone["parameters"]) and same(each["state"], alone["state"])
        assert any("ZeroRedundancyOptimizer" in said for said in each["said"])


def acting_alone(path: str, level: str) -> list[torch.Tensor]:
    """Rank 0 alone evaluates and saves in the middle of the training."""
    rank = int(os.environ["RANK"])
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run = memfit.wrap(model, optimizer, loader_of(), target_batch=11, micro_batch=2, shard=level)
    for number, (x, y) in enumerate(run.loader):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if rank == 0 and number == 1:
            with torch.no_grad():
                output = model(x)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "x": x, "output": output}
            torch.save(state, path)
        if number == 1:
            torch.distributed.barrier()
    plain = torch.distributed.barrier
    if rank == 0:  # and after the last step, while the others wait
        optimizer.state_dict()
    torch.distributed.barrier()
    run.undo()
    assert torch.distributed.barrier is not plain
    return [value.clone() for value in model.state_dict().values()]


@pytest.mark.parametrize("level", LEVELS)
def test_rank_0_evaluates_and_saves_alone(two: Processes, tmp_path: Any, level: str) -> None:
    path = str(tmp_path / "state.pt")
    found = two.run(acting_alone, path, level)
    assert same(found[0], found[1])
    alone = trained("adamw", "script", "auto")  # (with other groups and rates)
    saved = torch.load(path, weights_only=True)
    model = model_of()
    model.load_state_dict(saved["model"])
    assert same(model(saved["x"]).detach(), saved["output"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer.load_state_dict(saved["optimizer"])
    assert len(optimizer.state) == len(alone["state"]["state"])
    assert all(float(state["step"]) == 2 for state in optimizer.state.values())
    assert all(state["exp_avg"].shape == p.shape for p, state in optimizer.state.items())


def resumed(path: str, level: str) -> list[torch.Tensor]:
    """The two steps after what `acting_alone` saved, loaded by every process."""
    saved = torch.load(path, weights_only=True)
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run = memfit.wrap(model, optimizer, loader_of(), target_batch=11, micro_batch=3, shard=level)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    for number, (x, y) in enumerate(run.loader):
        if number > 1:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return [value.clone() for value in model.state_dict().values()]


@pytest.mark.parametrize("level", LEVELS)
def test_what_one_level_saved_another_loads(two: Processes, tmp_path: Any, level: str) -> None:
    path = str(tmp_path / "state.pt")
    want = two.run(acting_alone, path, level)[0]
    for other in LEVELS:
        assert all(same(found, want) for found in two.run(resumed, path, other))


def refused(kind: str) -> str:
    model = model_of()
    optimizer = torch.optim.LBFGS(model.parameters()) if kind == "lbfgs" else torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        memfit.wrap(model, optimizer, loader_of(), target_batch=11, shard="optimizer")
    except (memfit.Refused, memfit.UsageError, memfit.RankFailed) as error:
        return str(error)
    return ""


def test_an_optimizer_that_cannot_be_taken_apart_is_refused(two: Processes) -> None:
    assert all("LBFGS" in said for said in two.run(refused, "lbfgs"))


class Around:
    """An optimizer that holds another one, and slow weights."""

    param_groups = property(lambda self: self.inner.param_groups)
    state = property(lambda self: self.inner.state)

    def __init__(self, inner: Optimizer) -> None:
        self.inner, self.slow = inner, {p: p.detach().clone() for group in inner.param_groups for p in group["params"]}

    def zero_grad(self) -> None:
        self.inner.zero_grad()

    def step(self) -> None:
        self.inner.step()


@pytest.mark.parametrize("level", ["optimizer", "gradients", "parameters"])
def test_an_optimizer_that_holds_another_one_is_refused(level: str) -> None:
    model = model_of()
    optimizer: Any = Around(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(memfit.Refused, match="optimizer or tensors of its own in `inner`"):
        shard._check_separable(optimizer) if level == "optimizer" else check_shardable(model, optimizer)


def test_one_process_has_nobody_to_share_with() -> None:
    assert "torchrun" in refused("alone")


def collective_after_the_call() -> list[float]:
    """Losses of a script that comes to a collective of its own between the call and the loss, and after the loss."""
    model, rank = model_of(), torch.distributed.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    memfit.wrap(model, optimizer, micro_batch=2, shard="parameters")
    generator, found = torch.Generator().manual_seed(rank), []
    for step in range(3):
        count = 3 + (4 * rank + 3 * step) % 7  # other numbers of micro-batches on each
        x, y = torch.randn(count, 6, dtype=torch.float64, generator=generator), torch.arange(count) % 3
        optimizer.zero_grad()
        out, told = model(x), torch.tensor([float(count)])
        torch.distributed.all_reduce(told)
        loss = F.cross_entropy(out, y)
        mean = loss.detach() * count / told
        torch.distributed.all_reduce(mean)
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            score = model(x).mean()
        model.train()
        torch.distributed.all_reduce(score)
        found += [float(mean), float(score)]
    return found


def test_a_script_may_come_to_collectives_of_its_own(two: Processes) -> None:
    """While another process still has passes to run, which take all of them."""
    first, second = two.run(collective_after_the_call)
    assert first == second


def penalised() -> str:
    model, rank = model_of(), torch.distributed.get_rank()
    memfit.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch=2, shard="parameters")
    out = model(torch.zeros(4 + rank, 6, dtype=torch.float64))
    try:
        out.square().mean() + 1e-2 * sum(p.square().sum() for p in model.parameters())
    except memfit.Refused as refused:
        return str(refused)
    return ""


def test_parts_do_not_mix_with_what_the_model_returns(two: Processes) -> None:
    assert all("weight_decay" in said for said in two.run(penalised))


class Leaves(nn.Module):
    """Its forward leaves a mask and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.calls = nn.Linear(6, 16).double(), nn.Linear(16, 6).double(), 0
        self.register_buffer("mean", torch.zeros(6).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls, self.mask = self.calls + 1, (x > 0.5).to(x.dtype)
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.second(torch.tanh(self.first(x)))


def left(shard: str) -> list[tuple[int, tuple[int, ...], list[float]]]:
    """What the forward left after each step."""
    torch.manual_seed(3)
    model, rank = Leaves(), int(os.environ["RANK"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    memfit.wrap(model, optimizer, micro_batch=3, shard=shard)
    found = []
    for step in range(3):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * rank + step), dtype=torch.double)
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mask, mean = vars(model)["mask"], model._buffers["mean"]
        found.append((model.calls, tuple(mask.shape), [round(value, 9) for value in mean.tolist()]))
    return found


def test_forwards_run_for_other_processes_leave_no_state(two: Processes) -> None:
    assert two.run(left, "parameters") == two.run(left, "optimizer")


class Centred(torch.autograd.Function):
    """Its backward mixes samples."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient - gradient.mean(0)


class Mixing(Leaves):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(Centred.apply(self.first(x)))


def said_of_mixing() -> str:
    torch.manual_seed(3)
    model = Mixing()
    memfit.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch=3, shard="parameters")
    try:
        model(torch.randn(8, 6).double())
    except memfit.MemfitError as error:
        return str(error)
    return "ran"


def test_a_backward_that_mixes_samples_is_refused_over_sharded_parameters_too() -> None:
    doomed = Processes(2)
    try:
        assert all("backward of the forward mixes samples" in said for said in doomed.run(said_of_mixing))
    finally:
        doomed.end()


class Held(nn.Module):
    """Its forward reads what a script may set."""

    def __init__(self) -> None:
        super().__init__()
        self.net = model_of()
        self.register_buffer("scale", torch.ones(3).double())
        self.table, self.power = {"shift": 1.0}, 1

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return (self.net(batch["x"]) * self.scale + self.table["shift"]) ** self.power


def set_between(line: bool) -> list[torch.Tensor]:
    model = Held()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if line:
        memfit.wrap(model, optimizer, micro_batch=3, shard="parameters")
    for step in range(3):
        batch = {"x": torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).double()}
        optimizer.zero_grad()
        out = model(batch)
        model.scale = vars(model)["_buffers"]["scale"] * 2
        model.table["shift"] += 1
        model.power, batch["x"] = step, batch["x"] * 2
        F.mse_loss(out, torch.ones_like(out)).backward()
        optimizer.step()
    return [each.clone() for each in model.state_dict().values()]


def test_what_is_set_after_the_call_does_not_reach_sharded_forwards_either(two: Processes) -> None:
    assert all(same(found, set_between(False)) for found in two.run(set_between, True))


@dataclass
class Scored:
    scores: torch.Tensor


class Returns(nn.Module):
    """Returns its output in an object."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net, self.kind = model_of(), kind

    def forward(self, x: torch.Tensor) -> Any:
        out = self.net(x)
        return torch.distributions.Categorical(logits=out) if self.kind == "distribution" else Scored(out)


def trained_through(kind: str, level: str) -> list[torch.Tensor]:
    model = Returns(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if level != "off":
        memfit.wrap(model, optimizer, micro_batch=3, shard=level)
    for step in range(3):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).double()
        optimizer.zero_grad()
        out = model(x)
        F.cross_entropy(out.logits if kind == "distribution" else out.scores, torch.arange(8) % 3).backward()
        optimizer.step()
    return [each.clone() for each in model.state_dict().values()]


@pytest.mark.parametrize("kind", ["distribution", "dataclass"])
@pytest.mark.parametrize("level", ["gradients", "parameters"])
def test_outputs_in_objects_are_reduced(two: Processes, kind: str, level: str) -> None:
    want = trained_through(kind, "off")
    for found in two.run(trained_through, kind, level):
        assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-14) for a, b in zip(found, want, strict=True))


def said_of_changed(kind: str) -> str:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    memfit.wrap(model, optimizer, micro_batch=3, shard="gradients")
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)).double()
    model(x).square().mean().backward()
    optimizer.step()
    if kind == "dropped":
        model[4].bias = None
    elif kind == "replaced":
        model[4].weight = nn.Parameter(torch.zeros(3, 32).double())
    else:
        model.append(nn.Linear(3, 3).double())
        optimizer.add_param_group({"params": model[5].parameters()})
    try:
        model(x).square().mean().backward()
    except memfit.MemfitError as error:
        return str(error)
    return "ran"


@pytest.mark.parametrize("kind", ["dropped", "replaced", "added"])
def test_parameters_that_change_under_sharding_are_refused(kind: str) -> None:
    doomed = Processes(2)
    try:
        assert all("added, removed or replaced" in said for said in doomed.run(said_of_changed, kind))
    finally:
        doomed.end()


def of_two_losses(kind: str, level: str) -> list[torch.Tensor]:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank = torch.distributed.get_rank() if level != "off" else 0
    if level != "off":
        memfit.wrap(model, optimizer, micro_batch=3, shard=level)
    for step in range(3):
        x, y = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).double(), torch.arange(8) % 3
        share = slice(0, 8) if level == "off" else slice(0, 6) if rank == 0 else slice(6, 8)
        optimizer.zero_grad()
        out = model(x[share])
        one, other = F.cross_entropy(out, y[share]), F.mse_loss(out, F.one_hot(y[share], 3).double())
        one.item(), other.item()
        if kind == "summed":
            (one + other).backward()
        elif kind == "one by one":
            one.backward(retain_graph=True)
            other.backward()
        elif kind == "dropped":
            other.backward()
        elif kind == "stacked":
            torch.stack([one, other]).sum().backward()
        else:
            (one + other + F.one_hot(y[share], 3).double().mul(out.exp()).mean()).backward()
        optimizer.step()
    return [each.clone() for each in model.state_dict().values()]


@pytest.mark.parametrize("kind", ["summed", "one by one", "dropped", "stacked", "beside another"])
@pytest.mark.parametrize("level", ["gradients", "parameters"])
def test_losses_that_are_computed_before_a_backward_keep_their_gradients_apart(two: Processes, kind: str, level: str) -> None:
    want = of_two_losses(kind, "off")
    for found in two.run(of_two_losses, kind, level):
        assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-14) for a, b in zip(found, want, strict=True))


class TrustRatio(Optimizer):
    """A step along the gradient, as long as the parameter is, as in LARS (You et al. 2017, arXiv:1708.03888)."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=float(group["lr"] * p.norm() / (p.grad.norm() + 1e-8)))


def what_scripts_do_with_shards(level: str) -> list[Any]:
    model = model_of()
    before, optimizer = list(model.parameters()), TrustRatio(model.parameters())
    if level != "off":
        memfit.wrap(model, optimizer, micro_batch=3, shard=level)
    rank = torch.distributed.get_rank() if level != "off" else 0
    share = slice(0, 8) if level == "off" else slice(0, 6) if rank == 0 else slice(6, 8)
    for step in range(2):
        x, y = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).double(), torch.arange(8) % 3
        optimizer.zero_grad()
        F.cross_entropy(model(x[share]), y[share]).backward()
        optimizer.step()
    said = []
    for do in (
        lambda: torch.nn.utils.clip_grad_norm_(before, 0.1),
        lambda: [p.grad.zero_() for p in before],  # type: ignore[union-attr]
        lambda: sum(p.grad.norm().item() for p in model.parameters()),  # type: ignore[union-attr]
        lambda: bool(next(iter(model.parameters())).grad.isnan().any()),  # type: ignore[union-attr]
    ):
        try:
            do()
            said.append("ran")
        except memfit.MemfitError as error:
            said.append(error.found)
    return [said, [each.clone() for each in model.state_dict().values()]]


@pytest.mark.parametrize("level", ["gradients", "parameters"])
def test_shards_are_not_taken_for_the_whole(two: Processes, level: str) -> None:
    _, want = what_scripts_do_with_shards("off")
    for said, found in two.run(what_scripts_do_with_shards, level):
        assert ["were replaced by shards" in each for each in said[:2]] == [True, True]
        assert ["this process's part" in each for each in said[2:]] == [True, True]
        assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-14) for a, b in zip(found, want, strict=True))


def test_parameters_with_hooks_are_refused() -> None:
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        model = model_of()
        getattr(model[4].weight, register)(lambda _: None)
        with pytest.raises(memfit.Refused, match=r"4\.weight has hooks"):
            check_shardable(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_an_optimizer_that_averages_the_model_is_refused() -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.average = torch.optim.swa_utils.AveragedModel(model)  # type: ignore[attr-defined]
    with pytest.raises(memfit.Refused, match="tensors of its own in `average`"):
        check_shardable(model, optimizer)
