"""Plans for GPUs that this machine does not have: one, with its report, or many, compared.

A training is traced once for all cards that choose the same kernels. Cards that differ only in size and speed also share the
computed memory peaks. Not covered: scripts that call memfit.wrap, which plan for themselves (`scripts.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from memfit import _verbs as verbs
from memfit._errors import DoesNotFit, UsageError
from memfit._units import format_bytes
from memfit.autotune.absent_device import on_card, target_of
from memfit.hardware.budget import Budget, budget_for, card_named
from memfit.hardware.catalogue import Card, cards
from memfit.kernels.alike import noting_alike, step_of
from memfit.levers.precision import lower_precisions, script_precision
from memfit.planning.plan import Plan
from memfit.planning.search import Demand, Prices, search
from memfit.profiling.allocator import workspace_bytes
from memfit.profiling.profile import Profile
from memfit.profiling.roofline import bottleneck
from memfit.reporting.cards import Comparison, DeviceRow, in_order
from memfit.reporting.drawing import drawing_modules
from memfit.reporting.progress import Progress
from memfit.reporting.report import Report, made_now, make_report
from memfit.tracing.build_profile import trains_in_half

_HOST = torch.device("cpu")


@dataclass(frozen=True)
class TrainingSubject:
    """Describes a training to plan; one batch of its data is enough."""

    model: Any
    """The module; it may be on the meta device."""
    optimizer: Any
    """Its optimizer."""
    sample: Any
    """A batch."""
    loss_fn: Callable[[Any, Any], Any]
    """Maps (model, batch) to a scalar loss."""
    target_batch: int
    """Samples per optimizer step."""
    what: str = ""
    """What a sample is, in words."""
    lowered: bool = True
    """Whether to try a lower precision (autocast) if nothing else fits."""
    accumulate_in: str = "float32"
    """Precision that accumulates gradients of half precision parameters: float32, or param for their own."""

    @property
    def widens(self) -> bool:
        """Whether accumulated gradients take more bytes than the parameters."""
        return trains_in_half(self.model) and self.accumulate_in == "float32"


def named_card(text: str) -> Card:
    """Return the card of that name. Raises UsageError, also for devices that torch knows."""
    found = card_named(text)
    if found is None:
        raise UsageError(
            f"--device {text}",
            found="that is a device of this machine, not a card of the catalogue",
            next_move="omit it to plan for the model's device, or name a card, like a100-40gb, or a size, like 24GiB",
        )
    return found


def named_cards(text: str) -> tuple[Card, ...]:
    """Return the cards in a comma-separated list; "all" means the catalogue. Raises UsageError."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise UsageError(f"--devices {text!r}", found="it names none", next_move="write all, or names such as a100-40gb,24GiB")
    found = [one for name in names for one in (cards() if name.lower() == "all" else (named_card(name),))]
    return tuple({one.name: one for one in found}.values())


def planned_for(subject: TrainingSubject, card: Card, budget: int | float | str | None) -> Report:
    """Plan for a card and return the report. Raises DoesNotFit with what would be needed."""
    allowed = budget_for(card.as_device(), budget)
    plan, profile = _Traces(subject).plan(card, allowed)
    return make_report(
        plan=plan,
        profile=profile,
        budget=allowed,
        events=(),
        stats={},
        seconds=(),
        waits=(),
        asked={"target_batch": str(subject.target_batch), "accumulate_in": subject.accumulate_in},
        verification=None,
        script_precision=script_precision(subject.model.parameters(), _HOST),
        draws=drawing_modules(subject.model),
    )


def compared(subject: TrainingSubject, wanted: Sequence[Card], budget: int | float | str | None, bar: Progress) -> Comparison:
    """Plan for each of these cards and compare the plans. Raises UsageError for an invalid budget."""
    traces, rows = _Traces(subject), []
    allowed = [budget_for(card.as_device(), budget) for card in wanted]
    for card, budget_there in zip(wanted, allowed):
        bar.say(card.title)
        rows.append(_row(traces, card, budget_there))
        bar.advance()
    facts = traces.facts
    return Comparison(
        model=facts.name,
        parameters=facts.parameters,
        optimizer=facts.optimizer,
        target_batch=subject.target_batch,
        batch=subject.what,
        rows=in_order(rows),
        made=made_now(),
    )


def _row(traces: _Traces, card: Card, budget: Budget) -> DeviceRow:
    name = card.name if card.vendor else format_bytes(card.memory).replace(" ", "")
    common: dict[str, Any] = {"device": name, "title": card.title, "memory": card.memory, "limit": budget.limit}
    try:
        plan, profile = traces.plan(card, budget)
    except DoesNotFit as error:
        return DeviceRow(**common, fits=False, needs=error.enough)
    seconds = plan.predicted.seconds
    return DeviceRow(
        **common,
        fits=True,
        needs=plan.held + plan.predicted.upper,
        micro_batch=plan.micro_batch,
        accumulation=plan.accumulation,
        checkpoint=len(plan.checkpoint),
        blocks=len(profile.blocks) + len(profile.script_blocks),
        precision=profile.precision,
        seconds=seconds,
        samples_per_second=plan.share / seconds if seconds else None,
        bottleneck=bottleneck(profile, card, plan.micro_batch) if seconds else "",
    )


def _standing(profile: Profile) -> int:
    """Bytes of parameters, gradients and optimizer state: autocast to a lower precision does not reduce them."""
    facts = profile.model
    return facts.parameter_bytes + facts.gradient_bytes + (profile.optimizer_bytes or 0)


@dataclass
class _Traces:
    """The profiles traced so far, by precision and by the kernels chosen."""

    subject: TrainingSubject
    _found: list[tuple[str, frozenset[tuple[int, int]], Profile]] = field(default_factory=list)
    _prices: dict[tuple[int, int], Prices] = field(default_factory=dict)

    @property
    def facts(self) -> Any:
        """What identifies the model; known after the first trace."""
        return self._found[0][2].model

    def plan(self, card: Card, budget: Budget) -> tuple[Plan, Profile]:
        """Return the plan for a card and the profile behind it. Raises DoesNotFit."""
        try:
            return self._in(card, budget, "off")
        except DoesNotFit as error:
            own = error
        if _standing(self._profile(card, "off")) > budget.room:
            raise own
        for precision in self._lower(card):
            try:
                plan, profile = self._in(card, budget, precision)
            except DoesNotFit:
                continue
            why = f"because nothing fits in {self._profile(card, 'off').precision}"
            note = f"computes in {precision}, {why}; how far that moves the gradient is unknown until it runs there"
            return replace(plan, notes=(*plan.notes, note)), profile
        raise own

    def _in(self, card: Card, budget: Budget, precision: str) -> tuple[Plan, Profile]:
        profile = self._profile(card, precision)
        demand = Demand(self.subject.target_batch, self.subject.target_batch)
        key = (id(profile.timeline), workspace_bytes(profile.capability))
        plan = search([profile], budget, demand, self._prices.setdefault(key, Prices()))
        return plan, profile

    def _profile(self, card: Card, precision: str) -> Profile:
        """The profile on a card: kernels as traced, seconds modelled."""
        target = target_of(card)
        assert target is not None
        here = step_of(target.capability)
        found = next((p for lever, steps, p in self._found if lever == precision and here in steps), None)
        if found is None:
            found = self._traced(card, precision)
        return on_card(found, card)

    def _traced(self, card: Card, precision: str) -> Profile:
        subject = self.subject
        with noting_alike() as alike:
            found = verbs.profile(
                subject.model,
                subject.optimizer,
                subject.sample,
                loss_fn=subject.loss_fn,
                device=card.name,
                precision=precision,
                accumulate_in=subject.accumulate_in,
            )
        self._found.append((precision, frozenset(alike), found))
        return found

    def _lower(self, card: Card) -> tuple[str, ...]:
        if not self.subject.lowered:
            return ()
        fast = card.as_device().fast_dtypes
        return tuple(p for p in lower_precisions(self.subject.model.parameters(), _HOST) if p in fast)
