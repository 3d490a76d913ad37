"""Compares the gradient of one effective batch run whole, as in plain PyTorch, and in unequal micro-batches.

Both use the same samples and random draws (the whole's, in slices), with batch norm frozen and no activation checkpointing, and
leave no trace. Not covered: the optimizer step, and draws inside fused kernels (named in the result).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from memfit._errors import UsageError
from memfit.batches.pieces import sizes
from memfit.batches.weights import Count
from memfit.engine.accumulate import accumulate
from memfit.engine.call_context import without_autocast
from memfit.engine.planning_scope import reaching
from memfit.engine.random_slices import Draws
from memfit.engine.weighting import CountOf
from memfit.engine.work import Work, checked_loss
from memfit.equivalence.proofs import comparable
from memfit.equivalence.tolerances import FLOORS, full_precision, last_bits_flipped
from memfit.planning.checkpointed import most_fitting
from memfit.reporting.verification import Verification
from memfit.runtime.core import Core, Reference

MOST = 32
"""Maximum number of samples for a verification."""
LAW = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Relative gradient error that counts as equal, unless the floating-point floor is higher."""


def unequal(samples: int, least: int = 1) -> tuple[int, ...]:
    """Returns at least three micro-batch sizes if there are enough samples. They differ, but one repeats, since most are equal
    in training: 24 = 3 + 7 + 11 + 3."""
    if samples < 3 * least:
        return sizes(samples, least, least)
    if samples >= 10 * least:
        few = max(least, (samples - 1) // 6)
        rest = samples - 2 * few
        less = rest // 2 - max(1, rest // 8)
        return few, less, rest - less, few
    third = samples // 3
    less = max(1, third - max(1, third // 3)) if third > 1 else 1
    less = max(least, less)
    return less, third, samples - third - less


def verification_of(core: Core, reference: Reference | None) -> Verification:
    """Verifies the gradient of one effective batch. Raises UsageError if there is nothing to compare yet."""
    if reference is None and core.steps:
        raise UsageError(
            "verifying a run",
            found="every batch ran whole so far, as the script wrote it, so there is nothing to compare",
            next_move="to compare anyway, wrap with a micro_batch= smaller than the batch",
        )
    if reference is None:
        raise UsageError(
            "verifying a run",
            found="no batch was cut yet, so there is nothing to compare",
            next_move="run one training step first (script mode), or pass loss_fn= with a loader or sample to wrap",
        )
    samples = _fitting(core, reference)
    for by_operations in (False, True):
        draws = Draws(by_operations=by_operations)
        aside = comparable(core.model, core.device)
        with reaching(*core.reached), aside, full_precision(core.device), core.in_force.without_levers():
            whole = _whole(core, reference.work(samples), samples, draws.recording)
            if draws.unsliced and not by_operations:
                continue
            with last_bits_flipped(core.staging.parameters()):
                nearby = _whole(core, reference.work(samples), samples, partial(draws.sliced, 0, samples, samples))
            parts = _parts(core, reference, unequal(samples, core.least), samples, draws)
            if reference.reversible:
                again = _whole(core, reference.work(samples, backwards=True), samples, partial(draws.reversed, samples))
                orders = whole, again
            else:
                orders = parts, _parts(core, reference, unequal(samples, core.least)[::-1], samples, draws)
        return _compare(core, whole, parts, (orders, (whole, nearby)), samples, draws)
    raise AssertionError("unreachable: the second round always returns")


@dataclass(frozen=True)
class _Gradient:
    loss: float
    gradients: list[torch.Tensor | None]


def _whole(core: Core, work: Work, samples: int, drawing: Callable[[], Any]) -> _Gradient:
    parameters = core.staging.parameters()
    try:
        with work.composition.kept(), core.staging.swapped():
            inputs, _ = work.inputs(0, samples, None)
            with drawing():
                loss = checked_loss(work.loss(work.forward(inputs)))
            with without_autocast(core.device):
                loss.backward()
        return _Gradient(float(loss.detach()), core.staging.take(parameters))
    finally:
        core.staging.discard()


def _parts(core: Core, reference: Reference, pieces: Sequence[int], samples: int, draws: Draws) -> _Gradient:
    core.accumulator.prepare(len(pieces))
    work = _Sliced(reference.work(samples), draws)
    try:
        with work.composition.kept():
            total = accumulate(work, pieces, core.staging, reference.weighting)
    finally:
        core.staging.discard()
    wanted = len(total.receivers) - len(work.extra_receivers())
    scaled = [None if g is None else g * total.factor for g in total.gradients[:wanted]]
    return _Gradient(float(total.value), scaled)


class _Sliced:
    """Work whose micro-batches receive slices of the whole's draws."""

    def __init__(self, work: Work, draws: Draws) -> None:
        self._work, self._draws = work, draws
        self.samples, self.device, self.composition = work.samples, work.device, work.composition
        self.extra_receivers, self.extra_gradients, self.counted = work.extra_receivers, work.extra_gradients, work.counted
        self._span = (0, 0)

    def inputs(self, start: int, stop: int, count: CountOf | None) -> tuple[Any, Count | None]:
        self._span = (start, stop)
        return self._work.inputs(start, stop, count)

    def forward(self, inputs: Any) -> Any:
        return inputs

    def loss(self, outputs: Any) -> torch.Tensor:
        with self._draws.sliced(*self._span, self.samples):
            return self._work.loss(self._work.forward(outputs))


def _fitting(core: Core, reference: Reference) -> int:
    """Return the maximum number of samples that fit whole beside two more sets of gradients."""
    most = min(MOST, reference.samples)
    profile = core.profile
    if profile is None:
        return most
    room = core.memory.budget().room - 2 * profile.model.gradient_bytes
    return most_fitting(profile, most, room)[0] or min(2, most)


def _compare(
    core: Core,
    whole: _Gradient,
    parts: _Gradient,
    same: Sequence[tuple[_Gradient, _Gradient]],
    samples: int,
    draws: Draws,
) -> Verification:
    """Compare. `same` are pairs that differ by rounding alone; their largest difference is the floating-point floor."""
    norm = max(_norm(whole.gradients), 1e-30)
    floor = max(_distance(a.gradients, b.gradients) / norm for a, b in same)
    error = _distance(whole.gradients, parts.gradients) / norm
    name, worst = _worst(core, whole, parts, norm)
    notes = ["batch norm frozen for the comparison"] if core.normalises_batches() else []
    notes += ["run eagerly for the comparison, not as compiled"] if core.compiled else []
    return Verification(
        relative_error=error,
        floor=floor,
        samples=samples,
        pieces=unequal(samples, core.least),
        worst_parameter=name,
        worst_error=worst,
        loss_error=abs(parts.loss - whole.loss) / max(abs(whole.loss), 1e-30),
        tolerance=max(_law(whole.gradients), FLOORS * floor),
        unsliced=tuple(dict.fromkeys(draws.unsliced)),
        notes=tuple(notes),
    )


def _worst(core: Core, whole: _Gradient, parts: _Gradient, norm: float) -> tuple[str, float]:
    names = {id(p): name for name, p in core.model.named_parameters()}
    errors = [
        (_distance([a], [b]) / norm, names.get(id(p), "a parameter outside the model"))
        for p, a, b in zip(core.staging.parameters(), whole.gradients, parts.gradients)
    ]
    error, name = max(errors)
    return name, error


def _law(gradients: Sequence[torch.Tensor | None]) -> float:
    return max((LAW.get(g.dtype, LAW[torch.float32]) for g in gradients if g is not None), default=1e-6)


def _norm(gradients: Sequence[torch.Tensor | None]) -> float:
    return sum(float(g.double().pow(2).sum()) for g in gradients if g is not None) ** 0.5


def _distance(a: Sequence[torch.Tensor | None], b: Sequence[torch.Tensor | None]) -> float:
    total = 0.0
    for x, y in zip(a, b):
        if (x is None) != (y is None):
            return float("inf")  # an optimizer treats None and zero differently
        if x is not None and y is not None:
            total += float((x.double() - y.double()).pow(2).sum())
    return total**0.5

