"""State that hardly moves at first, and forwards that do something else after some steps, trained by steps that show it."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memfit
from memfit import Refused
from memfit.engine.asked_numbers import answers_of, noting, questions_of
from memfit.engine.places import ItemPlace

BATCHES, BATCH, DUE = 13, 8, 9
STEP, CALLS = 0, 0


@pytest.fixture(autouse=True)
def strictly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMFIT", "strict")


class Slow(nn.Module):
    """Compares with a slow copy of itself, which is equal at first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fast = nn.Sequential(nn.Linear(5, 70), nn.Tanh(), nn.Linear(70, 60)).double()
        self.head = nn.Linear(60, 3).double()
        self.calls = 0
        self.set_up()

    def set_up(self) -> None:
        self.slow = copy.deepcopy(self.fast).requires_grad_(False)

    def is_due(self) -> bool:
        return True

    @torch.no_grad()
    def follow(self) -> None:
        for slow, fast in zip(self.slow.parameters(), self.fast.parameters()):
            slow.mul_(0.5).add_(fast, alpha=0.5)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.is_due():
            self.follow()
        return self.head(self.fast(x) - 0.5 * self.slow(x))


class ByData(Slow):
    def follow(self) -> None:
        for slow, fast in zip(self.slow.parameters(), self.fast.parameters()):
            slow.data = 0.9 * slow.data + 0.1 * fast.data


class Assigned(Slow):
    """A dictionary of tensors that are larger than those that are compared as a whole."""

    def set_up(self) -> None:
        self.held = {name: value.clone() for name, value in self.fast.state_dict().items()}

    def follow(self) -> None:
        for name, value in self.fast.state_dict().items():
            self.held[name] = 0.9 * self.held[name] + 0.1 * value

    def slow(self, x: Tensor) -> Tensor:
        return torch.func.functional_call(self.fast, {name: value.detach() for name, value in self.held.items()}, (x,))


class InList(Slow):
    def set_up(self) -> None:
        self.held = [value.detach().clone() for value in self.fast.parameters()]

    def follow(self) -> None:
        for i, value in enumerate(self.fast.parameters()):
            self.held[i] = 0.5 * self.held[i] + 0.5 * value.detach()

    def slow(self, x: Tensor) -> Tensor:
        first, offset, last, other = self.held
        return F.linear(F.linear(x, first, offset).tanh(), last, other)


class InArrays(InList):
    def set_up(self) -> None:
        self.arrays = [value.detach().clone().numpy() for value in self.fast.parameters()]

    def follow(self) -> None:
        for array, value in zip(self.arrays, self.fast.parameters()):
            array *= 0.5
            array += 0.5 * value.detach().numpy()

    @property
    def held(self) -> list[Any]:
        return [torch.from_numpy(array) for array in self.arrays]


class Later(Slow):
    def is_due(self) -> bool:
        return self.calls > DUE


class LaterByRatio(Slow):
    def is_due(self) -> bool:
        return bool((self.calls - 1) // DUE) and not self.calls < 3


class NowAndThen(Slow):
    def is_due(self) -> bool:
        return self.calls % 7 == 6


class Nested(Slow):
    def is_due(self) -> bool:
        return self.calls > 2 and self.calls % 4 == 1


class ByGlobal(Slow):
    def is_due(self) -> bool:
        return STEP > DUE


class CountsGlobally(Slow):
    def set_up(self) -> None:
        global CALLS
        super().set_up()
        CALLS = 0

    def is_due(self) -> bool:
        global CALLS
        CALLS += 1
        return CALLS > DUE


class ByBuffer(Slow):
    def set_up(self) -> None:
        super().set_up()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def is_due(self) -> bool:
        self.count += 1
        return bool(self.count > DUE)


class ByFloatBuffer(ByBuffer):
    def set_up(self) -> None:
        super().set_up()
        self.count = self.count.float()


class Blended(ByBuffer):
    """Asks nothing on the host."""

    @torch.no_grad()
    def follow(self) -> None:
        kept = torch.where(self.count > DUE, 0.9, 1.0)
        for slow, fast in zip(self.slow.parameters(), self.fast.parameters()):
            slow.mul_(kept).add_(fast * (1 - kept))

    def is_due(self) -> bool:
        self.count += 1
        return True


class ByDictionary(Slow):
    def set_up(self) -> None:
        super().set_up()
        self.counts = {"calls": 0}

    def is_due(self) -> bool:
        self.counts["calls"] += 1
        return self.counts["calls"] > DUE


class ByList(ByDictionary):
    def set_up(self) -> None:
        super().set_up()
        self.counts = [0]  # type: ignore[assignment]

    def is_due(self) -> bool:
        self.counts[0] += 1
        return self.counts[0] > DUE


class ByItem(ByBuffer):
    def is_due(self) -> bool:
        self.count += 1
        return self.count.item() >= 10.5


class ByTensors(ByBuffer):
    """Compares tensors, with a threshold in a tensor; the script counts."""

    def set_up(self) -> None:
        super().set_up()
        self.register_buffer("first", torch.tensor(float(DUE)))

    def is_due(self) -> bool:
        self.count.fill_(STEP)
        return bool((2 * self.count - 1) // 2 >= self.first)


class ByScalar(Slow):
    def set_up(self) -> None:
        super().set_up()
        self.count, self.first = np.int64(0), np.ceil(8.5)

    def is_due(self) -> bool:
        self.count = self.count + 1
        return divmod(self.count - 1, self.first)[0] > 0


class ByStage(Slow):
    def is_due(self) -> bool:
        return int((self.calls - 1) / DUE) == 1


class Alternating(Slow):
    """A running mean that moves with every second forward."""

    def set_up(self) -> None:
        self.register_buffer("mean", torch.zeros(60).double())

    def is_due(self) -> bool:
        return self.calls % 2 == 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        found = self.fast(x)
        if self.is_due():
            self.mean.mul_(0.9).add_(found.detach().mean(0), alpha=0.1)
        return self.head(found)


class FromTheSecond(Alternating):
    def is_due(self) -> bool:
        return self.calls > 1


class CountedMean(Alternating):
    def set_up(self) -> None:
        super().set_up()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def is_due(self) -> bool:
        self.count += 1
        return self.count.item() > DUE


class Scheduled(Slow):
    """By a scheduler of the learning rate."""

    def set_up(self) -> None:
        super().set_up()
        optimizer = torch.optim.SGD(self.slow.parameters(), lr=0.1)
        self.rates = [torch.optim.lr_scheduler.ConstantLR(optimizer)]
        optimizer.step()  # (a scheduler warns if it steps first)

    def is_due(self) -> bool:
        return self.rates[0].last_epoch >= DUE


class Annealed(Slow):
    """By a float that the script sets."""

    def set_up(self) -> None:
        super().set_up()
        self.temperature = 1.0

    def is_due(self) -> bool:
        return self.temperature < 0.4


class Flagged(Slow):
    def set_up(self) -> None:
        super().set_up()
        self.on = False

    def is_due(self) -> bool:
        self.on = self.calls > DUE
        return self.on


class Warming(Slow):
    """Moves a float after some steps."""

    def set_up(self) -> None:
        self.scale = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > DUE:
            self.scale = min(self.scale + 0.3, 1.0)
        return self.head(self.fast(x)) * (1 + self.scale)


class Twice(Later):
    """Counts two forwards per step: the second waits while the first is counted."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + super().forward(x + 0.1)


class Converged(Slow):
    """A power iteration."""

    def set_up(self) -> None:
        self.sharp = nn.utils.parametrizations.spectral_norm(nn.Linear(60, 60).double())
        for _ in range(3000):
            self.sharp.weight  # noqa: B018

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.sharp(self.sharp(self.fast(x))))


class Unread(Slow):
    """A largest value that nothing reads."""

    def set_up(self) -> None:
        self.register_buffer("most", torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        found = self.fast(x)
        self.most.copy_(torch.maximum(self.most, found.detach().abs().max()))
        return self.head(found)


class Masked(Slow):
    """Fills a mask with what is there."""

    def set_up(self) -> None:
        self.register_buffer("mask", torch.ones(60).double())

    def forward(self, x: Tensor) -> Tensor:
        self.mask.fill_(1.0)
        self.mask[:7] = 0
        return self.head(self.fast(x) * self.mask)


class Full(Slow):
    def set_up(self) -> None:
        self.held: Any = deque(maxlen=DUE)

    def forward(self, x: Tensor) -> Tensor:
        found = self.fast(x)
        found = found - torch.stack(list(self.held)).mean(0) if len(self.held) == DUE else found
        self.held.append(found.detach().mean(0))
        return self.head(found)


class Dropping(Slow):
    """Draws random numbers after some steps."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        found = self.fast(x)
        return self.head(F.dropout(found, 0.3) if self.calls > DUE else found)


EQUAL = [
    Slow, ByData, Assigned, InList, InArrays, Later, LaterByRatio, NowAndThen, Nested, ByGlobal, CountsGlobally, ByBuffer,
    ByFloatBuffer, Blended, ByDictionary, ByList, ByItem, ByTensors, ByScalar, ByStage, Alternating, FromTheSecond, CountedMean,
    Scheduled, Annealed, Flagged, Warming, Twice, Converged, Unread, Masked, Full, Dropping,
]  # fmt: skip


class MixesLater(Slow):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        found = self.fast(x)
        return self.head(found - found.mean(0) if self.calls > DUE else found)


class MixesByItem(ByBuffer):
    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        found = self.fast(x)
        return self.head(found - found.mean(0) if self.count.item() > DUE else found)


class MixesWhenFull(Slow):
    def set_up(self) -> None:
        self.held: Any = deque(maxlen=DUE)

    def forward(self, x: Tensor) -> Tensor:
        found = self.fast(x)
        found = found - found.mean(0) if len(self.held) == DUE else found
        self.held.append(1)
        return self.head(found)


class Largest(Unread):
    """A largest value that the forward reads, and that samples of later batches move."""

    def forward(self, x: Tensor) -> Tensor:
        found = self.fast(x)
        self.most.copy_(torch.maximum(self.most, found.detach().abs().max()))
        return self.head(found / (self.most + 0.1))


def loss_fn(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def trained(make: Callable[[], Any], *, line: bool, step_mode: bool, loss: Any = loss_fn, **options: Any) -> list[Tensor]:
    global STEP
    STEP = 0
    model = make()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3)
    draws = torch.Generator().manual_seed(1)
    x = torch.randn(BATCHES * BATCH, 5, generator=draws).double() * torch.linspace(0.5, 3.0, BATCHES * BATCH)[:, None]
    y = torch.randint(0, 3, (BATCHES * BATCH,), generator=draws)
    named = {"loss_fn": loss} if step_mode else {}
    run: Any = memfit.wrap(model, optimizer, **named, **options) if line else None
    torch.manual_seed(2)
    for i in range(BATCHES):
        STEP += 1
        model.temperature = 0.9**i
        for rate in getattr(model, "rates", []) if i else []:
            rate.step()
        batch = x[i * BATCH : (i + 1) * BATCH], y[i * BATCH : (i + 1) * BATCH]
        if line and step_mode:
            run.step(batch)
            continue
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
    return [value.detach().clone() for value in model.state_dict().values()]


def assert_equal(wanted: list[Tensor], found: list[Tensor]) -> None:
    for a, b in zip(wanted, found, strict=True):
        assert float((a - b).double().norm()) <= 1e-12 * float(a.double().norm())


@pytest.mark.parametrize("step_mode", [False, True])
@pytest.mark.parametrize("make", EQUAL)
def test_state_that_moves_later_moves_once_per_batch(make: Any, step_mode: bool) -> None:
    assert_equal(trained(make, line=False, step_mode=step_mode), trained(make, line=True, step_mode=step_mode, micro_batch=3))


@pytest.mark.parametrize("step_mode", [False, True])
@pytest.mark.parametrize("make", [MixesLater, MixesByItem, MixesWhenFull, Largest])
def test_what_mixes_samples_later_is_not_cut_then(make: Any, step_mode: bool) -> None:
    wanted = trained(make, line=False, step_mode=step_mode)
    try:
        found = trained(make, line=True, step_mode=step_mode, micro_batch=3)
    except Refused as refused:
        assert any(said in str(refused) for said in ("mixes samples", "updates state at every call"))
        return
    assert_equal(wanted, found)


def test_a_term_that_is_added_later_is_weighted_then() -> None:
    def loss(model: Any, batch: Any) -> Tensor:
        out = model(batch[0])
        found = F.cross_entropy(out, batch[1])
        return found + 0.01 * out.pow(2).sum() if STEP > DUE else found

    wanted = trained(Warming, line=False, step_mode=True, loss=loss)
    assert_equal(wanted, trained(Warming, line=True, step_mode=True, loss=loss, micro_batch=3))


def test_planning_undoes_what_a_counter_made_it_write() -> None:
    """Timings repeat micro-batches, so that the counter passes what the first one did not."""
    models: list[Any] = []

    class Counted(Slow):
        def set_up(self) -> None:
            self.register_buffer("total", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls > 1:
                self.total += 1
            return self.head(self.fast(x))

    for step_mode in (False, True):
        trained(lambda: models.append(Counted()) or models[-1], line=True, step_mode=step_mode)
        assert models[-1].total == BATCHES - 1


def test_a_number_tells_what_it_is_asked() -> None:
    held: dict[str, Any] = {"calls": 7, "rate": 0.5, "on": True}
    with noting({name: ItemPlace(held, name, name) for name in held}) as notes:
        held["calls"] += 1
        assert not (held["calls"] > 10 or 3 * held["calls"] % 6 == 3 or 12 <= held["calls"])
        assert torch.ones(3).mul(held["calls"]).sum() == 24 and np.zeros(held["calls"]).shape == (8,)
        assert list(range(9))[held["calls"]] == 8 and f"{held['calls']:02d}" == "08" and held["calls"] != "8"
        assert max(0.1, held["rate"] * 0.9) == 0.45
        assert pow(held["calls"], 2, 5) == 4
    assert held == {"calls": 7, "rate": 0.5, "on": True} and type(held["calls"]) is int
    questions = {name: questions_of(asked) for name, asked in notes.items()}
    assert [answers_of(calls, questions["calls"]) for calls in (7, 10, 12)] == [
        (False, False, False, True),
        (True, True, False, False),
        (True, True, True, True),
    ]
    assert answers_of(0.5, questions["rate"]) != answers_of(0.05, questions["rate"])
    assert answers_of(True, questions["on"]) != answers_of(False, questions["on"])


class Between(nn.Module):
    """A block, and a layer after it."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self.block, self.out = make(), nn.Linear(3, 3).double()

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.block, name, value) if name == "temperature" else super().__setattr__(name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.block(x))


@pytest.mark.parametrize("step_mode", [False, True])
@pytest.mark.parametrize("make", EQUAL)
def test_blocks_that_are_recomputed_move_it_once_per_batch(make: Any, step_mode: bool) -> None:
    wanted = trained(lambda: Between(make), line=False, step_mode=step_mode)
    options: dict[str, Any] = {"micro_batch": 3, "checkpoint": ["block"]}
    assert_equal(wanted, trained(lambda: Between(make), line=True, step_mode=step_mode, **options))


def by_one_loss(make: Callable[[], Any], *, line: bool, reads: bool, **options: Any) -> list[Tensor]:
    """Three calls in one loss, the third of which does something else at first."""
    model = make()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    if line:
        memfit.wrap(model, optimizer, micro_batch=3, **options)
    draws, seen = torch.Generator().manual_seed(1), []
    for _ in range(4):
        x, y = torch.randn(BATCH, 5, generator=draws).double(), torch.randint(0, 3, (BATCH,), generator=draws)
        outs = [model(x + 0.1 * i) for i in range(3)]
        if reads:
            seen.append(outs[1][0].detach().clone())
        optimizer.zero_grad()
        (sum(F.cross_entropy(out, y) for out in outs) + 0.1 * outs[0].pow(2).mean()).backward()
        optimizer.step()
    return [*seen, *(value.detach().clone() for value in model.state_dict().values())]


class Third(Slow):
    def is_due(self) -> bool:
        return self.calls % 4 == 3


class WarmingThird(Warming):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 2:
            self.scale = min(self.scale + 0.3, 1.0)
        return self.head(self.fast(x)) * (1 + self.scale)


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("make", [Third, WarmingThird])
def test_calls_of_one_loss_each_do_what_their_count_decides(make: Any, reads: bool) -> None:
    assert_equal(by_one_loss(make, line=False, reads=reads), by_one_loss(make, line=True, reads=reads))
    blocks: dict[str, Any] = {"checkpoint": ["block"]}
    wanted = by_one_loss(lambda: Between(make), line=False, reads=reads)
    assert_equal(wanted, by_one_loss(lambda: Between(make), line=True, reads=reads, **blocks))


@pytest.mark.parametrize("make", [Later, NowAndThen, ByBuffer, Warming])
def test_blocks_of_batches_that_run_whole_move_it_once(make: Any) -> None:
    wanted = trained(lambda: Between(make), line=False, step_mode=False)
    options: dict[str, Any] = {"micro_batch": "auto", "checkpoint": ["block"]}
    assert_equal(wanted, trained(lambda: Between(make), line=True, step_mode=False, **options))


class Uncounted(Slow):
    def forward(self, x: Tensor) -> Tensor:
        self.follow()
        return self.head(self.fast(x) - 0.5 * self.slow(x))


def test_a_block_that_writes_what_was_there_may_move_it_later() -> None:
    """Its copy is equal to it until the optimizer steps, after the forwards of two batches that run whole."""

    def state(*, line: bool) -> list[Tensor]:
        model = Between(Uncounted)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3)
        if line:
            memfit.wrap(model, optimizer, checkpoint=["block"])
        draws = torch.Generator().manual_seed(1)
        for step in range(8):
            x, y = torch.randn(BATCH, 5, generator=draws).double(), torch.randint(0, 3, (BATCH,), generator=draws)
            F.cross_entropy(model(x), y).backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
        return [value.detach().clone() for value in model.state_dict().values()]

    assert_equal(state(line=False), state(line=True))
