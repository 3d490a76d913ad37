"""What a loop does around forward and backward: each phase of a plain loop holds, to the byte, what was traced for it."""

from __future__ import annotations

import pytest
from plainloop import PlainLoop, peaks, traced
from torch.optim import AdamW
from zoo import FAMILIES, MORE, first_batch

from memfit.profiling.loop import Loop

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
CASES = [(name, loop) for name in EVERY for loop in LOOPS] + list(OTHERS.items())


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
