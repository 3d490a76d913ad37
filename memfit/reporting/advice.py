"""Turns a report's numbers into advice, in words.

Not covered: advice that needs another run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from memfit._units import count, format_bytes, format_seconds
from memfit.reporting.facts import Offer
from memfit.reporting.pace import loader_share, typical_wait
from memfit.reporting.words import instead, less_or_more, percent, speed

if TYPE_CHECKING:
    from memfit.reporting.report import Report

WAITING = 0.05
"""Fraction of the time from batch to batch spent waiting for the loader, above which the report mentions it."""


def next_moves(report: Report) -> tuple[str, ...]:
    """Return what the reader can do next, the most useful first."""
    moves = (_fit, _memory, _loader, _own_checkpoints, _precision)
    return tuple(line for move in moves for line in move(report))


def one_step(report: Report) -> tuple[str, ...]:
    """Return one step of each lever that fits and saves memory or time."""
    found = []
    for offer in report.offers:
        gives = offer.more < 0 or (offer.seconds is not None and offer.seconds < 0)
        if offer.lever in ("micro-batch", "checkpoint") and not offer.missing and gives:
            gain = _other(report, offer).removeprefix(instead(offer, report.plan))
            found.append(f"{instead(offer, report.plan)}: {less_or_more(offer.more)}{gain}")
    return tuple(found)


def _fit(report: Report) -> Iterator[str]:
    if not report.fits:
        need = report.allowance.limit - report.room
        yield f"give it budget={format_bytes(need).replace(' ', '')!r} or more, or plan again within this budget"
    peak = report.pace.peak
    if peak is not None and peak > report.allowance.limit:
        over = format_bytes(peak - report.allowance.limit)
        heap = ", or let the C library return freed memory (docs/memory.md)" if report.allowance.kind == "cpu" else ""
        yield f"reduce the budget by {over}, the measured excess{heap}"


def _memory(report: Report) -> Iterator[str]:
    now = report.plan.predicted.seconds
    offers = [offer for offer in report.offers if offer.lever == "budget"]
    if offers:
        least, best = min(offers, key=lambda o: o.missing), min(offers, key=lambda o: o.seconds or 0.0)
        for offer in dict.fromkeys((least, best)):
            yield f"with {format_bytes(offer.missing)} more: {_other(report, offer)}"
    elif report.curve is not None and now is not None and not report.plan.by_size:
        yield "more memory would not make it faster"


def _other(report: Report, offer: Offer) -> str:
    now = report.plan.predicted.seconds
    gain = f", {speed(now + offer.seconds, now)}" if now is not None and offer.seconds is not None else ""
    return f"{instead(offer, report.plan)}{gain}"


def _loader(report: Report) -> Iterator[str]:
    share = loader_share(report)
    if share is None or share <= WAITING:
        return
    pin = " and pin_memory=True" if report.allowance.kind in ("cuda", "xpu") else ""
    wait = format_seconds(typical_wait(report.pace))
    yield (
        f"the loop waits {wait} per batch ({percent(share)} of the time): "
        f"more loader workers (num_workers=){pin} would overlap that with compute"
    )


def _own_checkpoints(report: Report) -> Iterator[str]:
    own = [b for b in report.blocks if b.checkpointed == "the script"]
    again = sum(b.recompute or 0.0 for b in own)
    now = report.plan.predicted.seconds
    if own and again and now:
        yield (
            f"your script checkpoints {count(len(own), 'block')}, which takes about {percent(again / now)} of a step; "
            f"{format_bytes(max(0, report.room))} are free: try without"
        )


def _precision(report: Report) -> Iterator[str]:
    now = report.plan.predicted.seconds
    for offer in report.offers:
        if offer.lever == "precision" and offer.seconds is not None and now is not None and offer.seconds < 0:
            name = offer.precision if offer.precision != "off" else report.script_precision
            yield f"{name}: {speed(now + offer.seconds, now)}, but moves the gradient"
