"""Peak memory of the phases around a training step: the evaluation, including what training leaves in place."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from memfit._errors import UsageError
from memfit.profiling.allocator import Peak
from memfit.profiling.timeline import CATEGORIES
from memfit.profiling.tree import check_samples

if TYPE_CHECKING:
    from memfit.profiling.profile import Profile

_VARIABLES = [CATEGORIES.index(name) for name in ("input", "other")]


def evaluation_peak(profile: Profile, samples: int | None, micro_batch: int | None) -> Peak:
    """Returns the peak of an evaluation; see `Profile.evaluation`."""
    asked = profile.loop.evaluation if samples is None else samples
    if profile.evaluated is None or asked is None:
        raise _not_traced(profile)
    check_samples(asked, "samples", "an evaluation batch")
    # The scratch memory that kernels of a training step were measured to take bounds what they take here.
    peak = replace(profile, excess=()).priced(profile.evaluated, asked)
    peak = replace(peak, upper=peak.upper + profile.excess_at(asked))
    return peak if micro_batch is None else peak.plus(left_in_variables(profile, micro_batch))


def left_in_variables(profile: Profile, micro_batch: int) -> int:
    """Returns the bytes that the variables of a plain loop still hold after its step."""
    check_samples(micro_batch)
    timeline = profile.traced_at(micro_batch)
    if timeline is None or not profile.loop.plain:
        return 0
    left = timeline.alive(len(timeline.event) - 1)
    held = left[np.isin(timeline.category[left], _VARIABLES)]
    return int(timeline.sizes(micro_batch)[held].sum())


def _not_traced(profile: Profile) -> UsageError:
    if profile.loop.evaluation is None:
        return UsageError(
            "the peak of an evaluation",
            found="the profile was made without one",
            next_move="pass evaluation=, the samples of an evaluation batch, to memfit.profile",
        )
    reason = next((note for note in profile.notes if "evaluation" in note), "no tensor was tracked")
    return UsageError(
        f"the peak of an evaluation with batches of {profile.loop.evaluation}",
        found=reason,
        next_move="measure it: run one batch in eval mode under torch.no_grad() after a training step",
    )
