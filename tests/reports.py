"""Reports to look at: one whose numbers can be checked with pencil and paper, one full of names that want to be markup."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import handmade

from memfit.planning.plan import Plan
from memfit.planning.search import Demand, search
from memfit.profiling.profile import Profile
from memfit.profiling.seconds import Timing
from memfit.reporting.facts import BatchChange
from memfit.reporting.report import Report, make_report
from memfit.reporting.verification import Verification

HOSTILE = "<script>alert(1)</script>"
HARMFUL = f'{HOSTILE}<img src=x onerror="alert(2)">[a](javascript:alert(3))|`*_\x1b[31m[red]'

SAME = Verification(3.1e-8, 2.8e-8, 24, (5, 8, 11), "a.weight", 4e-8, 1e-9, 1e-6)


def event(step: int, kind: str, message: str) -> SimpleNamespace:
    """What a run's events look like from here."""
    return SimpleNamespace(step=step, kind=kind, message=message)


def profile(**fields: Any) -> Profile:
    """Two blocks of 10 + 1 kept bytes per sample; a micro-batch takes 1 s and 0.1 s per sample, a block's forward 10 ms."""
    given: dict[str, Any] = {
        "blocks": ("a", "b"),
        "timings": tuple(Timing(n, 1 + 0.1 * n, 0.3, (("a", 0.01 * n), ("b", 0.01 * n))) for n in (1, 2, 4, 16)),
        "optimizer_seconds": 0.5,
    }
    return handmade.profile(handmade.two_blocks(), **(given | fields))


def planned(room: int = 400, share: int = 16, prof: Profile | None = None, **demand: Any) -> Plan:
    """The plan that the search makes of that profile in this much room."""
    return search([prof or profile()], handmade.budget(room), Demand(share=share, target_batch=share, **demand))


def report(room: int = 400, share: int = 16, prof: Profile | None = None, **fields: Any) -> Report:
    """A report of that plan; `fields` are further arguments of make_report, or replace what the plan says."""
    prof = prof or profile()
    given: dict[str, Any] = {
        "plan": planned(room, share, prof),
        "profile": prof,
        "budget": handmade.budget(room),
        "events": (),
        "stats": {"step": 0, "samples_per_second": None, "peak_measured": None},
        "seconds": (),
        "waits": (),
        "asked": {"target_batch": str(share)},
        "verification": None,
        "script_precision": "float32",
    }
    return make_report(**(given | fields))


def ragged() -> Report:
    """A report of samples that differ in size: 5 to 2 of them at a time."""
    by_size = ((100, 5, 8), (200, 3, 4), (300, 2, 2))
    return report(330, plan=replace(planned(330), by_size=by_size, median=200))


def hostile() -> Report:
    """A report in which every name is out to be markup, and everything there can be is there."""
    prof = profile()
    facts = replace(prof.model, name=HARMFUL, optimizer=HARMFUL)
    timeline = prof.timeline
    assert timeline is not None
    owners = tuple(f"{owner}{HARMFUL}" if owner else "" for owner in timeline.owners)
    visits = tuple(replace(v, block=f"{v.block}{HARMFUL}") for v in timeline.visits)
    blocks = tuple(f"{name}{HARMFUL}" for name in prof.blocks)
    timings = tuple(replace(t, blocks=tuple((f"{b}{HARMFUL}", s) for b, s in t.blocks)) for t in prof.timings)
    prof = replace(
        prof,
        model=facts,
        timeline=replace(timeline, owners=owners, visits=visits),
        blocks=blocks,
        timings=timings,
        notes=(HARMFUL,),
        written_buffers=(f"{HARMFUL}.running_mean",),
    )
    budget = handmade.budget(500)
    device = replace(budget.device, name=HARMFUL, notes=(HARMFUL,))
    kinds = ("plan", "replan", "out of memory", "not equal", "note", HARMFUL)
    return report(
        500,
        prof=prof,
        plan=replace(planned(500, prof=prof), device=HARMFUL, by_size=((100, 4, 5), (200, 2, 3))),
        budget=replace(budget, device=device, source=HARMFUL, notes=(HARMFUL,)),
        events=[event(n, kind, HARMFUL) for n, kind in enumerate(kinds)],
        stats={"step": 30, "samples_per_second": 7.0, "peak_measured": 450},
        seconds=[1.0 + 0.1 * (n % 4) for n in range(30)],
        waits=[0.5 + 0.1 * (n % 3) for n in range(30)],
        asked={HARMFUL: HARMFUL},
        verification=replace(SAME, worst_parameter=HARMFUL, unsliced=(HARMFUL,), notes=(HARMFUL,), tolerance=0.0),
        script_precision=HARMFUL,
        change=BatchChange(4, 16, (0.1, 0.01)),
    )
