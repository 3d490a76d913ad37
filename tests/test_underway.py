"""Calls that wait for one backward, models that train beside each other, and a container's real limit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gallery
import pytest
import torch
import torch.nn.functional as F
from processes import in_a_new_process
from stepping import sgd
from torch import Tensor, nn
from zoo.plain import gradients_of, relative_error

import memfit

MIB = 2**20
WIDE = 2048


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, WIDE), nn.Tanh(), nn.Linear(WIDE, 8))


def batch(count: int = 4000) -> Tensor:
    return torch.randn(count, 16, generator=torch.Generator().manual_seed(1))


def three(model: nn.Module, x: Tensor) -> None:
    F.triplet_margin_loss(model(x), model(x.flip(0)), model(x.roll(1, 0)), margin=5.0).backward()


def test_calls_that_fit_one_by_one_and_not_together_are_cut() -> None:
    """One takes some 62 MiB; in the first step the later ones are cut, and from then on all of them."""
    model, plain = net(), net()
    run = memfit.wrap(model, sgd(model), budget="180MiB")
    for _ in range(2):
        model.zero_grad()
        three(model, batch())
        run.optimizer.step()
    assert run.plan is not None and run.plan.accumulation > 1
    three(plain, batch())
    with torch.no_grad():
        for p in plain.parameters():
            p -= run.optimizer.param_groups[0]["lr"] * p.grad
    plain.zero_grad()
    three(plain, batch())
    assert relative_error(gradients_of(model), gradients_of(plain)) < 1e-5
    run.undo()


def runs_as_it_is(budget: str) -> int:
    """Whether a first call runs as the script wrote it, in one piece with whatever may come of its output."""
    model, (x, y) = net(), (batch(), torch.arange(4000) % 8)
    run = memfit.wrap(model, sgd(model), budget=budget)
    F.cross_entropy(model(x), y).backward()
    assert run.plan is not None
    return int(any("fits as is" in note for note in run.plan.notes))


@pytest.mark.slow
def test_before_a_step_was_seen_a_batch_that_would_fill_the_room_waits_for_its_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process that has seen none: what earlier steps took of a heap is known in the same one. (By the plan for its loss
    it may run in one piece all the same.) With glibc's thresholds pinned its two activations of 31 MiB fit into 220 MiB and
    not into 120: each budget is 40 MiB and more away from where that changes."""
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"):
        monkeypatch.setenv(name, "65536")
    assert in_a_new_process(runs_as_it_is, "120MiB") == 0
    assert in_a_new_process(runs_as_it_is, "2GiB") == 1


def test_room_is_kept_for_what_other_models_will_hold() -> None:
    one, two = net(), nn.Linear(1024, 1024)
    optimizers = [torch.optim.Adam(model.parameters()) for model in (one, two)]
    runs = memfit.wrap([one, two], optimizers)
    core, beside = (run._core for run in runs.runs)
    assert core is not None and beside is not None
    each = sum(p.nbytes for p in two.parameters())
    assert beside.memory.lacking(core.memory) == pytest.approx(3 * each, rel=1e-3)  # a gradient, two moments
    two(torch.randn(2, 1024)).sum().backward()
    optimizers[1].step()
    assert beside.memory.lacking(core.memory) < 0.01 * each
    assert core.memory.lacking(core.memory) == 0
    runs.undo()


GROUPS = Path("/sys/fs/cgroup/memory")
CHILD = """
import os, sys
from pathlib import Path
group = Path(sys.argv.pop(1))
(group / "cgroup.procs").write_text(str(os.getpid()))
import runpy, memfit
wrap = memfit.wrap
def limited(*given, **settings):
    used = int((group / "memory.usage_in_bytes").read_text())
    (group / "memory.limit_in_bytes").write_text(str(used + (260 << 20)))
    return wrap(*given, **settings, **({"enabled": False} if plain else {}))
memfit.wrap = limited
plain = sys.argv.pop(1) == "plain"
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.access(GROUPS, os.W_OK), reason="no memory cgroup (version 1) can be made here")
@pytest.mark.parametrize(("name", "options"), [
    ("digits_nll", "--width 8 --batch-size 4000 --times 6"), ("siamese_triplet", "--width 8 --batch-size 2000 --times 3"),
])  # fmt: skip
def test_in_a_container_of_a_third_of_what_it_needs(name: str, options: str, tmp_path: Path) -> None:
    script, child = tmp_path / f"{name}.py", tmp_path / "child.py"
    script.write_text(gallery.LINE.sub(r"\1", (gallery.SCRIPTS / f"{name}.py").read_text()))
    child.write_text(CHILD)
    environment: dict[str, Any] = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (gallery.ROOT, gallery.SCRIPTS)))}
    codes = []
    for form in ("plain", "wrapped"):
        group = GROUPS / f"memfit-test-{os.getpid()}-{form}"
        group.mkdir()
        command = [sys.executable, str(child), str(group), form, str(script), *options.split(), "--steps", "3"]
        codes.append(subprocess.run(command, capture_output=True, timeout=300, env=environment).returncode)
        group.rmdir()
    assert codes == [-9, 0]
