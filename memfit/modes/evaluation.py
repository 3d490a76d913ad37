"""Evaluation: a forward without gradients whose batch would not fit runs in pieces, and the outputs are joined.

Only models in eval mode are served: there samples stay independent and nothing is written. This is checked on a few samples
before a batch is cut. Not covered: compiled models, sharded parameters, and outputs that cannot be joined (caches): such a
batch runs whole where its tensors fit.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from memfit._errors import MemfitError, Refused
from memfit.autotune.planner import KERNELS
from memfit.batches.cut import Layout, common_size, shared_samples
from memfit.batches.lists import cut_lists, samples_in_lists
from memfit.batches.pieces import bounds, sizes
from memfit.batches.shapes import Shapes
from memfit.batches.split import Split
from memfit.batches.tree import tensors
from memfit.capture.call import Call, Tree
from memfit.capture.call_copies import first_samples
from memfit.capture.find_side_outputs import FoundDoors, look_for_side_doors
from memfit.capture.infer_layout import fake_outputs, size_that_decides, twin_call, ways_to_cut
from memfit.capture.joining import Joining
from memfit.capture.output_leaf import Leaf
from memfit.capture.outputs import Outputs, learn_outputs
from memfit.capture.side_outputs import Doorway, through
from memfit.capture.size_looks import SizeLooks
from memfit.engine.batch_dependent import BatchDependent
from memfit.engine.call_context import uncompiled
from memfit.engine.planning_scope import reaching
from memfit.engine.recovery import surviving
from memfit.equivalence.proofs import joined_outputs, parts_of
from memfit.profiling.timeline import Timeline, fit
from memfit.runtime.core import Core
from memfit.tracing.failures import TraceFailed
from memfit.tracing.trace_evaluation import forwards

FEW, MANY = 2, 3
"""Samples that an evaluation is traced with."""
AHEAD = 8
"""If this many times a batch's memory fits, batches of up to twice its size in every dimension are not checked again (attention
grows with the square of a length)."""
PROVEN = 3
"""Samples that joining is proven on."""


@dataclass(frozen=True)
class Cutting:
    """How batches like an earlier one are cut."""

    layout: Layout
    outputs: Outputs
    split: Split | None
    pieces: tuple[int, ...]
    doors: Callable[[Callable[..., Any]], Callable[..., Any]]
    """Wraps the forward so that its output includes its side effects."""


class Evaluations:
    """Answers calls of a model that need no gradients."""

    def __init__(self, core: Core, aside: Callable[[], AbstractContextManager[None]]) -> None:
        self._core, self._aside = core, aside
        self._cut: dict[Hashable, Cutting] = {}
        self._whole: dict[Hashable, Shapes | None] = {}
        """By the number of dimensions of a call's tensors, the shapes up to which it runs whole; None: always."""
        self._serves = core.settings.card is None and not core.settings.whole and not core.compiled
        core.on_forget += [self._cut.clear, self._whole.clear]

    def answer(self, name: str, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what `plain` returns for these arguments, run whole or in pieces."""
        tree = args, kwargs
        if not self._is_served(tree):
            return plain(*args, **kwargs)
        shapes = tuple(tuple(tensor.shape) for tensor in tensors(tree))
        look = name, tuple(map(len, shapes))
        cutting = self._cut.get((name, shapes))
        if cutting is not None:
            try:
                return self._in_pieces(plain, tree, cutting)
            except Refused:  # it does not return what it returned before
                cutting = None
        if cutting is None and not self._fits(look, shapes):
            with self._aside(), torch.no_grad(), reaching(tree):
                cutting, most = self._decided(plain, tree, shapes)
            if cutting is None:
                self._whole[look] = most
        if cutting is None and self._core.device.type == "cpu":
            return plain(*args, **kwargs)  # (if memory runs out, the OS kills the process)
        if cutting is None:
            again = partial(self._again, name, plain, tree, shapes)
            return surviving(lambda: plain(*args, **kwargs), self._core.device, lambda said: again())
        self._cut[name, shapes] = cutting
        return self._in_pieces(plain, tree, cutting)

    def _again(self, name: str, plain: Callable[..., Any], tree: Tree, shapes: Shapes) -> Any:
        """Run in halves a call that ran out of memory against prediction."""
        with self._aside(), torch.no_grad(), reaching(tree):
            cutting = self._cutting(plain, tree, None)
        if cutting is None:
            return plain(*tree[0], **tree[1])
        self._cut[name, shapes] = cutting
        return self._in_pieces(plain, tree, cutting)

    def _fits(self, look: Hashable, shapes: Shapes) -> bool:
        """Return whether such a call is known to run whole."""
        if look not in self._whole:
            return False
        most = self._whole[look]
        return most is None or all(a <= b for mine, its in zip(shapes, most) for a, b in zip(mine, its))

    def _is_served(self, tree: Tree) -> bool:
        core = self._core
        if not self._serves or core.model.training or core.staging.parts is not None:  # (cheap: this runs per micro-batch)
            return False
        if torch.is_grad_enabled() and any(t.requires_grad for t in (*core.model.parameters(), *tensors(tree))):
            return False
        return _get_current_dispatch_mode() is None

    def _decided(self, plain: Callable[..., Any], tree: Tree, shapes: Shapes) -> tuple[Cutting | None, Shapes | None]:
        """Return (how to cut the batch, None to run it whole; the shapes up to which batches run whole, None for all)."""
        growth = self._growth(plain, tree)
        if growth is None:
            return None, None
        samples, timeline, standing = growth
        left = self._core.memory.left()
        grows = KERNELS * timeline.growth(samples)
        if AHEAD * grows <= left:
            return None, tuple(tuple(2 * size for size in shape) for shape in shapes)
        if grows <= left:
            return None, shapes
        fitting = [n for n in range(1, samples) if standing * samples + KERNELS * timeline.growth(n) <= left]
        cutting = self._cutting(plain, tree, max(fitting, default=1))
        whole = timeline.growth(samples) <= left
        if cutting is None or (whole and any(leaf.kind == "opaque" for leaf in cutting.outputs.leaves)):
            return None, shapes
        self._core.tell(
            f"a batch of {samples} without gradients runs in {len(cutting.pieces)} pieces of at most {max(cutting.pieces)}"
        )
        return cutting, None

    def _growth(self, plain: Callable[..., Any], tree: Tree) -> tuple[int, Timeline, int] | None:
        """Return (samples, the timeline of a forward's allocations, output bytes per sample), or None if that is unknown."""
        found = self._learnt(plain, tree)
        if found is None or found.samples <= MANY:
            return None
        model, device = self._core.model, self._core.device
        try:
            small, large = forwards(model, device, [partial(_twin, found, n) for n in (FEW, MANY)])
        except TraceFailed:
            return None
        timeline = fit(small, FEW, large, MANY)
        if timeline is None:  # scale the larger one by samples
            timeline = replace(large, fixed=0 * large.fixed, per_sample=large.fixed / MANY)
        return found.samples, timeline, sum(leaf.bytes_for(1) for leaf in found.outputs.leaves if leaf.axis is not None)

    def _learnt(self, plain: Callable[..., Any], tree: Tree) -> Call | None:
        """Return the call with its outputs, or None if its samples are unknown or it cannot be cut."""
        split = self._core.split or (None if samples_in_lists(tree, None) is None else cut_lists)
        listed = samples_in_lists(tree, None)
        for samples in dict.fromkeys((listed, shared_samples(tree), common_size(tree))):
            if samples is None or samples < 2:
                continue
            try:
                call = next(ways_to_cut(self._core.model, plain, tree, samples, self._core.device, split))
                few, many = (FEW, MANY) if samples >= MANY else (1, 2)
                small, large = fake_outputs(call, few, many)
                outputs = learn_outputs(small, few, large, many)
            except Exception:
                continue  # it runs as the script wrote it and raises its own error
            call.outputs = replace(outputs, leaves=tuple(map(_without_graph, outputs.leaves)))
            return call
        return None

    def _cutting(self, plain: Callable[..., Any], tree: Tree, largest: int | None) -> Cutting | None:
        """Return how to cut into pieces of `largest` samples (None: halves), or None if the parts differ from the whole."""
        doorway = Doorways(())
        for _ in range(3):
            call = self._learnt(doorway(plain), tree)
            if call is None:
                return None
            few = min(PROVEN, call.samples)
            proof = first_samples(call, few)
            try:
                look_for_side_doors(proof, few)
                outputs, deviations, composition = joined_outputs(proof, parts_of(few))
            except FoundDoors as found:
                doorway = Doorways(found.doors)
                continue
            except MemfitError:
                return None
            if composition.slots or not all(deviation.agrees for deviation in deviations):
                return None
            looks = SizeLooks(call.model, call.device, self._core.memory.left)
            if size_that_decides(call, looks, call.samples) is not None:
                return None
            pieces = sizes(call.samples, largest or max(1, call.samples // 2))
            return Cutting(call.layout, outputs, call.split, pieces, doorway)
        return None

    def _in_pieces(self, plain: Callable[..., Any], tree: Tree, cutting: Cutting) -> Any:
        core, run = self._core, cutting.doors(plain)
        call = Call(core.model, run, tree, cutting.layout, cutting.outputs, core.device, split=cutting.split)
        call.begin(cutting.pieces)
        joins = [Joining(leaf, cutting.pieces) for leaf in cutting.outputs.leaves]
        try:
            with uncompiled():
                for start, stop in bounds(cutting.pieces):
                    for join, part in zip(joins, call.checked(call.arguments(start, stop)), strict=True):
                        join.add(part)
        except BatchDependent:
            return plain(*tree[0], **tree[1])
        values = [
            join.whole() if leaf.is_tensor else leaf.without_tensor(call.samples)
            for leaf, join in zip(cutting.outputs.leaves, joins)
        ]
        return through(run, cutting.outputs.filled(values), tree)


def _twin(call: Call, samples: int, twin: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], Any]:
    return twin_call(call, twin, samples)[0].output


def _without_graph(leaf: Leaf) -> Leaf:
    return replace(leaf, kind="constant" if leaf.kind == "loss" else leaf.kind, joined="first", differentiable=False)


@dataclass(frozen=True)
class Doorways:
    """Wraps a forward to return the side effects it leaves at `doors`, too."""

    doors: tuple[Any, ...]

    def __call__(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        return Doorway(plain, self.doors) if self.doors else plain
