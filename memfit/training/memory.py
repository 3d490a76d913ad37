"""What this process holds and may hold while it trains, on the scale that its budget is counted on.

On the CPU there are two scales: resident memory, and reserved memory, which limits of the kind of `ulimit -d` count. Not
covered: memory that other processes take between two looks.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import nn
from torch.optim import Optimizer

from memfit.engine.staged import bytes_here
from memfit.hardware.budget import Budget, margin_for
from memfit.hardware.device import photograph
from memfit.hardware.exhausted import release_workspaces
from memfit.hardware.heap import free_heap, give_back_free_heap
from memfit.hardware.meter import Meter
from memfit.planning.plan import Plan
from memfit.planning.search import with_blocks
from memfit.profiling.allocator import HEAP_WASTE, HIGH_HEAP_WASTE, heap_peak, mapped_swing, thresholds_pinned
from memfit.profiling.build import state_bytes, state_there
from memfit.profiling.profile import Profile

ONE_MORE = 0.8
"""How much more of that one micro-batch may add to what the C library keeps already."""
BETWEEN = 4
"""One part in so many of the room above a plan's peak that free heap pages leave alone: the optimizer's step, proofs and the
script itself come between micro-batches (354 of 355 MiB were held where the heap could fill up to the next micro-batch)."""
AHEAD = 1.5
"""A limit on reserved memory may bind first where less than this many times the budget is left (an LSTM's kernels reserve
1.6 times what they touch)."""


_TRAINING: weakref.WeakSet[Memory] = weakref.WeakSet()
"""Of the models that train in this process: a script may wrap its generator and its discriminator one by one."""


class Memory:
    """The memory of one model, optimizer and budget.

    Attributes: `reserved` (whether what binds is a limit on reserved memory), `heap_waste` (what one byte of the C library's
    heap is taken to cost), `no_new_kernels` (whether steps run without what makes kernels for every shape, and keeps them).
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, device: torch.device, budget: Budget) -> None:
        self._model, self._optimizer, self._device = model, optimizer, device
        self._give_back()
        self._coming: list[tuple[Optimizer, int]] = []
        self._state = 0
        self._seen: int | None = None
        self._resting = False
        self.reserved = device.type == "cpu" and _limits_what_is_reserved(budget)
        self._meter = Meter(device, reserved=self.reserved)
        self._start = self._meter.in_use() - self._known_bytes()
        self._budget = budget
        self.heap_waste = HIGH_HEAP_WASTE if self.reserved else HEAP_WASTE
        self.no_new_kernels = False
        explicit = device.type == "cpu" and budget.held == 0
        self._base = 0 if explicit else max(0, budget.held - self._known_bytes())

    def expect_states_of(self, optimizers: Sequence[Optimizer]) -> None:
        """Keep room for the states of other optimizers of the model, whose first steps make them."""
        self._coming = [(optimizer, state_bytes(optimizer)) for optimizer in optimizers]

    def train(self) -> None:
        """From now on other models of this process keep room for this one's gradients and optimizer state."""
        self._state = state_bytes(self._optimizer)
        _TRAINING.add(self)

    def end(self) -> None:
        """It trains no more."""
        _TRAINING.discard(self)

    def lacking(self, beside: Memory) -> int:
        """Bytes of gradients and optimizer state that its next step makes and are not there yet, unless they are `beside`'s."""
        if self._model is beside._model:
            return 0
        others = {id(p) for p in beside._model.parameters()}
        gradients = sum(
            bytes_here(p) for p in self._model.parameters() if p.requires_grad and p.grad is None and id(p) not in others
        )
        own_state = 0 if self._optimizer is beside._optimizer else max(0, self._state - state_there(self._optimizer))
        return gradients + own_state

    def budget(self) -> Budget:
        """The budget with what is held now beside the tensors that profiles count, or will be by other models, and with what
        can still be had now."""
        self._give_back()
        known = self._known_bytes()
        coming = sum(max(0, size - state_there(optimizer)) for optimizer, size in self._coming)
        coming += sum(other.lacking(self) for other in _TRAINING)
        held = max(0, self._base + self._meter.in_use() - known - self._start) + coming
        # Planning itself, libraries and other processes have taken memory since the first look.
        free = photograph(self._device).free
        limit = min(self._budget.limit, held + known + free)
        margin = min(self._budget.margin, margin_for(self._device.type, limit))
        return replace(self._budget, held=held, limit=limit, margin=margin)

    def left(self) -> int:
        """Bytes that can be had now beside all that is held."""
        return self.budget().room - self._known_bytes()

    @property
    def allowed(self) -> Budget:
        """The budget, as it was at first."""
        return self._budget

    @property
    def fast_dtypes(self) -> tuple[str, ...]:
        """The precisions that the device computes fast in."""
        return self._budget.device.fast_dtypes

    def drift(self, plan: Plan) -> int:
        """Bytes reserved since the plan was made beside what it counts: kernels for shapes that were new. 0 where what is
        reserved is not limited."""
        if not self.reserved:
            return 0
        return max(0, self._base + self._meter.in_use() - free_heap() - self._known_bytes() - self._start - plan.held)

    def allowance(self, plan: Plan) -> Budget:
        """The budget as it was when the plan was made."""
        return replace(self._budget, held=plan.held, limit=plan.limit, margin=plan.margin)

    def heap_ceiling(self, plan: Plan, profile: Profile | None) -> int | None:
        """Bytes of anonymous memory from which on free heap pages are given back; None where they cannot matter.

        However small a micro-batch is, what the heap keeps may grow with every one that runs: glibc leaves pieces between
        tensors that no later one fits into (320 MiB were held after 120 micro-batches that take 20 MiB each).
        """
        if self._device.type != "cpu" or sys.platform != "linux" or thresholds_pinned() or self.reserved:
            return None  # pages given back still count as reserved
        allowed = plan.limit - plan.margin
        timeline = None if profile is None else with_blocks(profile, plan.checkpoint).timeline
        if timeline is None:  # what one micro-batch may add at most, mapped or in the heap
            facts = None if profile is None else profile.model
            fixed = 0 if facts is None else facts.parameter_bytes + facts.gradient_bytes + state_bytes(self._optimizer)
            kept = max(0, plan.predicted.upper - plan.predicted.peak) / self.heap_waste
            swing = max(0.0, plan.predicted.upper - fixed - ONE_MORE * kept)
        else:
            kept, swing = heap_peak(timeline, plan.micro_batch), mapped_swing(timeline, plan.micro_batch)
            swing += 0 if profile is None else profile.excess_at(plan.micro_batch)
        between = max(0, allowed - plan.held - plan.predicted.peak) / BETWEEN
        return int(allowed - self._base + self._start - swing - ONE_MORE * kept - between)

    def measured_peak(self) -> int | None:
        """Most bytes held since the meter was reset, on the budget's scale; None where the platform cannot tell."""
        if self._resting:
            return self._seen
        peak = self._meter.peak()
        return self._seen if peak is None else max(self._seen or 0, peak - self._start + self._base)

    def reset_peak(self) -> None:
        """Count the measured peak anew."""
        self._seen, self._resting = None, False
        self._meter.reset_peak()

    def rest(self) -> None:
        """Until a step is done, what is held does not count as the training's: comparing and drawing take room, too."""
        self._seen, self._resting = self.measured_peak(), True

    def stepped(self) -> None:
        """A step is done, the next one counts again."""
        if self._resting:
            self._resting = False
            self._meter.reset_peak()

    @contextmanager
    def sparing_kernels(self) -> Iterator[None]:
        """For proofs: inside, no kernels are made for sizes of micro-batches that may never run again.

        oneDNN generates code for every shape of a convolution and keeps it; each of its buffers reserves 256 KiB of which
        a tenth is touched, which only matters where reserved memory is limited. Parts and whole are compared with torch's
        own kernels then.
        """
        if not self.reserved:
            yield
            return
        with _without_onednn():
            yield

    def stop_new_kernels(self) -> bool:
        """From now on micro-batches run without oneDNN; False where they do already, and where torch's own kernels take more
        than these would (convolutions unfold their inputs) or were not measured to take less (recurrent layers)."""
        kinds = (nn.modules.conv._ConvNd, nn.RNNBase)
        if self.no_new_kernels or any(isinstance(module, kinds) for module in self._model.modules()):
            return False
        self.no_new_kernels = True
        return True

    def running(self) -> AbstractContextManager[None]:
        """What micro-batches run in."""
        return _without_onednn() if self.no_new_kernels else nullcontext()

    def _give_back(self) -> None:
        """What planning, or a step, has left behind and what comes makes anew is not held."""
        give_back_free_heap()
        release_workspaces(self._device)

    def _known_bytes(self) -> int:
        """Bytes of the tensors that profiles count: parameters, buffers, gradients, optimizer state."""
        found = {id(t): t for t in (*self._model.parameters(), *self._model.buffers())}
        for group in self._optimizer.param_groups:
            found.update({id(p): p for p in group["params"]})
        for p in list(found.values()):
            if p.grad is not None:
                found[id(p.grad)] = p.grad
        for state in self._optimizer.state.values():
            if isinstance(state, dict):
                found.update({id(v): v for v in state.values() if isinstance(v, torch.Tensor)})
        on_device = [t for t in found.values() if t.device.type == self._device.type]
        return sum(map(bytes_here, on_device))


@contextmanager
def _without_onednn() -> Iterator[None]:
    flags = torch.backends.mkldnn.flags(enabled=False)
    with warnings.catch_warnings():  # torch warns of a flag for Intel's GPUs whenever any of them is set
        warnings.simplefilter("ignore")
        flags.__enter__()
    try:
        yield
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            flags.__exit__(None, None, None)


def _limits_what_is_reserved(budget: Budget) -> bool:
    """Whether a limit that may bind counts what the process has reserved, touched or not."""
    limits = budget.device.limits
    if not limits or not limits[0].name.startswith("RLIMIT"):
        return False
    # Reserved memory runs ahead of what is resident, so that it may bind first even under a smaller budget.
    return budget.source.startswith("probed") or limits[0].left < AHEAD * (budget.limit - budget.held)
