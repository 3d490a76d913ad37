"""State that a forward moves in something that the script replaces, or that grows, or that a proof's samples did not show."""

from __future__ import annotations

import copy
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import mlp, points
from torch import Tensor, nn
from torch.optim import SGD
from zoo.plain import relative_error

import memfit

EXACT = 1e-12


class Keeping(nn.Module):
    """Calls `write` with itself, its input and its output at each forward, and adds what `read` gives to the output."""

    def __init__(self, start: Callable[[], Any], write: Callable[[Any, Tensor, Tensor], None], read: Any = None) -> None:
        super().__init__()
        self.net, self.kept, self.write, self.read = mlp(), start(), write, read

    def forward(self, x: Tensor) -> Tensor:
        out = self.net(x)
        read = 0.0 if self.read is None else self.read(self).clone()
        with torch.no_grad():
            self.write(self, x, out)
        return out - read


class Buffered(Keeping):
    def __init__(self, write: Callable[[Any, Tensor, Tensor], None]) -> None:
        super().__init__(lambda: None, write, lambda m: m.centre)
        self.register_buffer("centre", torch.zeros(4).double())


def assign(m: Any, x: Tensor, value: Any) -> None:
    m.kept = value


def in_place(m: Any, x: Tensor, out: Tensor) -> None:
    m.centre.mul_(0.9).add_(out.mean(0), alpha=0.1)


def window(m: Any, x: Tensor, out: Tensor) -> None:
    m.kept.append(out.mean().item())
    if len(m.kept) > 2:
        m.kept.pop(0)


MODELS: dict[str, Callable[[], Keeping]] = {
    "a list": lambda: Keeping(list, lambda m, x, out: m.kept.append(out.clone())),
    "a deque": lambda: Keeping(lambda: deque(maxlen=2), lambda m, x, out: m.kept.append(out.mean())),
    "a dictionary": lambda: Keeping(dict, lambda m, x, out: m.kept.update(mean=out.mean(), count=m.kept.get("count", 0) + 1)),
    "lists of a dictionary": lambda: Keeping(lambda: defaultdict(list), lambda m, x, out: m.kept["mean"].append(out.mean())),
    "a longer list": lambda: Keeping(list, lambda m, x, out: assign(m, x, [*m.kept, out.mean().item()])),
    "a longer tuple": lambda: Keeping(tuple, lambda m, x, out: assign(m, x, (*m.kept, len(out)))),
    "a window": lambda: Keeping(list, window),
    "a tensor": lambda: Keeping(
        lambda: torch.zeros(4).double(), lambda m, x, out: m.kept.add_(out.mean(0)), lambda m: 0.1 * m.kept
    ),
    "a buffer": lambda: Buffered(in_place),
}


def nothing(model: Any) -> None:
    return


def replaced(model: Any) -> None:
    if isinstance(model, Buffered):
        model.centre = torch.zeros(4).double()
    elif isinstance(model.kept, deque):
        model.kept = deque(maxlen=2)
    elif isinstance(model.kept, defaultdict):
        model.kept = defaultdict(list)
    else:
        model.kept = torch.zeros(4).double() if isinstance(model.kept, Tensor) else type(model.kept)()


def cleared(model: Any) -> None:
    if isinstance(model.kept, (list, dict, deque)):
        model.kept.clear()


def moved_to_and_fro(model: Any) -> None:
    """As `model.cpu()` and `model.cuda()` around saving, which replace buffers."""
    model.float()
    model.double()


def kept(model: Any) -> Any:
    return copy.deepcopy(model.centre if isinstance(model, Buffered) else model.kept)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return a.shape == b.shape and bool((a - b).abs().max() <= EXACT)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple, deque)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and abs(a - b) <= EXACT


def trained(model: Keeping, step: Callable[[Any], Any], between: Callable[[Any], None]) -> list[Any]:
    """What the model keeps after each of six steps. `between` runs after every second one."""
    found = []
    for i in range(6):
        x, y = points(11, seed=i)
        step((x, y))
        found.append(kept(model))
        if i % 2:
            between(model)
    return found


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def stepping(model: nn.Module, optimizer: SGD) -> Callable[[Any], None]:
    def step(batch: tuple[Tensor, Tensor]) -> None:
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()

    return step


@pytest.mark.parametrize("mode", ["script", "step"])
@pytest.mark.parametrize("between", [nothing, replaced, cleared, moved_to_and_fro])
@pytest.mark.parametrize("name", MODELS)
def test_state_is_that_of_plain_pytorch(name: str, between: Callable[[Any], None], mode: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    plain = copy.deepcopy(model)
    optimizer = SGD(model.parameters(), 0.1)
    if mode == "script":
        memfit.wrap(model, optimizer, micro_batch=4)
        found = trained(model, stepping(model, optimizer), between)
    else:
        run = memfit.wrap(model, optimizer, loss_fn=loss_fn, micro_batch=4)
        found = trained(model, run.step, between)
    wanted = trained(plain, stepping(plain, SGD(plain.parameters(), 0.1)), between)
    assert same(found, wanted)
    assert relative_error(dict(model.named_parameters()), dict(plain.named_parameters())) <= EXACT


def shown_late(samples: int = 11) -> Tensor:
    x = points(samples)[0]
    x[:, 0] = -x[:, 0].abs()
    x[[6, 8, 9], 0] *= -1
    return x


def share(x: Tensor) -> Any:
    return (x[:, 0] > 0).double().mean()


LATE: dict[str, Callable[[Any, Tensor, Tensor], None]] = {
    "a tensor": lambda m, x, out: assign(m, x, share(x)),
    "a number": lambda m, x, out: assign(m, x, share(x).item()),
    "a flag": lambda m, x, out: assign(m, x, bool((x[:, 0] > 0).any())),
    "an entry": lambda m, x, out: m.kept.update(share=share(x).item()),
}


@pytest.mark.parametrize("mode", ["script", "step"])
@pytest.mark.parametrize("name", LATE)
def test_what_a_proofs_samples_do_not_show_is_that_of_the_batch(name: str, mode: str) -> None:
    start: Callable[[], Any] = dict if name == "an entry" else lambda: None
    model, x = Keeping(start, LATE[name]), shown_late()
    plain = copy.deepcopy(model)

    def loss_fn(model: Any, x: Tensor) -> Tensor:
        out = model(x)
        return out.square().mean() * (1 + float(model.kept["share"] if isinstance(model.kept, dict) else model.kept))

    if mode == "script":
        memfit.wrap(model, SGD(model.parameters(), 0.0), micro_batch=4)
        loss = loss_fn(model, x)
        loss.backward()
    else:
        loss = memfit.wrap(model, SGD(model.parameters(), 0.0), loss_fn=loss_fn, micro_batch=4).step(x)
    want = loss_fn(plain, x)
    want.backward()
    assert abs(loss.item() - want.item()) <= EXACT * want.item()
    assert kept(model) == kept(plain)
    gradients = [{name: p.grad for name, p in each.named_parameters()} for each in (model, plain)]
    assert relative_error(*gradients) <= EXACT


def test_lists_that_a_forward_makes_are_filled_by_the_next_one_before_a_step() -> None:
    model = Keeping(dict, lambda m, x, out: m.kept.setdefault("mean", []).append(out.mean().item()))
    plain = copy.deepcopy(model)
    memfit.wrap(model, SGD(model.parameters(), 0.1), micro_batch=4)
    for each in (model, plain):
        for i in range(3):
            loss_fn(each, points(11, seed=i)).backward()
    assert same(kept(model), kept(plain))
