"""Profiles and plans for a GPU that is not here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import Notes
from torch import nn
from zoo import FAMILIES, first_batch

import memfit
from memfit._errors import DoesNotFit, UsageError
from memfit._units import GiB, MiB
from memfit.hardware.catalogue import card, cards
from memfit.planning.search import kept_bytes
from memfit.profiling.roofline import bottleneck, modelled


class Attending(nn.Module):
    """One block of attention with dropout, as a script would write it."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, rows, width = x.shape
        q, k, v = self.qkv(x).view(batch, rows, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(F.dropout(y.transpose(1, 2).reshape(batch, rows, width), 0.1, self.training))


def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def profile_of(model: nn.Module, device: str | None = "a100-40gb", rows: int = 128, **more: Any) -> memfit.Profile:
    optimizer = torch.optim.AdamW(model.parameters())
    return memfit.profile(model, optimizer, torch.ones(5, rows, 64), loss_fn=loss_fn, device=device, **more)


def test_a_profile_for_a_card_is_of_its_kernels_and_its_allocator() -> None:
    here, there = profile_of(Attending(), None), profile_of(Attending())
    assert (there.device, there.capability, there.source) == ("cuda", (8, 0), "traced")
    peak = there.peak(64)
    assert peak.reserved is not None and peak.driver is not None
    assert peak.allocated <= peak.lower <= peak.reserved < peak.driver and peak.reserved < peak.upper
    assert peak.reserved % (2 * MiB) == 0
    # Dropout's mask takes one byte, not four.
    assert there.timeline is not None and here.timeline is not None
    kept = [kept_bytes(timeline, 512, "cuda") for timeline in (here.timeline, there.timeline)]
    assert kept[0] - kept[1] == pytest.approx(3 * 512 * 128 * 64, rel=0.02)


def test_nothing_of_the_model_is_computed_or_changed() -> None:
    seen = Notes()

    class Watched(Attending):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(type(x).__name__)
            return super().forward(x)

    model = Watched()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    state = torch.get_rng_state()
    profile_of(model)
    assert set(seen) == {"FakeTensor"}
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state()) and all(p.grad is None for p in model.parameters())


def test_a_model_on_the_meta_device_is_the_same() -> None:
    with torch.device("meta"):
        model = Attending()
    assert profile_of(model).peak(32) == profile_of(Attending()).peak(32)


def test_seconds_follow_the_card() -> None:
    names = ("t4", "a100-40gb", "h100-80gb")
    steps = []
    for name in names:
        found = profile_of(Attending(), name, rows=512)
        steps.append(next(t.seconds for t in found.timings if t.samples == 256))
    assert steps[0] > steps[1] > steps[2] > 0


def test_lower_precision_takes_less_and_is_faster() -> None:
    plain, half = profile_of(Attending(), rows=512), profile_of(Attending(), rows=512, precision="bfloat16")
    assert half.peak(64).allocated < plain.peak(64).allocated
    assert half.timings[-1].seconds < plain.timings[-1].seconds


def test_a_plan_for_a_card() -> None:
    profile = profile_of(Attending(), "24GiB")
    assert not profile.timings  # the speed of an unnamed card is not known
    plan = memfit.plan(profile, memfit.probe(device="24GiB"), target_batch=1024)
    assert plan.predicted.upper <= plan.room and "24" in plan.device
    with pytest.raises(DoesNotFit, match=r"within 540 MiB"):
        memfit.plan(profile, memfit.probe(device="24GiB", budget="540MiB"), target_batch=1024)


def test_every_card_can_be_planned_for() -> None:
    profile = profile_of(Attending())
    assert profile.timeline is not None
    for one in cards():
        found = modelled(replace(profile, capability=one.capability), one)
        assert found.timings and all(t.seconds > 0 for t in found.timings)
        assert bottleneck(profile, one, 64) in ("arithmetic", "memory traffic", "launches")
        device = one.as_device()
        assert 0 < device.free < device.total and not device.here
    assert bottleneck(profile, card("8GiB"), 64) == "unknown"


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_the_zoo_is_traced_for_a_card(name: str) -> None:
    family = FAMILIES[name]
    model = family.build("tiny").float()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    profile = memfit.profile(model, optimizer, first_batch(family, 5), loss_fn=family.loss, device="a100-40gb")
    small, large = profile.peak(2), profile.peak(64)
    assert small.allocated < large.allocated < 40 * GiB
    assert large.smallest_budget <= large.expected


@pytest.mark.parametrize(
    ("device", "said"),
    [("a100", "a100-80gb"), ("rtx-409", "rtx-4090"), ("", "cards of the catalogue"), ("-3GiB", "cards of the catalogue")],
)
def test_a_device_that_nobody_knows(device: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        profile_of(Attending(), device)


def test_a_device_that_torch_knows_has_to_be_the_models() -> None:
    assert profile_of(Attending(), "cpu").device == "cpu"
    with pytest.raises(UsageError, match="the model is on cpu"):
        profile_of(Attending(), "cuda:0")


class Deciding(Attending):
    """Its forward depends on what it computes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        return out[torch.nonzero(out.sum((1, 2)) > 0).flatten()]


def test_a_model_that_needs_real_data_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"(?s)NVIDIA A100.*cannot be traced.*nonzero.*test_elsewhere"):
        profile_of(Deciding())


def test_gradients_gather_in_the_precision_that_was_asked_for() -> None:
    """In float32 (the default) a bfloat16 model's gradients take twice what its parameters take."""

    def peak(where: str) -> int:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))).bfloat16()
        samples = [torch.ones(512, dtype=torch.bfloat16) for _ in range(64)]
        loader = torch.utils.data.DataLoader(samples, batch_size=8)  # pyright: ignore[reportArgumentType]
        optimizer = torch.optim.SGD(model.parameters())
        run = memfit.wrap(
            model, optimizer, loader, loss_fn=loss_fn, target_batch=64, micro_batch=8, accumulate_in=where
        )
        core = run._core
        assert core is not None and core.profile is not None and core.profile.timeline is not None
        return core.profile.timeline.peak(8)

    parameters = 4 * 512 * 513 * 2
    assert peak("float32") - peak("param") >= parameters * 0.9


def test_blocks_are_computed_again_under_the_autocast_they_were_computed_in() -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, batch_first=True) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    with torch.device("meta"):
        model = Stack()
    optimizer = torch.optim.AdamW(model.parameters())
    sample = torch.ones(5, 256, 64)
    peaks = [
        memfit.profile(
            model, optimizer, sample, loss_fn=loss_fn, device="rtx-4090", precision="bfloat16", checkpoint=checkpoint
        ).peak(512)
        for checkpoint in ("off", "all")
    ]
    assert peaks[1].allocated < 0.7 * peaks[0].allocated


def test_no_seconds_are_told_where_they_would_be_far_too_short() -> None:
    model = nn.LSTM(64, 64, batch_first=True)
    optimizer = torch.optim.SGD(model.parameters())
    found = memfit.profile(model, optimizer, torch.ones(5, 7, 64), loss_fn=lambda m, x: m(x)[0].sum(), device="rtx-4090")
    assert not found.timings and found.peak(8).allocated


def test_a_profile_and_a_budget_are_of_one_device() -> None:
    profile = profile_of(Attending())
    with pytest.raises(UsageError, match="A100"):
        memfit.plan(profile, memfit.probe(device="h100-80gb"), target_batch=64)
    with pytest.raises(UsageError, match="made here"):
        memfit.plan(profile_of(Attending(), None), memfit.probe(device="h100-80gb"), target_batch=64)


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "4", None, 2**62])
def test_a_peak_is_of_a_number_of_samples(size: Any) -> None:
    with pytest.raises(UsageError, match="micro_batch="):
        profile_of(Attending()).peak(size)


def test_threads_that_do_not_trace_keep_their_own_autocast() -> None:
    """Patched for the whole process, another thread's training would silently compute in float32."""
    from threading import Event, Thread

    from memfit.kernels.substitute import cuda_kernels
    from memfit.kernels.target import Target

    found: list[torch.dtype] = []
    own = torch.autocast.__init__, torch.autocast.__exit__
    entered, leave = Event(), Event()

    def tracing() -> None:
        with cuda_kernels(Target((8, 0))):
            entered.set()
            leave.wait(10)

    other = Thread(target=tracing)
    other.start()
    assert entered.wait(10)
    with cuda_kernels(Target((8, 0))):
        pass
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found.append(nn.Linear(2, 2)(torch.ones(1, 2)).dtype)
    leave.set()
    other.join()
    assert found == [torch.bfloat16] and (torch.autocast.__init__, torch.autocast.__exit__) == own


@pytest.mark.parametrize(("device", "said"), [("t4", True), ("v100-16gb", True), ("a100-40gb", False), ("24GiB", False)])
def test_bfloat16_on_a_card_without_it_is_said_to_be_slow(device: str, said: bool) -> None:
    model = nn.Linear(64, 64).bfloat16()
    optimizer = torch.optim.SGD(model.parameters())
    sample = torch.ones(8, 64, dtype=torch.bfloat16)
    found = memfit.profile(model, optimizer, sample, loss_fn=lambda m, x: m(x).sum(), device=device)
    assert any("emulated" in note and "made for float16" in note for note in found.notes) == said


def test_a_plan_says_where_batch_norm_sees_micro_batches() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    optimizer = torch.optim.SGD(model.parameters())
    found = memfit.profile(model, optimizer, torch.ones(8, 8), loss_fn=lambda m, x: m(x).sum(), device="t4")
    cut, whole = (memfit.plan(found, memfit.probe(device="t4"), target_batch=64, micro_batch=n) for n in (16, 64))
    assert "BatchNorm takes its statistics from each micro-batch" in str(cut)
    assert "BatchNorm" not in str(whole)
