"""State that script mode and step mode share: the staged model, recovery, loss scale, events and the plan in force."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from memfit._errors import Refused
from memfit._units import format_bytes
from memfit.autotune.absent_device import CardMemory
from memfit.autotune.active_plan import Planned
from memfit.autotune.memory import Memory
from memfit.autotune.planner import Planner
from memfit.autotune.settings import Settings
from memfit.autotune.trim_heap import HeapWatch
from memfit.autotune.tuner import Tuner
from memfit.batches.pieces import equal_sizes, next_size, sizes
from memfit.distributed.overlap import Load
from memfit.distributed.reduction import StepReduction
from memfit.distributed.step_sync import CatchUp
from memfit.distributed.unwrap_ddp import TakenOver
from memfit.engine.accumulate import AroundLast, SharesDiffer, Work, accumulate
from memfit.engine.buffers import WrittenBuffers
from memfit.engine.call_context import Autocast, in_functional_call
from memfit.engine.compose_state import Composition
from memfit.engine.gradients import bytes_here
from memfit.engine.handover import Total
from memfit.engine.inference_caches import Caches
from memfit.engine.modules import normalises_batches
from memfit.engine.random_state import HostDraws
from memfit.engine.recovery import Recovery, RestartBatch
from memfit.engine.staged import Staging, check_nothing_escaped
from memfit.engine.weighting import Weighting
from memfit.hardware.budget import Budget
from memfit.levers.checkpoint import checkpoint_blocks
from memfit.levers.fsdp import FullySharded
from memfit.planning.plan import Plan
from memfit.planning.search import NORMS, WHOLE_NORMS
from memfit.profiling.profile import Profile
from memfit.reporting.stderr import tell
from memfit.reporting.verification import Verification
from memfit.runtime.batchnorm import WholeNorms
from memfit.runtime.events import Events
from memfit.runtime.loss_scale import HalfGraphs, LossScale, computes_in_half
from memfit.runtime.module_flags import Flags
from memfit.runtime.rank_facts import FactsExchange

NOTICEABLE = 8 << 20
"""Bytes that a new size of micro-batch may keep before it is not worth trying (a ResNet: 4 MiB resident, 40 reserved)."""
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
        self.scale, self.half_graphs = LossScale(), HalfGraphs()
        self.host_draws = HostDraws(self._missed_draws)
        self.recovery = Recovery(device, self.staging, self.buffers, self._ran_out, self.host_draws)
        self.active: Planned | None = None
        """What is in force for the batch that runs: plan, profile, tuner."""
        self.least = 1
        """The fewest samples that the model can run: 2 if a single one fails or loses its dimension."""
        self.steps = 0
        self.settled = False
        """Whether a step was seen to take no more memory than planned."""
        self.owner: object = None
        self.on_plan: Callable[[], None] = lambda: None
        self.fixed: Plan | None = None
        self.reference: Reference | None = None
        self.verification: Verification | None = None
        self.heap = HeapWatch()
        self.reduction: StepReduction | None = None
        """Combines gradients with the other ranks; None if this process trains alone."""
        self.catch_up: CatchUp | None = None
        """Takes optimizer steps in sync with the other ranks; None in script mode."""
        self.rank_facts: FactsExchange | None = None
        """What the ranks tell each other about themselves."""
        self.whole_norms = WholeNorms(model) if settings.batchnorm == "whole" else None
        self.reached: tuple[object, ...] = ()
        """What planning calls besides the model: loss_fn=, weight= and split= in step mode."""
        self.split = settings.split
        """The user's split=, if it cuts what the model is called with; None in step mode, where it cuts batches."""
        self.on_forget: list[Callable[[], None]] = []
        """Called when plans have to be made again."""
        self.on_parameters: list[Callable[[], None]] = []
        """Called when the parameters changed, so that everything known of the model has to be found again."""
        self.taken: TakenOver | None = None
        """The wrapper that the model came in (DistributedDataParallel, DataParallel), if any."""
        self.flags = Flags(model)
        """Tells kinds of calls and batches apart, besides their arguments."""
        self._undo_levers: Callable[[], None] = lambda: None
        self._checked_escapes = False
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
        if self.reduction is not None:
            self.reduction.rebuild()
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
        return None if self.active is None else self.active.plan

    @property
    def profile(self) -> Profile | None:
        """The profile that the plan in force rests on."""
        return None if self.active is None else self.active.profile

    def adopt(self, planned: Planned) -> None:
        """Put a new plan in force, and measure other micro-batch sizes beside it."""
        plan, before = planned.plan, self.plan
        again = before is not None and plan.micro_batch != before.micro_batch
        planned.tuner = self._tuner_of(planned)
        if self.device.type != "cpu":
            self.memory.give_back_cache()
        self.activate(planned)
        self.events.add(self.steps, "replan" if again else "plan", plan.summary())
        self.on_plan()
        if plan.accumulation > 1 and self.normalises_batches():
            self.tell(NORMS if self.whole_norms is None else WHOLE_NORMS)

    def activate(self, planned: Planned) -> None:
        """Put the plan of the next batch in force: its levers (activation checkpointing) replace those of the one before."""
        if planned is self.active:
            return
        self.release()
        self._checkpoint(planned.plan.checkpoint)
        self.active = planned
        self._limit_heap()
        if planned.profile is not None and planned.profile.source != "measured":
            self.buffers.declare(planned.profile.written_buffers)

    def _limit_heap(self) -> None:
        """Set the heap ceiling for the plan in force, at the largest micro-batch size that is tried beside it."""
        assert self.active is not None
        plan, tuner = self.active.plan, self.active.tuner
        most = plan if tuner is None else _resized(plan, tuner.largest // plan.unit, {})
        self.heap.ceiling = self.memory.heap_ceiling(most, self.active.profile)

    @contextmanager
    def without_levers(self) -> Iterator[None]:
        """Context manager without activation checkpointing."""
        self.release()
        try:
            yield
        finally:
            if self.plan is not None:
                self._checkpoint(self.plan.checkpoint)

    def _checkpoint(self, blocks: Sequence[str]) -> None:
        """Checkpoint these blocks. Recomputing them fragments the heap, so it is checked before each of them, too."""
        if blocks:
            self._undo_levers = checkpoint_blocks(self.model, blocks, self.owner, self.heap.check, self.staging.is_swapped)

    @property
    def tuning(self) -> bool:
        """Whether micro-batches of other sizes than the plan's run as well, to be measured."""
        tuner = None if self.active is None else self.active.tuner
        return tuner is not None and len(tuner.fitting) > 1

    def normalises_batches(self) -> bool:
        """Return whether a module normalizes by the statistics of its batch (batch norm)."""
        return normalises_batches(self.model)

    def fix(self, plan: Plan) -> None:
        """Use a given plan instead of planning."""
        self.fixed = plan
        if plan.accumulate_in == "param":  # it has no room for float32 gradients
            self.settings = replace(self.settings, accumulate_in="param")
        self.adopt(Planned(plan, None))

    def release(self) -> None:
        """Undo the plan's levers (activation checkpointing)."""
        self._undo_levers()
        self._undo_levers = lambda: None

    def forbid_single_samples(self, why: str) -> None:
        """Run no micro-batch of a single sample from now on. Raises Refused if one was prescribed."""
        if self.prescribed == 1:
            raise Refused(
                "micro-batches of one sample, as micro_batch=1 asks",
                found=f"the model cannot run one sample as it runs several: {why}",
                next_move="pass micro_batch=2 or more; where squeeze() takes the batch's dimension, name the dimension meant",
            )
        self.least = 2
        self.planner.measurer.no_singles = True
        if self.prescribed == 2:
            self.note("note", f"micro-batches of 3 too: the model cannot run one sample as it runs several ({why})")

    @property
    def prescribed(self) -> int | None:
        """Samples per micro-batch, if a plan or the user fixed them."""
        return self.fixed.micro_batch if self.fixed is not None else self.settings.micro_batch

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

    def limit(self, plan: Plan) -> int:
        """Return the most samples per micro-batch: the plan's, or fewer since memory ran out."""
        return plan.micro_batch if self.active is None else min(plan.micro_batch, self.active.largest)

    def _follow_drift(self) -> None:
        """Shrink micro-batches once kernels for new shapes have taken half of the margin."""
        plan = self.plan
        prescribed = self.prescribed is not None or self.settings.whole  # kept as asked; a given plan counted other held bytes
        drift = 0 if plan is None or plan.mode == "replay" or prescribed else self.memory.drift(plan)
        if self.active is None or plan is None or drift <= plan.margin // 2:
            return
        self.active.tuner = None
        now = replace(plan, held=plan.held + drift)
        if plan.predicted.upper + now.held + 2 * plan.margin > plan.limit and self.memory.stop_new_kernels():
            self.note(
                "note",
                f"{format_bytes(drift)} more are reserved than when the plan was made, and no room is left for more kernels: "
                "steps run without oneDNN from now on, which caches kernels for every shape",
            )
        sizes_left = range(self.limit(plan), 0, -1)
        fitting = (n for n in sizes_left if plan.measured(n, {}).predicted.upper + now.held + plan.margin // 2 <= plan.limit)
        size = next(fitting, 1)
        self._change(replace(_resized(now, size, {}), held=now.held))
        if size == plan.micro_batch:
            return
        self.note(
            "replan",
            f"{format_bytes(drift)} more are reserved than when the plan was made (kernels for new shapes, or code outside the "
            f"step): micro-batches of {size}",
        )

    def old_gradient_bytes(self) -> int:
        """Return the bytes of gradients that may still exist while the next batch runs. Before the first step it is unknown
        where the script calls zero_grad, so all gradients count."""
        trained = self.staging.parameters()
        there = trained if not self.steps else [p for p in trained if p.grad is not None]
        return sum(map(bytes_here, there))

    def pieces(self, samples: int, largest: int) -> tuple[int, ...]:
        """Return the micro-batch sizes for that many samples."""
        return (equal_sizes if self.compiled else sizes)(samples, largest, self.least)

    def accumulated(
        self,
        work: Work,
        weighting: Weighting,
        pieces_for: Callable[[int, Tuner | None], Sequence[int]],
        *,
        largest: int,
        begin: Callable[[Sequence[int]], None] = lambda pieces: None,
        load: Callable[[Sequence[int]], Load] | None = None,
        repeats: bool = True,
        autocast: Sequence[Autocast] = (),
    ) -> Total:
        """Accumulate gradients over an effective batch and return the total. Recovery retries with smaller micro-batches, a
        lower loss scale or true shares where an attempt shows the need. `pieces_for(largest, tuner)` returns the micro-batch
        sizes; a tuner, if there is one, proposes each. `load` describes these sizes (`overlap.Load`); with it, the gradient
        all-reduce may overlap the last micro-batch's backward. Without `repeats`, SharesDiffer propagates where true shares
        would take a second attempt. `autocast` is the autocast state in which the script called the model."""
        self._follow_drift()
        largest = largest if self.plan is None else min(largest, self.limit(self.plan))
        precision = self.plan.precision if self.plan is not None else "off"
        parameters = self.staging.parameters()
        told, looks = computes_in_half(parameters, self.device.type, precision, autocast), self.half_graphs.looks()
        exact: tuple[tuple[int, ...], list[list[float]]] | None = None

        def attempt(limit: int) -> Total:
            nonlocal exact
            if exact is not None and max(exact[0]) > limit:
                exact = None  # memory ran out since: cut again
            tuner = self.active.tuner if self.active is not None and limit == largest and exact is None else None
            if tuner is not None:
                tuner.begin()
            pieces, known = (tuple(pieces_for(limit, tuner)), None) if exact is None else exact
            begin(pieces)
            if tuner is not None and tuner.changes_before(0):
                self.memory.give_back_cache()
            self.prepare(len(pieces), parameters)
            half = told or self.half_graphs.seen
            scale = self.scale.scale if half else 1.0
            usual = load is not None and tuner is None and not half and exact is None
            last = self._around_last(load(pieces) if load is not None and usual else None, weighting, parameters)
            try:
                run = partial(accumulate, work, pieces, self.staging, weighting, parameters=parameters)
                before = self._before_backward(look=looks and not half and self.staging.parts is None)
                run = partial(run, alone=self.reduction is None, around_last=last, before_backward=before)
                running = self.memory.running(self.plan, limit if self.staging.parts is None else 1)
                with running, self.staging.counting(), self.norms_of(len(pieces)):
                    total = self._run(run, scale, known, self._after_micro_batch(tuner))
            except SharesDiffer as difference:
                if not repeats:
                    raise
                exact = pieces, difference.shares  # (valid for these micro-batches only)
                raise RestartBatch from None
            if self.reduction is not None and self.reduction.overlap is not None:
                self.reduction.overlap.attempted(total)
            return self.scale.accept(total) if half else total

        with self.computing():
            total = attempt(largest) if self.staging.parts is not None else self.recovery.run(attempt, largest)
        if told or self.half_graphs.seen:
            total.on_handover = self.scale.seen
        self._end_tuning()
        if not self.steps and self.device.type != "cpu":
            self.memory.give_back_cache()  # the optimizer's state comes into being in segments of its own
        self.apply_norms()
        return total

    def _before_backward(self, *, look: bool) -> Callable[[torch.Tensor], None] | None:
        """Return what is called with the loss of each micro-batch. With `look`, the graph of the first one tells whether it is
        computed in float16."""
        losses = itertools.count()
        if self.heap.ceiling is None and not look:
            return None

        def before(loss: torch.Tensor) -> None:
            if self.heap.ceiling is not None:
                self.heap.check()
            if look and not next(losses):
                self.half_graphs.look(loss)

        return before

    def _around_last(
        self, load: Load | None, weighting: Weighting, parameters: Sequence[torch.Tensor]
    ) -> AroundLast | None:
        """Return what overlaps gradient reduction with the attempt's last micro-batch, if all ranks may agree to that."""
        overlap = None if self.reduction is None else self.reduction.overlap
        if overlap is None:
            return None
        plan = self.plan
        whole = plan is not None and plan.shard == "off" and not weighting.watch
        room = 0 if plan is None else plan.limit - plan.held - plan.margin - plan.predicted.upper
        return overlap.attempting(load if whole else None, weighting, parameters, room)

    def norms_of(self, micro_batches: int) -> AbstractContextManager[None]:
        """Return the context manager that gathers the batch statistics of that many micro-batches if batchnorm="whole";
        `apply_norms` then writes those of all at once."""
        return nullcontext() if self.whole_norms is None else self.whole_norms.gathered(micro_batches)

    def apply_norms(self) -> None:
        """Write the gathered batch statistics. With several ranks, `combine` writes those of all ranks instead."""
        if self.whole_norms is not None and self.reduction is None:
            self.whole_norms.applied()

    def announcing(self) -> AbstractContextManager[None]:
        """Return the context manager that announces a failure to the other ranks, which would wait for this one."""
        return nullcontext() if self.reduction is None else self.reduction.announcing()

    def beginning(self, composition: Composition, *, unsure: bool) -> Callable[[], None]:
        """Begin a pass that may have to be repeated: for other ranks or, if `unsure`, for its own result. Returns a function
        that restores everything the pass moves."""
        put_back = self.recovery.remembered()[0] if unsure or self.reduction is not None else None

        def begin_again() -> None:
            composition.undone()
            if put_back is not None:
                put_back()

        return begin_again

    def combine(
        self, total: Total, weighting: Weighting, *, unproven: bool = False, divided: bool = False
    ) -> Weighting | None:
        """Combine this rank's total with those of all ranks, in place; see `StepReduction.combine`."""
        if self.reduction is None:
            return None
        if self.taken is not None:
            self.taken.check_syncs()
        half = self.settings.accumulate_in == "float32"
        with nullcontext() if self.rank_facts is None else self.rank_facts.exchanging(_samples_in(total)):
            counts = total.weight != 0.0 if isinstance(total.weight, float) else True
            other = self.reduction.combine(total, weighting, half=half, unproven=unproven, divided=divided)
        if other is None and self.whole_norms is not None:
            gather = partial(self.reduction.ranks.gather, doing="batch norm's running statistics")
            self.whole_norms.applied(gather, counts=counts)
        return other

    def computing(self, *, again: bool = False) -> AbstractContextManager[None]:
        """Return the context manager that times micro-batches, to know each rank's speed; see `FactsExchange.computing`."""
        return nullcontext() if self.rank_facts is None else self.rank_facts.computing(again=again)

    def reshare(self, share: int) -> None:
        """Give this rank that many samples of every effective batch from now on."""
        plan = self.plan
        if plan is None or self.fixed is not None:
            return
        if plan.accumulation == 1 and share > plan.share:
            self.forget()  # it has no room for accumulated gradients
        else:
            self._change(plan.with_share(share))

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

    def _after_micro_batch(self, tuner: Tuner | None) -> Callable[[int], None] | None:
        if self.heap.ceiling is None and tuner is None:
            return None

        def after(index: int) -> None:
            if tuner is not None:
                tuner.micro_batch_done(index)
                if tuner.changes_before(index + 1):
                    self.memory.give_back_cache()
            if self.heap.ceiling is not None:
                self.heap.check()

        return after

    def tuned_pieces(self, samples: int, largest: int, tuner: Tuner | None) -> tuple[int, ...]:
        """Return the micro-batch sizes for that many samples of one size; several sizes in turn while a tuner measures."""
        if tuner is None:
            return self.pieces(samples, largest)
        found: list[int] = []
        left = samples
        while left:
            choice = tuner.next_choice(beside=bool(found), most=samples)
            size = next_size(left, choice, self.least)
            found.append(size - 1 if left - size == 1 and size > 2 else size)  # a single sample wastes most of a pass
            tuner.expect(choice, found[-1])
            left -= found[-1]
        return tuple(found)

    def prepare(self, micro_batches: int, parameters: Sequence[torch.Tensor] | None = None) -> None:
        """Prepare a pass: with several micro-batches or ranks, gradients of half precision parameters accumulate in float32."""
        if (micro_batches > 1 or self.reduction is not None) and self.settings.accumulate_in == "float32":
            self.staging.accumulate_in_float32(parameters)

    def _run(
        self,
        run: Callable[..., Total],
        scale: float,
        shares: list[list[float]] | None,
        after_micro: Callable[[int], None] | None,
    ) -> Total:
        if self._checked_escapes or self.staging.parts is not None:
            return run(scale=scale, shares=shares, after_micro=after_micro)
        parameters = self.staging.parameters()
        before = [p.grad for p in parameters]
        total = run(scale=scale, shares=shares, after_micro=after_micro)
        check_nothing_escaped(parameters, before, self.model)
        self._checked_escapes = True
        return total

    def _tuner_of(self, planned: Planned) -> Tuner | None:
        """Return what measures other micro-batch sizes while training: those that fit with this plan's levers."""
        plan, profile = planned.plan, planned.profile
        prescribed = self.settings.micro_batch is not None or self.settings.whole
        if self.normalises_batches() or self.settings.allow_inexact:
            return None  # every size trains differently
        if profile is None or prescribed or self.compiled or plan.mode == "replay":
            return None
        if profile.kept_per_size > NOTICEABLE:
            return None  # every size tried would hold memory permanently
        fitting = [plan.unit * n for n in plan.sizes_with_same_levers()]
        alone = None if plan.by_size else plan.share  # planned without accumulated gradients beside it
        return Tuner(fitting, plan.unit * plan.micro_batch, self.device, alone=alone, whole=bool(plan.by_size))

    def _end_tuning(self) -> None:
        active = self.active
        if active is None or active.tuner is None or not active.tuner.done:
            return
        before, (best, rates) = active.plan, active.tuner.best()
        active.tuner = None
        self.memory.give_back_cache()
        self._change(_resized(before, best // before.unit, {c // before.unit: rate for c, rate in rates.items()}))
        if active.plan.micro_batch != before.micro_batch:
            self.note("replan", f"measured while training: {active.plan.summary()}")

    def _ran_out(self, tried: int, smaller: int, text: str) -> None:
        budget = format_bytes(self.memory.budget().limit)
        self.memory.ran_out()
        if self.active is not None:
            self.active.tuner, self.active.largest = None, min(smaller, self.active.largest)
        if self.plan is not None and smaller < self.plan.micro_batch:
            self._change(replace(_resized(self.plan, smaller, {}), predicted=self.plan.predicted))
        self.events.add(
            self.steps,
            "out of memory",
            f"a micro-batch of {tried} ran out of memory within {budget} ({text}); the batch restarted at {smaller}",
        )

    def _missed_draws(self) -> None:
        """Report that a repeated pass drew other random numbers than the first."""
        self.tell(
            "the forward began to draw from Python's or NumPy's random generator in a batch that ran in two passes, which drew "
            "differently; from now on they draw the same"
        )

    def proof_ran_out(self, tried: int, smaller: int, text: str) -> None:
        """Record that a proof ran out of memory and starts again on fewer samples."""
        message = f"a proof on {tried} samples ran out of memory ({text}); it restarted on {smaller}"
        self.events.add(self.steps, "out of memory", message)

    def _change(self, plan: Plan) -> None:
        assert self.active is not None
        self.active.plan, self.active.largest = plan, plan.micro_batch
        self._limit_heap()


def _samples_in(total: Total) -> float:
    """Return the samples in a total; 0 if its batch only stands in for none."""
    weight = total.weight
    if isinstance(weight, float) and not (weight and total.samples):
        return weight  # what memfit did not gather weighs by its samples
    return float(total.samples)


def _resized(plan: Plan, micro_batch: int, rates: dict[int, float]) -> Plan:
    plan = plan.measured(micro_batch, rates)
    if plan.mode == "replay":
        return plan
    return replace(plan, mode="accumulate" if plan.accumulation > 1 else "whole")
