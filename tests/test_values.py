"""Models that look at the values of their tensors: what cannot be known while tracing must not refuse or change training."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers import mlp, points, wrapped
from torch import Tensor, nn
from zoo.plain import gradients_of, relative_error

import memfit


class Checked(nn.Module):
    """Raises where its activations are not as they should be."""

    def __init__(self, check: str) -> None:
        super().__init__()
        self.inner, self.check = mlp(), check

    def forward(self, x: Tensor) -> Tensor:
        found = self.inner(x)
        wrong = {
            "nan": lambda: torch.isnan(found).any(),
            "large": lambda: found.max() > 1e6,
            "finite": lambda: not torch.isfinite(found).all(),
            "number": lambda: found.abs().max().item() > 1e6,
        }[self.check]
        if wrong():
            raise ValueError("activations went wrong")
        return found


@pytest.mark.parametrize("check", ["nan", "large", "finite", "number"])
def test_checks_that_pass_do_not_refuse_training(check: str) -> None:
    model, (x, y) = Checked(check), points()
    plain = copy.deepcopy(model)
    F.cross_entropy(plain(x), y).backward()
    memfit.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch=5)
    F.cross_entropy(model(x), y).backward()
    assert relative_error(gradients_of(model), gradients_of(plain)) <= 1e-12


def test_a_check_that_fails_surfaces_as_the_models_own() -> None:
    model, (x, y) = Checked("nan"), points()
    memfit.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch=5)
    with pytest.raises(ValueError, match="activations went wrong"):
        F.cross_entropy(model(x * float("nan")), y).backward()


class Positives(nn.Module):
    """A loss over positives and negatives, divided by the positives or one: CenterNet, RetinaNet, focal losses."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp(outputs=1)

    def forward(self, x: Tensor, positive: Tensor) -> dict[str, Tensor]:
        scores = self.inner(x)[:, 0]
        losses = F.binary_cross_entropy_with_logits(scores, positive.to(scores.dtype), reduction="none")
        return {"loss": losses.sum() / positive.sum().clamp(min=1)}


def test_a_micro_batch_without_anything_to_count_keeps_its_loss_or_is_refused() -> None:
    model, (x, _) = Positives(), points()
    plain = copy.deepcopy(model)
    wrapped(model, 2, share=12)
    everywhere, nowhere_in_the_first = torch.tensor([1, 0] * 6) > 0, torch.tensor([0, 0, 1, 1, 1, 0, 1, 0, 1, 0, 1, 0]) > 0
    for positive in (everywhere, nowhere_in_the_first):
        model.zero_grad()
        plain.zero_grad()
        want = plain(x, positive)["loss"]
        want.backward()
        try:
            got = model(x, positive)["loss"]
            got.backward()
        except memfit.Refused as refused:
            assert positive is nowhere_in_the_first and "mixes samples" in str(refused)
        else:
            assert abs(float(got.detach()) - float(want.detach())) <= 1e-10
            assert relative_error(gradients_of(model), gradients_of(plain)) <= 1e-10
