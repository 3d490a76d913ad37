"""Proves on a few samples that a forward's backward adds up: outputs may agree where gradients do not.

A custom `autograd.Function`, a hook or a straight-through estimator may mix samples in the backward alone (an auxiliary loss
over the batch), or scale by their number (LSQ: `1 / sqrt(h.numel())`, arXiv:1902.08153). A forward may also run a backward of
its own. Whole and parts get the same fixed gradient of their outputs, and the gradients of parameters must be the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch

from memfit.batches.pieces import bounds
from memfit.capture.call import Call
from memfit.capture.output_leaf import name_in
from memfit.engine.call_context import without_autocast
from memfit.engine.compose_state import Composition
from memfit.engine.gradients import is_sharded
from memfit.engine.random_slices import Draws
from memfit.engine.staged import Staging
from memfit.equivalence.measured_loss import probes_of
from memfit.equivalence.proofs import comparable, frozen_norms
from memfit.equivalence.tolerances import (
    FLOORS,
    LOOSE,
    MOST,
    Deviation,
    full_precision,
    in_double,
    last_bits_flipped,
)

DRAWN = 4093
"""Number of random entries that the fixed gradients repeat; a prime, so that samples don't get the same ones."""
TINY = 1e-30
NEGLIGIBLE = 1e-2
"""Differences below this part of the tolerance, relative to all gradients, are rounding: a sum over samples may cancel to
zero, as the gradient of a bias before a softmax does."""

Gradients = list[torch.Tensor | None]


def backward_deviation(
    call: Call, sizes: Sequence[int], staging: Staging, composition: Composition, limit: float, accepted: Sequence[str]
) -> Deviation | None:
    """Returns the parameter whose gradient deviates most between the whole and the sum of its parts, None if none does.

    `call` holds the samples of the proof, with its outputs joined as they will be. `composition` tells how the state that its
    forward changes is composed, `limit` how much the outputs may differ. Compares a bounded choice of parameters (`probes_of`).
    Left out are gradients of outputs that were `accepted` as they are, and of the model's own loss: its weighting is proven on
    gradients.
    """
    compared = _Compared(frozen_norms(call), staging, composition, accepted)
    with full_precision(call.device) as arithmetic:
        try:
            whole, parts = compared.whole_and_parts(sizes)
        except _InnerBackward as found:
            return Deviation(str(found), math.inf, 0.0, by="inner")
        limit = max([limit, *(arithmetic.tolerance(dtype) for dtype in compared.dtypes)])
        return _worst(compared.names, whole, parts, limit, cache(lambda: compared.near(sum(sizes))))


class _InnerBackward(Exception):
    """The forward ran a backward of its own, which left a gradient in the parameter of this name."""


class _Compared:
    def __init__(self, call: Call, staging: Staging, composition: Composition, accepted: Sequence[str]) -> None:
        self._call, self._staging, self._composition = call, staging, composition
        names = enumerate(name_in(leaf.path) for leaf in call.outputs.leaves)
        self._left_out = {call.outputs.loss, *(i for i, name in names if name in accepted)}
        self._probes = probes_of(staging.parameters())
        named = {id(parameter): name for name, parameter in call.model.named_parameters()}
        self.names = [named.get(id(probe), "a parameter outside of the model") for probe in self._probes]
        self._incoming: list[torch.Tensor | None] = []

    @property
    def dtypes(self) -> set[torch.dtype]:
        """Of parameters and of outputs."""
        return {tensor.dtype for tensor in (*self._probes, *self._incoming) if tensor is not None}

    def whole_and_parts(self, sizes: Sequence[int]) -> tuple[Gradients, Gradients]:
        samples, draws = sum(sizes), Draws()
        with self._aside(), draws.recording():
            whole = self._gradients([(0, samples)])
        if draws.unsliced:
            draws = Draws(by_operations=True)
            with self._aside(), draws.recording():
                whole = self._gradients([(0, samples)])
        with self._aside(), self._composition.over_pass():
            return whole, self._gradients(list(bounds(sizes)), draws)

    def near(self, samples: int) -> Gradients:
        """The gradients of the whole for parameters that differ in their last bits."""
        with self._aside(), last_bits_flipped(self._probes):
            return self._gradients([(0, samples)])

    def _aside(self) -> AbstractContextManager[object]:
        return comparable(self._call.model, self._call.device)

    def _gradients(self, parts: Sequence[tuple[int, int]], draws: Draws | None = None) -> Gradients:
        """Return the gradients that these parts add up to. A forward that runs a backward of its own adds to them."""
        samples = self._call.samples
        try:
            with self._staging.swapped(), torch.enable_grad():
                for start, stop in parts:
                    self._composition.before_micro_batch()
                    with nullcontext() if draws is None else draws.sliced(start, stop, samples):
                        self._backward(start, stop)
                    self._composition.after_micro_batch(stop - start)
                found = self._staging.take(self._probes) if is_sharded(self._call.model) else None
            found = self._staging.take(self._probes) if found is None else found
            return [None if g is None else _local(g.detach()) for g in found]
        finally:
            self._staging.discard()

    def _backward(self, start: int, stop: int) -> None:
        call = self._call
        found = call.run(call.arguments(start, stop))
        if not self._incoming:
            if self._staging.staged_bytes():
                taken = zip(self.names, self._staging.take(self._probes))
                raise _InnerBackward(next((name for name, grad in taken if grad is not None), "a parameter"))
            self._incoming = [None if i in self._left_out else _fixed_like(leaf, i) for i, leaf in enumerate(found)]
        roots, incoming = call.outputs.parts_of_gradients(found, self._incoming, start, stop, call.samples)
        if roots:
            with without_autocast(call.device):
                torch.autograd.backward(roots, incoming)


def _fixed_like(leaf: object, seed: int) -> torch.Tensor | None:
    """Return a gradient for an output, the same every time, drawn without touching the random state."""
    if not isinstance(leaf, torch.Tensor) or not leaf.requires_grad or leaf.layout is not torch.strided:
        return None
    kind = torch.complex128 if leaf.is_complex() else torch.float64
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(DRAWN, dtype=kind, generator=generator, device="cpu").to(leaf.device, leaf.dtype)
    drawn = drawn if leaf.numel() % DRAWN else drawn[:-2]  # else each sample would get the same
    times = -(-leaf.numel() // len(drawn))
    return drawn.expand(times, len(drawn)).reshape(-1)[: leaf.numel()].reshape(leaf.shape)


def _local(gradient: torch.Tensor) -> torch.Tensor:
    held = gradient.to_local() if hasattr(gradient, "to_local") else gradient  # type: ignore[attr-defined]
    held = held.to_dense() if held.is_sparse else held
    return torch.view_as_real(held) if held.is_complex() else held


def _worst(
    names: Sequence[str], whole: Gradients, parts: Gradients, limit: float, near: Callable[[], Gradients]
) -> Deviation | None:
    """Return the deviation of the parameter that deviates most beyond the limit. Half precision is compared in all parameters
    together, as a sum that cancels rounds by more than it is."""
    norms = [_apart(g, None) for g in whole]
    off = [_apart(a, b) for a, b in zip(whole, parts)]
    for i, norm in enumerate(norms):
        if not math.isfinite(norm) or (limit >= LOOSE and not math.isfinite(off[i])):
            norms[i] = off[i] = 0.0  # it says nothing; half precision may overflow
    every = math.hypot(*norms)
    if limit >= LOOSE:
        apart = [not off[i] <= limit * every for i in range(len(names))]
    else:
        apart = [not off[i] <= max(limit * norms[i], NEGLIGIBLE * limit * every) for i in range(len(names))]
    if not any(apart):
        return None
    rounding = [FLOORS * _apart(a, b) for a, b in zip(whole, near())]

    def is_rounding(i: int) -> bool:
        return off[i] <= rounding[i] and (rounding[i] <= MOST * norms[i] or off[i] <= limit * every)

    found = [i for i, differs in enumerate(apart) if differs and not is_rounding(i)]
    if not found:
        return None
    worst = max(found, key=lambda i: off[i] / max(norms[i], TINY))
    return Deviation(names[worst], off[worst] / max(norms[worst], TINY), limit, by="backward")


def _apart(one: torch.Tensor | None, other: torch.Tensor | None) -> float:
    """Return the L2 norm of the difference, where None stands for zeros."""
    given = [gradient for gradient in (one, other) if gradient is not None]
    if not given:
        return 0.0
    differences = (some[0] - some[1] if len(some) > 1 else some[0] for some in in_double(*given))
    return math.sqrt(sum(float(difference.square().sum()) for difference in differences))
