"""Profiles of the same step with some blocks checkpointed, and how many samples fit with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memfit.planning.compose import with_checkpoint
from memfit.profiling.profile import Profile


def with_blocks(profile: Profile, blocks: tuple[str, ...]) -> Profile:
    """Return the profile of the same step with these blocks checkpointed."""
    if profile.timeline is None or not blocks:
        return profile
    half = profile.precision in ("bfloat16", "float16")
    whole, single = (
        None if timeline is None else with_checkpoint(timeline, blocks, autocast=half)
        for timeline in (profile.timeline, profile.single)
    )
    return replace(profile, timeline=whole, single=single, blocks=(), checkpoint=blocks)


def most_fitting(
    profile: Profile, most: int, room: int, choices: Sequence[tuple[str, ...]] = ((),), each: int = 0
) -> tuple[int, tuple[str, ...]]:
    """Return (how many samples fit whole, from 2 to `most`; the blocks that are checkpointed for it): by the first of these
    choices of blocks with which two samples fit. (0, ()) if two fit by none. `each`: bytes that one sample takes besides."""
    for blocks in choices:
        cheaper = with_blocks(profile, blocks)
        fitting = [n for n in range(2, most + 1) if cheaper.peak(n, accumulates=False).upper + n * each <= room]
        if fitting:
            return max(fitting), blocks
    return 0, ()
