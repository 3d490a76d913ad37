"""Script mode: whatever a training loop does around the model, it trains as without memfit.

Each test writes a loop once and runs it twice, with a cut batch and without memfit: parameters, gradients (None too),
state_dict and what the loop returns have to agree.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from helpers import (
    Aside,
    Forwards,
    assert_transparent,
    cut_gradients,
    fixed_plan,
    mlp,
    plain_gradients,
    points,
    unseen,
    wrapped,
)
from torch import Tensor, nn
from torch.func import functional_call
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from zoo import FAMILIES, first_batch
from zoo.plain import gradients_of, relative_error

import memfit
from memfit import Run

Loop = Callable[[nn.Module, Optimizer], Any]
"""A training loop's lines; what it returns is compared too."""

N = 12


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def assert_same_training(
    loop: Loop, *, build: Callable[[], nn.Module] = mlp, tolerance: float = 1e-12, micro_batch: int = 5, **settings: Any
) -> Run:
    """The loop leaves the same parameters, gradients and results with memfit as without."""
    plain, model = build(), build()
    wanted = loop(plain, AdamW(trained(plain), lr=1e-2))
    optimizer = AdamW(trained(model), lr=1e-2)
    run = wrapped(model, micro_batch, optimizer=optimizer, **settings)
    before = run.plan
    found = loop(model, optimizer)
    assert before is not None and not any(torch.equal(p, q) for p, q in zip(trained(build()), trained(plain)))
    assert list(model.state_dict()) == list(plain.state_dict())
    assert relative_error(model.state_dict(), plain.state_dict()) <= tolerance
    if any(p.grad is not None for p in plain.parameters()):
        assert relative_error(gradients_of(model), gradients_of(plain)) <= tolerance
    assert_close(found, wanted)
    return run


def assert_close(found: Any, wanted: Any) -> None:
    """Tensors and numbers up to rounding, everything else equal."""
    assert type(found) is type(wanted)
    if isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted):
            assert_close(one, other)
    elif isinstance(wanted, (Tensor, numpy.ndarray, float)):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    else:
        assert found == wanted


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    return [points(N, seed=i) for i in range(count)]


# ---- the loss on its way to backward


@pytest.mark.parametrize("factor", [1 / 8, 1024.0, -1.0, 0.0])
def test_a_loss_scaled_by_the_script(factor: float) -> None:
    def script(model: nn.Module, x: Tensor, y: Tensor) -> None:
        loss = F.cross_entropy(model(x), y)
        (loss * factor + F.mse_loss(model(x), torch.zeros_like(model(x)))).backward()

    assert_transparent(mlp(), script, *points())


def test_a_gradient_passed_to_backward() -> None:
    def script(model: nn.Module, x: Tensor, y: Tensor) -> None:
        F.cross_entropy(model(x), y).backward(torch.tensor(3.0, dtype=torch.float64))

    assert_transparent(mlp(), script, *points())


def test_a_gradient_passed_to_backward_of_the_output() -> None:
    def script(model: nn.Module, x: Tensor, y: Tensor) -> None:
        model(x).backward(torch.linspace(0, 1, 4 * N, dtype=torch.float64).view(N, 4))

    assert_transparent(mlp(), script, *points())


def test_several_backwards_of_several_calls() -> None:
    def script(model: nn.Module, x: Tensor, y: Tensor) -> None:
        F.cross_entropy(model(x), y).backward()
        first = F.cross_entropy(model(-x), y)
        second = model(2 * x).square().mean()
        second.backward()
        first.backward()

    assert_transparent(mlp(), script, *points())


def test_two_losses_summed_of_one_output() -> None:
    def script(model: nn.Module, x: Tensor, y: Tensor) -> None:
        out = model(x)
        (F.cross_entropy(out, y) + 0.1 * out.square().sum() + F.l1_loss(out[:, 0], x[:, 0])).backward()

    assert_transparent(mlp(), script, *points())


def test_torch_autograd_backward_of_two_losses() -> None:
    def script(model: nn.Module, x: Tensor, y: Tensor) -> None:
        out = model(x)
        torch.autograd.backward([F.cross_entropy(out, y), F.mse_loss(out, x[:, :4])])

    assert_transparent(mlp(), script, *points())


@pytest.mark.parametrize("known", [True, False])
def test_a_graph_retained_for_a_second_backward(known: bool) -> None:
    def script(model: nn.Module, x: Tensor, y: Tensor) -> None:
        out = model(x)
        loss = F.cross_entropy(out, y) if known else unseen(out).exp().mean()
        loss.backward(retain_graph=True)
        loss.backward()

    assert_transparent(mlp(), script, *points())


@pytest.mark.parametrize("known", [True, False])
def test_a_freed_graph_is_torchs_own_error(known: bool) -> None:
    model, (x, y) = mlp(), points()
    wrapped(model, 5)
    out = model(x)
    loss = F.cross_entropy(out, y) if known else unseen(out).exp().mean()
    loss.backward()
    once = gradients_of(model)
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        loss.backward()
    assert relative_error(gradients_of(model), once) == 0


@pytest.mark.parametrize("known", [True, False])
def test_gradients_by_autograd_grad(known: bool) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        x, y = points()
        out = model(x)
        loss = F.cross_entropy(out, y) if known else unseen(out).exp().mean()
        found = torch.autograd.grad(loss, list(model.parameters()))
        assert all(p.grad is None for p in model.parameters())
        for p, g in zip(model.parameters(), found):
            p.grad = g
        optimizer.step()
        return list(found)

    assert_same_training(loop)


def test_backward_for_chosen_inputs_leaves_the_others_alone() -> None:
    def script(model: nn.Sequential, x: Tensor, y: Tensor) -> None:
        F.cross_entropy(model(x), y).backward(inputs=list(model[0].parameters()))

    got = cut_gradients(mlp(), script, *points())
    want = plain_gradients(mlp(), script, *points())
    assert [name for name, g in want.items() if g is None] == ["3.weight", "3.bias"]
    assert relative_error(got, want) <= 1e-12


def test_the_total_is_added_to_gradients_that_are_there() -> None:
    def script(model: nn.Module, x: Tensor, y: Tensor) -> None:
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        F.cross_entropy(model(x), y).backward()

    assert_transparent(mlp(), script, *points())


# ---- the optimizer's side


def test_clipping_schedule_and_logging() -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> list[float]:
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=6)
        logged = []
        for x, y in batches(6):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            logged.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
            nn.utils.clip_grad_value_(model.parameters(), 0.05)
            optimizer.step()
            scheduler.step()
            logged += [loss.item(), scheduler.get_last_lr()[0]]
        return logged

    assert_same_training(loop, tolerance=1e-10)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("where", ["start", "before backward", "after step", "model"])
def test_zero_grad_anywhere(where: str, set_to_none: bool) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> None:
        for x, y in batches(4):
            if where == "start":
                optimizer.zero_grad(set_to_none=set_to_none)
            out = model(x)
            loss = F.cross_entropy(out, y)
            if where == "before backward":
                optimizer.zero_grad(set_to_none=set_to_none)
            elif where == "model":
                model.zero_grad(set_to_none=set_to_none)
            loss.backward()
            optimizer.step()
            if where == "after step":
                optimizer.zero_grad(set_to_none=set_to_none)

    assert_same_training(loop)


def test_an_overflow_under_a_grad_scaler() -> None:
    """float16 autocast: an overflow skips the step and halves the scale, with memfit as without."""

    def loop(model: nn.Module, optimizer: Optimizer) -> list[float]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
        found = []
        for step, (x, y) in enumerate(batches(6)):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(x.float()), y)
            if step == 2:
                loss = loss * 1e38  # the true scaled gradient overflows: that has to arrive
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            found.append(scaler.get_scale())
        assert found[2] == found[1] / 2
        return found

    assert_same_training(loop, build=lambda: mlp().float(), tolerance=2e-3)


def test_an_overflow_of_ours_is_not_handed_over() -> None:
    """Without a scaler the script's float16 gradients are finite; the scale memfit gathers with must not make them inf."""
    x, y = points()

    def script(model: nn.Module, x: Tensor, y: Tensor) -> None:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(model(x.float()), 30 * x[:, :4].float(), reduction="sum")
        loss.backward()

    model = mlp().float()
    want = plain_gradients(model, script, x, y)
    got = cut_gradients(model, script, x, y)
    assert all(g is not None and g.isfinite().all() for g in want.values())
    assert relative_error(got, want) <= 5e-3


def test_hooks_on_parameters_see_the_total_once_per_backward() -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> list[Any]:
        seen: list[Any] = []
        weight = next(model.parameters())
        weight.register_hook(lambda g: seen.append(g.clone()))
        weight.register_hook(lambda g: 2 * g)
        weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))  # type: ignore[union-attr]
        x, y = points()
        F.cross_entropy(model(x), y).backward()
        model(x).square().mean().backward()
        assert len(seen) == 4
        optimizer.step()
        return seen

    assert_same_training(loop)


class Doubled(torch.autograd.Function):
    """What memfit does not see into."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 2


class OwnLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.idle = nn.Linear(4, 4).double()

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out = self.body(x)
        return F.cross_entropy(out, y), out


@pytest.mark.parametrize("micro_batch", [5, "off"])
def test_hooks_on_parameters_are_called_once_where_the_models_own_loss_goes_through_a_function(micro_batch: Any) -> None:
    def trained(wrap: Any) -> list[Any]:
        torch.manual_seed(0)
        model, called = OwnLoss(), [0, 0]
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def halved(gradient: Tensor) -> Tensor:
            called[0] += 1
            return gradient / 2

        def idle(gradient: Tensor) -> None:
            called[1] += 1

        model.body[0].weight.register_hook(halved)
        model.idle.weight.register_hook(idle)
        wrap(model, optimizer)
        x, y = points()
        for _ in range(2):
            optimizer.zero_grad()
            Doubled.apply(model(x, y)[0]).backward()
            optimizer.step()
        return [called, *(p.detach() for p in model.parameters())]

    want_called, *want = trained(lambda *_: None)
    called, *got = trained(lambda *objects: memfit.wrap(*objects, micro_batch=micro_batch))
    assert called == want_called == [2, 0]
    assert all(torch.allclose(g, w, rtol=1e-12) for g, w in zip(got, want, strict=True))


class Heads(nn.Module):
    """Two outputs, each with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = (nn.Linear(7, 4).double() for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x), self.right(x)


def test_hooks_of_parameters_without_gradient_after_a_backward_that_raised() -> None:
    def loop(model: Any, optimizer: Optimizer) -> list[str]:
        seen: list[str] = []
        for p in model.right.parameters():
            p.register_hook(lambda g: seen.append("gradient"))
            p.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
        x, y = points()
        raising = model.left.weight.register_hook(lambda g: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            F.cross_entropy(model(x)[0], y).backward()
        raising.remove()
        for penalized in (False, True, False, False):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x)[0], y)
            if penalized:
                loss = loss + sum(p.square().sum() for p in model.right.parameters())
            loss.backward()
            optimizer.step()
            seen.append("next")
        return seen

    assert_same_training(loop, build=Heads)


def test_sharing_of_parameters_with_the_optimizer_step_hook() -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> int:
        steps = []
        optimizer.register_step_pre_hook(lambda *_: steps.append(1))
        for x, y in batches(2):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        return len(steps)

    assert_same_training(loop)


# ---- the model's side


def test_frozen_unused_and_tied_weights() -> None:
    family = FAMILIES["frozen"]
    model, batch = family.build(dtype=torch.float64), first_batch(family, dtype=torch.float64)

    def script(model: nn.Module, batch: Any) -> None:
        family.script_loss(model, batch).backward()

    got = cut_gradients(model, script, batch)
    want = plain_gradients(model, script, batch)
    none = {name for name, g in want.items() if g is None}
    assert {name for name, g in got.items() if g is None} == none and none
    assert relative_error(got, want) <= 1e-12


class SometimesUsed(nn.Module):
    """A branch that runs for batches with a positive first feature only."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.always, self.branch = nn.Linear(7, 4).double(), nn.Linear(7, 4).double()

    def forward(self, x: Tensor, branch: bool) -> Tensor:
        return self.always(x) + self.branch(x) if branch else self.always(x)


def test_a_branch_that_some_steps_do_not_use_keeps_its_gradient_none() -> None:
    def loop(model: SometimesUsed, optimizer: Optimizer) -> list[bool]:
        found = []
        for step, (x, y) in enumerate(batches(4)):
            optimizer.zero_grad()
            F.cross_entropy(model(x, step % 2 == 0), y).backward()
            found.append(model.branch.weight.grad is None)
            optimizer.step()
        assert found == [False, True, False, True]
        return found

    assert_same_training(loop, build=SometimesUsed)


def test_freezing_and_thawing_between_steps() -> None:
    def loop(model: nn.Sequential, optimizer: Optimizer) -> list[bool]:
        found = []
        for step, (x, y) in enumerate(batches(4)):
            model[0].requires_grad_(step != 1)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            found.append(model[0].weight.grad is None)
            optimizer.step()
        return found

    assert_same_training(loop)


def test_evaluation_between_steps() -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        found = []
        contexts: list[Callable[[], AbstractContextManager[Any]]] = [torch.no_grad, torch.inference_mode, nullcontext]
        for (x, y), context in zip(batches(3), contexts):
            model.train()
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            model.eval()
            with context():
                out = model(x)
                found += [out.detach().clone(), (out.argmax(1) == y).double().mean()]
        return found

    assert_same_training(loop, build=lambda: mlp(dropout=0.0))


def test_evaluation_between_forward_and_backward() -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> Tensor:
        (x, y), (other, _) = batches(2)
        out = model(x)
        model.eval()
        with torch.no_grad():
            seen = model(other).clone()
        model.train()
        F.cross_entropy(out, y).backward()
        optimizer.step()
        return seen

    assert_same_training(loop)


def test_no_grad_in_training_mode_runs_plain() -> None:
    model, (x, _) = mlp(), points()
    seen = Forwards(model[0])
    wrapped(model, 5)
    with torch.no_grad():
        out = model(x)
    assert type(out) is Tensor and not out.requires_grad and seen.sizes == [N]


def test_training_goes_on_from_a_state_dict() -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> None:
        (x, y), (x2, y2) = batches(2)
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if _ == 0:
                model.load_state_dict(before[0])
                optimizer.load_state_dict(before[1])
        optimizer.zero_grad()
        F.cross_entropy(model(x2), y2).backward()
        optimizer.step()

    assert_same_training(loop)


def test_load_state_dict_with_assign() -> None:
    """Parameters that are replaced are the optimizer's no more; with or without memfit the model itself still trains."""
    model, (x, y) = mlp(), points()
    plain = mlp(seed=1)
    wrapped(model, 5)
    F.cross_entropy(model(x), y).backward()
    model.load_state_dict(copy.deepcopy(plain.state_dict()), assign=True)
    F.cross_entropy(model(x), y).backward()
    F.cross_entropy(plain(x), y).backward()
    assert relative_error(gradients_of(model), gradients_of(plain)) <= 1e-12


def test_copies_are_plain_models() -> None:
    model, (x, y) = mlp(), points()
    run = wrapped(model, 5)
    F.cross_entropy(model(x), y).backward()
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(stored, weights_only=False)]
    for twin in twins:
        assert twin.forward.__func__ is nn.Sequential.forward and not any("memfit" in key for key in vars(twin))
        seen = Forwards(twin[0])
        out = twin(x)
        assert type(out) is Tensor and seen.sizes == [N]
        assert torch.equal(out, copy.deepcopy(model)(x))
        assert relative_error(twin.state_dict(), model.state_dict()) == 0
    assert run.plan is not None and "forward" in vars(model)


def test_an_exponential_moving_average() -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
        for x, y in batches(3):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            ema.update_parameters(model)
        return [ema(points()[0]).detach(), *(p.detach() for p in ema.parameters())]

    assert_same_training(loop)


def test_functional_calls_run_plain() -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> list[Any]:
        x, y = points()
        weights = {name: 2 * p.detach() for name, p in model.named_parameters()}
        for p in weights.values():
            p.requires_grad_()
        loss = F.cross_entropy(functional_call(model, weights, (x,)), y)
        found: list[Any] = list(torch.autograd.grad(loss, list(weights.values())))

        def of(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(functional_call(model, weights, (x,)), y)

        plain = {name: p.detach() for name, p in weights.items()}
        found += list(torch.func.grad(of)(plain, x, y).values())
        found += list(torch.func.vmap(torch.func.grad(of), in_dims=(None, 0, 0))(plain, x[:, None], y[:, None]).values())
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        return found

    assert_same_training(loop)


# ---- reading and changing what goes in and out


READINGS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "argmax": lambda out, y: out.argmax(1),
    "accuracy": lambda out, y: (out.argmax(dim=-1) == y).double().mean().item(),
    "topk": lambda out, y: torch.topk(out, 2)[1],
    "print": lambda out, y: str(out).split("grad_fn")[0].split(),
    "numpy": lambda out, y: out.detach().cpu().numpy(),
    "tolist": lambda out, y: out.tolist(),
    "item": lambda out, y: out[0, 0].item(),
    "float": lambda out, y: float(out.detach().sum()),
    "softmax": lambda out, y: out.softmax(1).max(),
    "norm": lambda out, y: out.norm(),
    "max": lambda out, y: out.max(1).values,
    "iteration": lambda out, y: [row.sum() for row in out],
    "unbind": lambda out, y: torch.stack(out.unbind(1)),
    "chunks": lambda out, y: out.chunk(2, dim=1)[0],
    "clone": lambda out, y: out.clone(),
    "cat": lambda out, y: torch.cat([out, out]),
    "no_grad": lambda out, y: _under_no_grad(out),
    "shape": lambda out, y: (out.shape, out.dtype, out.device, len(out), out.dim(), out.numel(), out.requires_grad),
    "isnan": lambda out, y: bool(out.isnan().any()),
    "comparison": lambda out, y: (out > 0).sum(),
    "data": lambda out, y: out.data.mean(),
}


def _under_no_grad(out: Tensor) -> Tensor:
    with torch.no_grad():
        return F.cross_entropy(out, torch.zeros(len(out), dtype=torch.long)) + out.mean()


@pytest.mark.parametrize("reading", READINGS.values(), ids=READINGS)
@pytest.mark.parametrize("when", ["before", "after", "after backward"])
def test_outputs_read_around_the_loss(reading: Callable[[Tensor, Tensor], Any], when: str) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> Any:
        x, y = points()
        out = model(x)
        read = reading(out, y) if when == "before" else None
        loss = F.cross_entropy(out, y)
        read = reading(out, y) if when == "after" else read
        loss.backward()
        read = reading(out, y) if when == "after backward" else read
        optimizer.step()
        return _detached(read)

    assert_same_training(loop)


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return [_detached(item) for item in value] if type(value) is list else value


def test_a_loss_read_in_every_way() -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> list[Any]:
        x, y = points()
        loss = F.cross_entropy(model(x), y)
        logged = [loss.item(), loss.detach().clone(), f"{loss.detach():.4f}", loss.detach().numpy().item(), float(loss.data)]
        assert loss.requires_grad and loss.shape == () and bool(loss > 0)
        loss.backward()
        optimizer.step()
        return [*logged, loss.item()]

    assert_same_training(loop)


class WithLoss(nn.Module):
    """Returns its output beside its loss; `alive` says how many outputs there were at each forward, `samples` of how many."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.notes = Aside(alive=[], samples=0, made=[])

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        self.notes.samples += len(x)
        self.notes.alive.append(sum(not made.expired() for made in self.notes.made))
        out = self.body(x)
        self.notes.made.append(StorageWeakRef(out.untyped_storage()))
        return out, F.cross_entropy(out, y)


def test_an_output_beside_the_loss_that_nobody_holds_is_not_kept() -> None:
    model = WithLoss()
    memfit.wrap(model, SGD(model.parameters(), lr=0.1), micro_batch=3)
    for _ in range(2):
        model.notes.alive.clear()
        model.notes.made.clear()
        _, loss = model(*points())
        del _
        loss.backward()
    assert len(model.notes.alive) == 4 and not any(model.notes.alive)


READ_LOSS = {
    "item": lambda loss: loss.item(),
    "detached": lambda loss: loss.detach().float(),
    "data": lambda loss: loss.data.clone(),
    "inference": lambda loss: _in_inference(lambda: loss.detach() + 1),
}


def _in_inference(read: Callable[[], Any]) -> Any:
    with torch.inference_mode():
        return float(read())


@pytest.mark.parametrize("read", READ_LOSS.values(), ids=READ_LOSS)
def test_a_models_own_loss_read_before_backward_is_computed_once(read: Callable[[Tensor], Any]) -> None:
    """`total += loss.detach()` before backward, as examples have it."""
    plain, model = WithLoss(), WithLoss()
    model.load_state_dict(plain.state_dict())
    memfit.wrap(model, SGD(model.parameters(), lr=0.1), micro_batch=5)
    model(*points())[1].backward()  # plans, and proves
    model.notes.samples, found = 0, []
    for each in (plain, model):
        each.zero_grad()
        _, loss = each(*points())
        found.append(read(loss))
        loss.backward()
    assert model.notes.samples == N
    assert_close(found[1], found[0])
    assert relative_error(gradients_of(model), gradients_of(plain)) <= 1e-12


def test_a_models_own_loss_read_after_another_loss() -> None:
    """It is weighted by what its mean divides by, in the pass for the other loss."""
    model = WithLoss()
    memfit.wrap(model, SGD(model.parameters(), lr=0.1), micro_batch=5)
    for _ in range(2):
        model.notes.samples = 0
        out, loss = model(*points())
        F.mse_loss(out, torch.zeros_like(out)).backward()
        assert_close(loss.detach(), F.cross_entropy(model.body(points()[0]), points()[1]).detach())
    assert model.notes.samples == N


@pytest.mark.parametrize("known", [True, False])
def test_inputs_changed_in_place_before_backward_raise_torchs_own_error(known: bool) -> None:
    """The weights change between forward and backward; PyTorch itself refuses that."""
    model, (x, y) = mlp(), points()
    wrapped(model, 5)
    out = model(x)
    if not known:
        loss = (out @ out.T).mean()
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        if known:
            loss = F.cross_entropy(out, y)
        loss.backward()
    F.cross_entropy(model(x), y).backward()


def test_weights_changed_in_place_before_backward_raise_torchs_own_error() -> None:
    model, (x, _) = mlp(), points()
    wrapped(model, 5)
    loss = unseen(model(x)).exp().mean()
    with torch.no_grad():
        model[3].weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_output_changed_in_place() -> None:
    def script(model: nn.Module, x: Tensor, y: Tensor) -> None:
        out = model(x)
        out[:, 0] = 0.0
        out *= 2
        out.add_(1.0)
        F.cross_entropy(out.clamp_(min=0.1), y).backward()

    assert_transparent(mlp(), script, *points())


def test_the_batch_may_change_after_backward() -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> None:
        x, y = points()
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            x.mul_(0.9).add_(0.1)

    assert_same_training(loop)


@pytest.mark.parametrize("known", [True, False])
def test_inputs_that_require_gradients(known: bool) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> Tensor | None:
        x, y = points()
        x.requires_grad_()
        out = model(x)
        (F.cross_entropy(out, y) if known else unseen(out).exp().mean()).backward()
        optimizer.step()
        return x.grad

    assert_same_training(loop)


def test_a_model_in_front_of_the_wrapped_one_gets_its_gradient() -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor | None]:
        front = mlp(outputs=7, seed=5)
        x, y = points()
        F.cross_entropy(model(front(x)), y).backward()
        optimizer.step()
        return [p.grad for p in front.parameters()]

    assert_same_training(loop)


def test_a_model_behind_the_wrapped_one_gets_its_gradient() -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor | None]:
        behind = mlp(inputs=4, outputs=3, seed=5)
        x, y = points(classes=3)
        F.cross_entropy(behind(model(x)), y).backward()
        optimizer.step()
        return [p.grad for p in behind.parameters()]

    assert_same_training(loop)


def test_a_model_fed_with_its_own_output() -> None:
    def script(model: nn.Module, x: Tensor, y: Tensor) -> None:
        F.cross_entropy(model(model(model(x)))[:, :4], y).backward()

    assert_transparent(mlp(outputs=7), script, *points())


def test_outputs_of_several_calls_joined_by_the_script() -> None:
    def script(model: nn.Module, x: Tensor, y: Tensor) -> None:
        F.cross_entropy(torch.cat([model(x[:7]), model(x[7:])]), y).backward()

    assert_transparent(mlp(), script, *points())


def test_batches_of_every_size_in_one_step() -> None:
    """Those that fit a micro-batch run whole beside those that are cut."""

    def script(model: nn.Module, x: Tensor, y: Tensor) -> None:
        for n in (12, 1, 2, 6, 5, 11):
            F.cross_entropy(model(x[:n]), y[:n]).backward()

    assert_transparent(mlp(), script, *points())


def test_adversarial_training() -> None:
    """The gradient of the input, asked for first, makes the next input."""

    def script(model: nn.Module, x: Tensor, y: Tensor) -> None:
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(F.cross_entropy(model(x), y), x)
        F.cross_entropy(model((x + 0.1 * gradient.sign()).detach()), y).backward()

    assert_transparent(mlp(), script, *points())


def test_a_checkpointed_loss() -> None:
    """It counts what is saved for backward: memfit's own passes must not be among it."""

    def script(model: nn.Module, x: Tensor, y: Tensor) -> None:
        checkpoint(lambda out: F.cross_entropy(out, y), model(x), use_reentrant=False).backward()

    assert_transparent(mlp(), script, *points())


@pytest.mark.parametrize("with_loss", [False, True])
@pytest.mark.parametrize("micro_batch", ["auto", 2])
def test_a_call_inside_of_the_scripts_own_checkpoint_runs_as_it_is(
    micro_batch: Any, with_loss: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    model, (x, y) = mlp(), points()
    plain = copy.deepcopy(model)
    run = memfit.wrap(model, SGD(model.parameters(), lr=0.1), micro_batch=micro_batch)
    for either in (model, plain):
        if with_loss:
            checkpoint(lambda x: F.cross_entropy(either(x), y), x, use_reentrant=False).backward()  # noqa: B023
        else:
            F.cross_entropy(checkpoint(either, x, use_reentrant=False), y).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters()))
    assert "inside the script's own checkpoint" in capsys.readouterr().err
    run.undo()


def test_a_model_called_twice_for_one_loss() -> None:
    """Siamese: the loss needs both outputs together."""

    def script(model: nn.Module, x: Tensor, y: Tensor) -> None:
        one, other = model(x), model(x.flip(0))
        F.cosine_embedding_loss(one, other, torch.ones(len(x), dtype=torch.float64)).backward()

    def against_each_other(model: nn.Module, x: Tensor, y: Tensor) -> None:
        F.mse_loss(model(x), model(x.flip(0))).backward()

    def against_itself(model: nn.Module, x: Tensor, y: Tensor) -> None:
        F.mse_loss(model(x), model(x.flip(0)).detach()).backward()

    for lines in (script, against_each_other, against_itself):
        assert_transparent(mlp(), lines, *points())


# ---- what models take and return


@dataclass
class Inputs:
    x: Tensor
    scale: float
    name: str


@dataclass
class Outputs:
    logits: Tensor
    hidden: tuple[Tensor, ...]
    name: str = "net"


class Nested(nn.Module):
    """Takes and returns nested things; `returns` says which."""

    def __init__(self, returns: str) -> None:
        super().__init__()
        self.net, self.returns = mlp(), returns

    def forward(self, inputs: Any, y: Tensor | None = None) -> Any:
        x = inputs["x"] if isinstance(inputs, dict) else inputs.x if isinstance(inputs, Inputs) else inputs[0]
        hidden = self.net[1](self.net[0](x))
        logits = self.net[3](hidden)
        if self.returns == "dict":
            return {"logits": logits, "hidden": [hidden, hidden.detach()], "size": 4, "none": None}
        if self.returns == "dataclass":
            return Outputs(logits, (hidden,))
        loss = F.cross_entropy(logits, y)
        if self.returns == "loss":
            return loss
        if self.returns == "dict with loss":
            return {"loss": loss, "logits": logits}
        if self.returns == "two losses":
            return loss, hidden.square().mean()
        return logits, loss

    def loss(self, out: Any, y: Tensor) -> Tensor:
        if self.returns == "dict":
            return F.cross_entropy(out["logits"], y) + out["hidden"][0].square().mean()
        if self.returns == "dataclass":
            assert out.name == "net"
            return F.cross_entropy(out.logits, y)
        if self.returns == "two losses":
            return out[0] + 0.5 * out[1]
        return out if self.returns == "loss" else out["loss"] if self.returns == "dict with loss" else out[1]


TAKEN: dict[str, Callable[[Tensor], Any]] = {
    "tuple": lambda x: (x, 3),
    "dict": lambda x: {"x": x, "flag": True, "names": ["a"] * len(x)},
    "dataclass": lambda x: Inputs(x, 0.5, "batch"),
}


@pytest.mark.parametrize("taken", TAKEN)
@pytest.mark.parametrize("returns", ["dict", "dataclass", "loss", "tuple", "dict with loss", "two losses"])
def test_nested_inputs_and_outputs(taken: str, returns: str) -> None:
    def loop(model: Nested, optimizer: Optimizer) -> float:
        for x, y in batches(2):
            optimizer.zero_grad()
            loss = model.loss(model(TAKEN[taken](x), y=y), y)
            loss.backward()
            optimizer.step()
        return loss.item()

    assert_same_training(loop, build=lambda: Nested(returns))


@pytest.mark.parametrize("name", ["hf_gpt2", "bert", "t5"])
def test_model_outputs_of_transformers(name: str) -> None:
    family = FAMILIES[name]
    pytest.importorskip("transformers")
    model, batch = family.build(dtype=torch.float64), first_batch(family, dtype=torch.float64)

    def script(model: nn.Module, batch: dict[str, Tensor]) -> None:
        out = model(**batch)
        assert out["loss"] is out.loss and list(out)[:2] == ["loss", "logits"] and out[0] is out.loss
        out.loss.backward()
        assert out.logits.shape[0] == N

    assert_transparent(model, script, batch, tolerance=1e-6 if name == "t5" else 1e-12)


class TimeFirst(nn.Module):
    """[T, B] tokens through an LSTM, [T, B, V] logits or them flattened; `size` may equal T."""

    def __init__(self, flattened: bool) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embedding, self.lstm, self.head = nn.Embedding(9, 6), nn.LSTM(6, 8), nn.Linear(8, 9)
        self.flattened = flattened
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.lstm(self.embedding(tokens))[0])
        return logits.reshape(-1, 9) if self.flattened else logits


@pytest.mark.parametrize("flattened", [False, True])
@pytest.mark.parametrize("time", [5, N, 16])
def test_time_before_batch(flattened: bool, time: int) -> None:
    """A [T, B] batch from a loader of B samples is cut along B, also where T equals B."""
    tokens = torch.randint(0, 9, (N, time + 1), generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(tokens), batch_size=4, collate_fn=lambda rows: torch.stack([r[0] for r in rows], 1))

    def train(model: nn.Module, optimizer: Optimizer, batches: Any) -> None:
        for batch in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(batch[:-1]).reshape(-1, 9), batch[1:].reshape(-1)).backward()
            optimizer.step()

    plain, model = TimeFirst(flattened), TimeFirst(flattened)
    train(plain, AdamW(plain.parameters(), lr=1e-2), [tokens.t()])
    optimizer = AdamW(model.parameters(), lr=1e-2)
    run = wrapped(model, 5, optimizer=optimizer, loader=loader, target_batch=N)
    notes = Aside(shapes=[])
    model.embedding.register_forward_hook(lambda module, args, out: notes.shapes.append(tuple(out.shape[:2])))
    train(model, optimizer, run.loader)
    assert relative_error(model.state_dict(), plain.state_dict()) <= 1e-12
    assert notes.shapes[-3:] == [(time, 4)] * 3


def test_a_mask_with_as_many_rows_as_samples_is_no_batch() -> None:
    """[time, time] for all samples, where time happens to be the number of samples."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                self.query, self.head = nn.Linear(6, 6).double(), nn.Linear(6, 4).double()

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            query = self.query(x)
            return self.head(((query @ query.transpose(1, 2) + mask).softmax(-1) @ query).mean(1))

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, N, 6, dtype=torch.float64, generator=generator)
    mask = torch.full((N, N), -torch.inf, dtype=torch.float64).triu(1)
    assert_transparent(Masked(), lambda model, x, m: F.cross_entropy(model(x, m), points()[1]).backward(), x, mask)


def test_a_flattened_output_of_batch_before_time() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                self.embedding, self.head = nn.Embedding(9, 6), nn.Linear(6, 9)
            self.double()

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.embedding(tokens).tanh()).view(-1, 9)

    tokens = torch.randint(0, 9, (N, 7), generator=torch.Generator().manual_seed(0))
    for loss in (
        lambda out: F.cross_entropy(out, tokens.view(-1)),
        lambda out: F.cross_entropy(out.view(N, 7, 9)[:, -1], tokens[:, -1]),
        lambda out: out.logsumexp(0).square().mean(),
    ):
        assert_transparent(Flat(), lambda model, x, loss=loss: loss(model(x)).backward(), tokens)


# ---- random draws


@pytest.mark.parametrize("known", [True, False])
def test_dropout_draws_are_those_of_the_same_micro_batches_by_hand(known: bool) -> None:
    """The k-th micro-batch draws what the k-th forward of a loop by hand draws, in both passes of replay."""
    x, y = points()

    def loss_of(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out, y) if known else F.cross_entropy(out, y, reduction="none").mean()

    model, by_hand = mlp(dropout=0.5), mlp(dropout=0.5)
    wrapped(model, 4)
    loss_of(model(x), y).backward()  # learns
    model.zero_grad()
    torch.manual_seed(3)
    loss_of(model(x), y).backward()
    after = torch.get_rng_state()
    torch.manual_seed(3)
    for start in range(0, N, 4):
        (loss_of(by_hand(x[start : start + 4]), y[start : start + 4]) / 3).backward()
    assert torch.equal(torch.get_rng_state(), after)
    assert relative_error(gradients_of(model), gradients_of(by_hand)) <= 1e-12


# ---- several loader batches per step


def stacked(loop_batches: int, n: int = 4) -> DataLoader:
    x, y = points(loop_batches * n)
    return DataLoader(TensorDataset(x, y), batch_size=n)


def test_a_script_that_accumulates_and_says_so() -> None:
    """8 samples per step, of which each iteration carries a half."""
    plain, model = mlp(), mlp()
    for start in range(0, 32, 8):
        x, y = points(32)
        F.cross_entropy(plain(x[start : start + 8]), y[start : start + 8]).backward()
        with torch.no_grad():
            for p in plain.parameters():
                p -= 0.1 * p.grad
                p.grad = None
    optimizer = SGD(model.parameters(), lr=0.1)
    run = wrapped(
        model, 3, share=4, optimizer=optimizer, loader=stacked(16, 2), target_batch=8, script_accumulation=2
    )
    seen = 0
    for i, (x, y) in enumerate(run.loader):
        assert len(x) == 4
        seen += len(x)
        (F.cross_entropy(model(x), y) / 2).backward()
        if (i + 1) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    assert seen == 32
    assert relative_error(model.state_dict(), plain.state_dict()) <= 1e-12


@pytest.mark.parametrize("known", [True, False])
def test_accumulation_that_nobody_declared_stops_before_any_update(known: bool) -> None:
    model = mlp()
    before = copy.deepcopy(model.state_dict())
    optimizer = SGD(model.parameters(), lr=0.1)
    run = wrapped(model, 3, share=8, optimizer=optimizer, loader=stacked(16), target_batch=8)
    with pytest.raises(memfit.UsageError, match="script_accumulation=") as raised:
        for i, (x, y) in enumerate(run.loader):
            out = model(x)
            loss = F.cross_entropy(out, y) if known else unseen(out).exp().mean()
            (loss / 8).backward()
            if (i + 1) % 8 == 0:
                optimizer.step()
                optimizer.zero_grad()
    assert "target_batch=8" in str(raised.value)
    assert relative_error(model.state_dict(), before) == 0


# ---- whole, off, undone


def test_a_batch_that_fits_runs_plain_bit_for_bit() -> None:
    """Planned for real: parameters, losses and random state are those of the plain script."""

    def loop(model: nn.Module, optimizer: Optimizer) -> list[Any]:
        torch.manual_seed(0)
        found = []
        for x, y in batches(3):
            optimizer.zero_grad()
            out = model(x)
            assert type(out) is Tensor
            loss = F.cross_entropy(out, y)
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return [*found, torch.get_rng_state().tolist()]

    plain, model = mlp(dropout=0.3), mlp(dropout=0.3)
    wanted = loop(plain, AdamW(plain.parameters()))
    optimizer = AdamW(model.parameters())
    run = memfit.wrap(model, optimizer)
    assert loop(model, optimizer) == wanted
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), plain.state_dict().values()))
    assert run.plan is not None and "fits as is" in " ".join(run.plan.notes)


def test_switched_off_everything_is_as_given(monkeypatch: pytest.MonkeyPatch) -> None:
    model, loader = mlp(), stacked(4)
    optimizer = SGD(model.parameters(), lr=0.1)
    attributes = dict(vars(model))
    disabled = memfit.wrap(model, optimizer, loader, target_batch=8, enabled=False)
    for run in (disabled, off(monkeypatch, model, optimizer, loader)):
        assert (run.model, run.optimizer, run.loader) == (model, optimizer, loader)
        assert vars(model) == attributes and run.plan is None and not run.enabled
    assert type(model(points()[0])) is Tensor


def off(monkeypatch: pytest.MonkeyPatch, model: nn.Module, optimizer: Optimizer, loader: Any) -> Run:
    monkeypatch.setenv("MEMFIT", "off")
    return memfit.wrap(model, optimizer, loader, target_batch=8)


def test_undo_gives_everything_back() -> None:
    model, loader = mlp(), stacked(4)
    optimizer = SGD(model.parameters(), lr=0.1)
    before = dict(vars(model)), optimizer._optimizer_step_post_hooks.copy()
    parameters = [id(p) for p in model.parameters()]
    run = wrapped(model, 3, share=8, optimizer=optimizer, loader=loader, target_batch=8)
    for x, y in run.loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.undo()
    assert (dict(vars(model)), optimizer._optimizer_step_post_hooks) == before
    assert [id(p) for p in model.parameters()] == parameters and run.loader is loader
    seen = Forwards(model[0])
    x, y = points()
    assert type(model(x)) is Tensor and seen.sizes == [N]


def test_wrapping_again_plans_again() -> None:
    model, (x, y) = mlp(), points()
    optimizer = SGD(model.parameters(), lr=0.1)
    first = wrapped(model, 5, optimizer=optimizer, loader=stacked(6), target_batch=12)
    F.cross_entropy(model(x), y).backward()
    second = wrapped(model, 3, optimizer=optimizer, loader=first.loader, target_batch=12)
    model.zero_grad()
    seen = Forwards(model[0])
    F.cross_entropy(model(x), y).backward()
    assert seen.sizes[-4:] == [3, 3, 3, 3] and not first.enabled
    assert len(optimizer._optimizer_step_post_hooks) == 1 and len(second.loader) == 2
    second.undo()
    assert type(model(x)) is Tensor


# ---- compiled models


class Compilable(nn.Module):
    """torch leaves its own containers uncompiled."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_compiled_model_runs_compiled_in_at_most_two_sizes(in_place: bool, known: bool) -> None:
    ran: list[int] = []

    def backend(graph: Any, inputs: list[Any]) -> Any:
        def run(*args: Any) -> Any:
            ran.extend(len(a) for a in args if isinstance(a, Tensor) and not isinstance(a, nn.Parameter) and a.dim() == 2)
            return graph(*args)

        return run

    def script(model: Any, x: Tensor, y: Tensor) -> None:
        out = model(x)
        (F.cross_entropy(out, y) if known else F.cross_entropy(unseen(out), y, reduction="none").mean()).backward()

    plain, inner = Compilable(), Compilable()
    script(plain, *points(11))
    model: Any = inner
    if in_place:
        inner.compile(backend=backend)
    else:
        model = torch.compile(inner, backend=backend)
    run = memfit.wrap(model, SGD(inner.parameters(), lr=0.1), micro_batch=4)
    script(model, *points(11))
    inner.zero_grad()
    ran.clear()
    script(model, *points(11))
    assert relative_error(gradients_of(inner), gradients_of(plain)) <= 1e-12
    # In replay the last one's activations are kept. (After a run of Lightning in the same process, torch runs a compiled module
    # inside a backward eagerly.)
    assert ran == [4, 4, 3] or (not known and ran == [4, 4, 3, 4, 4])
    assert run.plan is not None and run.plan.micro_batch == 4
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore::UserWarning")  # of dynamo, about the graph breaks that stand-ins are
@pytest.mark.parametrize("compiled", ["known loss", "any loss", "model and loss", "the whole step"])
def test_a_compiled_script_around_a_cut_model(compiled: str) -> None:
    def script(model: nn.Module, x: Tensor, y: Tensor) -> None:
        def model_and_loss(x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(model(x), y)

        def step(x: Tensor, y: Tensor) -> None:
            F.cross_entropy(model(x), y).backward()

        if compiled == "known loss":
            torch.compile(lambda out, y: F.cross_entropy(out, y), backend="eager")(model(x), y).backward()
        elif compiled == "any loss":
            torch.compile(lambda out: (out.sin() + out).square().mean(), backend="eager")(model(x)).backward()
        elif compiled == "model and loss":
            torch.compile(model_and_loss, backend="eager")(x, y).backward()
        else:
            torch.compile(step, backend="eager")(x, y)

    assert_transparent(mlp(), script, *points())
    torch._dynamo.reset()


# ---- what is remembered


@pytest.mark.parametrize(
    "loss",
    [
        lambda out, y, step: F.cross_entropy(out / (1 + 0.01 * step), y),
        lambda out, y, step: F.cross_entropy(out, y) + (0.1 + 0.01 * step) * out.pow(2).mean(),
        lambda out, y, step: (lambda scaled: F.cross_entropy(scaled, y))(out.mul(1 + 0.01 * step)) * (1 + step),
    ],
    ids=["temperature", "weight", "scaled"],
)
def test_numbers_that_change_at_every_step_leave_nothing_behind(loss: Any) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    model, (x, y) = mlp(), points()
    wrapped(model, 5)
    alive = []
    for step in range(12):
        model.zero_grad()
        loss(model(x), y, step).backward()
        if step in (3, 11):
            gc.collect()
            alive.append(sum(type(each) is FakeTensorMode for each in gc.get_objects()))
    assert alive[1] <= alive[0]  # (what tests before this one left may go meanwhile)


@pytest.mark.parametrize("known", [True, False])
def test_batches_are_let_go_of_without_the_garbage_collector(known: bool) -> None:
    model = mlp()
    wrapped(model, 5)
    gone = []
    gc.disable()
    try:
        for step in range(4):
            model.zero_grad()
            x, y = points(seed=step)
            gone.append(weakref.ref(x))
            out = model(x)
            loss = F.cross_entropy(out, y) if known else unseen(out).exp().mean()
            loss.backward()
        del x, out, loss
        assert [ref() is None for ref in gone[1:]] == [True] * 3  # (the first is what `verify` compares on)
    finally:
        gc.enable()


# ---- planned for real


@pytest.mark.parametrize("known", [True, False])
def test_planned_script(known: bool) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> None:
        for x, y in batches(3):
            optimizer.zero_grad()
            out = model(x)
            (F.cross_entropy(out, y) if known else unseen(out).exp().mean()).backward()
            optimizer.step()

    plain, model = mlp(), mlp()
    loop(plain, AdamW(plain.parameters()))
    optimizer = AdamW(model.parameters())
    run = memfit.wrap(model, optimizer, micro_batch=5)
    loop(model, optimizer)
    assert relative_error(model.state_dict(), plain.state_dict()) <= 1e-12
    assert run.plan is not None and run.plan.micro_batch == 5


DETACHED_FIRST: dict[str, Callable[[Tensor], Tensor]] = {
    "detach": lambda out: out.detach(),
    "softmax": lambda out: out.softmax(1).detach(),
    "view": lambda out: out.view(-1, out.shape[1]).detach(),
    "data": lambda out: out.log_softmax(1).data.exp(),
    "no_grad": lambda out: _without_gradients(lambda: out.detach()),
}


def _without_gradients(read: Callable[[], Tensor]) -> Tensor:
    with torch.no_grad():
        return read()


@pytest.mark.parametrize("read", DETACHED_FIRST.values(), ids=DETACHED_FIRST)
def test_an_output_read_without_its_graph_before_anything_was_planned(read: Callable[[Tensor], Tensor]) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> Tensor:
        x, y = points()
        out = model(x)
        seen = read(out).argmax(1)
        F.cross_entropy(out, y).backward()
        optimizer.step()
        return seen

    plain, model = mlp(), mlp()
    wanted = loop(plain, SGD(plain.parameters(), lr=0.1))
    optimizer = SGD(model.parameters(), lr=0.1)
    memfit.wrap(model, optimizer, micro_batch=5)
    assert torch.equal(loop(model, optimizer), wanted)
    assert relative_error(model.state_dict(), plain.state_dict()) <= 1e-12


@pytest.mark.parametrize("lengths", [(9, 5, 3), (3, 5, 9)], ids=["shorter", "longer"])
def test_a_last_batch_of_one_sample_with_a_length_of_its_own(lengths: tuple[int, ...]) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> None:
        for samples, length in zip((6, 4, 1), lengths):
            x = torch.randn(samples, length, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(length))
            optimizer.zero_grad()
            F.mse_loss(model(x), x[..., :4]).backward()
            optimizer.step()

    plain, model = mlp(inputs=8), mlp(inputs=8)
    loop(plain, SGD(plain.parameters(), lr=0.1))
    optimizer = SGD(model.parameters(), lr=0.1)
    memfit.wrap(model, optimizer, micro_batch=2)
    loop(model, optimizer)
    assert relative_error(model.state_dict(), plain.state_dict()) <= 1e-12


def test_a_plan_made_elsewhere() -> None:
    model, (x, y) = mlp(), points()
    optimizer = SGD(model.parameters(), lr=0.1)
    run = memfit.wrap(model, optimizer, plan=fixed_plan(model, optimizer, N, 5))
    seen = Forwards(model[0])
    F.cross_entropy(model(x), y).backward()
    assert seen.sizes[-3:] == [4, 4, 4] and run.plan is not None


# ---- batches of a few samples


class Words(nn.Module):
    """Blocks over an embedding; takes texts, too, and returns what belongs to no sample beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 7).double()
        self.blocks = nn.ModuleList(nn.Sequential(mlp(outputs=7, seed=seed)) for seed in range(3))
        self.out = mlp()

    def forward(self, tokens: Tensor, texts: list[str]) -> Tensor:
        assert len(texts) == len(tokens)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.out(x.mean(1))


def words(samples: int) -> tuple[Tensor, list[str], Tensor]:
    generator = torch.Generator().manual_seed(samples)
    tokens = torch.randint(0, 11, (samples, 6), generator=generator)
    return tokens, [str(row.tolist()) for row in tokens], torch.randint(0, 4, (samples,), generator=generator)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("samples", [2, 3, 4])
def test_a_few_samples_are_planned_as_many_are(samples: int, known: bool) -> None:
    """Same peak, same levers: what one sample costs does not depend on how many the script's batches have."""

    def script(model: nn.Module, tokens: Tensor, texts: list[str], y: Tensor) -> None:
        out = model(tokens, texts)
        (F.cross_entropy(out, y) if known else unseen(out).exp().mean()).backward()

    peaks = []
    for n in (samples, 12):
        model = Words()
        run = memfit.wrap(model, SGD(model.parameters(), lr=0.1), micro_batch=1, checkpoint="all")
        batch = words(n)
        want = plain_gradients(model, script, *batch)
        script(model, *batch)
        assert run.plan is not None and run._core is not None and run._core.profile is not None
        assert relative_error(gradients_of(model), want) <= 1e-12
        assert run.plan.micro_batch == 1 and run.plan.accumulation == n
        assert run.plan.checkpoint == ("blocks.0", "blocks.1", "blocks.2")
        assert run._core.profile.source == "traced" and run._core.profile.timeline is not None
        peaks.append(run._core.profile.timeline.peak(1))  # (what kernels take beside it is measured, and differs by pages)
    if known:
        assert peaks[0] == peaks[1]


class Untraceable(nn.Module):
    """Selects by values, which cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x[torch.nonzero(x[:, 0] > -1e9).flatten()])


@pytest.mark.parametrize(
    "loss",
    [
        lambda out, y: F.nll_loss(out.log_softmax(1), y),
        lambda out, y: F.cross_entropy(out.view(-1, 4) / 2.0, y),
        lambda out, y: F.cross_entropy(out.double(), y.to(out.device)),
        lambda out, y: F.mse_loss(out, torch.zeros_like(out)) + F.mse_loss(out, out.new_ones(out.shape)),
        lambda out, y: F.cross_entropy(out, y, weight=torch.arange(1, 5, dtype=out.dtype, device=out.device)),
    ],
)
def test_outputs_of_what_cannot_be_traced_say_where_they_are(loss: Any) -> None:
    model = Untraceable()
    x, y = points(9)
    want = plain_gradients(model, lambda m, x, y: loss(m(x), y).backward(), x, y)
    memfit.wrap(model, SGD(model.parameters(), lr=0.1), micro_batch=4)
    out = model(x)
    assert out.device == torch.device("cpu")
    loss(out, y).backward()
    assert relative_error(gradients_of(model), want) <= 1e-12
