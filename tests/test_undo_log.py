"""Contexts that leave no trace inside each other, as trials from other values run."""

from __future__ import annotations

import torch
from torch import nn

from memfit.tracing.sandbox import leave_no_trace


def test_a_trial_inside_another_knows_what_it_began_with() -> None:
    model, cpu = nn.BatchNorm1d(2), torch.device("cpu")
    with leave_no_trace(model, cpu):
        model.get_buffer("running_mean").fill_(3)
        with leave_no_trace(model, cpu) as traces:
            model(torch.ones(4, 2))
            found = {place.label: before for place, before in traces.moved().values()}
    (mean,) = [value for name, value in found.items() if "running_mean" in name]
    assert mean.tolist() == [3, 3]
