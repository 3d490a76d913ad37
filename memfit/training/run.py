"""Defines the run that `wrap` returns, the only mutable object that users meet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from html import escape
from typing import TYPE_CHECKING, Any

import torch

from memfit._errors import UsageError
from memfit.batches.loaded_batch import to_cut
from memfit.capture.workloads import LossFn
from memfit.distributed.unwrap_ddp import TakenOver
from memfit.engine.device_values import found_at_the_end
from memfit.engine.intercept import Interception
from memfit.engine.step_hooks import after_steps, before_steps
from memfit.levers.precision import script_precision
from memfit.loading.iterate import PassedThrough
from memfit.loading.loader import BatchInfo, EffectiveLoader
from memfit.modes.script_mode import Script
from memfit.modes.step_mode import Stepper
from memfit.planning.plan import Plan
from memfit.runtime.accumulation_guard import AccumulationGuard
from memfit.runtime.core import Core
from memfit.runtime.events import Event
from memfit.training.batch_counts import BatchCounts, Progress
from memfit.training.measured_peak import MeasuredPeak
from memfit.training.plain_steps import PlainSteps, clear_gradients
from memfit.training.sharding import Sharding
from memfit.training.state import StateSource, load, written
from memfit.training.step_clock import StepClock
from memfit.training.step_notes import LossNotes, compare_with_target, name_unreached

if TYPE_CHECKING:
    from memfit.reporting.plain import PlainReport
    from memfit.reporting.report import Report
    from memfit.reporting.verification import Verification


class Run:
    """A training that memfit fits into memory. Unpacks into (model, optimizer, loader).

    Attributes: `model`, `optimizer` (the objects given to `wrap`), `loader` (yields effective batches), `plan` (None before
    the first training call if there is no loss_fn), `events`, `script_batch` (samples per optimizer step over all
    ranks in the unmodified script, which the report compares with the target; None if not known).
    """

    def __init__(self, model: Any, optimizer: Any, loader: Any, *, core: Core | None, off: str = "") -> None:
        self._off = off
        self._last_plan: Plan | None = None
        self._last_events: tuple[Event, ...] = ()
        self._plain = PlainSteps()
        self.model, self.optimizer, self.loader = model, optimizer, loader
        self._core = core
        self._undo: list[Callable[[], None]] = []
        self._stepper: Stepper | None = None
        self._clock = StepClock()
        self._counts = BatchCounts()
        self._losses: LossNotes | None = None
        self._taken: TakenOver | None = None
        self._guard: AccumulationGuard | None = None
        self._script: Script | None = None
        self._peak = None if core is None else MeasuredPeak(core)
        self.script_batch: int | None = None
        self._sharding: Sharding | None = None

    # ---- properties

    @property
    def plan(self) -> Plan | None:
        """The plan in force, or the last one if the run was undone."""
        core = self._core
        if core is None:
            return self._last_plan
        return core.team.in_all(core.plan)

    @property
    def events(self) -> tuple[Event, ...]:
        """The events so far, of an undone run, too."""
        return tuple(self._last_events if self._core is None else self._core.events)

    @property
    def enabled(self) -> bool:
        """False if memfit is switched off or undone, and everything runs as plain PyTorch."""
        return self._core is not None

    @property
    def is_first(self) -> bool:
        """Whether this process is rank 0 (or memfit is off)."""
        return self._core is None or self._core.settings.rank == 0

    def __iter__(self) -> Iterator[Any]:
        return iter((self.model, self.optimizer, self.loader))

    def __repr__(self) -> str:
        if self._core is None:
            return "memfit.Run(off)"
        return f"memfit.Run({self.plan.summary() if self.plan else 'plans at the first training call'})"

    def _repr_html_(self) -> str:
        return f"<div>{escape(repr(self))}</div>" if self.plan is None else self.report()._repr_html_()

    # ---- methods

    def step(self, batch: Any) -> torch.Tensor:
        """Performs one optimizer step over an effective batch. Returns the loss as a detached scalar.

        Sets gradients to None, runs micro-batches with recovery from out-of-memory errors, calls `before_step` once on the
        total gradient, then `optimizer.step()`. `batch` comes from `run.loader`, or is an ordinary batch with samples along the
        first dimension. Raises UsageError without loss_fn. The user's own exceptions are raised unchanged.
        """
        batch = to_cut(batch)
        if self._stepper is None or self._core is None:
            self._clock.begin()
            value = self._plain.step(self.model, self.optimizer, batch)
            self._clock.end(0)
            return value
        self._clock.begin()
        self._core.caches.trains()
        clear_gradients(self.optimizer)
        loss = self._stepper.loss(batch)
        value = loss.detach()
        with self._core.team.announcing():
            loss.backward()
            del loss
            if self._plain.before_step is not None:
                self._plain.before_step()
        self._take_step()
        self._losses = self._losses or LossNotes(self._core)
        self._losses.add(value)
        self._clock.end(self._stepper.samples or 0)
        return value

    def undo(self) -> None:
        """Restores everything to its state before `wrap`: the model's own forward and blocks, no hooks, no staging. On an
        accelerator it waits for the device; a tensor that was written through `.data` before the backward of the last step is
        an event "not equal"."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        loader = self.loader
        if isinstance(loader, (EffectiveLoader, PassedThrough)):
            self.loader = loader.source
        if self._core is not None:
            self._core.in_force.release()
            self._core.memory.end()
            for error in found_at_the_end(self._core.device):
                self._core.note("not equal", f"{error.asked}: {error.found}")
            self._last_plan, self._last_events = self.plan, self.events
            self._core = self._stepper = self._peak = self._losses = None
            self._off = "run.undo()"

    def stats(self) -> dict[str, float | int | None]:
        """Returns a flat dictionary for loggers: step, seconds, samples_per_second, loader_wait (seconds, in the last step),
        peak_predicted, peak_measured (bytes), micro_batch, accumulation."""
        plan, latest = self.plan, self._counts.latest
        return {
            "step": 0 if self._core is None else self._core.steps,
            "seconds": self._clock.seconds,
            "samples_per_second": self._clock.rate,
            "loader_wait": None if latest is None else latest.waited,
            "peak_predicted": None if plan is None else plan.predicted.peak + plan.held,
            "peak_measured": self.measured_peak(),
            "micro_batch": None if plan is None else plan.micro_batch,
            "accumulation": None if plan is None else plan.accumulation,
        }

    def state_dict(self, *, whole: bool = True) -> dict[str, Any]:
        """Returns the training state: model, optimizer, steps, loss scale, random states and loader position, even mid-epoch.

        It holds only tensors, numbers, strings, lists and dictionaries (`torch.load(path, weights_only=True)` reads it). It
        does not depend on the plan or the number of processes and is not collective: rank 0 alone may save. Like those of
        `model.state_dict()`, its tensors are the run's own. The script saves schedulers and GradScaler. Without `whole` it
        omits model, optimizer and random states, for scripts that save these. Batches count as done once trained on; those that
        the script accumulates, once the optimizer has stepped.
        """
        loader = self.loader
        position = loader.position(self.drew(), self._unfinished()) if isinstance(loader, EffectiveLoader) else None
        steps = self._plain.done if self._core is None else self._core.steps
        return written(self._held(), steps, position, whole=whole)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes from `state`: the loader's next iteration yields the rest of the interrupted epoch, later ones whole epochs.

        Call it on every process; their number may have changed. `run.loader.epoch` is the resumed epoch. Raises UsageError,
        with nothing changed on any process, if the state is damaged or belongs to another model, target batch or data set;
        RankFailed if another process could not load it.
        """
        self._plain.done = load(self._held(), state)

    def verify(self) -> Verification:
        """Compares the gradients of one effective batch run whole and in micro-batches. The report also shows the result."""
        if self._core is not None:
            self._core.memory.rest()
            self._core.caches.trains()
        from memfit.reporting.plain import SWITCHED_ON_BY
        from memfit.training.verify import verification_of

        if self._core is None:
            raise UsageError(
                "verifying a run", found=f"memfit is switched off for it ({self._off})", next_move=SWITCHED_ON_BY[self._off]
            )
        script = self._script
        with script.aside() if script is not None else nullcontext():
            self._core.verification = verification_of(self._core, self._core.reference)
        return self._core.verification

    def report(self) -> Report | PlainReport:
        """Reports what was asked, what was done and what it cost; print it, or `.save("report.html" | ".json" | ".md")`.

        Without a plan (switched off, or everything ran uncut) it says so. Raises UsageError before the first training step.
        """
        core = self._core
        if core is not None:
            core.memory.rest()
        from memfit.reporting.drawing import drawing_modules
        from memfit.reporting.rates import batch_change
        from memfit.reporting.report import make_report

        if core is None or core.plan is None:
            return self._plain_report()
        plan = self.plan
        assert plan is not None
        return make_report(
            plan=plan,
            profile=core.profile,
            budget=core.memory.allowance(core.plan),
            events=self.events,
            stats=self.stats(),
            seconds=self._clock.history,
            waits=self._counts.waits,
            asked=core.settings.asked(),
            verification=core.verification,
            script_precision=script_precision(self.model.parameters(), core.device),
            draws=drawing_modules(self.model),
            change=batch_change(self.script_batch, core.settings.target_batch, self.optimizer.param_groups),
            every=core.team.facts,
        )

    # ---- set up by wrap

    def intercept(self, script: Script) -> None:
        """Script mode: intercepts the model's forward, and the other methods that are to be cut."""
        assert self._core is not None
        model = self._core.model
        methods = [Interception(model, partial(script.answer, name), name=name) for name in self._core.settings.methods]
        self._install(self._answering(partial(script.answer, "forward")), *methods)

    def intercept_evaluation(self, script: Script) -> None:
        """Step mode: intercepts the model's forward for the script's evaluation."""
        assert self._core is not None
        if self._taken is None and not self._core.compiled:
            self._install(Interception(self.model, partial(script.evaluate, "forward")))

    def _install(self, *interceptions: Interception) -> None:
        for interception in interceptions:
            interception.owner = self
            interception.install()
            self._undo.append(interception.remove)

    def take_over(self, taken: TakenOver | None, *, in_script: bool) -> None:
        """Keeps the wrapper that the model came in, if any, working."""
        self._taken = taken
        if taken is None:
            return
        self._undo.append(taken.takes_both_keys())
        if not in_script:
            straight = taken.straight()
            straight.owner = self
            straight.install()
            self._undo.append(straight.remove)

    def train_sharded(self, sharding: Sharding | None) -> None:
        """Registers the sharding to be reversed by `undo`, so that each rank holds everything again."""
        self._sharding = sharding
        if sharding is not None:
            self._undo.append(sharding.undo)

    def _answering(self, answer: Callable[..., Any]) -> Interception:
        return Interception(self.model, answer) if self._taken is None else self._taken.answering(answer)

    def take_steps(self, stepper: Stepper, loss_fn: LossFn, before_step: Callable[[], Any] | None) -> None:
        """Enables step mode."""
        self._stepper = stepper
        self.plainly(loss_fn, before_step)

    def drew(self) -> bool:
        """Whether host random draws differ from those of the unmodified script so far."""
        return self._core is not None and (self._core.accumulator.recovery.drew or bool(getattr(self.loader, "drew", False)))

    def follow(self, guard: AccumulationGuard | None, script: Script | None) -> None:
        """Hooks the optimizer's steps to count them."""
        self._guard, self._script = guard, script
        self._undo.append(after_steps(self.optimizer, self._stepped))
        if script is not None and self._stepper is None:
            self._undo.append(before_steps(self.optimizer, script.stepping))
            self._undo.append(script.watch_strays())
        if self._core is not None and self._core.team.reduction is not None:
            self._undo.append(before_steps(self.optimizer, self._core.team.reduction.stepping))

    def on_batch(self, info: BatchInfo) -> None:
        """Records a batch that the loader is about to yield."""
        self._counts.add(info, self._progress())
        if self._stepper is None:
            self._clock.begin()

    @property
    def batches(self) -> int:
        """Number of loader batches so far."""
        return self._counts.yielded

    @property
    def batch_samples(self) -> int | None:
        """Number of samples in the loader's current batch, if known."""
        return None if self._counts.latest is None else self._counts.latest.samples

    def whole_loss(self, loss_fn: LossFn, script: Script) -> Callable[[Any], torch.Tensor]:
        """Returns `loss_fn` with the model's forward intercepted."""

        def loss(batch: Any) -> torch.Tensor:
            interception = self._answering(partial(script.answer, "forward"))
            interception.install()
            try:
                with script.outside.watching():
                    return loss_fn(self.model, batch)
            finally:
                interception.remove()

        return loss

    # ---- internals

    def _take_step(self) -> None:
        core = self._core
        if core is None:
            self.optimizer.step()
            return
        source = core.team.step(self.optimizer, whole=self._sharding is None or self._sharding.level == "off")
        if source is not None:
            core.note("out of memory", f"optimizer.step() ran out of memory; its result was taken over from rank {source}")
            self._stepped()

    def _held(self) -> StateSource:
        model = self._core.model if self._core is not None else self._taken.inner if self._taken is not None else self.model
        return StateSource(model, self.optimizer, self.loader, self._core)

    def _progress(self) -> Progress:
        return (0 if self._core is None else self._core.steps), (0 if self._script is None else self._script.calls)

    def _unfinished(self) -> int:
        """Count the loader's batches that no optimizer step covers yet."""
        accumulated = 1 if self._core is None else self._core.settings.script_accumulation
        return self._counts.unfinished(self._progress(), accumulated)

    def _plain_report(self) -> PlainReport:
        """Return the report of a run without a plan."""
        from memfit.reporting.plain import PlainReport, what_ran
        from memfit.reporting.report import happenings, made_now, software

        core, script = self._core, self._script
        steps = (self._plain.done or None) if core is None else core.steps
        found = what_ran(self._off, 0 if script is None else script.calls, steps or 0)
        if found is None:
            raise UsageError("a report", found="there is no plan yet", next_move="run one training step first")
        seconds, made = tuple(self._clock.history), made_now()
        return PlainReport(type(self.model).__name__, *found, steps, seconds, happenings(self.events), software(), made)

    def measured_peak(self) -> int | None:
        """Returns the peak bytes in steps of this plan. None before its first full step, or on unsupported platforms."""
        return None if self._core is None or self._peak is None else self._peak.value()

    def _stepped(self, *_: object) -> None:
        core = self._core
        if core is None or self._peak is None:
            return
        core.steps += 1
        core.team.stepped()
        self._counts.stepped()
        core.in_force.heap.check()
        self._peak.stepped()
        if core.steps == 1 and core.team.alone:
            name_unreached(core, self.model, self.optimizer)
        self._peak.settle()
        if self._guard is not None:
            self._guard.stepped()
        if self._script is not None:
            self._script.stepped()
            if self.loader is None:
                compare_with_target(core, self._script.samples_seen)
            if self._stepper is None:  # in step mode `step` ends the clock
                self._script.outside.stepped()
                self._clock.end(self._script.samples_seen)
            self._script.samples_seen = 0

    def plainly(self, loss_fn: LossFn | None, before_step: Callable[[], Any] | None) -> None:
        """Sets what `step` runs when memfit is off or undone: the whole batch, as plain PyTorch."""
        self._plain.loss_fn, self._plain.before_step = loss_fn, before_step
