"""Prediction: a traced peak holds at every size, and composing checkpoints gives what a trace with them gives, to the byte."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import mlp, points
from stepping import sgd, stepper
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint
from zoo import FAMILIES, first_batch

import memfit
from memfit.autotune.settings import Settings
from memfit.hardware.budget import probe
from memfit.levers.checkpoint import candidate_blocks
from memfit.modes.step_mode import Stepper
from memfit.planning.checkpointed import with_blocks
from memfit.profiling.profile import Profile
from memfit.runtime.core import Core

HERE = torch.device("cpu")
SIZES = (2, 3, 4, 7, 16, 61)


def traced(
    model: nn.Module, loss_fn: Any, batch: Any, blocks: tuple[str, ...] = (), sizes: Any = None, lever: str = "off"
) -> Profile:
    """The profile by tracing alone, with these blocks really checkpointed."""
    core = Core(model, AdamW(model.parameters()), HERE, probe(device=HERE), Settings(), compiled=False)
    task = Stepper(core, loss_fn, lambda batch: loss_fn(model, batch)).task(batch)
    return core.planner.profile(task, lever, blocks, sizes)


@cache
def of_family(name: str, blocks: tuple[str, ...] = (), lever: str = "off") -> Profile:
    family = FAMILIES[name]
    for package in family.requires:
        pytest.importorskip(package)
    return traced(family.build(), family.loss, first_batch(family, 6), blocks, lever=lever)


WITH_BLOCKS = ("gpt", "bert", "vit", "t5", "resnet", "resnet_group", "convnext", "unet", "superres")
"""Families whose blocks can be checkpointed."""
UNORDERED = 64
"""Bytes by which a composed peak may exceed a traced one: within one operation's backward, which of the gradients of a
norm's weight and of its input is there first is not known (`planning/compose.py`)."""


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ("hf_gpt2", "lora", "frozen")])
def test_the_traced_peak_is_affine_and_right_at_a_size_that_was_not_traced(name: str) -> None:
    family = FAMILIES[name]
    profile = of_family(name)
    assert profile.source == "traced" and profile.timeline is not None
    batch = first_batch(family, 6)
    alone = traced(family.build(), family.loss, batch, sizes=(6,))
    assert alone.timeline is not None
    for accumulates in (True, False):
        assert profile.timeline.peak(6, accumulates=accumulates) == alone.timeline.peak(6, accumulates=accumulates)


CHOICES = [(name, "every") for name in WITH_BLOCKS]
CHOICES += [(name, which) for name in ("gpt", "resnet", "convnext", "superres") for which in ("first", "last")]


@pytest.mark.parametrize(("name", "which"), CHOICES)
def test_composed_checkpoints_are_the_traced_ones_to_the_byte(name: str, which: str) -> None:
    profile = of_family(name)
    blocks = {"every": profile.blocks, "first": profile.blocks[:1], "last": profile.blocks[-1:]}[which]
    assert blocks
    composed, whole = with_blocks(profile, blocks).timeline, of_family(name, blocks).timeline
    assert composed is not None and whole is not None and profile.timeline is not None
    model = FAMILIES[name].build()
    # What a block's recomputation keeps its batch statistics in is not composed either.
    copies = max(sum(b.nbytes for b in model.get_submodule(block).buffers()) for block in blocks)
    for size in SIZES:
        for accumulates in (True, False):
            got, want = (t.peak(size, accumulates=accumulates) for t in (composed, whole))
            assert -copies <= got - want <= UNORDERED, f"{size} samples: {got} composed, {want} traced"
            assert abs(got - want) <= 0.01 * want


@pytest.mark.parametrize(
    "name", [name if name in ("gpt", "convnext") else pytest.param(name, marks=pytest.mark.slow) for name in WITH_BLOCKS]
)
def test_under_autocast_checkpoints_are_composed_as_well(name: str) -> None:
    """Its copies of weights live to the end of the whole forward, in whichever block they were made."""
    profile = of_family(name, lever="bfloat16")
    composed, whole = with_blocks(profile, profile.blocks).timeline, of_family(name, profile.blocks, "bfloat16").timeline
    assert composed is not None and whole is not None
    for size in SIZES:
        assert 0.97 <= composed.peak(size) / whole.peak(size) <= 1.06


def test_checkpointing_saves_what_it_is_for() -> None:
    """Deep and narrow with long sequences: most of the memory is activations between blocks' ends."""
    profile = of_family("gpt")
    assert profile.timeline is not None
    every = with_blocks(profile, profile.blocks).timeline
    assert every is not None and every.peak(64) < profile.timeline.peak(64)


# ---- the script's own checkpointing


class OwnCheckpoints(nn.Module):
    """Checkpoints its blocks itself, as many training scripts do."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 64), nn.Tanh(), nn.Linear(64, 7)) for _ in range(3))
        self.own = own

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.own else block(x)
        return x


def square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def test_the_scripts_own_checkpointing_is_recognised_priced_and_never_nested() -> None:
    batch = torch.randn(6, 7)
    own, without = traced(OwnCheckpoints(True), square, batch), traced(OwnCheckpoints(False), square, batch)
    names = ("blocks.0", "blocks.1", "blocks.2")
    assert (own.script_blocks, own.blocks) == (names, ())
    assert (without.script_blocks, without.blocks) == ((), names)
    assert own.timeline is not None and without.timeline is not None
    assert own.timeline.peak(64) < without.timeline.peak(64)
    applied = traced(OwnCheckpoints(False), square, batch, names)
    assert applied.timeline is not None
    assert own.timeline.peak(64) == applied.timeline.peak(64)


# ---- models that cannot be traced


class DataDependent(nn.Module):
    """Its control flow depends on what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)
        chosen = out[out.detach().norm(dim=1) > 0.5].tolist()  # values, as a list
        return out * (1.0 + 0.0 * len(chosen))


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def test_a_model_whose_trace_fails_is_measured_and_that_is_said() -> None:
    model = DataDependent()
    profile = memfit.profile(model, sgd(model), points(), loss_fn=cross_entropy)
    assert profile.source == "measured" and profile.timeline is None
    assert [n for n, _ in profile.points][:2] == [1, 2]  # and larger ones, as time allows
    assert any("by measuring" in note and "tracing failed" in note for note in profile.notes)
    run, seen = stepper(model, cross_entropy, None, micro_batch=5)
    run.step(points())
    assert run.plan is not None and any("by measuring" in note for note in run.plan.notes)
    assert all(p.grad is not None for p in model.parameters())
    assert len(seen.gradients) == 1


def test_measuring_leaves_no_trace() -> None:
    model = DataDependent()
    optimizer = AdamW(model.parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    memfit.profile(model, optimizer, points(), loss_fn=cross_entropy)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not optimizer.state
    assert torch.equal(random, torch.get_rng_state())


def test_candidate_blocks_are_the_entries_of_the_outermost_lists() -> None:
    assert candidate_blocks(OwnCheckpoints(False)) == ("blocks.0", "blocks.1", "blocks.2")
    assert candidate_blocks(mlp()) == ()
