"""How a loader worker hands samples that are not collated yet to the main process.

Sent as they are, each tensor of each sample would occupy a shared-memory file of its own, and a view would drag the
storage it looks into along. Packed, the samples of one piece are one stream of bytes and one buffer in shared memory.
Tensors and arrays lie in the buffer; everything else (images, texts, numbers, sparse tensors, tensor subclasses) is
pickled as usual inside the stream. Not covered: samples that cannot be pickled, which are refused, and objects shared
by two samples, which arrive as one copy each.
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

_ALIGNMENT = 64  # bytes: what torch's own allocator gives, so kernels see the alignment they are used to


@dataclass(frozen=True, eq=False, repr=False)
class Packed(Sequence[Any]):
    """Samples on their way between processes: a sequence that unpickles one sample at a time, and anew each time.

    Tensors and arrays are writable views of `buffer`, never copies of it.
    """

    stream: bytes
    """The pickles of the samples, one after another."""
    ends: tuple[int, ...]
    """Where each sample's pickle ends in `stream`, in bytes."""
    spans: tuple[tuple[tuple[int, int], ...], ...]
    """Per sample the start and the length, in bytes, of each of its tensors and arrays in `buffer`."""
    buffer: torch.Tensor | None
    """The contents of all tensors and arrays, as bytes; None if there are none."""

    def __len__(self) -> int:
        return len(self.ends)

    def __iter__(self) -> Iterator[Any]:
        # Not Sequence's own: that one takes an IndexError raised inside a sample for the end.
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
        """The same samples in this process's own memory, so that the shared memory and its file are free again."""
        return self if self.buffer is None else replace(self, buffer=self.buffer.clone())

    def _unpickle(self, i: int) -> Any:
        pickled = memoryview(self.stream)[self.ends[i - 1] if i else 0 : self.ends[i]]
        memory = memoryview(b"") if self.buffer is None else self.buffer.numpy().data
        return pickle.loads(pickled, buffers=[memory[start : start + length] for start, length in self.spans[i]])


class Kept(list[Any]):
    """Samples that never left the process: what stands for `Packed` where there are no workers."""


class PackingCollate:
    """Stands in the place of `collate_fn` inside workers and packs the samples instead.

    A failure to pack is handed over as a value: torch rebuilds a worker's exceptions from their text, and an error in
    three parts would not survive that.
    """

    def __call__(self, samples: Any) -> Packed | UsageError:
        try:
            return pack(_listed(samples))
        except UsageError as error:
            return error


def keep(samples: Any) -> Kept:
    """Stands in the place of `collate_fn` where there are no workers."""
    return Kept(_listed(samples))


def pack(samples: list[Any]) -> Packed:
    """The samples as one stream and one buffer.

    Raises UsageError if a sample cannot be pickled.
    """
    stream = io.BytesIO()
    ends: list[int] = []
    buffers: list[list[memoryview]] = []
    for sample in samples:
        buffers.append(_pickle_into(stream, sample))
        ends.append(stream.tell())
    spans, total = _spans(buffers)
    return Packed(stream.getvalue(), tuple(ends), spans, _filled(total, spans, buffers) if total else None)


def unpack(packed: Packed) -> list[Any]:
    """All samples of `packed`."""
    return list(packed)


def _pickle_into(stream: io.BytesIO, sample: Any) -> list[memoryview]:
    found: list[pickle.PickleBuffer] = []
    try:
        _Pickler(stream, protocol=5, buffer_callback=found.append).dump(sample)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise UsageError(
            "effective batches of samples that loader workers read",
            found=f"a sample of type {type(sample).__qualname__} cannot be pickled: {error}",
            next_move="let the dataset return only what can be pickled (tensors, arrays, numbers, texts), "
            "or load with num_workers=0",
        ) from error
    return [buffer.raw() for buffer in found]


def _spans(buffers: list[list[memoryview]]) -> tuple[tuple[tuple[tuple[int, int], ...], ...], int]:
    """Aligned places for all buffers, and the bytes they take together."""
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
    """Ordinary pickling, except that plain tensors and strided arrays go out of band with their own elements only."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor and _is_plain(obj):
            return _reduce_tensor(obj)
        if type(obj) is np.ndarray and not obj.dtype.hasobject and not obj.flags.forc:
            return np.ascontiguousarray(obj).__reduce_ex__(5)  # NumPy itself would pickle it in band
        return NotImplemented


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its elements are all there is to it, and lie in this process's memory as they read."""
    dense = tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.is_nested
    return dense and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or vars(tensor))


def _reduce_tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.requires_grad and not tensor.is_leaf:
        # In torch's words, as when the tensor itself is sent between processes.
        raise RuntimeError(
            "Cowardly refusing to serialize non-leaf tensor which requires_grad, since autograd does not support "
            "crossing process boundaries. If you just want to transfer the data, call detach() on the tensor."
        )
    values = tensor.detach()
    if torch.empty_like(values, device="meta").stride() != values.stride():  # gaps or repeats: not its own memory
        values = values.clone()
    flat = values.as_strided((values.numel(),), (1,), values.storage_offset())  # in the order of memory
    memory = pickle.PickleBuffer(flat.view(torch.uint8).numpy().data)
    return _tensor, (memory, values.dtype, tuple(values.shape), values.stride(), tensor.requires_grad)


def _tensor(
    memory: memoryview, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], requires_grad: bool
) -> torch.Tensor:
    if not memory.nbytes:
        return torch.empty_strided(shape, stride, dtype=dtype, device="cpu").requires_grad_(requires_grad)
    # `set_` and not a view: views of one tensor share its version counter, and changing one sample in place would
    # forbid the backward through all others.
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
