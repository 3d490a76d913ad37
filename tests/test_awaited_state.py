"""State that a forward leaves without a graph, used by the script between the call and its loss: as in plain PyTorch."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

import memfit

SEEN: dict[str, Tensor] = {}


class Leaves(nn.Module):
    """Its forward leaves what the name says."""

    default: Tensor | None = None

    def __init__(self, what: str) -> None:
        super().__init__()
        self.first, self.second, self.what = nn.Linear(6, 8), nn.Linear(8, 6), what
        self.slow = nn.Linear(8, 6, bias=False).requires_grad_(False)
        self.register_buffer("kept", torch.zeros(8))
        self.register_buffer("replaced", None)
        self.items: list[Tensor] = []
        self.table: dict[str, Any] = {}
        self.object = SimpleNamespace(inner={})
        self.calls = 0
        self.closed: dict[str, Tensor] = {}
        found = self.closed
        if what == "closure":
            self.first.register_forward_hook(lambda module, args, out: found.update(out=out.detach()))

    @property
    def doubled(self) -> Tensor:
        return 2 * vars(self)["doubled"]

    @doubled.setter
    def doubled(self, value: Tensor) -> None:
        vars(self)["doubled"] = value

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        mask = (x < 0.5).to(x.dtype)
        match self.what:
            case "attribute":
                self.mask = mask
            case "default":
                self.default = mask
            case "property":
                self.doubled = mask
            case "number":
                self.mean = h.mean().item()
            case "counter":
                self.calls += 1
            case "item":
                self.items.append(mask)
            case "entry":
                self.table["mask"] = mask
            case "object":
                self.object.inner["mask"] = mask
            case "buffer":
                self.replaced = mask
            case "buffer in place":
                self.kept.mul_(0.9).add_(h.detach().mean(0))
            case "parameter":
                with torch.no_grad():
                    self.slow.weight.mul_(0.9).add_(self.second.weight, alpha=0.1)
            case "global":
                SEEN["mask"] = mask
        return self.second(h)


USES: dict[str, Callable[[Leaves], Any]] = {
    "attribute": lambda model: model.mask,
    "default": lambda model: model.default,
    "property": lambda model: model.doubled,
    "number": lambda model: model.mean,
    "counter": lambda model: model.calls,
    "item": lambda model: model.items[-1],
    "entry": lambda model: model.table["mask"],
    "object": lambda model: model.object.inner["mask"],
    "buffer": lambda model: model.replaced,
    "buffer in place": lambda model: model.kept[:6],
    "parameter": lambda model: model.slow.weight[:, 0],
    "global": lambda model: SEEN["mask"],
    "closure": lambda model: model.closed["out"][:, :6],
}


def trained(what: str, loss: Callable[[Leaves, Tensor], Tensor], micro_batch: int | None, block: bool = False) -> list[Tensor]:
    """Losses, and parameters after three steps."""
    torch.manual_seed(0)
    leaves = Leaves(what).double()
    model = nn.Sequential(leaves) if block else leaves
    optimizer = SGD(model.parameters(), lr=0.1)
    run = None if micro_batch is None else memfit.wrap(model, optimizer, micro_batch=micro_batch)
    found = []
    for _ in range(3):
        x = torch.randn(8, 6, dtype=torch.float64)
        out = model(x)
        value = loss(leaves, out - x)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        found.append(value.detach())
    assert run is None or (run.plan is not None and run.plan.accumulation > 1)
    if run is not None:
        run.undo()
    return [*found, *(p.detach() for p in model.parameters())]


def check(what: str, loss: Callable[[Leaves, Tensor], Tensor], **given: Any) -> None:
    for got, want in zip(trained(what, loss, 3, **given), trained(what, loss, None, **given), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)
    assert not any(type(value).__module__.startswith("memfit.") for value in vars(Leaves).values())  # nothing stays behind


@pytest.mark.parametrize(
    ("what", "block"),
    [*((what, False) for what in USES), *((what, True) for what in ("item", "buffer", "parameter", "closure"))],
)
def test_what_a_forward_leaves_is_there_for_the_loss(what: str, block: bool) -> None:
    check(what, lambda model, out: (out.square() * USES[what](model)).mean(), block=block)


@pytest.mark.parametrize(
    ("what", "use"),
    [
        ("buffer in place", lambda model: model.state_dict()["kept"]),
        ("buffer in place", lambda model: dict(model.named_buffers())["kept"]),
        ("parameter", lambda model: next(model.slow.parameters())),
        ("parameter", lambda model: dict(model.named_parameters())["slow.weight"]),
    ],
)
def test_lists_of_parameters_and_buffers_are_those_after_the_forward(what: str, use: Any) -> None:
    check(what, lambda model, out: (out.square() + use(model).sum() * out).mean(), block=True)


def test_what_the_script_sets_after_a_call_stays() -> None:
    def loss(model: Leaves, out: Tensor) -> Tensor:
        model.mask = torch.ones(())
        return (out.square()).mean() * model.mask

    check("attribute", loss)


def test_what_the_script_deletes_after_a_call_is_gone() -> None:
    def loss(model: Leaves, out: Tensor) -> Tensor:
        mask = model.mask
        del model.mask
        assert not hasattr(model, "mask")
        return (out.square() * mask).mean()

    check("attribute", loss)
    check("attribute", lambda model, out: (delattr(model, "mask"), out.square().mean())[1])


def test_a_forward_whose_output_is_dropped_leaves_its_state() -> None:
    def loss(model: Leaves, out: Tensor) -> Tensor:
        model(torch.full((8, 6), 0.3, dtype=torch.float64))
        return out.square().mean() * (1 + model.kept.mean())

    check("buffer in place", loss)


def test_other_models_of_the_class_are_read_as_they_are() -> None:
    other = Leaves("attribute")

    def loss(model: Leaves, out: Tensor) -> Tensor:
        assert not hasattr(other, "mask") and other.calls == 0 and Leaves.default is None
        with pytest.raises(AttributeError, match="mask"):
            other.mask  # noqa: B018
        other.mask = torch.zeros(())
        assert other.mask.item() == 0
        del other.mask
        return (out.square() * model.mask).mean()

    check("attribute", loss)


def test_models_of_one_class_wait_beside_each_other() -> None:
    def both(wrapped: bool) -> list[Tensor]:
        torch.manual_seed(0)
        models = [Leaves("attribute").double() for _ in range(2)]
        for model in models if wrapped else ():
            memfit.wrap(model, SGD(model.parameters(), lr=0.1), micro_batch=3)
        for _ in range(2):
            x = torch.randn(8, 6, dtype=torch.float64)
            outs = [model(x * scale) for scale, model in enumerate(models, 1)]
            for model, out in zip(models, outs):
                (out.square() * model.mask).mean().backward()
        return [p.grad for model in models for p in model.parameters()]  # type: ignore[misc]

    for got, want in zip(both(True), both(False), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


def test_an_abandoned_model_is_not_kept_alive() -> None:
    model = Leaves("attribute")
    run = memfit.wrap(model, SGD(model.parameters(), lr=0.1), micro_batch=3)
    model(torch.randn(8, 6))
    known = weakref.ref(model)
    del model, run
    gc.collect()
    assert known() is None
    check("attribute", lambda model, out: (out.square() * model.mask).mean())


def test_state_that_nobody_reads_costs_no_second_forward() -> None:
    model = Leaves("attribute")
    run = memfit.wrap(model, SGD(model.parameters(), lr=0.1), micro_batch=3)
    for _ in range(2):
        out = model(torch.randn(8, 6))
        F.mse_loss(out, torch.zeros(8, 6)).backward()
        assert model.mask.shape == (8, 6)
    assert run.plan is not None and run.plan.mode == "accumulate"
