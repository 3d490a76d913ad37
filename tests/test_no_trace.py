"""Law 4, no trace: planning leaves everything as it was, bit for bit, also when it fails or is interrupted.

"Everything": parameters, buffers, gradients, optimizer state, random state, modes, hooks, attributes and the loader's position.
"""

from __future__ import annotations

import copy
import functools
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from helpers import Aside, mlp, points, unseen, wrapped
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader, TensorDataset
from zoo import FAMILIES, Family, first_batch

import memfit
from memfit.engine.planning_scope import kept


class Ticks:
    """Counts forwards where nothing puts the count back, as for iterators."""

    def __init__(self) -> None:
        self.n = 0

    def __next__(self) -> int:
        self.n += 1
        return self.n


class Busy(nn.Module):
    """Draws, writes buffers and attributes, and can be told to fail after so many forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.norm = mlp(dropout=0.3), nn.BatchNorm1d(7).double()
        self.register_buffer("running", torch.zeros(7, dtype=torch.float64))
        self.calls, self.lengths, self.ticks = 0, [0], Ticks()
        self.fails = Aside(value=set[tuple[BaseException, int]]())
        """What to raise, after how many forwards."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        tick = next(self.ticks)
        self.lengths.append(len(x))
        self.running += x.detach().sum(0)
        noise = random.random() + float(numpy.random.rand())
        for error, after in self.fails.value:
            if tick > after:
                raise error
        return self.net(self.norm(x) + 0 * noise)


def query_device(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Copies of everything that planning has to leave alone. (Read past the model's own class: who reads there what a forward
    leaves runs it.)"""
    return {
        "state": {name: value.clone() for name, value in nn.Module.state_dict(model).items()},
        "identities": [id(t) for m in model.modules() for t in (*m._parameters.values(), *m._buffers.values())],
        "versions": [p._version for p in model.parameters()],
        "gradients": [None if p.grad is None else (id(p.grad), p.grad.clone()) for p in model.parameters()],
        "optimizer": copy.deepcopy(optimizer.state_dict()),
        "random": (torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()),
        "modes": [(module.training, p.requires_grad) for module in model.modules() for p in module.parameters()],
        "hooks": [
            (list(m._forward_hooks), list(m._forward_pre_hooks), list(m._backward_hooks), list(m._state_dict_hooks))
            for m in model.modules()
        ],
        "parameter hooks": [p._backward_hooks for p in model.parameters()],
        "attributes": [sorted(vars(m)) for m in model.modules()],
        "values": [(vars(m).get("calls"), list(vars(m).get("lengths", []))) for m in model.modules()],
    }


def assert_same(found: Any, wanted: Any, where: str = "") -> None:
    if isinstance(wanted, Tensor):
        assert torch.equal(found, wanted), where
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted), where
        for key in wanted:
            assert_same(found[key], wanted[key], f"{where}.{key}")
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted), where
        for i, (one, other) in enumerate(zip(found, wanted)):
            assert_same(one, other, f"{where}[{i}]")
    else:
        assert found == wanted, where


def begun(model: nn.Module, loss: Callable[[], Tensor]) -> Optimizer:
    """An optimizer with state, and a model with gradients, as in the middle of training."""
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    loss().backward()
    optimizer.step()
    return optimizer


def test_planning_leaves_no_trace() -> None:
    """Everything is as before at the moment the planned micro-batches begin: the call returns before they run."""
    model, (x, y) = Busy(), points()
    optimizer = begun(model, lambda: F.cross_entropy(model(x), y))
    memfit.wrap(model, optimizer, micro_batch=5)
    before = query_device(model, optimizer)
    out = model(x)  # learns, profiles, proves; runs nothing of the batch
    assert_same(query_device(model, optimizer), before)
    del out


@pytest.mark.parametrize("micro_batch", ["auto", 2])
def test_parameters_of_the_loss_alone_train_from_where_they_were(micro_batch: Any) -> None:
    """They live in no module of the model (a head with margins); nothing of planning, timing and proofs gathers in them."""
    torch.manual_seed(0)
    model, head = nn.Linear(6, 3).double(), nn.Linear(3, 3).double()
    data = TensorDataset(torch.randn(24, 6).double(), torch.randint(0, 3, (24,)))
    plain = copy.deepcopy((model, head))

    def trained(model: nn.Module, head: nn.Module) -> SGD:
        return SGD([*model.parameters(), *head.parameters()], lr=0.1)

    run = memfit.wrap(
        model,
        trained(model, head),
        DataLoader(data, batch_size=12),
        loss_fn=lambda model, batch: F.cross_entropy(head(model(batch[0])), batch[1]),
        micro_batch=micro_batch,
    )
    assert all(p.grad is None for p in head.parameters())
    for batch in run.loader:
        run.step(batch)
    optimizer = trained(*plain)
    for x, y in DataLoader(data, batch_size=12):
        optimizer.zero_grad()
        F.cross_entropy(plain[1](plain[0](x)), y).backward()
        optimizer.step()
    for got, want in zip((*model.parameters(), *head.parameters()), (p for m in plain for p in m.parameters())):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


def test_the_whole_batch_runs_from_where_planning_began() -> None:
    """A batch that fits draws what it would have drawn, though planning drew much more in between."""
    model, plain, (x, y) = Busy(), Busy(), points()
    memfit.wrap(model, AdamW(model.parameters()))
    for m in (model, plain):
        torch.manual_seed(0), random.seed(0), numpy.random.seed(0)
        F.cross_entropy(m(x), y).backward()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
    assert_same(dict(model.named_buffers()), dict(plain.named_buffers()))
    assert (model.calls, model.lengths) == (plain.calls, plain.lengths)


@pytest.mark.parametrize("name", ["gpt", "resnet", "lstm", "frozen"])
def test_planning_leaves_no_trace_on_families(name: str) -> None:
    family: Family = FAMILIES[name]
    model, batch = family.build(dropout=0.1), first_batch(family)
    optimizer = begun(model, lambda: family.script_loss(model, batch))
    memfit.wrap(model, optimizer, micro_batch=5)
    before = query_device(model, optimizer)
    out = model(*batch) if family.returns_loss else model(batch[0])
    assert_same(query_device(model, optimizer), before)
    del out


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), SystemExit(3)])
@pytest.mark.parametrize("after", range(0, 12, 2))
def test_failing_and_interrupted_planning_leaves_no_trace(error: BaseException, after: int) -> None:
    """The model raises at its n-th forward, wherever planning then is: nothing changed, and the next call plans anew."""
    model, (x, y) = Busy(), points()
    optimizer = begun(model, lambda: F.cross_entropy(model(x), y))
    memfit.wrap(model, optimizer, micro_batch=5)
    before = query_device(model, optimizer)
    model.fails.value.add((error, model.calls + after))
    try:
        out = model(x)
    except BaseException as raised:
        assert raised is error
    else:
        del out
    model.fails.value.clear()
    assert_same(query_device(model, optimizer), before)
    assert_clean_modes()
    out = model(x)
    F.cross_entropy(out, y).backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("after", range(3))
def test_an_interrupt_while_a_batch_runs_hands_nothing_over(known: bool, after: int) -> None:
    """Ctrl-C in any micro-batch: gradients, buffers and random state are those before the batch, and it can run again."""
    model, (x, y) = Busy(), points()
    optimizer = begun(model, lambda: F.cross_entropy(model(x), y))
    wrapped(model, 5, optimizer=optimizer)

    def train() -> None:
        out = model(x)
        (F.cross_entropy(out, y) if known else unseen(out).exp().mean()).backward()

    train()
    optimizer.zero_grad()
    before, forwards = query_device(model, optimizer), model.ticks.n
    model.fails.value.add((KeyboardInterrupt(), model.ticks.n + after))
    with pytest.raises(KeyboardInterrupt):
        train()
    model.fails.value.clear()
    found = query_device(model, optimizer)
    assert model.ticks.n == forwards + after + 1
    for key in before.keys() - KEPT_BY_PYTHON:
        assert_same(found[key], before[key], key)
    assert_clean_modes()
    train()
    assert all(p.grad is not None for p in model.parameters())


KEPT_BY_PYTHON = {"values"}
"""What a forward that really ran leaves behind outside torch: its counters."""


@pytest.mark.parametrize("after", range(4, 7))  # (it runs once to see what it asks of the counter, and three times at first)
def test_an_interrupt_in_the_second_pass_hands_nothing_over(after: int) -> None:
    model, (x, _) = Busy(), points()
    wrapped(model, 5)
    unseen(model(x)).exp().mean().backward()
    model.zero_grad()
    model.fails.value.add((KeyboardInterrupt(), model.ticks.n + after))
    loss = unseen(model(x)).exp().mean()
    state, buffers = torch.get_rng_state(), {name: b.clone() for name, b in model.named_buffers()}
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert_same(dict(model.named_buffers()), buffers)
    assert_clean_modes()


def assert_clean_modes() -> None:
    """No mode of ours is left active, and autograd records."""
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert torch._C._len_torch_function_stack() == 0


def test_wrapping_leaves_the_loader_where_it_is() -> None:
    """`wrap` and planning draw nothing: the batches are those of the plain loader, with the same generator state."""
    x, y = points(48)
    torch.manual_seed(5)
    plain = [bx.clone() for bx, _ in DataLoader(TensorDataset(x, y), batch_size=12, shuffle=True)]
    torch.manual_seed(5)
    model = mlp()
    state = torch.get_rng_state()
    run = memfit.wrap(
        model,
        AdamW(model.parameters()),
        DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True),
        target_batch=12,
        micro_batch=5,
    )
    assert torch.equal(torch.get_rng_state(), state)
    found = []
    for bx, by in run.loader:
        F.cross_entropy(model(bx), by).backward()
        model.zero_grad()
        run.optimizer.step()
        found.append(bx.clone())
    assert_same(found, plain)


def test_a_wrap_that_fails_changes_nothing() -> None:
    model, loader = mlp(), DataLoader(TensorDataset(*points(48)), batch_size=4)
    optimizer = AdamW(model.parameters())
    before = query_device(model, optimizer)
    steps = dict(optimizer._optimizer_step_post_hooks)
    for wrong in ({"target_batch": 0}, {"budget": 6}, {"budget": "six"}, {"precision": "int8"}, {"checkpoint": ["nowhere"]}):
        with pytest.raises(ValueError):
            memfit.wrap(model, optimizer, loader, **wrong)
    assert_same(query_device(model, optimizer), before)
    assert optimizer._optimizer_step_post_hooks == steps


# ---- hooks of the user's


class Tracker:
    """What people write to look at their training: counters, lists and dicts filled by hooks."""

    def __init__(self) -> None:
        self.calls, self.seen = 0, []
        self.by_name: dict[str, list[float]] = {"old": [1.0]}

    def forward(self, module: nn.Module, args: Any, out: Tensor) -> None:
        self.calls += 1
        self.seen.append(out.detach())
        self.by_name.setdefault("new", []).append(1.0)
        self.by_name["old"].append(2.0)

    def __call__(self, *_: Any) -> None:
        self.calls += 1


COUNTED = {"calls": 0}
TOTAL = 0


def counts_globally(*_: Any) -> None:
    global TOTAL
    TOTAL += 1
    COUNTED["calls"] += 1


class Hooks:
    """A model full of hooks that look and change nothing, and all that they have left so far."""

    def __init__(self, model: nn.Sequential) -> None:
        tracker, other, count, log = Tracker(), Tracker(), 0, deque([7])

        def counts(*_: Any) -> None:
            nonlocal count
            count += 1
            log.append(count)
            other.by_name["old"].append(3.0)

        def partly(kept: list[int], *_: Any) -> None:
            kept.append(1)

        kept: list[int] = []
        self.handles = [
            model[0].register_forward_pre_hook(counts),
            model[0].register_forward_hook(tracker.forward),
            model[1].register_forward_hook(functools.partial(partly, kept)),
            model[1].register_full_backward_hook(counts),
            model[1].register_full_backward_pre_hook(tracker),
            model[3].register_full_backward_hook(counts_globally),
        ]
        self.state = lambda: copy.deepcopy(
            (vars(tracker), vars(other), count, log, kept, TOTAL, COUNTED, tracker.by_name)
        )


@pytest.mark.parametrize("known", [True, False])
def test_what_hooks_leave_behind_while_planning_is_put_back(known: bool) -> None:
    """Counters, lists and objects; nothing that stands for data stays in them, and what training leaves is its own."""
    model, plain, (x, y) = mlp(), mlp(), points()
    memfit.wrap(model, AdamW(model.parameters()), micro_batch=5)
    hooks, others = Hooks(model), Hooks(plain)
    out = model(x)  # plans, and runs at once, because nobody can see when the script looks into its closures
    plain(x)
    assert_same_objects(hooks.state(), others.state())
    (F.cross_entropy(out, y) if known else unseen(out).exp().mean()).backward()
    assert vars_of(hooks)["calls"] > 0
    assert all(type(seen) is Tensor for seen in vars_of(hooks)["seen"])


def test_what_hooks_leave_behind_while_planning_step_mode_is_put_back() -> None:
    model = mlp()
    hooks = Hooks(model)
    before = hooks.state()
    run = memfit.wrap(
        model, AdamW(model.parameters()), loss_fn=lambda m, b: F.cross_entropy(m(b[0]), b[1]), sample=points(), micro_batch=5
    )
    assert_same_objects(hooks.state(), before)
    run.step(points())
    memfit.verify(run)
    assert len(vars_of(hooks)["seen"]) == 1  # as one forward over the whole batch leaves it


def vars_of(hooks: Hooks) -> dict[str, Any]:
    return hooks.state()[0]


def assert_same_objects(found: Any, wanted: Any) -> None:
    assert str(found) == str(wanted)


def test_hooks_that_replace_outputs_and_gradients_are_part_of_the_computation() -> None:
    """Planning runs them, so that what they do is proven and priced: one that mixes samples is found."""
    model, (x, y) = mlp(), points()
    model[1].register_forward_hook(lambda module, args, out: 2 * out)
    model[3].register_full_backward_pre_hook(lambda module, incoming: tuple(3 * g for g in incoming))
    plain = copy.deepcopy(model)
    F.cross_entropy(plain(x), y).backward()
    memfit.wrap(model, AdamW(model.parameters()), micro_batch=5)
    F.cross_entropy(model(x), y).backward()
    for p, q in zip(model.parameters(), plain.parameters()):
        assert p.grad is not None and q.grad is not None and torch.allclose(p.grad, q.grad, rtol=1e-12)
    mixing = mlp()
    mixing[1].register_forward_hook(lambda module, args, out: out - out.mean(0))
    memfit.wrap(mixing, AdamW(mixing.parameters()), micro_batch=5)
    with pytest.raises(memfit.Refused, match="mixes samples"):
        mixing(x)


def test_hooks_of_tensors_and_of_the_optimizer_are_silent_while_planning() -> None:
    model, (x, y) = mlp(), points()
    optimizer = AdamW(model.parameters())
    fired: list[str] = []
    for p in model.parameters():
        p.register_hook(lambda gradient: fired.append("tensor"))
        p.register_post_accumulate_grad_hook(lambda p: fired.append("accumulated"))
    optimizer.register_step_pre_hook(lambda *_: fired.append("step"))
    run = memfit.wrap(
        model, optimizer, loss_fn=lambda m, b: F.cross_entropy(m(b[0]), b[1]), sample=points(), micro_batch=5
    )
    memfit.verify(run)
    assert fired == []
    run.step((x, y))
    assert sorted(fired) == ["accumulated"] * 4 + ["step"] + ["tensor"] * 4


class Leaking(nn.Module):
    """Its forward enters autocast and never leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False).__enter__()
        return self.layer(x).float()


@pytest.mark.parametrize("device", [None, "a100-40gb"])
def test_autocast_that_a_forward_leaves_on_is_off_again(device: str | None) -> None:
    def depth() -> int:
        torch.autocast_increment_nesting()
        return torch.autocast_decrement_nesting()

    def state() -> tuple[object, ...]:
        return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled(), depth()

    model, before = Leaking(), state()
    optimizer = torch.optim.SGD(model.parameters())
    memfit.profile(model, optimizer, torch.ones(8, 4), loss_fn=lambda m, x: m(x).sum(), device=device)
    assert state() == before


def test_ordered_containers_that_changed_can_be_used_again() -> None:
    model = nn.Linear(2, 2)
    for _ in range(3):
        model.register_forward_hook(lambda *_: None)
    with kept(model):
        model._forward_hooks.popitem()
    assert len(model._forward_hooks.copy()) == 3
