"""Who trains along: this process alone (`Solo`), or together with other ranks (`Team`). Both answer the same calls."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.optim import Optimizer

from memfit.distributed.overlap import Overlap
from memfit.distributed.reduction import StepReduction
from memfit.distributed.step_sync import CatchUp
from memfit.distributed.unwrap_ddp import TakenOver
from memfit.engine.gradients import reshard_model
from memfit.engine.handover import Total
from memfit.engine.staged import Staging
from memfit.engine.weighting import Weighting
from memfit.planning.plan import Plan
from memfit.ranks.ranks import Ranks
from memfit.runtime.rank_facts import FactsExchange, RankFacts


class Solo:
    """Trains in this process alone."""

    rank_facts: FactsExchange | None = None
    """What the ranks tell each other about themselves."""

    @property
    def alone(self) -> bool:
        """Whether there are no other ranks."""
        return self.reduction is None

    @property
    def ranks(self) -> Ranks | None:
        """This rank and the others."""
        return None

    @property
    def reduction(self) -> StepReduction | None:
        """Combines gradients with the other ranks."""
        return None

    @property
    def overlap(self) -> Overlap | None:
        """What reduces gradients during the last micro-batch, if anything does."""
        return None

    @property
    def facts(self) -> tuple[RankFacts, ...]:
        """What all ranks have told about themselves."""
        return ()

    def in_all(self, plan: Plan | None) -> Plan | None:
        """Return this rank's plan together with the plans of all ranks."""
        return plan

    def announcing(self) -> AbstractContextManager[None]:
        """Return the context manager that announces a failure to the other ranks, which would wait for this one."""
        return nullcontext()

    def computing(self, *, again: bool = False) -> AbstractContextManager[None]:
        """Return the context manager that times micro-batches, to know each rank's speed; see `FactsExchange.computing`."""
        return nullcontext()

    def combine(
        self, total: Total, weighting: Weighting, *, half: bool, unproven: bool, divided: bool
    ) -> Weighting | None:
        """Combine this rank's total with those of all ranks, in place; see `StepReduction.combine`."""
        return None

    def loss_is_whole(self, whole: bool) -> None:
        """Tell whether this rank's loss takes all samples of its share together."""

    def agree_whole(self) -> None:
        """Wait until the losses of all ranks take all samples of their shares together."""

    def rest(self, *, alone: bool = False) -> None:
        """Return control to the script; `alone`: after work that other ranks need not do."""

    def rebuild(self) -> None:
        """Begin again after the model's parameters were replaced."""

    def step(self, optimizer: Optimizer, *, whole: bool) -> int | None:
        """Take the optimizer step of step mode; see `CatchUp.step`."""
        optimizer.step()
        return None

    def stepped(self) -> None:
        """Mark an optimizer step as done."""


class Team(Solo):
    """Trains together with other ranks. `overlaps`: gradients may be reduced during the last micro-batch."""

    def __init__(
        self, ranks: Ranks, model: nn.Module, staging: Staging, taken: TakenOver | None, *, overlaps: bool
    ) -> None:
        self._ranks, self._model, self._taken = ranks, model, taken
        self._reduction = StepReduction(ranks, model, staging, taken, overlaps=overlaps)
        self._catch_up: CatchUp | None = None

    @property
    def ranks(self) -> Ranks:
        """This rank and the others."""
        return self._ranks

    @property
    def reduction(self) -> StepReduction:
        """Combines gradients with the other ranks."""
        return self._reduction

    def take_steps(self, optimizer: Optimizer) -> None:
        """Take the steps of this optimizer in sync from now on, as in step mode."""
        self._catch_up = CatchUp(self.ranks, self._model, optimizer)

    def exchange(self, rank_facts: FactsExchange) -> None:
        """Tell the other ranks these facts about this one from now on."""
        self.rank_facts = self.reduction.reporter = rank_facts

    @property
    def overlap(self) -> Overlap | None:
        """What reduces gradients during the last micro-batch, if anything does."""
        return self.reduction.overlap

    @property
    def facts(self) -> tuple[RankFacts, ...]:
        """What all ranks have told about themselves."""
        return () if self.rank_facts is None else self.rank_facts.facts

    def in_all(self, plan: Plan | None) -> Plan | None:
        """Return this rank's plan together with the plans of all ranks."""
        return plan if self.rank_facts is None else self.rank_facts.in_all(plan)

    def announcing(self) -> AbstractContextManager[None]:
        """Return the context manager that announces a failure to the other ranks, which would wait for this one."""
        return self.reduction.announcing()

    def computing(self, *, again: bool = False) -> AbstractContextManager[None]:
        """Return the context manager that times micro-batches, to know each rank's speed; see `FactsExchange.computing`."""
        return nullcontext() if self.rank_facts is None else self.rank_facts.computing(again=again)

    def combine(
        self, total: Total, weighting: Weighting, *, half: bool, unproven: bool, divided: bool
    ) -> Weighting | None:
        """Combine this rank's total with those of all ranks, in place; see `StepReduction.combine`."""
        if self._taken is not None:
            self._taken.check_syncs()
        with nullcontext() if self.rank_facts is None else self.rank_facts.exchanging(_samples_in(total)):
            return self.reduction.combine(total, weighting, half=half, unproven=unproven, divided=divided)

    def loss_is_whole(self, whole: bool) -> None:
        """Tell whether this rank's loss takes all samples of its share together."""
        self.reduction.whole = whole

    def agree_whole(self) -> None:
        """Wait until the losses of all ranks take all samples of their shares together."""
        self.reduction.agree_whole()

    def rest(self, *, alone: bool = False) -> None:
        """Return control to the script; `alone`: after work that other ranks need not do. Reshards the parameters, so that they
        look the same on all ranks."""
        self.ranks.rest(alone=alone)
        reshard_model(self._model)

    def rebuild(self) -> None:
        """Begin again after the model's parameters were replaced, on all ranks."""
        self.reduction.rebuild()

    def step(self, optimizer: Optimizer, *, whole: bool) -> int | None:
        """Take the optimizer step of step mode in sync with the other ranks; see `CatchUp.step`."""
        if self._catch_up is None:
            return super().step(optimizer, whole=whole)
        return self._catch_up.step(whole=whole)

    def stepped(self) -> None:
        """Mark an optimizer step as done."""
        self.reduction.torn = False


def _samples_in(total: Total) -> float:
    """Return the samples in a total; 0 if its batch only stands in for none."""
    weight = total.weight
    if isinstance(weight, float) and not (weight and total.samples):
        return weight  # what memfit did not gather weighs by its samples
    return float(total.samples)
