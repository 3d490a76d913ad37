"""Traces one optimizer step in steady state on fake tensors: a Timeline for one micro-batch size.

A first step creates the optimizer state. The recording then covers two micro-batches (so that accumulated gradients coexist
with activations), the hand-over of gradients to autograd, gradient clipping and the optimizer step. That last one is the same
for every size, and is traced once. What a script's own loop does around it (`loop.py`) is traced if it is given. Not covered:
whatever else the script does between backward and step (averaging weights, unscaling gradients).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memfit.batches.tree import tensors
from memfit.engine.accumulate import accumulate
from memfit.engine.call_context import uncompiled
from memfit.engine.compose_state import Composition
from memfit.engine.handover import Total, hand_over
from memfit.engine.random_state import HostRandom
from memfit.engine.shadow_optimizer import STEPPED_BY_LISTS, shadow_optimizer, states, step, step_by_lists
from memfit.engine.staged import Staging
from memfit.engine.weighting import Weighting
from memfit.engine.work import Work
from memfit.kernels.onednn import stages
from memfit.kernels.scratch import is_unknown, scratch
from memfit.kernels.substitute import cuda_kernels
from memfit.kernels.target import Target
from memfit.profiling.loop import AFTER_STEP, BEFORE_BACKWARD, BEFORE_FORWARD, MEMFITS, TO_ZERO, Loop
from memfit.profiling.splice import continued
from memfit.profiling.timeline import Timeline
from memfit.tracing.failures import TraceFailed, telling_failures
from memfit.tracing.fake import FakeWorld
from memfit.tracing.flop_counter import Counts
from memfit.tracing.ledger import Ledger
from memfit.tracing.plain_loop import Directly, Variables, clip
from memfit.tracing.sandbox import collected_by_hand, leave_no_trace, steps_undone
from memfit.tracing.trace_evaluation import evaluated, one_each

MakeWork = Callable[[Callable[[torch.Tensor], torch.Tensor], int], Work]
"""Takes a function that maps a tensor to its fake twin, and a number of samples; returns the work on that many twin samples."""


@dataclass(frozen=True)
class Trace:
    """The results of tracing."""

    timelines: tuple[Timeline, ...]
    """One for each requested size, and one for the size to check with; all bytes are `fixed`."""
    guesses: tuple[str, ...]
    """Operations whose values were guessed, without duplicates."""
    written: tuple[str, ...]
    """Names of the buffers that a training forward writes."""
    without_rule: tuple[str, ...] = ()
    """Operations whose kernels, on the traced GPU, allocate scratch memory that no rule predicts."""
    evaluated: tuple[Timeline, ...] = ()
    """An evaluation for each requested batch size; all bytes are `fixed`."""
    unevaluated: str = ""
    """Why the evaluation could not be traced; "" if it was, or was not requested."""


@dataclass(frozen=True)
class Manner:
    """Options of a trace."""

    target: Target | None = None
    """A GPU whose kernels are traced although the tensors are on another device."""
    counted: bool = False
    """Whether FLOPs and memory traffic are counted."""
    in_float32: bool = True
    """Whether gradients of half-precision parameters accumulate in float32."""
    loop: Loop = MEMFITS
    """What the script's own loop does around forward and backward."""
    evaluation: tuple[int, ...] = ()
    """Evaluation batch sizes to trace."""


def trace_step(
    model: nn.Module,
    optimizer: Optimizer,
    make_work: MakeWork,
    sizes: Sequence[int],
    weighting: Weighting,
    device: torch.device,
    *,
    check: int | None = None,
    blocks: Sequence[str] = (),
    levers: Callable[[], AbstractContextManager[Any]] = nullcontext,
    like: Timeline | None = None,
    manner: Manner = Manner(),
) -> Trace:
    """Traces a step with two micro-batches of each of `sizes` samples, and one with a single micro-batch of `check` samples.

    Runs through `blocks` are recorded. `levers` returns a context manager that applies the levers under test to the model.
    `like` is a step of the same model and optimizer, whose optimizer step is reused. `manner` sets the device and what is
    traced. Has no side effects. Raises TraceFailed for whatever is raised on fake tensors.
    """
    world, insides = FakeWorld(), _Insides()
    on_gpu = manner.target is not None or device.type == "cuda"
    inside = insides if on_gpu else stages if device.type == "cpu" else None
    ledger = Ledger(device, inside=inside, counts=Counts() if manner.counted else None)
    trained = [p for group in optimizer.param_groups for p in group["params"]]  # a loss may have parameters of its own
    with ExitStack() as stack:
        stack.enter_context(steps_undone(optimizer, device, real=False))
        stack.enter_context(leave_no_trace(model, device, real=False, outside=trained))
        stack.enter_context(collected_by_hand())
        stack.enter_context(telling_failures(world))
        twins = stack.enter_context(world.replacing(model))
        stack.enter_context(levers())
        stepping = _Stepping(model, optimizer, world, ledger, twins, weighting, manner)
        # Built outside fake mode: collating touches real samples.
        steps = [_Step((n, n)) for n in sizes] + ([] if check is None else [_Step((check,))])
        for step in steps:
            step.works.extend(make_work(world.twin, step.pieces[0]) for _ in range(stepping.works_per_step))
        evaluations = one_each(lambda n: make_work(world.twin, n), manner.evaluation)
        stack.enter_context(uncompiled())
        stack.enter_context(world.entered())
        stack.enter_context(ledger)
        stack.enter_context(ledger.naming(model, blocks))
        stack.enter_context(cuda_kernels(manner.target))
        stepping.begin()
        with stepping.variables.watching(model) if manner.loop.plain else nullcontext():
            timelines = stepping.all_of(steps, like)
        written = stepping.written_buffers()
        found, reason = _evaluations(model, evaluations, ledger, stepping.variables, world)
    guesses, unknown = tuple(dict.fromkeys(world.guesses)), tuple(insides.unknown)
    return Trace(tuple(timelines), guesses, written, unknown, found, reason)


def _evaluations(
    model: nn.Module, works: Sequence[list[Work]], ledger: Ledger, variables: Variables, world: FakeWorld
) -> tuple[tuple[Timeline, ...], str]:
    """Timelines of evaluations; if that fails, none and the reason: the trace of the step stays valid."""
    try:
        with telling_failures(world):
            return tuple(evaluated(model, works, ledger, variables)), ""
    except TraceFailed as failed:
        return (), failed.reason


class _Insides:
    """Returns the scratch bytes of kernels, by rule; records the operations that have no rule."""

    def __init__(self) -> None:
        self.unknown: dict[str, None] = {}

    def __call__(self, func: Any, args: Any, out: Any) -> tuple[int, ...]:
        if is_unknown(func):
            self.unknown[str(func._overloadpacket).removeprefix("aten.")] = None
        return (scratch(func, args, out),)


@dataclass(frozen=True)
class _Step:
    """A step to record."""

    pieces: tuple[int, ...]
    """Samples in each of its micro-batches."""
    works: list[Work] = field(default_factory=list)
    """Work on as many twin samples each. Every recording consumes some: their inputs are new to the ledger."""


class _Stepping:
    """Runs optimizer steps on fake tensors."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        world: FakeWorld,
        ledger: Ledger,
        twins: dict[int, torch.Tensor],
        weighting: Weighting,
        manner: Manner,
    ) -> None:
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        self._outside = {id(p): world.parameter(p) for p in trained if id(p) not in twins}
        everything = {**self._outside, **twins}
        self._optimizer = shadow_optimizer(optimizer, lambda t: everything.get(id(t)), world.twin)
        kind = ledger.device if manner.target is None else manner.target.kind
        if kind in STEPPED_BY_LISTS:
            step_by_lists(self._optimizer)
        self._model, self._ledger, self._weighting = model, ledger, weighting
        self._home: dict[torch.Tensor, str] = {}
        """The module that owns each parameter; the first of several that share it."""
        self._buffers = {name: (b, b._version) for name, b in model.named_buffers()}
        self._loop, self.variables = manner.loop, Variables(ledger)
        self._outputs_stay = False
        self._staging = (Directly if self._loop.plain else Staging)(model, self._outside.values())
        if manner.in_float32 and not self._loop.plain:
            self._staging.accumulate_in_float32()
        self._kind = kind
        self._host = HostRandom.capture()

    @property
    def works_per_step(self) -> int:
        """Most works a step consumes: a plain loop takes one per batch, and first runs what the previous step leaves behind."""
        return 10 if self._loop.plain else 5

    def begin(self) -> None:
        for name, module in self._model.named_modules():
            for parameter in module.parameters(recurse=False):
                if parameter not in self._home:
                    self._home[parameter] = name
                    self._ledger.present((parameter,), "parameters", name)
        self._ledger.present(self._outside.values(), "parameters")
        for name, module in self._model.named_modules():
            self._ledger.present(module.buffers(recurse=False), "buffers", name)

    def written_buffers(self) -> tuple[str, ...]:
        """Buffers written or replaced so far; batch norm writes its statistics without a new version."""
        norms = {
            f"{name}.{key}" if name else key
            for name, module in self._model.named_modules()
            if isinstance(module, nn.modules.batchnorm._NormBase) and module.training and module.track_running_stats
            for key in module._buffers
        }
        now = dict(self._model.named_buffers())
        changed = {n for n, (b, version) in self._buffers.items() if now.get(n) is not b or b._version != version}
        return tuple(sorted((norms | changed) & self._buffers.keys()))

    def all_of(self, steps: Sequence[_Step], like: Timeline | None) -> list[Timeline]:
        """Records a timeline of each of these steps. Where it fits, they share the optimizer step of `like`, or of the
        first."""
        found: dict[int, Timeline | None] = {}
        if like is None:
            last = steps[-1]
            first = self._begun(self._works(last, 1), last.pieces[:1])
            self._outputs_stay = first.leaves_outputs
            self._optimize()
            found[0] = like = self._recorded(steps[0])
            found.setdefault(len(steps) - 1, continued(first, like) if len(last.pieces) == 1 else None)
        return [found.get(i) or self._recorded_like(step, like) for i, step in enumerate(steps)]

    def _recorded_like(self, step: _Step, like: Timeline) -> Timeline:
        self._settle(step)
        found = continued(self._begun(self._works(step), step.pieces), like)
        if found is None:
            self._optimize()  # optimizer state must exist before a whole step is recorded
            return self._recorded(step)
        self._clear(AFTER_STEP)
        return found

    def _recorded(self, step: _Step) -> Timeline:
        """Records a whole step."""
        self._settle(step)
        works = self._works(step)  # keeps the batch alive to the end of the step, unless a plain loop's variables hold it
        self._begun(works, step.pieces)
        self._optimize()
        return self._ledger.timeline()

    def _settle(self, step: _Step) -> None:
        """Creates what the previous step leaves behind: gradients, what the model or a hook keeps of a forward until the next
        one (`self.aux_loss = ...`), and the batch, outputs and loss in the loop's variables."""
        if self._loop.plain or self._loop.gradients_stay or self._outputs_stay:
            self._begun(self._works(step), step.pieces)
            self._clear(AFTER_STEP)

    def _works(self, step: _Step, pieces: int | None = None) -> list[Work]:
        """Work for a step; in a plain loop, every micro-batch is its own batch."""
        return [step.works.pop() for _ in range((pieces or len(step.pieces)) if self._loop.plain else 1)]

    def _begun(self, works: list[Work], pieces: Sequence[int]) -> Timeline:
        """Records a step up to the optimizer step."""
        ledger = self._ledger
        ledger.restart()
        total = accumulate(_Watched(works, self), pieces, self._staging, self._weighting)
        self._present_gradients(total)
        ledger.phase("hand over")
        if self._loop.plain:
            del total
        else:
            self._clear(BEFORE_BACKWARD)  # the script's own backward starts here
            hand_over(total).backward()
            del total
        if self._loop.clips:
            ledger.phase("clip")
            clip(self._model.parameters(), self._loop, self._kind)
        return ledger.timeline()

    def _present_gradients(self, total: Total) -> None:
        """A separate function, so that no local variable keeps a gradient alive."""
        for receiver, gradient in zip(total.receivers, total.gradients):
            gradient = receiver.grad if self._loop.plain else gradient
            if gradient is not None:
                self._ledger.present((gradient,), "gradients", self._home.get(receiver))

    def _clear(self, at: str) -> None:
        """Does what the script's zero_grad does at this point of the step."""
        if self._loop.zero_grad == at:
            self._optimizer.zero_grad()
        elif self._loop.zero_grad == TO_ZERO and at == BEFORE_FORWARD:
            self._optimizer.zero_grad(set_to_none=False)

    def _present_state(self) -> None:
        for parameter, state in states(self._optimizer):
            self._ledger.present(state, "optimizer", self._home.get(parameter))

    def _optimize(self) -> None:
        """Runs the optimizer step; its state then exists, and gradients are freed unless the loop keeps them."""
        self._ledger.phase("optimizer")
        step(self._optimizer)
        self._present_state()
        self._clear(AFTER_STEP)


class _Watched:
    """Wraps a work to mark its phases in the ledger. Every micro-batch makes the same random draws outside torch: traces of
    several sizes are comparable only if they run the same way."""

    def __init__(self, works: list[Work], stepping: _Stepping) -> None:
        self._works, self._work, self._turn = works, works[0], -1
        self._stepping, self._ledger, self._plain = stepping, stepping._ledger, stepping._loop.plain
        self.samples, self.device, self.composition = self._work.samples, self._work.device, Composition()

    def extra_receivers(self) -> Sequence[torch.Tensor]:
        return () if self._plain else self._work.extra_receivers()

    def extra_gradients(self) -> list[torch.Tensor | None]:
        return [] if self._plain else self._work.extra_gradients()

    def counted(self, start: int, stop: int, count: Any) -> None:
        return None

    def inputs(self, start: int, stop: int, count: Any) -> Any:
        self._turn += 1
        if self._plain:
            self._work = self._works.pop()  # it keeps its batch alive, which must die with the variable
        self._ledger.window()
        self._ledger.phase("input")
        # Every traced micro-batch has the same samples: two need no more real ones than one.
        inputs, counted = self._work.inputs(0, stop - start, count)
        if not self._plain:
            self._ledger.ignore(getattr(self._work, "borrowed", ()))
        self._ledger.present(tensors(inputs), "input")
        if self._plain:
            self._stepping.variables.hold_batch(inputs)
        return inputs, counted

    def forward(self, inputs: Any) -> Any:
        self._clear(BEFORE_FORWARD)
        self._ledger.phase("forward")
        self._stepping._host.restore()
        return self._work.forward(inputs)

    def loss(self, outputs: Any) -> torch.Tensor:
        loss = self._work.loss(outputs)
        if self._plain:
            self._stepping.variables.hold_loss(loss)
            self._clear(BEFORE_BACKWARD)
        self._ledger.phase("backward")
        return loss

    def _clear(self, at: str) -> None:
        """Clears gradients once per step, not per micro-batch."""
        if not self._turn:
            self._stepping._clear(at)
