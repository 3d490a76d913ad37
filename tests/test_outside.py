"""What runs outside the model's forward, or hides its samples, runs whole and is said once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import mlp, points, wrapped
from stepping import stepper
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

import memfit
from memfit import Refused, Run


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enc, self.dec = mlp(outputs=5), mlp(inputs=5, outputs=7)
        self.scale = nn.Parameter(torch.ones(7, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.dec(checkpoint(self.enc, x, use_reentrant=False))

    def both(self, x: Tensor) -> Tensor:
        return self.dec(self.enc(x))

    def scaled(self, x: Tensor) -> Tensor:
        return self.scale * x


def trained(loss: Callable[[Any, Tensor], Tensor], *, cut: bool) -> Run:
    model, (x, _) = Encoder(), points()
    optimizer = SGD(model.parameters(), lr=0.1)
    run = wrapped(model, 5, optimizer=optimizer) if cut else memfit.wrap(model, optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        loss(model, x).backward()
        optimizer.step()
    return run


def said(run: Run) -> list[str]:
    return [event.message for event in run.events if "outside the forward" in event.message]


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (lambda m, x: m.dec(m.enc(x)).square().mean(), "enc, dec ran outside the forward of Encoder"),
        (lambda m, x: m.both(x).square().mean(), "enc, dec ran outside"),
        (lambda m, x: m.enc(x).square().mean(), "enc ran outside"),
        (lambda m, x: m.scaled(x).square().mean(), "a method of its own ran outside"),
    ],
)
def test_what_runs_outside_the_forward_is_said_once(
    loss: Callable[[Any, Tensor], Tensor], name: str, cut: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(loss, cut=cut)
    assert len(said(run)) == 1 and name in said(run)[0]
    assert capsys.readouterr().err.count("outside the forward") == 1
    if run.plan is not None:
        assert "outside the forward" in str(run.report())


@pytest.mark.parametrize("cut", [True, False])
def test_what_runs_inside_the_forward_is_not(cut: bool) -> None:
    def loss(model: Encoder, x: Tensor) -> Tensor:
        with torch.no_grad():
            model.enc(x)
        return F.mse_loss(model(x), x)

    assert not said(trained(loss, cut=cut))


def test_step_mode_cuts_own_methods_too() -> None:
    run, _ = stepper(Encoder(), lambda m, batch: m.both(batch[0]).square().mean())  # type: ignore[operator]
    run.step(points())
    assert not said(run)


def test_own_methods_in_a_loss_that_needs_all_samples_run_whole_and_are_said() -> None:
    def contrast(model: Any, batch: Any) -> Tensor:
        a, b = model.enc(batch[0]), model.enc(batch[0].flip(1))
        return F.cross_entropy(a @ b.T, torch.arange(len(a)))

    run, _ = stepper(Encoder(), contrast)
    run.step(points())
    assert "ran outside" in said(run)[0]


# ---- batches and outputs of the script's own classes


class Batch:
    """Tensors as attributes, and a number counted from them."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y, self.count = x, y, int(y.sum())

    def to(self, device: torch.device) -> Batch:
        return Batch(self.x.to(device), self.y.to(device))


class Hidden:
    """Tensors where memfit does not look."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = [[tensor] for tensor in tensors]


class Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, batch: Any) -> Tensor:
        return self.net(batch.x if isinstance(batch, Batch) else batch.tensors[0][0])


class Returns(Takes):
    def forward(self, batch: Any) -> Any:
        return Hidden(super().forward(Batch(batch, torch.zeros(1))))


def test_a_batch_of_the_scripts_own_is_cut() -> None:
    from helpers import Forwards
    from zoo.plain import gradients_of, relative_error

    model, whole = Takes(), Takes()
    run = wrapped(model, 5, loader=[Batch(*points(seed=i)) for i in range(3)])
    seen = Forwards(model.net[0])
    for batch in run.loader:
        for m in (model, whole):
            m.zero_grad()
            F.cross_entropy(m(batch), batch.y).backward()
        assert relative_error(gradients_of(model), gradients_of(whole)) <= 1e-12
    assert seen.sizes[-3:] == [4, 4, 4]
    proofs, batch = len(seen.sizes), Batch(*points(seed=9))
    F.cross_entropy(model(batch), batch.y).backward()
    assert len(seen.sizes) == proofs + 3  # its count of another number makes no call of another kind


def test_a_batch_that_hides_its_samples_runs_whole_and_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    model = Takes()
    run = memfit.wrap(model, SGD(model.parameters(), lr=0.1), [Hidden(*points())] * 2)
    for batch in run.loader:
        F.cross_entropy(model(batch), batch.tensors[1][0]).backward()
    assert sum("given a Hidden" in event.message and "split=" in event.message for event in run.events) == 1
    assert capsys.readouterr().err.count("given a Hidden") == 1


def test_an_output_that_hides_its_tensors_is_refused_by_its_type_where_it_was_to_be_cut() -> None:
    model, (x, y) = Returns(), points()
    run = wrapped(model, 5)
    with pytest.raises(Refused, match=r"returns a Hidden[\s\S]*loss_fn="):
        model(x)
    run.undo()
    run = memfit.wrap(model, SGD(model.parameters(), lr=0.1))
    F.cross_entropy(model(x).tensors[0][0], y).backward()
    assert any("returns a Hidden" in event.message for event in run.events)


# ---- time first


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.cell, self.out = nn.LSTM(3, 5).double(), nn.Linear(5, 4).double()

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        found, state = self.cell(x, state)
        return self.out(found), state


def series(count: int = 3, time: int = 6, batch: int = 12) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(time, batch, 3, dtype=torch.float64, generator=generator),
            torch.randint(0, 4, (time, batch), generator=generator),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("with_loader", [True, False])
@pytest.mark.parametrize("begun", [True, False])
def test_time_first_with_a_carried_state_is_cut_along_its_samples(with_loader: bool, begun: bool) -> None:
    from zoo.plain import gradients_of, relative_error

    found = []
    for cut in (False, True):
        model = Recurrent()
        optimizer = SGD(model.parameters(), lr=0.1)
        batches: Any = series()
        if cut:
            run = wrapped(model, 5, optimizer=optimizer, loader=series() if with_loader else None)
            batches = run.loader if with_loader else batches
        state = tuple(torch.zeros(1, 12, 5, dtype=torch.float64) for _ in range(2)) if begun else None
        for x, y in batches:
            optimizer.zero_grad()
            out, state = model(x, state)
            F.cross_entropy(out.view(-1, 4), y.view(-1)).backward()
            optimizer.step()
            state = tuple(t.detach() for t in state)
        found.append(gradients_of(model))
    assert relative_error(found[1], found[0]) <= 1e-12
