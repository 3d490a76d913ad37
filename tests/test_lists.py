"""Batches that are lists with an entry for every sample."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import Forwards, assert_transparent, wrapped
from torch import Tensor, nn

from memfit.batches.lists import cut_lists, samples_in_lists

N = 6


def pictures(same: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 4 + (0 if same else i), 5, generator=generator, dtype=torch.float64) for i in range(N)]


def targets() -> list[dict[str, Tensor]]:
    return [{"label": torch.tensor([i % 3]), "boxes": torch.rand(1 + i % 2, 4)} for i in range(N)]


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(1, 4, 3, padding=1).double()
        self.head = nn.Linear(4, 3).double()

    def logits(self, images: Any) -> Tensor:
        return torch.stack([self.head(self.first(image[None]).tanh().mean((2, 3))[0]) for image in images])

    def forward(self, images: Any, targets: Any = None, scale: float = 1.0) -> Any:
        logits = self.logits(images)
        if targets is None:
            return logits
        assert len(images) == len(targets)
        labels = torch.cat([target["label"] for target in targets])
        return {"classes": F.cross_entropy(logits, labels) * scale, "size": logits.square().mean()}


def train(model: nn.Module, images: Any, targets: Any) -> None:
    sum(model(images, targets=targets, scale=2.0).values()).backward()  # type: ignore[union-attr]


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("kind", [list, tuple])
def test_lists_of_pictures_and_targets_are_cut_by_their_entries(same: bool, kind: Any) -> None:
    assert_transparent(Detector(), train, kind(pictures(same)), kind(targets()), micro_batch=2)


@pytest.mark.parametrize("order", [(False, True), (True, False)])
def test_entries_may_share_a_dimension_that_is_not_the_samples(order: tuple[bool, bool]) -> None:
    """Grey pictures with one box each, after (or before) others."""

    def script(model: nn.Module, images: Any, targets: Any) -> None:
        for alike in order:
            train(model, images, [{**target, "boxes": target["boxes"][:1]} for target in targets] if alike else targets)

    assert_transparent(Detector(), script, pictures(), targets(), micro_batch=2)


def test_its_outputs_are_joined() -> None:
    def script(model: nn.Module, images: Any, labels: Tensor) -> None:
        F.cross_entropy(model(images), labels).backward()

    assert_transparent(Detector(), script, pictures(), torch.arange(N) % 3, micro_batch=2)


def test_batches_whose_pictures_are_alike_are_the_same_kind() -> None:
    model = Detector()
    wrapped(model, 2)
    train(model, pictures(), targets())
    seen = Forwards(model.head)
    train(model, pictures(True), targets())
    train(model, pictures()[:5], targets()[:5])
    assert len(seen.sizes) == N + 5


@pytest.mark.parametrize(
    ("args", "hint", "samples"),
    [
        ((pictures(), targets()), None, N),
        ((pictures(), targets()), N, N),
        ((pictures(), targets()), 4, None),
        ((pictures(), targets()[:3]), None, None),
        ((pictures(True),), None, None),
        ((pictures(True),), N, N),
        ((torch.zeros(2, 5, 3), (torch.zeros(1, 2, 4), torch.zeros(1, 2, 4))), 2, None),
        (([torch.zeros(N, 3), torch.zeros(N, 3)],), N, None),
        (([1.0, 2.0], "text", None), 2, None),
        (([],), 0, None),
    ],
)
def test_what_counts_as_a_list_of_samples(args: Any, hint: int | None, samples: int | None) -> None:
    assert samples_in_lists((args, {}), hint) == samples


def test_parts_hold_what_belongs_together() -> None:
    labels, constant = torch.arange(N), torch.zeros(3)
    first, second = cut_lists(((pictures(), labels), {"targets": targets(), "anchors": constant}), [4, 2])
    (images, own), settings = second
    assert len(images) == len(settings["targets"]) == 2 and own.tolist() == [4, 5] and settings["anchors"] is constant
    assert len(first[0][0]) == 4


def sentences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(1 + i % 3, 4, generator=generator, dtype=torch.float64) for i in range(N)]


class OfNested(nn.Module):
    """A sentence's mean, of a nested tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(4, 8).double(), nn.Linear(8, 3).double()

    def forward(self, nested: Tensor, more: Tensor) -> Tensor:
        means = torch.stack([self.first(sentence).tanh().mean(0) for sentence in nested.unbind()])
        return self.head(means) + more


class OfPacked(nn.Module):
    """The last hidden state."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm, self.head = nn.LSTM(4, 8).double(), nn.Linear(8, 3).double()

    def forward(self, packed: Any, more: Tensor) -> Tensor:
        return self.head(self.lstm(packed)[1][0][-1]) + more


RAGGED = {
    "jagged": (OfNested, lambda: torch.nested.nested_tensor(sentences(), layout=torch.jagged)),
    "strided": (OfNested, lambda: torch.nested.nested_tensor(sentences())),
    "packed": (OfPacked, lambda: nn.utils.rnn.pack_sequence(sentences(), enforce_sorted=False)),
    "sorted": (OfPacked, lambda: nn.utils.rnn.pack_sequence(sorted(sentences(), key=len, reverse=True))),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", RAGGED)
def test_nested_tensors_and_packed_sequences_are_cut_by_their_samples(kind: str) -> None:
    model, batch = RAGGED[kind]

    def script(model: nn.Module, given: Any, more: Tensor) -> None:
        F.cross_entropy(model(given, more), torch.arange(N) % 3).backward()

    more = torch.randn(N, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    assert_transparent(model(), script, batch(), more, micro_batch=2)
