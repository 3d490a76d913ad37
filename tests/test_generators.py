"""The state of generators outside torch is read whole, however they are drawn from."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import Notes, wrapped
from torch import Tensor, nn
from zoo.plain import gradients_of, relative_error

import memfit
from memfit.engine import random_state as generators
from memfit.engine.random_state import HostDraws, HostRandom, RandomState, random_state_kept
from memfit.levers.checkpoint import checkpointed

DRAWS: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "uniform": lambda: np.random.rand(),
    "one normal, of which a second waits": lambda: np.random.randn(),
    "two normals": lambda: np.random.randn(2),
    "more than the generator holds": lambda: np.random.rand(700),
    "a new seed": lambda: np.random.seed(3),
    "another generator": lambda: np.random.set_state(np.random.RandomState(5).get_state()),
}


def drawn() -> tuple[object, ...]:
    return random.random(), *np.random.randn(3), *np.random.rand(2), float(torch.rand(()))


@pytest.mark.parametrize("seed", range(40))
def test_what_is_captured_is_the_state_that_numpy_tells(seed: int) -> None:
    choose = random.Random(seed)
    before = np.random.get_state()
    try:
        for _ in range(50):
            for _ in range(choose.randint(0, 3)):
                DRAWS[choose.choice(list(DRAWS))]()
            another = np.random.RandomState()
            another.set_state(HostRandom.capture().numpy)
            captured, told = another.get_state(), np.random.get_state()
            assert captured[0] == told[0] and (captured[1] == told[1]).all() and captured[2:] == told[2:]
    finally:
        np.random.set_state(before)


@pytest.mark.parametrize("name", DRAWS)
def test_restoring_gives_the_same_draws_again(name: str) -> None:
    with random_state_kept(torch.device("cpu")):
        DRAWS[name]()
        state = RandomState.capture(torch.device("cpu"))
        first = drawn()
        state.restore(torch.device("cpu"))
        assert drawn() == first


def test_a_global_generator_of_another_kind_is_captured_too() -> None:
    if not hasattr(np.random, "set_bit_generator"):
        pytest.skip("NumPy before 1.24")
    own = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.MT19937(7))
    try:
        state = HostRandom.capture()
        first = np.random.randn(3).tolist()
        state.restore()
        assert np.random.randn(3).tolist() == first
    finally:
        np.random.set_bit_generator(own)


def test_states_are_kept_no_longer_where_no_pass_draws() -> None:
    draws = HostDraws(lambda: None)
    for _ in range(generators.LOOKS):
        assert draws.kept
        draws.ran(HostRandom.capture())
    assert not draws.kept


@pytest.mark.parametrize("draw", [random.random, np.random.rand, np.random.randn], ids=["python", "numpy", "normal"])
def test_states_are_kept_for_good_where_one_pass_drew(draw: Callable[[], float]) -> None:
    draws = HostDraws(lambda: None)
    before = HostRandom.capture()
    draw()
    draws.ran(before)
    for _ in range(2 * generators.LOOKS):
        draws.ran(HostRandom.capture())
    assert draws.kept


class Dropped(nn.Module):
    """Drops a layer now and then, as LayerDrop does, from step `begins` on."""

    def __init__(self, begins: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 7).double(), nn.Linear(7, 3).double()
        self.begins, self.steps, self.drawn = begins, 0, Notes()

    def forward(self, x: Tensor) -> Tensor:
        if self.steps < self.begins:
            return self.second(x)
        self.drawn.append(random.random())
        return self.second(self.first(x) if self.drawn[-1] < 0.5 else x)


def in_two_passes(model: Dropped, x: Tensor) -> Notes:
    """Train on one batch by replay, and give what the micro-batches drew in each pass."""
    model.drawn.clear()
    torch.logsumexp(model(x).flatten(), 0).backward()
    model.steps += 1
    return model.drawn


def test_both_passes_of_a_batch_draw_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generators, "LOOKS", 2)
    model, x = Dropped(0), torch.randn(12, 7).double()
    wrapped(model, 2)
    for _ in range(5):
        drawn = in_two_passes(model, x)
        assert len(drawn) >= 12 and set(drawn[-6:]) == set(drawn[-12:-6])


def test_draws_that_begin_late_are_said_and_repeated_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generators, "LOOKS", 2)
    model, x = Dropped(4), torch.randn(12, 7).double()
    run = wrapped(model, 2)
    told = []
    for _ in range(8):
        before, drawn = random.getstate(), in_two_passes(model, x)
        told.append(sum("began to draw" in event.message for event in run.events))
        if model.steps > 5:
            assert set(drawn[-6:]) == set(drawn[-12:-6])
            assert random.getstate() != before
    assert told == [0, 0, 0, 0, 1, 1, 1, 1]


OWN: dict[str, Callable[[], Callable[[], float]]] = {
    "torch": lambda: partial(_of_torch, torch.Generator().manual_seed(5)),
    "python": lambda: random.Random(5).random,
    "numpy": lambda: np.random.default_rng(5).random,
    "numpy, bits": lambda: np.random.Generator(np.random.PCG64(5)).random,
    "numpy, old": lambda: np.random.RandomState(5).random_sample,
}


def _of_torch(generator: torch.Generator) -> float:
    return float(torch.rand((), generator=generator))


class Scaled(nn.Module):
    """Scales by what a generator of the script's own draws."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.body, self.head, self.draw = nn.Linear(7, 7).double(), nn.Linear(7, 3).double(), draw

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh() * self.draw())


def _trained(kind: str, two_passes: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model, x = Scaled(OWN[kind]()), torch.randn(12, 7).double()
    wrapped(model, 4)
    out = model(x)
    if two_passes:
        out.sum().item()
    F.mse_loss(out, torch.ones_like(out)).backward()
    return gradients_of(model)


@pytest.mark.parametrize("kind", OWN)
def test_a_generator_of_the_scripts_own_draws_the_same_in_the_second_pass(kind: str) -> None:
    assert relative_error(_trained(kind, True), _trained(kind, False)) <= 1e-12


@pytest.mark.parametrize("kind", OWN)
def test_a_generator_of_the_scripts_own_draws_the_same_in_a_recomputed_block(kind: str) -> None:
    found = []
    for blocks in ((), ("0",)):
        torch.manual_seed(0)
        model = nn.Sequential(Scaled(OWN[kind]()), nn.Linear(3, 1).double())
        with checkpointed(model, blocks):
            model(torch.randn(12, 7).double()).sum().backward()
        found.append(gradients_of(model))
    assert relative_error(found[1], found[0]) <= 1e-15


def test_planning_draws_nothing_from_a_generator_that_a_forward_is_given() -> None:
    class Noisy(nn.Linear):
        def forward(self, x: Tensor, generator: torch.Generator) -> Tensor:  # type: ignore[override]
            return super().forward(x + 0 * torch.randn(x.shape, generator=generator, dtype=x.dtype))

    generator, fresh = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    model = Noisy(7, 3).double()
    wrapped(model, 4)
    F.mse_loss(model(torch.randn(12, 7).double(), generator), torch.zeros(12, 3).double()).backward()
    for _ in range(3):
        torch.randn(4, 7, generator=fresh, dtype=torch.double)
    assert torch.equal(generator.get_state(), fresh.get_state())


def test_a_generator_without_a_state_is_no_obstacle() -> None:
    model = Scaled(lambda: 1.0)
    model.system = random.SystemRandom()
    wrapped(model, 4)
    F.mse_loss(model(torch.randn(12, 7).double()), torch.zeros(12, 3).double()).backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("given", [True, False], ids=["argument", "attribute"])
def test_a_generator_that_is_made_anew_at_each_step_draws_the_same_in_the_second_pass(given: bool) -> None:
    class Noisy(nn.Linear):
        generator: torch.Generator | None = None

        def forward(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:  # type: ignore[override]
            generator = self.generator if generator is None else generator
            return super().forward(x * torch.rand(x.shape, generator=generator, dtype=x.dtype)).tanh()

    found = []
    for two_passes in (False, True):
        torch.manual_seed(0)
        model, x = Noisy(7, 3).double(), torch.randn(12, 7).double()
        wrapped(model, 4)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            if not given:
                model.generator = generator
            out = model(x, generator) if given else model(x)
            if two_passes:
                out.sum().item()
            model.zero_grad()
            F.mse_loss(out, torch.ones_like(out)).backward()
        found.append(gradients_of(model))
    assert relative_error(found[1], found[0]) <= 1e-12


def test_planning_draws_nothing_for_a_collate_function() -> None:
    drawn: list[float] = []

    def collate(samples: list[Tensor]) -> Tensor:
        drawn.append(np.random.rand())
        return torch.stack(samples) * (1 + drawn[-1])

    np.random.seed(3)
    wanted = np.random.rand(3).tolist()
    np.random.seed(3)
    model = nn.Linear(7, 3)
    loader = torch.utils.data.DataLoader(list(torch.randn(27, 7)), batch_size=9, collate_fn=collate)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # all samples together, so that each batch is collated once
    run = memfit.wrap(model, optimizer, loader, loss_fn=lambda m, x: m(x).std(), micro_batch=3)
    for batch in run.loader:
        run.step(batch)
    assert drawn[-3:] == wanted
