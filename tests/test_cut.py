"""Where the samples lie in a batch: cut along them and join again, find them in two batches, or by their number."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch.nn.utils.rnn import pack_sequence

from memfit._errors import Refused
from memfit.batches.cut import (
    Axis,
    Layout,
    candidate_layouts,
    cut,
    cut_samples,
    layout_from_two,
    look_of,
    pieces_of,
    shared_samples,
)
from memfit.batches.pieces import bounds
from memfit.batches.tree import leaves, tensors

Pair = namedtuple("Pair", "image label")


@dataclass
class Record:
    image: torch.Tensor
    names: list[str]


# ---- an axis


@st.composite
def axes(draw: st.DrawFn) -> tuple[Axis, torch.Tensor, list[int]]:
    """An axis, a tensor with samples along it, and the sizes of pieces."""
    pieces = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    dim = draw(st.integers(0, len(shape)))
    axis = Axis(dim, draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    shape.insert(dim, axis.size(sum(pieces)))
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    # Also tensors that do not lie in memory in the order of their dimensions.
    return axis, tensor.transpose(0, -1).contiguous().transpose(0, -1) if draw(st.booleans()) else tensor, pieces


@given(axes())
def test_pieces_joined_are_the_whole(case: tuple[Axis, torch.Tensor, list[int]]) -> None:
    axis, tensor, pieces = case
    parts = [axis.narrow(tensor, start, stop) for start, stop in bounds(pieces)]
    assert [axis.samples(part.shape[axis.dim]) for part in parts] == pieces
    assert torch.equal(axis.join(parts), tensor)


@given(axes())
def test_all_pieces_at_once_are_the_pieces_one_by_one(case: tuple[Axis, torch.Tensor, list[int]]) -> None:
    axis, tensor, pieces = case
    tree = {"x": tensor, "names": ["a"] * sum(pieces), "temperature": 0.5, "mask": tensor.clone()}
    layout = Layout((axis, Axis(0), None, None), sum(pieces))
    made = pieces_of(tree, layout, pieces)
    for (start, stop), piece in zip(bounds(pieces), made, strict=True):
        one = cut(tree, layout, start, stop)
        assert torch.equal(piece["x"], one["x"])
        assert (piece["names"], piece["temperature"], piece["mask"] is tree["mask"]) == (one["names"], 0.5, True)


def test_pieces_made_at_once_may_be_written_in_place_with_what_has_a_graph() -> None:
    scale = torch.ones(3, requires_grad=True)
    first, _ = pieces_of((torch.ones(4, 3),), Layout((Axis(0),), 4), (2, 2))
    first[0].mul_(scale)
    first[0].sum().backward()
    assert scale.grad is not None and torch.equal(scale.grad, torch.full((3,), 2.0))


def test_pieces_made_at_once_of_what_requires_a_gradient_hand_it_back() -> None:
    x = torch.ones(4, 3, requires_grad=True)
    for (piece,) in pieces_of((x,), Layout((Axis(0),), 4), (1, 3)):
        (2 * piece).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.full((4, 3), 2.0))


def test_batches_look_the_same_if_they_are_cut_the_same_way() -> None:
    x, y = torch.zeros(4, 3), torch.zeros(4)
    assert look_of((x, y)) == look_of((x + 1, y.long()))
    looks = [look_of(batch) for batch in ((x, y), [x, y], (x, x), (x,), {"x": x, "y": y}, {"x": x, "z": y})]
    assert len(set(looks)) == len(looks)
    assert look_of((x, [y])) is look_of(x) is look_of((x, 0.5)) is look_of(pack_sequence([y])) is None


@given(axes())
def test_a_piece_has_every_entry_of_its_samples_and_no_other(case: tuple[Axis, torch.Tensor, list[int]]) -> None:
    axis, tensor, pieces = case
    # Entry i of the dimension belongs to the sample (i // inner) % samples, whatever varies slower or faster.
    belongs = torch.arange(tensor.shape[axis.dim]) // axis.inner % sum(pieces)
    for start, stop in bounds(pieces):
        mine = ((belongs >= start) & (belongs < stop)).nonzero()[:, 0]
        assert torch.equal(axis.narrow(tensor, start, stop), tensor.index_select(axis.dim, mine))


@given(axes())
def test_reversing_twice_changes_nothing(case: tuple[Axis, torch.Tensor, list[int]]) -> None:
    axis, tensor, pieces = case
    samples = sum(pieces)
    back = axis.reversed(tensor)
    assert torch.equal(axis.reversed(back), tensor)
    assert torch.equal(axis.narrow(back, 0, 1), axis.narrow(tensor, samples - 1, samples))


@pytest.mark.parametrize("axis", [Axis(0), Axis(0, inner=3), Axis(0, outer=3), Axis(0, outer=2, inner=3)])
def test_pieces_without_samples_join_too(axis: Axis) -> None:
    tensor = torch.arange(axis.size(4)).unsqueeze(1)
    parts = [axis.narrow(tensor, start, stop) for start, stop in ((0, 0), (0, 3), (3, 3), (3, 4))]
    assert torch.equal(axis.join(parts), tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.long])
@pytest.mark.parametrize("samples", [1, 2, 3, 5])
@pytest.mark.parametrize("axis", [Axis(0), Axis(1), Axis(0, inner=2), Axis(1, outer=2, inner=3)])
def test_more_samples_than_there_are_are_like_those(axis: Axis, samples: int, dtype: torch.dtype) -> None:
    shape = [4, 4]
    shape[axis.dim] = axis.size(2)
    tensor = torch.arange(shape[0] * shape[1]).reshape(shape).to(dtype)
    found = axis.like_first(tensor, samples)
    assert found.dtype is dtype and axis.samples(found.shape[axis.dim]) == samples
    if samples <= 2:
        assert torch.equal(found, axis.narrow(tensor, 0, samples))
    elif dtype is torch.long:
        assert all(torch.equal(axis.narrow(found, i, i + 1), axis.narrow(tensor, i % 2, i % 2 + 1)) for i in range(samples))


def test_time_and_batch_flattened_either_way() -> None:
    grid = torch.arange(6).view(2, 3)  # two time steps of three samples
    assert Axis(0, outer=2).narrow(grid.flatten(), 1, 2).tolist() == [1, 4]
    assert Axis(0, inner=2).narrow(grid.t().flatten(), 1, 2).tolist() == [1, 4]


def test_a_plain_piece_is_a_view() -> None:
    tensor = torch.zeros(6, 2)
    Axis(0).narrow(tensor, 2, 4).add_(1)
    Axis(0, inner=2).narrow(tensor, 0, 1).add_(2)
    assert tensor[:, 0].tolist() == [2, 2, 1, 1, 0, 0]


def test_gradients_flow_through_every_layout() -> None:
    tensor = torch.arange(12.0, requires_grad=True)
    axis = Axis(0, outer=2, inner=3)
    joined = axis.join([axis.narrow(tensor, 0, 1), axis.narrow(tensor, 1, 2)])
    (joined * torch.arange(12.0)).sum().backward()
    assert tensor.grad is not None and tensor.grad.tolist() == list(range(12))


# ---- a batch


def batch(samples: int) -> dict[str, Any]:
    return {
        "pair": Pair(torch.arange(samples * 2).view(samples, 2), torch.arange(samples)),
        "record": Record(torch.arange(3 * samples).view(3, samples), [f"n{i}" for i in range(samples)]),
        "raw": tuple(b"%d" % i for i in range(samples)),
        "flat": torch.arange(samples * 4),
        "mask": torch.ones(5, 5),
        "scale": 0.5,
        "nothing": None,
    }


AXES = (Axis(0), Axis(0), Axis(1), Axis(0), Axis(0), Axis(0, inner=4), None, None, None)


def same(left: Any, right: Any) -> None:
    for (path, a), (other, b) in zip(leaves(left), leaves(right), strict=True):
        assert path == other and type(a) is type(b)
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_what_grew_is_the_batch() -> None:
    found = layout_from_two(batch(2), 2, batch(5), 5)
    assert found == Layout(AXES, 5) and found.cuts


def test_a_cut_has_the_same_nesting() -> None:
    layout, whole = Layout(AXES, 5), batch(5)
    piece = cut(whole, layout, 1, 3)
    assert type(piece["pair"]) is Pair and type(piece["record"]) is Record and type(piece["raw"]) is tuple
    assert piece["pair"].label.tolist() == [1, 2] and piece["record"].names == ["n1", "n2"]
    assert piece["record"].image.tolist() == [[1, 2], [6, 7], [11, 12]] and piece["flat"].tolist() == list(range(4, 12))
    assert piece["mask"] is whole["mask"] and piece["scale"] == 0.5 and piece["nothing"] is None
    same(cut(whole, layout, 0, 5), whole)


def test_a_layout_serves_batches_of_other_sizes() -> None:
    layout = layout_from_two(batch(2), 2, batch(3), 3)
    assert cut(batch(7), layout, 6, 7)["pair"].label.tolist() == [6]


def test_single_samples_in_any_order() -> None:
    layout, whole = Layout(AXES, 4), batch(4)
    same(cut_samples(whole, layout, range(4)), whole)
    chosen = cut_samples(whole, layout, [3, 0, 3])
    assert chosen["pair"].label.tolist() == [3, 0, 3] and chosen["record"].names == ["n3", "n0", "n3"]
    assert chosen["raw"] == (b"3", b"0", b"3") and chosen["flat"].tolist() == [*range(12, 16), *range(4), *range(12, 16)]


def test_transformers_containers_are_cut() -> None:
    transformers = pytest.importorskip("transformers")
    encoding = transformers.BatchEncoding({"input_ids": torch.arange(6).view(3, 2)})
    layout = next(candidate_layouts(encoding, 3))
    piece = cut(encoding, layout, 1, 2)
    assert type(piece) is transformers.BatchEncoding and piece.input_ids.tolist() == [[2, 3]]
    output = transformers.modeling_outputs.CausalLMOutput(logits=torch.arange(6).view(3, 2))
    half = cut(output, Layout((Axis(0),), 3), 0, 1)
    assert type(half) is type(output) and half.logits.tolist() == half[0].tolist() == [[0, 1]]


def test_a_layout_of_another_structure_is_refused() -> None:
    layout = Layout((Axis(0),), 4)
    with pytest.raises(Refused, match=r"2 parts.*1"):
        cut((torch.arange(4), torch.arange(4)), layout, 0, 2)
    with pytest.raises(Refused, match=r"0 parts.* 1"):
        cut((), layout, 0, 2)


# ---- what cannot be cut


@pytest.mark.parametrize(
    ("small", "large", "named"),
    [
        (torch.zeros(2, 3), torch.zeros(4, 5), r"batch .*\(2, 3\) for 2 samples and \(4, 5\) for 4"),
        ((torch.zeros(2), {"x": torch.zeros(3)}), (torch.zeros(4), {"x": torch.zeros(7)}), r"batch\[1\]\['x'\] .*\(3,\)"),
        (torch.zeros(6), torch.zeros(10), r"\(6,\) for 2 samples and \(10,\) for 4"),
        (torch.zeros(2), torch.zeros(4, 1), "no dimension is the batch"),
        ([torch.zeros(1)] * 2, [torch.zeros(1)] * 4, "structure depends on the number of samples"),
    ],
    ids=["two dimensions", "another number", "not a multiple", "another rank", "a list of samples"],
)
def test_what_has_no_batch_dimension_is_refused_by_name(small: Any, large: Any, named: str) -> None:
    with pytest.raises(Refused, match=named) as refused:
        layout_from_two(small, 2, large, 4)
    assert "cutting the batch" in refused.value.asked and "split=" in refused.value.next_move


def test_packed_sequences_are_refused() -> None:
    # Their data is [time, batch] flattened, with the sizes of time steps beside it: no dimension can be cut alone.
    few, many = (pack_sequence([torch.zeros(3, 2)] * n, enforce_sorted=False) for n in (2, 4))
    with pytest.raises(Refused, match="PackedSequence"):
        layout_from_two(few, 2, many, 4)
    for tree in (many, {"x": [many], "y": torch.zeros(4)}):
        with pytest.raises(Refused, match="PackedSequence"):
            list(candidate_layouts(tree, 4))


class Graphs:
    """A batch of a kind of its own."""

    def __init__(self, samples: int) -> None:
        self.nodes = [torch.zeros(3)] * samples


def test_objects_of_an_unknown_kind_are_refused() -> None:
    with pytest.raises(Refused, match=r"batch\[0\] is of type Graphs"):
        layout_from_two((Graphs(2), torch.zeros(2)), 2, (Graphs(4), torch.zeros(4)), 4)
    with pytest.raises(Refused, match=r"batch\['y'\] is of type ndarray"):
        layout_from_two({"y": np.zeros(2)}, 2, {"y": np.zeros(4)}, 4)


def test_constants_pass_whole() -> None:
    constants = {"mask": torch.ones(5), "dtype": torch.float32, "flag": True, "scale": 2.0, "name": "x", "none": None}
    small, large = ({**constants, "x": torch.zeros(n, 5)} for n in (2, 4))
    layout = layout_from_two(small, 2, large, 4)
    assert [axis for axis in layout.axes if axis is not None] == [Axis(0)]
    assert not layout_from_two(constants, 2, constants, 4).cuts


def test_a_number_that_changes_with_the_samples_is_no_constant() -> None:
    with pytest.raises(Refused, match=r"batch\['count'\].*2 for 2 samples and 4 for 4"):
        layout_from_two({"x": torch.zeros(2), "count": 2}, 2, {"x": torch.zeros(4), "count": 4}, 4)


# ---- candidates


def test_the_first_dimension_of_all_is_the_likeliest() -> None:
    tree = (torch.zeros(4, 4), torch.zeros(4, 7), torch.zeros(3))
    found = list(candidate_layouts(tree, 4))
    assert found[0] == Layout((Axis(0), Axis(0), None), 4)
    assert found[1] == Layout((Axis(1), Axis(0), None), 4)


def test_what_could_be_cut_may_be_the_same_for_all_samples_at_last() -> None:
    found = [layout.axes for layout in candidate_layouts((torch.zeros(4, 7), torch.zeros(4, 4)), 4)]
    assert found[:3] == [(Axis(0), Axis(0)), (Axis(0), Axis(1)), (Axis(0), None)]
    assert (None, None) not in found


def test_time_first_is_found_where_nothing_else_is_of_that_size() -> None:
    tree = {"x": torch.zeros(7, 3, 2), "y": torch.zeros(3), "names": ["a", "b", "c"], "texts": ["one"]}
    assert next(candidate_layouts(tree, 3)) == Layout((Axis(1), Axis(0), Axis(0), None), 3)


def test_agreement_comes_before_position() -> None:
    x = torch.zeros(4, 4)
    found = [tuple(axis and axis.dim for axis in layout.axes) for layout in candidate_layouts((x, x, x), 4)]
    assert found[:2] == [(0, 0, 0), (1, 1, 1)] and len(found) == len(set(found))
    assert all(None not in dims for dims in found[:8])


@pytest.mark.parametrize("tree", [(), torch.zeros(3), torch.tensor(4.0), {"a": 4, "b": "four"}])
def test_nothing_is_found_where_nothing_has_that_many(tree: Any) -> None:
    assert list(candidate_layouts(tree, 4)) == []


def test_there_are_never_too_many() -> None:
    tree = [torch.zeros(2, 2, 2, 2) for _ in range(40)]
    found = list(candidate_layouts(tree, 2, limit=5))
    assert len(found) == 5 and found[0].axes == (Axis(0),) * 40


@pytest.mark.parametrize(
    ("tree", "samples"),
    [
        ((torch.zeros(4, 2), torch.zeros(4)), 4),
        ((torch.zeros(4, 2), torch.tensor(1.0), torch.zeros(1), ["a"], 7), 4),  # what has one element is a number
        ((torch.zeros(4, 2), torch.zeros(5)), None),
        ({"flag": 1}, None),
    ],
)
def test_the_size_all_share(tree: Any, samples: int | None) -> None:
    assert shared_samples(tree) == samples


@given(st.integers(2, 6), st.integers(1, 4), st.integers(1, 5), st.integers(0, 2))
def test_two_sizes_find_any_batch_dimension(few: int, more: int, inner: int, dim: int) -> None:
    def made(samples: int) -> torch.Tensor:
        shape = [3, 2]
        shape.insert(dim, samples * inner)
        return torch.zeros(shape)

    many = few + more
    layout = layout_from_two(made(few), few, made(many), many)
    assert layout.axes == (Axis(dim, inner=inner),)
    parts = [cut(made(many), layout, i, i + 1) for i in range(many)]
    assert {tensors(part)[0].shape[dim] for part in parts} == {inner}
