"""Random training scripts on two processes, each with its share of every batch, against one process with whole batches.

`python benchmarks/fuzz_scripts.py --seeds FIRST:PAST --processes 2` runs more of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fuzz.grammar import SIMPLEST, Choices, drawn, others, settled
from fuzz.outcomes import DIFFERENT, FREE, INEXACT, REFUSED, TWICE
from fuzz.script import steps_by_itself
from fuzz.sharing import Pair, share_of, shared

SLICE = range(16)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    found = Pair()
    yield found
    found.end()


def test_scripts_out_of_the_grammar_train_as_on_one_process(pair: Pair) -> None:
    found = {}
    for seed in SLICE:
        choices = shared(drawn(seed))
        if choices is not None:
            step = steps_by_itself(choices) and seed % 2 == 0
            found[seed] = pair.outcome(choices, step=step, shares=share_of(seed))
    bad = {seed: one for seed, one in found.items() if one.bad}
    assert not bad, bad
    assert len(found) >= len(SLICE) // 3


FOUND = (
    ("third, parameters", {"loss": "ce_ignore"}),
    ("one", {"terms": "l2_out"}),
    ("most", {"arithmetic": "add_"}),
    ("most", {"arithmetic": "iadd_out"}),
    ("one", {"body": "tokens", "terms": "l2_out"}),
    ("one", {"body": "causal"}),
    ("one", {"body": "lstm", "calls": "list_of_calls"}),
    ("most", {"calls": "sum_of_three", "arithmetic": "minus_detached"}),
    ("third", {"backward": "scaled"}),
    ("third", {"loss": "ce_ignore", "metrics": "accuracy"}),
    ("third", {"loss": "two_denominators", "metrics": "norm"}),
    ("third", {"calls": "sum_of_two", "loss": "ce_ignore", "metrics": "max_metric"}),
    ("third", {"arithmetic": "parts_logged"}),
    ("half", {"body": "causal", "backward": "twice"}),
    ("most", {"loss": "ce_none_masked"}),
    ("half", {"loss": "detached_weight", "arithmetic": "isub_item"}),
    ("most", {"loss": "mask_and_mean"}),
    ("third", {"loss": "ce_sum", "arithmetic": "added_in_place", "backward": "two_losses", "parts": "new_head"}),
    ("most", {"parts": "grown_layer"}),
)
"""What differed silently or crashed once, by how batches are shared and what it takes."""


@pytest.mark.parametrize(("shares", "made"), FOUND, ids=lambda part: part if isinstance(part, str) else "-".join(part.values()))
def test_what_was_found_once(pair: Pair, shares: str, made: Choices) -> None:
    choices = shared(settled({**SIMPLEST, **made}))
    assert choices is not None and others(choices) == made
    for step in (False, True) if steps_by_itself(choices) else (False,):
        assert pair.outcome(choices, step=step, shares=shares).kind in (FREE, TWICE)


def test_parameters_of_another_optimizer_are_not_held_in_parts(pair: Pair) -> None:
    choices = shared({**SIMPLEST, "optimizers": "halves_by_name"})
    assert choices is not None
    found = pair.outcome(choices, step=False, shares="third, gradients")
    assert found.kind == REFUSED and "another optimizer trains head.weight" in found.detail


@pytest.mark.parametrize("loss", ["rmse", "log_of_mean"])
def test_what_is_computed_from_the_loss_of_each_share_is_said(pair: Pair, loss: str) -> None:
    choices = shared({**SIMPLEST, "loss": loss})
    assert choices is not None
    assert pair.outcome(choices, step=False, shares="third").kind == INEXACT


def test_a_difference_that_is_not_said_is_found(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuzz.sharing.SAID", ())
    choices = shared({**SIMPLEST, "loss": "rmse"})
    assert choices is not None
    assert pair.outcome(choices, step=False, shares="third").kind == DIFFERENT
