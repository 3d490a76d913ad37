"""Tracing one optimizer step in steady state on fake tensors: a Timeline for one micro-batch size.

A first step brings the optimizer's state into being; then two micro-batches are recorded (so that staged gradients meet
activations), the hand-over and the optimizer's step, which is the same for every size and traced once. Not covered: what the
script does between backward and step (clipping allocates a few scalars), and evaluation.
"""

from __future__ import annotations

import gc
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memfit.batches.tree import tensors
from memfit.engine.accumulate import Weighting, Work, accumulate
from memfit.engine.context import uncompiled
from memfit.engine.generators import HostRandom
from memfit.engine.handover import Total, hand_over
from memfit.engine.staged import Staging
from memfit.kernels.scratch import is_unknown, scratch
from memfit.kernels.substitute import cuda_kernels
from memfit.kernels.target import Target
from memfit.profiling.counts import Counts
from memfit.profiling.failures import telling_failures
from memfit.profiling.fake import FakeWorld
from memfit.profiling.ledger import Ledger
from memfit.profiling.sandbox import leave_no_trace
from memfit.profiling.splice import continued
from memfit.profiling.timeline import Timeline

MakeWork = Callable[[Callable[[torch.Tensor], torch.Tensor], int], Work]
"""From a function that gives a tensor's twin, and a number of samples, to the work on that many twin samples."""


@dataclass(frozen=True)
class Trace:
    """What tracing found."""

    timelines: tuple[Timeline, ...]
    """One for each of the sizes asked for, and for the one to check with, with all bytes as `fixed`."""
    guesses: tuple[str, ...]
    """Operations whose values were guessed, each once."""
    written: tuple[str, ...]
    """Names of the buffers that a training forward writes."""
    without_rule: tuple[str, ...] = ()
    """Operations whose kernels allocate what no rule tells, on the GPU that was traced for."""


@dataclass(frozen=True)
class Manner:
    """How a step is traced."""

    target: Target | None = None
    """A GPU whose kernels are traced although the tensors are not on it."""
    counted: bool = False
    """Whether what is computed is counted, too."""
    in_float32: bool = True
    """Whether gradients of half precision parameters gather in float32."""


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
    """Trace a step with two micro-batches of each of `sizes` samples, and one with a single one of `check` samples.

    Runs through `blocks` are noted. `levers` gives a context in which the model runs with the levers under test. `like` is a
    step of the same model and optimizer, whose optimizer's step is taken over. `manner` says for which device, and
    what is looked at. Leaves no trace.
    Raises TraceFailed for whatever is raised on fake tensors.
    """
    world, insides = FakeWorld(), _Insides()
    on_gpu = manner.target is not None or device.type == "cuda"
    ledger = Ledger(device, inside=insides if on_gpu else None, counts=Counts() if manner.counted else None)
    with ExitStack() as stack:
        stack.enter_context(leave_no_trace(model, device, buffers=False))
        stack.enter_context(_collected_by_hand())
        stack.enter_context(telling_failures(world))
        twins = stack.enter_context(world.replacing(model))
        stack.enter_context(levers())
        stepping = _Stepping(model, optimizer, world, ledger, twins, weighting, manner)
        # Built outside fake mode: collating touches real samples.
        steps = [_Step((n, n)) for n in sizes] + ([] if check is None else [_Step((check,))])
        for step in steps:
            step.works.extend(make_work(world.twin, step.pieces[0]) for _ in range(3))
        stack.enter_context(uncompiled())
        stack.enter_context(world.entered())
        stack.enter_context(ledger)
        stack.enter_context(ledger.naming(model, blocks))
        stack.enter_context(cuda_kernels(manner.target))
        stepping.begin()
        timelines = stepping.all_of(steps, like)
        written = stepping.written_buffers()
    return Trace(tuple(timelines), tuple(dict.fromkeys(world.guesses)), written, tuple(insides.unknown))


class _Insides:
    """What kernels hold inside, by rule; notes the operations that have none."""

    def __init__(self) -> None:
        self.unknown: dict[str, None] = {}

    def __call__(self, func: Any, args: Any, out: Any) -> int:
        if is_unknown(func):
            self.unknown[str(func._overloadpacket).removeprefix("aten.")] = None
        return scratch(func, args, out)


@dataclass(frozen=True)
class _Step:
    """A step to be recorded."""

    pieces: tuple[int, ...]
    """Samples in each of its micro-batches."""
    works: list[Work] = field(default_factory=list)
    """Work on as many twin samples each. One is used up with every recording: its inputs are new to the ledger."""


class _Stepping:
    """Optimizer steps on fakes."""

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
        if manner.target is not None:
            step_by_lists(self._optimizer)
        self._model, self._ledger, self._weighting = model, ledger, weighting
        self._home: dict[torch.Tensor, str] = {}
        """The module that a parameter belongs to; of several that share it, the first."""
        self._buffers = {name: (b, b._version) for name, b in model.named_buffers()}
        self._staging = Staging(model, self._outside.values())
        if manner.in_float32:
            self._staging.accumulate_in_float32()
        self._host = HostRandom.capture()

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
        """Buffers that were written or replaced so far; batch norm writes its statistics without counting a version."""
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
        """A timeline of each of these steps. Where it fits, they share one optimizer's step: that of `like`, or the first's."""
        found: dict[int, Timeline | None] = {}
        if like is None:
            last = steps[-1]
            first = self._begun(last.works.pop(), last.pieces[:1])
            self._optimize()
            found[0] = like = self._recorded(steps[0])
            found.setdefault(len(steps) - 1, continued(first, like) if len(last.pieces) == 1 else None)
        return [found.get(i) or self._recorded_like(step, like) for i, step in enumerate(steps)]

    def _recorded_like(self, step: _Step, like: Timeline) -> Timeline:
        found = continued(self._begun(step.works.pop(), step.pieces), like)
        if found is None:
            self._optimize()  # the state has to be there before a whole step is recorded
            return self._recorded(step)
        self._optimizer.zero_grad(set_to_none=True)
        return found

    def _recorded(self, step: _Step) -> Timeline:
        """A whole step."""
        work = step.works.pop()
        self._begun(work, step.pieces)
        self._optimize()
        return self._ledger.timeline()

    def _begun(self, work: Work, pieces: Sequence[int]) -> Timeline:
        """A step up to the optimizer's."""
        ledger = self._ledger
        ledger.restart()
        total = accumulate(_Watched(work, ledger, self._host), pieces, self._staging, self._weighting)
        self._present_gradients(total)
        ledger.phase("hand over")
        hand_over(total).backward()
        del total
        return ledger.timeline()

    def _present_gradients(self, total: Total) -> None:
        """Apart, so that no variable keeps one of them alive."""
        for receiver, gradient in zip(total.receivers, total.gradients):
            if gradient is not None:
                self._ledger.present((gradient,), "gradients", self._home.get(receiver))

    def _present_state(self) -> None:
        for parameter, state in _states(self._optimizer):
            self._ledger.present(state, "optimizer", self._home.get(parameter))

    def _optimize(self) -> None:
        """The optimizer's step; afterwards the gradients are gone and its state is there."""
        self._ledger.phase("optimizer")
        self._optimizer.step()
        self._present_state()
        self._optimizer.zero_grad(set_to_none=True)


class _Watched:
    """A work that tells the ledger where it stands. Every micro-batch makes the same draws outside torch: traces of several
    sizes can be compared only where they went the same way."""

    def __init__(self, work: Work, ledger: Ledger, host: HostRandom) -> None:
        self._work, self._ledger, self._host = work, ledger, host
        self.samples, self.device = work.samples, work.device
        self.extra_receivers, self.extra_gradients = work.extra_receivers, work.extra_gradients

    def inputs(self, start: int, stop: int, count: Any) -> Any:
        self._ledger.window()
        self._ledger.phase("input")
        # Every micro-batch of the trace has the same samples: tracing two needs no more real ones.
        inputs, counted = self._work.inputs(0, stop - start, count)
        self._ledger.ignore(getattr(self._work, "borrowed", ()))
        self._ledger.present(tensors(inputs), "input")
        return inputs, counted

    def forward(self, inputs: Any) -> Any:
        self._ledger.phase("forward")
        self._host.restore()
        return self._work.forward(inputs)

    def loss(self, outputs: Any) -> torch.Tensor:
        loss = self._work.loss(outputs)
        self._ledger.phase("backward")
        return loss


def shadow_optimizer(
    optimizer: Optimizer,
    parameter: Callable[[torch.Tensor], torch.Tensor | None],
    twin: Callable[[torch.Tensor], torch.Tensor],
) -> Optimizer:
    """An optimizer with the same settings over the twins of the parameters; hooks and patched methods are left behind."""
    shadow = object.__new__(type(optimizer))
    shadow.__dict__.update(optimizer.__dict__)
    shadow.__dict__.pop("step", None)  # schedulers put their counting step on the instance
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        shadow.__dict__[name] = OrderedDict()
    shadow.param_groups = [
        {k: twin(v) if isinstance(v, torch.Tensor) else v for k, v in group.items() if k != "params"}
        | {"params": [q for q in map(parameter, group["params"]) if q is not None]}
        for group in optimizer.param_groups
    ]
    shadow.state = defaultdict(dict)
    for p, state in optimizer.state.items():
        owner = parameter(p) if isinstance(p, torch.Tensor) else p
        if owner is not None:
            shadow.state[owner] = {k: twin(v) if isinstance(v, torch.Tensor) else v for k, v in state.items()}
    return shadow


def step_by_lists(optimizer: Optimizer) -> None:
    """Let the optimizer step all parameters of a group at once where it would do so on CUDA (`_default_to_fused_or_foreach` in
    torch/optim/optimizer.py)."""
    for group in optimizer.param_groups:
        plain = not group.get("fused") and not group.get("differentiable")
        if "foreach" in group and group["foreach"] is None and plain:
            group["foreach"] = True


def _states(optimizer: Optimizer) -> Iterator[tuple[Any, list[torch.Tensor]]]:
    """(parameter, or what else it is kept under; tensors of its state)."""
    for parameter, state in optimizer.state.items():
        values = state.values() if isinstance(state, dict) else ()
        yield parameter, [value for value in values if isinstance(value, torch.Tensor)]


@contextmanager
def _collected_by_hand() -> Iterator[None]:
    """No garbage collection at chance moments: two traces of the same step free in the same order."""
    gc.collect(1)  # all of it takes a fifth of a second where transformers is loaded
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
