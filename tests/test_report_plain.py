"""The report of a run without a plan says what ran instead, in every format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import mlp, points
from stepping import sgd
from torch import Tensor, nn

import memfit
from memfit import UsageError


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def train(run: memfit.Run, samples: int, steps: int = 2) -> None:
    for _ in range(steps):
        run.optimizer.zero_grad()
        loss_fn(run.model, points(samples)).backward()
        run.optimizer.step()


def wrapped(**settings: Any) -> memfit.Run:
    model = mlp()
    return memfit.wrap(model, sgd(model), **settings)


def test_before_anything_ran_there_is_nothing_to_report() -> None:
    with pytest.raises(UsageError, match="no plan yet"):
        wrapped().report()


def test_a_batch_that_fits_has_a_plan_that_says_so() -> None:
    run = wrapped()
    train(run, 12)
    assert "fits as is" in run.report().to_markdown()
    with pytest.raises(UsageError, match="every batch ran whole so far"):
        memfit.verify(run)


def test_a_single_sample_ran_whole() -> None:
    run = wrapped()
    train(run, 1)
    text = str(run.report())
    assert "ran whole, as the script wrote it" in text and "one sample cannot be cut" in text
    assert "steps          2" in text and "no plan yet" not in text
    with pytest.raises(UsageError, match="ran whole so far"):
        memfit.verify(run)
    train(run, 12)
    assert run.plan is not None and "fits as is" in run.report().to_markdown()


def test_a_model_that_is_never_called_for_training() -> None:
    run = wrapped()
    with torch.no_grad():
        run.model(points()[0])
    run.optimizer.step()
    assert "never called while gradients were recorded" in str(run.report())


@pytest.mark.parametrize("mode", [{}, {"loss_fn": loss_fn}], ids=["script", "step"])
@pytest.mark.parametrize("how", ["enabled=False", "MEMFIT=off", "run.undo()"])
def test_switched_off(mode: dict[str, Any], how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "MEMFIT=off":
        monkeypatch.setenv("MEMFIT", "off")
    run = wrapped(**mode, enabled=how != "enabled=False")
    run.undo()
    if mode:
        run.step(points())
    text = str(run.report())
    assert f"off ({how}" in text and "as the script wrote it" in text
    assert {"enabled=False": "enabled=True", "MEMFIT=off": "unset MEMFIT", "run.undo()": "wrap again"}[how] in text
    assert ("steps          1, " in text) == bool(mode)
    with pytest.raises(UsageError, match="switched off"):
        memfit.verify(run)


def test_every_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Odd(nn.Sequential):
        pass

    Odd.__name__ = "<b>Odd</b>"
    model = Odd(mlp())
    report = memfit.wrap(model, sgd(model), enabled=False).report()
    for suffix in ("html", "md", "json"):
        report.save(tmp_path / f"report.{suffix}")
        assert "off (enabled=False)" in (tmp_path / f"report.{suffix}").read_text().replace("\\", "")
    assert "<b>" not in (tmp_path / "report.html").read_text() and "<b>" not in (tmp_path / "report.md").read_text()
    assert json.loads(report.to_json())["model"] == "<b>Odd</b>"
    assert "<b>" not in report._repr_html_()
    report.print()
    assert "off (enabled=False)" in capsys.readouterr().out
    with pytest.raises(UsageError, match="names no format"):
        report.save(tmp_path / "report.txt")
