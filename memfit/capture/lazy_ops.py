"""Rules for lazy tensors between a model's output and its loss: views, slices and per-sample arithmetic run later.

A rule tells where the samples lie in the result and how the arguments change for a micro-batch: views hold whole-batch sizes as
plain numbers, and tensors of the batch are cut like the output that they meet. An operation without a rule, or one whose result
no single axis describes, materializes the output by replay. Not covered: batch indexing, concatenation, matrix products.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from memfit.batches.cut import Axis
from memfit.batches.weights import KNOWN_LOSSES, Bound, entries_mean
from memfit.capture.expression import BatchTensor, Step, Term
from memfit.capture.lazy_views import (
    CONSTANTS,
    ONE_OPERAND,
    Found,
    Operand,
    Rule,
    max_indices,
    max_values,
    min_indices,
    min_values,
    named,
    numel_of,
    reduced_dims,
)
from memfit.engine.call_context import autocast_now


def step(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Step | None:
    """Records `function(*args, **kwargs)` on lazy operands. Returns None if no rule covers it."""
    rule = _RULES.get(function)
    if rule is None or kwargs.get("inplace") or kwargs.get("out") is not None:
        return None
    found = rule(function, args, {name: value for name, value in kwargs.items() if name not in ("inplace", "out")})
    if found is None:
        return None
    made, arguments, keywords, axis = found
    return Step(made, arguments, keywords, axis, autocast_now((device.type, "cpu")))


def total(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Term | None:
    """Records a sum or mean over all samples. Returns None for anything else."""
    if function not in _REDUCTIONS or not isinstance(args[0], Operand):
        return None
    dims, keeps, rest = reduced_dims(args, kwargs)
    if dims is None or keeps or rest or len(dims) < len(args[0].shape):
        return None
    summed = Step(torch.sum, (args[0].node,), {}, None, autocast_now((device.type, "cpu")))
    return Term(summed, numel_of(args[0].shape) if "mean" in function.__name__ else None)


def known(function: Any, bound: Bound, operand: Callable[[Any], Operand | None], device: torch.device) -> Step | None:
    """Records a known loss with its arguments cut like its input. Returns None if samples and classes share a dimension, or if
    the target is not part of the batch."""
    first = operand(bound["input"])
    assert first is not None
    shape, axis = first.shape, first.axis
    if "ignore_index" in bound and axis.dim == (0 if len(shape) == 1 else 1):
        return None  # the samples' dimension is the loss's classes
    cut = KNOWN_LOSSES[function].cut_with_input
    classes = "ignore_index" in bound and not bound["target"].is_floating_point()
    keywords: dict[str, Any] = {**bound, "input": first.node}
    for name, value in bound.items():
        if name == "input" or not isinstance(value, torch.Tensor):
            continue
        along = axis_of_argument(value, shape, axis, classes=classes) if name in cut else None
        if name == "target" and along is None:
            return None
        other = operand(value)
        if other is not None and other.axis != along:
            return None
        keywords[name] = BatchTensor(value, along) if other is None else other.node
    return Step(function, (), keywords, None, autocast_now((device.type, "cpu")))


@dataclass(frozen=True)
class Unreduced:
    """A loss whose mean is over one value per entry, or per row, of its input."""

    each: Step
    """The unreduced values."""
    summed: Step
    """Their sum."""
    reduction: str
    """The requested reduction: none, mean, sum or batchmean."""
    values: int
    """Number of values."""
    rows: int
    """Size of the first dimension."""

    def term(self) -> Term:
        """Returns the reduced loss of the whole batch."""
        return Term(self.summed, {"mean": self.values, "batchmean": self.rows}.get(self.reduction))


def unreduced(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Unreduced | None:
    """Records a loss of torch.nn.functional whose denominator is its entries or rows. Returns None for others."""
    if function is F.ctc_loss:
        return _ctc(args, kwargs, device)
    if function not in _BY_ENTRY and function not in _BY_ROW:
        return None
    bound = _signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    reduction = given.pop("reduction")
    if given.pop("size_average", None) is not None or given.pop("reduce", None) is not None:
        return None
    found = _by_entry(given) if function in _BY_ENTRY else _by_row(given)
    if found is None:
        return None
    keywords, axis, values, rows = found
    autocast = autocast_now((device.type, "cpu"))
    each = Step(function, (), {**keywords, "reduction": "none"}, axis, autocast)
    return Unreduced(each, replace(each, keywords={**keywords, "reduction": "sum"}, axis=None), reduction, values, rows)


def _by_entry(given: dict[str, Any]) -> tuple[dict[str, Any], Axis, int, int] | None:
    met = _met(list(given.values()))
    if met is None:
        return None
    shape, axis = met
    return {name: _argument(value, shape, axis) for name, value in given.items()}, axis, numel_of(shape), shape[0]


def _by_row(given: dict[str, Any]) -> tuple[dict[str, Any], Axis, int, int] | None:
    operands = [value for value in given.values() if isinstance(value, Operand)]
    others = [value for name, value in given.items() if isinstance(value, torch.Tensor) and name != "weight"]
    rows = {value.shape[0] if len(value.shape) else 0 for value in (*operands, *others)}
    axes = {value.axis for value in operands}
    if len(rows) > 1 or len(axes) > 1 or any(value.requires_grad for value in others):
        return None
    axis = axes.pop()
    if axis.dim or any(len(value.shape) < 2 for value in operands):
        return None

    def argument(name: str, value: Any) -> Any:
        if isinstance(value, Operand):
            return value.node
        return BatchTensor(value, None if name == "weight" else axis) if isinstance(value, torch.Tensor) else value

    keywords = {name: argument(name, value) for name, value in given.items()}
    return keywords, axis, numel_of(operands[0].shape[:-1]), rows.pop()


def _ctc(args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Unreduced | None:
    """Connectionist temporal classification of [time, samples, classes]. Concatenated targets are padded so they can be cut."""
    bound = _signature(F.ctc_loss).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    first, targets = given["log_probs"], given["targets"]
    lengths = [given[name] for name in ("input_lengths", "target_lengths")]
    lengths = [each if isinstance(each, Operand) else torch.as_tensor(each) for each in lengths]
    along = Axis(0)
    fits = isinstance(first, Operand) and len(first.shape) == 3 and first.axis == Axis(1)
    samples = first.shape[1] if fits else 0
    if not fits or not isinstance(targets, torch.Tensor) or any(tuple(length.shape) != (samples,) for length in lengths):
        return None
    if any(isinstance(length, Operand) and length.axis != along for length in lengths):
        return None
    if targets.dim() == 1:
        if isinstance(lengths[1], Operand):
            return None
        targets = torch.nn.utils.rnn.pad_sequence(list(targets.split(lengths[1].tolist())), batch_first=True)
    times, symbols = (each.node if isinstance(each, Operand) else BatchTensor(each, along) for each in lengths)
    arguments = (first.node, BatchTensor(targets, along), times, symbols)
    keywords = {name: given[name] for name in ("blank", "zero_infinity")}
    autocast, reduction = autocast_now((device.type, "cpu")), given["reduction"]
    each = Step(partial(F.ctc_loss, reduction="none"), arguments, keywords, along, autocast)
    summed = _ctc_by_length if reduction == "mean" else partial(F.ctc_loss, reduction="sum")
    return Unreduced(each, Step(summed, arguments, keywords, None, autocast), reduction, samples, samples)


def _ctc_by_length(scores: torch.Tensor, targets: torch.Tensor, times: Any, lengths: Any, **settings: Any) -> torch.Tensor:
    """Return the sum over samples of the loss per target symbol, which torch's mean averages."""
    found = F.ctc_loss(scores, targets, times, lengths, reduction="none", **settings)
    return (found / lengths.clamp(min=1).to(found)).sum()


@functools.cache
def _signature(function: Any) -> inspect.Signature:
    return inspect.signature(function)


def term_of(loss: Step, bound: Bound) -> Term:
    """Returns a known loss of the whole batch as a sum over micro-batches."""
    if bound["reduction"] == "sum":
        return Term(loss, known=loss)
    summed = Step(partial(_summed, loss.function), (), loss.keywords, None, loss.autocast)
    return Term(summed, KNOWN_LOSSES[loss.function].denominator(bound), known=loss)


def axis_of_argument(
    argument: torch.Tensor, shape: Sequence[int], axis: Axis, *, classes: bool = False
) -> Axis | None:
    """Returns the samples' axis in a tensor that meets a value of `shape`, or None if all samples share it."""
    if classes and argument.dim() == len(shape) - 1:
        dim = 0 if axis.dim == 0 else axis.dim - 1  # class indices lack the value's dimension 1
    else:
        dim = axis.dim - (len(shape) - argument.dim())  # broadcasting aligns the last dimensions
    if dim < 0 or dim >= argument.dim() or argument.shape[dim] != shape[axis.dim]:
        return None
    return Axis(dim, axis.outer, axis.inner)


def _summed(function: Any, **bound: Any) -> torch.Tensor:
    """Return a micro-batch's contribution to the numerator of a known mean; zero, not NaN, if it has no valid entry."""
    mean, entries, _ = entries_mean(function, bound)
    return mean * entries


# ---- operations on one value


# ---- operations on several values


def _pointwise(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Found | None:
    """Elementwise, with broadcasting."""
    met = _met((*args, *kwargs.values()))
    if met is None:
        return None
    shape, axis = met
    arguments = tuple(_argument(argument, shape, axis) for argument in args)
    return function, arguments, {name: _argument(value, shape, axis) for name, value in kwargs.items()}, axis


def _beside(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Found | None:
    """Distance or similarity along one dimension (default: the second for similarities, the last for distances)."""
    names = dict(zip(("first", "second", "a", "b", "keepdim"), args))
    values = [value for value in (*args, *kwargs.values()) if isinstance(value, (Operand, torch.Tensor))]
    met = _met(values)
    if met is None or len(values) != 2:
        return None
    shape, axis = met
    by_similarity = function is F.cosine_similarity
    dim = kwargs.get("dim", names.get("a", 1)) if by_similarity else len(shape) - 1
    keeps = bool(kwargs.get("keepdim", names.get("keepdim", False))) and not by_similarity
    if not isinstance(dim, int) or dim % len(shape) == axis.dim:
        return None
    moved = Axis(axis.dim - (not keeps and dim % len(shape) < axis.dim), axis.outer, axis.inner)
    arguments = tuple(_argument(argument, shape, axis) for argument in args)
    return function, arguments, {name: _argument(value, shape, axis) for name, value in kwargs.items()}, moved


def _gathering(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Found | None:
    """gather(value, dim, index) along a dimension other than the samples'."""
    names = dict(zip(("input", "dim", "index"), args)) | kwargs
    first, dim, index = names.get("input"), names.get("dim"), names.get("index")
    if not isinstance(first, Operand) or not isinstance(dim, int) or not isinstance(index, torch.Tensor):
        return None
    axis = first.axis
    fits = index.dim() == len(first.shape) and index.shape[axis.dim] == first.shape[axis.dim]
    if not fits or dim % len(first.shape) == axis.dim:
        return None
    return torch.gather, (first.node, dim, BatchTensor(index, axis)), {}, axis


def _unreduced(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Found | None:
    """A loss with reduction="none": one value per entry, or per class index."""
    loss = KNOWN_LOSSES[function]
    bound = {**loss.defaults, **dict(zip(loss.names, args)), **kwargs}
    first, target = bound.get("input"), bound.get("target")
    if bound["reduction"] != "none" or bound.get("size_average") is not None or bound.get("reduce") is not None:
        return None
    if not isinstance(first, Operand):
        if not isinstance(target, Operand) or "ignore_index" in bound:
            return None
        first = target
    if "ignore_index" not in bound:
        met = _met([value for value in bound.values() if isinstance(value, (Operand, torch.Tensor))])
        if met is None:
            return None
        shape, axis = met
        return function, (), {name: _argument(value, shape, axis) for name, value in bound.items()}, axis
    shape, axis = first.shape, first.axis
    if not isinstance(target, torch.Tensor) or axis.dim == (0 if len(shape) == 1 else 1):
        return None
    along = axis_of_argument(target, shape, axis, classes=not target.is_floating_point())
    if along is None:
        return None
    weight = bound["weight"]
    keywords = {**bound, "input": first.node, "target": BatchTensor(target, along)}
    if isinstance(weight, torch.Tensor):
        keywords["weight"] = BatchTensor(weight, None)
    dim = axis.dim - (axis.dim > 1)  # (the class dimension is gone)
    return function, (), keywords, Axis(dim, axis.outer, axis.inner)


def _met(values: Sequence[Any]) -> tuple[tuple[int, ...], Axis] | None:
    """Return (the broadcast shape, the samples' axis in it), or None if the values do not meet sample by sample."""
    operands = [value for value in values if isinstance(value, Operand)]
    others = [value for value in values if isinstance(value, torch.Tensor)]
    constants = [value for value in values if not isinstance(value, (Operand, torch.Tensor))]
    if not operands or not all(isinstance(value, CONSTANTS) for value in constants):
        return None
    try:
        shape = torch.broadcast_shapes(*(value.shape for value in (*operands, *others)))
    except RuntimeError:
        return None  # the real operation raises its own error
    places = {
        Axis(each.axis.dim + len(shape) - len(each.shape), each.axis.outer, each.axis.inner) for each in operands
    }
    if len(places) > 1:
        return None
    axis = places.pop()
    if any(each.shape[each.axis.dim] != shape[axis.dim] for each in operands) or any(t.requires_grad for t in others):
        return None
    return tuple(shape), axis


def _argument(value: Any, shape: tuple[int, ...], axis: Axis) -> Any:
    """Return the argument for a micro-batch."""
    if isinstance(value, Operand):
        return value.node
    return BatchTensor(value, axis_of_argument(value, shape, axis)) if isinstance(value, torch.Tensor) else value


_REDUCTIONS = set(named("sum", "mean"))
_BY_ENTRY = set(
    named(
        "huber_loss", "smooth_l1_loss", "kl_div", "soft_margin_loss", "poisson_nll_loss", "gaussian_nll_loss",
        "margin_ranking_loss", "hinge_embedding_loss",
    )
)  # fmt: skip
_BY_ROW = set(
    named(
        "triplet_margin_loss", "triplet_margin_with_distance_loss", "cosine_embedding_loss", "multi_margin_loss",
        "multilabel_margin_loss", "multilabel_soft_margin_loss",
    )
)  # fmt: skip
PAIRED: dict[Any, tuple[Any, Any]] = {
    **dict.fromkeys(named("max"), (max_values, max_indices)),
    **dict.fromkeys(named("min"), (min_values, min_indices)),
}
"""Functions that return (values, indices), mapped to functions that return one of them."""
_RULES: dict[Any, Rule] = {
    **dict.fromkeys(
        named(
            "add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "rsub", "neg", "negative", "pow",
            "exp", "expm1", "log", "log1p", "log2", "sqrt", "rsqrt", "square", "abs", "absolute", "reciprocal", "sigmoid",
            "tanh", "relu", "relu6", "leaky_relu", "elu", "silu", "gelu", "softplus", "logsigmoid", "sin", "cos", "erf",
            "clamp", "clip", "clamp_min", "clamp_max", "minimum", "maximum", "where", "masked_fill", "lerp", "xlogy",
            "addcmul", "addcdiv", "nan_to_num", "logaddexp", "__add__", "__radd__", "__sub__", "__rsub__", "__mul__",
            "__rmul__", "__truediv__", "__rtruediv__", "__div__", "__rdiv__", "__pow__", "__rpow__", "__neg__", "__abs__",
            "eq", "ne", "lt", "le", "gt", "ge", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__",
        ),
        _pointwise,
    ),
    **ONE_OPERAND,
    **dict.fromkeys(named("cosine_similarity", "pairwise_distance"), _beside),
    **dict.fromkeys(named("gather"), _gathering),
    **dict.fromkeys(KNOWN_LOSSES, _unreduced),
}  # fmt: skip
