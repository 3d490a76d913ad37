"""State that forwards, losses and hooks move, wherever it lives: as in plain PyTorch, to the bit where nothing is cut."""

from __future__ import annotations

import functools
import gc
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import mlp, points, unseen
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import memfit
from memfit import Refused

X, Y = points(24)
Wrap = Callable[..., Any]
Script = Callable[[Wrap], list[Any]]
CENTRE: Any = None


@pytest.fixture(autouse=True)
def strictly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMFIT", "strict")


def batches(size: int = 12) -> list[tuple[Tensor, Tensor]]:
    return [(X[i : i + size], Y[i : i + size]) for i in range(0, len(X), size)]


def plain(*args: Any, **kwargs: Any) -> None:
    return None


def stepped(run: Any, model: nn.Module, optimizer: Any, loss: Callable[[Any, Any], Tensor]) -> None:
    """Train on all batches by `run.step`, or as a loop does where there is no run."""
    for batch in batches():
        if run is not None:
            run.step(batch)
            continue
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()


def same(wanted: Any, found: Any, tolerance: float) -> bool:
    a, b = torch.as_tensor(wanted), torch.as_tensor(found)
    alike = type(b) in (Tensor, nn.Parameter) and a.shape == b.shape
    return alike and float((a.double() - b.double()).detach().norm()) <= tolerance * float(a.detach().double().norm())


def assert_same(script: Script, tolerance: float, **settings: Any) -> Any:
    """The script leaves the same with memfit as without; returns its run."""
    runs: list[Any] = []

    def wrap(*args: Any, **kwargs: Any) -> Any:
        runs.append(memfit.wrap(*args, **kwargs, **settings))
        return runs[-1]

    wanted, found = script(plain), script(wrap)
    assert [same(a, b, tolerance) for a, b in zip(wanted, found, strict=True)] == [True] * len(wanted), (wanted, found)
    return runs[0]


# ---- state of the forward


class Counting(nn.Module):
    """Counts forwards and samples, in a buffer, in attributes and in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.calls, self.sizes = mlp(), 0, []
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += len(x)
        self.sizes.append(len(x))
        return self.net(x)

    def state(self) -> list[Any]:
        return [self.calls, self.seen, len(self.sizes), sum(self.sizes)]


@dataclass
class Record:
    out: Tensor
    counts: dict[str, int]


class Pair(NamedTuple):
    mean: Tensor
    samples: int


class Latest(nn.Module):
    """Keeps figures of its last forward, beside one that grows from a first forward on."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.samples, self.above, self.sum = mlp(), 0, torch.zeros((), dtype=torch.long), torch.zeros(())
        self.shape: Any = None

    def forward(self, x: Tensor) -> Tensor:
        out = self.net(x)
        self.samples, self.shape, self.above = len(x), x.shape, (out[:, 0] > out[:, 1]).sum()
        self.sum = out.detach().sum()
        self.grown = getattr(self, "grown", 0) + len(x)
        self.record, self.pair = Record(out.detach(), {"n": len(x)}), Pair(out.detach().mean(1), len(x))
        return out

    def state(self) -> list[Any]:
        held = [self.record.out, self.record.counts["n"], *self.pair]
        return [self.samples, *self.shape, self.above, self.sum, self.grown, *held]


class Remembering(nn.Module):
    """Keeps its last output and all before it."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.history = mlp(), deque(maxlen=3)
        self.last: Any = None

    def forward(self, x: Tensor) -> Tensor:
        out = self.net(x)
        self.last = out.detach()
        self.history.append(self.last)
        return out

    def state(self) -> list[Any]:
        return [self.last, *self.history]


class Averaging(nn.Module):
    """A running mean whose data is assigned, and one that is written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        for name in ("assigned", "written"):
            self.register_buffer(name, torch.zeros(7, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.assigned.data = 0.9 * self.assigned.data + 0.1 * x.mean(0)
        self.written.mul_(0.9).add_(0.1 * x.mean(0))
        return self.net(x)

    def state(self) -> list[Any]:
        return [self.assigned, self.written]


class Momentum(nn.Module):
    """A slow copy that the forward moves towards the trained net."""

    def __init__(self) -> None:
        super().__init__()
        self.fast, self.slow = mlp(), mlp(seed=1)
        self.slow.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for fast, slow in zip(self.fast.parameters(), self.slow.parameters()):
                slow.mul_(0.9).add_(fast, alpha=0.1)
            target = self.slow(x)
        return self.fast(x) - target

    def state(self) -> list[Any]:
        return list(self.slow.parameters())


class Spectral(nn.Module):
    """A power iteration with every forward."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layer = nn.utils.parametrizations.spectral_norm(nn.Linear(7, 4)).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def state(self) -> list[Any]:
        return list(self.layer.buffers())


class Keeping(nn.Module):
    """Keeps tensors with their graph: a penalty that losses may add, attention, hidden units by name."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.penalty: Any = None
        self.attention: Any = None
        self.hidden: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        out = self.net(x)
        self.penalty, self.attention = out.square().mean(), out.softmax(1)
        self.hidden["out"] = out * 2
        return out

    def state(self) -> list[Any]:
        return [self.penalty.detach(), self.attention.detach(), self.hidden["out"].detach()]


MODELS = [Counting, Latest, Remembering, Averaging, Momentum, Spectral, Keeping]


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def two_passes(model: nn.Module, batch: Any) -> Tensor:
    out = model(batch[0])
    return (out.flip(0) * out).mean()


def two_calls(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy((model(batch[0]) + model(batch[0] + 0.5)) / 2, batch[1])


def later_first(model: nn.Module, batch: Any) -> Tensor:
    out, other = model(batch[0]), model(batch[0] + 0.5)
    return (other.flip(0) * other).mean() + (out.flip(0) * out).mean()


def train(make: Callable[[], Any], loss: Callable[..., Tensor], step_mode: bool) -> Script:
    def script(wrap: Wrap) -> list[Any]:
        model = make()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        run = wrap(model, optimizer, loss_fn=loss, sample=batches()[0]) if step_mode else wrap(model, optimizer) and None
        stepped(run, model, optimizer, loss)
        return [*model.parameters(), *model.state()]

    return script


@pytest.mark.parametrize("step_mode", [False, True])
@pytest.mark.parametrize("loss", [cross_entropy, two_passes, two_calls])
@pytest.mark.parametrize("make", MODELS)
def test_state_of_a_forward_moves_once_per_batch(make: Any, loss: Any, step_mode: bool) -> None:
    script = train(make, loss, step_mode)
    run = assert_same(script, 1e-12, micro_batch=5)
    assert run.plan.accumulation == 3
    assert_same(script, 0.0, micro_batch="off")


@pytest.mark.parametrize("step_mode", [False, True])
@pytest.mark.parametrize("make", [model for model in MODELS if model is not Momentum])  # which is refused: it writes parameters
def test_calls_move_state_in_their_order_whichever_is_used_first(make: Any, step_mode: bool) -> None:
    assert_same(train(make, later_first, step_mode), 1e-12, micro_batch=5)


# ---- state of the loss, in step mode


class Centre(nn.Module):
    """A loss with everything that a loss module may keep."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(4, dtype=torch.float64))
        self.attribute, self.scale, self.steps = torch.zeros(4, dtype=torch.float64), 0.1, 0
        self.queue, self.list = deque(maxlen=3), []

    def forward(self, out: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(out - self.centre - self.attribute, labels) * (1 + self.scale)
        with torch.no_grad():
            self.centre.mul_(0.9).add_(out.mean(0), alpha=0.1)
            self.attribute = self.attribute * 0.9 + 0.1 * out.mean(0)
        self.scale *= 0.9
        self.steps += 1
        self.queue.append(float(loss.detach()))
        self.list.append(len(out))
        return loss

    def state(self) -> list[Any]:
        return [self.centre, self.attribute, self.scale, self.steps, *self.queue, len(self.list), sum(self.list)]

    def of(self, model: nn.Module, batch: Any) -> Tensor:
        return self(model(batch[0]), batch[1])


def by_partial(centre: Centre, model: nn.Module, batch: Any) -> Tensor:
    return centre.of(model, batch)


def by_global(model: nn.Module, batch: Any) -> Tensor:
    return CENTRE.of(model, batch)


def reached(how: str, centre: Centre) -> Callable[..., Tensor]:
    global CENTRE
    CENTRE = centre
    ways: dict[str, Any] = {
        "closure": lambda model, batch: centre(model(batch[0]), batch[1]),
        "bound method": centre.of,
        "partial": functools.partial(by_partial, centre),
        "global": by_global,
    }
    return ways[how]


@pytest.mark.parametrize("how", ["closure", "bound method", "partial", "global"])
def test_state_of_a_loss_moves_once_per_batch(how: str) -> None:
    def script(wrap: Wrap) -> list[Any]:
        model, centre = mlp(), Centre()
        loss = reached(how, centre)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = wrap(model, optimizer, loss_fn=loss, sample=batches()[0])
        stepped(run, model, optimizer, loss)
        return [*model.parameters(), *centre.state()]

    assert assert_same(script, 1e-12, micro_batch=5).plan.accumulation == 3
    assert_same(script, 0.0, micro_batch="off")


class OnClass:
    """State on a class itself: a method makes it anew."""

    steps, scale, mean, array = 0, 0.1, torch.zeros(4, dtype=torch.float64), np.zeros(4)

    @classmethod
    def move(cls, out: Tensor) -> Any:
        cls.steps += 1
        cls.scale = 0.9 * cls.scale + 0.1 * float(out.mean())
        cls.mean = 0.9 * cls.mean + 0.1 * out.mean(0)
        cls.array = 0.9 * cls.array + 0.1 * out.mean(0).numpy()
        cls.latest = out
        return cls.steps, cls.scale, cls.mean, cls.array, cls.latest


class InSlots:
    __slots__ = ("array", "latest", "mean", "scale", "single", "steps")

    def __init__(self) -> None:
        self.steps, self.scale, self.single, self.mean = 0, 0.1, np.float32(0.1), torch.zeros(4, dtype=torch.float64)
        self.array = np.zeros(4)

    def move(self, out: Tensor) -> Any:
        self.steps += 1
        self.scale = 0.9 * self.scale + 0.1 * float(out.mean())
        self.single = np.float32(0.9 * self.single + 0.1 * out.mean().numpy())
        self.mean = 0.9 * self.mean + 0.1 * out.mean(0)
        self.array *= 0.9
        self.array += 0.1 * out.mean(0).numpy()
        self.latest = out
        return self.steps, self.scale, self.mean, self.array, self.latest


@pytest.mark.parametrize("place", ["a class", "slots"])
@pytest.mark.parametrize("used", [False, True])
def test_state_on_classes_and_in_slots_moves_once_per_batch(place: str, used: bool) -> None:
    def script(wrap: Wrap) -> list[Any]:
        model, held = mlp(), InSlots() if place == "slots" else type("Fresh", (OnClass,), dict(vars(OnClass)))
        moved: Any = None

        def loss_fn(model: nn.Module, batch: Any) -> Tensor:
            nonlocal moved
            out = model(batch[0])
            moved = held.move(out.detach())
            return F.cross_entropy(out - held.mean * used, batch[1]) * (1 + used * held.scale)

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = wrap(model, optimizer, loss_fn=loss_fn, sample=batches()[0])
        stepped(run, model, optimizer, loss_fn)
        return [*model.parameters(), *moved[:-1], moved[-1].tolist(), getattr(held, "single", 0)]

    assert_same(script, 1e-6 if place == "slots" else 1e-12, micro_batch=5)
    assert_same(script, 0.0, micro_batch="off")


def counted() -> Iterator[float]:
    number = 0
    while True:
        number += 1
        yield 1 / number


def other_batches() -> Iterator[Any]:
    loader = DataLoader(TensorDataset(X + 1), batch_size=6, shuffle=True, generator=torch.Generator().manual_seed(0))
    return iter([(step, batch) for step in range(3) for batch in loader])


ITERATORS: dict[str, Callable[[], Iterator[Any]]] = {
    "generator": counted,
    "count": lambda: itertools.count(1),
    "cycle": lambda: itertools.cycle([1.0, 0.5, 0.25]),
    "list": lambda: iter([1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4]),
    "loader": lambda: iter(DataLoader([1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4], batch_size=None)),
}


Scale = Callable[[], Any]


class Slotted:
    """An iterator in a slot."""

    __slots__ = ("scales",)


def in_a_slot(scales: Iterator[Any]) -> Scale:
    held = Slotted()
    held.scales = scales  # type: ignore[attr-defined]
    return lambda: next(held.scales)  # type: ignore[attr-defined]


def in_a_default(scales: Iterator[Any]) -> Scale:
    def draw(scales: Iterator[Any] = scales) -> Any:
        return next(scales)

    return draw


def in_a_tuple(scales: Iterator[Any]) -> Scale:
    held = (1, (scales, 2))
    return lambda: next(held[1][0])


def in_a_list(scales: Iterator[Any]) -> Scale:
    held = [scales]
    return lambda: next(held[0])


def on_a_class(scales: Iterator[Any]) -> Scale:
    class Held:
        drawn = scales

    return lambda: next(Held.drawn)


class Scaled(NamedTuple):
    """An iterator in a named tuple."""

    scales: Iterator[Any]
    factor: float


def in_a_named_tuple(scales: Iterator[Any]) -> Scale:
    held = {"scaled": Scaled(scales, 1.0)}
    return lambda: next(held["scaled"].scales) * held["scaled"].factor


PLACES: dict[str, Callable[[Iterator[Any]], Scale]] = {
    "partial": lambda scales: functools.partial(next, scales),
    "keyword": lambda scales: functools.partial(lambda scales: next(scales), scales=scales),
    "method": lambda scales: scales.__next__,
    "tuple": in_a_tuple,
    "named tuple": in_a_named_tuple,
    "list": in_a_list,
    "slot": in_a_slot,
    "default": in_a_default,
    "class": on_a_class,
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("micro_batch", [5, "auto"])
def test_wherever_an_iterator_is_held(place: str, micro_batch: Any) -> None:
    def script(wrap: Wrap) -> list[Any]:
        model, drawn = mlp(), PLACES[place](itertools.cycle([1.0, 0.5, 0.25]))

        def loss_fn(model: nn.Module, batch: Any) -> Tensor:
            return F.cross_entropy(model(batch[0]), batch[1]) * drawn()

        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        run = wrap(model, optimizer, loss_fn=loss_fn, sample=batches()[0], micro_batch=micro_batch)
        for batch in batches():
            if run is not None:
                losses.append(float(run.step(batch).detach()))
                continue
            optimizer.zero_grad()
            loss = loss_fn(model, batch)
            loss.backward()
            losses.append(float(loss.detach()))
            optimizer.step()
        return [*model.parameters(), *losses, float(drawn())]

    assert_same(script, 1e-12)


@pytest.mark.parametrize("kind", ITERATORS)
@pytest.mark.parametrize("micro_batch", [5, "auto"])
def test_a_loss_that_draws_from_an_iterator_draws_once_per_batch(kind: str, micro_batch: Any) -> None:
    def script(wrap: Wrap) -> list[Any]:
        model, weights, drawn = mlp(), ITERATORS[kind](), []
        held = {"weights": weights}

        def loss_fn(model: nn.Module, batch: Any) -> Tensor:
            return F.cross_entropy(model(batch[0]), batch[1]) * next(held["weights"]) * next(weights)

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = wrap(model, optimizer, loss_fn=loss_fn, sample=batches()[0], micro_batch=micro_batch)
        for batch in batches():
            if run is not None:
                drawn.append(run.step(batch))
                continue
            optimizer.zero_grad()
            drawn.append(loss_fn(model, batch))
            drawn[-1].backward()
            optimizer.step()
        left = float(next(weights)), float(next(held["weights"]))
        return [*model.parameters(), *(float(loss.detach()) for loss in drawn), *left]

    assert_same(script, 1e-12)


class Drawing(nn.Module):
    """A forward that draws noise from an iterator, and another batch from a loader."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.scales, self.others = mlp(), counted(), other_batches()

    def forward(self, x: Tensor) -> Tensor:
        _, (other,) = next(self.others)
        return self.net(x) * next(self.scales) + self.net(other).mean(0)


@pytest.mark.parametrize("uses", [1, 2])
def test_a_forward_that_draws_from_iterators_draws_once_per_call(uses: int) -> None:
    def script(wrap: Wrap) -> list[Any]:
        model = Drawing()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrap(model, optimizer, micro_batch=5)
        for x, y in batches():
            optimizer.zero_grad()
            out = model(x)
            loss = F.cross_entropy(out, y)
            if uses == 2:
                loss = loss + unseen(out).square().mean()
            loss.backward()
            optimizer.step()
        return [*model.parameters(), next(model.scales), *next(model.others)[1]]

    assert_same(script, 1e-12)


@pytest.mark.parametrize("step_mode", [False, True])
def test_items_that_were_drawn_are_not_kept(step_mode: bool) -> None:
    model, given = mlp(), list[weakref.ref[Tensor]]()

    def items() -> Iterator[Tensor]:
        while True:
            item = torch.full((4,), 0.01, dtype=torch.float64)
            given.append(weakref.ref(item))
            yield item

    model.drawn = items()  # type: ignore[assignment]
    model[-1].register_forward_hook(lambda module, args, out: out + next(model.drawn))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"loss_fn": cross_entropy, "sample": batches()[0]} if step_mode else {}
    run = memfit.wrap(model, optimizer, micro_batch=5, **settings)
    for _ in range(7):  # (a proof that is repeated lets go as well: at steps 4 and 16)
        for batch in batches():
            if step_mode:
                run.step(batch)
            else:
                optimizer.zero_grad()
                cross_entropy(model, batch).backward()
                optimizer.step()
    gc.collect()
    assert len(given) >= 14 and sum(item() is not None for item in given) <= 4


def test_iterators_that_nothing_was_drawn_from_are_the_same_objects() -> None:
    model, scales = Drawing(), counted()
    model.unused = scales  # type: ignore[assignment]
    memfit.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch=5)
    F.cross_entropy(model(X[:12]), Y[:12]).backward()
    assert model.unused is scales


def test_rules_that_hold_on_samples_of_different_classes_alone_are_not_taken() -> None:
    """Parts with classes of their own move these centres rightly one after the other, and parts of a batch do not."""

    def script(wrap: Wrap) -> list[Any]:
        model, centres = mlp(), torch.zeros(4, 4, dtype=torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def loss(model: nn.Module, batch: Any) -> Tensor:
            out, labels = model(batch[0]), batch[1]
            found = F.cross_entropy(out, labels) + (out - centres[labels]).pow(2).sum(1).mean()
            with torch.no_grad():
                centres.index_add_(0, labels, 0.1 * (out.detach() - centres[labels]))
            return found

        run = wrap(model, optimizer, loss_fn=loss, sample=batches()[0])
        stepped(run, model, optimizer, loss)
        return [*model.parameters(), centres]

    assert_same(script, 1e-12, micro_batch=5)


# ---- parameters outside of the model


@pytest.mark.parametrize("own_optimizer", [False, True])
@pytest.mark.parametrize("step_mode", [False, True])
def test_parameters_outside_of_the_model_have_their_gradients_from_the_first_step_on(
    own_optimizer: bool, step_mode: bool
) -> None:
    def script(wrap: Wrap) -> list[Any]:
        model, scale = mlp(), nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        head = nn.Parameter(torch.eye(4, dtype=torch.float64) + 0.1)
        outside = [scale, head]
        optimizer = torch.optim.SGD([*model.parameters(), *([] if own_optimizer else outside)], lr=0.1)
        other = torch.optim.SGD(outside, lr=0.2)

        def loss(model: nn.Module, batch: Any) -> Tensor:
            return F.cross_entropy(model(batch[0]) @ head * scale.exp(), batch[1]) + scale**2

        run = wrap(model, optimizer, **({"loss_fn": loss, "sample": batches()[0]} if step_mode else {}))
        found: list[Any] = []
        for batch in batches():
            other.zero_grad()
            if run is not None and step_mode:
                run.step(batch)
            else:
                optimizer.zero_grad()
                loss(model, batch).backward()
                optimizer.step()
            found += [p.grad.clone() for p in outside if p.grad is not None]
            if own_optimizer:
                other.step()
        return [*model.parameters(), *outside, *found]

    assert_same(script, 1e-12, micro_batch=5)
    assert_same(script, 0.0, micro_batch="off")


# ---- saved-tensor hooks and checkpoints of the script


class Again(nn.Module):
    """A block that moves state, and that a checkpoint of the script's computes twice."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.body, self.linear, self.reentrant = mlp(), nn.Linear(4, 4).double(), reentrant
        self.register_buffer("centre", torch.zeros(4, dtype=torch.float64))
        self.calls, self.mean, self.seen = 0, 0.0, []

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, self.body(x), use_reentrant=self.reentrant)

    def block(self, h: Tensor) -> Tensor:
        self.centre.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * float(h.detach().mean())
        self.seen.append(len(h))
        return torch.tanh(self.linear(h))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("step_mode", [False, True])
def test_state_moves_as_often_as_the_scripts_own_checkpoint_computes(reentrant: bool, step_mode: bool) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def script(wrap: Wrap) -> list[Any]:
        torch.manual_seed(0)
        model = Again(reentrant)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = wrap(model, optimizer, **({"loss_fn": loss, "sample": batches()[0]} if step_mode else {}))
        stepped(run if step_mode else None, model, optimizer, loss)
        return [*model.parameters(), model.centre, model.calls, model.mean, len(model.seen), sum(model.seen)]

    assert assert_same(script, 1e-12, micro_batch=5).plan.accumulation == 3
    assert_same(script, 0.0, micro_batch="off")


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("around", ["call", "loss"])
def test_the_scripts_own_checkpoint_around_the_call_or_the_loss(around: str, reentrant: bool) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, labels = batch
        if around == "call":
            return F.cross_entropy(checkpoint(model, x.clone().requires_grad_(), use_reentrant=reentrant), labels)

        def of(out: Tensor) -> Tensor:
            return F.cross_entropy(out, labels) + out.pow(2).mean()

        return checkpoint(of, model(x), use_reentrant=reentrant)

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def state(self) -> list[Any]:
            return []

    assert_same(train(Plain, loss, False), 1e-12, micro_batch=5)
    assert_same(train(Plain, loss, False), 0.0, micro_batch="off")


def test_hooks_for_saved_tensors_do_not_see_planning() -> None:
    def script(wrap: Wrap) -> list[Any]:
        model, saved = mlp(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrap(model, optimizer)
        for x, labels in batches():
            optimizer.zero_grad()
            with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(0), t)[1], lambda t: t):
                loss = F.cross_entropy(model(x), labels)
            loss.backward()
            optimizer.step()
        return [*model.parameters(), len(saved)]

    assert_same(script, 0.0)


# ---- what cannot be composed


class Carrying(nn.Module):
    """Goes on from the hidden state of the batch before, where that has as many samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.hidden = nn.GRU(7, 4, batch_first=True).double(), None

    def forward(self, x: Tensor) -> Tensor:
        fits = self.hidden is not None and len(self.hidden) == len(x)
        before = self.hidden if fits and self.hidden is not None else torch.zeros(len(x), 4, dtype=x.dtype)
        out, after = self.layer(x[:, None], before[None])
        self.hidden = after[0].detach()
        return out[:, 0]


def test_state_that_a_later_forward_reads_otherwise_in_parts_is_refused_by_its_name() -> None:
    model = Carrying()
    memfit.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch=5)
    with pytest.raises(Refused, match=r"updates state at every call.*hidden"):
        model(X[:12])
    assert model.hidden is None


def pieces_of(x: Tensor, how: str, size: int) -> list[Tensor]:
    if how == "range":
        return [x[i : i + size] for i in range(0, len(x), size)]
    return list(x.split(size) if how == "split" else x.chunk(-(-len(x) // size)))


class InPieces(nn.Module):
    """Cuts its batch by itself, and counts the pieces."""

    def __init__(self, how: str, size: int) -> None:
        super().__init__()
        self.counting, self.how, self.size = Counting(), how, size

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.counting(piece) for piece in pieces_of(x, self.how, self.size)])


SIZES_OF_PIECES = [2, 4, 8]


@pytest.mark.parametrize("size", SIZES_OF_PIECES)
@pytest.mark.parametrize("how", ["split", "range", "chunk"])
def test_a_loss_fn_that_cuts_its_batch_moves_state_as_often_as_it_would(how: str, size: int) -> None:
    def script(wrap: Wrap) -> list[Any]:
        model = Counting()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            pieces = zip(*(pieces_of(each, how, size) for each in batch))
            return sum((F.cross_entropy(model(x), y, reduction="sum") for x, y in pieces), torch.zeros(())) / len(batch[0])

        run = wrap(model, optimizer, batches(), loss_fn=loss_fn, micro_batch=5)
        for batch in batches():
            optimizer.zero_grad()
            if run is None:
                loss_fn(model, batch).backward()
                optimizer.step()
            else:
                run.step(batch)
        return [*model.state(), *model.parameters()]

    assert_same(script, 1e-12)


@pytest.mark.parametrize("size", SIZES_OF_PIECES)
@pytest.mark.parametrize("how", ["split", "range", "chunk"])
def test_a_forward_that_cuts_its_batch_and_moves_state_is_refused(how: str, size: int) -> None:
    model = InPieces(how, size)
    run = memfit.wrap(model, torch.optim.SGD(model.parameters(), 0.1), batches(), micro_batch=5)
    assert run is not None
    with pytest.raises(Refused, match="updates state"):
        F.cross_entropy(model(X[:12]), Y[:12]).backward()


def test_optimizers_whose_step_asserts_are_not_stepped_while_planning() -> None:
    class Modal(torch.optim.SGD):
        ready, steps = False, 0

        def step(self, closure: Any = None) -> Any:
            assert self.ready, "call train() first"
            self.steps += 1
            return super().step(closure)

    model = mlp()
    optimizer = Modal(model.parameters(), lr=0.1)
    run = memfit.wrap(model, optimizer, loss_fn=cross_entropy, sample=batches()[0], micro_batch=5)
    optimizer.ready = True
    run.step(batches()[0])
    assert optimizer.steps == 1


class Drifting(nn.Module):
    """Reads what it moves, of a batch or of a single row."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.register_buffer("centre", torch.zeros(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x) - self.centre
        self.centre = 0.9 * self.centre + 0.1 * out.detach().reshape(-1, 4).mean(0)
        return out


@pytest.mark.parametrize("how", ["no_grad", "eval", "a call that runs whole"])
def test_calls_that_run_at_once_find_state_as_earlier_calls_leave_it(how: str) -> None:
    def script(wrap: Wrap) -> list[Any]:
        model, found = Drifting(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrap(model, optimizer)
        for x, labels in batches():
            optimizer.zero_grad()
            out = model(x)
            if how == "a call that runs whole":
                other = model(x[0])
            else:
                model.train(how != "eval")
                with torch.no_grad():
                    other = model(x + 1)
                model.train()
            found.append(other.detach() + 0)
            (F.cross_entropy(out, labels) + other.pow(2).mean()).backward()
            optimizer.step()
        return [*model.parameters(), model.centre, *found]

    assert_same(script, 1e-12, micro_batch=8)


@pytest.mark.parametrize("kept", ["rows", "a queue", "a mean"])
def test_where_the_order_of_samples_is_seen_in_state_they_keep_it(kept: str) -> None:
    """Samples that differ in size are cut in descending size otherwise."""
    samples = [(torch.arange(i % 5 + 1) + 1, Y[i]) for i in range(24)]

    def together(batch: Any) -> Any:
        return nn.utils.rnn.pad_sequence([x for x, _ in batch], batch_first=True), torch.stack([y for _, y in batch])

    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(7, 4, padding_idx=0).double(), nn.Linear(4, 4).double()
            self.rows, self.queue, self.mean = torch.zeros(0), deque(maxlen=5), torch.zeros(4).double()

        def forward(self, x: Tensor) -> Tensor:
            h = self.embed(x).sum(1)
            if kept == "rows":
                self.rows = h.detach()
            elif kept == "a queue":
                self.queue.extend(float(v) for v in h.detach().sum(1))
            else:
                self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
            return self.head(h)

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def script(wrap: Wrap) -> list[Any]:
        torch.manual_seed(0)
        model = Bag()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader: Any = DataLoader(samples, batch_size=12, collate_fn=together)  # type: ignore[arg-type]
        run = wrap(model, optimizer, loader, loss_fn=loss_fn)
        for batch in loader if run is None else run.loader:
            if run is not None:
                run.step(batch)
                continue
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            optimizer.step()
        return [*model.parameters(), model.rows.double(), model.mean, list(model.queue)]

    assert_same(script, 1e-12, micro_batch=5)


class Fake(nn.Module):
    """Rounds by the largest value that it has seen, as fake quantization does."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(7, 5).double(), nn.Linear(5, 4).double()
        self.register_buffer("largest", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x).tanh()
        self.largest = torch.maximum(self.largest, h.detach().abs().max())
        step = self.largest / 7
        return self.head(h + ((h / step).round() * step - h).detach())


@pytest.mark.parametrize("seed", range(6))
def test_a_maximum_that_is_among_the_first_samples_by_chance_is_refused_too(seed: int) -> None:
    model = Fake()
    memfit.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch=5)
    x = torch.randn(12, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    with pytest.raises(Refused, match=r"largest|mixes samples"):
        model(x)


class Shortened(nn.Module):
    """Looks up rows that lookups shorten where they have grown too long."""

    def __init__(self, norm: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.layer = nn.Embedding(6, 5, max_norm=norm), nn.Linear(5, 3)
        with torch.no_grad():
            self.rows.weight.mul_(0.01)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.rows(x))


@pytest.mark.parametrize("norm", [0.02, 0.2], ids=["from the beginning", "later"])
def test_parameters_that_grow_until_a_forward_writes_them(norm: float) -> None:
    """The script evaluates between a call and its loss; the embedding is not shortened at every batch."""

    def script(wrap: Wrap) -> list[Any]:
        model, draw = Shortened(norm), torch.Generator().manual_seed(1)
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        wrap(model, optimizer, micro_batch=5)
        for _ in range(12):
            x, y = torch.randint(0, 6, (12,), generator=draw), torch.randint(0, 3, (12,), generator=draw)
            optimizer.zero_grad()
            out = model(x)
            with torch.no_grad():
                model(torch.arange(6))
            F.cross_entropy(out, y).backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    for wanted, found in zip(script(plain), script(memfit.wrap), strict=True):
        assert same(wanted, found, 1e-10)


class Clipped(nn.Module):
    """Writes its weights at every forward. Few writes change them."""

    def __init__(self, norm: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.layer, self.norm = nn.Embedding(6, 5), nn.Linear(5, 3), norm
        with torch.no_grad():
            self.rows.weight.mul_(0.01)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.rows.weight.clamp_(-self.norm, self.norm)
        return self.layer(self.rows(x))


READS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "a penalty before the loss": lambda m, out, y: m.rows.weight.pow(2).sum() + F.cross_entropy(out, y),
    "a penalty after the loss": lambda m, out, y: F.cross_entropy(out, y) + m.rows.weight.pow(2).sum(),
    "tied weights": lambda m, out, y: F.cross_entropy(out @ m.layer.weight @ m.rows.weight.T, y),
}


@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize("in_steps", [False, True])
@pytest.mark.parametrize("norm", [0.02, 0.2], ids=["from the beginning", "later"])
@pytest.mark.parametrize("made", [Shortened, Clipped])
def test_a_loss_reads_parameters_that_all_samples_have_written(made: Any, norm: float, in_steps: bool, reads: str) -> None:
    def script(wrap: Wrap) -> list[Any]:
        model, draw = made(norm), torch.Generator().manual_seed(1)
        optimizer = torch.optim.SGD(model.parameters(), 0.5)

        def loss(model: Any, batch: Any) -> Tensor:
            x, y = batch
            out = model(x)
            return READS[reads](model, out, y)

        run = wrap(model, optimizer, micro_batch=2, **({"loss_fn": loss} if in_steps else {}))
        for _ in range(8):
            batch = torch.randint(0, 6, (12,), generator=draw), torch.randint(0, 3, (12,), generator=draw)
            if in_steps and run is not None:
                run.step(batch)
                continue
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    for wanted, found in zip(script(plain), script(memfit.wrap), strict=True):
        assert same(wanted, found, 1e-10)
