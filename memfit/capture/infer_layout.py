"""Learns the batch dimension and the outputs of a kind of call from two small runs on fake tensors.

If the model cannot run on fake tensors, the two small runs are real and leave no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from memfit._errors import MemfitError, first_line
from memfit.batches.cut import Layout, candidate_layouts, like_first, shared_samples, shares_samples, uncuttable
from memfit.batches.lists import cut_lists, look_of_lists
from memfit.batches.split import Split
from memfit.batches.tree import AttributeKey, Path, first_same, flat, is_column, leaves, map_leaves, map_tensors, tensors
from memfit.capture.call import Call, Tree
from memfit.capture.call_copies import chosen_samples
from memfit.capture.installed_once import InstalledOnce
from memfit.capture.outputs import Outputs, learn_outputs
from memfit.capture.size_looks import FEW, MORE, SizeLooks
from memfit.engine.call_context import autocast_now, uncompiled
from memfit.tracing.failures import TraceFailed
from memfit.tracing.fake import FakeWorld, ZeroArrays
from memfit.tracing.fake_twins import on_twins
from memfit.tracing.sandbox import leave_no_trace


def structure_of(
    tree: Tree, model: nn.Module, device: torch.device, split: Split | None = None, flags: Hashable = ()
) -> Hashable:
    """Returns a key that calls share if they can be cut alike: nesting, dtypes, plain values, mode, flags, autocast,
    and what is one tensor.

    If only `split` can cut them, what it cuts besides tensors (lists of lengths) may differ from call to call.
    """
    if split is cut_lists:
        found = look_of_lists(tree)
    elif split is not None:
        found = (tuple(_kind(leaf) for leaf in tensors(tree)), tuple(first_same(tensors(tree))))
    else:
        found = (tuple((path, _kind(leaf, path)) for path, leaf in leaves(tree)), tuple(first_same(flat(tree))))
    return (
        found,
        (model.training, flags),
        tuple((a.device_type, a.enabled, a.dtype) for a in autocast_now((device.type, "cpu"))),
    )


def look_of(tree: Tree, model: nn.Module, device: torch.device, flags: Hashable = ()) -> Hashable:
    """Returns a key that calls of one kind and equal sizes share, or None if a call takes more than plain tensors."""
    args, kwargs = tree
    found = []
    for part in (*args, *kwargs.values()):
        if type(part) is not torch.Tensor or part.layout is not torch.strided or part.is_nested:
            return None
        found.append((part.shape, part.dtype, part.device.type, part.requires_grad))
    casts = tuple(
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in dict.fromkeys((device.type, "cpu"))
    )
    same = tuple(first_same((*args, *kwargs.values())))
    return tuple(kwargs), tuple(found), same, (model.training, flags), casts


def ways_to_cut(
    model: nn.Module, plain: Callable[..., Any], tree: Tree, samples: int, device: torch.device, split: Split | None
) -> Iterator[Call]:
    """Yields a call for each layout under which the model runs on a few samples, the likeliest first.

    Raises Refused if there is none, with the model's error for the likeliest layout.
    """
    if split is not None:
        layout = Layout(tuple(None for _ in leaves(tree)), samples)
        try:
            call = _learnt(model, plain, tree, layout, device, split)
        except Exception as error:
            if isinstance(error, MemfitError):
                raise
            own = _call(model, plain, tree, layout, device, split)
            if _can_be_split(own):
                _surface_own_error(own, error)
            raise uncuttable(f"on a few samples the model says: {first_line(error)}") from error
        yield call
        return
    first_error: BaseException | None = None
    found = False
    for layout in candidate_layouts(tree, samples):
        try:
            call = _learnt(model, plain, tree, layout, device, None)
        except Exception as error:
            first_error = first_error or error
            continue
        if shares_samples(tree, layout) and not call.outputs.has_samples:
            continue  # nothing of what is cut may reach the outputs: every micro-batch would run all samples
        found = True
        yield call
    if found:
        return
    if isinstance(first_error, MemfitError):
        raise first_error
    if first_error is None:
        raise uncuttable(f"none of the call's tensors has a dimension of {samples}, the samples in the batch")
    _surface_own_error(_call(model, plain, tree, next(candidate_layouts(tree, samples)), device, None), first_error)
    raise uncuttable(f"on a few samples the model says: {first_line(first_error)}") from first_error


def _can_be_split(call: Call) -> bool:
    """Whether split= accepts the number of samples assumed for the call."""
    try:
        call.arguments(0, call.samples - 1)
    except Exception:
        return False
    return True


def outputs_of(call: Call) -> Outputs:
    """Infers what the model returns for any number of samples of such a call. Raises what the model raises in a real run."""
    few, many = _few(call)
    if few == 1 and call.split is None:  # many models treat a single sample differently, so copies are used
        call, few, many = chosen_samples(call, (0, call.samples - 1, 0)), 2, 3
    try:
        small, large = fake_outputs(call, few, many)
    except TraceFailed:
        small, large = _real_outputs(call, few, many)
    return learn_outputs(small, few, large, many)


def _few(call: Call) -> tuple[int, int]:
    return (2, 3) if call.samples >= 3 else (1, 2)


def _surface_own_error(call: Call, on_few: BaseException) -> None:
    """Raise the model's error from its own frames if the model fails even uncut; return if cutting causes the failure, `on_few`
    samples. On fake tensors a model may fail otherwise than for real, which tells nothing."""
    try:
        with ZeroArrays():
            fake_outputs(call, call.samples)
    except TraceFailed as failed:
        if type(failed.__cause__) is type(on_few):
            _real_outputs(call, *_few(call))


def twin_call(call: Call, twin: Callable[[torch.Tensor], torch.Tensor], samples: int) -> tuple[Call, list[torch.Tensor]]:
    """Builds the call on fake tensors (twins) of its first `samples` samples. Returns it and the twins, which stand for views
    of existing storage. Samples beyond the batch's own are represented by samples like them."""
    first = call.arguments(0, samples) if samples <= call.samples else like_first(call.tree, call.layout, samples)
    tree = twins_of(first, twin)
    layout = Layout(call.layout.axes, samples)
    twin_ = Call(call.model, call.plain, tree, layout, call.outputs, call.device, autocast=call.autocast, split=None)
    twin_.whole_piece = call.split is not None
    return twin_, tensors(tree)


def twins_of(tree: Any, twin: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Replaces the real tensors in a part of a batch by fake tensors."""
    return map_tensors(partial(twin_of_part, twin=twin), tree)


def twin_of_part(tensor: torch.Tensor, twin: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Returns a fake tensor for part of a batch, with a storage of the part's own size."""
    if tensor.is_floating_point() and not tensor.is_sparse:
        fake = twin(torch.empty(0, dtype=tensor.dtype, device=tensor.device)).new_empty(tensor.shape)
        return fake.requires_grad_(tensor.requires_grad)
    return twin(tensor.detach().clone())


def _learnt(
    model: nn.Module, plain: Callable[..., Any], tree: Tree, layout: Layout, device: torch.device, split: Split | None
) -> Call:
    call = _call(model, plain, tree, layout, device, split)
    call.outputs = outputs_of(call)
    return call


def _call(
    model: nn.Module, plain: Callable[..., Any], tree: Tree, layout: Layout, device: torch.device, split: Split | None
) -> Call:
    return Call(model, plain, tree, layout, Outputs(None, ()), device, split=split)


def fake_outputs(call: Call, *samples: int) -> list[Any]:
    """Runs the call on fake tensors with each number of samples. Returns the outputs. Raises TraceFailed."""
    installs = InstalledOnce(call.model)
    with on_twins(call.model, call.device) as world:
        twins = [twin_call(call, world.twin, n)[0] for n in samples]
        with world.entered(), uncompiled(), torch.enable_grad():
            found = [installs.ran(t.output()) for t in twins]
    installs.keep()
    return found


def size_that_decides(call: Call, looks: SizeLooks, *sizes: int) -> int | None:
    """Returns the first of these numbers of samples for which the model acts differently than for few."""
    if call.split is None and not call.layout.cuts:
        return None
    if call.split is not None:
        sizes = comparable_sizes(lambda samples: call.arguments(0, samples), call.samples, sizes)
    alike = call if call.split is not None else chosen_samples(call, (0, 0, 0))

    def fake(twin: Callable[[torch.Tensor], torch.Tensor], samples: int) -> Callable[[], Any]:
        return twin_call(alike, twin, samples)[0].output

    def real(samples: int) -> Callable[[], Any]:
        if call.split is not None:
            return partial(call.output, call.arguments(0, samples))
        return chosen_samples(alike, (0,) * samples).output

    return looks.first_that_decides(fake, real, sizes, alike=call.split is None)


def comparable_sizes(first: Callable[[int], Any], most: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Returns the `sizes` comparable with few samples for a batch that only split= can cut (`first(n)`: its first n samples).
    Returns none if samples differ in shape: that would be mistaken for an effect of their number."""
    found = tuple(size for size in sizes if MORE < size <= most)
    alike = not found or all(shared_samples(first(size)) == size for size in (FEW, MORE, *found))
    return found if alike else ()


def _real_outputs(call: Call, *samples: int) -> list[Any]:
    world, installs = FakeWorld(), InstalledOnce(call.model)  # keeps the device of outputs whose data are dropped
    with leave_no_trace(call.model, call.device), uncompiled(), torch.enable_grad():
        found = []
        for n in samples:
            output = installs.ran(call.output(call.arguments(0, n)))
            found.append(map_leaves(partial(_without_data, world), output))
            del output
    installs.keep()
    return found


def _without_data(world: FakeWorld, leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.layout is not torch.strided:
        return torch.empty_like(leaf, device="meta").requires_grad_(leaf.requires_grad)
    with world.mode:
        return torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device).requires_grad_(leaf.requires_grad)


def _kind(leaf: Any, path: Path = ()) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype, leaf.dim(), leaf.device.type, leaf.requires_grad
    if is_column(leaf):
        return "column" if isinstance(leaf[0], (str, bytes)) else tuple(leaf)
    simple = isinstance(leaf, (int, float, str, bool, type(None)))
    # A number on the script's own batch class is often derived from the batch (its token count) and varies with it.
    return leaf if simple and not (path and isinstance(path[-1], AttributeKey)) else type(leaf).__name__

