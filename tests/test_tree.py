"""Nested batches: every container gives its leaves in order, and gets them back with its own type."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from memfit.batches.tree import children, is_column, leaves, map_leaves, path_name, rebuild, tensors

Pair = namedtuple("Pair", "image label")


@dataclass
class Record:
    image: Any
    label: Any = None
    computed: Any = field(init=False, default=7)


@dataclass
class Unfinished:
    image: Any
    later: Any = field(init=False)


@dataclass(frozen=True)
class Frozen:
    image: Any


@dataclass
class Slotted:
    __slots__ = ("image",)
    image: Any


class Sizes(tuple):
    """A tuple subclass without named fields."""


class Rows(list):
    """A list subclass."""


class Wrapped(UserDict):
    """As transformers' BatchEncoding is."""


def model_output(**items: Any) -> Any:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    return outputs.CausalLMOutputWithPast(**items)


def batch_encoding(**items: Any) -> Any:
    return pytest.importorskip("transformers").BatchEncoding(items)


NESTED = {
    "tuple": ((1, 2.0), [1, 2.0]),
    "list": ([1, ["a", 3]], [1, "a", 3]),
    "column of numbers": ((1, [2, 3.5]), [1, [2, 3.5]]),
    "tuple of numbers": ([None, (2, 3)], [None, 2, 3]),
    "tuple subclass": (Sizes((1, 2)), [1, 2]),
    "list subclass": (Rows([1, 2]), [1, 2]),
    "named tuple": (Pair(1, {"a": 2}), [1, 2]),
    "dict": ({"b": 1, "a": (2,)}, [1, 2]),
    "ordered dict": (OrderedDict(b=1, a=2), [1, 2]),
    "default dict": (defaultdict(list, {"b": 1, "a": 2}), [1, 2]),
    "user dict": (Wrapped(b=1, a=2), [1, 2]),
    "dataclass": (Record(1, ["a", 3]), [1, "a", 3, 7]),
    "frozen dataclass": (Frozen((1, 2)), [1, 2]),
    "dataclass with slots": (Slotted(1), [1]),
    "empty": ({"a": [], "b": ()}, []),
    "column of texts": (["a", "bc"], [["a", "bc"]]),
    "columns in a dict": ({"id": ("x", "y"), "raw": [b"1", b"2"]}, [("x", "y"), [b"1", b"2"]]),
    "texts and others": (["a", 1], ["a", 1]),
    "unknown objects": ((SimpleNamespace, None, "text", range(3)), [SimpleNamespace, None, "text", range(3)]),
}


@pytest.mark.parametrize("name", NESTED)
def test_leaves_in_order_and_back(name: str) -> None:
    tree, expected = NESTED[name]
    assert [leaf for _, leaf in leaves(tree)] == expected
    again = rebuild(tree, iter(expected))
    assert type(again) is type(tree)
    assert again == tree


@pytest.mark.parametrize("name", NESTED)
def test_what_is_changed_is_a_copy(name: str) -> None:
    tree, expected = NESTED[name]
    changed = map_leaves(lambda leaf: [*leaf, "more"] if is_column(leaf) else {"changed": leaf}, tree)
    assert [leaf for _, leaf in leaves(tree)] == expected
    assert type(changed) is type(tree)
    assert not expected or changed != tree


def test_paths_are_what_one_would_type() -> None:
    tree = {"inputs": [torch.zeros(2), Pair(torch.ones(3), 5)], "ids": Record(1)}
    paths = [path for path, _ in leaves(tree)]
    assert path_name(paths[0]) == "batch['inputs'][0]"
    assert [path_name(path, "x") for path in paths[1:3]] == ["x['inputs'][1][0]", "x['inputs'][1][1]"]
    assert path_name(paths[3]) == "batch['ids']['image']"


def test_what_torch_returns_as_a_tuple_with_names_stays_that() -> None:
    found = torch.tensor([[1.0, 3.0, 2.0]]).max(dim=1)
    doubled = map_leaves(lambda leaf: leaf * 2, found)
    assert type(doubled) is type(found)
    assert (doubled.values.item(), doubled.indices.item()) == (6.0, 2)


def test_a_tensor_alone_is_its_own_leaf() -> None:
    x = torch.arange(3)
    assert children(x) is None and [leaf is x for leaf in tensors(x)] == [True]
    assert map_leaves(lambda leaf: leaf + 1, x).tolist() == [1, 2, 3]


def test_a_mapping_of_a_kind_of_its_own_keeps_what_else_it_holds() -> None:
    tree = defaultdict(lambda: "nothing", a=1)
    again = map_leaves(lambda leaf: leaf + 1, tree)
    assert again["a"] == 2 and again["missing"] == "nothing" and dict(tree) == {"a": 1}


def test_fields_that_are_not_there_are_no_leaves() -> None:
    record = Unfinished(1)
    assert [leaf for _, leaf in leaves(record)] == [1]
    record.later = 3
    assert [leaf for _, leaf in leaves(map_leaves(lambda leaf: leaf + 1, record))] == [2, 4]
    slotted = object.__new__(Slotted)
    assert list(leaves(slotted)) == [] and type(rebuild(slotted, iter([]))) is Slotted


# ---- transformers


def test_model_outputs_by_item_and_by_attribute() -> None:
    output = model_output(loss=torch.tensor(2.0), logits=torch.arange(6.0).view(2, 3))
    assert [path for path, _ in leaves(output)] == [("loss",), ("logits",)]  # what is None is not there
    doubled = map_leaves(lambda leaf: leaf * 2, output)
    assert type(doubled) is type(output)
    assert doubled.loss is doubled["loss"] is doubled[0] and doubled.loss.item() == 4
    assert doubled.logits is doubled["logits"] and doubled.past_key_values is None
    assert output.loss.item() == output["loss"].item() == 2 and output.logits[1, 2].item() == 5


def test_nested_model_outputs() -> None:
    output = model_output(logits=torch.ones(2), hidden_states=(torch.ones(2), torch.ones(2) * 2))
    assert len(tensors(output)) == 3
    tripled = map_leaves(lambda leaf: leaf * 3, output)
    assert [h[0].item() for h in tripled.hidden_states] == [3, 6] == [h[0].item() for h in tripled["hidden_states"]]


@dataclass
class OfItems(OrderedDict[str, Any]):
    """Its items are those of its fields that are not None, in the order of the fields, as a ModelOutput's are."""

    first: Any = None
    second: Any = None
    inner: Any = None

    def __post_init__(self) -> None:
        super().update({name: value for name, value in vars(self).items() if value is not None})

    def __reduce__(self) -> Any:
        return type(self), (self.first, self.second, self.inner)


def test_items_keep_their_order_where_leaves_were_none_before() -> None:
    tree = OfItems(first=1, second=2, inner=(3,))
    emptied = map_leaves(lambda leaf: None, tree)
    found = rebuild(emptied, iter([1, 2, 3]))
    assert list(emptied) == list(found) == ["first", "second", "inner"]
    assert list(found.items()) == [("first", 1), ("second", 2), ("inner", (3,))] and found.second == 2
    output = pytest.importorskip("transformers.modeling_outputs")
    inner = output.BaseModelOutput(last_hidden_state=torch.ones(2))
    tree = output.BaseModelOutputWithPast(last_hidden_state=torch.zeros(2), past_key_values=inner)
    found = rebuild(map_leaves(lambda leaf: None, tree), iter([1, 2]))
    assert found[0] == 1 and list(found) == ["last_hidden_state", "past_key_values"]


def test_batch_encodings() -> None:
    encoding = batch_encoding(input_ids=torch.arange(4).view(2, 2), attention_mask=torch.ones(2, 2))
    first = map_leaves(lambda leaf: leaf[:1], encoding)
    assert type(first) is type(encoding)
    assert first["input_ids"].tolist() == first.input_ids.tolist() == [[0, 1]]
    assert encoding["input_ids"].shape == (2, 2)
    assert {**first}.keys() == {"input_ids", "attention_mask"}


# ---- columns


@pytest.mark.parametrize(
    ("node", "column"),
    [
        (["a", "b"], True),
        (("a", "b"), True),
        ([b"a"], True),
        (["a", b"b"], True),
        ([], False),
        ((), False),
        (["a", 1], False),
        ([["a"]], False),
        ("ab", False),
        (Pair("a", "b"), False),
        (Rows(["a"]), False),
    ],
)
def test_a_column_is_a_plain_list_of_texts(node: Any, column: bool) -> None:
    assert is_column(node) is column


# ---- laws

TREES = st.recursive(
    st.integers() | st.none() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.builds(Pair, inner, inner)
        | st.builds(Frozen, inner)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3).map(Wrapped)
    ),
    max_leaves=12,
)


@given(TREES)
def test_taking_apart_and_putting_together_changes_nothing(tree: Any) -> None:
    found = list(leaves(tree))
    assert rebuild(tree, iter([leaf for _, leaf in found])) == tree
    assert len({path for path, _ in found}) == len(found)
    for path, leaf in found:
        assert _followed(tree, path) == leaf


@given(TREES)
def test_mapping_keeps_the_paths(tree: Any) -> None:
    marked = map_leaves(lambda leaf: (SimpleNamespace, leaf), tree)
    values = [marked_leaf for _, marked_leaf in leaves(marked)]
    assert values[1::2] == [leaf for _, leaf in leaves(tree)] or any(is_column(v) for _, v in leaves(tree))


def _followed(tree: Any, path: tuple[str | int, ...]) -> Any:
    for name in path:
        tree = getattr(tree, name) if isinstance(tree, Frozen) else tree[name]  # type: ignore[call-overload]
    return tree


class Held:
    """An object of a script's own."""

    def __init__(self, **items: Any) -> None:
        vars(self).update(items)


def test_objects_of_the_scripts_own_are_containers_of_their_attributes() -> None:
    x = torch.zeros(3)
    held = Held(x=x, count=3, more=[torch.ones(2)])
    assert [path_name(path) for path, _ in leaves({"h": held})] == ["batch['h'].x", "batch['h'].count", "batch['h'].more[0]"]
    assert map_leaves(lambda leaf: leaf, Held(x=x, count=3)).x is x
    changed = map_leaves(lambda leaf: leaf[:2] if isinstance(leaf, torch.Tensor) else leaf, held)
    assert type(changed) is Held and changed.x.shape == (2,) and held.x is x and changed.count == 3


def test_objects_without_tensors_and_objects_that_refer_to_each_other_are_leaves() -> None:
    one, other = Held(x=torch.zeros(1)), Held(x=torch.zeros(1))
    one.others, other.others = [other], [one]  # type: ignore[attr-defined]
    for node in (Held(count=3), one, torch.nn.Linear(1, 1)):
        assert [leaf for _, leaf in leaves(node)] == [node]
