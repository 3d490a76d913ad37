"""Measures the losses of some samples, their gradients, and what may weight them."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memfit._units import MiB
from memfit.batches.tree import tensors
from memfit.batches.weights import Count
from memfit.engine.batch_limits import Limits, SeenLimits
from memfit.engine.divisors import Number, divisors_of
from memfit.engine.gradients import gradients_of, is_sharded
from memfit.engine.idle_sums import Results, Seen
from memfit.engine.known_means import Terms, is_only_term, leaves_of
from memfit.engine.weighting import WeightsChanged
from memfit.engine.work import Work, checked_loss
from memfit.equivalence.host_reads import Reads
from memfit.equivalence.leaf_counts import LeafCount
from memfit.equivalence.loss_branches import Decides
from memfit.equivalence.tolerances import TOLERANCE

PROBED = 32 * MiB
"""Bytes of parameters whose gradients a proof compares."""


def probes_of(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns a bounded choice of parameters from the whole model, the smallest first."""
    total = sum(p.numel() * p.element_size() for p in parameters)
    if total <= PROBED:
        return list(parameters)
    chosen, size = [], 0
    for p in sorted(parameters, key=lambda p: p.numel()):
        size += p.numel() * p.element_size()
        if chosen and size > PROBED:
            break
        chosen.append(p)
    return chosen


@dataclass(frozen=True)
class MeasuredLoss:
    """The loss of some samples and what may weight it."""

    samples: int
    loss: float
    gradients: list[torch.Tensor | None]
    terms: int
    only_term: bool
    by_name: bool
    term_count: float
    counts: tuple[float, ...]
    divisors: list[Number] | None
    dtype: torch.dtype
    decides: Decides | None
    results: Seen
    limits: SeenLimits
    of_batch: bool
    """Whether it may depend on values of the batch."""

    @property
    def says_something(self) -> bool:
        """Whether it has a loss or a gradient. If not, the rest equals the whole under any weighting."""
        return self.loss != 0 or any(g is not None and bool(g.any()) for g in self.gradients)


@dataclass(frozen=True)
class MeasureLoss:
    """Measures the losses of some samples."""

    work: Work
    model: nn.Module
    probes: Sequence[torch.Tensor]
    counts: Sequence[LeafCount]
    by_name: bool
    called: nn.Module | None
    """The model, to detect a loss that decides by what it computed; None: not checked."""

    def at(self, start: int, stop: int, reads: Reads) -> tuple[MeasuredLoss, list[weakref.ref[torch.Tensor]]]:
        """Return (the loss of the samples `start:stop` with what may weight it, the leaves that receive gradients)."""
        found: list[Count | float] = []

        def count(inputs: Any) -> Count:
            for candidate in self.counts:
                try:
                    found.append(candidate(inputs))
                except WeightsChanged:
                    found.append(math.nan)  # this part has no such tensor, so it weights nothing
            return 0

        inputs, _ = self.work.inputs(start, stop, count)
        decides = None if self.called is None else Decides(self.called)
        limits = Limits(stop - start, tensors(inputs))
        reads.branches.given(inputs)
        with reads.of(tensors(inputs)), limits, Results() as results:
            with reads.branches:
                outputs = self.work.forward(inputs)
            with Terms(alone=False, by_name=None if self.by_name else False) as terms, decides or nullcontext(), reads.branches:
                loss = checked_loss(self.work.loss(outputs))
        divisors, made = divisors_of(loss, terms.given), results.of(loss, stop - start)
        given = {id(tensor) for tensor in (*tensors(inputs), *self.work.extra_receivers())}
        reached = [weakref.ref(leaf) for leaf in self._leaves(loss) if id(leaf) not in given]
        gradients = gradients_of(loss, self.probes, self.model)
        measured = MeasuredLoss(
            samples=stop - start,
            loss=float(loss.detach()),
            gradients=[None if g is None else g.detach().to_dense() if g.is_sparse else g.detach() for g in gradients],
            terms=len(terms.found),
            only_term=len(terms.found) == 1 and is_only_term(loss, terms.found[0]),
            by_name=self.by_name and terms.only_by_name,
            term_count=float(terms.found[0].count) if terms.found else 0.0,
            counts=tuple(float(c) for c in found),
            divisors=divisors,
            dtype=terms.lowest or (loss.dtype if loss.dtype in TOLERANCE else torch.float32),
            decides=decides,
            results=made,
            limits=limits.of([loss]),
            of_batch=reads.may_tell(loss),
        )
        return measured, reached

    def _leaves(self, loss: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the leaves that receive gradients. Sharded parameters are other tensors while they are gathered."""
        return () if is_sharded(self.model) else leaves_of([loss])
