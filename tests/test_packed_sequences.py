"""Recurrent networks over packed sequences, as scripts on ragged text and series run them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from zoo.plain import gradients_of, relative_error

import memfit

N = 11


class Tagger(nn.Module):
    """Two layers, so that dropout lies between them; `last` classifies sequences, else every step."""

    def __init__(self, kind: str, dropout: float, *, last: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn = getattr(nn, kind)(6, 8, num_layers=2, batch_first=True, dropout=dropout, bidirectional=True)
        self.head, self.last = nn.Linear(16, 3), last
        self.double()

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=x.shape[1])
        return self.head(out[torch.arange(len(x)), lengths - 1] if self.last else out)


def batch(*, last: bool) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    lengths = torch.randint(1, 6, (N,))
    labels = torch.randint(3, (N,)) if last else torch.randint(3, (N, 5)).masked_fill(torch.arange(5) >= lengths[:, None], -100)
    return torch.randn(N, 5, 6, dtype=torch.float64), lengths, labels


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    x, lengths, labels = batch
    return F.cross_entropy(model(x, lengths).flatten(0, -2), labels.flatten())


def stepped(model: Tagger, given: Any, mode: str) -> memfit.Run:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    if mode == "step":
        run = memfit.wrap(model, optimizer, loss_fn=loss_fn, sample=given, micro_batch=3)
        run.step(given)
        return run
    run = memfit.wrap(model, optimizer, micro_batch=3)
    loss_fn(model, given).backward()
    return run


@pytest.mark.parametrize("mode", ["script", "step"])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_gradients_are_those_of_the_whole_batch(kind: str, last: bool, mode: str) -> None:
    model, given = Tagger(kind, 0.0, last=last), batch(last=last)
    plain = copy.deepcopy(model)
    loss_fn(plain, given).backward()
    stepped(model, given, mode)
    assert relative_error(gradients_of(model), gradients_of(plain)) <= 1e-12


@pytest.mark.parametrize("mode", ["script", "step"])
def test_dropout_between_the_layers_does_not_look_like_mixing(mode: str) -> None:
    model = Tagger("LSTM", 0.5, last=False)
    run = stepped(model, batch(last=False), mode)
    assert model.rnn.dropout == 0.5 and all(g is not None and g.any() for g in gradients_of(model).values())
    assert not any("samples together" in event.message for event in run.events)
