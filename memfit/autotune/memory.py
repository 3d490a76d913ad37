"""Tracks the memory that this process holds and may hold while it trains, by the measure of its budget.

On the CPU the measure is resident memory, or reserved memory under limits like `ulimit -d`. Not covered: memory that other
processes take between two measurements.
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

from memfit.engine.gradients import bytes_here
from memfit.hardware.allocator_limit import can_limit, reserving_at_most
from memfit.hardware.budget import Budget, margin_for
from memfit.hardware.device import query_device
from memfit.hardware.exhausted import release_workspaces
from memfit.hardware.heap import free_heap, give_back_free_heap
from memfit.hardware.meter import Meter
from memfit.planning.checkpointed import with_blocks
from memfit.planning.plan import Plan
from memfit.profiling.allocator import HEAP_WASTE, HIGH_HEAP_WASTE, heap_peak, mapped_swing, thresholds_pinned
from memfit.profiling.profile import Profile
from memfit.tracing.build_profile import state_bytes, state_there

ONE_MORE = 0.8
"""Fraction of its heap peak that one more micro-batch may add to what the C library already keeps."""
BETWEEN = 4
"""Free heap pages may not use 1/BETWEEN of the room above a plan's peak: the optimizer step, proofs and the script run
between micro-batches (354 of 355 MiB were held when the heap could fill up to the next micro-batch)."""
AHEAD = 1.5
"""A limit on reserved memory may bind first if less than AHEAD times the budget is left (an LSTM's kernels reserve 1.6 times
what they touch)."""


_TRAINING: weakref.WeakSet[Memory] = weakref.WeakSet()
"""The models that train in this process. A script may wrap a generator and a discriminator separately."""


class Memory:
    """Measures and budgets the memory of one model and optimizer.

    Attributes: `reserved` (whether the limit that binds counts reserved memory), `heap_waste` (assumed cost of one byte in the
    C library's heap), `no_new_kernels` (whether steps run without oneDNN, which makes and keeps kernels for every shape).
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
        self._limited = budget.source.startswith("as asked") and can_limit(device)
        explicit = device.type == "cpu" and budget.held == 0
        self._base = 0 if explicit else max(0, budget.held - self._known_bytes())

    def expect_states_of(self, optimizers: Sequence[Optimizer]) -> None:
        """Keeps room for the states of the model's other optimizers, which their first steps create."""
        self._coming = [(optimizer, state_bytes(optimizer)) for optimizer in optimizers]

    def train(self) -> None:
        """Makes other models of this process keep room for this one's gradients and optimizer state from now on."""
        self._state = state_bytes(self._optimizer)
        _TRAINING.add(self)

    def end(self) -> None:
        """Marks the end of this model's training."""
        _TRAINING.discard(self)

    def lacking(self, beside: Memory) -> int:
        """Returns the bytes of gradients and optimizer state that the next step creates, without those of `beside`."""
        if self._model is beside._model:
            return 0
        others = {id(p) for p in beside._model.parameters()}
        gradients = sum(
            bytes_here(p) for p in self._model.parameters() if p.requires_grad and p.grad is None and id(p) not in others
        )
        own_state = 0 if self._optimizer is beside._optimizer else max(0, self._state - state_there(self._optimizer))
        return gradients + own_state

    def budget(self) -> Budget:
        """Returns the budget as of now: `held` is what is or will be held besides the tensors that profiles count, and `limit`
        allows for what is still free."""
        self._give_back()
        known = self._known_bytes()
        coming = sum(max(0, size - state_there(optimizer)) for optimizer, size in self._coming)
        coming += sum(other.lacking(self) for other in _TRAINING)
        held = max(0, self._base + self._meter.in_use() - known - self._start) + coming
        # Planning, libraries and other processes have taken memory since the first measurement.
        free = query_device(self._device).free
        limit = min(self._budget.limit, held + known + free)
        margin = min(self._budget.margin, margin_for(self._device.type, limit))
        return replace(self._budget, held=held, limit=limit, margin=margin)

    def left(self) -> int:
        """Returns the bytes still available beyond everything held."""
        return self.budget().room - self._known_bytes()

    @property
    def allowed(self) -> Budget:
        """The original budget."""
        return self._budget

    @property
    def fast_dtypes(self) -> tuple[str, ...]:
        """The precisions in which the device computes fast."""
        return self._budget.device.fast_dtypes

    def drift(self, plan: Plan) -> int:
        """Returns the bytes reserved since the plan was made that it does not count: kernels for new shapes. 0 if reserved
        memory is not limited."""
        if not self.reserved:
            return 0
        return max(0, self._base + self._meter.in_use() - free_heap() - self._known_bytes() - self._start - plan.held)

    def allowance(self, plan: Plan) -> Budget:
        """Returns the budget of the time when the plan was made."""
        return replace(self._budget, held=plan.held, limit=plan.limit, margin=plan.margin)

    def heap_ceiling(self, plan: Plan, profile: Profile | None) -> int | None:
        """Returns the bytes of anonymous memory above which free heap pages are released; None if they do not matter.

        Even for small micro-batches the heap may grow with every one: glibc leaves gaps between tensors that no later tensor
        fits into (fragmentation: 320 MiB were held after 120 micro-batches of 20 MiB each).
        """
        if self._device.type != "cpu" or sys.platform != "linux" or thresholds_pinned() or self.reserved:
            return None  # released pages still count as reserved
        allowed = plan.limit - plan.margin
        timeline = None if profile is None else with_blocks(profile, plan.checkpoint).timeline
        if timeline is None:  # an upper bound for one micro-batch, mapped or in the heap
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
        """Returns the peak bytes since the last reset, by the budget's measure; None if the platform does not report it."""
        if self._resting:
            return self._seen
        peak = self._meter.peak()
        return self._seen if peak is None else max(self._seen or 0, peak - self._start + self._base)

    def reset_peak(self) -> None:
        """Resets the measured peak."""
        self._seen, self._resting = None, False
        self._meter.reset_peak()

    def rest(self) -> None:
        """Excludes memory from the measured peak until the next step is done, because comparing and drawing also need room."""
        self._seen, self._resting = self.measured_peak(), True

    def stepped(self) -> None:
        """Marks a step as done. The next one counts towards the peak again."""
        if self._resting:
            self._resting = False
            self._meter.reset_peak()

    @contextmanager
    def sparing_kernels(self) -> Iterator[None]:
        """Avoids new kernels inside a proof, for micro-batch sizes that may never run again.

        oneDNN generates and keeps code for every shape of a convolution. Each of its buffers reserves 256 KiB and touches a
        tenth, which matters only if reserved memory is limited. Then parts and whole are compared with torch's own kernels.
        """
        if not self.reserved:
            yield
            return
        with _without_onednn():
            yield

    def stop_new_kernels(self) -> bool:
        """Runs micro-batches without oneDNN from now on. Returns False if they already do, or if torch's kernels take more
        (convolutions unfold their inputs) or were not measured to take less (recurrent layers)."""
        kinds = (nn.modules.conv._ConvNd, nn.RNNBase)
        if self.no_new_kernels or any(isinstance(module, kinds) for module in self._model.modules()):
            return False
        self.no_new_kernels = True
        return True

    def running(self, plan: Plan | None = None, largest: int = 1) -> AbstractContextManager[None]:
        """Returns the context that micro-batches of at most `largest` samples run in. There a CUDA device's allocator keeps the
        budget that was asked for, unless the process now holds so much else that the plan has no room in it, memory ran out
        before, or smaller micro-batches could not save the batch."""
        if self.no_new_kernels:
            return _without_onednn()
        if not self._limited or largest <= 1 or plan is None:
            return nullcontext()
        limit = self._budget.limit - self._meter.beyond
        if self._meter.in_use() - self._meter.beyond - self._known_bytes() + plan.predicted.upper > limit:
            return nullcontext()
        return reserving_at_most(limit, self._device)

    def ran_out(self) -> None:
        """Lets the allocator reserve what there is from now on: what ran out may be needed by others than the micro-batches."""
        self._limited = False

    def give_back_cache(self) -> None:
        """Releases what planning, or micro-batches of other sizes, left behind. The segments of an accelerator's cache fit the
        sizes that they were made for: others split them, and what is left of them fits nothing."""
        if self._device.type == "cpu":
            give_back_free_heap()
        else:
            torch.get_device_module(self._device).empty_cache()

    def _give_back(self) -> None:
        """Release what planning or a step left behind and what later work recreates, so that it does not count as held."""
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
    with warnings.catch_warnings():  # setting any mkldnn flag makes torch warn about a flag for Intel GPUs
        warnings.simplefilter("ignore")
        flags.__enter__()
    try:
        yield
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            flags.__exit__(None, None, None)


def _limits_what_is_reserved(budget: Budget) -> bool:
    """Whether a limit that may bind counts reserved memory, touched or not."""
    limits = budget.device.limits
    if not limits or not limits[0].name.startswith("RLIMIT"):
        return False
    # Reserved memory exceeds resident memory, so this limit may bind first even under a smaller budget.
    return budget.source.startswith("probed") or limits[0].left < AHEAD * (budget.limit - budget.held)
