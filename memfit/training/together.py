"""One effective batch over several processes: agreed on, its gradients reduced once, the same total everywhere.

Each process gathers its own share, with recovery of its own: nothing collective happens before all of them have. Then they
agree that all succeeded, what each share weighs and which parameters any of them reached, and only then are gradients
reduced. Not covered: losses that need the samples of all processes at once; each process computes them of its own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from memfit._errors import RankFailed, Refused
from memfit.engine.accumulate import Weighting, wide
from memfit.engine.handover import Factor, Total
from memfit.engine.staged import Staging, sparse_parameters
from memfit.hardware.exhausted import patiently
from memfit.ranks.buckets import Reducer
from memfit.ranks.ranks import Ranks
from memfit.training.company import Company
from memfit.training.takeover import TakenOver
from memfit.training.ways import Way, common, way_of, ways_of, weighting_by

STEP = "a training step"
LOOKED_AT = 256
"""Elements of each parameter that are compared between processes."""
APART = 1e-6
"""Relative difference of what they add up to from which on parameters are taken to be different."""
MOST_RIVALS = 6
"""Counts that are compared between processes; there are seldom two."""
STATED = 8 + 2 * MOST_RIVALS
"""Numbers that every process states of a step before those about its parameters."""
BITS = 48
"""Answers that one number carries: what a double holds exactly."""


@dataclass(frozen=True)
class _Stated:
    """What one process says of its part of a step."""

    number: int
    """The steps it has done."""
    weight: float
    """What its part weighs; not a number where that is known on the device alone."""
    value: float
    """Its loss; likewise."""
    way: int | None
    """How its losses are weighted; None where the part weighs nothing, which is so in any way."""
    digest: float
    """What its parameters come to, where that is looked at in this step."""
    samples: float
    """What it weighs by samples."""
    divided: bool
    """Whether the script divides its sum by that."""
    torn: bool
    """Whether its latest optimizer step was left halfway."""
    rivals: dict[int, float]
    """What it would weigh in other ways that hold on it."""
    reached: tuple[bool, ...]
    """Which parameters received gradients."""


class Together:
    """The gradients of `staging`'s parameters over all `ranks`.

    Attributes: `mean` (whether sums are divided by the number of processes, as plain DistributedDataParallel does), `torn`
    (whether an optimizer step has begun here and not come to its end), `company` (what processes tell each other about
    themselves in the same exchange, if they do).
    """

    def __init__(self, ranks: Ranks, model: nn.Module, staging: Staging, taken: TakenOver | None = None) -> None:
        self.ranks = ranks
        self.mean, self._shares_buffers = (False, True) if taken is None else (taken.mean, taken.shares_buffers)
        self._model, self._staging = model, staging
        self.company: Company | None = None
        self._heard: list[list[float]] = []
        self._parameters: list[torch.Tensor] = []
        self._places: dict[int, int] = {}
        self._look()
        self._sparse = {id(p) for p in sparse_parameters(model)}
        self._reducer = Reducer(ranks, self._parameters)
        self._steps = 0
        self.torn = False

    @property
    def collectives(self) -> int:
        """Collectives that carried gradients so far."""
        return self._reducer.collectives

    @contextmanager
    def announcing(self) -> Iterator[None]:
        """What fails inside is told to the others, who are about to agree on this step."""
        try:
            with self.ranks.noticing("a step"):
                yield
        except RankFailed:
            raise
        except BaseException as error:
            self.ranks.failed(error)
            raise

    def combine(
        self,
        total: Total,
        weighting: Weighting,
        *,
        half: bool = False,
        unproven: bool = False,
        divided: bool = False,
    ) -> Weighting | None:
        """Make a process's own total that of all processes, in place.

        Where processes weigh in different ways nothing is changed, and the way that holds on all of them is returned, by which
        the total has to be gathered again if it was not. `unproven`: that `weighting` is none that was proven; `divided`: that
        the script divides a sum by the number of its samples, so that it is meant as a mean. Raises RankFailed where another
        process failed, Refused where they do different things.
        """
        self._look()
        gradients = {place: self._laid_out(place, gradient, half) for place, gradient in self._own(total).items()}
        told = self._agreed(total, gradients, weighting, divided)
        self._check(told)
        if self.company is not None:
            self.company.heard(self._heard, self._steps)
        counting = [each for each in told if each.way is not None]
        if len({each.way for each in counting}) > 1:
            nothing = told[self.ranks.rank].way is None
            return self._common(ways_of(weighting, unproven=unproven or nothing))
        _check_rivals(counting)
        share, total.value = self._weigh(total, told, summed=weighting.kind == "sum")
        reached = [i for i, any_ in enumerate(map(any, zip(*(each.reached for each in told)))) if any_]
        upstream = _upstream(told, self.ranks.rank)
        if self._staging.parts is not None:
            self._hand_out_parts(total, _times(total.factor, share), upstream)
            return None
        if any(not each.reached[i] for each in told for i in reached):
            gradients = self._filled(reached, gradients, half)
        summed = self._reducer.sum([self._scaled(gradients[i], _times(total.factor, share)) for i in reached])
        found = dict(zip(reached, summed))
        total.gradients = [
            found.get(self._places[id(r)])
            if id(r) in self._places
            else _scaled(g, share if r.is_leaf else _times(share, upstream))
            for r, g in zip(total.receivers, total.gradients)
        ]
        # What inputs received is no part of the sum, and still waits for the factor.
        own = [i for i, r in enumerate(total.receivers) if id(r) not in self._places and total.gradients[i] is not None]
        for i in own:
            total.gradients[i] = _scaled(total.gradients[i], total.factor)
        total.factor = 1.0
        self._steps += 1
        self.share_buffers()
        return None

    def _hand_out_parts(self, total: Total, factor: Factor, upstream: float) -> None:
        """Parameters in parts were reduced while they gathered; what is left is the factor, the same everywhere."""
        gathered = self._staging.take_parts()
        rest = list(zip(total.receivers, total.gradients))[len(gathered) :]
        total.gradients = [
            *(_scaled_part(gradient, factor) for gradient in gathered),
            *(_scaled(g, factor if r.is_leaf else _times(factor, upstream)) for r, g in rest),
        ]
        total.factor = 1.0
        self._steps += 1
        self.share_buffers()

    def _common(self, ways: tuple[Way, ...]) -> Weighting:
        """The way that holds on all processes, of those that hold on this one. Raises Refused where there is none."""
        told = self.ranks.gather(ways, STEP)
        found = common(told)
        if found is None:
            used = ", ".join(ways[0].kind if ways else "any" for ways in told)
            raise Refused(
                "one loss over all processes",
                found=f"what its mean divides by was found to differ between them (by rank: {used})",
                next_move="compute the loss alike everywhere, or say by weight= what a part of a batch counts",
            )
        return weighting_by(found)

    def stepping(self, *_: object) -> None:
        """The optimizer begins a step."""
        self.torn = True

    def share_buffers(self) -> None:
        """What forwards wrote into buffers (statistics of batches) is rank 0's everywhere, as under DistributedDataParallel."""
        if not self._shares_buffers:
            return
        written = [b for b in self._model.buffers() if b.is_floating_point() or b.dtype is torch.int64]
        if written and self._normalises():
            self.ranks.from_first([b for b in written if b.is_contiguous()])

    def _normalises(self) -> bool:
        return any(isinstance(m, nn.modules.batchnorm._NormBase) and m.running_mean is not None for m in self._model.modules())

    def _look(self) -> None:
        """Which parameters there are now, in the same order everywhere; what of a batch requires gradients is none of them."""
        if self._staging.parts is not None:
            return  # they are reduced while they gather
        leaves = {id(leaf) for leaf in self._staging.leaves}
        outside = [p for p in self._staging.outside if id(p) not in leaves]
        self._parameters = [*self._model.parameters(), *outside]
        self._places = {id(p): i for i, p in enumerate(self._parameters)}

    def _own(self, total: Total) -> dict[int, torch.Tensor]:
        """This process's gradients by their parameter's place."""
        found = {}
        for receiver, gradient in zip(total.receivers, total.gradients):
            place = self._places.get(id(receiver))
            if place is not None and gradient is not None:
                found[place] = gradient
        return found

    def _agreed(
        self, total: Total, gradients: dict[int, torch.Tensor], weighting: Weighting, divided: bool
    ) -> list[_Stated]:
        here = total.value.device.type == "cpu"
        weight = _number(total.weight) if here else math.nan
        value = _number(total.value) if here else math.nan
        rivals = [0.0] * (2 * MOST_RIVALS)
        if here:
            codes = [way.code for way in ways_of(weighting, unproven=False)[1:]]
            watched = enumerate(map(_number, total.watched), start=1)  # known means, by their place in the loss
            known = itertools.chain(*watched, *zip(codes, map(_number, total.rivals)))
            rivals = [*map(float, known), *rivals][: 2 * MOST_RIVALS]
        reached = _packed([i in gradients for i in range(len(self._parameters))])
        code = float(way_of(weighting).code)
        about = [float(self._steps), weight, value, code, self._digest(), float(total.samples), float(divided)]
        of_itself = [] if self.company is None else self.company.stated()
        told = self.ranks.agree([*about, float(self.torn), *rivals, *reached, *of_itself], STEP)
        end = STATED + len(reached)
        self._heard = [numbers[end:] for numbers in told]
        return [_stated(numbers[:end], len(self._parameters)) for numbers in told]

    def _digest(self) -> float:
        """What the first elements of all parameters add up to, in steps 1, 2, 4, 8, ...: it is the same everywhere."""
        if self._steps & (self._steps - 1) or self._staging.parts is not None:
            return 0.0
        with torch.no_grad():
            first = [p.detach().reshape(-1)[:LOOKED_AT].to(torch.float32).sum() for p in self._parameters if p.numel()]
            return _number(torch.stack([some.cpu() for some in first]).double().sum()) if first else 0.0

    def _check(self, told: Sequence[_Stated]) -> None:
        numbers = [each.number for each in told]
        if len(set(numbers)) > 1:
            raise Refused(
                "a training step over all processes",
                found=f"they have done different numbers of steps: {', '.join(map(str, numbers))} by rank",
                next_move="call backward (or run.step) equally often on every process",
            )
        torn = [str(rank) for rank, each in enumerate(told) if each.torn]
        if torn:
            raise Refused(
                "training one model over all processes",
                found=f"optimizer.step() failed on rank {', '.join(torn)} after {numbers[0]} steps, and the script went on: "
                "parameters there may be updated in part",
                next_move="let the error end the script, and go on from the last saved state",
            )
        digests = [each.digest for each in told]
        if max(digests) - min(digests) > APART * max(1.0, *map(abs, digests)):
            raise Refused(
                "training one model over all processes",
                found=f"after {numbers[0]} steps its parameters are not the same everywhere: some received gradients that were "
                "not reduced (through own methods of the model, or submodules, called from outside), or other updates",
                next_move="call the model itself, whose forward may lead to those methods",
            )

    def _weigh(self, total: Total, told: Sequence[_Stated], *, summed: bool) -> tuple[Factor, torch.Tensor]:
        """(what this process's gradients have to be multiplied by, the loss over all processes)."""
        size = self.ranks.size
        if summed and not _is_mean(told):
            every = 1.0 / size if self.mean else 1.0
            return every, self._summed(total, told, [float(each.way is not None) for each in told]) * every
        if total.value.device.type == "cpu":
            weights = [each.samples if summed else each.weight for each in told]
            whole = sum(weights)
            value = self._summed(total, told, weights) / whole if whole else total.value * math.nan
            return (weights[self.ranks.rank] / whole if whole else 0.0), value
        own = torch.as_tensor(total.weight, dtype=wide(total.value.device), device=total.value.device)
        both = torch.stack([own, torch.where(own == 0, 0.0, total.value * own)])
        self.ranks.sum([both])
        share = torch.where(both[0] == 0, 0.0, own / both[0])
        return share, (both[1] / both[0]).to(total.value.dtype)

    def _summed(self, total: Total, told: Sequence[_Stated], weights: Sequence[float]) -> torch.Tensor:
        if total.value.device.type != "cpu":
            value = total.value.detach().clone()
            self.ranks.sum([value])
            return value
        values = [each.value * weight for each, weight in zip(told, weights) if weight]
        return torch.tensor(sum(values), dtype=total.value.dtype)

    def _filled(
        self, reached: Sequence[int], gradients: dict[int, torch.Tensor], half: bool
    ) -> dict[int, torch.Tensor]:
        """With zeros for what others reached and this process did not. All go on to the sums once all have room for them."""
        with self.announcing():
            zeros = {i: self._patiently(partial(self._zeros, i, half)) for i in reached if i not in gradients}
        self.ranks.agree([], STEP)
        return {**gradients, **zeros}

    def _zeros(self, place: int, half: bool) -> torch.Tensor:
        parameter = self._parameters[place]
        dtype = torch.float32 if half and parameter.dtype in (torch.float16, torch.bfloat16) else parameter.dtype
        if id(parameter) in self._sparse:
            return torch.zeros_like(parameter, layout=torch.sparse_coo, dtype=dtype)
        return torch.zeros_like(parameter, dtype=dtype)

    def _laid_out(self, place: int, gradient: torch.Tensor, half: bool) -> torch.Tensor:
        """This process's part of a gradient, as every process brings it."""
        parameter = self._parameters[place]
        if half and gradient.dtype in (torch.float16, torch.bfloat16):
            gradient = self._patiently(gradient.float)
        if not gradient.is_sparse and gradient.stride() != parameter.stride():
            made = self._patiently(partial(torch.empty_like, parameter, dtype=gradient.dtype))
            gradient = made.copy_(gradient)  # laid out alike everywhere
        return gradient

    def _scaled(self, gradient: torch.Tensor, factor: Factor) -> torch.Tensor:
        return self._patiently(lambda: _scaled(gradient, factor)) if gradient.is_sparse else _scaled(gradient, factor)  # type: ignore[return-value]

    def _patiently(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        return patiently(make, self.ranks.device)


def _upstream(told: Sequence[_Stated], rank: int) -> float:
    """What gradients are multiplied by that go on to where inputs were computed: other models weigh processes by their samples
    once more, and so does DistributedDataParallel."""
    own = told[rank].samples
    return sum(each.samples for each in told) / own if own else 1.0


def _packed(answers: Sequence[bool]) -> list[float]:
    """Many answers in few numbers."""
    parts = (answers[i : i + BITS] for i in range(0, len(answers), BITS))
    return [float(sum(answer << bit for bit, answer in enumerate(part))) for part in parts]


def _unpacked(numbers: Sequence[float], count: int) -> tuple[bool, ...]:
    return tuple(bool(int(number) >> bit & 1) for number in numbers for bit in range(BITS))[:count]


def _stated(numbers: Sequence[float], parameters: int) -> _Stated:
    step, weight, value, way, digest, samples, divided, torn = numbers[:8]
    pairs = zip(numbers[8:STATED:2], numbers[9:STATED:2])
    return _Stated(
        number=int(step),
        weight=weight,
        value=value,
        way=int(way) if weight else None,
        digest=digest,
        samples=samples if weight else 0.0,
        divided=bool(divided),
        torn=bool(torn),
        rivals={int(code): count for code, count in pairs if code},
        reached=_unpacked(numbers[STATED:], parameters),
    )


def _is_mean(told: Sequence[_Stated]) -> bool:
    """Whether sums are divided by the samples in them, as far as can be seen: a single sample is divided by one."""
    counting = [each for each in told if each.way is not None]
    return all(each.divided for each in counting) and any(each.samples > 1 for each in counting)


def _check_rivals(told: Sequence[_Stated]) -> None:
    """Raise Refused where another way of weighting holds on every process by itself, or for a term of the loss, and would weigh
    them differently: no process alone could tell which is right."""
    ways = set[int]().union(*(each.rivals for each in told))
    for way in ways:
        if all(way in each.rivals for each in told) and len({each.rivals[way] / each.weight for each in told}) > 1:
            raise Refused(
                "one loss over all processes",
                found="what it, or a term of it, may be divided by (valid labels, a mask) is in proportion to the samples of "
                "each process by itself, and not over all of them",
                next_move="say by weight= what a part of a batch counts, or give every process more samples of each batch; "
                "where one term of several is meant, divide each by what all processes count",
            )


def _scaled(gradient: torch.Tensor | None, factor: Factor) -> torch.Tensor | None:
    if gradient is None or (isinstance(factor, float) and factor == 1.0):
        return gradient
    return gradient * factor if gradient.is_sparse else gradient.mul_(factor)


def _scaled_part(gradient: torch.Tensor | None, factor: Factor) -> torch.Tensor | None:
    if gradient is not None:
        gradient.to_local().mul_(factor)  # type: ignore[attr-defined]
    return gradient


def _times(one: Factor, other: Factor) -> Factor:
    return other if isinstance(one, float) and one == 1.0 else one * other


def _number(value: Factor) -> float:
    """A number that lies on the host, without asking torch for it as of a device."""
    return float(value.detach().numpy()) if isinstance(value, torch.Tensor) else float(value)
