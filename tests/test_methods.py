"""Methods of the model that the script calls beside its forward, cut where `methods=` lists them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import Forwards, gradients_of, plain_gradients, relative_error
from torch import Tensor, nn
from torch.optim import SGD

import memfit

N = 12


class Pair(nn.Module):
    """An image and a text encoder; its forward is not what the script calls."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = nn.Linear(6, 4).double(), nn.Linear(5, 4).double()
        self.scale = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

    def encode_image(self, x: Tensor) -> Tensor:
        return self.image(x).tanh()

    def encode_text(self, x: Tensor, *, twice: bool = False) -> Tensor:
        return self.text(x).tanh() * (2 if twice else 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.encode_image(x) - self.encode_text(y)


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(N, size, generator=generator, dtype=torch.float64) for size in (6, 5))  # type: ignore[return-value]


def contrastive(model: Any, x: Tensor, y: Tensor) -> None:
    image, text = (F.normalize(f, dim=-1) for f in (model.encode_image(x), model.encode_text(y)))
    logits, labels = model.scale.exp() * image @ text.t(), torch.arange(len(x))
    ((F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2).backward()


def regressing(model: Any, x: Tensor, y: Tensor) -> None:
    F.mse_loss(model.encode_image(x), model.encode_text(y, twice=True)).backward()


def forward_and_method(model: Any, x: Tensor, y: Tensor) -> None:
    (F.mse_loss(model(x, y), torch.zeros(N, 4).double()) + model.encode_image(x).square().mean()).backward()


def chained(model: Any, x: Tensor, y: Tensor) -> None:
    """What one method gives goes into another."""
    first = model.encode_text(y)
    model.encode_image(torch.cat([first, y[:, :2]], 1)).pow(2).mean().backward()


SCRIPTS = {f.__name__: f for f in (contrastive, regressing, forward_and_method, chained)}


@pytest.mark.parametrize("name", SCRIPTS)
def test_methods_that_are_listed_are_cut(name: str) -> None:
    script, batch, model = SCRIPTS[name], data(), Pair()
    want = plain_gradients(model, script, *batch)
    seen = Forwards(model.image)
    run = memfit.wrap(model, SGD(model.parameters(), lr=0.1), micro_batch=5, methods=["encode_image", "encode_text"])
    for _ in range(3):
        model.zero_grad()
        seen.sizes.clear()
        script(model, *batch)
        assert relative_error(gradients_of(model), want) <= 1e-12
    assert max(seen.sizes) <= 5 and sum(seen.sizes) == {"regressing": N, "chained": N}.get(name, 2 * N)
    run.undo()
    assert not {"encode_image", "encode_text", "forward"} & set(vars(model))


def test_a_copy_has_the_plain_methods() -> None:
    model = Pair()
    memfit.wrap(model, SGD(model.parameters(), lr=0.1), micro_batch=5, methods=["encode_image"])
    other = copy.deepcopy(model)
    assert type(other.encode_image(data()[0])) is Tensor
    assert other.encode_image.__self__ is other


def test_without_gradients_a_method_runs_as_it_is() -> None:
    model, (x, _) = Pair(), data()
    memfit.wrap(model, SGD(model.parameters(), lr=0.1), micro_batch=5, methods=["encode_image"])
    seen = Forwards(model.image)
    with torch.no_grad():
        model.encode_image(x)
    assert seen.sizes == [N]


@pytest.mark.parametrize(
    ("methods", "found"),
    [(["encode_sound"], "has no method 'encode_sound'"), (["image"], "is a module"), (["zero_grad"], "every torch module")],
)
def test_what_is_no_method_of_the_model_is_refused(methods: list[str], found: str) -> None:
    model = Pair()
    with pytest.raises(memfit.UsageError, match=found):
        memfit.wrap(model, SGD(model.parameters(), lr=0.1), methods=methods)
    assert "forward" not in vars(model)


def test_a_loss_fn_needs_no_methods() -> None:
    model = Pair()
    with pytest.raises(memfit.UsageError, match="omit methods="):
        memfit.wrap(model, SGD(model.parameters(), lr=0.1), loss_fn=lambda m, b: m(*b).sum(), methods=["encode_text"])
