"""Lightning's Trainer with a wrapped model: its parameters and what it logs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import mlp, points
from torch.utils.data import DataLoader, TensorDataset

import memfit

lightning = pytest.importorskip("pytorch_lightning")


def trained(folder: Path, micro_batch: int | None, **settings: Any) -> tuple[list[float], torch.nn.Module, Any]:
    """(losses, the trained net, memfit's run if any)."""
    runs: list[Any] = []

    class Task(lightning.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.net, self.losses = mlp(), []

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
            if micro_batch is not None:
                runs.append(memfit.wrap(self.net, optimizer, micro_batch=micro_batch))
            return optimizer

        def training_step(self, batch: Any, index: int) -> Any:
            x, y = batch
            loss = F.cross_entropy(self.net(x), y)
            self.losses.append(float(loss.detach()))
            self.log("loss", loss)
            return loss

    task = Task()
    fixed = {"max_epochs": 2, "accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    shown = {"enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": str(folder)}
    trainer = lightning.Trainer(**(fixed | shown | settings))
    trainer.fit(task, DataLoader(TensorDataset(*points(24)), batch_size=12))
    return task.losses, task.net, runs[0] if runs else None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("settings", [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1}], ids=str)
def test_the_trainer_trains_a_wrapped_model_as_it_trains_a_plain_one(
    settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMFIT", "strict")
    losses, plain, _ = trained(tmp_path, None, **settings)
    found, model, run = trained(tmp_path, 5, **settings)
    assert run.plan.accumulation == 3 and losses == pytest.approx(found, rel=1e-12)
    for name, value in plain.state_dict().items():
        assert float((model.state_dict()[name] - value).norm()) <= 1e-12 * float(value.norm())
