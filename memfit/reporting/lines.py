"""The first screen in words, the same in every view: does it fit, what changed, is it the same training, what did it
cost, what next.

Not covered: layout; the tables behind it (`tables.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from memfit._units import format_bytes, format_count, format_seconds
from memfit.planning.plan import Option
from memfit.reporting.advice import next_moves
from memfit.reporting.facts import Moment
from memfit.reporting.report import Report
from memfit.reporting.words import blocks_listed, count, listed, percent, speed, unit_for


@dataclass(frozen=True)
class Row:
    """A line of the comparison."""

    name: str
    """What is compared."""
    asked: str
    """As the script asked."""
    here: str
    """With memfit."""
    remark: str
    """What to know about it."""


@dataclass(frozen=True)
class Entry:
    """A labelled answer."""

    label: str
    """The question, in a word or two."""
    lines: tuple[str, ...]
    """The answer."""
    tone: str = ""
    """good, bad or open; "" for what is neither."""


def headline(report: Report) -> str:
    """What it is about."""
    size = "" if report.parameters is None else f", {format_count(report.parameters)} parameters"
    return f"{report.plan.model}{size}, {report.plan.optimizer}, on {report.allowance.device} ({report.allowance.kind})"


def verdict(report: Report) -> Entry:
    """Does it fit?"""
    plan, allowance = report.plan, report.allowance
    expected, most = plan.predicted.peak + plan.held, plan.predicted.upper + plan.held
    numbers = f"{format_bytes(expected)} expected, at most {format_bytes(most)}"
    budget = f"{format_bytes(allowance.limit)} ({allowance.source}), {format_bytes(allowance.margin)} of it kept free"
    if not report.fits:
        return Entry("does not fit", (f"{numbers}, of {budget}",), "bad")
    peak = report.pace.peak
    if peak is not None and peak > allowance.limit:
        return Entry("over budget", (f"{format_bytes(peak)} measured; {numbers}, of {budget}",), "bad")
    return Entry("fits", (f"{numbers}, of {budget}",), "good")


# ---- what changed


def comparison(report: Report) -> tuple[Row, ...]:
    """As the script asked, against with memfit."""
    return (_batch(report), _memory(report), _seconds(report), _checkpoint(report), _precision(report))


def _batch(report: Report) -> Row:
    plan = report.plan
    total = plan.target_batch or plan.share * report.ranks * report.iterations
    exact = plan.micro_batch * plan.accumulation == plan.share
    factors = {f"micro{'' if exact else ' (at most)'}": plan.micro_batch, "accumulation": plan.accumulation}
    factors["ranks"] = report.ranks
    if report.iterations > 1:
        factors["your iterations"] = report.iterations
    product = f"{total:,} {'=' if exact else 'as'} {' x '.join(map(str, factors.values()))}"
    remark = " x ".join(factors) + ("; by size of sample" if plan.by_size else "")
    return Row("batch", f"{total:,}", product, remark)


def _memory(report: Report) -> Row:
    plan, allowance = report.plan, report.allowance
    fits = plan.asked.upper + plan.held <= allowance.limit - allowance.margin
    asked = format_bytes(plan.asked.peak + plan.held) + ("" if fits else ", does not fit")
    here = f"{format_bytes(plan.predicted.peak + plan.held)} of {format_bytes(allowance.limit)}"
    peak = report.pace.peak
    return Row("memory", asked, here, "predicted" + ("" if peak is None else f"; measured {format_bytes(peak)}"))


def _seconds(report: Report) -> Row:
    plan, allowance = report.plan, report.allowance
    runs = plan.asked.seconds is not None and plan.asked.upper + plan.held <= allowance.limit - allowance.margin
    asked = format_seconds(plan.asked.seconds) if runs and plan.asked.seconds is not None else "-"
    here = "-" if plan.predicted.seconds is None else format_seconds(plan.predicted.seconds)
    said = ["predicted"] if plan.predicted.seconds is not None else []
    said += [f"measured {format_seconds(median(report.pace.seconds))}"] if report.pace.seconds else []
    by_hand = halved_by_hand(report)
    if by_hand is not None and by_hand.cost.seconds is not None and plan.predicted.seconds is not None:
        differs = speed(by_hand.cost.seconds, plan.predicted.seconds)
        at = f"{by_hand.micro_batch} x {by_hand.accumulation}"
        said += [f"halving by hand would land at {at}, {differs}"] if differs != "as fast" else []
    return Row("per step", asked, here, "; ".join(said))


def halved_by_hand(report: Report) -> Option | None:
    """Where halving the batch until it fits would have ended; None where the whole batch fits or that is this plan."""
    plan = report.plan
    plain = {o.micro_batch: o for o in plan.options if o.precision == "off" and not o.checkpoint and o.fits}
    if plan.share in plain or plan.by_size:
        return None
    halves = (-(-plan.share // 2**k) for k in range(1, plan.share.bit_length()))
    found = next((plain[size] for size in halves if size in plain), None)
    return None if found is None or found.micro_batch == plan.micro_batch else found


def _checkpoint(report: Report) -> Row:
    own, ours = len(report.script_blocks), len(report.plan.checkpoint)
    of = "" if report.block_count is None else f" of {report.block_count}"
    remark = blocks_listed(report.plan.checkpoint)
    if own:
        remark = f"{count(own, 'block')} by your script{'; ' + remark if remark else ''}"
    noun = " blocks" if report.block_count != 1 else " block"
    unknown = report.block_count is None
    return Row("checkpoint", "-" if unknown else f"{own}{of}{noun}", f"{own + ours}{of}{noun}", remark)


def _precision(report: Report) -> Row:
    lower = report.plan.precision != "off"
    here = report.plan.precision if lower else report.script_precision
    remark = "autocast around each micro-batch: moves the gradient" if lower else ""
    return Row("precision", report.script_precision, here, remark)


# ---- the answers below it


def answers(report: Report) -> tuple[Entry, ...]:
    """The same training? What did it cost? What next?"""
    found = (
        _same(report),
        Entry("not the same", tuple(not_equal(report)), "open"),
        Entry("it costs", tuple(_cost(report))),
        Entry("memory holds", tuple(_holds(report))),
        Entry("happened", tuple(_happened(report))),
        Entry("next", next_moves(report)),
    )
    return tuple(entry for entry in found if entry.lines)


def _same(report: Report) -> Entry:
    verification = report.verification
    if verification is None:
        return Entry("same training", ("not verified yet: memfit.verify(run)",), "open")
    return Entry("same training", tuple(str(verification).splitlines()), "good" if verification.passed else "bad")


_DIFFERING = ("batchnorm", "batch norm", "dropout")


def not_equal(report: Report) -> Iterator[str]:
    """What could not be kept equal."""
    said = [e.message for e in report.events if e.kind == "not equal"]
    notes = [*(e.message for e in report.events if e.kind == "note"), *report.notes]
    said += [note for note in notes if any(word in note.lower() for word in _DIFFERING)]
    if report.batch_norms and report.plan.accumulation > 1 and not any("norm" in line.lower() for line in said):
        said.append(f"BatchNorm takes its statistics from each micro-batch ({listed(report.batch_norms, 3)})")
    yield from dict.fromkeys(said)


def _cost(report: Report) -> Iterator[str]:
    pace, plan = report.pace, report.plan
    if pace.seconds:
        rate = "" if pace.samples_per_second is None else f", {pace.samples_per_second:.3g} samples/s"
        steps = count(min(pace.steps, len(pace.seconds)), "step")
        yield f"{format_seconds(median(pace.seconds))} per step, the median of {steps}{rate}"
    elif plan.predicted.seconds is not None:
        yield f"{format_seconds(plan.predicted.seconds)} per step, predicted"
    again = sum(b.recompute or 0.0 for b in report.blocks if b.checkpointed == "memfit")
    if again and plan.predicted.seconds:
        blocks = count(len(plan.checkpoint), "block")
        share = percent(again / plan.predicted.seconds)
        yield f"running {blocks} again takes about {format_seconds(again)} of it ({share})"
    if plan.mode == "replay":
        kept = f", but for {plan.keep} of {plan.accumulation}" if plan.keep else ""
        yield f"two passes, because the loss needs the whole output: every forward runs again{kept}"


def _holds(report: Report) -> Iterator[str]:
    if report.curve is None:
        return
    peak = report.curve.peak
    unit, name = unit_for([peak.total])
    parts = "   ".join(f"{kind} {size / unit:.1f}" for kind, size in peak.holds if size >= 0.05 * unit)
    yield f"{parts}   ({name}, {at_moment(peak)})"


def at_moment(moment: Moment) -> str:
    """Where in the step a moment lies."""
    return f"in {moment.phase}" + (f" at {moment.where}" if moment.where else "")


def _happened(report: Report) -> Iterator[str]:
    notable = [e for e in report.events if e.kind not in ("plan", "not equal")]
    if len(notable) > 3:
        yield f"{count(len(notable) - 3, 'earlier event')}"
    yield from (f"step {e.step}: {e.message}" for e in notable[-3:])
