"""Replay: any loss outside the model gets the whole output and leaves the gradient of the whole batch.

Each micro-batch runs twice, without and with its activations; what a forward draws, writes and depends on happens once.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import Aside, Forwards, assert_transparent, fixed_plan, mlp, plain_gradients, points, unseen, wrapped
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint
from zoo.plain import gradients_of, relative_error

import memfit

N = 12
TARGET = points(N, seed=9)[0][:, :4]

Loss = Callable[[Tensor, Tensor], Tensor]


def info_nce(out: Tensor, y: Tensor) -> Tensor:
    """Every sample against every other of the batch."""
    one, other = F.normalize(out), F.normalize(TARGET)
    return F.cross_entropy(one @ other.t() / 0.1, torch.arange(len(out)))


def variance(out: Tensor, y: Tensor) -> Tensor:
    centred = out - out.mean(0)
    return (centred.t() @ centred).square().sum() + F.relu(1 - out.std(0)).mean()


def triplets(out: Tensor, y: Tensor) -> Tensor:
    return F.triplet_margin_loss(out, out.roll(1, 0), out.roll(2, 0))


def hardest(out: Tensor, y: Tensor) -> Tensor:
    """Online hard example mining: the worst half of the batch."""
    return F.cross_entropy(out, y, reduction="none").topk(len(out) // 2).values.mean()


def one_by_one(out: Tensor, y: Tensor) -> Tensor:
    return torch.stack([F.cross_entropy(row[None], label[None]) for row, label in zip(out, y)]).sum()


def masked(out: Tensor, y: Tensor) -> Tensor:
    return out[y == 1].square().sum() + out[3:5].sum() - out[-1, 0]


def in_numpy_too(out: Tensor, y: Tensor) -> Tensor:
    weights = torch.from_numpy(1 / (1 + out.detach().numpy() ** 2))
    return (weights * out).sum()


class Margin(torch.autograd.Function):
    """A loss of the user's own, with its own backward."""

    @staticmethod
    def forward(ctx: Any, out: Tensor) -> Tensor:
        ctx.save_for_backward(out)
        return out.clamp(min=0).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (out,) = ctx.saved_tensors
        return gradient * (out > 0).to(out.dtype) * 3


LOSSES: dict[str, Loss] = {
    "by hand": lambda out, y: ((out - TARGET) ** 2).mean(),
    "unreduced": lambda out, y: F.cross_entropy(out, y, reduction="none").mean(),
    "unreduced squares": lambda out, y: (F.mse_loss(out, TARGET, reduction="none") * (y[:, None] > 1)).sum() / 3,
    "kl_div": lambda out, y: F.kl_div(out.log_softmax(1), TARGET.softmax(1), reduction="batchmean"),
    "huber": lambda out, y: F.huber_loss(out, TARGET),
    "smooth l1": lambda out, y: F.smooth_l1_loss(out, TARGET),
    "gaussian": lambda out, y: F.gaussian_nll_loss(out[:, :2], TARGET[:, :2], F.softplus(out[:, 2:])),
    "ctc": lambda out, y: F.ctc_loss(
        out.view(3, 4, 4).log_softmax(-1), torch.ones(4, 1, dtype=torch.long), (3,) * 4, (1,) * 4
    ),
    "info_nce": info_nce,
    "variance": variance,
    "triplets": triplets,
    "hardest": hardest,
    "one by one": one_by_one,
    "masked": masked,
    "NumPy": in_numpy_too,
    "own function": lambda out, y: Margin.apply(out),
    "own function of a view": lambda out, y: Margin.apply(out.view(-1)[:10]),
    "median": lambda out, y: out.median() + out.max() - out.amin(),
    "logsumexp over samples": lambda out, y: out.logsumexp(0).sum(),
    "einsum": lambda out, y: torch.einsum("ni,nj->ij", out, out).sum(),
    "cdist": lambda out, y: torch.cdist(out, TARGET).mean(),
    "sorting": lambda out, y: (out.sort(0).values * torch.arange(N)[:, None]).sum(),
    "out of order": lambda out, y: F.cross_entropy(out[torch.arange(N - 1, -1, -1)], y),
    "another device copy": lambda out, y: F.cross_entropy(out.to("cpu"), y),
    "a deprecated reduction": lambda out, y: out.square().mean(dim=0).prod(),
    "weighted by its own output": lambda out, y: F.mse_loss(out, TARGET * out),
    "a target that requires a gradient": lambda out, y: F.mse_loss(out, out.roll(1, 0)),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_any_loss_of_the_whole_output(loss: Loss) -> None:
    assert_transparent(mlp(), lambda model, x, y: loss(model(x), y).backward(), *points())


def test_the_old_spelling_of_reductions() -> None:
    def script(model: nn.Module, x: Tensor, y: Tensor) -> None:
        with pytest.warns(UserWarning, match="deprecated"):
            F.mse_loss(model(x), TARGET, size_average=True).backward()

    assert_transparent(mlp(), script, *points())


def test_each_micro_batch_runs_twice_without_and_with_its_activations() -> None:
    model, (x, y) = mlp(), points()
    wrapped(model, 5)
    variance(model(x), y).backward()
    seen = Forwards(model[0])
    out = model(x)
    assert seen.sizes == []
    loss = variance(out, y)
    assert seen.sizes == [4, 4, 4] and not any(seen.recording)
    loss.backward()
    assert seen.sizes == [4] * 6 and all(seen.recording[3:])


def test_activations_that_still_fit_are_kept() -> None:
    model, (x, y) = mlp(), points()
    want = plain_gradients(model, lambda m, x, y: variance(m(x), y).backward(), x, y)
    run = wrapped(model, 5, fields={"mode": "replay", "keep": 2})
    variance(model(x), y).backward()
    model.zero_grad()
    seen = Forwards(model[0])
    variance(model(x), y).backward()
    assert run.plan is not None and run.plan.keep == 2
    assert seen.sizes == [4] * 4 and seen.recording == [False, True, True, True]
    assert relative_error(gradients_of(model), want) <= 1e-12


class Tokens(torch.autograd.Function):
    """The identity; as long as its activations live, so does a token."""

    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    most = 0

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        Tokens.most = max(Tokens.most, len(Tokens.alive))
        if value.requires_grad:
            ctx.token = type("Token", (), {})()
            Tokens.alive.add(ctx.token)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class Tokened(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return Tokens.apply(self.inner[0](x)) @ self.inner[0].weight


@pytest.mark.parametrize("known", [False, True])
def test_activations_are_kept_for_one_call_at_a_time(known: bool) -> None:
    """What fits was planned for one: another call of the same step would run beside them."""

    def script(model: nn.Module, x: Tensor, y: Tensor) -> None:
        one = model(x)
        first = one.std(0).sum()
        other = model(-x)
        second = F.mse_loss(other, x) if known else (one.detach() @ other.t()).logsumexp(1).mean()
        (first + second).backward()

    x, y = points()
    model = Tokened()
    want = plain_gradients(model, script, x, y)
    run = wrapped(model, 5, fields={"mode": "replay", "keep": 1})
    script(model, x, y)
    model.zero_grad()
    gc.collect()
    Tokens.most = len(Tokens.alive)
    assert not Tokens.alive
    script(model, x, y)
    assert Tokens.most == 0 and run.plan is not None
    assert relative_error(gradients_of(model), want) <= 1e-12


def test_a_planned_replay_keeps_what_fits() -> None:
    """The budget of the machine holds all activations of a tiny model: it runs once."""
    model, (x, y) = mlp(), points()
    want = plain_gradients(model, lambda m, x, y: variance(m(x), y).backward(), x, y)
    memfit.wrap(model, SGD(model.parameters(), lr=0.1), micro_batch=5)
    variance(model(x), y).backward()
    assert relative_error(gradients_of(model), want) <= 1e-12
    model.zero_grad()
    seen = Forwards(model[0])
    variance(model(x), y).backward()
    assert sum(seen.sizes) <= 2 * N
    assert relative_error(gradients_of(model), want) <= 1e-12


def test_only_outputs_that_are_used_get_gradients() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = mlp(), mlp(seed=1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.one(x), self.other(x)

    assert_transparent(Two(), lambda model, x, y: variance(model(x)[0], y).backward(), *points())


def test_a_loss_with_weights_of_its_own() -> None:
    """ArcFace and its kind: the loss's weights get their gradient, the model gets its through them."""
    x, y = points()

    def train(model: nn.Module, head: nn.Module) -> list[Tensor | None]:
        loss = F.cross_entropy(F.linear(F.normalize(model(x)), F.normalize(head.weight)), y)
        loss.backward()
        return [p.grad for p in (*model.parameters(), *head.parameters())]

    head = nn.Linear(4, 4, bias=False).double()
    want = train(mlp(), copy.deepcopy(head))
    model = mlp()
    wrapped(model, 5, optimizer=SGD([*model.parameters(), *head.parameters()], lr=0.1))
    found = train(model, head)
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-15) for a, b in zip(found, want) if a is not None and b is not None)


# ---- what happens once, and as it was when the call was made


class Counting(nn.Module):
    """Writes buffers in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(dropout=0.5)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += len(x)
        return self.net(x)


@pytest.mark.parametrize("known", [True, False])
def test_buffers_are_written_in_the_first_pass_alone(known: bool) -> None:
    model, (x, y) = Counting(), points()
    wrapped(model, 5)
    for _ in range(2):
        out = model(x)
        (F.cross_entropy(out, y) if known else variance(out, y)).backward()
    assert (int(model.calls), int(model.seen)) == (2, 2 * N)


def test_the_second_pass_draws_what_the_first_drew() -> None:
    """Dropout: the gradient is that of the very output the loss was computed from."""
    model, (x, y) = mlp(dropout=0.5), points()
    twin = copy.deepcopy(model)
    wrapped(model, 4)
    variance(model(x), y).backward()
    model.zero_grad()
    torch.manual_seed(1)
    out = model(x)
    value = variance(out, y)
    torch.rand(7)  # the script draws between forward and backward
    state = torch.get_rng_state()
    value.backward()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    by_hand = torch.cat([twin(x[start : start + 4]) for start in range(0, N, 4)])
    assert torch.equal(by_hand, out)
    variance(by_hand, y).backward()
    assert relative_error(gradients_of(model), gradients_of(twin)) <= 1e-12


@pytest.mark.parametrize("frozen_at_call", [True, False])
def test_modes_and_frozen_weights_are_those_of_the_call(frozen_at_call: bool) -> None:
    """Switched between forward and backward: neither changes what runs again, and both stay as switched."""
    model, (x, y) = mlp(dropout=0.5), points()
    twin = copy.deepcopy(model)
    wrapped(model, 4)
    variance(model(x), y).backward()
    model.zero_grad()

    def train(model: nn.Sequential, run: Callable[[Tensor], Tensor]) -> None:
        model[0].requires_grad_(not frozen_at_call)
        torch.manual_seed(1)
        loss = variance(run(x), y)
        model.eval()
        model[0].requires_grad_(frozen_at_call)
        loss.backward()

    train(model, model)
    train(twin, lambda x: torch.cat([twin(x[start : start + 4]) for start in range(0, N, 4)]))
    assert not model.training and model[0].weight.requires_grad == frozen_at_call
    assert gradients_of(model)["0.weight"] is None
    assert relative_error(gradients_of(model), gradients_of(twin)) <= 1e-12


@pytest.mark.parametrize("known", [True, False])
def test_autocast_is_that_of_the_call(known: bool) -> None:
    """bfloat16 forward, backward outside the region: as micro-batches by hand, not as float32."""
    x, y = points()
    model, plain = mlp().float(), mlp().float()

    def run(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x.float())
            loss = F.cross_entropy(out, y) if known else unseen(out).square().float().mean()
        assert out.dtype is torch.bfloat16
        loss.backward()
        return loss.detach()

    exact = plain_gradients(mlp().float(), lambda m, x, y: F.cross_entropy(m(x), y).backward(), x.float(), y)
    wrapped(model, 5)
    value = run(model, x, y)
    assert torch.allclose(value, run(plain, x, y), rtol=1e-3)
    distance = relative_error(gradients_of(model), gradients_of(plain))
    assert distance <= 1e-2
    assert not known or distance < relative_error(gradients_of(plain), exact)


def test_a_model_that_checkpoints_itself() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = mlp(outputs=7), mlp(seed=1)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.last, checkpoint(self.first, x, use_reentrant=False), use_reentrant=False)

    assert_transparent(Checkpointed(), lambda model, x, y: variance(model(x), y).backward(), *points())
    assert_transparent(Checkpointed(), lambda model, x, y: F.cross_entropy(model(x), y).backward(), *points())


def test_hooks_on_modules_see_each_micro_batch() -> None:
    """Hooks belong to the forward: they run as often as it does, on its micro-batches, and may change what it returns."""
    model, plain, (x, y) = mlp(), mlp(), points()
    for m in (model, plain):
        m[0].register_forward_hook(lambda module, args, out: 2 * out)
        m[3].register_full_backward_hook(lambda module, given, received: (3 * given[0],))
    wrapped(model, 5)
    variance(model(x), y).backward()
    variance(plain(x), y).backward()
    assert relative_error(gradients_of(model), gradients_of(plain)) <= 1e-12


def test_hooks_on_the_output() -> None:
    def script(model: nn.Module, x: Tensor, y: Tensor) -> None:
        out = model(x)
        out.register_hook(lambda gradient: 2 * gradient)
        out.retain_grad()
        F.cross_entropy(out, y).backward()
        assert out.grad is not None and out.grad.shape == (N, 4)

    assert_transparent(mlp(), script, *points())


def test_the_gradient_of_the_output_by_autograd_grad() -> None:
    """Asked before the loss is computed, through an operation that makes the output whole."""

    def script(model: nn.Module, x: Tensor, y: Tensor) -> None:
        out = model(x)
        out = out + 0 * out.sum()
        (gradient,) = torch.autograd.grad(F.cross_entropy(out, y), out, retain_graph=True)
        out.backward(gradient)

    assert_transparent(mlp(), script, *points())


def test_outputs_that_do_not_depend_on_the_batch() -> None:
    class WithScale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.scale = mlp(), nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return self.net(x), self.scale.exp(), self.scale.detach() + 1

    def script(model: nn.Module, x: Tensor, y: Tensor) -> None:
        out, scale, constant = model(x)
        (variance(out, y) * scale.sum() + (constant * scale).sum()).backward()

    assert_transparent(WithScale(), script, *points())


def test_a_mean_and_a_sum_returned_by_the_model() -> None:
    class WithPenalties(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            out = self.net(x)
            return out, out.square().mean(), out.abs().sum()

    def script(model: nn.Module, x: Tensor, y: Tensor) -> None:
        out, mean, total = model(x)
        (F.cross_entropy(out, y) + mean + 0.01 * total).backward()

    assert_transparent(WithPenalties(), script, *points())


def test_recovery_starts_the_backward_again_and_trains_once() -> None:
    """Memory runs out in the second pass: smaller micro-batches, the same gradient."""

    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.most = mlp(), Aside(value=N)

        def forward(self, x: Tensor) -> Tensor:
            if torch.is_grad_enabled() and len(x) > self.most.value:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.")
            return self.net(x)

    model, (x, y) = Fails(), points()
    want = plain_gradients(model, lambda m, x, y: variance(m(x), y).backward(), x, y)
    run = wrapped(model, 5)
    variance(model(x), y).backward()
    model.zero_grad()
    model.most.value = 2
    variance(model(x), y).backward()
    assert relative_error(gradients_of(model), want) <= 1e-12
    assert [event.kind for event in run.events if event.kind == "out of memory"] == ["out of memory"]


def test_a_plan_in_replay_serves_a_known_loss_too() -> None:
    model, (x, y) = mlp(), points()
    want = plain_gradients(model, lambda m, x, y: F.cross_entropy(m(x), y).backward(), x, y)
    optimizer = SGD(model.parameters(), lr=0.1)
    memfit.wrap(model, optimizer, plan=fixed_plan(model, optimizer, N, 5, mode="replay"))
    F.cross_entropy(model(x), y).backward()
    assert relative_error(gradients_of(model), want) <= 1e-12
