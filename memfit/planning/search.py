"""Searches for the fastest plan that fits: combinations of micro-batch, checkpointed blocks and precision. Pure functions.

Precision is the only lever that changes numerics. It comes last: only where nothing else fits, or where it was asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from memfit._errors import DoesNotFit
from memfit._units import format_bytes, parse_bytes
from memfit.batches.pieces import Runs, count_of, equal_size_runs, size_runs
from memfit.hardware.budget import Budget
from memfit.planning.blocks import choose_blocks
from memfit.planning.checkpointed import with_blocks
from memfit.planning.compose import Recompute, recomputable
from memfit.planning.plan import Cost, Option, Plan
from memfit.profiling.allocator import HEAP_TENSOR, HEAP_WASTE, Peak
from memfit.profiling.profile import Profile
from memfit.profiling.seconds import timing_at
from memfit.profiling.timeline import CATEGORIES, Timeline

NEARLY = 1.02
"""Options within this factor of the fastest count as equally fast. Among these, fewer levers and fewer micro-batches win."""

FEW_BLOCKS = 4
"""Up to this many blocks, every subset is priced. Beyond, `choose_blocks` decides: it knows the bytes of tensors, but not how
the margin above them changes."""
WHOLE_NORMS = "BatchNorm normalises by each micro-batch's statistics; its running statistics are the whole batch's"
NORMS = "BatchNorm takes its statistics from each micro-batch, so training differs from the whole batch's there"
NODE = 3 << 10
"""Host memory in bytes per tensor saved for backward, beside its storage (autograd nodes, objects, headers of the C library).
A loop of small operations, half of which save a tensor, measured 2.3 KiB."""
HOPELESS = 1.25
"""No blocks are chosen where checkpointing all of them needs this many times the allowed bytes. (Fewer blocks may need less
than all: recomputation takes memory itself.)"""


@dataclass(frozen=True)
class Demand:
    """What a search has to plan, and what the user prescribed."""

    share: int
    """Samples per optimizer step on this rank."""
    target_batch: int | None = None
    """Effective batch: samples per optimizer step over all ranks; None for the script's own batches."""
    micro_batch: int | None = None
    """Samples per forward, if prescribed."""
    checkpoint: tuple[str, ...] | None = None
    """Blocks to checkpoint, if prescribed; None to choose them."""
    mode: str = "accumulate"
    """accumulate or replay: the plan's mode if it has several micro-batches."""
    standing: int = 0
    """Bytes beside the profile that stay through all micro-batches (a replayed output, gradients of the previous step)."""
    standing_per_sample: int = 0
    """The same, per sample of the share."""
    shard: str = "off"
    """What is sharded among the ranks; the profile already accounts for it."""
    equal: bool = False
    """Whether at most two micro-batch sizes may occur (compiled models)."""
    leftover: int | None = None
    """Samples in the last, smaller effective batch of an epoch (0: there is none; None: not known)."""
    sizes: tuple[int, ...] = ()
    """Candidate micro-batch sizes; empty for those of `micro_batch_sizes`."""
    fewest: bool = False
    """Whether to prefer few micro-batches over speed, because splitting changes the training (batch statistics)."""


def search(profiles: Sequence[Profile], budget: Budget, demand: Demand, prices: Prices | None = None) -> Plan:
    """Return the fastest plan that fits.

    `profiles` describe the same step in each allowed precision, the script's own first. A later one is used only if no earlier
    one fits. A single profile prescribes its precision. `prices` caches results of earlier searches on the same kind of device.
    Raises DoesNotFit, which says what would be needed.
    """
    tried: list[_Way] = []
    for profile in profiles:
        ways = _ways(_Pricing(profile, prices or Prices()), budget, demand)
        tried += ways
        fitting = [way for way in ways if way.fits]
        if fitting:
            return _plan(_fewest(fitting) if demand.fewest else _quickest(fitting), tried, profiles[0], budget, demand)
    raise _does_not_fit(tried, budget, demand, profiles[0])


@dataclass(frozen=True)
class _Way:
    """One combination of levers with its predicted memory and time."""

    profile: Profile
    micro_batch: int
    accumulation: int
    checkpoint: tuple[str, ...]
    peak: Peak
    seconds: float | None
    fits: bool
    keep: int = 0

    def option(self, reason: str, standing: int) -> Option:
        cost = _cost(self.peak, standing, self.seconds)
        name = _lever_name(self.profile)
        return Option(self.micro_batch, self.accumulation, name, len(self.checkpoint), cost, self.fits, reason)


def micro_batch_sizes(share: int, most: int | None = None) -> tuple[int, ...]:
    """Return the candidate micro-batch sizes for a share: one for each of 1 to 16 micro-batches, then for counts spaced
    geometrically, and every size up to 8."""
    counts = {*range(1, 17), *(round(16 * 1.25**k) for k in range(40)), share}
    found = {-(-share // count) for count in counts if count <= share} | {n for n in range(1, 9) if n <= share}
    return tuple(sorted(n for n in found if most is None or n <= most))


def keepable(plan: Plan, profile: Profile | None, most: int | None = None) -> Plan:
    """Set `keep` for mode "replay": the first-pass micro-batches, at most `most`, whose activations stay for backward. One fits
    into the plan's peak already; the room above the plan limits the rest."""
    if plan.mode != "replay" or profile is None:
        return plan
    more = each = 0
    if profile.timeline is not None:
        each = kept_bytes(profile.timeline, plan.micro_batch, profile.device)
        wanted = plan.accumulation - 2 if most is None else min(most, plan.accumulation - 1) - 1
        more = max(0, min(wanted, plan.room // max(1, each)))  # (keeping all would be a whole forward and backward)
    predicted = plan.predicted
    seconds = predicted.seconds
    if seconds is not None and profile.timings:
        seconds -= more * timing_at(profile.timings, plan.micro_batch).forward
    # The peak already has room for one more: kept activations are freed before another micro-batch runs again.
    cost = Cost(predicted.peak + more * each, predicted.upper + more * each, seconds)
    return replace(plan, keep=min(1 + more, plan.accumulation - 1), predicted=cost)


def kept_bytes(timeline: Timeline, samples: int, device: str = "cpu") -> int:
    """Return the bytes that a micro-batch's forward saves for backward; on the CPU, autograd nodes and heap holes count too."""
    kept = timeline.category == CATEGORIES.index("kept")
    born, _ = timeline.lifetimes()
    inside = born >= timeline.window[-1] if timeline.window else born >= 0
    sizes = timeline.sizes(samples)[kept & inside]
    if device != "cpu":
        return int(sizes.sum())
    return int(sizes.sum() + HEAP_WASTE * sizes[sizes < HEAP_TENSOR].sum() + NODE * len(sizes))


class Prices:
    """Caches results per timeline. Searches under several budgets share it, and so do profiles that differ only in seconds."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[Timeline, _Known]] = {}

    def known(self, profile: Profile) -> _Known:
        """Return the cache entry of the profile's timeline."""
        if profile.timeline is None:
            return _Known((), {(): profile}, {})
        there = self._of.get(id(profile.timeline))
        if there is None:
            known = _Known(recomputable(profile.timeline, profile.blocks), {(): profile}, {})
            there = self._of[id(profile.timeline)] = profile.timeline, known
        return there[1]


@dataclass(frozen=True)
class _Known:
    """The cached results of one timeline."""

    recomputes: tuple[Recompute, ...]
    composed: dict[tuple[str, ...], Profile]
    peaks: dict[tuple[int, tuple[str, ...], bool], Peak]


class _Pricing:
    """Peaks of one profile under choices of checkpointed blocks; computes each once."""

    def __init__(self, profile: Profile, prices: Prices) -> None:
        self.profile, self._known = profile, prices.known(profile)
        self._recomputes = self._known.recomputes
        self._every = tuple(dict.fromkeys(r.block for r in self._recomputes))

    def peak(self, size: int, blocks: tuple[str, ...], accumulates: bool) -> Peak:
        composed, peaks, key = self._known.composed, self._known.peaks, (size, blocks, accumulates)
        if key not in peaks:
            if blocks not in composed:
                composed[blocks] = with_blocks(self.profile, blocks)
            peaks[key] = composed[blocks].peak(size, accumulates=accumulates)
        return peaks[key]

    def cheapest(self, size: int, allowed: int, accumulates: bool) -> tuple[tuple[str, ...], Peak]:
        """The cheapest set of blocks that fits; where none does, the one that needs least (beyond FEW_BLOCKS: all or none)."""
        peak = self.peak(size, (), accumulates)
        if peak.upper <= allowed or not self._every:
            return (), peak
        seconds = dict(timing_at(self.profile.timings, size).blocks) if self.profile.timings else {}
        if len(self._every) <= FEW_BLOCKS:
            return self._cheapest_of_all(size, allowed, accumulates, seconds)
        least = self.peak(size, self._every, accumulates)
        worst = (self._every, least) if least.upper < peak.upper else ((), peak)
        if least.upper > allowed * HOPELESS or self.profile.timeline is None:
            return worst
        room = float(allowed - (least.upper - least.allocated))
        for attempt in range(8):
            names = choose_blocks(self.profile.timeline, self._recomputes, size, room, seconds, accumulates=accumulates)
            if names is None:
                break
            found = self.peak(size, names, accumulates)
            if found.upper <= allowed:
                return names, found
            # This choice's own margin makes it too large: ask for any smaller one first, then leave room for that margin.
            room = float(found.allocated - 1 if attempt < 4 else allowed - (found.upper - found.allocated))
        return worst

    def _cheapest_of_all(
        self, size: int, allowed: int, accumulates: bool, seconds: Mapping[str, float]
    ) -> tuple[tuple[str, ...], Peak]:
        choices = [names for count in range(len(self._every) + 1) for names in combinations(self._every, count)]
        priced = [(names, self.peak(size, names, accumulates)) for names in choices]
        fitting = [(names, peak) for names, peak in priced if peak.upper <= allowed]
        if fitting:
            return min(fitting, key=lambda pair: sum(seconds.get(name, 0.0) for name in pair[0]))
        return min(priced, key=lambda pair: pair[1].upper)


def _ways(pricing: _Pricing, budget: Budget, demand: Demand) -> list[_Way]:
    allowed = budget.room - demand.standing - demand.standing_per_sample * demand.share
    wanted = demand.sizes or micro_batch_sizes(demand.share)
    chosen = (min(demand.micro_batch, demand.share),) if demand.micro_batch is not None else wanted
    ways = [_way(pricing, size, demand.checkpoint or (), allowed, demand) for size in chosen]
    if demand.checkpoint is not None:
        return ways
    if demand.fewest:
        return [way if way.fits else _with_fewest_blocks(pricing, way, allowed, demand) for way in ways]
    bar = min((way.seconds for way in ways if way.fits and way.seconds is not None), default=None)
    return [way if _settled(way, ways, bar, demand) else _with_fewest_blocks(pricing, way, allowed, demand) for way in ways]


def _settled(way: _Way, ways: Sequence[_Way], bar: float | None, demand: Demand) -> bool:
    """Whether checkpointing cannot help: it fits already, or recomputing the fastest block per micro-batch is too slow."""
    profile = way.profile
    if way.fits or not profile.blocks:
        return True
    if bar is None or way.seconds is None:
        return any(w.fits for w in ways)
    block = min(dict(timing_at(profile.timings, way.micro_batch).blocks).get(name, 0.0) for name in profile.blocks)
    recomputed = block * demand.share / way.micro_batch
    return (way.seconds + recomputed) * NEARLY >= bar


def _with_fewest_blocks(pricing: _Pricing, way: _Way, allowed: int, demand: Demand) -> _Way:
    kept = _kept(pricing.profile, way.micro_batch, demand)
    blocks, _ = pricing.cheapest(way.micro_batch, allowed - kept, way.accumulation > 1)
    return _way(pricing, way.micro_batch, blocks, allowed, demand)


def _way(pricing: _Pricing, size: int, blocks: tuple[str, ...], allowed: int, demand: Demand) -> _Way:
    pieces = (equal_size_runs if demand.equal else size_runs)(demand.share, size)
    count = count_of(pieces)
    peak = pricing.peak(size, blocks, count > 1).plus(_kept(pricing.profile, size, demand))
    seconds = step_seconds(pricing.profile, pieces, blocks, demand.mode)
    return _Way(pricing.profile, size, count, blocks, peak, seconds, peak.upper <= allowed)


def _kept(profile: Profile, size: int, demand: Demand) -> int:
    """Bytes that kernels keep for all micro-batch sizes of an epoch."""
    cut = equal_size_runs if demand.equal else size_runs
    last = cut(demand.leftover, min(size, demand.leftover)) if demand.leftover else ()
    unknown = profile.kept_per_size if demand.leftover is None else 0
    return profile.kept_for(samples for samples, _ in (*cut(demand.share, size), *last)) + unknown


def step_seconds(profile: Profile, pieces: Runs, blocks: Sequence[str], mode: str) -> float | None:
    """Return the seconds of one optimizer step in these micro-batches (`pieces`); None where nothing was timed."""
    if not profile.timings:
        return None
    total = profile.optimizer_seconds
    for index, (samples, count) in enumerate(pieces):
        timing = timing_at(profile.timings, samples)
        per_block = dict(timing.blocks)
        total += count * (timing.seconds + sum(per_block.get(name, 0.0) for name in blocks))
        # (the last micro-batch keeps its activations: see `keepable`)
        again = count if index < len(pieces) - 1 else count - 1
        total += timing.forward * again if mode == "replay" else 0.0
    return total


def _fewest(ways: Sequence[_Way]) -> _Way:
    return min(ways, key=lambda way: (way.accumulation, len(way.checkpoint), way.seconds or 0.0))


def _quickest(ways: Sequence[_Way]) -> _Way:
    timed = [way for way in ways if way.seconds is not None]
    if not timed:
        return max(ways, key=lambda way: (-len(way.checkpoint), way.micro_batch))
    best = min(way.seconds for way in timed if way.seconds is not None)
    near = [way for way in timed if way.seconds is not None and way.seconds <= best * NEARLY]
    return min(near, key=lambda way: (len(way.checkpoint), way.accumulation, way.seconds))


def _plan(chosen: _Way, tried: Sequence[_Way], own: Profile, budget: Budget, demand: Demand) -> Plan:
    whole = own.peak(demand.share, accumulates=False)
    standing = demand.standing + demand.standing_per_sample * demand.share
    return Plan(
        mode="whole" if chosen.accumulation == 1 else demand.mode,
        target_batch=demand.target_batch,
        share=demand.share,
        micro_batch=chosen.micro_batch,
        accumulation=chosen.accumulation,
        precision=_lever_name(chosen.profile),
        checkpoint=chosen.checkpoint or chosen.profile.checkpoint,
        shard=demand.shard,
        offload="off",
        predicted=_cost(chosen.peak, standing, chosen.seconds),
        asked=_cost(whole, 0, step_seconds(own, ((demand.share, 1),), (), "accumulate")),
        limit=budget.limit,
        margin=budget.margin,
        held=budget.held,
        device=budget.device.name,
        model=own.model.name,
        optimizer=own.model.optimizer,
        fingerprint=own.model.fingerprint,
        overhead=chosen.profile.optimizer_seconds,
        accumulate_in=chosen.profile.accumulate_in,
        options=tuple(way.option(_reason(way, chosen, budget, standing), standing) for way in tried),
        notes=(*own.notes, *([NORMS] if own.batch_norms and chosen.accumulation > 1 else [])),
    )


def _cost(peak: Peak, standing: int, seconds: float | None) -> Cost:
    return Cost(peak.expected + standing, peak.upper + standing, seconds)


def _reason(way: _Way, chosen: _Way, budget: Budget, standing: int) -> str:
    if way is chosen:
        return ""
    if not way.fits:
        return f"needs up to {format_bytes(way.peak.upper + standing)}, {format_bytes(budget.room)} allowed"
    if way.seconds is None or chosen.seconds is None:
        return "more micro-batches than needed"
    slower = way.seconds / chosen.seconds - 1
    if slower > NEARLY - 1:
        return f"{slower:.0%} slower"
    if way.accumulation > chosen.accumulation or len(way.checkpoint) > len(chosen.checkpoint):
        return "as fast, with more micro-batches or levers"
    return "as fast"


def _lever_name(profile: Profile) -> str:
    return profile.precision if profile.precision_is_lever else "off"


def _does_not_fit(tried: Sequence[_Way], budget: Budget, demand: Demand, own: Profile) -> DoesNotFit:
    least = min(tried, key=lambda way: way.peak.upper)
    standing = demand.standing + demand.standing_per_sample * demand.share
    need = least.peak.upper + standing
    levers = f", {len(least.checkpoint)} blocks checkpointed" if least.checkpoint else ""
    fixed = own.model.parameter_bytes + own.model.gradient_bytes
    left = format_bytes(budget.room) if budget.room > 0 else "none"
    by = "others" if budget.device.here else "its context"
    size = budget.with_room_for(need - budget.room)
    enough = parse_bytes(size)
    could = budget.device.here or enough <= budget.device.total
    more = f"give it budget={size!r} or more" if could else f"take a device with {size} or more"
    error = DoesNotFit(
        f"a batch of {demand.share} within {format_bytes(budget.limit)} ({budget.source})",
        found=f"at micro-batch {least.micro_batch}{levers} it needs {_needed(least.peak, standing)}, and {left} are "
        f"left of {format_bytes(budget.limit)} (held by {by} {format_bytes(budget.held)}, margin "
        f"{format_bytes(budget.margin)}); parameters and gradients alone take {format_bytes(fixed)}",
        next_move=f"{more}{_what_else(demand, own)}",
    )
    error.enough = enough
    return error


def _needed(peak: Peak, standing: int) -> str:
    """The expected peak, and the upper bound where the words differ. The upper bound has to fit."""
    expected, most = format_bytes(peak.expected + standing), format_bytes(peak.upper + standing)
    return most if expected == most else f"{expected}, at most {most}"


def _what_else(demand: Demand, own: Profile) -> str:
    ways = []
    if demand.standing_per_sample:
        ways.append("pass a loss_fn= that is a mean or sum over samples, so the whole output need not exist")
    if demand.checkpoint is not None and own.blocks:
        ways.append("allow checkpoint='auto'")
    if demand.micro_batch is not None and demand.micro_batch > 1:
        ways.append("allow micro_batch='auto'")
    return "".join(f", or {way}" for way in ways)
