"""allow_inexact takes the names that refusals show, and says of others that nothing has them."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import mlp
from torch import Tensor, nn
from torch.optim import SGD

import memfit
from memfit import UsageError


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> Tensor:
        out = self.net(x)
        self.aux_loss = out.square().mean()
        return out


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.router(x)


def wrap(names: Any) -> memfit.Run:
    model = Outer()
    return memfit.wrap(model, SGD(model.parameters(), lr=0.1), allow_inexact=names)


@pytest.mark.parametrize(
    "name",
    [
        *("the loss", "the structure of the output", "Outer", "router", "router.net.0", "router.aux_loss", "norm.running_mean"),
        *("output['balance']", "output", "a list outside the model (filled by a forward hook?)", "Extractor.features"),
    ],
)
def test_names_that_refusals_show_are_taken(name: str) -> None:
    wrap([name]).undo()


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ("router", r"did you mean \('router',\)\?"),
        (["routr"], "did you mean 'router'"),
        (("the los",), "did you mean 'the loss'"),
        (["aux_loss"], "no module, buffer or attribute 'aux_loss'"),
        (["router.aux_los"], "no module, buffer or attribute"),
        ([""], "allow_inexact"),
        ([3], "not a list of names"),
        (3, "not a list of names"),
    ],
)
def test_other_names_are_refused(names: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said) as raised:
        wrap(names)
    assert "allow_inexact=" in raised.value.asked
