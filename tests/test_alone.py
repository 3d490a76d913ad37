"""Models that cannot run a single sample as they run several: no micro-batch has one, or they are refused by name."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import Forwards, assert_transparent, cross_entropy, mlp, points, unseen, wrapped
from pairwise import once
from stepping import error_of_step, plain, stepper
from torch import Tensor, nn
from torch.optim import SGD
from zoo.plain import gradients_of, relative_error

import memfit
from memfit import Refused

TESTS = Path(__file__).resolve().parent
PINNED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""glibc gives freed memory back at once."""


class Squeezed(nn.Module):
    """Loses the dimension of a batch of one."""

    def __init__(self, outputs: int = 4) -> None:
        super().__init__()
        self.net = mlp(outputs=outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x[:, None]).squeeze()


class Normed(nn.Module):
    """Batch norm over [N, C], which takes no single sample."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(mlp(), nn.BatchNorm1d(4).double())

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class SqueezedLoss(Squeezed):
    """Returns its own loss."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(super().forward(x), y)


def squared(model: nn.Module, x: Tensor, y: Tensor) -> None:
    F.mse_loss(model(x), y.to(x.dtype)).backward()


@pytest.mark.parametrize(("sizes", "planned"), once(product(((12, 5), (9, 2), (5, 2), (5, 4), (3, 2), (2, 2)), (True, False))))
def test_a_squeezed_output_is_cut_without_single_samples(sizes: tuple[int, int], planned: bool) -> None:
    n, micro_batch = sizes
    for build, script in ((Squeezed, cross_entropy), (lambda: Squeezed(1), squared)):
        model, (x, y) = build(), points(n)
        whole = copy.deepcopy(model)
        script(whole, x, y)
        if planned:
            memfit.wrap(model, SGD(model.parameters(), lr=0.1), micro_batch=micro_batch)
        else:
            wrapped(model, micro_batch, share=n)
        seen = Forwards(model.net[0])
        script(model, x, y)
        assert relative_error(gradients_of(model), gradients_of(whole)) <= 1e-12
        assert 1 not in seen.sizes[-(n // 2) :]


def test_a_squeezed_output_whose_loss_is_not_known() -> None:
    def script(model: nn.Module, x: Tensor, y: Tensor) -> None:
        unseen(model(x)).exp().mean().backward()

    assert_transparent(Squeezed(), script, *points(9), micro_batch=2)


def test_a_model_with_a_squeeze_before_its_own_loss() -> None:
    def script(model: nn.Module, x: Tensor, y: Tensor) -> None:
        model(x, y).backward()

    assert_transparent(SqueezedLoss(), script, *points(9), micro_batch=2)


@pytest.mark.parametrize("build", [Squeezed, Normed])
@pytest.mark.parametrize("n", [12, 3, 2])
@pytest.mark.parametrize("planned", [True, False])
def test_micro_batches_of_one_are_refused_where_they_were_prescribed(build: type[nn.Module], n: int, planned: bool) -> None:
    model, (x, y) = build(), points(n)
    if planned:
        memfit.wrap(model, SGD(model.parameters(), lr=0.1), micro_batch=1)
    else:
        wrapped(model, 1, share=n)
    with pytest.raises(Refused, match=r"cannot run one sample as it runs several[\s\S]*micro_batch=2"):
        cross_entropy(model, x, y)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(("n", "micro_batch"), [(9, 4), (9, 2), (5, 3), (13, 4)])
@pytest.mark.parametrize("planned", [True, False])
def test_batch_norm_over_features_never_meets_a_single_sample(n: int, micro_batch: int, planned: bool) -> None:
    model, (x, y) = Normed(), points(n)
    if planned:
        memfit.wrap(model, SGD(model.parameters(), lr=0.1), micro_batch=micro_batch)
    else:
        wrapped(model, micro_batch, share=n)
    for size in (n, n - 1, 4, 3, 2):
        cross_entropy(model, x[:size], y[:size])
    assert all(p.grad is not None for p in model.parameters())


def test_a_last_batch_of_one_sample_is_torchs_own_error() -> None:
    model, (x, y) = Normed(), points(9)
    wrapped(model, 4, share=9)
    cross_entropy(model, x, y)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        cross_entropy(model, x[:1], y[:1])
    run, _ = stepper(Normed(), lambda m, b: F.cross_entropy(m(b[0]), b[1]), 4)
    run.step((x, y))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        run.step((x[:1], y[:1]))


def test_a_first_batch_of_two_runs_whole_where_it_fits() -> None:
    for build in (Normed, Squeezed):
        model, (x, y) = build(), points(2)
        whole = copy.deepcopy(model)
        cross_entropy(whole, x, y)
        memfit.wrap(model, SGD(model.parameters(), lr=0.1))
        cross_entropy(model, x, y)
        assert relative_error(gradients_of(model), gradients_of(whole)) == 0


@pytest.mark.parametrize(("n", "cut"), [(12, 5), (9, 4), (9, 2), (5, 2), (3, 2)])
def test_step_mode_leaves_no_sample_by_itself(n: int, cut: int) -> None:
    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    assert error_of_step(Squeezed(), loss_fn, points(n), cut, share=n) <= 1e-12
    run, seen = stepper(Normed(), loss_fn, cut, share=n)
    run.step(points(n))
    assert all(g is not None for g in seen.gradients[0].values())


def test_step_mode_refuses_single_samples_that_were_prescribed() -> None:
    run, _ = stepper(Normed(), lambda m, b: F.cross_entropy(m(b[0]), b[1]), 1)
    with pytest.raises(Refused, match="cannot run one sample as it runs several"):
        run.step(points())


def test_a_loss_that_needs_two_samples_is_that_of_the_batch_where_single_ones_were_prescribed() -> None:
    def hardest(m: nn.Module, b: Any) -> Tensor:
        return F.cross_entropy(m(b[0]), b[1], reduction="none").topk(2).values.mean()

    assert error_of_step(mlp(), hardest, points(), 1) <= 1e-12


def test_verifying_leaves_no_sample_by_itself() -> None:
    model, (x, y) = Squeezed(), points(5)
    run = wrapped(model, 2, share=5)
    cross_entropy(model, x, y)
    assert run.verify().passed


def test_single_samples_run_where_the_model_can() -> None:
    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    model = mlp()
    want = plain(model, loss_fn, points(5))[1]
    run, seen = stepper(model, loss_fn, 1, share=5)
    run.step(points(5))
    assert relative_error(seen.gradients[0], want) <= 1e-12
    assert not [event for event in run.events if event.kind == "note"]
    assert torch.isfinite(next(iter(model.parameters()))).all()


@pytest.mark.parametrize("mode", ["script", "step"])
def test_looking_at_a_single_sample_fires_no_hook_of_the_scripts(mode: str) -> None:
    model, fired = Squeezed(), []
    for p in model.parameters():
        p.register_hook(lambda gradient: fired.append(1))
    if mode == "script":
        wrapped(model, 5)
        cross_entropy(model, *points())
    else:
        run, _ = stepper(model, lambda m, b: F.cross_entropy(m(b[0]), b[1]))
        run.step(points())
    assert len(fired) == len(list(model.parameters()))


class Unshaped(Normed):
    """What it looks at has a shape that depends on values, so that it cannot be traced."""

    def forward(self, x: Tensor) -> Tensor:
        torch.nonzero(x > 0)
        return super().forward(x)


def test_batch_norm_over_features_is_measured_where_it_cannot_be_traced() -> None:
    model, (x, y) = Unshaped(), points(24)
    run = memfit.wrap(model, SGD(model.parameters(), lr=0.1), loss_fn=mean_loss, sample=(x, y))
    assert run.plan is not None and run.plan.micro_batch > 1
    assert any("micro-batches of 2 and 3 samples" in note for note in run.plan.notes)
    assert run.step((x, y)).isfinite()
    scripted = Unshaped()
    memfit.wrap(scripted, SGD(scripted.parameters(), lr=0.1), micro_batch=5)
    cross_entropy(scripted, x, y)
    assert all(p.grad is not None for p in scripted.parameters())


def mean_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize(("build", "n", "compiled"), once(product((Normed, Unshaped), (2, 3, 5), (False, True))))
def test_batches_of_a_few_samples_are_planned_where_one_cannot_run(build: type[nn.Module], n: int, compiled: bool) -> None:
    x, y = points(n)
    for precision in ("auto", "fast"):
        for in_steps in (True, False):
            model = build()
            if compiled:
                model = torch.compile(model, backend="eager")
            optimizer = SGD(model.parameters(), lr=0.1)
            if in_steps:
                run = memfit.wrap(model, optimizer, loss_fn=mean_loss, sample=(x, y), precision=precision)
                assert run.step((x, y)).isfinite()
            else:
                run = memfit.wrap(model, optimizer, precision=precision)
                cross_entropy(model, x, y)
                assert all(p.grad is not None for p in model.parameters())
            run.undo()
        torch.compiler.reset()


class Heavy(nn.Module):
    """Megabytes of activations for every sample, and no trace of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(6)))
        self.norm, self.out = nn.BatchNorm1d(64), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        torch.nonzero(x[:, 0] > 0)
        return self.out(self.norm(self.layers(x.float()[:, :1, None].expand(-1, 1000, 64)).mean(1)))


def measured_from_freed_memory() -> None:
    model, (x, y) = Heavy(), points(32)
    found = memfit.profile(model, SGD(model.parameters(), lr=0.1), (x, y), loss_fn=mean_loss)
    per_sample = 12 * 64 * 1000 * 4  # at least: what twelve layers save for backward
    assert found.source == "measured"
    sizes = [n for n, _ in found.points]
    assert sizes[:2] == [2, 3] and sizes[-1] > 3
    for n in sizes[1:]:
        assert found.peak(n).expected - found.peak(2).expected > 0.5 * per_sample * (n - 2)
    room = found.peak(4).upper + (24 << 20)
    run = memfit.wrap(model, SGD(model.parameters(), lr=0.1), loss_fn=mean_loss, sample=(x, y), budget=room)
    assert run.plan is not None and run.plan.micro_batch < 16


@pytest.mark.slow
def test_what_an_earlier_micro_batch_left_free_hides_nothing_from_a_measured_profile() -> None:
    """In a process of its own, whose freed memory goes back at once: what other tests left free would serve here."""
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    environment = {**os.environ, **PINNED, "PYTHONPATH": paths}
    command = [sys.executable, "-W", "ignore", "-c", "import test_alone; test_alone.measured_from_freed_memory()"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("build", [Normed, Unshaped])
@pytest.mark.parametrize("n", [5, 7, 13, 8])
def test_the_plan_is_what_runs_where_no_sample_runs_by_itself(build: type[nn.Module], n: int) -> None:
    model, batch = build(), points(n)
    run = memfit.wrap(model, SGD(model.parameters(), lr=0.1), loss_fn=mean_loss, sample=batch, micro_batch=2)
    seen = Forwards(model.net[0])
    run.step(batch)
    run.step(batch)
    assert run.plan is not None
    assert len(seen.sizes[-run.plan.accumulation :]) == run.plan.accumulation
    assert sum(seen.sizes[-run.plan.accumulation :]) == n and max(seen.sizes[-run.plan.accumulation :]) == run.plan.micro_batch
    said = any("micro-batches of 2 would leave one" in note for note in run.plan.notes)
    assert said == (n % 2 == 1)
