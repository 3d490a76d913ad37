"""Models that return something else than before: by an attribute, by how far training is, beside their tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import mlp, points, wrapped
from stepping import sgd
from torch import Tensor, nn
from zoo.plain import gradients_of, relative_error

import memfit
from memfit import Refused
from memfit.runtime.module_flags import MOST, Flags

X, Y = points(12)
EXACT = 1e-12


@pytest.fixture(autouse=True)
def strictly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMFIT", "strict")


class Staged(nn.Module):
    """Returns what its attributes ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.how, self.stage, self.deep = "scores", 0, False

    def forward(self, x: Tensor) -> Any:
        out = self.net(x)
        found = {"scores": out, "list": [out], "pair": (out, out * 2), "dict": {"out": out}, "half": out[:, :2]}
        found["mean"] = out.mean(1)
        given = found[self.how]
        if self.deep:
            given = (given, {"squared": out.square()})
        return (given, self.stage) if self.stage else given


def loss_of(found: Any) -> Tensor:
    if isinstance(found, Tensor):
        return found.square().mean()
    if isinstance(found, int):
        return torch.tensor(float(found), dtype=torch.float64)
    parts = [loss_of(part) for part in (found.values() if isinstance(found, dict) else found)]
    return torch.stack(parts).prod()


def steps(model: Staged, settings: Sequence[dict[str, Any]]) -> list[Any]:
    found = []
    for attributes in settings:
        for name, value in attributes.items():
            setattr(model, name, value)
        model.zero_grad()
        given = model(X)
        loss_of(given).backward()
        found.append((type(given), gradients_of(model)))
    return found


def assert_alike(settings: Sequence[dict[str, Any]]) -> None:
    model = Staged()
    wrapped(model, 5)
    for (kind, found), (wanted, want) in zip(steps(model, settings), steps(Staged(), settings)):
        assert kind is wanted or (issubclass(kind, Tensor) and wanted is Tensor)
        assert relative_error(found, want) <= EXACT


@pytest.mark.parametrize("then", ["list", "pair", "dict", "half", "mean"])
def test_a_word_says_what_a_forward_returns(then: str) -> None:
    assert_alike([{"how": how} for how in ["scores"] * 3 + [then] * 2 + ["scores", then]])


def test_a_truth_value_does() -> None:
    assert_alike([{"deep": deep} for deep in (False, False, True, True, False, True)])


@pytest.mark.parametrize("late", [2, 0])
def test_a_number_does(late: int) -> None:
    assert_alike([{"stage": stage} for stage in (1, 1, 1, late, 1, late)])


def test_flags_that_change_all_the_time_are_none() -> None:
    model = Staged()
    flags = Flags(model)
    met = set()
    for i in range(3 * MOST):
        model.how = f"name {i}"
        met.add(flags.now())
    assert MOST < len(met) <= MOST + 2


@pytest.mark.parametrize("build", [lambda: nn.Linear(3, 2), lambda: nn.TransformerEncoderLayer(4, 2)])
def test_words_of_modules_of_packages_are_none(build: Callable[[], nn.Module]) -> None:
    model = build()
    before = Flags(model).now()
    model.anything = "else"  # type: ignore[assignment]
    assert Flags(model).now() == before == ((), 0)


class Centring(nn.Module):
    """Mixes samples where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.centres = mlp(), False

    def forward(self, x: Tensor) -> Tensor:
        out = self.net(x)
        return out - out.mean(0) if self.centres else out


def told(model: Centring) -> None:
    model.centres = True


@pytest.mark.parametrize("in_steps", [False, True])
@pytest.mark.parametrize("change", [told])
def test_it_is_proven_anew_where_the_model_changes(change: Callable[[Centring], None], in_steps: bool) -> None:
    """In the third step, between two proofs."""
    model, plain = Centring(), Centring()
    steps = trained(model, in_steps), trained(plain, None)
    for _ in range(2):
        for step in steps:
            step()
    assert relative_error(dict(model.named_parameters()), dict(plain.named_parameters())) <= EXACT
    change(model)
    with pytest.raises(Refused, match="mixes samples"):
        steps[0]()


@pytest.mark.parametrize("in_steps", [False, True])
def test_state_that_it_moves_from_now_on_moves_once(in_steps: bool) -> None:
    model, plain = Centring(), Centring()
    for each, step in ((model, trained(model, in_steps)), (plain, trained(plain, None))):
        for i in range(6):
            if i == 2:
                torch.manual_seed(0)  # (what follows draws)
                torch.nn.utils.parametrizations.spectral_norm(each.net[0])
            step()
    assert relative_error(dict(model.state_dict()), dict(plain.state_dict())) <= EXACT


def trained(model: nn.Module, in_steps: bool | None) -> Callable[[], Any]:
    """One step of training; None: without memfit."""
    optimizer = sgd(model)
    settings: dict[str, Any] = {"loss_fn": cross_entropy} if in_steps else {}
    run = None if in_steps is None else memfit.wrap(model, optimizer, micro_batch=5, **settings)

    def step() -> None:
        if in_steps:
            assert run is not None
            run.step((X, Y))
            return
        optimizer.zero_grad()
        cross_entropy(model, (X, Y)).backward()
        optimizer.step()

    return step


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def test_a_flag_that_a_forward_sets_is_state() -> None:
    class Begun(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.begun = mlp(), False

        def forward(self, x: Tensor) -> Tensor:
            out = self.net(x) if self.begun else self.net(x) * 2
            self.begun = True
            return out

    model, plain = Begun(), Begun()
    wrapped(model, 5)
    for _ in range(3):
        for each in (model, plain):
            each.zero_grad()
            F.cross_entropy(each(X), Y).backward()
        assert relative_error(gradients_of(model), gradients_of(plain)) <= EXACT and model.begun
