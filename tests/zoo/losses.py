"""Loss variants over a family's logits, in the spellings that scripts use.

They differ in what decides whether memfit weighs micro-batches right: the reduction, ignored labels, class weights, a
module or a function, log_softmax first, flattened or not. Each variant knows the weight of a part of a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo import targets
from zoo.data import IGNORED
from zoo.family import Family
from zoo.targets import VOID, labels_of


@dataclass(frozen=True)
class Variant:
    """A loss, and how the losses of a batch's parts add up to the loss of the whole."""

    name: str
    loss: Callable[[Tensor, Any], Tensor]
    """loss(logits, batch) -> scalar."""
    total: Callable[[Any], float] | None = None
    """What the loss of a batch is divided by, up to a constant; None for a sum."""

    def weight(self, part: Any, whole: Any) -> float:
        """What the part's loss counts for in the whole's."""
        return 1.0 if self.total is None else self.total(part) / self.total(whole)


def variants_for(family: Family) -> tuple[Variant, ...]:
    """The variants that suit what the family's labels are."""
    return _VARIANTS[family.task]


def class_weight(label: Tensor) -> Tensor:
    """0.5, 1.0, 1.5 or 2.0: unequal, and known from the label alone."""
    return 0.5 * (1 + label % 4)


def _weights(logits: Tensor, classes: int) -> Tensor:
    return class_weight(torch.arange(classes, device=logits.device)).to(logits.dtype)


# Classes: logits [B, C], labels [B].


def _class_mean(logits: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(logits, labels_of(batch))


def _class_module(logits: Tensor, batch: Any) -> Tensor:
    criterion = nn.CrossEntropyLoss()
    return criterion(logits, labels_of(batch))


def _class_sum(logits: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(logits, labels_of(batch), reduction="sum")


def _class_weighted(logits: Tensor, batch: Any) -> Tensor:
    criterion = nn.CrossEntropyLoss(weight=_weights(logits, logits.shape[1]))
    return criterion(logits, labels_of(batch))


def _class_nll(logits: Tensor, batch: Any) -> Tensor:
    return F.nll_loss(F.log_softmax(logits, dim=1), labels_of(batch))


def _class_nll_weighted(logits: Tensor, batch: Any) -> Tensor:
    return nn.NLLLoss(weight=_weights(logits, logits.shape[1]))(logits.log_softmax(1), labels_of(batch))


def _class_smoothed(logits: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(logits, labels_of(batch), label_smoothing=0.1)


def _class_smoothed_weighted(logits: Tensor, batch: Any) -> Tensor:
    weight = _weights(logits, logits.shape[1])
    return F.cross_entropy(logits, labels_of(batch), weight, label_smoothing=0.1)


def _class_ignored(logits: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(logits, labels_of(batch), ignore_index=0)


def _class_probabilities(logits: Tensor, batch: Any) -> Tensor:
    soft = F.one_hot(labels_of(batch), logits.shape[1]).to(logits.dtype) * 0.9 + 0.1 / logits.shape[1]
    return F.cross_entropy(logits, soft)


def _class_unreduced(logits: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(logits, labels_of(batch), reduction="none").mean()


def _class_total(batch: Any) -> float:
    return float(class_weight(labels_of(batch)).sum())


def _unignored(batch: Any) -> float:
    return float((labels_of(batch) != 0).sum())


# Tokens: logits [B, T, V], labels [B, T] with IGNORED among them.


def _token_mean(logits: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(logits.view(-1, logits.size(-1)), labels_of(batch).view(-1), ignore_index=IGNORED)


def _token_module(logits: Tensor, batch: Any) -> Tensor:
    criterion = nn.CrossEntropyLoss(ignore_index=IGNORED)
    return criterion(logits.transpose(1, 2), labels_of(batch))


def _token_sum(logits: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels_of(batch).flatten(), reduction="sum")


def _token_weighted(logits: Tensor, batch: Any) -> Tensor:
    V = logits.size(-1)
    return F.cross_entropy(logits.view(-1, V), labels_of(batch).view(-1), weight=_weights(logits, V))


def _token_nll(logits: Tensor, batch: Any) -> Tensor:
    log_probabilities = F.log_softmax(logits, dim=-1)
    return F.nll_loss(log_probabilities.view(-1, logits.size(-1)), labels_of(batch).view(-1))


def _token_masked(logits: Tensor, batch: Any) -> Tensor:
    labels = labels_of(batch)
    losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    mask = (labels != IGNORED).to(losses.dtype)
    return (losses * mask).sum() / mask.sum()


def _token_total(batch: Any) -> float:
    labels = labels_of(batch)
    return float(class_weight(labels[labels != IGNORED]).sum())


# Next tokens: as tokens, but position t predicts label t + 1.


def _shift(logits: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    return logits[..., :-1, :].contiguous(), labels_of(batch)[..., 1:].contiguous()


def _next_mean(logits: Tensor, batch: Any) -> Tensor:
    shifted, labels = _shift(logits, batch)
    return F.cross_entropy(shifted.view(-1, shifted.size(-1)), labels.view(-1))


def _next_sum(logits: Tensor, batch: Any) -> Tensor:
    shifted, labels = _shift(logits, batch)
    return nn.CrossEntropyLoss(reduction="sum")(shifted.view(-1, shifted.size(-1)), labels.view(-1))


def _next_weighted(logits: Tensor, batch: Any) -> Tensor:
    shifted, labels = _shift(logits, batch)
    V = shifted.size(-1)
    return F.cross_entropy(shifted.view(-1, V), labels.view(-1), weight=_weights(logits, V))


def _next_total(batch: Any) -> float:
    return float(class_weight(labels_of(batch)[:, 1:]).sum())


# Pixels: logits [B, C, H, W], labels [B, H, W] with VOID among them.


def _pixel_mean(logits: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(logits, labels_of(batch), ignore_index=VOID)


def _pixel_sum(logits: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(logits, labels_of(batch), ignore_index=VOID, reduction="sum")


def _pixel_weighted(logits: Tensor, batch: Any) -> Tensor:
    criterion = nn.CrossEntropyLoss(weight=_weights(logits, logits.shape[1]), ignore_index=VOID)
    return criterion(logits, labels_of(batch))


def _pixel_flat(logits: Tensor, batch: Any) -> Tensor:
    flat = logits.permute(0, 2, 3, 1).reshape(-1, logits.shape[1])
    return F.cross_entropy(flat, labels_of(batch).reshape(-1), ignore_index=VOID)


def _pixel_nll(logits: Tensor, batch: Any) -> Tensor:
    return F.nll_loss(F.log_softmax(logits, dim=1), labels_of(batch), ignore_index=VOID)


def _pixel_total(batch: Any) -> float:
    labels = labels_of(batch)
    return float(class_weight(labels[labels != VOID]).sum())


# Numbers: outputs and targets of one shape.


def _mse(outputs: Tensor, batch: Any) -> Tensor:
    return F.mse_loss(outputs, labels_of(batch))


def _mse_module(outputs: Tensor, batch: Any) -> Tensor:
    criterion = nn.MSELoss()
    return criterion(outputs, labels_of(batch))


def _mse_sum(outputs: Tensor, batch: Any) -> Tensor:
    return F.mse_loss(outputs, labels_of(batch), reduction="sum")


def _mse_per_sample(outputs: Tensor, batch: Any) -> Tensor:
    return F.mse_loss(outputs, labels_of(batch), reduction="sum") / outputs.size(0)


def _mse_by_hand(outputs: Tensor, batch: Any) -> Tensor:
    return ((outputs - labels_of(batch)) ** 2).mean()


def _l1(outputs: Tensor, batch: Any) -> Tensor:
    return nn.L1Loss()(outputs, labels_of(batch))


def _smooth_l1(outputs: Tensor, batch: Any) -> Tensor:
    return F.smooth_l1_loss(outputs, labels_of(batch), beta=0.1)


# Bits: logits and targets in [0, 1] of one shape; the target is the input.


def _bce(logits: Tensor, batch: Any) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, batch[0])


def _bce_module(logits: Tensor, batch: Any) -> Tensor:
    criterion = nn.BCEWithLogitsLoss(pos_weight=torch.tensor(3.0, dtype=logits.dtype, device=logits.device))
    return criterion(logits, batch[0])


def _bce_sum(logits: Tensor, batch: Any) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, batch[0], reduction="sum")


def _bce_sigmoid(logits: Tensor, batch: Any) -> Tensor:
    return F.binary_cross_entropy(torch.sigmoid(logits), batch[0])


_VARIANTS: dict[str, tuple[Variant, ...]] = {
    "classes": (
        Variant("class_mean", _class_mean, targets.samples),
        Variant("class_module", _class_module, targets.samples),
        Variant("class_sum", _class_sum),
        Variant("class_weighted", _class_weighted, _class_total),
        Variant("class_nll", _class_nll, targets.samples),
        Variant("class_nll_weighted", _class_nll_weighted, _class_total),
        Variant("class_smoothed", _class_smoothed, targets.samples),
        Variant("class_smoothed_weighted", _class_smoothed_weighted, _class_total),
        Variant("class_ignored", _class_ignored, _unignored),
        Variant("class_probabilities", _class_probabilities, targets.samples),
        Variant("class_unreduced", _class_unreduced, targets.samples),
    ),
    "tokens": (
        Variant("token_mean", _token_mean, targets.tokens),
        Variant("token_module", _token_module, targets.tokens),
        Variant("token_sum", _token_sum),
        Variant("token_weighted", _token_weighted, _token_total),
        Variant("token_nll", _token_nll, targets.tokens),
        Variant("token_masked", _token_masked, targets.tokens),
    ),
    "next_tokens": (
        Variant("next_mean", _next_mean, targets.next_tokens),
        Variant("next_sum", _next_sum),
        Variant("next_weighted", _next_weighted, _next_total),
    ),
    "pixels": (
        Variant("pixel_mean", _pixel_mean, targets.pixels),
        Variant("pixel_sum", _pixel_sum),
        Variant("pixel_weighted", _pixel_weighted, _pixel_total),
        Variant("pixel_flat", _pixel_flat, targets.pixels),
        Variant("pixel_nll", _pixel_nll, targets.pixels),
    ),
    "numbers": (
        Variant("mse", _mse, targets.samples),
        Variant("mse_module", _mse_module, targets.samples),
        Variant("mse_sum", _mse_sum),
        Variant("mse_per_sample", _mse_per_sample, targets.samples),
        Variant("mse_by_hand", _mse_by_hand, targets.samples),
        Variant("l1", _l1, targets.samples),
        Variant("smooth_l1", _smooth_l1, targets.samples),
    ),
    "bits": (
        Variant("bce", _bce, targets.samples),
        Variant("bce_module", _bce_module, targets.samples),
        Variant("bce_sum", _bce_sum),
        Variant("bce_sigmoid", _bce_sigmoid, targets.samples),
    ),
}
