"""A traced step as it is where several processes hold parameters, gradients and the optimizer's state in parts.

The trace is of whole tensors. What stands is divided; what is gathered for the time a block computes, and the gradients on
their way to other processes, are counted for the whole step. So the prediction is an upper one: they are not all there at its
peak.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from memfit.levers.fully import Division
from memfit.profiling.profile import Profile
from memfit.profiling.timeline import CATEGORIES, Timeline

DIVIDED = [CATEGORIES.index(name) for name in ("parameters", "gradients", "optimizer")]


def in_parts(profile: Profile, division: Division) -> Profile:
    """The profile of one process's step."""
    timelines = {
        name: divided(timeline, division)
        for name, timeline in (("timeline", profile.timeline), ("single", profile.single), ("evaluated", profile.evaluated))
        if timeline is not None
    }
    facts = profile.model
    standing = facts.parameter_bytes + facts.gradient_bytes + (profile.optimizer_bytes or 0)
    less = int(standing * (1 - division.share)) - division.gathered
    return replace(profile, points=tuple((n, max(0, size - less)) for n, size in profile.points), **timelines)


def divided(timeline: Timeline, division: Division) -> Timeline:
    """The timeline of one process's step."""
    standing = np.isin(timeline.category, DIVIDED)
    fixed = np.where(standing, timeline.fixed * division.share, timeline.fixed)
    first = np.flatnonzero(timeline.category == CATEGORIES.index("parameters"))[:1]
    fixed[first] += division.gathered
    return replace(timeline, fixed=fixed)

