"""Batches that run whole: because they cannot be cut and fit, because pieces fail, because memfit itself does. And values of a
batch that decide what is computed."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import Aside, Forwards, mlp, points, wrapped
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset
from zoo.plain import gradients_of, relative_error

import memfit
from memfit import Refused
from memfit.engine import handover
from memfit.modes import script_passes as passes
from memfit.modes.pending_calls import UNDERWAY

X, Y = points()
T = torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Wrapper(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.net = mlp(dropout=dropout)


class Fixed(Wrapper):
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.view(12, 7))


class FixedRare(Fixed):
    """Fake tensors cannot run it."""

    def forward(self, x: Tensor) -> Tensor:
        self.rare = len(x[x.sum(1) > 1.0])
        return super().forward(x)


class Asserts(Wrapper):
    def forward(self, x: Tensor) -> Tensor:
        assert 24 % len(x) == 0
        return self.net(x)


class AssertsAll(Wrapper):
    def forward(self, x: Tensor) -> Tensor:
        assert len(x) == 12
        return self.net(x)


class Carries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(7, 4, batch_first=True).double()
        self.hidden: Any = None

    def forward(self, x: Tensor) -> Tensor:
        out, hidden = self.layer(x[:, None], self.hidden)
        self.hidden = hidden.detach()
        return out[:, 0]


def trained(model: nn.Module, loss: Callable[[nn.Module], Tensor], steps: int = 2) -> dict[str, Tensor]:
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("make", [Fixed, FixedRare, Asserts, AssertsAll, Carries])
def test_a_batch_that_fits_and_cannot_be_cut_runs_whole(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMFIT", "strict")
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    model = make()
    run = memfit.wrap(model, SGD(model.parameters(), lr=0.1), budget="8GiB")

    def loss(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(X), Y)

    wanted, found = trained(plain, loss), trained(model, loss)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    predicted = make is not FixedRare
    assert run.plan is not None and run.plan.accumulation == 1 if predicted else run.plan is None


@pytest.mark.parametrize("make", [Fixed, FixedRare, Carries])
def test_a_batch_that_cannot_be_cut_as_was_asked_is_refused(make: Any) -> None:
    model = make()
    memfit.wrap(model, SGD(model.parameters(), lr=0.1), micro_batch=5)
    with pytest.raises(Refused, match="cutting the batch"):
        model(X)


@pytest.mark.parametrize("micro_batch", [5, None])
@pytest.mark.parametrize("named", [True, False])
def test_batches_of_a_batch_sampler_have_its_size(named: bool, micro_batch: int | None) -> None:
    """The loader does not tell how many samples a batch has: the sampler does, or the first batch."""
    model = Fixed().double()
    data = TensorDataset(X.double(), Y)
    sampler = BatchSampler(SequentialSampler(data), 12, drop_last=True)
    loader = DataLoader(data, batch_sampler=sampler if named else list(sampler))
    settings = {} if micro_batch is None else {"micro_batch": micro_batch}
    run = memfit.wrap(
        model, SGD(model.parameters(), lr=0.1), loader, loss_fn=lambda m, b: F.cross_entropy(m(b[0]), b[1]), **settings
    )
    with nullcontext() if micro_batch is None else pytest.raises(Refused, match="on a few samples"):
        for batch in run.loader:
            run.step(batch)


def test_a_bare_assert_that_stands_in_the_way_surfaces_as_itself() -> None:
    model = Asserts()
    memfit.wrap(model, SGD(model.parameters(), lr=0.1), micro_batch=5)
    with pytest.raises(AssertionError) as raised:
        model(X)
    notes = getattr(raised.value, "__notes__", ["micro_batch="])  # Python 3.11
    assert "micro_batch=" in notes[-1]


# ---- a pass in pieces that fails


class FailsInPieces(Wrapper):
    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 4:
            raise ValueError("four")
        return self.net(x)


LOSSES: dict[str, Callable[[nn.Module], Tensor]] = {
    "one pass": lambda m: F.cross_entropy(m(X), Y),
    "two passes": lambda m: (m(X).flip(0) * T).mean(),
    "two losses": lambda m: _two(m(X)),
    "two calls": lambda m: F.mse_loss(m(X), m(X + 1)),
}


def _two(out: Tensor) -> Tensor:
    return F.cross_entropy(out, Y) + out.pow(2).mean()


def in_turn(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> tuple[dict[str, Tensor | None], Tensor]:
    torch.manual_seed(5)
    for _ in range(3):
        model.zero_grad()
        loss(model).backward()
    return gradients_of(model), torch.rand(())


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_batch_that_fails_in_pieces_alone_runs_whole(loss: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMFIT", "strict")
    wanted, drawn = in_turn(FailsInPieces(0.5), loss)
    model = FailsInPieces(0.5)
    run = wrapped(model, 5)
    found, then = in_turn(model, loss)
    assert relative_error(found, wanted) == 0.0 and torch.equal(drawn, then)
    assert [event.message for event in run.events if "four" in event.message]


LATER: set[int] = set()


class LeavesATerm(Wrapper):
    """Leaves a term beside its output that depends on the parameters alone until LATER, and on the samples from then on."""

    def forward(self, x: Tensor) -> Tensor:
        out = self.net(x)
        self.term = out.pow(2).mean() if LATER else next(self.net.parameters()).pow(2).mean()
        return out


def _term_last(model: Any, out: Tensor) -> Tensor:
    return F.mse_loss(out - out.mean(0), T) + 0.1 * model.term


def _term_first(model: Any, out: Tensor) -> Tensor:
    penalty = (0.1 * model.term).sqrt()
    return penalty + F.mse_loss(out - out.mean(0), T)


def _term_between(model: Any, out: Tensor) -> Tensor:
    centred = out - out.mean(0)
    return F.cross_entropy(out, Y) + model.term + centred.pow(2).mean() + out.pow(4).mean()


@pytest.mark.parametrize("of", [_term_last, _term_first, _term_between])
@pytest.mark.parametrize("twice", [False, True], ids=["once", "graph kept"])
def test_outputs_read_before_a_call_runs_whole_and_after_it_share_one_backward_pass(of: Any, twice: bool) -> None:
    def in_both(model: nn.Module) -> dict[str, Tensor | None]:
        for later in ([], [], [1]):
            LATER.update(later)
            model.zero_grad()
            loss = of(model, model(X))
            loss.backward(retain_graph=twice)
            if twice:
                loss.backward()
        LATER.clear()
        return gradients_of(model)

    wanted, model = in_both(LeavesATerm()), LeavesATerm()
    wrapped(model, 5)
    assert relative_error(in_both(model), wanted) < 1e-12


# ---- C++ uses an output of a batch that runs whole after all


class Moves(LeavesATerm):
    """Its forward drops entries and moves a counter and two buffers. It reads the counter and one buffer."""

    def __init__(self) -> None:
        super().__init__(dropout=0.5)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))
        self.register_buffer("factor", torch.ones((), dtype=torch.float64))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out = super().forward(x) * self.factor.clone() / self.calls
        self.factor.mul_(0.5)
        self.seen += len(x)
        return out


class Spread(torch.autograd.Function):
    """How far rows are from their mean."""

    @staticmethod
    def forward(ctx: Any, out: Tensor) -> Tensor:  # type: ignore[override]
        centred = out - out.mean(0)
        ctx.save_for_backward(centred)
        return centred.pow(2).mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (centred,) = ctx.saved_tensors
        return gradient * 2 * centred / centred.numel()


def _spread(out: Tensor) -> Tensor:
    return (out - out.mean(0)).pow(2).mean()


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    PAST: dict[str, Callable[[Tensor], Tensor]] = {
        "scripted": torch.jit.script(_spread),
        "function": Spread.apply,
        "vmap": lambda out: torch.vmap(lambda row: row.pow(3).mean())(out).sum(),
    }


def _then_read(model: Any, out: Tensor, past: Callable[[Tensor], Tensor]) -> Tensor:
    loss = past(out)
    model.term.item()
    return loss


def _term_before(model: Any, out: Tensor, past: Callable[[Tensor], Tensor]) -> Tensor:
    penalty = 0.1 * model.term
    return penalty + past(out)


def _output_before(model: Any, out: Tensor, past: Callable[[Tensor], Tensor]) -> Tensor:
    loss = F.mse_loss(out - out.mean(0), T)
    return loss + past(out)


def _known_loss_before(model: Any, out: Tensor, past: Callable[[Tensor], Tensor]) -> Tensor:
    loss = F.cross_entropy(out, Y)
    return loss + past(out)


BESIDE: dict[str, Callable[[Any, Tensor, Callable[[Tensor], Tensor]], Tensor]] = {
    "alone": lambda model, out, past: past(out),
    "term read": _then_read,
    "term added": lambda model, out, past: past(out) + 0.1 * model.term,
    "term before": _term_before,
    "output again": lambda model, out, past: past(out) + F.mse_loss(out - out.mean(0), T),
    "output before": _output_before,
    "known loss before": _known_loss_before,
}


def _backward(model: nn.Module, loss: Tensor) -> list[Tensor | None]:
    loss.backward()
    return [p.grad for p in model.parameters()]


def _twice(model: nn.Module, loss: Tensor) -> list[Tensor | None]:
    loss.backward(retain_graph=True)
    return _backward(model, loss)


def _asked(model: nn.Module, loss: Tensor) -> list[Tensor | None]:
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    assert all(p.grad is None for p in model.parameters())
    return list(found)


def used_past_python(model: Any, loss: Callable[[Any, Tensor], Tensor], take: Any) -> dict[str, Any]:
    """The gradients of the third batch, the first that fails in pieces, and all state after it."""
    for seed, later in enumerate([[], [], [1]]):
        LATER.update(later)
        torch.manual_seed(seed)
        model.zero_grad()
        found = take(model, loss(model, model(X)))
    LATER.clear()
    names = [name for name, _ in model.named_parameters()]
    state = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return {"gradients": dict(zip(names, found)), "state": (state, getattr(model, "calls", 0)), "drawn": torch.rand(())}


@pytest.mark.parametrize("past", PAST)
@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("take", [_backward, _twice, _asked])
@pytest.mark.parametrize("make", [LeavesATerm, Moves])
def test_c_plus_plus_uses_an_output_of_a_batch_that_runs_whole_after_all(
    past: str, beside: str, take: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMFIT", "strict")

    def loss(model: nn.Module, out: Tensor) -> Tensor:
        return BESIDE[beside](model, out, PAST[past])

    wanted, model = used_past_python(make(), loss, take), make()
    wrapped(model, 5)
    found = used_past_python(model, loss, take)
    assert relative_error(found["gradients"], wanted["gradients"]) < 1e-12
    assert found["state"] == wanted["state"] and torch.equal(found["drawn"], wanted["drawn"])


def _retained(model: nn.Module, take: Callable[[Tensor], Tensor]) -> Tensor | None:
    out = model(X)
    loss = take(out)
    out.retain_grad()
    out.register_hook(lambda gradient: gradient * 2)
    (loss + F.mse_loss(out - out.mean(0), T)).backward()
    return out.grad


def _of_two_calls(model: nn.Module, take: Callable[[Tensor], Tensor]) -> None:
    out, other = model(X), model(X + 1)
    loss = F.mse_loss(out, other)
    (loss + take(out) + 2 * take(other)).backward()


@pytest.mark.parametrize("past", PAST)
@pytest.mark.parametrize("script", [_retained, _of_two_calls])
def test_such_an_output_may_have_hooks_and_calls_beside_it(past: str, script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMFIT", "strict")

    plain, model = FailsInPieces(0.5), FailsInPieces(0.5)
    wrapped(model, 5)
    wanted, found = (torch.manual_seed(5) and script(each, PAST[past]) for each in (plain, model))
    assert relative_error(gradients_of(model), gradients_of(plain)) < 1e-12
    assert wanted is None or torch.allclose(found, wanted, rtol=1e-12, atol=0)


def test_memory_that_runs_out_in_its_second_pass_cuts_nothing() -> None:
    model, device = FailsInPieces(), Aside(full=False)

    def full(module: nn.Module, args: Any) -> None:
        if device.full:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    model.net[3].register_forward_pre_hook(full)
    forwards = Forwards(model.net[0])
    wrapped(model, 5)
    loss = PAST["scripted"](model(X))
    forwards.sizes.clear()
    device.full = True
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        loss.backward(retain_graph=True)
    device.full = False
    loss.backward()
    assert forwards.sizes == [12, 12]


def test_after_a_batch_whose_loss_raises_the_next_ones_are_cut() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    forwards = Forwards(model[0])
    optimizer = SGD(model.parameters(), 0.1)
    memfit.wrap(model, optimizer, micro_batch=3)
    for step in range(4):
        labels = torch.randint(3, (12,))
        labels[5] = 7 if step == 2 else 1
        try:
            F.cross_entropy(model(torch.randn(12, 6)), labels).backward()
        except IndexError:
            assert step == 2
        optimizer.step()
        optimizer.zero_grad()
    assert forwards.sizes[-4:] == [3, 3, 3, 3]


# ---- faults of memfit's own


@pytest.mark.parametrize("loss", ["one pass", "two losses"])
def test_a_fault_of_memfits_own_runs_the_batch_whole_and_writes_a_file(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise KeyError("a fault")

    fail.__code__ = fail.__code__.replace(co_filename=passes.__file__)
    monkeypatch.setattr(passes, "hand_over", fail)
    monkeypatch.setattr(UNDERWAY, "_whole", [(object(), weakref.ref(fail))])  # a call of another model waits all the while
    monkeypatch.delenv("MEMFIT")
    wanted, drawn = in_turn(Wrapper(0.5).net, LOSSES[loss])
    model = Wrapper(0.5).net
    run = wrapped(model, 5)
    found, then = in_turn(model, LOSSES[loss])
    assert relative_error(found, wanted) == 0.0 and torch.equal(drawn, then)
    written = [event.message.rsplit(" ", 1)[-1] for event in run.events if "attach this to an issue" in event.message]
    assert len(written) == 1 and "a fault" in Path(written[0]).read_text()
    os.remove(written[0])


def test_strictly_a_fault_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise KeyError("a fault")

    fail.__code__ = fail.__code__.replace(co_filename=handover.__file__)
    monkeypatch.setattr(passes, "hand_over", fail)
    monkeypatch.setenv("MEMFIT", "strict")
    model = mlp()
    wrapped(model, 5)
    with pytest.raises(KeyError, match="a fault"):
        F.cross_entropy(model(X), Y)
    assert all(p.grad is None for p in model.parameters())


# ---- values that decide


class Decides(Wrapper):
    def __init__(self, condition: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.condition = condition

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x * 2 if self.condition(x) else x)


CONDITIONS: dict[str, Callable[[Tensor], Any]] = {
    "max": lambda x: x.abs().max() > 100,
    "mean": lambda x: x.mean() > 100,
    "item": lambda x: x.abs().max().item() > 100,
    "count": lambda x: (x > 100).sum() > 2,
}


@pytest.mark.parametrize("condition", CONDITIONS.values(), ids=CONDITIONS)
def test_a_forward_that_decides_by_values_runs_whole_or_is_refused(condition: Any) -> None:
    model = Decides(condition)
    run = memfit.wrap(model, SGD(model.parameters(), lr=0.1), budget="8GiB")
    F.cross_entropy(model(X), Y).backward()
    assert run.plan is not None and run.plan.accumulation == 1
    model = Decides(condition)
    memfit.wrap(model, SGD(model.parameters(), lr=0.1), micro_batch=5)
    with pytest.raises(Refused, match="branches on values"):
        model(X)


HARMLESS: dict[str, Callable[[Tensor], Any]] = {
    "finite": lambda x: not torch.isfinite(x).all(),
    "mask": lambda x: not (x != 0).to(torch.long).all() and False,
    "read and unused": lambda x: x.abs().max().item() < 0 and False,
}


@pytest.mark.parametrize("condition", HARMLESS.values(), ids=HARMLESS)
def test_looks_at_values_that_decide_nothing_are_none(condition: Any) -> None:
    model = Decides(condition)
    run = memfit.wrap(model, SGD(model.parameters(), lr=0.1), micro_batch=5)
    F.cross_entropy(model(X), Y).backward()
    assert run.plan is not None and run.plan.accumulation == 3


STEP_LOSSES: dict[str, Callable[[nn.Module, Any], Tensor]] = {
    "item": lambda m, b: _doubled(F.cross_entropy(m(b[0]), b[1]), lambda loss: loss.item() > 1.45),
    "tensor": lambda m, b: _doubled(F.cross_entropy(m(b[0]), b[1]), lambda loss: loss > 1.45),
    "batch": lambda m, b: F.cross_entropy(m(b[0] / 2 if b[0].abs().max() > 2.4 else b[0]), b[1]),
    "classes": lambda m, b: _doubled(F.cross_entropy(m(b[0]), b[1]), lambda loss: (b[1] == 2).sum() > 2),
    "python's max": lambda m, b: max(F.cross_entropy(m(b[0]), b[1]), m(b[0]).pow(2).mean() * 3),
}


def _doubled(loss: Tensor, condition: Callable[[Tensor], Any]) -> Tensor:
    return loss * 2 if condition(loss) else loss


def apart_in_steps(loss: Any, **settings: Any) -> float:
    """How far parameters are from plain PyTorch's after four steps."""
    plain, model = mlp(), mlp()
    optimizers = [SGD(each.parameters(), lr=0.5) for each in (plain, model)]
    run = memfit.wrap(model, optimizers[1], loss_fn=loss, micro_batch=5, **settings)
    for seed in range(4):
        batch = points(seed=seed)
        optimizers[0].zero_grad()
        loss(plain, batch).backward()
        optimizers[0].step()
        run.step(batch)
    return relative_error(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("loss", STEP_LOSSES.values(), ids=STEP_LOSSES)
def test_a_loss_that_decides_by_values_sees_the_whole_batch(loss: Any) -> None:
    assert apart_in_steps(loss, sample=(X, Y)) <= 1e-12


def by_size(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    out = model(x)
    return F.cross_entropy(out * 2 if len(x) > 6 else out, y)


@pytest.mark.parametrize("weight", [None, lambda batch: len(batch[0])], ids=["inferred", "stated"])
def test_a_loss_that_decides_by_the_number_of_samples_sees_the_whole_batch(weight: Any) -> None:
    assert apart_in_steps(by_size, weight=weight) <= 1e-12
