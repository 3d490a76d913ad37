"""Infers how the losses of micro-batches are weighted from a few samples, and proves it on losses and gradients.

It runs like the proofs of `proofs.py`, and keeps gradients of a bounded choice of parameters only.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from memfit.capture.size_dependence import Positions
from memfit.engine.batch_limits import limits_in, unreachable_in
from memfit.engine.branches import branching_of
from memfit.engine.divisors import How, how_divided, off_by
from memfit.engine.gradients import is_sharded
from memfit.engine.idle_sums import idle_in
from memfit.engine.intercept import is_compiled
from memfit.engine.random_slices import Draws
from memfit.engine.staged import Staging
from memfit.engine.weighting import Weighting
from memfit.engine.work import Work
from memfit.equivalence.host_reads import Again, Reads, decided, may_branch, noting_moves, tried_on
from memfit.equivalence.leaf_counts import LeafCount, candidate_counts
from memfit.equivalence.loss_branches import Decides, told_by
from memfit.equivalence.measured_loss import MeasuredLoss, MeasureLoss, probes_of
from memfit.equivalence.proof_rounds import rounds_of
from memfit.equivalence.proofs import comparable
from memfit.equivalence.same_values import same
from memfit.equivalence.seen_effects import Run, Trial, doubled
from memfit.equivalence.side_effects import Moves
from memfit.equivalence.tolerances import (
    MOST,
    Arithmetic,
    Deviation,
    floor_from,
    full_precision,
    in_double,
    last_bits_flipped,
    tolerance,
)

CLOSE = 2.0
"""Weightings up to this many times as far away as the closest are not told from it where rounding decides: they are rivals."""
DECIDES = "it branches on values read from the batch"


def infer_weighting(
    work: Work,
    sizes: Sequence[int],
    staging: Staging,
    model: nn.Module,
    *,
    decides: bool = False,
    double: Callable[[int, int], Work] | None = None,
) -> tuple[Weighting | None, Deviation, Moves]:
    """Infers the weighting (reduction) that makes the whole's loss from the losses of parts of these sizes.

    Returns the weighting, the deviation, and how the state that the loss changes is composed. The weighting is None if none
    holds, or if all do (a mask leaves nothing of these samples), as the deviation tells. Parameters that only the loss uses are
    staged from now on. `decides`: doubts losses that decide by what the model computed, and treats tensors with a graph as
    state, for works that call the model and not its forward. `double(start, stop)`: work on these
    samples twice, to find how state changes.
    """
    with full_precision(work.device) as arithmetic:
        look = partial(_inferred, work, sizes, staging, model, decides, double, arithmetic)
        found = look(by_operations=False) or look(by_operations=True)
    assert found is not None  # the second look takes every draw
    weighting, deviation, moves, foreign = found
    if weighting is not None and moves.decides is not None:
        weighting = replace(weighting, doubt=f"{DECIDES} ({moves.decides})")
    if weighting is not None and any(map(is_compiled, model.modules())):  # no function mode sees what it computes
        doubt = f"the result of its {weighting.idle[0].function}() is 0 for the samples examined" if weighting.idle else None
        weighting = replace(weighting, idle=(), limits=(), branching=None, doubt=weighting.doubt or doubt)
    # Tensors that the loss function creates on each run are gone by now.
    staging.stage_also([leaf for leaf in (reference() for reference in foreign) if leaf is not None])
    return weighting, deviation, moves


def _inferred(
    work: Work,
    sizes: Sequence[int],
    staging: Staging,
    model: nn.Module,
    decides: bool,
    double: Callable[[int, int], Work] | None,
    arithmetic: Arithmetic,
    *,
    by_operations: bool,
) -> tuple[Weighting | None, Deviation, Moves, Sequence[weakref.ref[torch.Tensor]]] | None:
    """Return (weighting, deviation, changed state, other leaves reached), or None if draws could not be sliced."""
    samples, draws, reads = sum(sizes), Draws(by_operations=by_operations), Reads()
    with comparable(model, work.device) as traces, staging.swapped():
        staged, counts = staging.parameters(), candidate_counts(work, samples)
        # A stand-in would make compiled code recompile.
        look = MeasureLoss(work, model, probes_of(staged), counts, not is_compiled(model), model if decides else None)
        with draws.recording():
            whole, reached = look.at(0, samples, reads)
        if draws.unsliced and not by_operations:
            return None
        reads.moved = frozenset(traces.moved())

    def run(start: int, stop: int) -> torch.Tensor:
        given = work.inputs(start, stop, None)[0]
        with staging.swapped(), draws.sliced(start, stop, samples):
            return work.loss(work.forward(given))

    aside = partial(comparable, model, work.device)

    def measured(start: int, stop: int, reads: Reads) -> MeasuredLoss:
        with staging.swapped(), draws.sliced(start, stop, samples):
            return look.at(start, stop, reads)[0]

    def once_more(reads: Reads | None = None) -> MeasuredLoss:
        with aside() as traces:
            return noting_moves(reads := reads or Reads(), measured(0, samples, reads), traces.moved())

    floor = _floor_of(whole, once_more, model, staged)
    doubles = () if double is None else doubled(partial(_twice, double, staging), sizes, aside)
    rounds = rounds_of(
        reads, measured, Trial(run, sizes), doubles, aside, staging.swapped, _same, graphs=decides, draws=draws.drew
    )
    parts, moves = rounds.parts, rounds.moves
    if rounds.later is not None:
        calls = partial(_calls_twice, moves, model, partial(run, 0, samples), aside)
        if (decides and moves.deviation is None and calls()) or _choose(*rounds.later, counts, arithmetic, floor)[0] is None:
            moves = replace(moves, deviation=moves.misread())
    chosen, deviation = _choose(whole, parts, counts, arithmetic, floor)
    tried = decides, tried_on(work.device, model)
    chosen, moves = _with_decisions((chosen, moves), *tried, reads, rounds.looks, Again(whole, once_more, _same))
    return chosen, deviation, moves, _others(reached, staged)


def _with_decisions(
    found: tuple[Weighting | None, Moves],
    branches: bool,
    tried: Collection[type],
    reads: Reads,
    looks: Sequence[Reads],
    again: Again,
) -> tuple[Weighting | None, Moves]:
    """Add to what a proof found how the loss decides by values of the batch, and if asked which `branches` it has."""
    chosen, moves = found
    moves = replace(moves, decides=decided(reads, looks, again, tried=tried))
    if chosen is not None and branches and may_branch(reads, again, tried):
        chosen = replace(chosen, branching=branching_of([look.branches.made for look in (reads, *looks)]))
    return chosen, moves


def _floor_of(
    whole: MeasuredLoss, once_more: Callable[[], MeasuredLoss], model: nn.Module, parameters: Sequence[torch.Tensor]
) -> Callable[[], float]:
    """Return a function that measures the tolerance that follows from the last bits of the parameters, once."""

    @cache
    def floor() -> float:
        if is_sharded(model):
            return 0.0
        with last_bits_flipped(parameters):
            return floor_from(_difference(whole, [once_more()], [], None))

    return floor


def _others(
    leaves: Sequence[weakref.ref[torch.Tensor]], known: Sequence[torch.Tensor]
) -> Sequence[weakref.ref[torch.Tensor]]:
    there = {id(tensor) for tensor in known}
    return [leaf for leaf in leaves if id(leaf()) not in there]


def _same(one: MeasuredLoss, other: MeasuredLoss) -> bool:
    return same((one.loss, one.gradients), (other.loss, other.gradients))


def _calls_twice(
    moves: Moves, model: nn.Module, run: Callable[[], object], aside: Callable[[], AbstractContextManager[Any]]
) -> bool:
    """Whether a loss calls a model whose state moves more than once. The second forward reads what all samples of the first
    have moved. If it only branches on that (`argmax`), the values of a few samples show nothing."""
    if not moves.mixes:
        return False
    with aside(), Positions().watching() as watched:
        run()
    return watched.calls[id(model)] > 1


def _twice(double: Callable[[int, int], Work], staging: Staging, start: int, stop: int) -> Run:
    """Return what runs these samples twice."""
    work = double(start, stop)

    def run(low: int, high: int) -> torch.Tensor:
        with staging.swapped():
            return work.loss(work.forward(work.inputs(low, high, None)[0]))

    return run


def _choose(
    whole: MeasuredLoss,
    parts: Sequence[MeasuredLoss],
    counts: Sequence[LeafCount],
    arithmetic: Arithmetic,
    floor: Callable[[], float],
) -> tuple[Weighting | None, Deviation]:
    """Return (the weighting of these parts that makes the whole, the deviation). `floor` measures the tolerance that follows
    from the last bits of the parameters."""
    limit = max(tolerance(whole.dtype), max((tolerance(g.dtype) for g in whole.gradients if g is not None), default=0.0))
    if not any(measured.says_something for measured in (whole, *parts)):
        return None, Deviation("the loss", 0.0, limit)
    by_name = all(m.by_name for m in (whole, *parts))
    if all(m.only_term for m in (whole, *parts)):
        ways = [(Weighting("term", "by its mean's denominator", by_name=by_name), [p.term_count for p in parts])]
    else:
        watch = whole.terms > 0 and all(part.terms == whole.terms for part in parts)  # else they are means of one sample
        ways = [(Weighting("samples", "by samples", watch=watch, by_name=by_name), [float(p.samples) for p in parts])]
    if not whole.terms:
        ways += [
            (Weighting("count", f"by {count.label}", count=count, inferred=True), [p.counts[i] for p in parts])
            for i, count in enumerate(counts)
        ]
    tells_sums = all(part.says_something for part in parts)
    if tells_sums:
        ways.append((Weighting("sum", "as a sum"), []))
    how = how_divided(whole.divisors, [part.divisors for part in parts])
    tried = [(_difference(whole, parts, weights, how), weighting, weights) for weighting, weights in ways]
    best = min(difference for difference, _, _ in tried)
    if best > limit:  # even the right one is as far away as autocast rounds; then it is among the closest
        limit = max(limit, arithmetic.tolerance(whole.dtype))
        tried = sorted((each for each in tried if each[0] <= CLOSE * best), key=lambda each: each[0])
    if limit < best < MOST:  # or as the model makes of its last digits
        limit = max(limit, floor())
    fitting = [(weighting, weights) for difference, weighting, weights in tried if difference <= limit]
    deviation = Deviation("the loss", best, limit)
    if not fitting:
        return None, deviation
    chosen = replace(fitting[0][0], divided=how)
    if not tells_sums:
        chosen = replace(chosen, sums=_difference(whole, parts, [], how) <= limit)
    alike = all(_difference(whole, [part], [1.0], how) <= limit for part in parts)
    if not alike or any(m.of_batch for m in (whole, *parts)):  # all weights are right for what no batch changes
        chosen = _with_rivals(chosen, fitting[1:])
    looks = [(m.samples, m.decides) for m in (whole, *parts) if m.decides]
    idle = idle_in(whole.results, [part.results for part in parts], chosen.kind)
    limits = (whole.limits, [part.limits for part in parts])
    doubt = _doubt(looks, chosen.kind) or unreachable_in(*limits)
    return replace(chosen, doubt=doubt, idle=idle, limits=limits_in(*limits), alike=alike), deviation


def _doubt(looks: Sequence[tuple[int, Decides]], kind: str) -> str | None:
    """Return why a weighting that holds on these samples may fail on others. One known mean's denominator is checked in every
    micro-batch."""
    alone = None if kind == "term" else next((decides.how for _, decides in looks if decides.how), None)
    return alone or (told_by(looks) if looks else None)


def _with_rivals(chosen: Weighting, others: Sequence[tuple[Weighting, list[float]]]) -> Weighting:
    """Keep the counts (rivals) that these samples cannot tell from the chosen weighting, to check them on later batches."""
    if chosen.kind not in ("samples", "count") or chosen.watch:
        return chosen
    return replace(chosen, rivals=tuple(other.count for other, _ in others if other.count is not None))


def without_idle_rivals(weighting: Weighting, whole: Callable[[], Any]) -> Weighting:
    """Drops rivals of a weighting by samples that count every entry of the batch `whole()`, to save counting parts."""
    if weighting.kind != "samples" or not weighting.rivals:
        return weighting
    batch = whole()
    idle = [isinstance(rival, LeafCount) and rival.counts_all(batch) for rival in weighting.rivals]
    return replace(weighting, rivals=tuple(rival for rival, is_idle in zip(weighting.rivals, idle) if not is_idle))


def _difference(
    whole: MeasuredLoss, parts: Sequence[MeasuredLoss], weights: list[float], how: Sequence[How] | None
) -> float:
    """Return the relative difference between the whole's and the weighted parts' ([]: summed) loss and gradients, and between
    these weights and the loss's denominators."""
    total = sum(weights)
    if weights and total == 0:
        return float("inf")
    shares = [w / total for w in weights] if weights else [1.0] * len(parts)
    loss = sum(s * p.loss for s, p in zip(shares, parts) if s)
    error = abs(loss - whole.loss) / max(abs(whole.loss), 1e-12)
    squares, norm = 0.0, 0.0
    for i, gradient in enumerate(whole.gradients):
        pieces = [(s, p.gradients[i]) for s, p in zip(shares, parts) if s]
        known = [(s, g) for s, g in pieces if g is not None]
        if gradient is not None:
            known.append((-1.0, gradient))
            norm += sum(float(some.square().sum()) for (some,) in in_double(gradient))
        for some in in_double(*(g for _, g in known)) if known else ():
            off = sum(piece * share for piece, (share, _) in zip(some, known))
            squares += float(torch.as_tensor(off).square().sum())
    columns = list(zip(*(map(float, part.divisors or ()) for part in parts)))
    return max(error, (squares / max(norm, 1e-30)) ** 0.5, off_by(how or (), columns, weights))
