"""The state of generators outside torch is read whole, however they are drawn from."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from memfit.engine.generators import HostRandom, RandomState, random_state_kept

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
