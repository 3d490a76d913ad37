"""Known losses of torch.nn.functional outside the model run in accumulate: the plain gradient, and one forward per sample.

Everything else runs in replay with the same gradient; those losses are in `test_replay.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers import Forwards, plain_gradients, wrapped
from torch import Tensor, nn
from zoo.plain import gradients_of, relative_error

N, T, C = 12, 3, 4
PIECES = [4, 4, 4]

Loss = Callable[[Tensor], Tensor]
"""From the model's output to the loss."""


def numbers(*shape: int) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def classes(*shape: int, ignored: int | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    found = torch.randint(0, C, shape, generator=generator)
    if ignored is not None:
        found[torch.rand(shape, generator=generator) < 0.4] = ignored
        found[:5] = ignored  # a whole micro-batch without a valid label
    return found


def bits(*shape: int) -> Tensor:
    return (numbers(*shape) > 0.5).double()


WEIGHT = torch.tensor([0.5, 1.0, 3.0, 0.0], dtype=torch.float64)


class Net(nn.Module):
    """One output of a given shape per sample."""

    def __init__(self, *shape: int, chosen: str = "") -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.first = nn.Linear(5, 6).double()
            self.last = nn.Linear(6, torch.Size(shape).numel()).double()
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh()).view(-1, *self.shape)


def assert_accumulates(model: nn.Module, loss: Loss, *, forwards: int = 1) -> None:
    """The plain gradient from `forwards` forwards per micro-batch, all of them recording for their backward."""

    def script(model: nn.Module, x: Tensor) -> None:
        loss(model(x)).backward()

    x = numbers(N, 5)
    want = plain_gradients(model, script, x)
    assert any(g is not None and g.any() for g in want.values())
    model = copy.deepcopy(model)
    wrapped(model, 5)
    script(model, x)  # learns and proves
    assert relative_error(gradients_of(model), want) <= 1e-12
    model.zero_grad()
    seen = Forwards(model.first)
    script(model, x)
    assert relative_error(gradients_of(model), want) <= 1e-12
    assert seen.sizes == PIECES * forwards and all(seen.recording)


CLASSES: dict[str, tuple[tuple[int, ...], Loss]] = {
    "mean": ((C,), lambda out: F.cross_entropy(out, classes(N))),
    "sum": ((C,), lambda out: F.cross_entropy(out, classes(N), reduction="sum")),
    "module": ((C,), lambda out: nn.CrossEntropyLoss()(out, classes(N))),
    "ignored": ((C,), lambda out: F.cross_entropy(out, classes(N, ignored=-100))),
    "another ignored": ((C,), lambda out: F.cross_entropy(out, classes(N, ignored=2), ignore_index=2)),
    "weighted": ((C,), lambda out: F.cross_entropy(out, classes(N), WEIGHT)),
    "weighted, ignored": ((C,), lambda out: F.cross_entropy(out, classes(N, ignored=-100), weight=WEIGHT)),
    "smoothed": ((C,), lambda out: F.cross_entropy(out, classes(N), label_smoothing=0.2)),
    "smoothed, weighted, ignored": (
        (C,),
        lambda out: F.cross_entropy(out, classes(N, ignored=1), WEIGHT, ignore_index=1, label_smoothing=0.2),
    ),
    "probabilities": ((C,), lambda out: F.cross_entropy(out, numbers(N, C).softmax(1))),
    "probabilities, weighted": ((C,), lambda out: F.cross_entropy(out, numbers(N, C).softmax(1), WEIGHT)),
    "positions": ((C, T), lambda out: F.cross_entropy(out, classes(N, T, ignored=-100))),
    "positions, weighted": ((C, T), lambda out: F.cross_entropy(out, classes(N, T), WEIGHT)),
    "positions, probabilities": ((C, T), lambda out: F.cross_entropy(out, numbers(N, C, T).softmax(1))),
    "images": ((C, 2, T), lambda out: F.cross_entropy(out, classes(N, 2, T, ignored=255), ignore_index=255)),
    "negative log likelihood": ((C,), lambda out: F.nll_loss(F.log_softmax(out, 1), classes(N))),
    "negative log likelihood, sum": ((C,), lambda out: F.nll_loss(out.log_softmax(-1), classes(N), reduction="sum")),
    "negative log likelihood, weighted": (
        (C,),
        lambda out: nn.NLLLoss(weight=WEIGHT)(torch.log_softmax(out, dim=1), classes(N)),
    ),
    "negative log likelihood, positions": (
        (C, T),
        lambda out: F.nll_loss(F.log_softmax(out, dim=1), classes(N, T, ignored=-100)),
    ),
}

NUMBERS: dict[str, tuple[tuple[int, ...], Loss]] = {
    "squares": ((C,), lambda out: F.mse_loss(out, numbers(N, C))),
    "squares, sum": ((C,), lambda out: F.mse_loss(out, numbers(N, C), reduction="sum")),
    "squares, target first": ((C,), lambda out: F.mse_loss(numbers(N, C), out)),
    "squares, weighted": ((C,), lambda out: F.mse_loss(out, numbers(N, C), weight=numbers(N, C) + 0.5)),
    "differences": ((C,), lambda out: F.l1_loss(out, numbers(N, C))),
    "differences, target first": ((C,), lambda out: nn.L1Loss()(numbers(N, C), out)),
    "differences, sum": ((C,), lambda out: nn.L1Loss(reduction="sum")(out, numbers(N, C))),
    "differences, weighted": ((C,), lambda out: F.l1_loss(out, numbers(N, C), weight=numbers(N, C) + 0.5)),
    "bits": ((C,), lambda out: F.binary_cross_entropy(out.sigmoid(), bits(N, C))),
    "bits, sum": ((C,), lambda out: F.binary_cross_entropy(torch.sigmoid(out), bits(N, C), reduction="sum")),
    "bits, weighted": ((C,), lambda out: F.binary_cross_entropy(F.sigmoid(out), bits(N, C), weight=numbers(N, C))),
    "bits, weighted by column": ((C,), lambda out: F.binary_cross_entropy(out.sigmoid(), bits(N, C), weight=WEIGHT)),
    "logits": ((C,), lambda out: F.binary_cross_entropy_with_logits(out, bits(N, C))),
    "logits, sum": ((C,), lambda out: F.binary_cross_entropy_with_logits(out, bits(N, C), reduction="sum")),
    "logits, weighted": ((C,), lambda out: F.binary_cross_entropy_with_logits(out, bits(N, C), weight=numbers(N, C))),
    "logits, weighted by sample": (
        (C,),
        lambda out: F.binary_cross_entropy_with_logits(out, bits(N, C), weight=numbers(N, 1)),
    ),
    "logits, positives": ((C,), lambda out: F.binary_cross_entropy_with_logits(out, bits(N, C), pos_weight=WEIGHT)),
    "logits, both": (
        (C,),
        lambda out: nn.BCEWithLogitsLoss(weight=WEIGHT, pos_weight=2 * WEIGHT)(out, bits(N, C)),
    ),
}

ROUTES: dict[str, tuple[tuple[int, ...], Loss]] = {
    "view": ((T, C), lambda out: F.cross_entropy(out.view(-1, C), classes(N, T, ignored=-100).view(-1))),
    "view by sizes": ((T, C), lambda out: F.cross_entropy(out.view(N * T, C), classes(N * T))),
    "view by its own size": ((T, C), lambda out: F.cross_entropy(out.view(out.size(0) * out.shape[1], C), classes(N * T))),
    "reshape": ((T, C), lambda out: F.cross_entropy(out.reshape(-1, C), classes(N * T))),
    "reshape to a tuple": ((T, C), lambda out: F.cross_entropy(torch.reshape(out, (-1, C)), classes(N * T))),
    "flatten": ((T, C), lambda out: F.cross_entropy(out.flatten(0, 1), classes(N, T).flatten())),
    "flatten by name": ((T, C), lambda out: F.cross_entropy(torch.flatten(out, end_dim=1), classes(N * T))),
    "flatten the rest": ((T, C), lambda out: F.mse_loss(out.flatten(1), numbers(N, T * C))),
    "squeeze": ((1,), lambda out: F.mse_loss(out.squeeze(), numbers(N))),
    "squeeze a dimension": ((1,), lambda out: F.binary_cross_entropy_with_logits(out.squeeze(-1), bits(N))),
    "squeeze nothing": ((C,), lambda out: F.mse_loss(out.squeeze(), numbers(N, C))),
    "squeeze a wide dimension": ((C,), lambda out: F.mse_loss(out.squeeze(1), numbers(N, C))),
    "unsqueeze": ((C,), lambda out: F.mse_loss(out.unsqueeze(0), numbers(1, N, C))),
    "slice": ((T, C), lambda out: F.cross_entropy(out[:, -1], classes(N))),
    "slice of positions": (
        (T, C),
        lambda out: F.cross_entropy(out[:, :-1].reshape(-1, C), classes(N, T, ignored=-100)[:, 1:].reshape(-1)),
    ),
    "slice of positions, contiguous": (
        (T, C),
        lambda out: F.cross_entropy(out[..., :-1, :].contiguous().view(-1, C), classes(N, T)[..., 1:].reshape(-1)),
    ),
    "one column": ((C,), lambda out: F.mse_loss(out[:, 0], numbers(N))),
    "a new dimension": ((C,), lambda out: F.mse_loss(out[:, None, :, None], numbers(N, 1, C, 1))),
    "transpose": ((T, C), lambda out: F.cross_entropy(out.transpose(1, 2), classes(N, T))),
    "permute": ((T, C), lambda out: F.cross_entropy(out.permute(0, 2, 1), classes(N, T))),
    "batch last": ((T, C), lambda out: F.mse_loss(out.permute(1, 2, 0), numbers(T, C, N))),
    "log_softmax, then flat": (
        (T, C),
        lambda out: F.nll_loss(F.log_softmax(out, dim=-1).view(-1, C), classes(N * T)),
    ),
    "log_softmax of a slice": ((T, C), lambda out: F.nll_loss(out[:, 1].log_softmax(1), classes(N))),
    "temperature": ((C,), lambda out: F.cross_entropy(out / 0.5, classes(N))),
    "negated": ((C,), lambda out: F.cross_entropy(-out, classes(N))),
    "another precision": ((C,), lambda out: F.cross_entropy(out.float(), classes(N)).double()),
    "the long way": (
        (T, C),
        lambda out: F.nll_loss((out[:, 1:] * 2.0).contiguous().log_softmax(-1).flatten(0, 1), classes(N * (T - 1))),
    ),
}

AFTERWARDS: dict[str, tuple[tuple[int, ...], Loss]] = {
    "divided": ((C,), lambda out: F.cross_entropy(out, classes(N)) / 8),
    "times zero": ((C,), lambda out: F.cross_entropy(out, classes(N)) * 0 + F.mse_loss(out, numbers(N, C))),
    "squared": ((C,), lambda out: F.cross_entropy(out, classes(N)) ** 2),
    "exponentiated": ((C,), lambda out: F.cross_entropy(out, classes(N)).exp()),
    "of two, added": ((C,), lambda out: F.cross_entropy(out, classes(N)) + 0.3 * F.mse_loss(out, numbers(N, C))),
    "of two, multiplied": ((C,), lambda out: F.cross_entropy(out, classes(N)) * F.mse_loss(out, numbers(N, C))),
}


def cases(table: dict[str, tuple[tuple[int, ...], Loss]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("shape", "loss"), [pytest.param(*case, id=name) for name, case in table.items()])


@cases(CLASSES)
def test_losses_of_classes(shape: tuple[int, ...], loss: Loss) -> None:
    assert_accumulates(Net(*shape), loss)


@cases(NUMBERS)
def test_losses_of_numbers(shape: tuple[int, ...], loss: Loss) -> None:
    assert_accumulates(Net(*shape), loss)


@cases({name: case for name, case in ROUTES.items() if name != "another precision"})
def test_ways_from_the_output_to_the_loss(shape: tuple[int, ...], loss: Loss) -> None:
    assert_accumulates(Net(*shape), loss)


@cases(AFTERWARDS)
def test_what_becomes_of_the_loss(shape: tuple[int, ...], loss: Loss) -> None:
    """Losses of one output that are added up share a pass, once it is known that there are several; others have their own."""
    out = torch.zeros(N, *shape, dtype=torch.float64, requires_grad=True)
    made = loss(out)
    known = [name for name in graph_names(made) if name in ("NllLossBackward0", "MseLossBackward0")]
    assert_accumulates(Net(*shape), loss, forwards=1 if graph_names(made)[0] == "AddBackward0" else len(known))


def graph_names(loss: Tensor) -> list[str]:
    open_, seen = [loss.grad_fn], []
    while open_:
        node = open_.pop()
        if node is not None and node not in seen:
            seen.append(node)
            open_ += [following for following, _ in node.next_functions]
    return [node.name() for node in seen]


def test_a_cast_on_the_way_keeps_the_casts_precision() -> None:
    """The script computes its loss in float32; so does each part."""
    model, x = Net(C), numbers(N, 5)

    def script(model: nn.Module, x: Tensor) -> None:
        F.cross_entropy(model(x).float(), classes(N)).backward()

    want = plain_gradients(model, script, x)
    wrapped(model, 5)
    script(model, x)
    assert 0 < relative_error(gradients_of(model), want) <= 1e-6


def test_every_label_ignored_is_nan_as_without_memfit() -> None:
    model, x = Net(C), numbers(N, 5)
    y = torch.full((N,), -100)
    wrapped(model, 5)
    loss = F.cross_entropy(model(x), y)
    assert loss.isnan()
    loss.backward()
    plain = plain_gradients(copy.deepcopy(model), lambda m, x: F.cross_entropy(m(x), y).backward(), x)
    assert {n: g is None or bool(g.isnan().all()) for n, g in gradients_of(model).items()} == {
        n: g is None or bool(g.isnan().all()) for n, g in plain.items()
    }


# Samples that the loss itself takes for something else than samples: only replay is right, or nothing is.


def test_a_loss_whose_classes_are_the_samples() -> None:
    """Output [N, N] columns, transposed: the loss normalises over the samples."""
    model = Net(N)
    y = torch.randint(0, N, (N,), generator=torch.Generator().manual_seed(1))
    for loss in (
        lambda out: F.cross_entropy(out.t(), y),
        lambda out: F.cross_entropy(out.transpose(0, 1), y),
        lambda out: F.cross_entropy(out.T, numbers(N, N).softmax(1)),
        lambda out: F.cross_entropy(out.permute(1, 0), numbers(N, N).softmax(1)),
        lambda out: F.nll_loss(out.log_softmax(1).transpose(0, 1), y),
        lambda out: F.nll_loss(out.log_softmax(0), y),
        lambda out: F.nll_loss(out.softmax(0).log(), y),
    ):
        assert_same_gradient(model, loss)


def test_a_loss_of_one_column_as_scores_of_classes() -> None:
    """[N] scores with one label: the samples compete with each other."""
    assert_same_gradient(Net(1), lambda out: F.cross_entropy(out.squeeze(1), torch.tensor(3)))
    assert_same_gradient(Net(1), lambda out: F.cross_entropy(out.squeeze(1), numbers(N).softmax(0)))
    assert_same_gradient(Net(1), lambda out: F.cross_entropy(out.view(1, N), torch.tensor([3])))


def test_shapes_that_broadcast() -> None:
    """A target of one row for all samples, and the classic mistake of [N, 1] against [N]."""
    assert_same_gradient(Net(C), lambda out: F.mse_loss(out, numbers(1, C).expand(N, C)))
    with pytest.warns(UserWarning, match="broadcast"):
        assert_same_gradient(Net(C), lambda out: F.mse_loss(out, numbers(C)))
    with pytest.warns(UserWarning, match="broadcast"):
        assert_same_gradient(Net(1), lambda out: F.mse_loss(out, numbers(N)))
    with pytest.warns(UserWarning, match="broadcast"):
        assert_same_gradient(Net(1), lambda out: F.l1_loss(out.squeeze(1), numbers(N, 1)))
    with pytest.warns(UserWarning, match="broadcast"):
        assert_same_gradient(Net(1), lambda out: F.mse_loss(out, numbers(1, N)))


def test_a_weight_whose_size_happens_to_be_the_batchs() -> None:
    square = Net(N)
    assert_same_gradient(square, lambda out: F.binary_cross_entropy_with_logits(out, bits(N, N), weight=numbers(N)))
    assert_same_gradient(square, lambda out: F.binary_cross_entropy_with_logits(out, bits(N, N), pos_weight=numbers(N)))
    assert_same_gradient(square, lambda out: F.binary_cross_entropy_with_logits(out, bits(N, N), pos_weight=numbers(N, 1)))
    y = torch.randint(0, N, (N,), generator=torch.Generator().manual_seed(1))
    assert_same_gradient(square, lambda out: F.cross_entropy(out, y, weight=numbers(N)))
    positions = torch.randint(0, N, (N, N), generator=torch.Generator().manual_seed(1))
    assert_same_gradient(Net(N, N), lambda out: F.cross_entropy(out, positions, weight=numbers(N)))
    assert_same_gradient(Net(N, N), lambda out: F.cross_entropy(out.transpose(0, 2), positions, weight=numbers(N)))


def assert_same_gradient(model: nn.Module, loss: Loss) -> None:
    x = numbers(N, 5)

    def script(model: nn.Module, x: Tensor) -> None:
        loss(model(x)).backward()

    want = plain_gradients(model, script, x)
    model = copy.deepcopy(model)
    wrapped(model, 5)
    script(model, x)
    assert relative_error(gradients_of(model), want) <= 1e-12
