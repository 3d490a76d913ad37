"""Step mode on losses and batches that were found to give other gradients than the whole batch, or to fail raw."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import mlp, points
from stepping import LossFn, plain, sgd, stepper
from torch import Tensor, nn
from zoo.plain import relative_error

import memfit
from memfit.training.verify import unequal

EXACT = 1e-12


class Line(nn.Module):
    """Four inputs to one number, and a parameter that losses add by themselves."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.line = nn.Linear(4, 1).double()
        self.shift = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x).squeeze(-1)


def numbers(samples: int = 12, seed: int = 0) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 4, generator=made).double(), torch.randn(samples, generator=made).double()


def errors_of_steps(model: nn.Module, loss_fn: LossFn, batches: list[Any], cut: int | None = 4) -> list[float]:
    """Relative gradient error of one step on each batch against the plain whole one; the model does not move."""
    run, seen = stepper(model, loss_fn, cut, optimizer=sgd(model, 0.0))
    found = []
    for batch in batches:
        whole = plain(copy.deepcopy(model), loss_fn, copy.deepcopy(batch))[1]
        run.step(batch)
        found.append(relative_error(seen.gradients[-1], whole))
    return found


@pytest.mark.parametrize("samples", [12, 16])
def test_a_parameter_added_to_the_loss_gets_the_whole_gradient(samples: int) -> None:
    def loss_fn(model: Any, batch: Any) -> Tensor:
        return (model(batch[0]) - batch[1]).square().mean() + model.shift

    assert max(errors_of_steps(Line(), loss_fn, [numbers(samples)])) <= EXACT


def test_a_hook_that_writes_the_losss_gradient_in_place_touches_one_micro_batch() -> None:
    def loss_fn(model: Any, batch: Any) -> Tensor:
        loss = (model(batch[0]) - batch[1]).square().mean()
        if loss.requires_grad:
            loss.register_hook(lambda gradient: gradient.mul_(2))
        return loss

    # The whole batch's gradient is twice as large by the same hook.
    assert max(errors_of_steps(Line(), loss_fn, [numbers(16)])) <= EXACT


def weighted(model: Any, batch: Any) -> Tensor:
    x, y, weight = batch
    return (weight * (model(x) - y).square()).sum() / weight.sum()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize(
    "later", [[0, 1, 0, 1, 0, 2, 2, 1, 1, 1, 1, 2], [0] * 6 + [2] * 6, [0, 1] * 6, [1, 1, 1, 0] * 3, [0] * 5 + [1] * 7]
)
def test_weights_that_were_all_one_at_first_count_when_they_differ(later: list[int], dtype: torch.dtype) -> None:
    batches = [(*numbers(seed=seed), torch.ones(12, dtype=dtype)) for seed in range(3)]
    batches.append((*numbers(seed=3), torch.tensor(later).to(dtype)))
    assert max(errors_of_steps(Line(), weighted, batches)) <= EXACT


def test_targets_that_happened_to_be_ones_may_become_any_numbers() -> None:
    def loss_fn(model: Any, batch: Any) -> Tensor:
        return (model(batch[0]) - batch[1]).square().sum() / len(batch[1])

    batches: list[Any] = [(numbers(seed=seed)[0], torch.ones(12).double()) for seed in range(3)]
    assert max(errors_of_steps(Line(), loss_fn, [*batches, numbers(seed=3), numbers(seed=4)])) <= EXACT


@pytest.mark.parametrize("cut", [4, None])
def test_a_loss_that_writes_into_its_batch_works_on_copies(cut: int | None) -> None:
    def loss_fn(model: Any, batch: Any) -> Tensor:
        x, y = batch
        x.div_(255)
        return (model(x) - y).square().mean()

    batches = [(255 * x, y) for x, y in (numbers(seed=0), numbers(seed=1))]
    whole = [(x.clone(), y) for x, y in batches]
    assert max(errors_of_steps(Line(), loss_fn, batches, cut)) <= EXACT
    assert all(torch.equal(x, as_given) for (x, _), (as_given, _) in zip(batches, whole))


def test_sparse_gradients_are_proven_too() -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table = nn.Embedding(20, 4, sparse=True).double()

        def forward(self, index: Tensor) -> Tensor:
            return self.table(index).sum((1, 2))

    def loss_fn(model: Any, batch: Any) -> Tensor:
        return (model(batch[0]) - batch[1]).square().mean()

    model, batch = Bag(), (torch.randint(0, 20, (12, 3)), numbers()[1])
    whole = plain(copy.deepcopy(model), loss_fn, batch)[1]
    run = memfit.wrap(model, sgd(model, 0.0), loss_fn=loss_fn, sample=batch, micro_batch=4)
    run.step(batch)
    own = {name: None if p.grad is None else p.grad.to_dense() for name, p in model.named_parameters()}
    assert relative_error(own, {name: None if g is None else g.to_dense() for name, g in whole.items()}) <= EXACT
    # torch by itself appends the rows of each micro-batch to those before
    rows = model.table.weight.grad
    assert rows is not None and rows.is_sparse and rows._nnz() == len(batch[0].unique())


def test_a_weight_of_zero_for_the_samples_that_are_timed() -> None:
    def loss_fn(model: Any, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y, ignore_index=-100, reduction="sum") / (y != -100).sum().clamp(min=1)

    model, (x, y) = mlp(), points()
    y = y.clone()
    y[:6] = -100
    whole = plain(copy.deepcopy(model), loss_fn, (x, y))[1]
    run = memfit.wrap(
        model, sgd(model, 0.0), loss_fn=loss_fn, sample=(x, y), budget="1GiB", weight=lambda b: int((b[1] != -100).sum())
    )
    run.step((x, y))
    own = {name: p.grad for name, p in model.named_parameters()}
    assert relative_error(own, whole) <= EXACT


@pytest.mark.parametrize(
    "answer", [lambda parts: None, lambda parts: iter(parts), lambda parts: parts[:0]], ids=("none", "an iterator", "too few")
)
def test_a_split_that_returns_something_else_is_an_error_in_three_parts(answer: Any) -> None:
    def split(batch: Any, sizes: list[int]) -> Any:
        return answer(list(zip(batch[0].split(sizes), batch[1].split(sizes))))

    def loss_fn(model: Any, batch: Any) -> Tensor:
        return (model(batch[0]) - batch[1]).square().mean()

    run, _ = stepper(Line(), loss_fn, 4, split=split)
    with pytest.raises(memfit.MemfitError, match="split="):
        run.step(numbers())


@pytest.mark.parametrize("empty", [3, 6, 11])
def test_samples_without_any_elements(empty: int) -> None:
    class Ragged(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, i: int) -> Tensor:
            return torch.full((0 if i < empty else 3 + i, 4), 0.1 * i, dtype=torch.float64)

    def collate(samples: list[Tensor]) -> Tensor:
        return nn.utils.rnn.pad_sequence(samples, batch_first=True)

    def loss_fn(model: Any, batch: Any) -> Tensor:
        return model(batch.sum(1)).square().mean()

    model = Line()
    loader = torch.utils.data.DataLoader(Ragged(), batch_size=12, collate_fn=collate)
    whole = plain(copy.deepcopy(model), loss_fn, next(iter(loader)))[1]
    run = memfit.wrap(model, sgd(model, 0.0), loader, loss_fn=loss_fn, budget="1GiB", micro_batch="auto")
    run.step(next(iter(run.loader)))
    own = {name: p.grad for name, p in model.named_parameters()}
    assert run.plan is not None and run.plan.by_size
    assert relative_error(own, whole) <= EXACT


def test_autocast_inside_the_loss_is_no_reason_for_two_passes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 7))

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(model(batch[0]), batch[1])

    x, y = torch.randn(12, 6), torch.randint(0, 7, (12,))
    run, _ = stepper(model, loss_fn, 4)
    run.step((x, y))
    messages = [event.message for event in run.events]
    assert not any("two passes" in message for message in messages)
    assert not any("half precision" in message for message in messages)  # (proven without autocast)


def labelled(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    y = y.clone()
    y[1], y[4:9] = -100, -100
    return x, y


@pytest.mark.parametrize("by", ["known", "hand"])
def test_gradients_into_the_batch_are_those_of_the_whole(by: str) -> None:
    def loss_fn(model: Any, batch: Any) -> Tensor:
        scores = model(batch[0])
        if by == "known":
            return F.cross_entropy(scores, batch[1])
        each = F.cross_entropy(scores, batch[1], reduction="none")
        return each.sum() / (batch[1] != -100).sum()

    model, (x, y) = mlp(), labelled(*points())
    alone = x.clone().requires_grad_()
    loss_fn(copy.deepcopy(model), (alone, y)).backward()
    run, _ = stepper(model, loss_fn, 4, optimizer=sgd(model, 0.0))
    for _ in range(2):
        cut = x.clone().requires_grad_()
        run.step((cut, y))
        assert alone.grad is not None and cut.grad is not None
        assert float((cut.grad - alone.grad).norm() / alone.grad.norm()) <= EXACT


def test_parameters_that_only_the_loss_knows_get_the_whole_gradient() -> None:
    encoder, model, (x, y) = mlp(outputs=7), mlp(), labelled(*points())

    def loss_fn(model: Any, batch: Any) -> Tensor:
        return F.cross_entropy(model(encoder(batch[0])), batch[1])

    loss_fn(model, (x, y)).backward()
    whole = {name: p.grad.clone() for name, p in encoder.named_parameters() if p.grad is not None}
    encoder.zero_grad(), model.zero_grad()
    run, _ = stepper(model, loss_fn, 4, optimizer=sgd(model, 0.0))
    run.step((x, y))
    assert relative_error({name: p.grad for name, p in encoder.named_parameters()}, whole) <= EXACT


def test_a_list_of_numbers_with_one_for_each_sample_is_cut_like_a_tensor() -> None:
    def loss_fn(model: Any, batch: Any) -> Tensor:
        x, lengths = batch
        return torch.stack([n * row for n, row in zip(lengths, model(x), strict=True)]).square().mean()

    alike, unlike = (numbers()[0], [3] * 12), (numbers(seed=1)[0], list(range(12)))
    assert max(errors_of_steps(Line(), loss_fn, [alike, alike, unlike])) <= EXACT


def test_a_tuple_of_numbers_and_a_list_of_another_length_go_whole() -> None:
    def loss_fn(model: Any, batch: Any) -> Tensor:
        assert len(batch["size"]) == 12 and len(batch["scales"]) == 2
        return (sum(batch["size"]) * batch["scales"][1] * model(batch["x"])).square().mean()

    batch = {"x": numbers()[0], "size": tuple(range(12)), "scales": [0.5, 0.25]}
    assert max(errors_of_steps(Line(), loss_fn, [batch])) <= EXACT


@pytest.mark.parametrize("least", [1, 2])
@pytest.mark.parametrize("samples", range(20, 65))
def test_verifying_compares_sizes_that_differ_and_one_that_repeats(samples: int, least: int) -> None:
    pieces = unequal(samples, least)
    assert sum(pieces) == samples and min(pieces) >= least
    assert len(pieces) == 4 and len(set(pieces)) == 3 and pieces[0] == pieces[-1]


def by_samples(model: Any, batch: Any) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda x: x.to_sparse(), "sparse or nested"),
        (lambda x: x.to_sparse_csr(), "sparse or nested"),
        (lambda x: torch.nested.nested_tensor([x[:3], x[3:]]), "sparse or nested"),
        (lambda x: x[:0], "it is empty"),
        (lambda x: x.clone().requires_grad_() * 2, "graph of its own"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*prototype.*", "ignore:Sparse CSR")
def test_batches_that_cannot_be_cut_are_refused_in_three_parts(make: Any, found: str) -> None:
    x, y = numbers()
    run, _ = stepper(Line(), by_samples, 4)
    with pytest.raises(memfit.MemfitError, match=found):
        run.step((make(x), y[: len(x[:0])] if found == "it is empty" else y))
    run.step((x, y))


def test_a_complex_loss_is_refused() -> None:
    run, _ = stepper(Line(), lambda model, batch: model(batch[0]).mean() * 1j, 4)
    with pytest.raises(memfit.UsageError, match="complex"):
        run.step(numbers())


def test_names_and_counts_that_nothing_has_are_errors_in_three_parts(tmp_path: Any) -> None:
    model, deep = Line(), tmp_path / "deep.json"
    deep.write_text("[" * 100_000 + "]" * 100_000)
    for plan in ("\0", str(deep)):
        with pytest.raises(memfit.PlanFileError):
            memfit.wrap(model, sgd(model), loss_fn=by_samples, plan=plan)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*numbers()), batch_size=4)
    with pytest.raises(memfit.UsageError, match="target_batch"):
        memfit.wrap(model, sgd(model), loader, loss_fn=by_samples, target_batch=10**30)
    run, _ = stepper(model, by_samples, 4)
    run.step(numbers())
    for path in (3, "a\0.html"):
        with pytest.raises(memfit.UsageError, match="saving a report"):
            run.report().save(path)  # pyright: ignore[reportArgumentType]
