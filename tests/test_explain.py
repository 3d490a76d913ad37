"""Why a step takes what it takes: the moment, what lies there, whose it is; and what is said where that is not known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import handmade
import pytest
import torch
from handmade import Course
from test_module_tree import profile_of
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

import memfit
from memfit._units import format_bytes
from memfit.planning.compose import with_checkpoint
from memfit.profiling.profile import Profile
from memfit.profiling.timeline import fit


def test_by_hand() -> None:
    found = handmade.profile(handmade.two_blocks()).explain(10)
    assert (found.samples, found.tensors, found.peak.allocated, found.beside) == (10, 470, 470, 0)
    assert found.smallest_budget is None
    moment = found.moment
    assert moment is not None
    # The loss of the second micro-batch: gradients of the first are there.
    assert (moment.phase, moment.micro_batch, moment.micro_batches) == ("forward", 2, 2)
    assert (moment.operation, moment.module) == ("", "")
    assert found.holds == (("kept", 220), ("parameters", 100), ("gradients", 100), ("transient", 40), ("input", 10))
    assert [(share.module, share.size) for share in found.modules] == [("", 250), ("a", 110), ("b", 110)]
    assert [(one.size, one.count, one.category) for one in found.largest[:3]] == [
        (100, 1, "parameters"),
        (100, 1, "gradients"),
        (100, 1, "kept"),
    ]
    text = str(found)
    assert "micro-batches of 10" in text and "in forward of a later micro-batch" in text
    assert "kept 220 B, parameters 100 B" in text


def test_a_single_micro_batch_has_no_gradients_at_its_fullest() -> None:
    found = handmade.profile(handmade.two_blocks()).explain(10, accumulates=False)
    assert found.tensors == 370 and found.moment is not None and found.moment.micro_batch == 1
    assert "gradients" not in dict(found.holds)


@pytest.mark.parametrize("device", [None, "a100-40gb"])
def test_parts_are_all_of_it(device: str | None) -> None:
    profile = profile_of("gpt", device)
    for samples in (1, 32, 500):
        found = profile.explain(samples)
        assert sum(size for _, size in found.holds) == found.tensors == sum(share.size for share in found.modules)
        assert sum(one.size * one.count for one in found.largest) <= found.tensors
        assert found.largest[0].size == max(one.size for one in found.largest)
        assert found.moment is not None and found.moment.operation
        assert found.beside >= 0


def test_on_a_card_all_scales_are_told() -> None:
    found = profile_of("gpt", "a100-40gb").explain(64)
    peak = found.peak
    assert peak.reserved is not None and peak.driver is not None and found.smallest_budget is not None
    assert found.tensors < peak.allocated <= found.smallest_budget <= peak.reserved < peak.driver
    for size in (peak.allocated, peak.reserved, peak.driver, found.smallest_budget):
        assert format_bytes(size) in str(found)


class Wide(nn.Module):
    """One layer whose output is most of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Linear(8, 8), nn.Linear(8, 4096)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(self.wide(self.narrow(x)))


def wide(device: str | None = None, **more: Any) -> memfit.Profile:
    model = Wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return memfit.profile(model, optimizer, torch.ones(5, 8), loss_fn=lambda m, x: m(x).sum(), device=device, **more)


@pytest.mark.parametrize("device", [None, "a100-40gb"])
def test_the_operation_and_the_module_are_named(device: str | None) -> None:
    found = wide(device).explain(10_000)
    assert found.moment is not None
    assert (found.moment.phase, found.moment.operation) == ("backward", "gelu_backward")
    kept = {(one.module, one.operation) for one in found.largest if one.category == "kept"}
    assert ("wide", "addmm") in kept
    assert found.modules[0].size > 0.3 * found.tensors


def test_a_profile_by_the_verb_is_counted_and_one_by_wrap_is_not() -> None:
    timeline = wide().timeline
    assert timeline is not None and timeline.operations is not None and timeline.operation is not None
    assert len(timeline.operation) == len(timeline.fixed) and timeline.operation.max() < len(timeline.operation_names)
    assert wide().tree(16).root.flops == 16 * (2 * 3 * 8 * 4096 + 2 * 2 * 8 * 8)
    model = Wide()
    run = memfit.wrap(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        sample=torch.ones(8, 8),
        loss_fn=lambda m, x: m(x).sum(),
        budget="1GiB",
    )
    assert run.plan is not None
    profile = run._core.planner.profile(run._stepper.task(torch.ones(8, 8)), "off", ())  # type: ignore[union-attr]
    assert profile.timeline is not None and profile.timeline.operation is None and not profile.modules


def test_operations_stay_with_their_allocations_when_blocks_are_checkpointed() -> None:
    timeline = profile_of("gpt").timeline
    assert timeline is not None and timeline.operation is not None
    composed = with_checkpoint(timeline, profile_of("gpt").blocks)
    assert composed.operation is not None and len(composed.operation) == len(composed.fixed) > len(timeline.fixed)
    assert fit(timeline, 1, timeline, 2).operation is timeline.operation  # type: ignore[union-attr]


def test_one_sample_traced_by_itself_is_explained_by_its_own_trace() -> None:
    profile = replace(handmade.profile(handmade.two_blocks()), single=handmade.two_blocks(1))
    assert profile.explain(1).tensors == profile.peak(1).allocated == handmade.two_blocks(1).peak(1)
    assert profile.tree(1).root.at_peak == handmade.two_blocks(1).peak(1) < handmade.two_blocks().peak(1)


def test_before_the_step() -> None:
    timeline = Course().birth("weights", 100, category="parameters").phase("forward").window().phase("backward").done()
    assert str(handmade.profile(timeline).explain(1).moment) == "before the step begins"


def test_attention_on_the_cpu_is_counted() -> None:
    class Attending(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    model = nn.Sequential(nn.Linear(16, 16), Attending())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = memfit.profile(model, optimizer, torch.ones(5, 2, 32, 16), loss_fn=lambda m, x: m(x).sum())
    attention = found.tree(4).root.children[1]
    assert attention.flops_forward == 4 * 2 * (2 * 2 * 32 * 32 * 16)


# ---- what cannot be told


class Deciding(nn.Module):
    """Its forward depends on what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return y[torch.nonzero(y.sum(1) > -1e9).flatten()]


def test_a_measured_profile_says_what_it_cannot_tell() -> None:
    model = Deciding()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    profile = memfit.profile(model, optimizer, torch.ones(8, 8), loss_fn=lambda m, x: m(x).sum())
    assert profile.source == "measured"
    found = profile.explain(16)
    assert found.moment is None and not found.holds and not found.modules and found.peak.allocated > 0
    assert "the model cannot be traced" in str(found)
    assert profile.tree(16).root.parameters == 0 or profile.tree(16).root.parameters == 72
    assert "unknown" in str(profile.tree(16))


def test_where_each_size_was_traced_by_itself() -> None:
    profile = handmade.profile(None, points=((1, 100), (2, 200)), source="traced at single sizes")
    found = profile.explain(2)
    assert "fewer than 5 samples" in found.unknown and found.peak.allocated == 200 and "200 B expected" in str(found)


def profiled(optimizer: Callable[..., Optimizer], **asked: Any) -> Profile:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)).to(asked.pop("dtype", torch.float32))
    sample = torch.randn(8, 64, dtype=next(model.parameters()).dtype)
    return memfit.profile(model, optimizer(model.parameters()), sample, loss_fn=lambda m, x: m(x).square().mean(), **asked)


def test_what_is_held_anyway_names_the_optimizers_state() -> None:
    found = profiled(AdamW)
    state = found.optimizer_bytes
    assert state is not None and 2 * found.model.parameter_bytes <= state <= 2 * found.model.parameter_bytes + 64
    assert f"optimizer's state {format_bytes(state)}" in str(found)
    assert profiled(SGD).optimizer_bytes == 0 and "optimizer's state 0 B" in str(profiled(SGD))
    facts = found.model
    whole = facts.parameter_bytes + facts.gradient_bytes + state
    assert replace(found, timeline=None, source="measured", standing=whole).optimizer_bytes == state
    assert "state unknown" in str(replace(found, timeline=None, timings=(), points=((1, whole),)))


@pytest.mark.parametrize("fused", [True, False])
def test_a_fused_optimizer_is_named_so_in_the_profile_and_the_plan(fused: bool) -> None:
    found = profiled(partial(AdamW, fused=fused))
    made = memfit.plan(found, memfit.probe(budget="1GiB"), target_batch=8)
    assert ("AdamW (fused)" in str(found)) is ("AdamW (fused)" in str(made)) is fused


@pytest.mark.parametrize(("dtype", "said"), [(torch.bfloat16, True), (torch.float32, False)])
def test_what_gradients_gather_in_is_said_where_it_makes_a_difference(dtype: torch.dtype, said: bool) -> None:
    found = profiled(SGD, dtype=dtype, accumulate_in="param")
    made = memfit.plan(found, memfit.probe(budget="1GiB"), target_batch=8, micro_batch=2)
    assert ("own precision" in str(made)) is said
