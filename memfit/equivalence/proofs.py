"""Proves on a few samples that a batch is cut along its samples, and that outputs are joined correctly.

The whole and its parts run on the same samples. Parts get slices of the whole's random draws, and batch norm is frozen: its
batch statistics are the one accepted coupling, always reported. So any difference is real mixing of samples. Everything runs on
the device and leaves no trace.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from itertools import compress
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from memfit.batches.pieces import bounds
from memfit.batches.tree import leaves, tensors
from memfit.capture.call import Call
from memfit.capture.call_copies import chosen_samples
from memfit.capture.output_leaf import Leaf, name_in, turned
from memfit.capture.outputs import Outputs
from memfit.capture.size_dependence import SIZE
from memfit.engine.batch_limits import Limits, SeenLimits, limits_in, unreachable_in
from memfit.engine.branches import CallsMade, branching_of
from memfit.engine.call_context import uncompiled
from memfit.engine.compose_state import Composition
from memfit.engine.gradients import is_sharded
from memfit.engine.intercept import is_compiled
from memfit.engine.random_slices import Draws
from memfit.equivalence.host_reads import Again, Reads, decided, may_branch, noting_moves, tried_on
from memfit.equivalence.proof_rounds import Rounds, rounds_of
from memfit.equivalence.same_values import same
from memfit.equivalence.seen_effects import Run, Trial, doubled
from memfit.equivalence.tolerances import (
    MOST,
    Arithmetic,
    Deviation,
    floor_from,
    full_precision,
    is_dtype_of,
    last_bits_flipped,
    relative_difference,
)
from memfit.tracing.sandbox import Traces, leave_no_trace


class Looks(NamedTuple):
    """What was seen of the whole and of its parts."""

    limits: SeenLimits
    of_parts: list[SeenLimits]
    made: Sequence[CallsMade]
    """The script's calls of torch, if it may branch on values of the batch."""


PROOF_SAMPLES = 5
"""Number of samples that proofs run on."""
FLIPPED = 0.2
"""Fraction of integer entries that may differ: an argmax may flip if two scores are equal up to rounding."""


def parts_of(samples: int, least: int = 1) -> tuple[int, ...]:
    """Returns unequal part sizes for a few samples, none below `least`: 5 = 2 + 3, 3 = 1 + 2, 2 = 1 + 1."""
    first = max(least, (samples - 1) // 2)
    return (first, samples - first) if samples >= 2 * least else (samples,)


@contextmanager
def comparable(model: nn.Module, device: torch.device) -> Iterator[Traces]:
    """Sets up the comparison of whole and parts: leaves no trace, compiles nothing, freezes batch norm, and drops nothing
    between the layers of recurrent networks."""
    with _without_recurrent_dropout(model), leave_no_trace(model, device) as traces, uncompiled():
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.training = False
        yield traces


@contextmanager
def _without_recurrent_dropout(model: nn.Module) -> Iterator[None]:
    """Dropout between the layers of a recurrent network keeps samples apart, but its draws have no rows by sample: cuDNN draws
    inside one kernel, and packed sequences lie by time, each as long as it is."""
    recurrent = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    dropping = [(module, module.dropout) for module in recurrent if module.dropout]
    for module, _ in dropping:
        module.dropout = 0.0
    try:
        yield
    finally:
        for module, share in dropping:
            module.dropout = share


def frozen_norms(call: Call) -> Call:
    """Returns the call with batch norm in eval mode, on copies of its samples, for comparing whole and parts."""
    frozen = copy.copy(call)
    frozen.copies = True
    frozen.modes = [
        (module, training and not isinstance(module, nn.modules.batchnorm._BatchNorm)) for module, training in call.modes
    ]
    return frozen


def joined_outputs(call: Call, sizes: Sequence[int]) -> tuple[Outputs, list[Deviation], Composition]:
    """Determines how outputs are joined. Returns the outputs, the deviations of joined parts from the whole (the largest
    first), and the composition of the state that the forward changes.

    A leaf without gradient that cannot be joined is marked opaque: using it is refused, training is not.
    """
    with full_precision(call.device) as arithmetic:
        whole, rounds, line, nearby, seen = _whole_and_parts(frozen_norms(call), sizes)
    parts, moves = rounds.parts, rounds.moves
    deviations = [] if moves.deviation is None else [moves.deviation]
    deviations += [] if line is None else [Deviation(line, 1.0, 0.0, by="reading")]
    deviations += [] if unreachable_in(*seen[:2]) is None else [Deviation(SIZE, 1.0, 0.0, by="counting")]
    outputs = call.outputs
    outputs.check_count(whole)
    if any(len(found) != len(outputs.leaves) for found in parts):
        return outputs, [Deviation("the structure of the output", float("inf"), 1.0)], moves.composition
    near = cache(nearby)

    def floor(i: int) -> float:
        return 0.0 if is_sharded(call.model) else floor_from(relative_difference(whole[i], near()[i]))

    settled = []
    for i, leaf in enumerate(outputs.leaves):
        if leaf.kind == "opaque" or i == outputs.loss:  # the weighting of a single own loss is proven separately
            settled.append(leaf)
            continue
        leaf, deviation = _settled(leaf, whole[i], [part[i] for part in parts], sizes, arithmetic)
        if leaf.differentiable and deviation.limit < deviation.relative < MOST:
            deviation = replace(deviation, limit=max(deviation.limit, floor(i)))
        settled.append(leaf)
        deviations += [deviation] if leaf.differentiable else []
    if rounds.later is not None and _differs_again(settled, outputs.loss, rounds.later, sizes, arithmetic, floor):
        deviations.append(moves.misread())
    deviations.sort(key=lambda each: each.relative / each.limit if each.limit else each.relative, reverse=True)
    outputs = replace(outputs, leaves=tuple(settled))
    if not any(map(is_compiled, call.model.modules())):  # (no function mode sees what it computes)
        branching = branching_of(seen.made) if seen.made else None
        outputs = replace(outputs, limits=limits_in(*seen[:2]), branching=branching)
    return outputs, deviations, moves.composition


def _twice(call: Call, start: int, stop: int) -> Run:
    """Return what runs these samples twice."""
    double = chosen_samples(call, [*range(start, stop), *range(start, stop)])

    def run(low: int, high: int) -> object:
        with torch.enable_grad():
            return double.run(double.arguments(low, high))

    return run


def _differs_again(
    settled: Sequence[Leaf],
    loss: int | None,
    again: tuple[list[Any], list[list[Any]]],
    sizes: Sequence[int],
    arithmetic: Arithmetic,
    floor: Callable[[int], float],
) -> bool:
    """Whether parts differ from the whole once the state has changed. A single own loss is checked separately."""
    whole, parts = again
    for i, leaf in enumerate(settled):
        if leaf.differentiable and i != loss and leaf.is_tensor:
            limit = arithmetic.tolerance(whole[i].dtype) if whole[i].is_floating_point() else 0.0
            difference = _leaf_difference(leaf, whole[i], [part[i] for part in parts], sizes)
            if difference > limit and not (difference < MOST and difference <= floor(i)):
                return True
    return False


def _settled(
    leaf: Leaf, whole: Any, parts: Sequence[Any], sizes: Sequence[int], arithmetic: Arithmetic
) -> tuple[Leaf, Deviation]:
    """Return the leaf joined in the way closest to the whole, and its deviation."""
    where = name_in(leaf.path)
    if leaf.kind in ("value", "size"):
        made = [leaf.without_tensor(samples) for samples in (sum(sizes), *sizes)]
        same = [whole, *parts] == made  # during tracing, numbers read from tensors are guesses
        return leaf if same else _unjoined(leaf, whole), Deviation(where, 0.0, 1.0)
    if not isinstance(whole, torch.Tensor):
        return leaf, Deviation(where, float("inf"), 1.0)
    shapes = [tuple(part.shape) for part in parts if isinstance(part, torch.Tensor)]
    if leaf.axis is not None and shapes != [leaf.shape_for(size) for size in sizes]:
        if leaf.differentiable:
            like_whole = replace(leaf, shape=tuple(whole.shape))
            raise leaf.of_other_size([like_whole.shape_for(size) for size in sizes], shapes)
        return _unjoined(leaf, whole), Deviation(where, 0.0, 1.0)
    found = [(_leaf_difference(way, whole, parts, sizes), n, way) for n, way in enumerate(_ways_to_join(leaf))]
    difference, _, best = min(found, key=lambda item: item[:2])
    limit = arithmetic.tolerance(whole.dtype) if whole.is_floating_point() else FLIPPED if leaf.kind == "batch" else 0.0
    if best.axis is None and _leaf_difference(replace(best, joined="first"), whole, parts, sizes) <= limit:
        best = replace(best, alike=True)
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


def mixing_module(call: Call, sizes: Sequence[int], allowed: Sequence[str]) -> Deviation | None:
    """Returns the first module, in order of completion, whose output differs between whole and parts although its input does
    not. Returns None if every such module is in `allowed` or contains an allowed one."""
    call, samples, draws = frozen_norms(call), sum(sizes), Draws()
    whole = _Recorded(call.model)

    def record(start: int, stop: int) -> _Recorded:
        part = _Recorded(call.model)
        with draws.sliced(start, stop, samples), part.watching():
            call.run(call.arguments(start, stop))
        return part

    @cache
    def near() -> _Recorded:
        """What the whole gives from parameters that differ in their last bits."""
        with last_bits_flipped(call.model.parameters()):
            return record(0, samples)

    def floor(name: str) -> float:
        found = [whole.outputs[name], near().outputs.get(name)]
        return floor_from(_module_difference(found, (samples,), arithmetic).relative)

    with comparable(call.model, call.device), full_precision(call.device) as arithmetic, torch.enable_grad():
        with draws.recording(), whole.watching():
            call.run(call.arguments(0, samples))
        parts = [record(start, stop) for start, stop in bounds(sizes)]
        for name in whole.outputs:
            label = name or type(call.model).__name__
            accepted = any(a == label or (a + ".").startswith(name + "." if name else "") for a in allowed)
            given = zip(*(record.inputs.get(name, []) for record in (whole, *parts)))
            if accepted or not all(_module_difference(each, sizes, arithmetic).agrees for each in given):
                continue
            found = [record.outputs[name] for record in (whole, *parts) if name in record.outputs]
            made = _module_difference(found, sizes, arithmetic)
            agrees = made.agrees or (not is_sharded(call.model) and made.relative <= floor(name))
            if not agrees:  # (it may be NaN)
                return replace(made, where=label)
    return None


def _module_difference(
    found: Sequence[torch.Tensor | None], sizes: Sequence[int], arithmetic: Arithmetic
) -> Deviation:
    """Compare a module's inputs or outputs for the parts with those for the whole. Unknown ones count as equal."""
    known = [t for t in found if t is not None and t.dim() > 0]
    if len(known) < 1 + len(sizes):
        return Deviation("", 0.0, 1.0)
    difference = _joined_difference(known[0], known[1:], sizes)
    return Deviation("", difference, arithmetic.tolerance(known[0].dtype))


def _whole_and_parts(
    call: Call, sizes: Sequence[int]
) -> tuple[list[Any], Rounds[list[Any]], str | None, Callable[[], list[Any]], Looks]:
    """Run the call on the whole and on its parts. Return the whole's outputs, what the parts gave, the line whose control flow
    depends on batch values, a function: the whole's outputs from parameters that differ in their last bits, and what was seen
    of both."""
    for by_operations in (False, True):
        draws, reads = Draws(by_operations=by_operations), Reads()
        # With grad enabled as in training, because models check for it and may register hooks.
        with comparable(call.model, call.device) as traces, torch.enable_grad():
            given = call.arguments(0, sum(sizes))
            with draws.recording():
                whole = _detached(_read(call, given, sum(sizes), reads))
            reads.moved = frozenset(traces.moved())
        if not draws.unsliced or by_operations:
            return whole, *_parts_of(call, sizes, draws, reads, whole)
    raise AssertionError("unreachable: the second round always returns")


def _parts_of(
    call: Call, sizes: Sequence[int], draws: Draws, reads: Reads, whole: list[Any]
) -> tuple[Rounds[list[Any]], str | None, Callable[[], list[Any]], Looks]:
    """Do `_whole_and_parts` for the parts, after the whole has run."""
    samples, aside = sum(sizes), partial(comparable, call.model, call.device)

    def run(start: int, stop: int) -> list[Any]:
        given = call.arguments(start, stop)
        with torch.enable_grad(), draws.sliced(start, stop, samples):
            return _detached(call.run(given))

    def measure(start: int, stop: int, reads: Reads) -> list[Any]:
        given = call.arguments(start, stop)
        with torch.enable_grad(), draws.sliced(start, stop, samples):
            return _detached(_read(call, given, stop - start, reads))

    def once_more(reads: Reads) -> list[Any]:
        with aside() as traces:
            return noting_moves(reads, measure(0, samples, reads), traces.moved())

    def nearby() -> list[Any]:
        with full_precision(call.device), aside(), last_bits_flipped(call.model.parameters()):
            return run(0, samples)

    used = [leaf.differentiable for leaf in call.outputs.leaves] if len(call.outputs.leaves) == len(whole) else ()

    def equal(wanted: list[Any], made: list[Any]) -> bool:
        return len(made) == len(wanted) and all(map(same, compress(wanted, used), compress(made, used)))

    knows_samples = call.split is None and bool(call.layout.cuts)
    doubles = doubled(partial(_twice, call), sizes, aside) if knows_samples else ()
    rounds = rounds_of(reads, measure, Trial(run, sizes), doubles, aside, nullcontext, equal, draws=draws.drew)
    tried, repeat = tried_on(call.device, call.model), Again(whole, once_more, equal)
    line = decided(reads, rounds.looks, repeat, tried=tried)
    branches = line is None and may_branch(reads, repeat, tried)
    made = [look.branches.made for look in (reads, *rounds.looks)] if branches else []
    return rounds, line, nearby, Looks(reads.limits, [look.limits for look in rounds.looks], made)


def _read(call: Call, given: Any, samples: int, reads: Reads) -> list[Any]:
    """Run a call and note what it reads, where it may branch, and what it limits."""
    limits = Limits(samples, tensors(given))
    reads.branches.given(given)
    with reads.of(tensors(given)), limits, reads.branches:
        found = call.run(given)
    reads.limits = limits.of([leaf for leaf in found if isinstance(leaf, torch.Tensor)])
    return found


def _detached(found: list[Any]) -> list[Any]:
    return [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in found]


def _leaf_difference(leaf: Leaf, whole: torch.Tensor, parts: Sequence[torch.Tensor], sizes: Sequence[int]) -> float:
    """Compare the parts, joined as `leaf` says, with the whole: relative L2 error, or the fraction of entries that differ."""
    made = parts if leaf.axis is None and leaf.joined == "first" else [leaf.join(parts, sizes)]
    if tuple(whole.shape) != leaf.shape_for(sum(sizes)) or not is_dtype_of(leaf.dtype, whole.dtype):
        return float("inf")  # what fake tensors showed depends on values
    if whole.is_floating_point():
        return max(relative_difference(whole, m) for m in made)
    return max(float((whole != m).double().mean()) if whole.shape == m.shape else float("inf") for m in made)


def _joined_difference(whole: torch.Tensor, parts: Sequence[torch.Tensor], sizes: Sequence[int]) -> float:
    """Compare along the dimension that grows with the samples; 0 if there is none."""
    for dim, size in enumerate(whole.shape):
        if all(p.dim() == whole.dim() and p.shape[dim] * sum(sizes) == size * n for p, n in zip(parts, sizes)):
            rest = [p.shape[:dim] == whole.shape[:dim] and p.shape[dim + 1 :] == whole.shape[dim + 1 :] for p in parts]
            if all(rest):
                return relative_difference(whole, torch.cat(list(parts), dim))
    same = all(p.shape == whole.shape for p in parts)
    return max(relative_difference(whole, p) for p in parts) if same else 0.0


class _Recorded:
    """Records the floating-point inputs and the first output of every module, by name, in order of completion."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self.inputs: dict[str, list[torch.Tensor]] = {}
        self.outputs: dict[str, torch.Tensor | None] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        def after(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            name = self._names.get(module)
            if name is not None:
                # A module that runs several times cannot be compared run by run.
                again = name in self.outputs
                self.inputs[name] = [] if again else _floats((args, kwargs))
                self.outputs[name] = None if again else next(iter(_floats(out)), None)

        hook = nn.modules.module.register_module_forward_hook(after, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()
            nn.modules.module._global_forward_hooks_with_kwargs.pop(hook.id, None)  # torch leaves it there


def _floats(tree: Any) -> list[torch.Tensor]:
    return [t.detach() for _, t in leaves(tree) if isinstance(t, torch.Tensor) and t.is_floating_point()]
