"""Outputs and losses that wait answer as tensors do: short forms of training steps, each plain and cut, for three steps, as
what the first one shows (that several losses are computed from one output) changes how the later ones run."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import Forwards, mlp, points, wrapped
from torch import Tensor, nn
from zoo.plain import gradients_of, relative_error

from memfit.engine.version_checks import Modified

X, Y = points()
T = torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Form = Callable[[nn.Module], Any]


def both(model: nn.Module) -> Tensor:
    """The sum of two losses of one output, which waits from the second step on."""
    out = model(X)
    return F.cross_entropy(out, Y) + out.pow(2).mean()


def with_penalty(model: nn.Module) -> Tensor:
    loss = F.cross_entropy(model(X), Y)
    loss += 0.01 * sum(p.pow(2).sum() for p in model.parameters())
    return loss


def added_up(model: nn.Module) -> Tensor:
    out, total = model(X), 0.0
    for loss in (F.cross_entropy(out, Y), F.mse_loss(out, T)):
        total += loss
    return total  # type: ignore[return-value]


def second_term_in_place(model: nn.Module) -> Tensor:
    out = model(X)
    loss = F.cross_entropy(out, Y)
    loss += out.pow(2).mean()
    loss /= 2
    return loss


def kept_copy(model: nn.Module) -> Tensor:
    """What was computed from a loss before it was written keeps its value."""
    loss = both(model)
    before = loss * 3
    loss.mul_(5)
    return before + loss


def simsiam(model: nn.Module) -> Tensor:
    a, b = model(X), model(X + 1)
    return F.mse_loss(a, b.detach()) + F.mse_loss(b, a.detach())


def r_drop(model: nn.Module) -> Tensor:
    a, b = model(X), model(X + 0.5)
    first = F.kl_div(F.log_softmax(a, -1), F.softmax(b, -1), reduction="batchmean")
    second = F.kl_div(F.log_softmax(b, -1), F.softmax(a, -1), reduction="batchmean")
    return F.cross_entropy(a, Y) + F.cross_entropy(b, Y) + (first + second) / 2


def vicreg(model: nn.Module) -> Tensor:
    a, b = model(X), model(X + 0.5)
    return F.mse_loss(a, b) + F.relu(1 - a.std(0)).mean() + F.relu(1 - b.std(0)).mean()


def trades(model: nn.Module) -> Tensor:
    natural, adversarial = model(X), model(X + 0.1)
    robust = nn.KLDivLoss(reduction="sum")(F.log_softmax(adversarial, 1), F.softmax(natural, 1))
    return F.cross_entropy(natural, Y) + 6.0 / len(X) * robust


def triplet_and_norm(model: nn.Module) -> Tensor:
    anchor, positive, negative = model(X), model(X + 0.1), model(X - 1)
    return F.triplet_margin_loss(anchor, positive, negative) + 0.1 * (anchor.norm() + positive.norm())


@functools.cache
def scripted() -> Callable[[Tensor, Tensor], Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(_likelihood)


def _likelihood(out: Tensor, labels: Tensor) -> Tensor:
    return -torch.log_softmax(out, 1).gather(1, labels[:, None]).mean()


LOSSES: dict[str, Form] = {
    "div_": lambda m: F.cross_entropy(m(X), Y).div_(4),
    "/=": lambda m: _divided(F.cross_entropy(m(X), Y)),
    "sum.div_": lambda m: both(m).div_(4),
    "sum.mul_": lambda m: both(m).mul_(4),
    "sum.neg_": lambda m: both(m).neg_(),
    "sum.pow_": lambda m: both(m).pow_(2),
    "sum /=": lambda m: _divided(both(m)),
    "sum - constant": lambda m: (both(m) - 1.3).abs(),
    "sub with alpha": lambda m: torch.sub(both(m), m(X).abs().mean(), alpha=3),
    "penalty": with_penalty,
    "added up": added_up,
    "second term": second_term_in_place,
    "kept copy": kept_copy,
    "output /=": lambda m: F.cross_entropy(_divided(m(X)), Y),
    "output.mul_.add_": lambda m: F.mse_loss(m(X).mul_(2).add_(1), T),
    "relu in place": lambda m: F.mse_loss(F.relu(m(X), inplace=True), T),
    "simsiam": simsiam,
    "r-drop": r_drop,
    "vicreg": vicreg,
    "trades": trades,
    "triplet and norm": triplet_and_norm,
    "scripted": lambda m: scripted()(m(X), Y),
    "vmap": lambda m: torch.vmap(lambda o, t: (o - t).pow(2).mean())(m(X), T).mean(),
    "topk": lambda m: F.cross_entropy(m(X), Y, reduction="none").topk(5)[0].mean(),
    "maximum": lambda m: torch.maximum(F.cross_entropy(m(X), Y), both(m)),
    "stacked": lambda m: torch.stack([F.cross_entropy(m(X), Y), both(m)]).sum(),
}


def _divided(tensor: Tensor) -> Tensor:
    tensor /= 4
    return tensor


def three_steps(model: nn.Module, step: Form) -> list[tuple[Any, dict[str, Tensor | None]]]:
    """(what the step returns, the gradients it leaves), three times."""
    found = []
    for _ in range(3):
        model.zero_grad()
        value = step(model)
        found.append((value.detach() + 0, gradients_of(model)))
    return found


def assert_alike(step: Form, **settings: Any) -> None:
    model = mlp()
    run = wrapped(model, 5, **settings)
    for (value, gradients), (wanted, own) in zip(three_steps(model, step), three_steps(mlp(), step)):
        assert value.dtype == wanted.dtype and torch.allclose(value, wanted, rtol=1e-12, atol=0)
        assert relative_error(gradients, own) <= 1e-12
    run.undo()


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_loss_in_any_form_is_that_of_the_whole_batch(loss: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMFIT", "strict")

    def step(model: nn.Module) -> Tensor:
        value = loss(model)
        value.backward()
        return value

    assert_alike(step)


def accumulated(total: Tensor, write: Callable[[Tensor, Tensor], Any]) -> Form:
    def step(model: nn.Module) -> Tensor:
        sum_, out = total.clone(), model(X)
        write(sum_, out)
        F.cross_entropy(out, Y).backward()
        return sum_

    return step


NUMBER, COUNT = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.long)
METRICS: dict[str, Form] = {
    "add_": accumulated(NUMBER, lambda total, out: total.add_(out.detach().mean())),
    "+=": accumulated(NUMBER, lambda total, out: total.__iadd__(out.detach().mean())),
    "count.add_": accumulated(COUNT, lambda total, out: total.add_((out.argmax(1) == Y).sum())),
    "count +=": accumulated(COUNT, lambda total, out: total.__iadd__((out.argmax(1) == Y).sum())),
    "copy_": accumulated(torch.zeros(12, 4, dtype=torch.float64), lambda total, out: total.copy_(out.detach())),
    "setitem": accumulated(torch.zeros(12, 4, dtype=torch.float64), lambda total, out: total.__setitem__(0, out.detach()[0])),
}


@pytest.mark.parametrize("step", METRICS.values(), ids=METRICS)
def test_what_is_written_into_tensors_of_the_script_arrives_there(step: Form) -> None:
    assert_alike(step)


@pytest.mark.parametrize("loss", ["sum.div_", "second term", "kept copy", "sum /="])
def test_terms_that_are_written_in_place_gather_in_one_pass(loss: str) -> None:
    model = mlp()
    seen = Forwards(model[0])
    wrapped(model, 5)
    for _ in range(3):
        seen.sizes.clear()
        LOSSES[loss](model).backward()
    assert seen.sizes == [4, 4, 4]


@pytest.mark.parametrize("what", ["parameter", "parameters", "input"])
def test_what_is_written_through_data_before_the_loss_is_an_error(what: str) -> None:
    model, x = mlp(), X.clone()
    wrapped(model, 5)
    out = model(x)
    if what == "parameters":
        for p in model.parameters():
            p.data = p.data * 0.99
    else:
        (x if what == "input" else model[0].weight).data.mul_(1.5)
    with pytest.raises(Modified, match=r"through \.data"):
        F.cross_entropy(out, Y).backward()


LABELLED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "known": F.cross_entropy,
    "mean": lambda out, y: F.cross_entropy(out, y, reduction="none").mean(),
    "weighted": lambda out, y: (F.cross_entropy(out, y, reduction="none") * (1 + out.detach().softmax(1)[:, 0])).mean(),
    "gathered": lambda out, y: -out.log_softmax(1).gather(1, y[:, None]).mean(),
}


@pytest.mark.parametrize("writes", [lambda y: y.data.fill_(0), lambda y: y.fill_(0)], ids=["data", "in place"])
@pytest.mark.parametrize("loss", LABELLED)
def test_labels_written_between_a_loss_of_known_outputs_and_its_backward_count_as_in_plain(loss: str, writes: Any) -> None:
    model = mlp()
    found: list[Any] = []
    for each in (copy.deepcopy(model), model):
        seen, y = {"forwards": 0}, Y.clone()
        each[0].register_forward_hook(lambda *_, seen=seen: seen.update(forwards=seen["forwards"] + 1))
        if each is model:  # what its hook leaves is outside of it, so that its outputs are known at the call
            wrapped(model, 5)
        value = LABELLED[loss](each(X), y)
        writes(y)
        try:
            value.backward()
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
            found.append(None)
        else:
            found.append(gradients_of(each))
    plain, cut = found
    assert (plain is None) is (cut is None)
    assert plain is None or relative_error(cut, plain) <= 1e-12


class Normed(nn.Module):
    """Autograd saves these weights themselves, so that plain backward reads the data that they have by then."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Unflatten(1, (1, -1)), nn.Conv1d(1, 2, 3), nn.Flatten(), nn.LazyLinear(6), nn.LayerNorm(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@pytest.mark.parametrize("values", ["other", "the same"])
@pytest.mark.parametrize("what", ["parameters", "input", "labels"])
def test_what_is_assigned_through_data_between_the_loss_and_its_backward_is_an_error(what: str, values: str) -> None:
    torch.manual_seed(0)
    model, x, y = Normed(), X.clone(), Y.clone()
    model.double()(x)
    wrapped(model, 5)
    loss = F.cross_entropy(model(x), y)
    for tensor in {"parameters": [*model.parameters()], "input": [x], "labels": [y]}[what]:
        tensor.data = tensor.data.clone() if values == "the same" else tensor.data.flip(0) + 1
    if values == "the same":
        loss.backward()
        return
    with pytest.raises(Modified, match=r"other data through \.data"):
        loss.backward()


class Two(nn.Module):
    """Calls use one part or the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(nn.Linear(7, 4).double() for _ in range(2))

    def forward(self, x: Tensor, part: int) -> Tensor:
        return self.parts[part](x)


@pytest.mark.parametrize("written", ["assigned", "in place"])
def test_parameters_that_a_loss_does_not_use_may_get_other_data_before_its_backward(written: str) -> None:
    found = []
    for wrap in (False, True):
        model = Two()
        if wrap:
            wrapped(model, 5)
        losses = [model(X, part).square().mean() for part in (0, 1)]
        for loss, part in zip(losses, model.parts):
            loss.backward()
            for p in part.parameters():
                assert p.grad is not None
                if written == "assigned":
                    p.data = p.data - 0.1 * p.grad
                else:
                    p.data.sub_(p.grad, alpha=0.1)
        found.append({name: p.detach() for name, p in model.named_parameters()})
    assert relative_error(*found) <= 1e-12


def test_what_a_loss_was_computed_with_may_be_set_to_other_data_and_hold_nan() -> None:
    model, target = mlp(), torch.zeros(len(X), 4).double()
    target[0] = float("nan")
    wrapped(model, 5)
    for change in (lambda: target.set_(torch.ones_like(target)), lambda: setattr(target, "data", target.data.clone())):
        loss = (model(X) - target).square().nansum()
        change()
        loss.backward()


def test_a_batch_that_is_filled_again_each_time_keeps_its_buffer() -> None:
    """`DataLoader` collates like this into shared memory. Storage that NumPy has seen can't be resized."""
    model, buffer = mlp(), torch.empty(0).double()
    wrapped(model, 5)
    for step in range(3):
        buffer.resize_(0)
        torch.stack(list(X + step), out=buffer)
        F.cross_entropy(model(buffer), Y).backward()


def test_an_output_that_is_first_read_after_the_step_is_the_one_before_it() -> None:
    model, plain = mlp(), mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped(model, 5, optimizer=optimizer)
    unused = model(X)
    F.cross_entropy(model(X + 1), Y).backward()
    optimizer.step()
    assert torch.allclose(unused.detach() + 0, plain(X).detach(), rtol=1e-12)
