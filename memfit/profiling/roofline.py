"""Models the seconds of a step on a device that is not present. Each operation takes the longer of its arithmetic and its
memory traffic (the roofline: Williams, Waterman, Patterson, CACM 52(4), 2009), plus a kernel launch.

Pure values. Not covered: overlap, clocks that drop under load, the data loader.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from memfit.hardware.catalogue import Card
from memfit.profiling.seconds import Timing
from memfit.profiling.timeline import Timeline

if TYPE_CHECKING:
    from memfit.profiling.profile import Profile

ARITHMETIC, TRAFFIC = 0.6, 0.8
"""Shares of a card's peak rates that large matrix products and pointwise kernels reach; data sheets list peaks."""
LAUNCH = 5e-6
"""Seconds that an operation takes at least: one launch from Python (torch's own overhead is 3 to 10 us)."""
SIZES = tuple(2**k for k in range(13))
"""Micro-batch sizes that are modelled; others are interpolated linearly."""


def modelled(profile: Profile, card: Card, sizes: Sequence[int] = SIZES) -> Profile:
    """Returns the profile for that card with modelled seconds; without them if the card's speed or operations are unknown."""
    timeline = profile.timeline
    profile = replace(profile, card=card)
    if timeline is None or timeline.operations is None or not card.bandwidth or _has_recurrence(timeline):
        return profile
    timings = tuple(_timing(timeline, profile.blocks, card, n) for n in sizes)
    step = _span(timeline, "clip") | _span(timeline, "optimizer")
    return replace(profile, timings=timings, optimizer_seconds=float(operation_seconds(timeline, card, 1)[step].sum()))


def bottleneck(profile: Profile, card: Card, samples: int) -> str:
    """Returns what most of a micro-batch's time goes into: "arithmetic", "memory traffic" or "launches"; else "unknown"."""
    timeline = profile.timeline
    if timeline is None or timeline.operations is None or not card.bandwidth:
        return "unknown"
    flops, moved, launches = _parts(timeline, card, samples)
    inside = in_micro_batch(timeline)
    longest = np.argmax(np.stack([flops, moved, launches]), axis=0)[inside]
    seconds = np.maximum(np.maximum(flops, moved), launches)[inside]
    shares = np.bincount(longest, weights=seconds, minlength=3)
    return ("arithmetic", "memory traffic", "launches")[int(shares.argmax())]


def _has_recurrence(timeline: Timeline) -> bool:
    """Whether the step has cuDNN's recurrent layers: sequential steps per call are unknown, so any time would be far too
    short."""
    return any(name.startswith("_cudnn_rnn") for name in timeline.operation_names)


def _timing(timeline: Timeline, blocks: Sequence[str], card: Card, samples: int) -> Timing:
    seconds = operation_seconds(timeline, card, samples)
    assert timeline.operations is not None
    event, inside = timeline.operations.event, in_micro_batch(timeline)
    forward = inside & _between(event, _span_events(timeline, "forward"))
    per_block = dict.fromkeys(blocks, 0.0)
    for visit in timeline.visits:
        if visit.phase == "forward" and visit.block in per_block:
            chosen = inside & (event >= visit.start) & (event < visit.stop)
            per_block[visit.block] += float(seconds[chosen].sum())
    return Timing(samples, float(seconds[inside].sum()), float(seconds[forward].sum()), tuple(per_block.items()))


def operation_seconds(timeline: Timeline, card: Card, samples: int) -> np.ndarray:
    """Returns the seconds of each operation."""
    flops, moved, launches = _parts(timeline, card, samples)
    return np.maximum(flops, moved) + launches


def _parts(timeline: Timeline, card: Card, samples: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    operations = timeline.operations
    assert operations is not None
    rates = np.array([_rate(card, *kind) for kind in operations.kinds] or [1.0])
    flops = operations.flops_at(samples) / (ARITHMETIC * rates[operations.kind])
    moved = operations.moved_at(samples) / (TRAFFIC * card.bandwidth)
    return flops, moved, np.full(len(flops), LAUNCH)


def _rate(card: Card, operation: str, dtype: str) -> float:
    """FLOP/s of that operation. By torch's defaults, float32 convolutions use TF32 where the card has it and matrix products do
    not (torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32)."""
    names = ("tf32", "float32") if dtype == "float32" and "conv" in operation else (dtype, "float32")
    found = (card.flops.get(name) for name in names)
    return next((rate for rate in found if rate), card.bandwidth)


def in_micro_batch(timeline: Timeline) -> np.ndarray:
    """Returns a mask of the operations in the last traced micro-batch: its forward and backward."""
    assert timeline.operations is not None
    start = timeline.window[-1] if timeline.window else 0
    stop = next((p.start for p in timeline.phases if p.name == "hand over"), len(timeline.event) + 1)
    return _between(timeline.operations.event, (start, stop))


def _span(timeline: Timeline, name: str) -> np.ndarray:
    assert timeline.operations is not None
    return _between(timeline.operations.event, _span_events(timeline, name))


def _span_events(timeline: Timeline, name: str) -> tuple[int, int]:
    """The first event, and one past the last event, of the last phase of that name."""
    starts = [*(p.start for p in timeline.phases), len(timeline.event) + 1]
    spans = [(p.start, starts[i + 1]) for i, p in enumerate(timeline.phases) if p.name == name]
    return spans[-1] if spans else (0, 0)


def _between(event: np.ndarray, span: tuple[int, int]) -> np.ndarray:
    return (event >= span[0]) & (event < span[1])
