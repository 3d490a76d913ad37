"""Converts a traced step to the step of one rank, where parameters, gradients and optimizer state are sharded.

The trace is of whole tensors. Persistent tensors shrink to the rank's shard. Parameters that are all-gathered while a block
computes, and gradients on their way to other ranks, count for the whole step. The prediction is an upper bound, because they do
not all exist at the peak.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from memfit.levers.fsdp_units import ShardLayout
from memfit.profiling.profile import Profile
from memfit.profiling.timeline import CATEGORIES, Timeline

DIVIDED = [CATEGORIES.index(name) for name in ("parameters", "gradients", "optimizer")]


def in_parts(profile: Profile, division: ShardLayout) -> Profile:
    """Returns the profile of one rank's step."""
    timelines = {
        name: divided(timeline, division)
        for name, timeline in (("timeline", profile.timeline), ("single", profile.single), ("evaluated", profile.evaluated))
        if timeline is not None
    }
    facts = profile.model
    standing = facts.parameter_bytes + facts.gradient_bytes + (profile.optimizer_bytes or 0)
    less = int(standing * (1 - division.share)) - division.gathered
    return replace(profile, points=tuple((n, max(0, size - less)) for n, size in profile.points), **timelines)


def divided(timeline: Timeline, division: ShardLayout) -> Timeline:
    """Returns the timeline of one rank's step."""
    standing = np.isin(timeline.category, DIVIDED)
    fixed = np.where(standing, timeline.fixed * division.share, timeline.fixed)
    first = np.flatnonzero(timeline.category == CATEGORIES.index("parameters"))[:1]
    fixed[first] += division.gathered
    return replace(timeline, fixed=fixed)

