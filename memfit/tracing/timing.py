"""Measures seconds on the device: micro-batches of a few sizes, the forwards of their blocks, and the optimizer step.

Timing has no side effects: gradients are discarded, buffers and random state are restored, and the optimizer step runs on a
bounded clone. Not covered: time in the data loader and in the script around the wrapped forward.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memfit._units import MiB
from memfit.batches.weights import Count
from memfit.engine.accumulate import Pass, gathering
from memfit.engine.shadow_optimizer import shadow_optimizer, step
from memfit.engine.staged import Staging
from memfit.engine.weighting import CountOf, Weighting
from memfit.engine.work import Work
from memfit.hardware.exhausted import is_out_of_memory
from memfit.hardware.heap import free_heap, give_back_free_heap
from memfit.hardware.meter import Meter
from memfit.profiling.allocator import thresholds_pinned
from memfit.profiling.seconds import Timing, timing_at
from memfit.tracing.sandbox import Traces, leave_no_trace, steps_undone
from memfit.tracing.write_guard import watched

CLONE_LIMIT = 64 * MiB
"""Bytes of parameters whose optimizer step is timed; the rest is assumed to cost the same per byte."""


class Stopwatch:
    """Times micro-batches on one device; every measurement discards what it computed. `reserved` selects that scale of `Meter`.
    `make_room` is called with each micro-batch's samples before it runs. If it trims the heap, it returns the bytes that the
    heap may take beyond the tensors."""

    def __init__(
        self,
        model: nn.Module,
        staging: Staging,
        weighting: Weighting,
        device: torch.device,
        blocks: Iterable[str] = (),
        *,
        reserved: bool = False,
        trimmed: bool = False,
        make_room: Callable[[int], int] = lambda samples: 0,
    ) -> None:
        modules = dict(model.named_modules())
        self._blocks = {modules[name]: name for name in blocks}
        self._model, self._staging, self._weighting, self._device = model, staging, weighting, device
        self._meter: Meter | None = None
        self._rewind: Callable[[], None] = _nothing
        self._reserved, self._trimmed, self._make_room = reserved, trimmed, make_room
        # Free pages of the heap may or may not be resident: what remains is only known where that does not matter.
        self._tells_kept = device.type == "cpu" and (reserved or thresholds_pinned())

    @contextmanager
    def session(self, work: Work, first: int = 1) -> Iterator[None]:
        """Lets micro-batches accumulate into staged gradients, as all but the first of a step do, and restores everything on
        exit. `first` is the number of samples of the warm-up micro-batch that creates them."""
        with (
            leave_no_trace(self._model, self._device, watching=False) as traces,
            gathering(self._staging, self._weighting),
        ):
            try:
                # Kernels are selected and libraries initialized once per process: the first micro-batch is not representative.
                self._first(work, first, traces)
                self._staging.fill()
                self._meter = Meter(self._device, reserved=self._reserved)
                yield
            finally:
                self._staging.discard()
                self._meter, self._rewind = None, _nothing

    def _first(self, work: Work, samples: int, traces: Traces) -> None:
        """Runs a warm-up micro-batch, and records what it writes. Nothing compiles while writes are watched, and some tensor
        subclasses (CausalBias) cannot be created there: then one runs unwatched."""
        log = traces.log
        watches = log is not None
        if log is not None:
            try:
                with watched(log):
                    Pass(work, self._staging, self._weighting, 1.0).micro_batch(0, samples)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                watches = False
                self._staging.discard()
                for buffer in self._model.buffers():
                    log.about_to_write(buffer)
        if traces.moved():
            self._rewind = traces.rewind
        if not watches or "torch._dynamo" in sys.modules:
            self._rewind()
            Pass(work, self._staging, self._weighting, 1.0).micro_batch(0, samples)

    def run(self, work: Work, samples: int) -> Timing:
        """Times forward and backward of one micro-batch of `samples`, inside a session."""
        assert self._meter is not None
        self._rewind()
        marks: list[float] = []
        found: dict[str, float] = {}
        timed = _Timed(work, self._now, marks)
        if self._trimmed:
            give_back_free_heap()  # this one would reuse what an earlier micro-batch left free, which hides what it takes
        heap = self._make_room(samples)
        self._meter.reset_peak()
        before, used, staged = self._meter.held(), self._used(), self._staging.staged_bytes()
        with self._block_times(found):
            Pass(timed, self._staging, self._weighting, 1.0).micro_batch(0, samples)
        end = self._now()
        peak = self._meter.peak()
        begun, forward_done = marks[0], marks[-1]  # a micro-batch of weight zero has no forward
        growth = None if peak is None else max(0, peak - before - heap)
        # Sparse gradients accumulate more rows, up to all of them: these bytes persist, but are not kernels.
        kept = max(0, self._used() - used - (self._staging.staged_bytes() - staged))
        return Timing(samples, end - begun, forward_done - begun, tuple(found.items()), growth, kept)

    def _used(self) -> int:
        """Bytes held now, without free memory of the heap."""
        if not self._tells_kept or self._meter is None:
            return 0
        if self._trimmed and not self._reserved:  # free_heap() still counts pages that were given back
            give_back_free_heap()
            return self._meter.held()
        return self._meter.held() - free_heap()

    def _now(self) -> float:
        _wait_for(self._device)
        return time.perf_counter()

    @contextmanager
    def _block_times(self, found: dict[str, float]) -> Iterator[None]:
        if not self._blocks:
            yield
            return
        begun: dict[nn.Module, float] = {}

        def before(module: nn.Module, args: object) -> None:
            if module in self._blocks:
                begun[module] = self._now()

        def after(module: nn.Module, args: object, out: object) -> None:
            if module in begun:
                found[self._blocks[module]] = self._now() - begun.pop(module)

        hooks = (
            nn.modules.module.register_module_forward_pre_hook(before),
            nn.modules.module.register_module_forward_hook(after),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _nothing() -> None:
    pass


class _Timed:
    """Wraps a work, and records when its micro-batch begins and when its forward ends."""

    def __init__(self, work: Work, now: Callable[[], float], marks: list[float]) -> None:
        self._work, self._now, self._marks = work, now, marks
        self.samples, self.device, self.composition = work.samples, work.device, work.composition
        self.extra_receivers, self.extra_gradients, self.counted = work.extra_receivers, work.extra_gradients, work.counted

    def inputs(self, start: int, stop: int, count: CountOf | None) -> tuple[Any, Count | None]:
        found = self._work.inputs(start, stop, count)
        self._marks.append(self._now())
        return found

    def forward(self, inputs: Any) -> Any:
        return self._work.forward(inputs)

    def loss(self, outputs: Any) -> torch.Tensor:
        loss = self._work.loss(outputs)
        self._marks.append(self._now())
        return loss


MADE = 1 << 20
"""A micro-batch that keeps more bytes is taken to have created kernels, which takes longer than running them: it runs again."""

MORE_ROUNDS = 7
"""Maximum number of times that sizes run again, while there is time."""

Admit = Callable[[int, tuple[Timing, ...]], bool]
"""Whether micro-batches of this size fit, judging by the timings of smaller ones."""


Longer = Callable[[tuple[Timing, ...]], bool]
"""Whether sizes may be timed for longer, judging by the timings so far."""


def time_sizes(
    watch: Stopwatch,
    work: Work,
    sizes: Sequence[int],
    seconds: float,
    admit: Admit | None = None,
    *,
    least: int = 1,
    longer: Longer | None = None,
    regardless: Longer | None = None,
) -> tuple[Timing, ...]:
    """Times each of `sizes` (ascending) within about `seconds`, in rounds so that a disturbance affects all sizes. Stops at a
    size that is not admitted or would take too long; for time, never before the `least` smallest, nor while `regardless` says
    that one more has to run. Then sizes run again, largest first: plans use them, and larger sizes extrapolate from them."""
    found: dict[int, list[Timing]] = {}
    with watch.session(work, sizes[0]):
        stop = time.perf_counter() + seconds  # one-time setup (kernels, libraries) does not shorten the measurements
        for size in sizes:
            best = tuple(_together(timings) for timings in found.values())
            if best and longer is not None and longer(best):
                stop, longer = stop + seconds, None
            needed = len(best) < least or (regardless is not None and regardless(best))
            if not needed and time.perf_counter() + timing_at(best, size).seconds > stop:
                break
            if best and admit is not None and not admit(size, best):
                break
            found[size] = [watch.run(work, size)]
            if found[size][0].kept > MADE:
                found[size].append(watch.run(work, size))
        for size in sorted(found, reverse=True) * MORE_ROUNDS:
            if time.perf_counter() + _together(found[size]).seconds <= stop:
                found[size].append(watch.run(work, size))
    return tuple(_together(timings) for _, timings in sorted(found.items()))


def _together(timings: Sequence[Timing]) -> Timing:
    """Combines several measurements of one size: the fastest, with the most memory seen besides what remained."""
    growths = [t.growth - t.kept for t in timings if t.growth is not None]
    kept = sum(t.kept for t in timings)
    quickest = min(timings, key=lambda t: t.seconds)
    return replace(quickest, growth=max(growths) + kept if growths else None, kept=kept)


def optimizer_seconds(optimizer: Optimizer, device: torch.device, limit: int = CLONE_LIMIT, repeats: int = 3) -> float:
    """Returns the seconds of one optimizer step, scaled up from the steps of a clone of at most `limit` bytes of parameters."""
    clone, chosen, part = clone_of_optimizer(optimizer, limit)
    if not chosen:
        return 0.0
    seconds = []
    with steps_undone(optimizer, device, watching=False) as traces:
        for turn in range(repeats + 1):
            for p in chosen:
                p.grad = torch.zeros_like(p)
            if turn and traces is not None:
                traces.rewind()
            begun = time.perf_counter()
            with watched(traces.log) if turn == 0 and traces is not None and traces.log is not None else nullcontext():
                step(clone)
            _wait_for(device)
            seconds.append(time.perf_counter() - begun)
    return min(seconds[1:]) / part


def _wait_for(device: torch.device) -> None:
    """Synchronizes the device, which need not be the current one."""
    if device.type == "mps":
        torch.mps.synchronize()
    elif device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def clone_of_optimizer(optimizer: Optimizer, limit: int) -> tuple[Optimizer, list[torch.Tensor], float]:
    """Returns (an optimizer of the same kind over copies of some parameters, those copies, their share of all bytes). Of
    shards, this rank's part is copied: the norm of a DTensor would wait for the other ranks."""
    own = {id(p): _local(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    trained = [(key, p) for key, p in own.items() if p.numel() or len(own) == 1]
    total = sum(p.numel() * p.element_size() for _, p in trained)
    chosen: dict[int, torch.Tensor] = {}
    size = 0
    for key, p in sorted(trained, key=lambda each: each[1].numel()):
        if chosen and size + p.numel() * p.element_size() > limit:
            break
        size += p.numel() * p.element_size()
        chosen[key] = nn.Parameter(p.clone())
    clone = shadow_optimizer(optimizer, lambda p: chosen.get(id(p)), lambda t: _local(t).clone())
    return clone, list(chosen.values()), size / max(total, 1)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    found = tensor.detach()
    return found.to_local() if hasattr(found, "to_local") else found  # type: ignore[attr-defined]
