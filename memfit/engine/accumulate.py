"""Gradient accumulation over an effective batch: forward and backward per micro-batch, weighted by the loss denominator.

The same function runs in training, on fake tensors in profiling, and on small samples in proofs and verification.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memfit.batches.pieces import bounds
from memfit.batches.weights import Count
from memfit.engine.call_context import without_autocast
from memfit.engine.divisors import CLOSE, Divided, read
from memfit.engine.handover import Factor, Total
from memfit.engine.known_means import KnownMean, Slopes, Terms, is_only_term, standing_in
from memfit.engine.pass_checks import PassChecks
from memfit.engine.staged import Staging
from memfit.engine.totals import host_number, sum_of, value_of, weighted_sum, wide
from memfit.engine.weighting import BY_SAMPLES, CountOf, Weighting, WeightsChanged
from memfit.engine.work import Work, checked_loss

AroundLast = Callable[[Total], AbstractContextManager[None]]
"""Context for the last micro-batch's backward, made from the total without its gradients."""


class SharesDiffer(Exception):
    """Known means beside other terms have denominators that are not proportional to the samples. `shares[i][k]` is the factor
    that makes mean k of micro-batch i exact under sample weighting. No gradients were handed over."""

    def __init__(self, shares: list[list[float]]) -> None:
        super().__init__("denominators are not proportional to samples")
        self.shares = shares


def accumulate(
    work: Work,
    pieces: Sequence[int],
    staging: Staging,
    weighting: Weighting,
    *,
    parameters: Sequence[torch.Tensor] | None = None,
    scale: float = 1.0,
    shares: Sequence[Sequence[float]] | None = None,
    before_backward: Callable[[torch.Tensor], None] | None = None,
    after_micro: Callable[[int], None] | None = None,
    around_last: AroundLast | None = None,
    alone: bool = True,
) -> Total:
    """Run all micro-batches and return the loss and gradients of the effective batch.

    `pieces` are micro-batch sizes in samples, `parameters` the staged parameters if already listed, `scale` the loss scale
    while gradients accumulate (float16), `shares` the known corrections of watched means. `before_backward(loss)` is called
    after each forward, `after_micro(i)` after each micro-batch. The last backward runs inside `around_last(total)`, whose
    total has no gradients. Micro-batches with nothing to count are skipped. If all are and no other ranks train (`alone`),
    they run after all and give what the full batch would.

    Raises WeightsChanged or SharesDiffer if the weighting does not hold for this batch. The caller discards the staged
    gradients after an exception.
    """
    receivers = [*(staging.parameters() if parameters is None else parameters), *work.extra_receivers()]
    gathered = Pass(work, staging, weighting, scale, before_backward)
    with gathering(staging, weighting), work.composition.over_pass():
        gathered.count_ahead(pieces)
        for index, (start, stop) in enumerate(bounds(pieces)):
            around = around_last if index == len(pieces) - 1 else None
            gathered.micro_batch(start, stop, None if shares is None else shares[index], around)
            if after_micro is not None:
                after_micro(index)
        if alone and gathered.is_empty:
            gathered.run_all(pieces)
        if weighting.watch and shares is None:
            _check_shares(gathered.terms, pieces, work.device)
        gathered.check_rivals(pieces)
        gathered.check_divisors()
    return gathered.total(receivers)


@contextmanager
def gathering(staging: Staging, weighting: Weighting) -> Iterator[None]:
    """Swap in parameter aliases and intercept known means: the context of every `Pass`."""
    with staging.swapped(), standing_in() if weighting.by_name else nullcontext():
        yield


class Pass:
    """The running sums of one pass (forward and backward of every micro-batch) over an effective batch."""

    def __init__(
        self,
        work: Work,
        staging: Staging,
        weighting: Weighting,
        scale: float,
        before_backward: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        self.terms: list[list[KnownMean]] = []
        self._work, self._staging, self._weighting, self._scale = work, staging, weighting, scale
        self._before_backward = before_backward
        self._dtype: torch.dtype | None = None
        self._losses: list[torch.Tensor | float] = []
        self._weights: list[Count | float] = []
        self._counts: list[Count] = []
        self._unit = 0.0
        self.rivals: list[tuple[Count, ...]] = []
        self.chosen: list[Count | None] = []
        self._ahead: list[Count] = []
        self._corrected: list[tuple[Slopes, Factor]] = []
        self._divided, self._checks = Divided(weighting.divided), PassChecks(weighting)

    def micro_batch(
        self, start: int, stop: int, shares: Sequence[float] | None = None, around: AroundLast | None = None
    ) -> None:
        """Run the samples `start:stop`; pass `around` with the last ones."""
        self._work.composition.before_micro_batch()
        inputs, count = self._work.inputs(start, stop, None if self._ahead else self._counting())
        count = self._ahead.pop(0) if self._ahead else count
        if isinstance(count, (int, float)) and count == 0:
            self._run_nothing(inputs, stop - start)
            return  # nothing valid to count: the mean would be 0/0, and 0 * NaN is NaN
        with self._checks.micro_batch():
            with self._checks.branches():
                outputs = self._work.forward(inputs)
            del inputs
            loss, weight = self._loss(outputs, stop - start, count, shares)
        self._work.composition.after_forward()
        del outputs
        self._dtype = self._dtype or loss.dtype
        self._losses.append(value_of(loss))
        self._weights.append(weight)
        if self._before_backward is not None:
            self._before_backward(loss)
        with without_autocast(self._work.device), nullcontext() if around is None else around(self._whole([], [])):
            torch.autograd.backward(loss, self._beginning(loss, weight * self._scale))
        # After backward, because the script's own checkpoints recompute and repeat side effects.
        self._work.composition.after_micro_batch(stop - start)

    def note(self, inputs: Any, samples: int) -> None:
        """Add the loss of a micro-batch whose backward goes through another loss."""
        counting = self._counting()
        count = None if counting is None else counting(inputs)
        if isinstance(count, (int, float)) and count == 0:
            return
        with self._checks.micro_batch():
            with self._checks.branches():
                outputs = self._work.forward(inputs)
            loss, weight = self._loss(outputs, samples, count, None)
        if isinstance(count, torch.Tensor):
            loss = torch.where(count == 0, torch.zeros_like(loss), loss)  # not NaN, of which zero times were NaN
        self._dtype = self._dtype or loss.dtype
        self._losses.append(value_of(loss))
        self._weights.append(weight)

    def count_ahead(self, pieces: Sequence[int]) -> None:
        """Count the micro-batches on an accelerator with one synchronization before any runs. A micro-batch with nothing to
        count must not run, as 0 * NaN is NaN, and counts on the device are not read later."""
        counting = self._counting()
        if counting is None:
            return
        ahead = [self._work.counted(start, stop, counting) for start, stop in bounds(pieces)]
        rows = [ahead, self.chosen, *zip(*self.rivals)]
        there = [count for row in rows for count in row if isinstance(count, torch.Tensor)]
        if any(count is None for count in ahead) or not there or any(isinstance(count, FakeTensor) for count in there):
            self.rivals, self.chosen = [], []
            return
        known = iter(read(there, self._work.device, wide(self._work.device)))
        self._ahead, chosen, *rivals = [[host_number(count, known) for count in row if count is not None] for row in rows]
        self.chosen, self.rivals = list(chosen), list(zip(*rivals))

    @property
    def is_empty(self) -> bool:
        """Whether all micro-batches had nothing to count."""
        return not self._losses

    def run_all(self, pieces: Sequence[int]) -> None:
        """Run micro-batches that all have nothing to count. They give zeros or NaN, as the full batch does."""
        self._weighting, self.rivals, self.chosen, self._divided = BY_SAMPLES, [], [], Divided(None)
        self._checks = PassChecks(self._weighting)
        for start, stop in bounds(pieces):
            self.micro_batch(start, stop)

    def check_rivals(self, pieces: Sequence[int]) -> None:
        """Raise WeightsChanged if a count proportional to the weights in the proof is not so in this batch."""
        _check_rivals(self.rivals, pieces if self._weighting.count is None else self.chosen)

    def check_divisors(self) -> None:
        """Raise WeightsChanged if a divisor of the loss is not proportional to the weights, a sum that was 0 is not, or the
        loss is not linear in the means whose shares were corrected."""
        there = (self._work.device, wide(self._work.device))
        changed = self._divided.changed(*there) or _bent(self._corrected, *there)
        if changed is not None:
            raise WeightsChanged(changed)
        self._checks.check(*there)

    @staticmethod
    def _beginning(loss: torch.Tensor, factor: Count | float) -> torch.Tensor:
        """The initial gradient of backward: the weight, which saves a multiplication of the loss. A new tensor each time, as
        autograd may take it over as a parameter's gradient."""
        return factor.to(loss, copy=True) if isinstance(factor, torch.Tensor) else torch.full_like(loss, factor)

    def _run_nothing(self, inputs: Any, samples: int) -> None:
        """Run a micro-batch with nothing to count for its side effects. If the weighting was inferred, its loss must be zero
        or not finite (a loss that divides by max(count, 1) can be otherwise)."""
        composition, inferred = self._work.composition, self._weighting.inferred
        if not inferred and not composition.may_move:
            return
        with torch.no_grad():
            loss = self._work.loss(self._work.forward(inputs)).detach()
        composition.after_forward()
        composition.after_micro_batch(samples)
        if inferred and bool((loss.isfinite() & (loss != 0)).any()):
            raise WeightsChanged("a micro-batch without anything to count still has a loss")

    def _counting(self) -> CountOf | None:
        if not self._weighting.rivals:
            return self._weighting.count

        def count(inputs: Any) -> Count:
            own = None if self._weighting.count is None else self._weighting.count(inputs)
            self.rivals.append(tuple(rival(inputs) for rival in self._weighting.rivals))
            self.chosen.append(own)
            return 1 if own is None else own

        return count

    def total(self, receivers: Sequence[torch.Tensor]) -> Total:
        parameters = len(receivers) - len(self._work.extra_receivers())
        return self._whole(receivers, [*self._staging.take(receivers[:parameters]), *self._work.extra_gradients()])

    def _whole(self, receivers: Sequence[torch.Tensor], gradients: list[torch.Tensor | None]) -> Total:
        """The total of the micro-batches so far, with these gradients."""
        device, exact = self._work.device, wide(self._work.device)
        if not self._losses:  # nothing valid to count: the full batch would give 0/0 as well
            return Total(torch.full((), float("nan"), device=device), receivers, gradients, 1.0 / self._scale, weight=0.0)
        share, factor = self._share(exact, device) if self._counts else (1.0, 1.0)
        value = weighted_sum(self._losses, self._weights, exact, device) * share
        value = value.to(self._dtype) if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=self._dtype)
        whole = Total(value, receivers, gradients, factor / self._scale, weight=self._weight())
        whole.samples = self._work.samples
        whole.rivals = [sum_of(counts) for counts in zip(*self.rivals)]
        watched = [[term.count for term in terms] for terms in zip(*self.terms)]
        whole.watched = [*(sum_of(counts) for counts in watched), *self._divided.sums()]
        return whole

    def _weight(self) -> Factor:
        """The weight of all micro-batches relative to other ranks' totals."""
        return sum_of(self._counts) if self._counts else float(self._work.samples)

    def _share(self, exact: torch.dtype, device: torch.device) -> tuple[Factor, Factor]:
        """The remaining factors for the sum of the losses and for the gradients."""
        count = sum_of(self._counts)
        # Without a valid entry the loss is 0/0, as for the full batch, but torch's gradient of it is zero. Sharded gradients
        # are those of other ranks and stay.
        nothing = 0.0 if self._staging.parts is None else 1.0
        if isinstance(count, torch.Tensor):
            share = count.to(exact).reciprocal() * self._unit
            return share, torch.where(count == 0, torch.full_like(share, nothing), share)
        share = self._unit / count if count else math.nan
        return share, share if count else nothing

    def _loss(
        self, outputs: Any, samples: int, count: Count | None, shares: Sequence[float] | None
    ) -> tuple[torch.Tensor, Count | float]:
        """The micro-batch's loss and its weight, about as large as the micro-batch's part of the full batch."""
        part = samples / self._work.samples
        if self._weighting.kind == "term":
            return self._term(outputs, part)
        if self._weighting.watch:
            with Terms(alone=False, shares=shares, by_name=self._weighting.by_name) as terms:
                loss = self._loss_of(outputs)
            self.terms.append([KnownMean(term.mean.detach(), term.entries, term.count) for term in terms.found])
            self._divided.add(loss, samples, terms.given)
            weight = self._by_samples(samples, part)
            if shares is not None:
                self._corrected.append((terms.slopes, weight * self._scale))
            return loss, weight
        loss = self._loss_of(outputs)
        self._divided.add(loss, samples if count is None or self._weighting.kind != "count" else count)
        if self._weighting.kind == "count" and count is not None:
            return loss, self._deferred(count, count, part)
        if self._weighting.kind == "share" and self._staging.parts is not None:
            return loss, self._deferred(samples, self._work.samples, part)
        return loss, self._by_samples(samples, part) if self._weighting.kind == "samples" else 1.0

    def _loss_of(self, outputs: Any) -> torch.Tensor:
        with self._checks.branches():
            return checked_loss(self._work.loss(outputs))

    def _by_samples(self, samples: int, part: float) -> Count | float:
        return part if self._staging.parts is None else self._deferred(samples, samples, part)

    def _term(self, outputs: Any, part: float) -> tuple[torch.Tensor, Count | float]:
        with Terms(alone=True, by_name=self._weighting.by_name or self._weighting.told) as terms:
            loss = self._loss_of(outputs)
        if len(terms.found) != 1 or not is_only_term(loss, terms.found[0]):
            raise WeightsChanged(f"{len(terms.found)} known means in a loss that was one")
        term = terms.found[0]
        self._divided.add(loss, term.count, terms.given)
        return loss, self._deferred(term.count, term.entries, part)

    def _deferred(self, count: Count, entries: Count, part: float) -> Count | float:
        # The true total is known only at the end. Until then weights are relative to an estimate, so that float16 gradients
        # keep their usual magnitude.
        if not self._counts:
            # Gradients that are reduced while they accumulate need the same unit on all ranks.
            self._unit = entries / part if self._staging.parts is None else 1.0
        self._counts.append(count)
        # An integer tensor divided by a number has the default dtype.
        return (entries.to(wide(self._work.device)) if isinstance(entries, torch.Tensor) else entries) / self._unit


def _check_rivals(rivals: list[tuple[Count, ...]], chosen: Sequence[Count | None]) -> None:
    own = [c for c in chosen if isinstance(c, int)]
    for counts in zip(*rivals):
        known = [c for c in counts if isinstance(c, int)]
        if len(known) == len(own) == len(chosen) and any(c * sum(own) != sum(known) * n for c, n in zip(known, own)):
            raise WeightsChanged("a count that was proportional to the weights no longer is")


def _bent(corrected: Sequence[tuple[Slopes, Factor]], device: torch.device, dtype: torch.dtype) -> str | None:
    """Return what is wrong if the derivative of the loss by a corrected mean differs between micro-batches, or None."""
    found = [(number, slope / factor) for slopes, factor in corrected for number, slope in slopes]
    largest = max((4 * torch.finfo(slope.dtype).eps for _, slope in found), default=0.0)
    by_mean: dict[int, list[float]] = {}
    for (number, _), slope in zip(found, read([slope for _, slope in found], device, dtype)):
        by_mean.setdefault(number, []).append(slope)
    is_bent = any(max(each) - min(each) > max(largest, CLOSE) * max(map(abs, each)) for each in by_mean.values())
    return "the loss is not linear in a mean whose denominator is not proportional to the weights" if is_bent else None


def _check_shares(terms: list[list[KnownMean]], pieces: Sequence[int], device: torch.device) -> None:
    if not terms or not terms[0]:
        return
    if len({len(found) for found in terms}) != 1:
        raise WeightsChanged("the number of known means differs between micro-batches")
    # The only synchronization here. Only losses that mix known means with other terms get this far.
    found = read([term.count for found in terms for term in found], device, wide(device))
    counts = torch.tensor(found, dtype=torch.float64).reshape(len(terms), -1)
    samples = torch.tensor(pieces, dtype=torch.float64)[:, None]
    expected = samples / samples.sum()
    actual = counts / counts.sum(0)
    if not torch.allclose(actual, expected.expand_as(actual), rtol=1e-9, atol=0):
        raise SharesDiffer((actual / expected).tolist())
