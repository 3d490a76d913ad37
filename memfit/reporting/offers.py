"""Computes the cost of other choices of one lever (micro-batch, checkpointing, precision, budget), for "what next".

A function of a plan, the profile behind it and the budget. Not covered: samples of different sizes, whose plan has no
single micro-batch size; sharding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from memfit.batches.pieces import count_of, size_runs
from memfit.planning.checkpointed import with_blocks
from memfit.planning.compose import recomputable
from memfit.planning.plan import Option, Plan
from memfit.planning.search import micro_batch_sizes, step_seconds
from memfit.profiling.profile import Profile
from memfit.profiling.seconds import timing_at
from memfit.reporting.facts import Offer

WORTH = 0.02
"""The smallest fraction of a step's seconds that is worth reporting."""
ASKED = 4
"""How many larger micro-batches are priced; each costs a replay of the timeline."""


def offers_for(plan: Plan, profile: Profile | None, room: int) -> tuple[Offer, ...]:
    """Return one step of each lever, and what more memory would allow. `room`: bytes free above the plan's upper bound."""
    if plan.by_size:
        return ()
    against = None if profile is None or profile.timeline is None else _Against(plan, profile, room)
    found = list(_of_options(plan, room, 1.0 if against is None else against.pace))
    if against is not None and not against.profile.checkpoint:
        # A profile taken with checkpointed blocks does not know their memory without checkpointing.
        found += (*_of_profile(against), *_more_memory(against))
    else:
        found += _larger_budget(plan, room)
    return tuple(found)


# ---- from the plan's own options


def _of_options(plan: Plan, room: int, pace: float) -> Iterator[Offer]:
    same = [o for o in plan.options if o.precision == plan.precision and o.fits]
    others = [o for o in same if o.micro_batch != plan.micro_batch]
    others = [o for o in others if o.measured] or others  # measured ones, if any, compare with the plan
    smaller = [o for o in others if o.micro_batch < plan.micro_batch]
    larger = [o for o in others if o.micro_batch > plan.micro_batch]
    if smaller:
        yield _offer("micro-batch", max(smaller, key=lambda o: o.micro_batch), plan, room, pace)
    if larger:
        yield _offer("micro-batch", min(larger, key=lambda o: o.micro_batch), plan, room, pace)
    lower = [o for o in plan.options if o.precision != plan.precision and o.fits and o.cost.seconds is not None]
    if lower:
        yield _offer("precision", min(lower, key=lambda o: o.cost.seconds or 0.0), plan, room, pace)


def _larger_budget(plan: Plan, room: int) -> Iterator[Offer]:
    faster = [o for o in plan.options if not o.fits and _saves(plan, o.cost.seconds)]
    if faster:
        yield _offer("budget", min(faster, key=lambda o: o.cost.upper), plan, room, 1.0)


def _offer(lever: str, option: Option, plan: Plan, room: int, pace: float) -> Offer:
    more = option.cost.upper - plan.predicted.upper
    known = option.cost.seconds is not None and plan.predicted.seconds is not None
    then = (option.cost.seconds or 0.0) * (1.0 if option.measured else pace)
    return Offer(
        lever,
        option.micro_batch,
        option.accumulation,
        option.checkpoint,
        option.precision,
        "",
        more,
        then - (plan.predicted.seconds or 0.0) if known else None,
        0 if option.fits else max(0, more - room),
    )


def drift(plan: Plan, profile: Profile | None) -> float:
    """Return the plan's seconds measured in training, divided by those timed while planning; 1 if not measured."""
    own = next((option.cost.seconds for option in plan.options if not option.reason and option.measured), None)
    if own is None or profile is None:
        return 1.0
    pieces = size_runs(plan.share, plan.micro_batch)
    # If samples differ in size, the plan keeps the prediction it was made with.
    timed = plan.predicted.seconds if plan.by_size else step_seconds(profile, pieces, plan.checkpoint, plan.mode)
    return own / timed if timed else 1.0


def _saves(plan: Plan, seconds: float | None) -> bool:
    now = plan.predicted.seconds
    return now is not None and seconds is not None and seconds < now * (1 - WORTH)


# ---- from the profile, beyond the options


@dataclass(frozen=True)
class _Against:
    """The plan to compare alternatives with."""

    plan: Plan
    profile: Profile
    room: int
    _uppers: dict[tuple[int, tuple[str, ...]], int] = field(default_factory=dict)

    def offer(self, lever: str, size: int, blocks: tuple[str, ...], block: str = "") -> Offer:
        """Price the plan with another micro-batch size and other checkpointed blocks."""
        plan = self.plan
        count = count_of(size_runs(plan.share, size))
        more = self._upper(size, blocks) - self._upper(plan.micro_batch, plan.checkpoint)
        now, then = plan.predicted.seconds, self.seconds(size, blocks)
        seconds = None if now is None or then is None else then * self.pace - now
        missing = max(0, more - self.room)
        return Offer(lever, size, count, len(blocks), plan.precision, block, more, seconds, missing)

    @property
    def pace(self) -> float:
        """The factor from seconds timed while planning to seconds in training."""
        return drift(self.plan, self.profile)

    def seconds(self, size: int, blocks: tuple[str, ...]) -> float | None:
        """Return the seconds of such a step, as timed while planning."""
        return step_seconds(self.profile, size_runs(self.plan.share, size), blocks, self.plan.mode)

    def _upper(self, size: int, blocks: tuple[str, ...]) -> int:
        if (size, blocks) not in self._uppers:
            priced = self.profile if self.profile.checkpoint == blocks else with_blocks(self.profile, blocks)
            self._uppers[size, blocks] = priced.peak(size, accumulates=size < self.plan.share).upper
        return self._uppers[size, blocks]


def _of_profile(against: _Against) -> Iterator[Offer]:
    plan, profile = against.plan, against.profile
    per_block = dict(timing_at(profile.timings, plan.micro_batch).blocks) if profile.timings else {}
    could = _by_gain(profile, plan.micro_batch, per_block)
    free = [name for name in could if name not in plan.checkpoint]
    if free:
        offer = against.offer("checkpoint", plan.micro_batch, (*plan.checkpoint, free[0]), free[0])
        if offer.more < 0:
            seconds = None if offer.seconds is None else max(0.0, offer.seconds)  # less than 0 is noise of the timing
            yield replace(offer, seconds=seconds)
    if plan.checkpoint:
        last = max(plan.checkpoint, key=lambda name: per_block.get(name, 0.0))
        rest = tuple(name for name in plan.checkpoint if name != last)
        yield against.offer("checkpoint", plan.micro_batch, rest, last)


def _more_memory(against: _Against) -> Iterator[Offer]:
    """The smallest budget that makes the step faster, and the budget of the fastest step."""
    plan = against.plan
    faster = []
    now = against.seconds(plan.micro_batch, plan.checkpoint)
    for size in micro_batch_sizes(plan.share):
        seconds = against.seconds(size, ())
        if size >= plan.micro_batch and now is not None and seconds is not None and seconds < now * (1 - WORTH):
            faster.append((seconds, size))
    if not faster:
        return
    by_size = sorted(faster, key=lambda pair: pair[1])
    chosen = {size for _, size in by_size[: ASKED - 1]} | {min(faster)[1]}
    lacking = [o for o in (against.offer("budget", size, ()) for size in sorted(chosen)) if o.missing]
    if lacking:
        least = min(lacking, key=lambda o: o.missing)
        best = min(lacking, key=lambda o: o.seconds or 0.0)
        yield least
        if (best.seconds or 0.0) < (least.seconds or 0.0) - WORTH * (plan.predicted.seconds or 0.0):
            yield best


def _by_gain(profile: Profile, samples: int, per_block: dict[str, float]) -> list[str]:
    """The blocks that can be checkpointed, those that free the most bytes per second first."""
    timeline = profile.timeline
    if timeline is None:
        return []
    sizes_ = timeline.sizes(samples)
    gain = {r.block: float(sizes_[r.dropped].sum()) for r in recomputable(timeline, profile.blocks)}
    return sorted(gain, key=lambda name: -gain[name] / max(per_block.get(name, 0.0), 1e-9))
