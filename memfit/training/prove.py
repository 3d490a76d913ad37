"""Proofs on a few samples: that a batch is cut along its samples, that outputs are joined right, and how losses are weighted.

Whole and parts run on the same samples with the whole's random draws handed out by slice and batch norm frozen (its batch
statistics are the one accepted coupling, always reported), so that what differs is real mixing of samples.
Everything runs on the device, leaves no trace, and keeps gradients of a bounded choice of parameters only.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from memfit._units import MiB
from memfit.batches.tree import Path, leaf_at, leaves, path_name
from memfit.batches.weights import Count, entries_other_than
from memfit.engine.accumulate import Weighting, WeightsChanged, Work, checked_loss
from memfit.engine.context import uncompiled
from memfit.engine.intercept import is_compiled
from memfit.engine.slices import Draws
from memfit.engine.staged import Staging
from memfit.engine.terms import Terms, is_only_term
from memfit.profiling.sandbox import leave_no_trace
from memfit.training.call import Call
from memfit.training.outputs import Leaf, Outputs, turned

PROBED = 32 * MiB
"""Bytes of parameters whose gradients are compared in a proof."""
TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-4, torch.bfloat16: 6e-2, torch.float16: 2e-2}
"""Relative difference up to which whole and parts count as equal: rounding of two summation orders stays an order of
magnitude below, mixing of samples lies above. float64 models often compute a softmax or a loss in float32 inside."""

FLIPPED = 0.2
"""Share of whole-number entries that may differ: an argmax may flip where two scores are equal but for rounding."""


@dataclass(frozen=True)
class Deviation:
    """How far parts are from the whole."""

    where: str
    """The output or module that deviates most."""
    relative: float
    """Relative L2 difference."""
    limit: float
    """Difference up to which they count as equal."""

    @property
    def agrees(self) -> bool:
        """Whether parts and whole count as equal."""
        return self.relative <= self.limit


def parts_of(samples: int) -> tuple[int, ...]:
    """Unequal parts of a few samples: 5 = 2 + 3, 3 = 1 + 2, 2 = 1 + 1."""
    first = max(1, (samples - 1) // 2)
    return (first, samples - first) if samples > 1 else (samples,)


@contextmanager
def comparable(model: nn.Module, device: torch.device) -> Iterator[None]:
    """No trace left, nothing compiled, and batch norm frozen: the circumstances in which whole and parts are compared."""
    with leave_no_trace(model, device), uncompiled():
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.training = False
        yield


def frozen_norms(call: Call) -> Call:
    """The call with batch norm in eval mode and on copies of its samples, for comparing whole and parts."""
    frozen = copy.copy(call)
    frozen.copies = True
    frozen.modes = [
        (module, training and not isinstance(module, nn.modules.batchnorm._BatchNorm)) for module, training in call.modes
    ]
    return frozen


def joined_outputs(call: Call, samples: int) -> tuple[Outputs, Deviation]:
    """The call's outputs with it settled how they are joined, and how far the joined parts, or the state that they leave in
    the model's buffers, are from the whole.

    What no gradient flows through and cannot be joined is marked so: using it is then refused, training is not.
    """
    whole, parts, worst = _whole_and_parts(frozen_norms(call), samples)
    outputs = call.outputs
    if any(len(found) != len(outputs.leaves) for found in (whole, *parts)):
        return outputs, Deviation("the structure of the output", float("inf"), 1.0)
    settled = []
    for i, leaf in enumerate(outputs.leaves):
        if leaf.kind == "opaque" or i == outputs.loss:  # a single own loss has a weighting, proven apart
            settled.append(leaf)
            continue
        leaf, deviation = _settled(leaf, whole[i], [part[i] for part in parts], samples)
        settled.append(leaf)
        if leaf.differentiable and deviation.relative / deviation.limit > worst.relative / worst.limit:
            worst = deviation
    return replace(outputs, leaves=tuple(settled)), worst


def _settled(leaf: Leaf, whole: Any, parts: Sequence[Any], samples: int) -> tuple[Leaf, Deviation]:
    """The leaf joined in the way that comes nearest to the whole, and how near that is."""
    where = path_name(leaf.path, "output")
    if leaf.kind == "value":
        same = all(value == leaf.value for value in (whole, *parts))  # while tracing, numbers read off tensors are guessed
        return leaf if same else _unjoined(leaf, whole), Deviation(where, 0.0, 1.0)
    if not isinstance(whole, torch.Tensor):
        return leaf, Deviation(where, float("inf"), 1.0)
    found = [(_leaf_difference(way, whole, parts, samples), n, way) for n, way in enumerate(_ways_to_join(leaf))]
    difference, _, best = min(found, key=lambda item: item[:2])
    limit = _tolerance(whole.dtype) if whole.is_floating_point() else FLIPPED if leaf.kind == "batch" else 0.0
    if difference <= limit or leaf.differentiable:
        return best, Deviation(where, difference, limit)
    return _unjoined(leaf, whole), Deviation(where, difference, limit)


def _ways_to_join(leaf: Leaf) -> list[Leaf]:
    if leaf.axis is not None:
        return [leaf, replace(leaf, axis=turned(leaf.axis))] if leaf.axis.inner > 1 else [leaf]
    if leaf.kind == "loss":
        return [leaf, replace(leaf, joined="sum")]
    if leaf.shape and leaf.shape != (1,):
        return [leaf]
    more: list[Literal["mean", "sum"]] = ["mean", "sum"] if leaf.dtype.is_floating_point else ["sum"]
    return [leaf, *(replace(leaf, joined=how) for how in more)]


def _unjoined(leaf: Leaf, value: Any) -> Leaf:
    return replace(leaf, kind="opaque", axis=None, value=type(value).__name__)


def mixing_module(call: Call, samples: int, allowed: Sequence[str]) -> Deviation | None:
    """The first module, in order of completion, whose output for the whole differs from that of the parts although its
    input does not; None if all such modules are allowed to, or hold one that is."""
    call = frozen_norms(call)
    whole, parts = _Recorded(call.model), []
    with comparable(call.model, call.device), torch.enable_grad():
        draws = Draws()
        with draws.recording(), whole.watching():
            call.run(call.arguments(0, samples))
        start = 0
        for size in parts_of(samples):
            part = _Recorded(call.model)
            with draws.sliced(start, start + size, samples), part.watching():
                call.run(call.arguments(start, start + size))
            parts.append(part)
            start += size
    for name in whole.outputs:
        label = name or type(call.model).__name__
        accepted = any(a == label or (a + ".").startswith(name + "." if name else "") for a in allowed)
        given = _module_difference([record.inputs.get(name) for record in (whole, *parts)], samples)
        if accepted or not given.agrees:
            continue
        made = _module_difference([record.outputs[name] for record in (whole, *parts) if name in record.outputs], samples)
        if not made.agrees:
            return replace(made, where=label)
    return None


def _module_difference(found: Sequence[torch.Tensor | None], samples: int) -> Deviation:
    """How far what a module took or gave for the parts is from that for the whole; it agrees where that cannot be told."""
    known = [t for t in found if t is not None and t.dim() > 0]
    if len(known) < 1 + len(parts_of(samples)):
        return Deviation("", 0.0, 1.0)
    difference = _joined_difference(known[0], known[1:], samples, parts_of(samples))
    return Deviation("", difference, _tolerance(known[0].dtype))


def infer_weighting(
    work: Work, samples: int, staging: Staging, model: nn.Module
) -> tuple[Weighting | None, Deviation]:
    """How the losses of parts make the loss of the whole, proven on losses and gradients; None if no way does."""
    by_name = not is_compiled(model)  # compiled code is built anew for every stand-in
    for by_operations in (False, True):
        draws = Draws(by_operations=by_operations)
        with comparable(model, work.device), staging.swapped():
            probes = probes_of(staging.parameters())
            counts = _count_candidates(work, samples)
            with draws.recording():
                whole = _measured(work, 0, samples, probes, counts, by_name)
            if draws.unsliced and not by_operations:
                continue
            parts = []
            start = 0
            for size in parts_of(samples):
                with draws.sliced(start, start + size, samples):
                    parts.append(_measured(work, start, start + size, probes, counts, by_name))
                start += size
            return _choose(whole, parts, counts)
    raise AssertionError("unreachable: the second round always returns")


@dataclass(frozen=True)
class _Measured:
    """The loss of some samples and what may weigh it."""

    samples: int
    loss: float
    gradients: list[torch.Tensor | None]
    terms: int
    only_term: bool
    by_name: bool
    term_count: float
    counts: tuple[float, ...]
    dtype: torch.dtype


def _measured(
    work: Work, start: int, stop: int, probes: Sequence[torch.Tensor], counts: Sequence[Any], by_name: bool
) -> _Measured:
    found: list[Count | float] = []

    def count(inputs: Any) -> Count:
        for candidate in counts:
            try:
                found.append(candidate(inputs))
            except WeightsChanged:
                found.append(math.nan)  # this part has no such tensor, so nothing is weighted by it
        return 0

    inputs, _ = work.inputs(start, stop, count)
    outputs = work.forward(inputs)
    with Terms(alone=False, by_name=None if by_name else False) as terms:
        loss = checked_loss(work.loss(outputs))
    gradients = torch.autograd.grad(loss, list(probes), allow_unused=True)
    only = len(terms.found) == 1 and is_only_term(loss, terms.found[0])
    return _Measured(
        stop - start,
        float(loss.detach()),
        [None if g is None else g.detach() for g in gradients],
        len(terms.found),
        only,
        by_name and terms.only_by_name,
        float(terms.found[0].count) if terms.found else 0.0,
        tuple(float(c) for c in found),
        loss.dtype if loss.dtype in TOLERANCE else torch.float32,
    )


def _choose(
    whole: _Measured, parts: Sequence[_Measured], counts: Sequence[LeafCount]
) -> tuple[Weighting | None, Deviation]:
    limit = max(_tolerance(whole.dtype), max((_tolerance(g.dtype) for g in whole.gradients if g is not None), default=0.0))
    by_name = all(m.by_name for m in (whole, *parts))
    if all(m.only_term for m in (whole, *parts)):
        ways = [(Weighting("term", "by what its mean divides by", by_name=by_name), [p.term_count for p in parts])]
    else:
        watch = whole.terms > 0
        ways = [(Weighting("samples", "by samples", watch=watch, by_name=by_name), [float(p.samples) for p in parts])]
    if not whole.terms:
        ways += [
            (Weighting("count", f"by {count.label}", count=count, inferred=True), [p.counts[i] for p in parts])
            for i, count in enumerate(counts)
        ]
    ways.append((Weighting("sum", "as a sum"), []))
    tried = [(_difference(whole, parts, weights), weighting, weights) for weighting, weights in ways]
    fitting = [(weighting, weights) for difference, weighting, weights in tried if difference <= limit]
    best = min(difference for difference, _, _ in tried)
    deviation = Deviation("the loss", best, limit)
    if not fitting:
        return None, deviation
    return _with_rivals(fitting[0][0], fitting[1:]), deviation


def _with_rivals(chosen: Weighting, others: Sequence[tuple[Weighting, list[float]]]) -> Weighting:
    """Counts that could not be told apart on these samples are looked at on later batches."""
    if chosen.kind not in ("samples", "count") or chosen.watch:
        return chosen
    return replace(chosen, rivals=tuple(other.count for other, _ in others if other.count is not None))


def _difference(whole: _Measured, parts: Sequence[_Measured], weights: list[float]) -> float:
    """Relative difference between the whole's loss and gradients and the parts', weighted ([]: summed)."""
    total = sum(weights)
    if weights and total == 0:
        return float("inf")
    shares = [w / total for w in weights] if weights else [1.0] * len(parts)
    loss = sum(s * p.loss for s, p in zip(shares, parts) if s)
    error = abs(loss - whole.loss) / max(abs(whole.loss), 1e-12)
    squares, norm = 0.0, 0.0
    for i, gradient in enumerate(whole.gradients):
        pieces = [(s, p.gradients[i]) for s, p in zip(shares, parts) if s]
        known = [s * g.double() for s, g in pieces if g is not None]
        if gradient is None and not known:
            continue
        made = sum(known) if known else torch.zeros(())
        wanted = torch.zeros(()) if gradient is None else gradient.double()
        squares += float((made - wanted).pow(2).sum())
        norm += float(wanted.pow(2).sum())
    return max(error, (squares / max(norm, 1e-30)) ** 0.5)


@dataclass(frozen=True)
class LeafCount:
    """Counts valid entries in one leaf of a micro-batch."""

    path: Path
    """Which leaf."""
    rule: str
    """labels: entries that are not -100. shifted: the same without the first position. mask: the sum. nonzero."""
    label: str
    """In words."""

    def __call__(self, inputs: Any) -> Count:
        leaf = leaf_at(inputs, self.path)
        if not isinstance(leaf, torch.Tensor):
            raise WeightsChanged(f"there is no {path_name(self.path)} to count in")
        if self.rule == "labels":
            return entries_other_than(leaf, -100)
        if self.rule == "shifted":
            return entries_other_than(leaf[..., 1:], -100)
        return entries_other_than(leaf, 0) if self.rule == "nonzero" else _sum_of(leaf)


def _sum_of(mask: torch.Tensor) -> Count:
    # Read through NumPy: on the CPU a count is on the host already, and nothing may look like waiting for a device.
    if mask.device.type != "cpu" or type(mask) is not torch.Tensor or mask.dtype is torch.bfloat16:
        return mask.sum()
    total = float(mask.detach().numpy().sum())
    return int(total) if total.is_integer() else torch.tensor(total, dtype=torch.float64)


def _count_candidates(work: Work, samples: int) -> list[LeafCount]:
    """Counts that a loss written by hand could divide by, read off the inputs."""
    found: list[LeafCount] = []

    def look(inputs: Any) -> Count:
        for path, leaf in leaves(inputs):
            if isinstance(leaf, torch.Tensor):
                found.extend(_rules(path, leaf))
        return 0

    work.inputs(0, samples, look)
    return found


def _rules(path: Path, leaf: torch.Tensor) -> Iterator[LeafCount]:
    name = path_name(path)
    if leaf.dtype is torch.bool or (leaf.dim() > 1 and not leaf.is_complex() and _zeros_and_ones(leaf)):
        yield LeafCount(path, "mask", f"the entries set in {name}")
    elif not leaf.is_floating_point() and leaf.dim() > 0:
        yield LeafCount(path, "labels", f"the valid labels in {name}")
        if leaf.dim() > 1:
            yield LeafCount(path, "shifted", f"the valid labels after the first position in {name}")
            yield LeafCount(path, "nonzero", f"the entries of {name} that are not padding")


def _zeros_and_ones(leaf: torch.Tensor) -> bool:
    return bool(((leaf == 0) | (leaf == 1)).all())


def probes_of(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A bounded choice of parameters, spread over the model."""
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


def _whole_and_parts(call: Call, samples: int) -> tuple[list[Any], list[list[Any]], Deviation]:
    """What the call returns for the whole and for its parts, and how far the state it leaves in buffers differs."""
    for by_operations in (False, True):
        draws = Draws(by_operations=by_operations)
        # Recording a graph, as in training: models look at it, and may register hooks.
        with comparable(call.model, call.device), torch.enable_grad():
            with draws.recording():
                whole = _detached(call.run(call.arguments(0, samples)))
            written = {name: b.detach().clone() for name, b in _states(call.model)}
        if draws.unsliced and not by_operations:
            continue
        with comparable(call.model, call.device), torch.enable_grad():
            parts, start = [], 0
            for size in parts_of(samples):
                with draws.sliced(start, start + size, samples):
                    parts.append(_detached(call.run(call.arguments(start, start + size))))
                start += size
            return whole, parts, _state_deviation(written, dict(_states(call.model)))
    raise AssertionError("unreachable: the second round always returns")


def _states(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers that can be compared; whole numbers (counters) may count micro-batches."""
    return ((name, b) for name, b in model.named_buffers() if b.is_floating_point())


def _state_deviation(wanted: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> Deviation:
    worst = Deviation("the state of the model", 0.0, 1.0)
    for name, value in wanted.items():
        difference = relative_difference(value, found[name]) if name in found else float("inf")
        if difference / _tolerance(value.dtype) > worst.relative / worst.limit:
            worst = Deviation(name, difference, _tolerance(value.dtype))
    return worst


def _detached(found: list[Any]) -> list[Any]:
    return [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in found]


def _leaf_difference(leaf: Leaf, whole: torch.Tensor, parts: Sequence[torch.Tensor], samples: int) -> float:
    """How far the parts, joined as `leaf` says, are from the whole: relative L2, or the share of entries that differ."""
    made = parts if leaf.axis is None and leaf.joined == "first" else [leaf.join(parts, parts_of(samples))]
    if tuple(whole.shape) != leaf.shape_for(samples) or whole.dtype != leaf.dtype:
        return float("inf")  # what was learnt on fake tensors depends on values
    if whole.is_floating_point():
        return max(relative_difference(whole, m) for m in made)
    return max(float((whole != m).double().mean()) if whole.shape == m.shape else float("inf") for m in made)


def relative_difference(wanted: torch.Tensor, made: torch.Tensor) -> float:
    """Relative L2 difference; infinite where shapes or NaNs differ."""
    if wanted.shape != made.shape:
        return float("inf")
    a, b = wanted.detach().double(), made.detach().double()
    same = (a == b) | (a.isnan() & b.isnan())
    difference = torch.where(same, torch.zeros_like(a), a - b)  # equal infinities (masks) differ by nothing
    scale = torch.where(a.isfinite(), a, torch.zeros_like(a)).norm()
    return float(difference.norm() / scale.clamp(min=1e-30))


def _joined_difference(whole: torch.Tensor, parts: Sequence[torch.Tensor], samples: int, sizes: Sequence[int]) -> float:
    """The difference along whichever dimension grows with the samples; 0 if none can be told."""
    for dim, size in enumerate(whole.shape):
        if all(p.dim() == whole.dim() and p.shape[dim] * samples == size * n for p, n in zip(parts, sizes)):
            rest = [p.shape[:dim] == whole.shape[:dim] and p.shape[dim + 1 :] == whole.shape[dim + 1 :] for p in parts]
            if all(rest):
                return relative_difference(whole, torch.cat(list(parts), dim))
    same = all(p.shape == whole.shape for p in parts)
    return max(relative_difference(whole, p) for p in parts) if same else 0.0


class _Recorded:
    """The first floating point input and output of all modules, by name, in order of completion."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self.inputs: dict[str, torch.Tensor | None] = {}
        self.outputs: dict[str, torch.Tensor | None] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        def after(module: nn.Module, args: Any, out: Any) -> None:
            name = self._names.get(module)
            if name is not None:
                # A module that runs several times cannot be compared run by run.
                again = name in self.outputs
                self.inputs[name] = None if again else _first_float(args)
                self.outputs[name] = None if again else _first_float(out)

        hook = nn.modules.module.register_module_forward_hook(after)
        try:
            yield
        finally:
            hook.remove()


def _first_float(tree: Any) -> torch.Tensor | None:
    found = (t for _, t in leaves(tree) if isinstance(t, torch.Tensor) and t.is_floating_point())
    first = next(found, None)
    return None if first is None else first.detach()


def _tolerance(dtype: torch.dtype) -> float:
    return TOLERANCE.get(dtype, TOLERANCE[torch.float32])

