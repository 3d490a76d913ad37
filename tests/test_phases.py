"""What a loop does around forward and backward: each phase of a plain loop holds, to the byte, what was traced for it."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import torch
from helpers import mlp, points, wrapped
from pairwise import once
from plainloop import CPU, PlainLoop, by_hand, peaks, traced
from torch import Tensor, nn
from torch.optim import AdamW
from zoo import FAMILIES, MORE, first_batch

import memfit
from memfit._errors import UsageError
from memfit.batches.tree import tensors
from memfit.kernels.onednn import stages
from memfit.kernels.scratch import scratch
from memfit.profiling.loop import Loop
from memfit.reporting.profiled import profile_report
from memfit.tracing.ledger import Ledger

ALL = {**FAMILIES, **MORE}
TRAIN, EVALUATION = 4, 7
NUMBER = 4
"""Bytes of the gradient that backward begins with: memfit makes it, and holds it a little longer than autograd would."""
LOOPS = {
    "norm": Loop(max_grad_norm=1.0, plain=True),
    "value": Loop(clip_grad_value=0.1, plain=True, zero_grad="before forward"),
    "both, before backward": Loop(max_grad_norm=1.0, clip_grad_value=0.1, plain=True, zero_grad="before backward"),
    "to zero": Loop(plain=True, zero_grad="to zero", evaluation=EVALUATION),
    "evaluation": Loop(plain=True, evaluation=EVALUATION),
}
EVERY = ("mlp", "gpt", "lora")
OTHERS = {
    "bert": "both, before backward",
    "vit": "norm",
    "t5": "evaluation",
    "resnet": "norm",
    "convnext": "evaluation",
    "unet": "value",
    "superres": "to zero",
    "hf_gpt2": "evaluation",
    "frozen": "norm",
    "dit": "to zero",
}
QUICK = ("vit", "unet", "superres", "frozen")
CASES = [
    *once((name, loop) for name in EVERY for loop in LOOPS),
    *(pytest.param(*case, marks=() if case[0] in QUICK else pytest.mark.slow) for case in OTHERS.items()),
]


@pytest.mark.parametrize(("name", "which"), CASES)
def test_every_phase_holds_what_was_traced(name: str, which: str) -> None:
    family, loop = ALL[name], LOOPS[which]
    for package in family.requires:
        pytest.importorskip(package)
    model = family.build(dropout=0.1)
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad])
    batch = first_batch(family, 8)
    profile = traced(model, optimizer, family.loss, batch, loop)
    assert profile.timeline is not None, profile.notes
    plain = PlainLoop(model, optimizer, family.loss, batch, TRAIN, loop)
    assert peaks(profile.timeline, TRAIN) == pytest.approx(peaks(plain.steps(3), TRAIN), rel=0, abs=NUMBER)
    if loop.evaluation is not None:
        assert profile.evaluated is not None, profile.notes
        got = peaks(plain.evaluation(EVALUATION), EVALUATION)
        assert peaks(profile.evaluated, EVALUATION) == got
        assert profile.evaluation().allocated == max(got.values())


@cache
def ran_by_memfit(zero_grad: str) -> tuple[int, int]:
    """Most bytes of a step as traced for memfit's own engine, and as a wrapped script's lines really take it."""
    family, n = ALL["vit"], TRAIN
    model, batch = family.build(), first_batch(family, 2 * TRAIN)
    optimizer = AdamW(model.parameters())
    timeline = traced(model, optimizer, family.loss, batch, Loop(zero_grad=zero_grad)).timeline
    assert timeline is not None
    run = wrapped(model, n, share=2 * n, optimizer=optimizer)

    def step() -> None:
        if zero_grad in ("before forward", "to zero"):
            optimizer.zero_grad(set_to_none=zero_grad != "to zero")
        loss = family.script_loss(model, batch)
        if zero_grad == "before backward":
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if zero_grad == "after step":
            optimizer.zero_grad()

    step()
    step()
    ledger = Ledger(CPU, inside=stages)
    with by_hand(), ledger:
        ledger.present(model.parameters(), "parameters")
        ledger.present(tensors(list(optimizer.state.values())), "optimizer")
        ledger.present([p.grad for p in model.parameters() if p.grad is not None], "gradients")
        ledger.restart()
        step()
    run.undo()
    return timeline.peak(n), ledger.timeline().peak(n)


@pytest.mark.parametrize("zero_grad", ["before forward", "before backward", "to zero"])
def test_gradients_that_stay_lie_beside_what_memfit_gathers(zero_grad: str) -> None:
    traced_more, ran_more = (there - gone for there, gone in zip(ran_by_memfit(zero_grad), ran_by_memfit("after step")))
    assert traced_more == ran_more
    assert bool(traced_more) is (zero_grad != "before forward")


# ---- what is told


def small(**asked: Any) -> memfit.Profile:
    model = mlp()
    found = memfit.profile(
        model, AdamW(model.parameters()), points(8), loss_fn=lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]), **asked
    )
    assert isinstance(found, memfit.Profile)
    return found


@pytest.mark.parametrize("device", [None, "a100-40gb"])
def test_an_evaluation_is_told_where_it_takes_more_than_the_training(device: str | None) -> None:
    asked = {"device": device, "zero_grad": "before forward", "max_grad_norm": 1.0}
    large, little = small(evaluation=100_000, **asked), small(evaluation=1, **asked)
    first = large.explain(4).evaluation
    second = little.explain(4).evaluation
    assert first is not None and first.exceeds and second is not None and not second.exceeds
    assert first.peak == large.evaluation()
    other = little.evaluation(100_000)  # (its bound is another one where this process's heap has changed in between)
    assert (first.peak.allocated, first.peak.expected) == (other.allocated, other.expected)
    assert "with batches of 100000: more than the training step" in str(large.explain(4))
    assert "with batches of 1: not more than the training step" in str(little.explain(4))
    assert "evaluation 100000" in str(large) and "gradients clipped to a norm of 1, zero_grad before forward" in str(large)
    for text in (profile_report(large, 4).to_markdown(), profile_report(large, 4).to_html(), str(profile_report(large, 4))):
        assert "more than the training step" in text
    told = json.loads(profile_report(large, 4).to_json())["evaluation"]
    assert told["samples"] == 100_000 and told["exceeds_training"] and told["expected"] == large.evaluation().expected
    assert json.loads(profile_report(small(device=device), 4).to_json())["evaluation"] is None


def test_an_evaluation_meets_gradients_that_stay_and_what_variables_hold() -> None:
    gone, there = (small(evaluation=5, zero_grad=zero_grad) for zero_grad in ("after step", "before forward"))
    assert there.evaluation(9).allocated - gone.evaluation(9).allocated == gone.model.gradient_bytes
    bound = small(evaluation=5, plain_loop=True)
    assert bound.evaluation().allocated == gone.evaluation().allocated
    # A batch of 7 numbers in float64 and a class, 4 outputs, and the loss.
    assert bound.evaluation(micro_batch=3).expected - bound.evaluation().expected == 3 * (7 * 8 + 8 + 4 * 8) + 8
    assert gone.evaluation(micro_batch=3) == gone.evaluation()


def test_on_a_card_norms_are_taken_by_lists() -> None:
    timeline = small(device="a100-40gb", max_grad_norm=1.0, clip_grad_value=0.5).timeline
    assert timeline is not None and timeline.span("clip") is not None
    assert "_foreach_norm" in timeline.operation_names
    names = [phase.name for phase in timeline.phases]
    assert names.index("hand over") < names.index("clip") < names.index("optimizer")


def test_what_lists_of_tensors_take_for_their_norm() -> None:
    tensors = [torch.empty(65536 * 3 + 1, device="meta"), torch.empty(5, device="meta")]
    assert scratch(torch.ops.aten._foreach_norm.Scalar, (tensors, 2), None) == 4 * 2 * 4


def test_without_a_loss_function_the_models_outputs_are_held_too() -> None:
    model = mlp()
    optimizer = AdamW(model.parameters())
    x, _ = points(8)
    bound, free = (memfit.profile(model, optimizer, x, plain_loop=plain, evaluation=4) for plain in (True, False))
    assert bound.timeline is not None and bound.evaluated is not None and free.evaluated is not None
    held = bound.timeline.at(0 + bound.timeline.phases[1].start - 1, 3).get("other", 0)
    assert held >= 3 * 4 * 8 and "other" not in free.timeline.at(0, 3)  # type: ignore[union-attr]


class Choosing(nn.Module):
    """In eval mode alone it looks at what it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y if self.training else y[torch.where(y.sum(1) > 0)]


def test_an_evaluation_that_cannot_be_traced_leaves_the_rest_known() -> None:
    model = Choosing()
    optimizer = AdamW(model.parameters())
    found = memfit.profile(model, optimizer, torch.rand(8, 7), loss_fn=lambda m, x: m(x).mean(), evaluation=4)
    assert found.source == "traced" and model.training
    assert any(note.startswith("the evaluation is unknown") for note in found.notes)
    assert found.explain(4).evaluation is None
    with pytest.raises(UsageError, match="the evaluation is unknown"):
        found.evaluation()


def test_the_model_is_left_as_it_was_found() -> None:
    model = mlp(dropout=0.5)
    model[2].eval()
    hooks = dict(model._forward_hooks)
    memfit.profile(model, AdamW(model.parameters()), points(8)[0], evaluation=4, plain_loop=True, zero_grad="to zero")
    assert model.training and not model[2].training and dict(model._forward_hooks) == hooks
    assert all(p.grad is None for p in model.parameters())


def test_a_profile_with_phases_can_be_planned_with() -> None:
    asked = {"max_grad_norm": 1.0, "zero_grad": "before backward", "plain_loop": True, "evaluation": 64}
    plan = memfit.plan(small(**asked), memfit.probe(budget="1GiB", device="cpu"), target_batch=32)
    assert plan.micro_batch * plan.accumulation >= 32


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"max_grad_norm": 0}, "max_grad_norm=0"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm=nan"),
        ({"clip_grad_value": "1"}, "clip_grad_value='1'"),
        ({"clip_grad_value": True}, "clip_grad_value=True"),
        ({"evaluation": 0}, "evaluation=0"),
        ({"evaluation": 2.5}, "evaluation=2.5"),
        ({"zero_grad": "sometimes"}, "zero_grad='sometimes'"),
        ({"zero_grad": ["after step"]}, "zero_grad="),
        ({"plain_loop": 1}, "plain_loop=1"),
    ],
)
def test_what_cannot_be_meant(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as error:
        small(**asked)
    assert said in str(error.value)


def test_an_evaluation_that_was_not_asked_for() -> None:
    with pytest.raises(UsageError, match="pass evaluation="):
        small().evaluation(4)
    with pytest.raises(UsageError):
        small(evaluation=4).evaluation(0)
