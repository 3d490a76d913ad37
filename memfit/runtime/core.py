"""What script mode and step mode share: the staged model, its planner, events, and who does what with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from memfit._errors import Refused
from memfit.autotune.absent_device import CardMemory
from memfit.autotune.memory import Memory
from memfit.autotune.planner import Planner
from memfit.autotune.settings import Settings
from memfit.engine.buffers import WrittenBuffers
from memfit.engine.call_context import in_functional_call
from memfit.engine.gradients import bytes_here
from memfit.engine.inference_caches import Caches
from memfit.engine.modules import normalises_batches
from memfit.engine.staged import Staging
from memfit.engine.weighting import Weighting
from memfit.engine.work import Work
from memfit.hardware.budget import Budget
from memfit.levers.fsdp import FullySharded
from memfit.planning.plan import Plan
from memfit.profiling.profile import Profile
from memfit.reporting.stderr import tell
from memfit.reporting.verification import Verification
from memfit.runtime.accumulator import Accumulator
from memfit.runtime.events import Events
from memfit.runtime.module_flags import Flags
from memfit.runtime.plan_in_force import PlanInForce
from memfit.runtime.team import Solo

KEPT_SAMPLES = 32
"""Samples kept for `verify`."""


class Reference(Protocol):
    """A few samples of a run from which work can be made again; `verify` compares on them."""

    @property
    def samples(self) -> int:
        """The number of samples."""
        ...

    @property
    def weighting(self) -> Weighting:
        """How the samples are weighted."""
        ...

    @property
    def reversible(self) -> bool:
        """Whether the samples can be put in reverse order."""
        ...

    def work(self, samples: int, *, backwards: bool = False) -> Work:
        """Return work on the first `samples` samples, in reverse order if `backwards`."""
        ...


@dataclass(frozen=True)
class MadeReference:
    """A Reference made by a function."""

    samples: int
    """The number of samples."""
    weighting: Weighting
    """How the samples are weighted."""
    make: Callable[[int, bool], Work]
    """Maps (samples, backwards) to the work."""
    reversible: bool = True
    """Whether the samples can be put in reverse order."""

    def work(self, samples: int, *, backwards: bool = False) -> Work:
        """Return work on the first `samples` samples."""
        return self.make(samples, backwards)


class Core:
    """Holds the state of a run that both modes operate on."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, device: torch.device, budget: Budget, settings: Settings, compiled: bool
    ) -> None:
        self.model, self.optimizer, self.device, self.settings, self.compiled = model, optimizer, device, settings, compiled
        self.staging = Staging(model)
        self._trained = 0
        self._stage_outside()
        self.known = {id(p): p for p in model.parameters()}
        """The model's own parameters, by id."""
        self.buffers = WrittenBuffers(model)
        self.caches = Caches(model)
        self.events = Events()
        self.memory = (Memory if settings.card is None else CardMemory)(model, optimizer, device, budget)
        self.planner = Planner(model, optimizer, device, self.memory, settings, self.staging)
        self.in_force = PlanInForce(self)
        self.accumulator = Accumulator(self)
        self.team: Solo = Solo()
        """Who trains along."""
        self.least = 1
        """The fewest samples that the model can run: 2 if a single one fails or loses its dimension."""
        self.steps = 0
        self.owner: object = None
        self.reference: Reference | None = None
        self.verification: Verification | None = None
        self.reached: tuple[object, ...] = ()
        """What planning calls besides the model: loss_fn=, weight= and split= in step mode."""
        self.split = settings.split
        """The user's split=, if it cuts what the model is called with; None in step mode, where it cuts batches."""
        self.on_forget: list[Callable[[], None]] = []
        """Called when plans have to be made again."""
        self.on_parameters: list[Callable[[], None]] = []
        """Called when the parameters changed, so that everything known of the model has to be found again."""
        self.flags = Flags(model)
        """Tells kinds of calls and batches apart, besides their arguments."""
        self._level = "off"
        """What is sharded: off, optimizer, gradients or parameters."""

    def knows_parameters(self) -> bool:
        """Return whether the parameters in the model are its own. New ones that the optimizer trains (a grown head) are
        adopted, and everything is planned again. `functional_call` swaps in others temporarily: then False."""
        self._stage_outside()
        if self.staging.holds_only(self.known):
            return True
        trained = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        untrained = any(id(p) not in trained for p in self.model.parameters() if id(p) not in self.known)
        if untrained or self._level != "off" or in_functional_call():
            return False
        self.known = {id(p): p for p in self.model.parameters()}
        self.staging.outside = [p for p in self.staging.outside if id(p) not in self.known]
        self.team.rebuild()
        self.reference, self.flags = None, Flags(self.model)
        self.memory.train()
        for forget in (*self.on_parameters, *self.on_forget):
            forget()
        self.note("replan", "parameters were added or replaced: replanned")
        return True

    def _stage_outside(self) -> None:
        """Stage parameters that the optimizer trains and the model does not hold, such as a loss's, before any gradient reaches
        them: a restarted pass could not tell its own gradients from earlier ones."""
        trained = sum(len(group["params"]) for group in self.optimizer.param_groups)
        if trained != self._trained and self.staging.parts is None:
            self._trained, inside = trained, {id(p) for p in self.model.parameters()}
            of_groups = (p for group in self.optimizer.param_groups for p in group["params"])
            self.staging.stage_also([p for p in of_groups if id(p) not in inside])

    def train_sharded(self, level: str, stepped: Optimizer, parts: FullySharded | None = None) -> None:
        """Plan from now on for `stepped`, the optimizer of this rank's shard of the parameters. `parts` is given if the
        parameters themselves are sharded."""
        self.staging.parts, self._level = parts, level
        self.planner = Planner(
            self.model, stepped, self.device, self.memory, self.settings, self.staging, shard=level, parts=parts
        )

    @property
    def plan(self) -> Plan | None:
        """The plan in force."""
        return self.in_force.plan

    @property
    def profile(self) -> Profile | None:
        """The profile that the plan in force rests on."""
        return self.in_force.profile

    def normalises_batches(self) -> bool:
        """Return whether a module normalizes by the statistics of its batch (batch norm)."""
        return normalises_batches(self.model)

    def forbid_single_samples(self, why: str) -> None:
        """Run no micro-batch of a single sample from now on. Raises Refused if one was prescribed."""
        if self.in_force.prescribed == 1:
            raise Refused(
                "micro-batches of one sample, as micro_batch=1 asks",
                found=f"the model cannot run one sample as it runs several: {why}",
                next_move="pass micro_batch=2 or more; where squeeze() takes the batch's dimension, name the dimension meant",
            )
        self.least = 2
        self.planner.measurer.no_singles = True
        if self.in_force.prescribed == 2:
            self.note("note", f"micro-batches of 3 too: the model cannot run one sample as it runs several ({why})")

    def samples_of_all(self, samples: int) -> int:
        """Return the samples in a batch of all ranks: as if each had this many, and at least as many as target_batch
        implies."""
        return max(samples * self.settings.ranks, self.settings.together or 0)

    def tell(self, message: str) -> None:
        """Record a note and print it to stderr, once: something runs differently from what was asked."""
        if self.settings.rank == 0 and not any(event.message == message for event in self.events):
            tell(message)
        self.note("note", message)

    def note(self, kind: str, message: str) -> None:
        """Record an event."""
        self.events.add(self.steps, kind, message)

    def old_gradient_bytes(self) -> int:
        """Return the bytes of gradients that may still exist while the next batch runs. Before the first step it is unknown
        where the script calls zero_grad, so all gradients count."""
        trained = self.staging.parameters()
        there = trained if not self.steps else [p for p in trained if p.grad is not None]
        return sum(map(bytes_here, there))

    def forget(self) -> None:
        """Plan again for the next batch."""
        for forget in self.on_forget:
            forget()

    def allow_lower_precision(self, *, allowed: bool) -> None:
        """Say whether planning may lower the precision if nothing else fits and it is "auto"."""
        self.settings = self.planner.settings = replace(self.settings, lowers=allowed)

    def compute_in(self, precision: str, why: str) -> None:
        """Compute in this precision from the next plan on; `why` is reported."""
        if self.plan is not None and self.plan.precision != precision:
            self.forget()
        self.settings = replace(self.settings, precision=precision)
        self.planner.settings = self.settings
        ran = " (in earlier steps, ranks differed)" if self.steps else ""
        message = f"computes in {precision}, because {why}{ran}"
        if self.settings.rank == 0:
            tell(message)
        self.events.add(self.steps, "not equal", message)

    def proof_ran_out(self, tried: int, smaller: int, text: str) -> None:
        """Record that a proof ran out of memory and starts again on fewer samples."""
        message = f"a proof on {tried} samples ran out of memory ({text}); it restarted on {smaller}"
        self.events.add(self.steps, "out of memory", message)

