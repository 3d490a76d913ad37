"""What the ranks of a training tell each other about themselves: how fast they are, how they planned, what memory they hold.

A few numbers travel with the exchange that every step makes anyway. The rest is exchanged when something changed on any rank,
and from time to time. So all ranks know it in the same step, and rank 0 can report on all without asking. Not covered: time
that ranks spend outside their micro-batches (data loading, the script's own work).
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from memfit.autotune.timer import Laps
from memfit.distributed.load_balance import Speeds
from memfit.hardware.clock import Clock
from memfit.levers.precision import PRECISIONS
from memfit.loading.shares import Shares
from memfit.planning.balance import balanced, most_samples
from memfit.planning.plan import Plan
from memfit.profiling.timeline import CATEGORIES
from memfit.ranks.ranks import Ranks
from memfit.reporting.facts import RankFacts

if TYPE_CHECKING:
    from memfit.runtime.core import Core

STATED = 7
"""Numbers that every rank states about itself in each step."""
OFTEN = 64
"""Steps between full exchanges when nothing changed; the first ones come after 1, 2, 4, 8, ... steps."""
NEXT_EPOCH = 1 << 53
"""A number that no effective batch reaches: it defers new shares to the next epoch."""
DOING = "a training step"


class FactsExchange:
    """Exchanges facts about this rank (`core`) with all `ranks`. `peak()` returns this rank's peak memory.

    Attributes: `facts` (those of all ranks, by rank, as last told), `shares` (how effective batches are divided over ranks;
    None if memfit does not divide them).
    """

    def __init__(self, core: Core, ranks: Ranks, peak: Callable[[], int | None]) -> None:
        self.facts: tuple[RankFacts, ...] = ()
        self.shares: Shares | None = None
        self._core, self._ranks, self._peak = core, ranks, peak
        self._host = socket.gethostname()
        clock = Clock(core.device)
        self._computing, self._exchanging = Laps(clock), Laps(clock)
        self._thread: int | None = None
        self._speeds = Speeds()
        self._wanted: tuple[int, ...] | None = None
        self._seconds: tuple[float, ...] = ()
        self._told: tuple[Plan | None, int, bool] | None = None
        self._seen: tuple[Plan | None, tuple[RankFacts, ...], Plan | None] = (None, (), None)

    # ---- timing

    @contextmanager
    def computing(self, *, again: bool = False) -> Iterator[None]:
        """Context manager that times micro-batches. With `again` they run in whatever thread autograd uses."""
        if not again:
            self._thread = threading.get_ident()
        with self._computing.running():
            yield

    @contextmanager
    def exchanging(self, samples: float) -> Iterator[None]:
        """Context manager that times the reduction over all ranks. This rank contributes that many samples."""
        self._computing.ends(samples)
        with self._exchanging.running():
            yield
        self._exchanging.ends()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Context manager for waits on other ranks during micro-batches: they count as exchange, not as computing."""
        with self._computing.pausing(), self._exchanging.running():
            yield

    # ---- exchange

    def stated(self) -> list[float]:
        """Return what this rank states about itself in a step, as STATED numbers."""
        samples, seconds = self._computing.read()
        epoch, number = (0, 0) if self.shares is None else self.shares.position(self._thread)
        most = 0 if self._wanted is None else min(self._wanted[self._ranks.rank], self._most())
        tuning = self._core.in_force.tuning
        return [samples, seconds, float(epoch), float(number), float(most), float(tuning), float(self._changed())]

    def heard(self, told: Sequence[Sequence[float]], step: int) -> None:
        """Process what all ranks stated in a step. Every rank does the same."""
        samples, seconds, epochs, numbers, most, tuning, changed = zip(*told)
        self._exchanging.read()
        if any(changed) or step & (step - 1) == 0 or step % OFTEN == 0:
            self.meet(DOING)
        if self.shares is None or not all(numbers):
            return
        if self._wanted is not None:
            self._divide([int(each) for each in most], epochs, numbers)
            return
        more = self._speeds.heard(samples, seconds, steady=not any(tuning))
        found = self._speeds.better(self.shares.latest) if more else None
        if found is not None:
            size = sum(self.shares.latest)
            self._wanted, self._seconds = balanced(size, found, [size] * len(found)), found

    def meet(self, doing: str) -> None:
        """Exchange all facts between all ranks."""
        self._told = self._core.plan, len(self._core.events), self._peak() is not None
        before, self.facts = self.facts, tuple(self._ranks.gather(self._about(), doing))
        for old, new in zip(before, self.facts):
            if new.ran_out > old.ran_out and new.rank != self._ranks.rank:
                self._core.note("note", f"on rank {new.rank} {new.latest}")
        self._agree_on_precision()

    def _changed(self) -> bool:
        """Return whether there is news since the last exchange: another plan, events, the first measured peak."""
        if self._told is None:
            return True
        plan, events, measured = self._told
        return plan is not self._core.plan or events != len(self._core.events) or (not measured and self._peak() is not None)

    def in_all(self, plan: Plan | None) -> Plan | None:
        """Return this rank's plan together with the plans of all ranks."""
        seen, facts, found = self._seen
        if plan is None or (seen is plan and facts is self.facts):
            return None if plan is None else found
        told = tuple(each.plan for each in self.facts if each.plan is not None)
        found = replace(plan, ranks=told)
        self._seen = plan, self.facts, found
        return found

    def _about(self) -> RankFacts:
        core = self._core
        plan = core.plan
        ran_out = [event.message for event in core.events if event.kind == "out of memory"]
        allowed = core.memory.allowed
        return RankFacts(
            rank=self._ranks.rank,
            host=self._host,
            device=allowed.device.name,
            limit=allowed.limit if plan is None else plan.limit,
            steps=core.steps,
            plan=None if plan is None else plan.of_rank(self._ranks.rank),
            peak=self._peak(),
            computing=self._computing.typical(),
            exchange=self._exchanging.typical(),
            ran_out=len(ran_out),
            latest=ran_out[-1] if ran_out else "",
        )

    # ---- shares

    def _most(self) -> int:
        """Return the largest share that this rank has memory for. A prescribed plan and micro_batch="off" keep their share."""
        core, plan, profile = self._core, self._core.plan, self._core.profile
        if plan is None:
            return 0
        if profile is None or profile.timeline is None or core.settings.whole:
            return plan.share
        timeline = profile.timeline
        batch = timeline.per_sample[timeline.category == CATEGORIES.index("input")].sum()
        # (a batch may take memory on both host and device)
        return most_samples(plan, int(2 * batch) + core.planner.standing_per_sample)

    def _divide(self, most: Sequence[int], epochs: Sequence[float], numbers: Sequence[float]) -> None:
        """Divide the work as wanted, as far as every rank has memory for its share, starting with the first effective batch
        whose indices no rank has drawn yet."""
        assert self.shares is not None
        before, self._wanted = self.shares.latest, None
        most = [max(new, old) for new, old in zip(most, before)]
        found = balanced(sum(before), self._seconds, most)
        self._speeds.changed()
        if found == before:
            return
        now = min(numbers) > 0 and len(set(epochs)) == 1
        self.shares.change(int(max(numbers)) if now else NEXT_EPOCH, found)
        self._core.in_force.reshare(found[self._ranks.rank])
        self._computing.forget()
        self._exchanging.forget()
        of = " + ".join(f"{share:,}" for share in found)
        since = "" if now else " from the next epoch on"
        slower = max(self._seconds) / min(self._seconds)
        self._core.tell(
            f"ranks differ in speed by {slower:.2g}x: of {sum(found):,} samples per step they take {of}, by rank,{since} "
            "to keep all busy"
        )

    # ---- precision

    def _agree_on_precision(self) -> None:
        """Make all ranks compute in the lowest precision that any rank needs. Otherwise the gradient of a sample would depend
        on its rank."""
        planned = [each.plan for each in self.facts if each.plan is not None]
        found = {plan.precision for plan in planned}
        if len(found) < 2:
            return
        lowest = max(found, key=_lowness)
        who = ", ".join(str(plan.rank) for plan in planned if plan.precision == lowest)
        self._core.compute_in(lowest, f"rank {who} does: all ranks must agree, or gradients would differ by rank")


def _lowness(precision: str) -> int:
    return tuple(PRECISIONS).index(precision) if precision in PRECISIONS else 0
