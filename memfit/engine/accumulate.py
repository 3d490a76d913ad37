"""Accumulating an effective batch: forward and backward per micro-batch, weighted by what its loss divides by.

The same function runs for real, on fake tensors while profiling, and on small samples while proving and verifying.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memfit._errors import UsageError
from memfit.batches.pieces import bounds
from memfit.batches.weights import Count
from memfit.engine.composed import Composition
from memfit.engine.context import without_autocast
from memfit.engine.divisors import Divided, How, read
from memfit.engine.handover import Factor, Total
from memfit.engine.staged import Staging
from memfit.engine.terms import Term, Terms, is_only_term, standing_in

CountOf = Callable[[Any], Count]
AroundLast = Callable[[Total], AbstractContextManager[None]]
"""What the last micro-batch's backward runs in, from a total without gradients."""
_NUMBERS = (torch.float32, torch.float64)


class Work(Protocol):
    """What a micro-batch of an effective batch does. Implemented by step mode, script mode and profiling samples."""

    samples: int
    """Samples in the effective batch."""
    device: torch.device
    """Where the model computes."""
    composition: Composition
    """How the state that its forwards move is composed."""

    def inputs(self, start: int, stop: int, count: CountOf | None) -> tuple[Any, Count | None]:
        """The samples `start:stop` cut or collated, on the device; with `count`, also what it says of them."""
        ...

    def counted(self, start: int, stop: int, count: CountOf) -> Count | None:
        """What `count` says of the samples `start:stop` where they lie on an accelerator already; else None."""
        ...

    def forward(self, inputs: Any) -> Any:
        """What the loss is computed from: the model's output where the loss is known apart from it, else the inputs."""
        ...

    def loss(self, outputs: Any) -> torch.Tensor:
        """The loss in the script's own arithmetic, under the script's own autocast; known means are looked for here."""
        ...

    def extra_receivers(self) -> Sequence[torch.Tensor]:
        """Differentiable tensors besides parameters that receive gradients (inputs that require them)."""
        ...

    def extra_gradients(self) -> list[torch.Tensor | None]:
        """What they received, in the same order, moved out."""
        ...


@dataclass(frozen=True)
class Weighting:
    """How the losses of micro-batches make the loss of the whole."""

    kind: Literal["samples", "sum", "term", "count", "share"]
    """samples: by their number. sum: each counts 1. term: by the denominator of the one known mean the loss consists of.
    count: by `count` of the micro-batch. share: each counts 1, and processes weigh by their samples."""
    label: str
    """In words, for the report."""
    count: CountOf | None = None
    """For "count": from a micro-batch to its weight."""
    watch: bool = False
    """Whether known means stand beside other terms: their denominators then have to be proportional to the samples, which
    is looked at before the gradients are handed over."""
    by_name: bool = False
    """Whether its known means are all called as attributes of torch.nn.functional, so that no other call is looked at."""
    told: bool = False
    """Whether the work says itself which known mean it computes (`terms.told`), so that no call is looked at."""
    inferred: bool = False
    """For "count": whether it was inferred, and not stated by hand."""
    rivals: tuple[CountOf, ...] = ()
    """For "samples" and "count": counts that could not be told apart from that when it was proven; a batch in which they are
    not proportional to it has to be proven again."""
    sums: bool = False
    """Whether adding losses up holds as well: parts without any loss tell nothing about that."""
    divided: tuple[How, ...] | None = None
    """What each part of the loss divides by was seen to be: what adds up over samples has to stay in proportion to the weights.
    None: not looked at."""
    doubt: str | None = None
    """Why it may hold on the samples it was proven on and not on others; None where nothing speaks for that."""


BY_SAMPLES = Weighting("samples", "by samples")
BY_TERM = Weighting("term", "by what its mean divides by")
BY_TOLD_TERM = Weighting("term", "by what its mean divides by", told=True)


class WeightsChanged(Exception):
    """The loss no longer has the form its weighting was proven for. Nothing was handed over."""


class SharesDiffer(Exception):
    """Known means beside other terms had denominators that are not proportional to the samples; `shares[i][k]` is what
    mean k of micro-batch i has to be multiplied by for the sample weighting to be exact. Nothing was handed over."""

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

    `pieces` are the micro-batches' sizes in samples, `parameters` those that are staged where they are listed already,
    `scale` the loss scale while gathering (float16), `shares` the correction of watched means where known already;
    `before_backward(loss)` is called after each forward, `after_micro(i)` after each micro-batch; the backward of the last one
    runs inside `around_last(total)`, which is given what the total will be, without its gradients. Where no micro-batch has
    anything that counts they run all the same if there are no others (`alone`): what comes is what the whole would give.
    Raises WeightsChanged or SharesDiffer where the weighting does not hold for this batch. The caller discards what was
    staged when an exception leaves.
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
    """Inside, the model holds aliases of its parameters and known means are found: what every `Pass` runs in."""
    with staging.swapped(), standing_in() if weighting.by_name else nullcontext():
        yield


class Pass:
    """The running sums of one pass over an effective batch."""

    def __init__(
        self,
        work: Work,
        staging: Staging,
        weighting: Weighting,
        scale: float,
        before_backward: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        self.terms: list[list[Term]] = []
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
        self._divided = Divided(weighting.divided)

    def micro_batch(
        self, start: int, stop: int, shares: Sequence[float] | None = None, around: AroundLast | None = None
    ) -> None:
        """Run the samples `start:stop`; with `around`, the last ones."""
        self._work.composition.before_micro_batch()
        inputs, count = self._work.inputs(start, stop, None if self._ahead else self._counting())
        count = self._ahead.pop(0) if self._ahead else count
        if isinstance(count, (int, float)) and count == 0:
            self._run_nothing(inputs, stop - start)
            return  # nothing valid in it: its own mean would be 0/0, and 0 * NaN is NaN
        outputs = self._work.forward(inputs)
        del inputs
        loss, weight = self._loss(outputs, stop - start, count, shares)
        del outputs
        self._dtype = self._dtype or loss.dtype
        self._losses.append(_value(loss))
        self._weights.append(weight)
        if self._before_backward is not None:
            self._before_backward(loss)
        with without_autocast(self._work.device), nullcontext() if around is None else around(self._whole([], [])):
            torch.autograd.backward(loss, self._beginning(loss, weight * self._scale))
        # (after backward: the script's own checkpoints compute again, and move state again)
        self._work.composition.after_micro_batch(stop - start)

    def count_ahead(self, pieces: Sequence[int]) -> None:
        """Read what is counted in micro-batches that lie on an accelerator, all at once and before any runs: one without
        anything that counts must not, as 0 * NaN is NaN, and what the device knows is not looked at later."""
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
        self._ahead, chosen, *rivals = [[_number(count, known) for count in row if count is not None] for row in rows]
        self.chosen, self.rivals = list(chosen), list(zip(*rivals))

    @property
    def is_empty(self) -> bool:
        """Whether no micro-batch had anything that counts."""
        return not self._losses

    def run_all(self, pieces: Sequence[int]) -> None:
        """Run micro-batches none of which has anything that counts: zeros, or not a number, as their whole gives."""
        self._weighting, self.rivals, self.chosen, self._divided = BY_SAMPLES, [], [], Divided(None)
        for start, stop in bounds(pieces):
            self.micro_batch(start, stop)

    def check_rivals(self, pieces: Sequence[int]) -> None:
        """Raise WeightsChanged where a count that could not be told apart from the weights can be in this batch."""
        _check_rivals(self.rivals, pieces if self._weighting.count is None else self.chosen)

    def check_divisors(self) -> None:
        """Raise WeightsChanged where what the loss divides by is not in proportion to the weights."""
        changed = self._divided.changed(self._work.device, wide(self._work.device))
        if changed is not None:
            raise WeightsChanged(changed)

    @staticmethod
    def _beginning(loss: torch.Tensor, factor: Count | float) -> torch.Tensor:
        """What backward begins with: the weight, which the loss then does not have to be multiplied by. A new one each time:
        autograd may take it over as the gradient of a parameter."""
        return factor.to(loss, copy=True) if isinstance(factor, torch.Tensor) else torch.full_like(loss, factor)

    def _run_nothing(self, inputs: Any, samples: int) -> None:
        """A micro-batch without anything to count: it moves state like the others. Where the weighting was inferred it must
        have no loss of its own (losses that divide by max(count, 1) have one)."""
        composition, inferred = self._work.composition, self._weighting.inferred
        if not inferred and not composition.moved:
            return
        with torch.no_grad():
            loss = self._work.loss(self._work.forward(inputs)).detach()
        composition.after_micro_batch(samples)
        if inferred and bool((loss.isfinite() & (loss != 0)).any()):
            raise WeightsChanged("a micro-batch without anything to count has a loss all the same")

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
        """The total, as far as micro-batches have run, with these gradients."""
        device, exact = self._work.device, wide(self._work.device)
        if not self._losses:  # no micro-batch had anything valid: the whole would give 0/0 as well
            return Total(torch.full((), float("nan"), device=device), receivers, gradients, 1.0 / self._scale, weight=0.0)
        share, factor = self._share(exact, device) if self._counts else (1.0, 1.0)
        value = _weighted_sum(self._losses, self._weights, exact, device) * share
        value = value.to(self._dtype) if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=self._dtype)
        whole = Total(value, receivers, gradients, factor / self._scale, weight=self._weight())
        whole.samples = self._work.samples
        whole.rivals = [_sum(counts) for counts in zip(*self.rivals)]
        watched = [[term.count for term in terms] for terms in zip(*self.terms)]
        whole.watched = [*(_sum(counts) for counts in watched), *self._divided.sums()]
        return whole

    def _weight(self) -> Factor:
        """What all micro-batches together weigh beside those of other processes."""
        return _sum(self._counts) if self._counts else float(self._work.samples)

    def _share(self, exact: torch.dtype, device: torch.device) -> tuple[Factor, Factor]:
        """What the sums of the losses and of the gradients still have to be multiplied by."""
        count = _sum(self._counts)
        # Without a single valid entry the loss is 0/0, as it would be whole, but torch's gradient of it is zero; in parts it is
        # that of other processes.
        nothing = 0.0 if self._staging.parts is None else 1.0
        if isinstance(count, torch.Tensor):
            share = count.to(exact).reciprocal() * self._unit
            return share, torch.where(count == 0, torch.full_like(share, nothing), share)
        share = self._unit / count if count else math.nan
        return share, share if count else nothing

    def _loss(
        self, outputs: Any, samples: int, count: Count | None, shares: Sequence[float] | None
    ) -> tuple[torch.Tensor, Count | float]:
        """The micro-batch's loss and its weight; weights are of the order of its part of the whole."""
        part = samples / self._work.samples
        if self._weighting.kind == "term":
            return self._term(outputs, part)
        if self._weighting.watch:
            with Terms(alone=False, shares=shares, by_name=self._weighting.by_name) as terms:
                loss = checked_loss(self._work.loss(outputs))
            self.terms.append([Term(term.mean.detach(), term.entries, term.count) for term in terms.found])
            self._divided.add(loss, samples, terms.given)
            return loss, self._by_samples(samples, part)
        loss = checked_loss(self._work.loss(outputs))
        self._divided.add(loss, samples if count is None or self._weighting.kind != "count" else count)
        if self._weighting.kind == "count" and count is not None:
            return loss, self._deferred(count, count, part)
        if self._weighting.kind == "share" and self._staging.parts is not None:
            return loss, self._deferred(samples, self._work.samples, part)
        return loss, self._by_samples(samples, part) if self._weighting.kind == "samples" else 1.0

    def _by_samples(self, samples: int, part: float) -> Count | float:
        return part if self._staging.parts is None else self._deferred(samples, samples, part)

    def _term(self, outputs: Any, part: float) -> tuple[torch.Tensor, Count | float]:
        with Terms(alone=True, by_name=self._weighting.by_name or self._weighting.told) as terms:
            loss = checked_loss(self._work.loss(outputs))
        if len(terms.found) != 1 or not is_only_term(loss, terms.found[0]):
            raise WeightsChanged(f"{len(terms.found)} known means in a loss that was one")
        term = terms.found[0]
        self._divided.add(loss, term.count, terms.given)
        return loss, self._deferred(term.count, term.entries, part)

    def _deferred(self, count: Count, entries: Count, part: float) -> Count | float:
        # The true total is known only at the end; until then weights are relative to an estimate, so that float16
        # gradients keep their usual size.
        if not self._counts:
            # (what several processes add up while they gather is relative to the same on all of them)
            self._unit = entries / part if self._staging.parts is None else 1.0
        self._counts.append(count)
        # (an integer tensor divided by a number is of the default precision)
        return (entries.to(wide(self._work.device)) if isinstance(entries, torch.Tensor) else entries) / self._unit


def loss_of(work: Work, samples: int) -> torch.Tensor:
    """The loss of a work's first `samples` samples."""
    inputs, _ = work.inputs(0, samples, None)
    return checked_loss(work.loss(work.forward(inputs)))


def checked_loss(loss: Any) -> torch.Tensor:
    """`loss` if it is a scalar with a graph; UsageError naming what it is otherwise."""
    if not isinstance(loss, torch.Tensor):
        raise _not_a_loss(
            f"it is of type {type(loss).__name__}", "return a tensor of one element that depends on the model"
        )
    if loss.numel() != 1:
        raise _not_a_loss(f"its shape is {tuple(loss.shape)}", "reduce it to one number, for example with .mean()")
    if not loss.requires_grad:
        raise _not_a_loss(
            "it does not depend on any parameter that requires a gradient",
            "compute it from the model's output without .detach(), .item() or torch.no_grad()",
        )
    if loss.is_complex():
        raise _not_a_loss(f"it is a complex number ({loss.dtype})", "return a real one, for example its .abs() or .real")
    return loss if loss.dim() == 0 else loss.reshape(())


def _weighted_sum(
    losses: Sequence[torch.Tensor | float], weights: Sequence[Count | float], dtype: torch.dtype, device: torch.device
) -> torch.Tensor | float:
    """On the host where everything is there already, else on the device, without anything that has to get there first."""
    by_weight: dict[float, list[torch.Tensor]] = {}
    counted: list[tuple[torch.Tensor, torch.Tensor]] = []
    on_host = 0.0
    for loss, weight in zip(losses, weights):
        if isinstance(weight, torch.Tensor):
            there = loss.to(device) if isinstance(loss, torch.Tensor) else torch.full((), loss, dtype=dtype, device=device)
            counted.append((there, weight.to(device)))
        elif isinstance(loss, torch.Tensor):
            by_weight.setdefault(weight, []).append(loss.to(device))
        else:
            on_host += loss * weight
    sums = [torch.stack(found).to(dtype).sum() * weight for weight, found in by_weight.items()]
    if counted:
        values, counts = (torch.stack(each).to(dtype) for each in zip(*counted))
        sums.append(values @ counts)
    total = sum(sums[1:], sums[0]) if sums else on_host
    return total + on_host if sums and on_host else total


def wide(device: torch.device) -> torch.dtype:
    """The widest floating point type the device has."""
    return torch.float32 if device.type == "mps" else torch.float64


def _value(loss: torch.Tensor) -> torch.Tensor | float:
    """The loss without its graph, as a number where it is on the host anyway; and without the values it was computed from:
    mse_loss and others write their mean into the memory of these (aten/src/ATen/native/Loss.cpp)."""
    value = loss.detach()
    if type(value) is torch.Tensor and value.device.type == "cpu" and value.dtype in _NUMBERS:
        return float(value.numpy())
    return value if value.untyped_storage().nbytes() <= 64 else value.clone()


def _sum(counts: Sequence[Count]) -> Count:
    on_host = sum(count for count in counts if not isinstance(count, torch.Tensor))
    on_device = [count for count in counts if isinstance(count, torch.Tensor)]
    if not on_device:
        return on_host
    total = torch.stack(on_device).sum()
    return total + on_host if on_host else total


def _number(count: Count, known: Iterator[float]) -> Count:
    """A count as the host has it, from the next of those `known` where it lies on a device."""
    number = next(known) if isinstance(count, torch.Tensor) else count
    return int(number) if float(number).is_integer() else number


def _not_a_loss(found: str, next_move: str) -> UsageError:
    return UsageError("a loss to run backward from", found=found, next_move=next_move)


def _check_rivals(rivals: list[tuple[Count, ...]], chosen: Sequence[Count | None]) -> None:
    own = [c for c in chosen if isinstance(c, int)]
    for counts in zip(*rivals):
        known = [c for c in counts if isinstance(c, int)]
        if len(known) == len(own) == len(chosen) and any(c * sum(own) != sum(known) * n for c, n in zip(known, own)):
            raise WeightsChanged("a count that was proportional to the weights no longer is")


def _check_shares(terms: list[list[Term]], pieces: Sequence[int], device: torch.device) -> None:
    if not terms or not terms[0]:
        return
    if len({len(found) for found in terms}) != 1:
        raise WeightsChanged("the number of known means differs between micro-batches")
    # The one host read of this path; only losses that mix known means with other terms come here.
    found = read([term.count for found in terms for term in found], device, wide(device))
    counts = torch.tensor(found, dtype=torch.float64).reshape(len(terms), -1)
    samples = torch.tensor(pieces, dtype=torch.float64)[:, None]
    expected = samples / samples.sum()
    actual = counts / counts.sum(0)
    if not torch.allclose(actual, expected.expand_as(actual), rtol=1e-9, atol=0):
        raise SharesDiffer((actual / expected).tolist())
