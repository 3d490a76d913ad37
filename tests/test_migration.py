"""Coming from DataParallel, DistributedDataParallel and accumulation by hand: the same parameters in the end.

The scripts run by the commands that stand in them. Not covered: DataParallel over several GPUs, which no test machine has.
"""

from __future__ import annotations

import ast
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import launchers
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from processes import Processes
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

import memfit

EXAMPLES = launchers.ROOT / "examples" / "migration"
PAIRS = ("dataparallel", "ddp", "accumulation")
ONE_LINE = {
    "dataparallel": "model, optimizer, loader = memfit.wrap(model, optimizer, loader, target_batch=64)",
    "ddp": "model, optimizer, loader = memfit.wrap(model, optimizer, loader, target_batch=64)",
    "accumulation": (
        "model, optimizer, loader = memfit.wrap(model, optimizer, loader, target_batch=64, script_accumulation=4)"
    ),
}
"""The line that docs/migration.md adds to each script as it is."""


def commands(script: Path) -> list[tuple[str, ...]]:
    """The commands in a script's docstring, as arguments of this Python."""
    text = ast.get_docstring(ast.parse(script.read_text())) or ""
    typed = [shlex.split(line) for line in text.splitlines() if line.startswith(("    python ", "    torchrun "))]
    return [_started_as(first, rest) for first, *rest in typed]


def _started_as(program: str, arguments: list[str]) -> tuple[str, ...]:
    if program == "python":
        return tuple(arguments)
    return (*launchers.TORCHRUN, "--standalone", *arguments)  # a rendezvous of its own: others may run on this machine



def trained_by(command: tuple[str, ...], checkpoint: Path) -> dict[str, torch.Tensor]:
    """The state that a command saved."""
    (printed,) = launchers.started((*command, str(checkpoint)))
    assert "of the digits right" in printed
    return torch.load(checkpoint)


def trained_by_torch(command: tuple[str, ...], checkpoint: Path) -> dict[str, torch.Tensor]:
    """The same, without memfit: torch aborts now and then where one process destroys a gloo group that another still uses."""
    for _ in range(4):
        try:
            return trained_by(command, checkpoint)
        except AssertionError as error:
            if "terminate called without an active exception" not in str(error):
                raise
    return trained_by(command, checkpoint)


def difference(found: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """Relative, over all parameters; names may have DataParallel's prefix."""
    plain = [{name.removeprefix("module."): value.double() for name, value in state.items()} for state in (found, want)]
    assert plain[0].keys() == plain[1].keys()
    one, other = (torch.cat([state[name].flatten() for name in sorted(state)]) for state in plain)
    return float((one - other).norm() / other.norm())


# ---- the pairs


@pytest.fixture(scope="module", params=PAIRS)
def before(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, torch.Tensor]]:
    """(a pair, the state that its script of before ends with)."""
    (command,) = commands(EXAMPLES / f"{request.param}_before.py")
    return request.param, trained_by_torch(command, tmp_path_factory.mktemp(request.param) / "before.pt")


@pytest.mark.slow
def test_every_command_of_the_script_with_memfit_ends_with_the_same_parameters(
    before: tuple[str, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    pair, want = before
    typed = commands(EXAMPLES / f"{pair}_after.py")
    assert [len(command) for command in typed] == [1, 5]
    for i, command in enumerate(typed):
        assert difference(trained_by(command, tmp_path / f"{i}.pt"), want) <= 1e-6


@pytest.mark.slow
def test_a_line_in_the_script_as_it_is_ends_with_the_same_parameters(
    before: tuple[str, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    pair, want = before
    source = EXAMPLES / f"{pair}_before.py"
    lines = source.read_text().splitlines()
    (at,) = (i for i, line in enumerate(lines) if line.startswith("    loader = DataLoader("))
    script = tmp_path / source.name
    script.write_text("\n".join(["import memfit", *lines[: at + 1], f"    {ONE_LINE[pair]}", *lines[at + 1 :]]) + "\n")
    (command,) = commands(source)
    assert difference(trained_by((*command[:-1], str(script)), tmp_path / "one_line.pt"), want) <= 1e-6


def test_the_guide_has_these_lines_and_names_every_script() -> None:
    guide = (launchers.ROOT / "docs" / "migration.md").read_text()
    for pair in PAIRS:
        assert ONE_LINE[pair] in guide
        assert all(f"examples/migration/{pair}_{when}.py" in guide for when in ("before", "after"))


# ---- checkpoints of before


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(32, 6, generator=generator), torch.randint(0, 3, (32,), generator=generator))


def checkpoint_of_data_parallel(path: Path) -> dict[str, torch.Tensor]:
    """An old checkpoint, and the values in it by their names in the module itself."""
    model = network()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)
    torch.save(nn.DataParallel(model).state_dict(), path)
    return model.state_dict()


def test_an_old_checkpoint_loads_into_the_model_that_came_as_it_is(tmp_path: Path) -> None:
    want = checkpoint_of_data_parallel(tmp_path / "old.pt")
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    run = memfit.wrap(model, optimizer, DataLoader(data(), batch_size=4), target_batch=8, micro_batch=4)
    state = torch.load(tmp_path / "old.pt")
    assert set(state) == {f"module.{name}" for name in want}
    with pytest.raises(RuntimeError, match=r"module\.0\.weight"):
        model.load_state_dict(state)  # it stays torch's own: nothing is guessed
    consume_prefix_in_state_dict_if_present(state, "module.")
    model.load_state_dict(state)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in want.items())
    x, y = next(iter(run.loader))
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert not any(torch.equal(model.state_dict()[name], value) for name, value in want.items())
    run.undo()


@pytest.mark.parametrize("prefix", ["module.", ""])
def test_a_model_that_came_in_data_parallel_loads_states_of_both_kinds(prefix: str) -> None:
    model = nn.DataParallel(network())
    run = memfit.wrap(model, SGD(model.parameters(), lr=0.1), DataLoader(data(), batch_size=4), target_batch=8, micro_batch=4)
    state = {f"{prefix}{name}": torch.full_like(value, 0.5) for name, value in model.module.state_dict().items()}
    model.load_state_dict(state)
    assert all(bool((value == 0.5).all()) for value in model.module.state_dict().values())
    run.undo()
    plain = {name.removeprefix("module."): value for name, value in state.items()}
    with pytest.raises(RuntimeError, match=r"Missing key"):
        model.load_state_dict(plain)  # given back as it came


# ---- 1 process, accumulation 2, batch 4 is 2 processes, batch 4


def steps(dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Four optimizer steps over 8 samples each."""
    x, y = data().tensors
    return zip(x.to(dtype).split(8), y.split(8))


def values(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def accumulating(dtype: torch.dtype) -> list[torch.Tensor]:
    """By hand on one process: 2 backwards of 4 samples per step."""
    model = network().to(dtype)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.5)
    for x, y in steps(dtype):
        for part in (slice(0, 4), slice(4, 8)):
            (F.cross_entropy(model(x[part]), y[part]) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def distributed(dtype: torch.dtype) -> list[torch.Tensor]:
    """By hand in DistributedDataParallel: each process 4 of the samples."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = DistributedDataParallel(network().to(dtype))
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.5)
    own = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    for x, y in steps(dtype):
        F.cross_entropy(model(x[own]), y[own]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model.module)


def with_memfit(dtype: torch.dtype, mode: str) -> list[torch.Tensor]:
    """The same by memfit, on however many processes: 8 samples per step, at most 4 at once."""
    model = network().to(dtype)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.5)
    x, y = data().tensors
    loader = DataLoader(TensorDataset(x.to(dtype), y), batch_size=4)
    settings: dict[str, Any] = {"loss_fn": _loss} if mode == "step" else {}
    run = memfit.wrap(model, optimizer, loader, target_batch=8, micro_batch=4, **settings)
    for batch in run.loader:
        if mode == "step":
            run.step(batch)
            continue
        optimizer.zero_grad()
        _loss(model, batch).backward()
        optimizer.step()
    found = values(model)
    run.undo()
    return found


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def same_bits(found: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


@pytest.fixture(scope="module")
def two() -> Iterator[Processes]:
    found = Processes(2)
    yield found
    found.end()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_accumulating_two_is_training_on_two(dtype: torch.dtype, two: Processes) -> None:
    """Halving is exact and a sum of two has one order, so that not one bit differs."""
    want = accumulating(dtype)
    assert all(same_bits(found, want) for found in two.run(distributed, dtype))
    for mode in ("step", "script"):
        assert same_bits(with_memfit(dtype, mode), want)
        assert all(same_bits(found, want) for found in two.run(with_memfit, dtype, mode))
