"""Processes that fail: nobody waits for them, nobody is ahead of them, and what can go on trains every batch exactly once."""

from __future__ import annotations

import copy
import math
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import faults
import pytest
import torch
import torch.nn.functional as F
from faults import Fault, Outcome, Trial, drawn, run, wanted, wrong
from processes import free_port
from torch import nn

import memfit

SLOW = 120


def checked(trial: Trial, prompt: float = math.inf) -> list[Outcome]:
    found = run(trial)
    said = wrong(trial, found, wanted(trial), prompt)
    assert not said, (trial, said, [outcome.text[-2000:] for outcome in found])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SLOW))
def test_random_faults(seed: int) -> None:
    checked(drawn(seed), faults.PROMPT)


BESIDE = [pytest.param(seed, marks=() if seed < 301 else pytest.mark.slow) for seed in range(300, 380)]


@pytest.mark.parametrize("seed", BESIDE)
def test_random_faults_where_gradients_are_reduced_beside_the_last_micro_batch(seed: int) -> None:
    trial = drawn(seed)
    before = tuple(fault for fault in trial.faults if "optimizer" not in fault.place)  # nothing of this is under way there
    checked(replace(trial, mode="step", overlap=True, faults=before))


LAST = [
    pytest.param(kind, place, id=f"{kind}-{place}", marks=() if (kind, place) == ("memory", "reduce") else pytest.mark.slow)
    for kind in ("memory", "error", "kill")
    for place in ("backward", "reduce")
]


@pytest.mark.parametrize(("kind", "place"), LAST)
def test_faults_in_the_last_micro_batch_of_a_step_that_reduces_beside_it(kind: str, place: str) -> None:
    nth = 2 if place == "backward" else 1
    found = checked(Trial(2, "step", (Fault(1, place, 4, nth, kind=kind),), overlap=True))
    left = found[:1] if kind == "kill" else found
    survives = kind == "memory" or (kind, place) == ("error", "backward")  # the share runs again
    assert all(len(outcome.states) == (faults.STEPS if survives else 4) for outcome in left)
    assert all(outcome.overlapped >= 3 for outcome in left)


SHARDED = [
    pytest.param(shard, seed, id=f"{shard}-{seed}", marks=() if seed < 201 else pytest.mark.slow)
    for shard in ("optimizer", "gradients", "parameters")
    for seed in range(200, 212)
]


@pytest.mark.parametrize(("shard", "seed"), SHARDED)
def test_random_faults_of_what_is_held_in_parts(shard: str, seed: int) -> None:
    checked(drawn(seed, shard))


@pytest.mark.parametrize("mode", ["step", "script"])
@pytest.mark.parametrize("ranks", [(1,), pytest.param((0, 1), marks=pytest.mark.slow)])
def test_a_sum_that_runs_out_of_memory_is_taken_up_again(mode: str, ranks: tuple[int, ...]) -> None:
    found = checked(Trial(2, mode, tuple(Fault(rank, "reduce", 2, 1, 2) for rank in ranks)))
    assert all(len(outcome.states) == faults.STEPS for outcome in found)


@pytest.mark.parametrize("place", [pytest.param("optimizer", marks=pytest.mark.slow), "half optimizer"])
@pytest.mark.parametrize("step", [pytest.param(0, marks=pytest.mark.slow), faults.STEPS - 1])
def test_an_optimizer_step_that_runs_out_of_memory_is_taken_over_from_another_rank(place: str, step: int) -> None:
    found = checked(Trial(3, "step", (Fault(0, place, step), Fault(2, place, step))))
    assert "out of memory" in found[0].events and "out of memory" not in found[1].events
    assert found[0].states == found[1].states == found[2].states  # moments and counts, too


def test_where_no_rank_has_stepped_all_end_with_their_own_error() -> None:
    found = checked(Trial(2, "step", (Fault(0, "half optimizer", 1), Fault(1, "half optimizer", 1))))
    assert all(outcome.error == "OutOfMemoryError" and "may be partly updated" in outcome.text for outcome in found)


def test_what_fails_before_the_optimizers_step_leaves_nobody_ahead() -> None:
    for place in ("before_step", "gradient hook"):
        failed, other = checked(Trial(2, "step", (Fault(0, place, 3, kind="error"),)))
        assert failed.error == "ValueError" and len(failed.states) == len(other.states) == 3
        assert "rank 0 failed: ValueError: a fault on purpose (faults.py:" in other.text


def test_a_killed_rank_ends_the_others() -> None:
    killed, other = checked(Trial(2, "script", (Fault(0, "forward", 2, kind="kill"),)))
    assert other.error == "RankFailed" and "has ended, or cannot be reached" in other.text and not killed.error


# ---- scripts that go on after an error, or are not at the same place


def careless(trial: Trial, rank: int, found: Outcome, tell: Callable[[Any], None]) -> None:
    """A script that skips a batch when memory runs out in the optimizer's step."""
    injector = faults.Injector(trial.faults, rank, tell)
    model, optimizer = _built(injector)
    memfit.wrap(model, optimizer, micro_batch=2)
    for step in range(4):
        injector.begin(step)
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randn(4, 6, dtype=torch.float64)), torch.tensor([0, 1, 2, 0])).backward()
        try:
            optimizer.step()
        except torch.OutOfMemoryError:
            continue


def _built(injector: faults.Injector) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = faults.Network(injector, own_loss=False, norm=False).double()
    return model, faults._optimizer(model, injector)


def test_a_step_that_one_rank_left_out_is_noticed_at_the_next() -> None:
    for outcome in run(Trial(2, "script", (Fault(1, "half optimizer", 2),)), careless):
        assert outcome.error == "Refused" and "optimizer.step() failed on rank 1 after 3 steps" in outcome.text


def elsewhere(trial: Trial, rank: int, found: Outcome, tell: Callable[[Any], None]) -> None:
    """Rank 1 leaves the loop early and begins another epoch."""
    model, optimizer = _built(faults.Injector((), rank, tell))
    data = torch.utils.data.TensorDataset(torch.randn(24, 6, dtype=torch.float64), torch.zeros(24, dtype=torch.int64))
    run = memfit.wrap(model, optimizer, torch.utils.data.DataLoader(data, batch_size=4), target_batch=8, micro_batch=2)
    for _epoch in range(2):
        for number, (x, y) in enumerate(run.loader):
            if rank and number:
                break
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()


def test_processes_at_different_places_of_the_script_are_told() -> None:
    first, second = run(Trial(2), elsewhere)
    assert first.error == second.error == "RankFailed"
    assert "rank 1 is at another point in the script" in first.text
    assert "rank 0 is at another point in the script" in second.text


# ---- rank 0 alone


def alone(trial: Trial, rank: int, found: Outcome, tell: Callable[[Any], None]) -> None:
    """Rank 0 evaluates and saves between batches, and between forward and backward."""
    torch.manual_seed(1)
    model = faults.Network(faults.Injector((), rank, tell), own_loss=False, norm=True).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = faults.Samples(faults.Injector((), rank, tell), [])
    source = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    loss_fn = (lambda m, b: F.cross_entropy(m(b[0]), b[1])) if trial.mode == "step" else None
    run = memfit.wrap(model, optimizer, source, target_batch=24, micro_batch=6, loss_fn=loss_fn)

    def rank_0_alone(number: int) -> None:
        if rank or number != 1:
            return
        model.eval()
        with torch.no_grad():
            before = model(data.x)
        F.cross_entropy(model(data.x), data.y).item()  # without no_grad, as scripts do
        torch.save(model.state_dict(), trial.shard)
        again = copy.deepcopy(model)
        again.load_state_dict(torch.load(trial.shard, weights_only=True))
        with torch.no_grad():
            assert torch.equal(again(data.x), before)
        model.train()
        time.sleep(1.0)
        if trial.faults:
            raise ValueError("in rank 0's validation")

    for number, batch in enumerate(run.loader):
        if trial.mode == "step":
            run.step(batch)
            rank_0_alone(number)
            continue
        optimizer.zero_grad()
        output = model(batch[0])
        if trial.mode == "between":
            rank_0_alone(number)
        F.cross_entropy(output, batch[1]).backward()
        optimizer.step()
        if trial.mode == "script":
            rank_0_alone(number)
    found.parameters = [float(v) for t in model.state_dict().values() for v in t.reshape(-1)]


@pytest.mark.parametrize("mode", [pytest.param("step", marks=pytest.mark.slow), "script", "between"])
def test_rank_0_evaluates_and_saves_alone(mode: str, tmp_path: Path) -> None:
    path = str(tmp_path / "state.pt")
    first, second = run(Trial(2, mode, shard=path), alone)
    assert not first.error and not second.error, first.text + second.text
    assert first.parameters == second.parameters and first.parameters
    assert set(torch.load(path, weights_only=True)) >= {"head.weight", "body.2.running_mean"}


@pytest.mark.parametrize("mode", ["step", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("script", "between"))])
def test_an_error_in_rank_0s_validation_ends_all(mode: str, tmp_path: Path) -> None:
    path = str(tmp_path / "state.pt")
    first, second = run(Trial(2, mode, (Fault(0, "validate", 1),), shard=path), alone)
    assert first.error == "ValueError" and second.error == "RankFailed"
    assert "rank 0 failed: ValueError: in rank 0's validation" in second.text
    assert torch.load(path, weights_only=True)


# ---- real scripts

SCRIPT = """
import os, sys, torch, memfit
import torch.nn.functional as F
model = torch.nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
memfit.wrap(model, optimizer, micro_batch=2)
for step in range(4):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(torch.randn(4, 6)), torch.tensor([0, 1, 2, 0]))
    if step == 2 and os.environ["RANK"] == "1":
        {fails}
    loss.backward()
    optimizer.step()
print("done")
"""


def started(fails: str, folder: Path) -> list[tuple[int, str]]:
    """(exit status, output) of two processes that run a script."""
    script = folder / "train.py"
    script.write_text(textwrap.dedent(SCRIPT.replace("{fails}", fails)))
    processes = []
    port = str(free_port())
    for rank in range(2):
        there = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
        there |= {"MASTER_PORT": port, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-W", "ignore", str(script)]
        with (folder / f"{rank}.txt").open("w") as out:
            processes.append(subprocess.Popen(command, env={**os.environ, **there}, stdout=out, stderr=out))
    try:
        return [(process.wait(faults.PATIENCE), (folder / f"{rank}.txt").read_text()) for rank, process in enumerate(processes)]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_a_scripts_own_error_comes_first(tmp_path: Path) -> None:
    (status, text), (failed, own) = started('raise KeyError("no such word")', tmp_path)
    assert status == failed == 1
    assert own.rstrip().endswith("KeyError: 'no such word'")
    assert "RankFailed" in text and "rank 1 failed: KeyError: 'no such word' (train.py:" in text


@pytest.mark.slow
def test_a_script_that_just_ends_is_not_waited_for(tmp_path: Path) -> None:
    (status, text), (left, _) = started("sys.exit(0)", tmp_path)
    assert status == 1 and left == 0 and "rank 1 has reached the end of its script" in text


@pytest.mark.slow
def test_a_script_that_works_ends_by_itself(tmp_path: Path) -> None:
    assert [(status, text.splitlines()[-1]) for status, text in started("pass", tmp_path)] == [(0, "done")] * 2
