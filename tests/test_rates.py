"""Another batch than the script's: what the report says about learning rates, and that none is changed."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import reports
import torch
import torch.nn.functional as F
from processes import Processes
from torch import nn
from torch.optim import SGD, AdamW, Optimizer, RMSprop
from torch.utils.data import DataLoader, TensorDataset

import memfit
from memfit import UsageError
from memfit.reporting.facts import BatchChange
from memfit.reporting.lines import answers
from memfit.reporting.markdown import escaped
from memfit.reporting.rates import batch_change, rate_rules
from memfit.reporting.report import Report


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(48, 6, generator=generator), torch.randint(0, 3, (48,), generator=generator))


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def trained(target: int | None, batch: int = 4, mode: str = "step", optimizer: Any = None, **settings: Any) -> memfit.Run:
    """A run after an epoch."""
    model = network()
    made = SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer(model)
    loader = DataLoader(data(), batch_size=batch)
    if mode == "step":
        settings["loss_fn"] = loss_fn
    run = memfit.wrap(model, made, loader, target_batch=target, micro_batch=2, **settings)
    accumulated = settings.get("script_accumulation", 1)
    for i, found in enumerate(run.loader):
        if mode == "step":
            run.step(found)
            continue
        (loss_fn(model, found) / accumulated).backward()
        if (i + 1) % accumulated == 0:
            made.step()
            made.zero_grad()
    return run


def said(report: Any) -> tuple[str, ...]:
    return next((entry.lines for entry in answers(report) if entry.label == "learning rate"), ())


# ---- when it is said


@pytest.mark.parametrize("mode", ["step", "script"])
def test_another_batch_than_the_scripts_is_said_with_both_rules(mode: str) -> None:
    run = trained(16, mode=mode)
    assert run.script_batch == 4
    first, linear, root = said(run.report())
    assert "16 samples per step, not the 4 that the script asked for" in first
    assert "memfit changed no learning rate" in first
    assert linear.startswith("linear rule (Goyal et al. 2017, arXiv:1706.02677") and linear.endswith("times 4, 0.1 -> 0.4")
    assert root.startswith("square-root rule (Krizhevsky 2014, arXiv:1404.5997") and root.endswith("times 2, 0.1 -> 0.2")
    run.undo()


@pytest.mark.parametrize("mode", ["step", "script"])
@pytest.mark.parametrize("target", [None, 4])
def test_nothing_is_said_of_the_scripts_own_batch(target: int | None, mode: str) -> None:
    run = trained(target, mode=mode)
    made = run.report()
    assert isinstance(made, Report) and made.change is None and said(made) == ()
    assert "learning rate" not in str(made) + made.to_markdown() + made.to_html()
    run.undo()


def test_what_the_script_adds_up_itself_is_part_of_its_batch() -> None:
    run = trained(8, batch=4, mode="script", script_accumulation=2)
    assert run.script_batch == 8 and said(run.report()) == ()
    run.undo()
    run = trained(16, batch=4, mode="script", script_accumulation=2)
    assert "times 2, 0.1 -> 0.2" in said(run.report())[1]
    run.undo()


def test_a_loader_that_does_not_say_its_batch_is_not_compared() -> None:
    model = network()
    sampler = torch.utils.data.BatchSampler(range(48), 4, drop_last=False)
    loader = DataLoader(data(), batch_sampler=list(sampler))  # pyright: ignore[reportArgumentType]
    run = memfit.wrap(model, SGD(model.parameters(), lr=0.1), loader, loss_fn=loss_fn, target_batch=16, micro_batch=2)
    run.step(next(iter(run.loader)))
    assert run.script_batch is None and said(run.report()) == ()
    run.undo()


@pytest.fixture(scope="module")
def two() -> Iterator[Processes]:
    found = Processes(2)
    yield found
    found.end()


def found_on_a_rank(target: int, mode: str) -> tuple[int | None, tuple[str, ...]]:
    run = trained(target, mode=mode)
    found = run.script_batch, said(run.report())
    run.undo()
    return found


@pytest.mark.parametrize("mode", ["step", "script"])
def test_the_scripts_batch_counts_over_all_processes(mode: str, two: Processes) -> None:
    assert two.run(found_on_a_rank, 8, mode) == [(8, ())] * 2
    for before, lines in two.run(found_on_a_rank, 32, mode):
        assert before == 8 and "times 4, 0.1 -> 0.4" in lines[1]


# ---- what is said


def with_groups(model: nn.Module) -> Optimizer:
    first, last = model[0], model[2]  # type: ignore[index]
    return SGD([{"params": first.parameters(), "lr": 0.1}, {"params": last.parameters(), "lr": 0.002}], lr=1.0)


def test_each_groups_rate_as_it_is_now_is_told() -> None:
    run = trained(16, optimizer=with_groups)
    assert said(run.report())[1].endswith("times 4, 0.1 -> 0.4, 0.002 -> 0.008")
    for group in run.optimizer.param_groups:
        group["lr"] /= 2
    assert said(run.report())[1].endswith("times 4, 0.05 -> 0.2, 0.001 -> 0.004")
    run.undo()


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=3e-4)


def rmsprop(model: nn.Module) -> Optimizer:
    return RMSprop(model.parameters(), lr=3e-4)


@pytest.mark.parametrize(("optimizer", "moments"), [(adamw, "1 - beta1 and 1 - beta2"), (rmsprop, "1 - alpha")])
def test_for_adaptive_optimizers_the_root_comes_first_and_whole(optimizer: Any, moments: str) -> None:
    run = trained(16, optimizer=optimizer)
    _, root, linear = said(run.report())
    assert "Malladi et al. 2022, arXiv:2205.10287" in root and "times 2, 0.0003 -> 0.0006" in root
    assert root.endswith(f"with {moments} times 4 and eps divided by 2")
    assert linear.startswith("linear rule") and linear.endswith("times 4, 0.0003 -> 0.0012")
    run.undo()


def test_a_smaller_batch_is_told_too_and_rates_that_are_tensors_are_read() -> None:
    change = batch_change(64, 16, [{"lr": torch.tensor(0.5)}, {"lr": 0.5}, {"lr": math.inf}, {}])
    assert change is not None and change.factor == 0.25 and change.rates == (0.5,)
    _, linear, root = rate_rules(change, "SGD")
    assert linear.endswith("times 0.25, 0.5 -> 0.125") and root.endswith("times 0.5, 0.5 -> 0.25")


@pytest.mark.parametrize(("before", "now"), [(None, 8), (8, None), (8, 8)])
def test_what_is_not_known_or_the_same_is_no_change(before: int | None, now: int | None) -> None:
    assert batch_change(before, now, [{"lr": 0.1}]) is None


def test_many_groups_are_told_shortly() -> None:
    lines = list(rate_rules(BatchChange(8, 16, tuple(0.1 / 2**n for n in range(9))), "SGD"))
    assert lines[1].endswith("5 more")


# ---- every view of it


def test_every_view_has_it_and_files_keep_it(tmp_path: Path) -> None:
    made = reports.report(change=BatchChange(4, 16, (0.1, 0.01)))
    for line in said(made):
        assert " ".join(line.split()) in " ".join(str(made).split())
        assert escaped(line) in made.to_markdown()
        assert line.replace("->", "-&gt;") in made.to_html()
    made.save(tmp_path / "report.json")
    assert Report.load(tmp_path / "report.json") == made
    told = json.loads((tmp_path / "report.json").read_text())["change"]
    assert told == {"before": 4, "now": 16, "rates": [0.1, 0.01]}


def test_reports_of_earlier_versions_have_none_and_damaged_ones_are_refused() -> None:
    made = reports.report(change=BatchChange(4, 16, (0.1,)))
    told = json.loads(made.to_json())
    without = {name: value for name, value in told.items() if name != "change"}
    assert Report.from_json(json.dumps(without)) == dataclasses.replace(made, change=None)
    told["change"]["before"] = 0
    with pytest.raises(UsageError, match="a batch in it has no samples"):
        Report.from_json(json.dumps(told))


# ---- nothing is changed


@pytest.mark.parametrize("optimizer", [with_groups, adamw])
def test_saying_it_changes_nothing(optimizer: Any) -> None:
    """The parameters are those of the same training without a report, the groups those that the script made."""
    plain, told = trained(16, optimizer=optimizer), trained(16, optimizer=optimizer)
    before = copy.deepcopy([{k: v for k, v in group.items() if k != "params"} for group in told.optimizer.param_groups])
    assert re.search("times 4", str(told.report()))
    after = [{k: v for k, v in group.items() if k != "params"} for group in told.optimizer.param_groups]
    assert after == before
    for run in (plain, told):
        run.step(next(iter(run.loader)))
    for one, other in zip(plain.model.parameters(), told.model.parameters(), strict=True):
        assert torch.equal(one, other)
    plain.undo()
    told.undo()
