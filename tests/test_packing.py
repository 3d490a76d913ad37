"""Packing: what a worker hands over arrives equal, takes its own bytes only, and costs one piece of shared memory."""

import collections
import io
import pickle
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch

from memfit._errors import UsageError
from memfit.loading.packing import LocalSamples, PackingCollate, keep, pack, unpack

Pair = collections.namedtuple("Pair", "image label")


@dataclass
class Record:
    """A sample of a type of the user's own."""

    tokens: torch.Tensor
    text: str


class Marked(torch.Tensor):
    """A tensor subclass, as torchvision's images are."""


class Unlucky:
    """Fails with the very error that ends the iteration of a sequence."""

    def __reduce__(self):
        return [].pop, ()


class Watched:
    """Counts how many of its kind have been unpickled."""

    arrived = 0

    def __getstate__(self):
        return "something"

    def __setstate__(self, state):
        Watched.arrived += 1


def comparable(tensor):
    dense = tensor.detach().to_dense()
    return dense.view(torch.uint8) if dense.dtype is torch.float8_e4m3fn else dense  # no comparison before torch 2.6


def same(left, right):
    """Whether two samples are equal: types, values, dtypes, shapes."""
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        assert (left.dtype, left.shape, left.layout, left.requires_grad) == (
            right.dtype,
            right.shape,
            right.layout,
            right.requires_grad,
        )
        assert torch.equal(comparable(left), comparable(right))
    elif isinstance(left, np.ndarray):
        assert (left.dtype, left.shape, left.flags.writeable) == (right.dtype, right.shape, right.flags.writeable)
        assert np.array_equal(left, right)
    elif isinstance(left, dict):
        assert list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right) and all(same(a, b) for a, b in zip(left, right))
    elif isinstance(left, Record):
        assert same(vars(left), vars(right))
    else:
        assert left == right
    return True


def readonly(array):
    array.flags.writeable = False
    return array


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
SAMPLES = {
    **{str(dtype): (torch.randn(3, 4) * 5).to(dtype) for dtype in [*DTYPES, torch.complex64, torch.float8_e4m3fn]},
    "no dimension": torch.tensor(3.5),
    "no element": torch.empty(0, 3),
    "transposed": torch.randn(4, 6).t(),
    "channels last": torch.randn(1, 3, 4, 5).to(memory_format=torch.channels_last),
    "every second": torch.randn(10, 10)[:, ::2],
    "expanded": torch.randn(1, 3).expand(4, 3),
    "trained": torch.randn(3, requires_grad=True),
    "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
    "negated": torch.randn(3, dtype=torch.complex64).conj().imag,
    "sparse": torch.eye(4).to_sparse(),
    "subclass": torch.randn(3).as_subclass(Marked),
    "parameter": torch.nn.Parameter(torch.randn(3)),
    "array": np.arange(6.0).reshape(2, 3),
    "column-major array": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "flipped array": np.arange(6)[::-1],
    "array without dimension": np.array(7),
    "empty array": np.empty((0, 2), np.float32),
    "read-only array": readonly(np.arange(4)),
    "structured array": np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    "object array": np.array(["a", None], dtype=object),
    "number": 3,
    "text": "Zürich",
    "nothing": None,
    "nested": {"a": [torch.arange(3), (np.ones(2), "x")], "b": Pair(torch.ones(2), 1)},
    "own type": Record(torch.arange(5), "five"),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_arrives_equal(name):
    sample = SAMPLES[name]
    packed = pickle.loads(pickle.dumps(pack([torch.zeros(5), sample, (sample, sample)])))
    assert same(sample, packed[1])
    assert same((sample, sample), packed[-1])


@pytest.mark.parametrize("name", ["transposed", "channels last", "no element", "trained", "torch.bfloat16"])
def test_strides_of_dense_tensors_are_kept(name):
    assert pack([SAMPLES[name]])[0].stride() == SAMPLES[name].stride()


def test_one_object_twice_in_a_sample_stays_one_object():
    shared = torch.arange(3)
    first, second = pack([(shared, shared)])[0]
    assert first is second


def test_attributes_of_a_tensor_travel_along():
    sample = torch.arange(3)
    sample.label = "seven"
    assert pack([sample])[0].label == "seven"


def test_tensors_and_arrays_are_writable_views_of_the_one_buffer():
    packed = pack([(torch.ones(3), np.ones(3)) for _ in range(4)])
    first = packed.buffer.data_ptr()
    for tensor, array in unpack(packed):
        for address in (tensor.data_ptr(), array.__array_interface__["data"][0]):
            assert first <= address < first + packed.buffer.nbytes
            assert address % 64 == 0
        tensor += 1
        array += 1
    assert all((tensor == 2).all() and (array == 2).all() for tensor, array in packed)


def test_changing_one_sample_in_place_leaves_the_backward_through_another_alone():
    (first, second), weight = unpack(pack([torch.ones(3), torch.ones(3)])), torch.ones(3, requires_grad=True)
    loss = (first * weight).sum()
    second.mul_(2)
    loss.backward()
    assert torch.equal(weight.grad, torch.ones(3))


@pytest.mark.parametrize("big", [torch.zeros(2**20), np.zeros(2**20, np.float32)], ids=["tensor", "array"])
def test_a_view_does_not_drag_its_storage_along(big):
    packed = pack([big[8:24], big[: 2**19].reshape(2**9, 2**10)[:4, 1:3]])
    assert packed.buffer.nbytes + len(packed.stream) < 1000
    assert [tuple(sample.shape) for sample in packed] == [(16,), (4, 2)]


def test_contents_travel_in_the_buffer_and_not_in_the_stream():
    packed = pack([(torch.zeros(1000), np.zeros(1000), np.zeros((50, 40))[:, ::2]) for _ in range(3)])
    assert len(packed.stream) < 3 * 1000
    assert packed.buffer.nbytes >= 3 * (4000 + 8000 + 8000)


def test_between_processes_a_piece_is_one_piece_of_shared_memory():
    packed = pack([[torch.zeros(10) for _ in range(20)] for _ in range(8)])
    wire = io.BytesIO()
    ForkingPickler(wire, 5).dump(packed)
    assert wire.getvalue().count(b"rebuild_storage_fd") + wire.getvalue().count(b"rebuild_storage_filename") == 1
    assert packed.buffer.is_shared()
    assert not packed.owned().buffer.is_shared()
    assert same(unpack(packed), unpack(packed.owned()))


def test_nothing_to_share_means_no_shared_memory():
    packed = pack([("text", 3), torch.empty(0)])
    assert packed.buffer is None and packed.owned() is packed
    assert same([("text", 3), torch.empty(0)], unpack(packed))


def test_samples_are_unpacked_one_at_a_time():
    packed, Watched.arrived = pack([Watched() for _ in range(5)]), 0
    assert isinstance(packed[3], Watched)
    assert Watched.arrived == 1
    assert len(packed[1:4]) == 3 and Watched.arrived == 4


def test_an_index_error_in_a_sample_is_not_the_end():
    with pytest.raises(IndexError, match="pop"):
        unpack(pack([1, Unlucky(), 3]))


def test_positions_behave_like_those_of_a_list():
    packed = pack([10, 11, 12])
    assert [packed[-1], packed[0], *packed[::-1]] == [12, 10, 12, 11, 10]
    with pytest.raises(IndexError):
        packed[3]


def test_a_default_device_of_the_script_is_not_used():
    with torch.device("meta"):
        packed = pack([torch.ones(2, device="cpu"), torch.empty(0, device="cpu")])
        assert [sample.device.type for sample in unpack(packed.owned())] == ["cpu", "cpu"]


def test_a_tensor_with_history_is_refused_as_torch_refuses_it():
    with pytest.raises(RuntimeError, match="Cowardly refusing"):
        pack([torch.ones(3, requires_grad=True) * 2])


def test_what_cannot_be_pickled_is_named():
    with pytest.raises(UsageError, match="a sample of type dict cannot be pickled") as caught:
        pack([1, {"transform": lambda x: x}])
    assert "num_workers=0" in caught.value.next_move


def test_the_stand_in_for_collate_hands_its_error_over_as_a_value():
    stand_in = pickle.loads(pickle.dumps(PackingCollate()))
    assert same([1, torch.ones(2)], unpack(stand_in([1, torch.ones(2)])))
    error = pickle.loads(pickle.dumps(stand_in([lambda: None])))
    assert isinstance(error, UsageError) and "cannot be pickled" in error.found


@pytest.mark.parametrize("whole", [torch.ones(3, 2), {"x": torch.ones(3)}, (torch.ones(3), torch.ones(3))])
def test_whole_batches_from_getitems_are_refused(whole):
    assert "__getitems__" in PackingCollate()(whole).found
    with pytest.raises(UsageError, match="__getitems__"):
        keep(whole)


def test_without_workers_samples_are_kept_as_they_are():
    sample = torch.ones(2)
    kept = keep([sample])
    assert isinstance(kept, LocalSamples) and kept[0] is sample
