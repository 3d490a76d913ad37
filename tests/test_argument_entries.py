"""Containers among a call's arguments: what the forward changes in them is there for the script, and what the script changes in
them between the call and its loss does not reach the forward."""

from __future__ import annotations

import itertools
from collections import OrderedDict, UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memfit


@dataclass
class Record:
    x: Any
    y: Any


class Sample:
    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y


class Changing(nn.Module):
    def __init__(self, change: Any) -> None:
        super().__init__()
        self.body, self.head, self.change = nn.Linear(4, 4), nn.Linear(4, 4), change

    def forward(self, batch: Any, *others: Any) -> Any:
        return self.change(self, batch, *others)


def replaced(m: Any, b: Any) -> Any:
    b["x"] = b["x"] / 25
    return m.head(m.body(b["x"]))


def computed(m: Any, b: Any) -> Any:
    b["x"] = torch.tanh(m.body(b["x"]))
    return m.head(b["x"])


def returned(m: Any, b: Any) -> Any:
    b["out"] = m.head(m.body(b["x"]))
    return b


def both(m: Any, b: Any) -> Any:
    b["hidden"] = m.body(b["x"])
    b["out"] = m.head(b["hidden"])
    return b["out"]


def popped(m: Any, b: Any) -> Any:
    b["y"] = b.pop("x") * 2
    return m.body(b["y"] / 3)


def nested(m: Any, b: Any) -> Any:
    b["features"] = {"all": [m.body(b["x"]), b["x"] * 2], "scale": 0.5}
    return m.head(b["features"]["all"][0])


def counted(m: Any, b: Any) -> Any:
    b["used"], b["seen"] = True, b.get("seen", 3) + 1
    return m.body(b["x"])


def appended(m: Any, b: Any) -> Any:
    b["list"].append(m.body(b["list"][0]))
    return m.head(b["list"][1])


def with_loss(m: Any, b: Any) -> Any:
    b["loss"] = F.mse_loss(m.head(m.body(b["x"])), b["y"])
    return b


def dict_of(x: Any, y: Any) -> Any:
    return {"x": x, "y": y, "list": [x * 2], "names": ["a", "b"]}


def loss_of(out: Any, b: Any) -> Any:
    """A loss of all that the batch holds."""
    if "loss" in b:
        return out["loss"] if out is not b else b["loss"]
    total = F.mse_loss(out["out"] if isinstance(out, (dict, UserDict)) else out, b["y"])
    for key in ("x", "hidden"):
        if key in b:
            total = total + (b[key] * b["y"]).pow(2).mean()
    if "features" in b:
        total = total + (b["features"]["all"][0] - b["features"]["all"][1]).pow(2).mean() * b["features"]["scale"]
    return total + sum(item.abs().mean() for item in b["list"])


def simple_of(b: Any) -> Any:
    return {key: value for key, value in b.items() if not isinstance(value, torch.Tensor) and key in SIMPLE}


SIMPLE = ("used", "seen", "names")


def trained(change: Any, make: Any, loss: Any, between: Any = None, **line: Any) -> Any:
    torch.manual_seed(0)
    model = Changing(change).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if line:
        memfit.wrap(model, optimizer, **line)
    losses, left = [], []
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        batch = make(*(torch.randn(7, 4, generator=generator).double() for _ in range(2)))
        optimizer.zero_grad()
        out = model(batch)
        if between is not None:
            between(batch)
        value = loss(out, batch)
        value.backward()
        optimizer.step()
        losses.append(value.item())
        items = batch if isinstance(batch, (dict, UserDict)) else vars(batch)
        left.append(([*items], simple_of(items), [v.detach() * 1 for v in items.values() if isinstance(v, torch.Tensor)]))
    return losses, left, [p.detach().clone() for p in model.parameters()]


def check_same(plain: Any, line: Any) -> None:
    assert plain[0] == pytest.approx(line[0], rel=1e-12)
    for (keys, simple, tensors), (its_keys, its_simple, its_tensors) in zip(plain[1], line[1], strict=True):
        assert keys == its_keys and simple == its_simple
        for tensor, its in zip(tensors, its_tensors, strict=True):
            torch.testing.assert_close(tensor, its, rtol=1e-12, atol=1e-12)
    for parameter, its in zip(plain[2], line[2], strict=True):
        torch.testing.assert_close(parameter, its, rtol=1e-11, atol=1e-12)


CHANGES = [replaced, computed, returned, both, popped, nested, counted, appended, with_loss]


@pytest.mark.parametrize("make", [dict_of, lambda x, y: OrderedDict(dict_of(x, y)), lambda x, y: UserDict(dict_of(x, y))])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_a_forward_changes_in_a_dictionary_is_there_for_the_script(change: Any, make: Any) -> None:
    check_same(trained(change, make, loss_of), trained(change, make, loss_of, micro_batch=3))


@pytest.mark.parametrize("kind", [Record, Sample])
def test_what_a_forward_changes_in_an_object_is_there_for_the_script(kind: Any) -> None:
    def scaled(m: Any, b: Any) -> Any:
        b.x, b.hidden = b.x / 25, m.body(b.x)
        return m.head(b.hidden)

    def loss(out: Any, b: Any) -> Any:
        hidden = getattr(b, "hidden", None)
        return F.mse_loss(out, b.x) + (0 if hidden is None else hidden.abs().mean())

    check_same(trained(scaled, kind, loss), trained(scaled, kind, loss, micro_batch=3))


def later_batch(b: Any) -> None:
    b["x"] = b["x"] + 1


def later_pop(b: Any) -> None:
    b["list"].pop()
    b["names"].append("c")
    b["new"] = b.pop("y")
    b["y"] = b["new"] * 2


def later_column(b: Any) -> None:
    b["names"].clear()


@pytest.mark.parametrize("between", [later_batch, later_pop, later_column], ids=lambda between: between.__name__)
def test_what_the_script_changes_after_the_call_does_not_reach_its_forward(between: Any) -> None:
    def forward(m: Any, b: Any) -> Any:
        return m.head(m.body(b["x"] * b["y"] + b["list"][0])) * (2 if b["names"][0] == "a" else 1)

    def loss(out: Any, b: Any) -> Any:
        return F.mse_loss(out, b["y"] + b["x"])

    args = forward, dict_of, loss, between
    check_same(trained(*args), trained(*args, micro_batch=3))


def test_an_attribute_of_an_argument_that_the_script_sets_after_the_call_does_not_reach_its_forward() -> None:
    def forward(m: Any, b: Any) -> Any:
        return m.head(m.body(b.x))

    def between(b: Any) -> None:
        b.x = b.x + 1

    args = forward, Sample, lambda out, b: F.mse_loss(out, b.y), between
    check_same(trained(*args), trained(*args, micro_batch=3))




def test_an_entry_that_micro_batches_do_not_join_is_refused_by_name_when_it_is_read() -> None:
    def forward(m: Any, b: Any) -> Any:
        b["rows"] = len(b["x"])
        return m.body(b["x"])

    torch.manual_seed(0)
    model = Changing(forward).double()
    memfit.wrap(model, torch.optim.SGD(model.parameters(), 0.1), micro_batch=3)
    batch = dict_of(torch.randn(7, 4).double(), torch.randn(7, 4).double())
    F.mse_loss(model(batch), batch["y"]).backward()
    with pytest.raises(memfit.Refused, match=r"using arguments\[0\]\['rows'\]"):
        batch["rows"] + 1


def trained_by(forward: Any, step: Any, line: bool, make: Any = dict_of) -> Any:
    """Losses of a script whose `step(model, batch, kept)` computes one, over two epochs of the same two batches."""
    torch.manual_seed(0)
    model = Changing(forward).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if line:
        memfit.wrap(model, optimizer, micro_batch=3)
    generator = torch.Generator().manual_seed(5)
    batches = [make(*(torch.randn(7, 4, generator=generator).double() for _ in range(2))) for _ in range(2)]
    losses, kept = [], {"h": torch.zeros(7, 4).double(), "count": torch.zeros(()).double()}
    for batch in batches * 2:
        optimizer.zero_grad()
        loss = step(model, batch, kept)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def chained(m: Any, b: Any, kept: Any) -> Any:
    b = dict(b)
    m(b)
    return F.mse_loss(m(b), b["y"]) + b["hidden"].abs().mean()


def again_over_epochs(m: Any, b: Any, kept: Any) -> Any:
    m(b)
    return F.mse_loss(b["out"], b["y"])


def carried(m: Any, b: Any, kept: Any) -> Any:
    loss = sum(F.mse_loss(m(kept, x), b["y"]) for x in (b["x"], b["list"][0]))
    kept["h"] = kept["h"].detach()
    return loss


def evaluated(m: Any, b: Any, kept: Any) -> Any:
    loss = F.mse_loss(m(b), b["y"])
    with torch.no_grad():
        m(b)
    return loss + b["hidden"].detach().mean() * loss


def recurrent(m: Any, state: Any, x: Any) -> Any:
    state["h"] = torch.tanh(m.body(x) + state["h"])
    return m.head(state["h"])


def twice(m: Any, b: Any, kept: Any) -> Any:
    return F.mse_loss(m(b, b), b["y"])


def through_both(m: Any, b: Any, other: Any) -> Any:
    b["x"] = b["x"] * 2
    return m.head(m.body(other["x"]))


def same_argument(m: Any, b: Any, kept: Any) -> Any:
    return F.mse_loss(m(b["x"], b["x"]), b["y"]) + F.mse_loss(m(b["x"], b["y"]), b["y"])


def asks(m: Any, query: Any, key: Any) -> Any:
    return m.head(query) if query is key else m.head(m.body(query) + key)


def two_names(m: Any, b: Any) -> Any:
    out = m.head(m.body(b["x"]))
    return {"logits": out, "scores": out}


def masked(m: Any, b: Any, kept: Any) -> Any:
    out = m(b)
    out["logits"].mul_(0.5)
    return F.mse_loss(out["scores"], b["y"])


def returned_itself(m: Any, b: Any, kept: Any) -> Any:
    out = m(b)
    assert out is b
    out["y"] = out["y"] * 2
    return F.mse_loss(b["out"], b["y"])


def moved(m: Any, b: Any) -> Any:
    inner = b.pop("list")
    inner.append(m.body(inner[0]))
    b["inside"] = inner
    return m.head(inner[1])


def put_back(m: Any, b: Any, kept: Any) -> Any:
    out = m(b)
    loss = F.mse_loss(out, b["inside"][1])
    b["list"] = b.pop("inside")[:1]
    return loss


@pytest.mark.parametrize(
    ("forward", "step"),
    [
        (both, chained), (both, again_over_epochs), (recurrent, carried), (both, evaluated), (through_both, twice),
        (asks, same_argument), (two_names, masked), (returned, returned_itself), (moved, put_back),
    ],
    ids=lambda each: each.__name__,
)  # fmt: skip
def test_containers_that_are_used_again_or_shared_are_those_of_plain_training(forward: Any, step: Any) -> None:
    assert trained_by(forward, step, True) == pytest.approx(trained_by(forward, step, False), rel=1e-11)


def test_entries_that_a_forward_begins_to_set_later_are_refused() -> None:
    def forward(m: Any, b: Any) -> Any:
        if next(m.calls) > 30:
            b["x"] = b["x"] * 2
        return m.body(b["x"])

    torch.manual_seed(0)
    model = Changing(forward).double()
    model.calls = itertools.count()  # (of a number it would be seen when that begins)
    memfit.wrap(model, torch.optim.SGD(model.parameters(), 0.1), micro_batch=3)
    batch = dict_of(torch.randn(7, 4).double(), torch.randn(7, 4).double())
    with pytest.raises(memfit.Refused, match=r"new entries in the containers|changes"):
        for _ in range(40):
            F.mse_loss(model(batch), batch["y"]).backward()
