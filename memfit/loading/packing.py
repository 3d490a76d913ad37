"""Packs samples that are not collated yet, to send them from a loader worker to the main process.

Sent as they are, each tensor of each sample would take a shared-memory file, and a view would bring along its whole
storage. Packed, the samples of one piece are one stream of bytes and one buffer in shared memory. Tensors and arrays
are in the buffer; everything else (images, texts, numbers, sparse tensors, tensor subclasses) is pickled as usual
inside the stream. Not covered: samples that cannot be pickled, which are refused, and objects shared by two samples,
which arrive as one copy each.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import numpy as np
import torch

from memfit._errors import UsageError

_ALIGNMENT = 64  # bytes: that of torch's own allocator, so that kernels see their usual alignment


@dataclass(frozen=True, eq=False, repr=False)
class Packed(Sequence[Any]):
    """Holds samples sent between processes: a sequence that unpickles one sample on every access.

    Tensors and arrays are writable views of `buffer`, never copies.
    """

    stream: bytes
    """The pickles of the samples, one after another."""
    ends: tuple[int, ...]
    """Where each sample's pickle ends in `stream`, in bytes."""
    spans: tuple[tuple[tuple[int, int], ...], ...]
    """Per sample, the (start, length) in bytes of each of its tensors and arrays in `buffer`."""
    buffer: torch.Tensor | None
    """The contents of all tensors and arrays, as bytes; None if there are none."""

    def __len__(self) -> int:
        return len(self.ends)

    def __iter__(self) -> Iterator[Any]:
        # Not Sequence.__iter__, which takes an IndexError raised inside a sample for the end.
        return map(self._unpickle, range(len(self)))

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self._unpickle(i) for i in range(*index.indices(len(self)))]
        return self._unpickle(range(len(self))[index])

    def owned(self) -> Packed:
        """Return the same samples in this process's own memory, which frees the shared memory and its file."""
        return self if self.buffer is None else replace(self, buffer=self.buffer.clone())

    def _unpickle(self, i: int) -> Any:
        pickled = memoryview(self.stream)[self.ends[i - 1] if i else 0 : self.ends[i]]
        memory = memoryview(b"") if self.buffer is None else self.buffer.numpy().data
        return pickle.loads(pickled, buffers=[memory[start : start + length] for start, length in self.spans[i]])


class LocalSamples(list[Any]):
    """Holds samples that never left the process; replaces `Packed` without workers."""


class PackingCollate:
    """Replaces `collate_fn` inside workers and packs the samples instead.

    A failure to pack is returned as a value: torch rebuilds a worker's exceptions from their text, and an error in
    three parts would not survive that.
    """

    def __call__(self, samples: Any) -> Packed | UsageError:
        try:
            return pack(_listed(samples))
        except UsageError as error:
            return error


def keep(samples: Any) -> LocalSamples:
    """Replace `collate_fn` without workers: keep the samples as they are."""
    return LocalSamples(_listed(samples))


def pack(samples: list[Any]) -> Packed:
    """Pack the samples into one stream and one buffer. Raises UsageError if a sample cannot be pickled."""
    stream = io.BytesIO()
    ends: list[int] = []
    buffers: list[list[memoryview]] = []
    for sample in samples:
        buffers.append(_pickle_into(stream, sample))
        ends.append(stream.tell())
    spans, total = _spans(buffers)
    return Packed(stream.getvalue(), tuple(ends), spans, _filled(total, spans, buffers) if total else None)


def unpack(packed: Packed) -> list[Any]:
    """Return all samples of `packed`."""
    return list(packed)


def _pickle_into(stream: io.BytesIO, sample: Any) -> list[memoryview]:
    found: list[pickle.PickleBuffer] = []
    try:
        _Pickler(stream, protocol=5, buffer_callback=found.append).dump(sample)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise UsageError(
            "effective batches of samples that loader workers read",
            found=f"a sample of type {type(sample).__qualname__} cannot be pickled: {error}",
            next_move="let the dataset return only picklable objects (tensors, arrays, numbers, strings), "
            "or load with num_workers=0",
        ) from error
    return [buffer.raw() for buffer in found]


def _spans(buffers: list[list[memoryview]]) -> tuple[tuple[tuple[tuple[int, int], ...], ...], int]:
    """Aligned places for all buffers, and their total bytes."""
    total, spans = 0, []
    for of_sample in buffers:
        places = []
        for memory in of_sample:
            places.append((total, memory.nbytes))
            total += -(-memory.nbytes // _ALIGNMENT) * _ALIGNMENT
        spans.append(tuple(places))
    return tuple(spans), total


def _filled(total: int, spans: Iterable[Iterable[tuple[int, int]]], buffers: list[list[memoryview]]) -> torch.Tensor:
    whole = torch.empty(total, dtype=torch.uint8, device="cpu")
    memory = whole.numpy().data
    for places, of_sample in zip(spans, buffers):
        for (start, length), source in zip(places, of_sample):
            memory[start : start + length] = source
    return whole


class _Pickler(pickle.Pickler):
    """Pickles as usual, but sends plain tensors and strided arrays out of band with their own elements only."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor and _is_plain(obj):
            return _reduce_tensor(obj)
        if type(obj) is np.ndarray and not obj.dtype.hasobject and not obj.flags.forc:
            return np.ascontiguousarray(obj).__reduce_ex__(5)  # NumPy itself would pickle it in band
        return NotImplemented


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor has nothing beside its elements, and this process's memory holds their values."""
    dense = tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.is_nested
    return dense and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or vars(tensor))


def _reduce_tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.requires_grad and not tensor.is_leaf:
        # torch's own error for sending such a tensor between processes
        raise RuntimeError(
            "Cowardly refusing to serialize non-leaf tensor which requires_grad, since autograd does not support "
            "crossing process boundaries. If you just want to transfer the data, call detach() on the tensor."
        )
    values = tensor.detach()
    if torch.empty_like(values, device="meta").stride() != values.stride():  # gaps or repeats: not its own elements alone
        values = values.clone()
    flat = values.as_strided((values.numel(),), (1,), values.storage_offset())  # in memory order
    memory = pickle.PickleBuffer(flat.view(torch.uint8).numpy().data)
    return _tensor, (memory, values.dtype, tuple(values.shape), values.stride(), tensor.requires_grad)


def _tensor(
    memory: memoryview, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], requires_grad: bool
) -> torch.Tensor:
    if not memory.nbytes:
        return torch.empty_strided(shape, stride, dtype=dtype, device="cpu").requires_grad_(requires_grad)
    # `set_`, not a view: views of one tensor share its version counter, so that changing one sample in place would
    # break the backward through all others.
    storage = torch.frombuffer(memory, dtype=dtype).untyped_storage()
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, shape, stride).requires_grad_(requires_grad)


def _listed(samples: Any) -> list[Any]:
    if isinstance(samples, list):
        return samples
    raise UsageError(
        "effective batches put together from samples",
        found=f"the dataset's __getitems__ returns a whole {type(samples).__qualname__}, not a list of samples",
        next_move="return a list with one item per index, or let the dataset yield whole batches with batch_size=None",
    )
