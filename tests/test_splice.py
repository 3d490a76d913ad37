"""Steps that share one optimizer's step: nothing of the timeline is other than where each step is traced whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from handmade import Course
from helpers import Notes
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from memfit.capture.workloads import StepWork
from memfit.engine.weighting import Weighting
from memfit.profiling.splice import continued
from memfit.profiling.timeline import Timeline
from memfit.tracing.trace import trace_step

BY_SAMPLES = Weighting("samples", "by samples")


def whole() -> Timeline:
    """weights and state, a gradient, and an optimizer's step with a temporary of 7 bytes."""
    course = Course().birth("weights", 100, category="parameters").birth("state", 50, category="optimizer")
    course = course.phase("input").window().phase("forward").birth("kept", 8, category="kept").phase("backward")
    course = course.birth("gradient", 100, category="gradients").death("kept").phase("hand over")
    return course.phase("optimizer").birth("t", 7).death("t").death("gradient").done()


def begun(gradient: int = 100, weights: int = 100) -> Timeline:
    """Another size of the same, without its optimizer's step, and before there was a state."""
    course = Course().birth("weights", weights, category="parameters").phase("input").window().phase("forward")
    course = course.birth("kept", 12, category="kept").phase("backward")
    return course.birth("gradient", gradient, category="gradients").death("kept").phase("hand over").done()


def test_the_optimizers_step_and_its_state_are_taken_over() -> None:
    found = continued(begun(), whole())
    assert found is not None
    assert found.curve(1).tolist() == [100, 150, 162, 262, 250, 257, 250, 150]
    assert found.event.tolist() == whole().event.tolist() and found.birth.tolist() == whole().birth.tolist()
    assert found.phases == whole().phases and found.window == whole().window
    assert continued(found_without_step(found), whole()) is not None


def found_without_step(timeline: Timeline) -> Timeline:
    """The same up to its optimizer's step, with the state there from the start."""
    end = timeline.phases[-1].start
    born = len(np.unique(timeline.event[:end]))
    columns = {name: getattr(timeline, name)[:born] for name in ("fixed", "per_sample", "category", "owner")}
    return replace(
        timeline, **columns, event=timeline.event[:end], birth=timeline.birth[:end], phases=timeline.phases[:-1]
    )


@pytest.mark.parametrize("other", [begun(gradient=60), begun(weights=90), whole()])
def test_what_starts_or_ends_with_other_things_is_not_mixed(other: Timeline) -> None:
    assert continued(other, whole()) is None or other.phases == whole().phases


def test_without_an_optimizers_step_there_is_nothing_to_take() -> None:
    assert continued(begun(), begun()) is None


class Tied(nn.Module):
    """An embedding used twice, an unused layer, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.unused, self.norm = nn.Embedding(11, 8), nn.Linear(3, 3), nn.LayerNorm(8)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.embed(x) * self.scale) @ self.embed.weight.t()


def with_momentum(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("make", [lambda m: AdamW(m.parameters()), with_momentum, lambda m: SGD(m.parameters(), lr=0.1)])
def test_shared_is_as_traced_whole(make: Callable[[nn.Module], Optimizer]) -> None:
    model = Tied()
    optimizer = make(model)

    def work(twin: Callable[[Tensor], Tensor], samples: int) -> StepWork:
        tree = twin(torch.randint(0, 11, (samples, 5)))
        return StepWork(model, lambda m, x: m(x).mean(), lambda a, b: tree, samples, torch.device("cpu"))

    def traced(sizes: tuple[int, ...], check: int | None = None, like: Timeline | None = None) -> tuple[Timeline, ...]:
        return trace_step(
            model, optimizer, work, sizes, BY_SAMPLES, torch.device("cpu"), check=check, like=like
        ).timelines

    shared = traced((2, 3), 5)
    (alone,), (taken,) = traced((3,)), traced((3,), like=shared[0])
    assert equal(shared[1], alone) and equal(taken, alone)
    assert shared[2].peak(5) == shared[2].curve(5).max() and shared[2].phases[-1].name == "optimizer"


def equal(a: Timeline, b: Timeline) -> bool:
    """Whether two timelines are the same in everything."""
    return all(np.array_equal(getattr(a, f.name), getattr(b, f.name)) for f in fields(Timeline) if f.name != "owners")


def test_all_sizes_of_a_trace_share_one_optimizers_step() -> None:
    stepped = Notes()

    class Counting(SGD):
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            stepped.append(1)
            super().step(closure)

    model = Tied()

    def work(twin: Callable[[Tensor], Tensor], samples: int) -> StepWork:
        tree = twin(torch.randint(0, 11, (samples, 5)))
        return StepWork(model, lambda m, x: m(x).mean(), lambda a, b: tree, samples, torch.device("cpu"))

    optimizer = Counting(model.parameters(), lr=0.1, momentum=0.9)
    trace_step(model, optimizer, work, (2, 3), BY_SAMPLES, torch.device("cpu"), check=5)
    assert len(stepped) == 2, "one brings the state into being, one is recorded"
