"""Launchers for several machines and for notebooks: the same training, whoever started the processes.

Two machines are two launchers on this one, which find each other over the loopback device. On a machine without GPUs
accelerate's `notebook_launcher` starts as many processes as it is asked for, too; `debug_launcher` is the one meant for CPUs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import launched
import launchers
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("accelerate")
from test_guest_accelerate import by_hand as accelerates_by_hand

ON_CPU = {"ACCELERATE_USE_CPU": "true"}


def found_in(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def by_hand() -> list[list[float]]:
    """The training of `launched` in plain PyTorch, on one process."""
    model, loader = launched.parts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    for _ in range(2):
        batches = list(loader)
        xs, ys = (torch.cat([batch[i] for batch in batches]) for i in (0, 1))
        for x, y in zip(xs.split(launched.TARGET), ys.split(launched.TARGET)):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return [p.detach().flatten().tolist() for p in model.parameters()]


def check_parameters(found: dict[str, Any], want: list[list[float]]) -> None:
    for got, wanted in zip(found["parameters"], want, strict=True):
        assert got == pytest.approx(wanted, abs=1e-6)


# ---- two machines


def torchrun_on(machine: int, port: str, rendezvous: str) -> tuple[str, ...]:
    """The command on one of two machines."""
    common = (*launchers.TORCHRUN, "--nnodes=2", "--nproc_per_node=1")
    if rendezvous == "static":
        return (*common, f"--node_rank={machine}", "--master_addr=127.0.0.1", f"--master_port={port}")
    return (*common, "--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}", "--rdzv_id=two", "--local_addr=127.0.0.1")


@pytest.mark.slow
@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_two_machines_train_as_one_with_two_processes(rendezvous: str, tmp_path: Path) -> None:
    script, port = str(launchers.ROOT / "tests" / "launched.py"), launchers.port()
    paths = [tmp_path / "one.json", tmp_path / "two.json"]
    launchers.started(launchers.torchrun(script, str(paths[0])))
    launchers.started(*((*torchrun_on(machine, port, rendezvous), script, str(paths[1])) for machine in (0, 1)))
    one, two = map(found_in, paths)
    assert one["processes"] == two["processes"] == 2 and one["steps"] == two["steps"] == 8
    assert one["parameters"] == two["parameters"]
    check_parameters(two, by_hand())


@pytest.mark.slow
def test_two_machines_by_accelerate_train_as_one_with_two_processes(tmp_path: Path) -> None:
    script, port = str(launchers.ROOT / "tests" / "accelerated.py"), launchers.port()
    common = (*launchers.ACCELERATE, "--multi_gpu", "--num_processes", "2", "--mixed_precision", "no", "--dynamo_backend", "no")
    paths = [tmp_path / "one.json", tmp_path / "two.json"]
    one_machine = ("--num_machines", "1", "--main_process_port", "0")
    launchers.started((*common, *one_machine, script, "target", str(paths[0])), **ON_CPU)
    two_machines = ("--num_machines", "2", "--main_process_ip", "127.0.0.1", "--main_process_port", port)
    machines = [(*common, *two_machines, "--machine_rank", str(machine), script, "target", str(paths[1])) for machine in (0, 1)]
    launchers.started(*machines, **ON_CPU)
    one, two = map(found_in, paths)
    assert one["processes"] == two["processes"] == 2 and one["steps"] == two["steps"] == 8
    assert one["parameters"] == two["parameters"]


@pytest.mark.slow
def test_switched_off_it_is_accelerates_own(tmp_path: Path) -> None:
    """With the reduction of gradients and the accumulation that accelerate itself would make."""
    script = str(launchers.ROOT / "tests" / "accelerated.py")
    common = (*launchers.ACCELERATE, "--multi_gpu", "--num_processes", "2", "--mixed_precision", "no", "--dynamo_backend", "no")
    paths = {how: tmp_path / f"{how}.json" for how in ("plain", "accumulating")}
    for how, path in paths.items():
        command = (*common, "--num_machines", "1", "--main_process_port", "0", script, how, str(path))
        launchers.started(command, **ON_CPU, **({"MEMFIT": "off"} if how == "accumulating" else {}))
    plain, off = (found_in(path) for path in paths.values())
    assert off == plain and off["processes"] == 2 and off["micro_batch"] is None
    assert off["steps"] == 2 * 7 and not off["synced"]  # 52 samples in iterations of 2 x 4, of which every other one is a step


# ---- notebooks


def in_notebook(path: Path, launcher: str, function: str, processes: int, **environment: str) -> dict[str, Any]:
    """What the function found, launched from a fresh interpreter as from a notebook's kernel."""
    script = str(launchers.ROOT / "tests" / "notebook.py")
    command = (script, launcher, function, str(processes), launchers.port(), str(path))
    (printed,) = launchers.started(command, **environment)
    assert "the notebook goes on" in printed
    return found_in(path)


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_wrap_inside_notebook_launcher(processes: int, tmp_path: Path) -> None:
    found = in_notebook(tmp_path / "found.json", "notebook", "plain", processes)
    assert found["processes"] == processes and found["steps"] == 8
    check_parameters(found, by_hand())


@pytest.mark.slow
def test_wrap_inside_debug_launcher(tmp_path: Path) -> None:
    found = in_notebook(tmp_path / "found.json", "debug", "plain", 2)
    assert found["processes"] == 2
    check_parameters(found, by_hand())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "function", "processes", "environment"),
    [
        ("notebook", "guest", 1, {}),
        ("notebook", "guest", 2, ON_CPU),
        ("notebook", "guest on CPU", 2, {}),
        ("debug", "guest", 2, {}),
    ],
)
def test_its_accelerator_inside_a_launcher(
    launcher: str, function: str, processes: int, environment: dict[str, str], tmp_path: Path
) -> None:
    found = in_notebook(tmp_path / "found.json", launcher, function, processes, **environment)
    assert found["processes"] == processes and found["steps"] == 8
    check_parameters(found, accelerates_by_hand(16))


@pytest.mark.slow
def test_processes_that_accelerate_does_not_count_are_refused(tmp_path: Path) -> None:
    """Without GPUs accelerate takes each of them for the only one, unless it is told to train on CPUs."""
    told = r"the launcher started 2, and accelerate found no GPU(?s:.)*ACCELERATE_USE_CPU=true"
    with pytest.raises(AssertionError, match=told):
        in_notebook(tmp_path / "found.json", "notebook", "guest", 2)


# ---- the end


COUNTS_THREADS = """
import atexit, os
import torch, torch.distributed as dist
import memfit

def threads():
    return len(os.listdir("/proc/self/task"))

dist.init_process_group("gloo")
model = torch.nn.Linear(4, 2)
atexit.register(lambda: os.write(1, f"threads {before} {with_memfit} {threads()}\\n".encode()))
before = threads()
data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = memfit.wrap(model, optimizer, torch.utils.data.DataLoader(data, 8), target_batch=8, micro_batch=2)
for x, y in loader:
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
with_memfit = threads()
"""


@pytest.mark.slow
def test_threads_end_before_python_does(tmp_path: Path) -> None:
    """Those of gloo that still let go of tensors when Python ends take the process down (pytorch/pytorch#190489)."""
    script = tmp_path / "counts.py"
    script.write_text(COUNTS_THREADS)
    (said,) = launchers.started(launchers.torchrun(str(script)))
    counts = [[int(count) for count in line.split()[1:]] for line in said.splitlines() if line.startswith("threads")]
    assert len(counts) == 2, said
    for before, inside, after in counts:
        assert inside > before and after <= before, said
