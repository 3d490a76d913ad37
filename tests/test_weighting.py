"""How micro-batches are weighted in step mode: every loss gives the gradient of the whole batch, however it divides."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import Forwards, Notes, mlp, points, wrapped
from stepping import LossFn, error_of_step, plain, stepper
from torch import Tensor, nn
from torch.utils.data import default_collate
from zoo import FAMILIES, first_batch
from zoo.data import IGNORED
from zoo.losses import variants_for
from zoo.plain import gradients_of, relative_error

import memfit
from memfit import Refused
from memfit.autotune.tuner import Tuner
from memfit.batches.samples import SampleBatch

EXACT = 1e-12
CLASS_WEIGHTS = torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=torch.float64)


def by_hand_mean(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return -model(x).log_softmax(1).gather(1, y[:, None]).mean()


def by_hand_sum(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return -model(x).log_softmax(1).gather(1, y[:, None]).sum()


def divided_by_length(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="sum") / len(x)


def class_weighted(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y, weight=CLASS_WEIGHTS)


def class_weighted_by_hand(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    weights = CLASS_WEIGHTS[y]
    return (F.cross_entropy(model(x), y, reduction="none") * weights).sum() / weights.sum()


def valid_by_hand(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    each = F.cross_entropy(model(x), y, reduction="none")
    return each.sum() / (y != IGNORED).sum()


def with_penalty(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y) + 0.01 * sum((p.square().sum() for p in model.parameters()), torch.zeros(()))


def two_means(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    out = model(x)
    return F.cross_entropy(out, y) + 0.5 * F.mse_loss(out, x[:, :4])


def info_nce(model: nn.Module, batch: Any) -> Tensor:
    x, _ = batch
    a, b = F.normalize(model(x), dim=1), F.normalize(model(x.flip(1)), dim=1)
    return F.cross_entropy(a @ b.T / 0.1, torch.arange(len(x)))


def spread_of_losses(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    each = F.cross_entropy(model(x), y, reduction="none")
    return each.mean() + each.std(correction=0)


def with_ignored(n: int = 12, ignored: tuple[int, ...] = (1, 2, 3, 7)) -> tuple[Tensor, Tensor]:
    """Labelled points of which some are not to be counted."""
    x, y = points(n)
    y[list(ignored)] = IGNORED
    return x, y


LOSSES: dict[str, tuple[LossFn, Any]] = {
    "mean by hand": (by_hand_mean, points()),
    "sum by hand": (by_hand_sum, points()),
    "sum over length": (divided_by_length, points()),
    "class weighted": (class_weighted, points()),
    "class weighted by hand": (class_weighted_by_hand, points()),
    "valid labels by hand": (valid_by_hand, with_ignored()),
    "valid labels beside a penalty": (with_penalty, with_ignored()),
    "two means over different counts": (two_means, with_ignored()),
    "InfoNCE": (info_nce, points()),
    "standard deviation": (spread_of_losses, points()),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("micro_batch", [1, 5])
def test_any_loss_gives_the_whole_batchs_gradient(name: str, micro_batch: int) -> None:
    loss_fn, batch = LOSSES[name]
    assert error_of_step(mlp(), loss_fn, batch, micro_batch) <= EXACT


@pytest.mark.parametrize("name", ["class weighted by hand", "InfoNCE", "standard deviation"])
def test_a_loss_that_needs_all_samples_runs_in_two_passes_and_says_so(name: str) -> None:
    loss_fn, batch = LOSSES[name]
    run, _ = stepper(mlp(), loss_fn)
    run.step(batch)
    assert any("needs all samples together" in event.message for event in run.events)


def test_no_loss_that_divides_by_a_count_is_taken_for_one_that_needs_all_samples() -> None:
    for name in ("mean by hand", "sum by hand", "sum over length", "class weighted", "valid labels by hand"):
        loss_fn, batch = LOSSES[name]
        run, _ = stepper(mlp(), loss_fn)
        run.step(batch)
        assert not any("together" in event.message for event in run.events), name


@pytest.mark.parametrize("family", [f for f in FAMILIES.values() if not f.mixes], ids=lambda f: f.name)
def test_every_family_by_its_own_loss(family: Any) -> None:
    for package in family.requires:
        pytest.importorskip(package)
    model = family.build(dtype=torch.float64)
    batch = first_batch(family, 7, dtype=torch.float64)
    # T5 normalises in float32 whatever the dtype of its parameters.
    assert error_of_step(model, family.loss, batch, 3, share=7) <= (1e-6 if family.name == "t5" else EXACT)


VARIANTS = [(f, v) for name in ("mlp", "superres", "autoencoder") for f in [FAMILIES[name]] for v in variants_for(f)]


@pytest.mark.parametrize(("family", "variant"), VARIANTS, ids=lambda value: value.name)
def test_every_spelling_of_a_loss(family: Any, variant: Any) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return variant.loss(family.logits(model, batch), batch)

    model = family.build(dtype=torch.float64)
    batch = first_batch(family, 7, dtype=torch.float64)
    assert error_of_step(model, loss_fn, batch, 3, share=7) <= EXACT


# ---- weight= by hand


def test_a_weight_by_hand_is_what_a_part_counts_for() -> None:
    def weight(part: Any) -> float:
        return float(CLASS_WEIGHTS[part[1]].sum())

    run, seen = stepper(mlp(), class_weighted_by_hand, weight=weight)
    run.step(points())
    assert relative_error(seen.gradients[0], plain(mlp(), class_weighted_by_hand, points())[1]) <= EXACT
    assert not any("together" in event.message for event in run.events)


def test_a_weight_by_hand_may_be_a_tensor() -> None:
    error = error_of_step(mlp(), class_weighted_by_hand, points(), weight=lambda part: CLASS_WEIGHTS[part[1]].sum())
    assert error <= EXACT


def test_a_part_of_weight_zero_is_not_run() -> None:
    ran = Notes()

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        ran.append(int((batch[1] != IGNORED).sum()))
        return valid_by_hand(model, batch)

    batch = with_ignored(12, (0, 1, 2, 3, 7))
    run, seen = stepper(mlp(), loss_fn, 4, weight=lambda part: int((part[1] != IGNORED).sum()))
    run.step(batch)
    ran.clear()
    run.step(batch)
    assert ran == [3, 4]
    assert relative_error(seen.gradients[0], plain(mlp(), valid_by_hand, batch)[1]) <= EXACT


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), "3", None, True, torch.ones(2)])
def test_a_weight_that_is_none_is_refused(value: Any) -> None:
    run, _ = stepper(mlp(), by_hand_mean, weight=lambda part: value)
    with pytest.raises(ValueError, match="weighting micro-batches by weight="):
        run.step(points())


# ---- micro-batches in which nothing counts


@pytest.mark.parametrize(
    "loss_fn", [valid_by_hand, lambda m, b: F.cross_entropy(m(b[0]), b[1]), with_penalty], ids=["hand", "known", "penalty"]
)
def test_a_micro_batch_without_valid_labels_adds_nothing(loss_fn: LossFn) -> None:
    batch = with_ignored(12, (0, 5, 8, 9, 10, 11))
    assert error_of_step(mlp(), loss_fn, batch, 4) <= EXACT


# ---- a weighting that does not hold later


def test_a_weighting_proven_without_ignored_labels_holds_when_they_come() -> None:
    model = mlp()
    run, seen = stepper(model, valid_by_hand)
    run.step(points())
    before = copy.deepcopy(model)
    run.step(with_ignored())
    assert relative_error(seen.gradients[1], plain(before, valid_by_hand, with_ignored())[1]) <= EXACT


def masked_mean(model: nn.Module, batch: Any) -> Tensor:
    each = F.mse_loss(model(batch["x"]), batch["y"], reduction="none").mean(1)
    return (each * batch["mask"]).sum() / batch["mask"].sum()


def masked_batch(mask: list[int], labels: list[int]) -> dict[str, Tensor]:
    x, _ = points(12)
    return {"labels": torch.tensor(labels), "x": x, "y": x[:, :4].sin(), "mask": torch.tensor(mask).bool()}


def test_two_counts_that_could_not_be_told_apart_are_told_apart_when_they_differ() -> None:
    mask = [1, 0, 1, 1, 1, 1, 0, 1, 1, 0, 0, 1]
    alike = masked_batch(mask, [3 if m else IGNORED for m in mask])
    unlike = masked_batch(mask, [IGNORED, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, IGNORED])
    model = mlp()
    run, seen = stepper(model, masked_mean)
    run.step(alike)
    before = copy.deepcopy(model)
    run.step(unlike)
    assert relative_error(seen.gradients[1], plain(before, masked_mean, unlike)[1]) <= EXACT


def changing(model: nn.Module, batch: Any) -> Tensor:
    """A known mean, until a batch holds a negative number: then a sum."""
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="sum" if bool((x[:, 0] > 100).any()) else "mean")


def test_a_loss_that_changes_its_form_is_weighted_anew() -> None:
    model = mlp()
    run, seen = stepper(model, changing)
    run.step(points())
    x, y = points()
    x[:, 0] = 101.0
    before = copy.deepcopy(model)
    run.step((x, y))
    assert relative_error(seen.gradients[1], plain(before, changing, (x, y))[1]) <= EXACT


class Lengths(nn.Module):
    """A mean over all positions, padding included: what a part divides by depends on its own longest sample."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp(inputs=1, outputs=1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner(x[..., None]).squeeze(-1) * (x != 0)).square().mean()


def pad(samples: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(samples, batch_first=True)


def lengths(*sizes: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.rand(size, dtype=torch.float64, generator=generator) + 0.5 for size in sizes]


def test_a_weighting_proven_on_samples_of_one_length_is_proven_again_on_ragged_ones() -> None:
    from memfit.batches.samples import SampleBatch

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch)

    model = Lengths()
    run, seen = stepper(model, loss_fn, 4)
    run.step(SampleBatch(lengths(*[5] * 12), pad))
    before = copy.deepcopy(model)
    ragged = lengths(5, 3, 2, 4, 1, 5, 2, 2, 3, 1, 4, 2)
    run.step(SampleBatch(ragged, pad))
    assert relative_error(seen.gradients[1], plain(before, loss_fn, pad(ragged))[1]) <= EXACT


class Masked(nn.Module):
    """A model that returns its own masked mean."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, labels: Tensor, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        each = F.mse_loss(self.inner(x), y, reduction="none").mean(1)
        return (each * mask).sum() / mask.sum()


def test_script_mode_tells_counts_apart_that_were_alike_at_first() -> None:
    mask = [1, 0, 1, 1, 1, 1, 0, 1, 1, 0, 0, 1]
    alike = masked_batch(mask, [3 if m else IGNORED for m in mask])
    unlike = masked_batch(mask, [3, 3, IGNORED, IGNORED, 3, 3, 3, 3, 3, 3, 3, 3])
    model = Masked()
    want = plain(model, lambda m, b: m(**b), unlike)[1]
    run = wrapped(model, 5)
    for batch in (alike, unlike, unlike):
        model.zero_grad()
        model(**batch).backward()
    assert relative_error(gradients_of(model), want) <= EXACT
    run.undo()


# ---- first samples on which every weighting looks right

ALIKE_AT_FIRST = torch.tensor([1, 1, 1, 1, 1, 3, 3, 3, 3, 2, 1, 0])


def foreground_mean(model: nn.Module, batch: Any) -> Tensor:
    """Over what is no background; without any it is zero."""
    x, y = batch
    each = F.cross_entropy(model(x), y, reduction="none")
    return (each * (y > 0)).sum() / (y > 0).sum().clamp(min=1)


@pytest.mark.parametrize("loss_fn", [class_weighted_by_hand, foreground_mean])
def test_step_mode_looks_at_samples_that_differ_before_the_first_step(loss_fn: LossFn) -> None:
    x, _ = points()
    for labels in (ALIKE_AT_FIRST, ALIKE_AT_FIRST.flip(0), torch.tensor([1] * 8 + [0] * 4)):
        assert error_of_step(mlp(), loss_fn, (x, labels), 4) <= EXACT


class OwnLoss(nn.Module):
    def __init__(self, loss_fn: LossFn) -> None:
        super().__init__()
        self.inner, self.loss_fn = mlp(), loss_fn

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss_fn(self.inner, (x, y))


@pytest.mark.parametrize("loss_fn", [class_weighted_by_hand, foreground_mean])
def test_script_mode_refuses_before_the_first_step(loss_fn: LossFn) -> None:
    model, (x, _) = OwnLoss(loss_fn), points()
    wrapped(model, 4)
    with pytest.raises(Refused, match="the loss mixes samples"):
        model(x, ALIKE_AT_FIRST).backward()
    assert all(p.grad is None for p in model.parameters())


def test_an_inferred_weighting_is_proven_again_on_later_batches() -> None:
    """All samples of the first batches are alike in what the loss divides by."""
    model, (x, y) = mlp(), points()
    run, seen = stepper(model, foreground_mean, 4)
    run.step((x, y.clamp(min=1)))
    before = copy.deepcopy(model)
    run.step((x, y % 2))
    assert relative_error(seen.gradients[1], plain(before, foreground_mean, (x, y % 2))[1]) <= EXACT


# ---- parts in which a mask leaves nothing

EMPTY_PARTS = [
    [1, 1, 0, 1, 0, 0, 0, 0, 1, 0, 1, 1],
    [0, 0, 0, 0, 1, 0, 1, 1, 1, 1, 0, 1],
    [0] * 6 + [1] * 6,
    [0] * 11 + [1],
]


def masked(model: nn.Module, batch: Any) -> Tensor:
    x, y, mask = batch
    return (F.cross_entropy(model(x), y, reduction="none") * mask).sum() / mask.sum()


class MaskedLoss(OwnLoss):
    def forward(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return self.loss_fn(self.inner, (x, y, mask))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float64])
@pytest.mark.parametrize("mask", EMPTY_PARTS, ids=str)
def test_a_micro_batch_that_a_mask_leaves_nothing_of_adds_nothing(mask: list[int], dtype: torch.dtype) -> None:
    batch = (*points(), torch.tensor(mask).to(dtype))
    assert error_of_step(mlp(), masked, batch, 4) <= EXACT
    model = MaskedLoss(masked)
    want = plain(model, lambda m, b: m(*b), batch)[1]
    wrapped(model, 4)
    model(*batch).backward()
    assert relative_error(gradients_of(model), want) <= EXACT


def test_a_mask_that_later_holds_other_numbers_is_weighted_anew_or_refused() -> None:
    x, y = points()
    ones, other = torch.tensor(EMPTY_PARTS[0]).double(), torch.linspace(0.1, 2, 12, dtype=torch.float64)
    model = MaskedLoss(masked)
    wrapped(model, 4)
    model(x, y, ones).backward()
    with pytest.raises(Refused, match="the loss mixes samples"):
        model(x, y, other).backward()
    step, seen = stepper(mlp(), masked, 4)
    step.step((x, y, ones))
    before = copy.deepcopy(step.model)
    step.step((x, y, other))
    assert relative_error(seen.gradients[1], plain(before, masked, (x, y, other))[1]) <= EXACT


def test_a_mask_memfit_cannot_see_is_named_as_the_cause_where_it_leaves_nothing() -> None:
    def own(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        mask = (x[:, 0] > 5).to(x.dtype)
        return (F.cross_entropy(model(x), y, reduction="none") * mask).sum() / mask.sum()

    model, (x, y) = OwnLoss(own), points()
    x[2:4, 0] = 6.0
    wrapped(model, 4)
    with pytest.raises(Refused, match=r"0/0 where the mask leaves nothing[\s\S]*weight="):
        model(x, torch.zeros_like(y)).backward()


@pytest.mark.parametrize("gaps_from", [0, 2])
def test_terms_that_divide_by_counts_of_their_own_take_one_pass(gaps_from: int) -> None:
    """From the step after the one in which that is learnt."""
    model = mlp()
    seen = Forwards(model[0])
    run = memfit.wrap(model, torch.optim.SGD(model.parameters(), 0.0), loss_fn=two_means, micro_batch=5)
    generator = torch.Generator().manual_seed(1)
    passes = []
    for step in range(gaps_from + 4):
        x, y = points(12, seed=step)
        if step >= gaps_from:
            y[torch.rand(12, generator=generator) < 0.4] = IGNORED
        _, want = plain(model, two_means, (x, y))
        seen.sizes.clear()
        run.step((x, y))
        passes.append(sum(seen.sizes) // 12)
        assert relative_error(gradients_of(model), want) <= EXACT
    assert passes[gaps_from + 1 :] == [1, 1, 1] and max(passes) <= 3
    assert not any("may have trained" in event.message for event in run.events)


def test_corrections_of_one_cut_are_not_those_of_another_of_as_many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes are measured in turn: the batch that runs again with its corrections would come in other pieces."""

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        out = model(batch[0])
        return F.cross_entropy(out, batch[1]) + 0.1 * out.square().mean()

    x, labels = points()
    padded = torch.where(torch.arange(12) % 2 == 0, IGNORED, labels)
    padded[:5] = IGNORED
    sizes = itertools.cycle([4, 8, 8, 4])
    monkeypatch.setattr(Tuner, "next_choice", lambda tuner, **told: next(sizes))
    model = mlp()
    seen = Forwards(model[0])
    run = memfit.wrap(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn=loss_fn, sample=(x, labels))
    for batch in [(x, labels)] * 2 + [(x, padded)] * 2:
        _, want = plain(model, loss_fn, batch)
        before = copy.deepcopy(model)
        run.step(SampleBatch(list(zip(*batch)), default_collate))  # which is not there as a whole
        steps = {name: (p - q) / 0.1 for (name, p), q in zip(before.named_parameters(), model.parameters())}
        assert relative_error(steps, want) <= EXACT
    assert seen.sizes[-4:] == [8, 4, 8, 4]  # found to differ, and once more


SHARES = {
    "times a share": lambda value, share: value * (1 + share.double().mean()),
    "over a share": lambda value, share: value / (0.5 + share.double().mean()),
    "a share more": lambda value, share: value + share.double().mean() * value.exp(),
}


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("size", [8, 12, 40])
def test_a_share_that_is_alike_in_the_samples_of_a_proof_is_that_of_the_whole_batch(share: str, size: int) -> None:
    """The first samples, on which the loss is proven, all have the property; those after them do not."""
    x, targets = points(size)[0], points(size, seed=3)[0][:, :4]
    x[:6, 0], x[6:, 0] = 1.5, -1.5

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        given, wanted = batch
        return torch.nan_to_num(SHARES[share](F.mse_loss(model(given), wanted), given[:, 0] > 0))

    model = mlp()
    _, wanted = plain(model, loss_fn, (x, targets))
    run, seen = stepper(model, loss_fn, cut=3, share=size)
    run.step((x, targets))
    assert relative_error(seen.gradients[0], wanted) < EXACT
