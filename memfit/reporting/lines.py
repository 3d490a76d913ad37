"""Writes a report's first screen, the same in every view: does it fit, what changed, is the training the same, cost, advice.

Not covered: layout; the tables behind it (`tables.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from memfit._units import alike, count, format_bytes, format_count, format_seconds, in_unit, three_digits, unit_for
from memfit.planning.plan import Option
from memfit.planning.wording import OWN_PRECISION, cut, micro_batches
from memfit.reporting.advice import next_moves, one_step
from memfit.reporting.every import together
from memfit.reporting.facts import PhasePeak
from memfit.reporting.pace import asked_seconds, not_run_yet, seconds_of, steady
from memfit.reporting.rates import rate_rules
from memfit.reporting.words import alike_seconds, blocks_listed, listed, percent, speed

if TYPE_CHECKING:
    from memfit.reporting.report import Report

MODELLED = "modelled from its data sheet, not measured"
"""The source of seconds for a device that is not present."""


@dataclass(frozen=True)
class ComparisonRow:
    """A line of the comparison between the script's settings and memfit's."""

    name: str
    """What is compared."""
    asked: str
    """The value the script asked for."""
    here: str
    """The value with memfit."""
    remark: str
    """A remark on it."""


@dataclass(frozen=True)
class Answer:
    """A labelled answer."""

    label: str
    """The question, in a word or two."""
    lines: tuple[str, ...]
    """The answer."""
    tone: str = ""
    """good, bad or open; "" for none of these."""


def headline(report: Report) -> str:
    """Return one line on the model, the optimizer and the device."""
    size = "" if report.parameters is None else f", {format_count(report.parameters)} parameters"
    device = report.allowance
    kind = f" ({device.kind})" if device.kind else ""
    where = f"on {device.device}{kind}" if device.here else f"for {device.device}, which is not here"
    return f"{report.plan.model}{size}, {report.plan.optimizer}, {where}"


def verdict(report: Report) -> Answer:
    """Answer whether the training fits into memory."""
    plan, allowance, peak = report.plan, report.allowance, report.pace.peak
    expected, most, seen = alike(plan.predicted.peak + plan.held, plan.predicted.upper + plan.held, peak or 0)
    measured_too = "" if peak is None else f", {seen} measured"
    free = f"; {format_bytes(allowance.margin)} of it kept free" if allowance.margin else ""
    budget = f"budget {format_bytes(allowance.limit)}, {allowance.source}{free}"
    lines = (f"{expected} expected, {most} at most{measured_too}; {budget}", *_beyond(report))
    if not report.fits:
        return Answer("does not fit", lines, "bad")
    if peak is not None and peak > allowance.limit:
        return Answer("over budget", lines, "bad")
    as_is = plan.runs_whole and not plan.checkpoint and plan.precision == "off"
    return Answer("fits as is" if as_is else "fits", lines, "open" if exceeds(report) else "good")


def exceeds(report: Report) -> bool:
    """Return whether the measured peak exceeds the predicted upper bound by more than 1 %."""
    peak = report.pace.peak
    return peak is not None and peak > 1.01 * (report.plan.predicted.upper + report.plan.held)


def _beyond(report: Report) -> Iterator[str]:
    if exceeds(report):
        keeps = "the C library keeps freed memory as long as the budget has room for it (docs/memory.md)"
        usual = f": usually {keeps}" if report.allowance.kind == "cpu" else ""
        yield f"measured more than the predicted maximum{usual}"


# ---- what changed


def comparison(report: Report) -> tuple[ComparisonRow, ...]:
    """Return the rows that compare the script's settings with memfit's."""
    return (_batch(report), _memory(report), _seconds(report), _checkpoint(report), _precision(report))


def samples_per_step(report: Report) -> int:
    """Return the effective batch: samples per optimizer step over all ranks."""
    plan = report.plan
    own = sum(plan.shares) if len(plan.ranks) == report.ranks else plan.share * report.ranks
    return plan.target_batch or own * report.iterations


def _batch(report: Report) -> ComparisonRow:
    plan, total = report.plan, samples_per_step(report)
    here = cut(plan) if total == plan.share else f"{total:,}, of which {cut(plan)}"
    if plan.runs_whole and total == plan.share:
        return ComparisonRow("batch", f"{total:,}", here, "one forward and backward, as the script asked")
    return ComparisonRow("batch", f"{total:,}", here, " x ".join(_factors(report)) if total != plan.share else "")


def _factors(report: Report) -> Iterator[str]:
    """The factors of the effective batch: samples, ranks, the script's own accumulation."""
    shares = report.plan.shares
    if len(set(shares)) > 1:
        yield f"({' + '.join(f'{share:,}' for share in shares)} samples)"
    else:
        yield f"{report.plan.share:,} samples"
        if report.ranks > 1:
            yield f"{report.ranks} ranks"
    if report.iterations > 1:
        yield f"{report.iterations} of your iterations"


def _memory(report: Report) -> ComparisonRow:
    plan, allowance, peak = report.plan, report.allowance, report.pace.peak
    asked, here, seen = alike(plan.asked.peak + plan.held, plan.predicted.peak + plan.held, peak or 0)
    remark = "predicted" + ("" if peak is None else f"; measured {seen}")
    remark += ", above the predicted maximum" if exceeds(report) else ""
    return ComparisonRow("memory", asked + _whether_asked_fits(report), f"{here} of {format_bytes(allowance.limit)}", remark)


def _whether_asked_fits(report: Report) -> str:
    plan, allowance = report.plan, report.allowance
    if plan.asked.upper + plan.held <= allowance.limit - allowance.margin:
        return ""
    return ", does not fit" if plan.asked.peak + plan.held > allowance.limit else ", may not fit"


def _seconds(report: Report) -> ComparisonRow:
    plan, ran = report.plan, steady(report)
    known = (asked_seconds(report), plan.predicted.seconds, median(ran) if ran else None)
    words = iter(alike_seconds(*(seconds for seconds in known if seconds is not None)))
    asked, here, seen = (None if seconds is None else next(words) for seconds in known)
    if asked is not None and _whether_asked_fits(report):
        asked = f"{asked} if it fit"
    planned = "predicted" if report.allowance.here else MODELLED
    said = [planned] if here is not None else ["measured"] if seen is not None else []
    said += [f"measured {seen}"] if here is not None and seen is not None else []
    return ComparisonRow("per step", asked or "-", here or seen or "-", "; ".join(said))


def halved_by_hand(report: Report) -> Option | None:
    """Return the option at which halving the batch by hand would first fit. None where the whole batch fits, where that option
    is this plan, or where memory ran out, so that what fits is unknown."""
    plan = report.plan
    plain = {o.micro_batch: o for o in plan.options if o.precision == "off" and not o.checkpoint and o.fits}
    ran_out = any(event.kind == "out of memory" for event in report.events)
    half = -(-plan.share // 2)
    if plan.share in plain or plan.by_size or ran_out or all(o.micro_batch != half for o in plan.options):
        return None  # (the options may lack the halves of a share that changed during training)
    halves = (-(-plan.share // 2**k) for k in range(1, plan.share.bit_length()))
    found = next((plain[size] for size in halves if size in plain), None)
    return None if found is None or found.micro_batch == plan.micro_batch else found


def _checkpoint(report: Report) -> ComparisonRow:
    own, ours = len(report.script_blocks), len(report.plan.checkpoint)
    if report.block_count == 0:
        return ComparisonRow("checkpoint", "none", "none", "")
    of = f" of {report.block_count}"
    remark = blocks_listed(report.plan.checkpoint)
    if own:
        remark = f"{count(own, 'block')} by your script{'; ' + remark if remark else ''}"
    noun = " blocks" if report.block_count != 1 else " block"
    if report.block_count is None:  # a plan file knows only memfit's own checkpointed blocks
        return ComparisonRow("checkpoint", "the script's", f"{count(ours, 'block')} more" if ours else "the script's", remark)
    return ComparisonRow("checkpoint", f"{own}{of}{noun}", f"{own + ours}{of}{noun}", remark)


def _precision(report: Report) -> ComparisonRow:
    lower = report.plan.precision != "off"
    here = report.plan.precision if lower else report.script_precision
    remark = "autocast around each micro-batch: moves the gradient" if lower else ""
    return ComparisonRow("precision", report.script_precision, here, remark)


# ---- the answers below it


def answers(report: Report) -> tuple[Answer, ...]:
    """Return the answers below the comparison: is the training the same, what does it cost, what to do next."""
    found = (
        _same(report),
        Answer("not kept equal", tuple(not_equal(report)), "open"),
        Answer("learning rate", tuple(rate_rules(report.change, report.plan.optimizer)), "open"),
        Answer("ranks", tuple(together(report))),
        Answer("it costs", tuple(_cost(report))),
        Answer("memory holds", tuple(_holds(report))),
        Answer("so far", tuple(_so_far(report))),
        Answer("next", next_moves(report)),
        Answer("or else", one_step(report)),
    )
    return tuple(entry for entry in found if entry.lines)


def _same(report: Report) -> Answer:
    found = report.verification
    if found is None and report.plan.runs_whole and report.plan.precision == "off":
        return Answer("same training", ("the batch runs whole, as without memfit",), "good")
    if found is None:
        there = "" if report.allowance.here else " where it runs"
        return Answer("same training", (f"not verified yet: memfit.verify(run){there}",), "open")
    if not found.clear:
        return Answer("same training", found.lines(), "open")
    return Answer("same training" if found.passed else "NOT the same", found.lines(), "good" if found.passed else "bad")


def not_equal(report: Report) -> Iterator[str]:
    """Yield what could not be kept equal to the whole batch."""
    plan = report.plan
    cuts = not plan.runs_whole
    said = [event.message for event in report.events if event.kind == "not equal"]
    if plan.precision != "off":
        said += [note for note in plan.notes if plan.precision in note] or [f"computes in {plan.precision}"]
    if plan.accumulate_in == "param" and cuts:
        said.append(f"{OWN_PRECISION} (accumulate_in='param'), rounding at every micro-batch")
    if report.draws and cuts:
        where = listed(report.draws, 1)
        said.append(f"dropout: masks are drawn for each micro-batch, not for the whole batch (in {where})")
    if report.batch_norms and cuts and not any("norm" in line.lower() for line in said):
        said.append(f"BatchNorm takes its statistics from each micro-batch ({listed(report.batch_norms, 3)})")
    yield from dict.fromkeys(said)


def _cost(report: Report) -> Iterator[str]:
    plan, seconds = report.plan, steady(report)
    if seconds:
        rate = samples_per_step(report) / max(median(seconds), 1e-12)
        median_of = f" (median of {count(len(seconds), 'step')})" if len(seconds) > 1 else ""
        yield f"{format_seconds(median(seconds))} per step{median_of}, {three_digits(rate)} samples/s"
    elif plan.predicted.seconds is not None:
        if report.allowance.here:
            yield f"{format_seconds(plan.predicted.seconds)} per step, predicted"
        else:
            rate = samples_per_step(report) / max(plan.predicted.seconds, 1e-12)
            yield f"{format_seconds(plan.predicted.seconds)} per step, {three_digits(rate)} samples/s: {MODELLED}"
    yield from _against_others(report)
    again = sum(b.recompute or 0.0 for b in report.blocks if b.checkpointed == "memfit")
    if again and plan.predicted.seconds:
        blocks = count(len(plan.checkpoint), "block")
        share = percent(again / plan.predicted.seconds)
        yield f"recomputing {blocks} takes about {share} of it"
    if plan.mode == "replay":
        kept = f", except {plan.keep} of {plan.accumulation}" if plan.keep else ""
        yield f"two passes, because the loss needs the whole output: every forward runs again{kept}"


def _against_others(report: Report) -> Iterator[str]:
    by_hand, now = halved_by_hand(report), report.plan.predicted.seconds
    seconds = None if by_hand is None else seconds_of(by_hand, report)
    if by_hand is not None and seconds is not None and now is not None:
        differs = speed(seconds, now)
        at = micro_batches(by_hand, report.plan.share)
        yield f"halving the batch by hand until it fits would land at {at}: {differs}"


def _holds(report: Report) -> Iterator[str]:
    if report.curve is None:
        return
    holds = peak_holds(report)
    unit, name = unit_for([sum(size for _, size in holds)])
    parts = "   ".join(f"{kind} {in_unit(size, unit)}" for kind, size in holds if size >= 0.05 * unit)
    yield f"{parts}   ({name}, {at_moment(report.curve.peak)})"


def peak_holds(report: Report) -> tuple[tuple[str, int], ...]:
    """Return (category, bytes) at the step's peak; their sum is the expected peak."""
    plan = report.plan
    if report.curve is None:
        return tuple((kind, size) for kind, size in (("held", plan.held), ("training", plan.predicted.peak)) if size)
    peak = report.curve.peak
    found = {"held": plan.held, **dict(peak.holds)}
    # What the device holds for these tensors beyond their own bytes.
    found["other"] = found.get("other", 0) + max(0, plan.predicted.peak - peak.total)
    return tuple((kind, size) for kind, size in found.items() if size)


def at_moment(moment: PhasePeak) -> str:
    """Return where in the step a moment lies, in words."""
    return f"in {moment.phase}" + (f" at {moment.where}" if moment.where else "")


def _so_far(report: Report) -> Iterator[str]:
    """The latest events; once steps have run, each with the number of steps done before it."""
    notable = [e for e in report.events if e.kind not in ("plan", "not equal")]
    if len(notable) > 3:
        yield f"{count(len(notable) - 3, 'earlier event')}"
    for event in notable[-3:]:
        anew = "replanned: " if event.kind == "replan" and event.message.startswith("batch ") else ""
        yield f"{'' if not_run_yet(report) else f'step {event.step}: '}{anew}{event.message}"
