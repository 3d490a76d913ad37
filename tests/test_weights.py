"""Known losses: parts weighted by what each divides by are the loss and the gradients of the whole.

Everything in float64, to 1e-12; parts without a single valid entry are among them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from memfit.batches.weights import entries_mean, entries_other_than, known_loss, valid_mean

PIECES = (3, 1, 2, 4)
N = sum(PIECES)
EMPTY = slice(3, 4)
"""The samples of the second part; where a loss can ignore labels, it ignores all of theirs."""

Case = tuple[Any, torch.Tensor, dict[str, Any]]


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def scores(*shape: int) -> torch.Tensor:
    return torch.randn(N, *shape, dtype=torch.float64, generator=seeded())


def numbers(*shape: int) -> torch.Tensor:
    return torch.rand(N, *shape, dtype=torch.float64, generator=seeded())


def classes(number: int, *shape: int, ignored: int = -100) -> torch.Tensor:
    found = torch.randint(number, (N, *shape), generator=seeded())
    found[torch.rand(N, *shape, generator=seeded()) < 0.3] = ignored
    found[EMPTY] = ignored
    return found


def probabilities(number: int, *shape: int) -> torch.Tensor:
    return scores(number, *shape).softmax(1)


def by_class(number: int) -> torch.Tensor:
    return torch.arange(1.0, number + 1, dtype=torch.float64) ** 2


CASES: dict[str, Case] = {
    "cross_entropy": (F.cross_entropy, scores(5), {"target": torch.randint(5, (N,), generator=seeded())}),
    "cross_entropy, labels ignored": (F.cross_entropy, scores(5), {"target": classes(5)}),
    "cross_entropy, another label ignored": (
        F.cross_entropy,
        scores(5),
        {"target": classes(5, ignored=2), "ignore_index": 2},
    ),
    "cross_entropy, label -1 ignored": (F.cross_entropy, scores(5), {"target": classes(5, ignored=-1), "ignore_index": -1}),
    "cross_entropy, class weights": (F.cross_entropy, scores(5), {"target": classes(5), "weight": by_class(5)}),
    "cross_entropy, a class without weight": (
        F.cross_entropy,
        scores(5),
        {"target": classes(5), "weight": torch.tensor([0.0, 1.0, 0.0, 2.0, 3.0], dtype=torch.float64)},
    ),
    "cross_entropy, smoothed": (F.cross_entropy, scores(5), {"target": classes(5), "label_smoothing": 0.2}),
    "cross_entropy, smoothed with class weights": (
        F.cross_entropy,
        scores(5),
        {"target": classes(5), "label_smoothing": 0.2, "weight": by_class(5)},
    ),
    "cross_entropy, probabilities": (F.cross_entropy, scores(5), {"target": probabilities(5)}),
    "cross_entropy, probabilities with class weights": (
        F.cross_entropy,
        scores(5),
        {"target": probabilities(5), "weight": by_class(5), "label_smoothing": 0.1},
    ),
    "cross_entropy, spatial": (F.cross_entropy, scores(4, 3, 2), {"target": classes(4, 3, 2)}),
    "cross_entropy, spatial with class weights": (
        F.cross_entropy,
        scores(4, 3, 2),
        {"target": classes(4, 3, 2), "weight": by_class(4), "label_smoothing": 0.3},
    ),
    "cross_entropy, spatial probabilities": (F.cross_entropy, scores(4, 3, 2), {"target": probabilities(4, 3, 2)}),
    "cross_entropy, spatial probabilities with class weights": (
        F.cross_entropy,
        scores(4, 3),
        {"target": probabilities(4, 3), "weight": by_class(4)},
    ),
    "nll_loss": (F.nll_loss, scores(5).log_softmax(1), {"target": classes(5)}),
    "nll_loss, class weights": (F.nll_loss, scores(5).log_softmax(1), {"target": classes(5), "weight": by_class(5)}),
    "nll_loss, spatial": (
        F.nll_loss,
        scores(4, 3, 2).log_softmax(1),
        {"target": classes(4, 3, 2, ignored=3), "ignore_index": 3, "weight": by_class(4)},
    ),
    "mse_loss": (F.mse_loss, scores(3, 2), {"target": numbers(3, 2)}),
    "mse_loss, weighted": (F.mse_loss, scores(3), {"target": numbers(3), "weight": numbers(3) + 0.1}),
    "mse_loss, weighted by 0 and 1": (F.mse_loss, scores(3), {"target": numbers(3), "weight": (numbers(3) > 0.5).double()}),
    "l1_loss": (F.l1_loss, scores(3, 2), {"target": numbers(3, 2)}),
    "l1_loss, weighted": (F.l1_loss, scores(3), {"target": numbers(3), "weight": numbers(3) + 0.1}),
    "binary_cross_entropy": (F.binary_cross_entropy, scores(3).sigmoid(), {"target": numbers(3)}),
    "binary_cross_entropy, weighted": (
        F.binary_cross_entropy,
        scores(3).sigmoid(),
        {"target": numbers(3), "weight": numbers(3)},
    ),
    "binary_cross_entropy, weighted by position": (
        F.binary_cross_entropy,
        scores(3).sigmoid(),
        {"target": numbers(3), "weight": by_class(3)},
    ),
    "with_logits": (F.binary_cross_entropy_with_logits, scores(3), {"target": numbers(3)}),
    "with_logits, pos_weight": (
        F.binary_cross_entropy_with_logits,
        scores(3),
        {"target": numbers(3), "pos_weight": by_class(3), "weight": numbers(3)},
    ),
}

WEIGHTED_ELEMENTS = (F.mse_loss, F.l1_loss)
if "weight" not in inspect.signature(F.mse_loss).parameters:  # newer than the oldest torch memfit runs on
    CASES = {name: case for name, case in CASES.items() if case[0] not in WEIGHTED_ELEMENTS or "weight" not in case[2]}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def parts(case: Case) -> list[tuple[torch.Tensor, dict[str, Any]]]:
    """Input and arguments of each part; what has one entry per sample is cut as the entry for this loss says."""
    function, value, arguments = case
    known = known_loss(function)
    assert known is not None
    cut: dict[str, tuple[Any, ...]] = {name: (argument,) * len(PIECES) for name, argument in arguments.items()}
    for name in known.cut_with_input:
        if isinstance(arguments.get(name), torch.Tensor) and len(arguments[name]) == N:
            cut[name] = arguments[name].split(PIECES)
    rows = [dict(zip(cut, row)) for row in zip(*cut.values())]
    return list(zip(value.split(PIECES), rows))


def bound(function: Any, value: torch.Tensor, arguments: dict[str, Any]) -> dict[str, Any]:
    known = known_loss(function)
    assert known is not None
    found = known.bind((value,), arguments)
    assert found is not None
    return found


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)


def weighted(case: Case, mean: Callable[..., tuple[Any, ...]]) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss of the whole from its parts, its gradient): means times weights, over the sum of all true counts."""
    function, value, _ = case
    gradients, total, counted = [], torch.zeros((), dtype=torch.float64), 0.0
    for piece, arguments in parts(case):
        leaf = piece.detach().requires_grad_()
        found, *weight, count = mean(function, bound(function, leaf, arguments))
        times = (*weight, count)[0]
        (found * times).backward()
        gradients.append(leaf.grad)
        total, counted = total + found.detach() * times, counted + count
    gradient = torch.cat([torch.zeros_like(value[:0]), *(g for g in gradients if g is not None)])
    return total / counted, gradient / counted


def whole(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    function, value, arguments = case
    leaf = value.detach().requires_grad_()
    loss = function(leaf, **arguments)
    loss.backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


@pytest.mark.parametrize("mean", [entries_mean, valid_mean])
def test_weighted_parts_are_the_whole(case: Case, mean: Callable[..., tuple[Any, ...]]) -> None:
    loss, gradient = weighted(case, mean)
    true_loss, true_gradient = whole(case)
    close(loss, true_loss)
    close(gradient, true_gradient)


def test_a_valid_mean_is_torchs_own(case: Case) -> None:
    function, value, arguments = case
    mean, count = valid_mean(function, bound(function, value, arguments))
    close(mean, function(value, **arguments))
    close(mean * count, function(value, **arguments, reduction="sum"))


def test_the_mean_over_all_entries_has_the_same_sum(case: Case) -> None:
    function, value, arguments = case
    mean, entries, count = entries_mean(function, bound(function, value, arguments))
    assert isinstance(entries, int) and entries > 0
    close(mean * entries / count, function(value, **arguments))


IGNORING = [name for name, (_, _, arguments) in CASES.items() if (arguments["target"][EMPTY] < 0).any()]


@pytest.mark.parametrize("name", IGNORING)
def test_a_part_without_valid_labels_is_zero_and_not_nan(name: str) -> None:
    function, value, arguments = CASES[name]
    piece = value[EMPTY].detach().requires_grad_()
    arguments = {**arguments, "target": arguments["target"][EMPTY]}
    assert function(piece, **arguments).isnan()
    found = bound(function, piece, arguments)
    for mean in (entries_mean(function, found)[0], valid_mean(function, found)[0]):
        gradient = torch.autograd.grad(mean, piece)[0]
        assert mean.item() == 0 and gradient.abs().sum().item() == 0


def test_labels_of_a_whole_without_valid_entries_count_nothing() -> None:
    found = bound(F.cross_entropy, torch.zeros(3, 5), {"target": torch.full((3,), -100)})
    assert valid_mean(F.cross_entropy, found) == (torch.tensor(0.0), torch.tensor(0))


@pytest.mark.parametrize("labels", [3, 300])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bfloat16])
def test_entries_are_counted_in_few_and_in_many_labels(labels: int, dtype: torch.dtype) -> None:
    found = torch.arange(labels).to(dtype)
    assert entries_other_than(found, -100) == labels
    found[1] = -100
    assert entries_other_than(found, -100) == labels - 1
    assert entries_other_than(found[None], -100) == labels - 1


def test_counting_reads_nothing_that_a_transform_wraps() -> None:
    labels = torch.tensor([[1, -100, 2], [-100, -100, 3]])
    assert torch.func.vmap(lambda row: entries_other_than(row, -100))(labels).tolist() == [2, 1]


def test_counts_stay_on_the_device() -> None:
    meta = torch.zeros(4, 5, device="meta")
    mean, entries, count = entries_mean(
        F.cross_entropy, bound(F.cross_entropy, meta, {"target": torch.zeros(4, dtype=torch.int64, device="meta")})
    )
    # On the meta device any read of a value would fail.
    assert isinstance(count, torch.Tensor) and count.is_meta and mean.is_meta and entries == 4


def test_broadcast_targets_count_as_the_result_does() -> None:
    value, target = scores(3), numbers(1)
    with pytest.warns(UserWarning, match="broadcasting"):
        mean, count = valid_mean(F.mse_loss, bound(F.mse_loss, value, {"target": target}))
        assert count == N * 3
        close(mean, F.mse_loss(value, target))


# ---- what is understood


@pytest.mark.parametrize(
    "arguments",
    [
        {"reduction": "none"},
        {"size_average": False},
        {"size_average": True},
        {"reduce": False},
        {"reduce": True, "reduction": "mean"},
    ],
)
@pytest.mark.parametrize("function", [F.cross_entropy, F.nll_loss, F.mse_loss, F.l1_loss, F.binary_cross_entropy])
def test_other_reductions_take_the_general_path(function: Any, arguments: dict[str, Any]) -> None:
    known = known_loss(function)
    assert known is not None
    assert known.bind((torch.zeros(2), torch.zeros(2)), arguments) is None
    assert known.bind((torch.zeros(2), torch.zeros(2)), {}) is not None


def test_sums_are_understood() -> None:
    known = known_loss(F.mse_loss)
    assert known is not None
    found = known.bind((torch.zeros(2), torch.zeros(2)), {"reduction": "sum"})
    assert found is not None and found["reduction"] == "sum"


def test_calls_without_a_target_are_left_to_torch() -> None:
    known = known_loss(F.mse_loss)
    assert known is not None
    assert known.bind((torch.zeros(2),), {}) is None and known.bind((), {"target": torch.zeros(2)}) is None


@pytest.mark.parametrize("function", dict.fromkeys(case[0] for case in CASES.values()), ids=lambda f: f.__name__)
def test_names_and_defaults_are_torchs(function: Any) -> None:
    known = known_loss(function)
    assert known is not None
    torchs = inspect.signature(function).parameters
    assert known.names[: len(torchs)] == tuple(torchs)  # older ones lack the last
    for name, default in known.defaults.items():
        assert name not in torchs or torchs[name].default == default


def test_positional_arguments_mean_the_same() -> None:
    value, target, weight = scores(5), classes(5), by_class(5)
    known = known_loss(F.cross_entropy)
    assert known is not None
    by_position = known.bind((value, target, weight, None, 3, None, "mean", 0.1), {})
    by_name = known.bind((), dict(input=value, target=target, weight=weight, ignore_index=3, label_smoothing=0.1))
    assert by_position is not None and by_position == by_name


@pytest.mark.parametrize("function", [F.kl_div, F.huber_loss, F.softmax, torch.mean, len])
def test_what_is_not_listed_is_unknown(function: Any) -> None:
    assert known_loss(function) is None
