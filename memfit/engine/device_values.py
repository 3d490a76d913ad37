"""Compares a few values of tensors on an accelerator with what they were before, without waiting for the device.

Whether they differ is known once the comparison has arrived at the host, usually a step later. Not covered: other values than
these few, and devices without events.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

import torch

from memfit._errors import Refused
from memfit.engine.async_reads import AsyncReads
from memfit.hardware.clock import has_events
from memfit.hardware.exhausted import is_out_of_memory, retry_on_oom

MakeError = Callable[[], Refused]
VALUES = 16
"""Number of values compared per tensor."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The dtype by element size that values are compared in, so that NaN equals itself."""
CONCATENATED = frozenset((
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool,
))  # fmt: skip
"""Dtypes that `torch.cat` takes on every device; others are read as integers of their size."""


class DeviceValues:
    """A few values of tensors, as they are now."""

    @classmethod
    def of(cls, tensors: Mapping[int, torch.Tensor]) -> DeviceValues | None:
        """Return the values of these strided tensors with elements, by index. None if there are none, or no memory for them."""
        try:
            return cls(tensors) if tensors else None
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return None

    def __init__(self, tensors: Mapping[int, torch.Tensor]) -> None:
        self._few: dict[tuple[torch.device, torch.dtype], dict[int, torch.Tensor]] = defaultdict(dict)
        with torch.no_grad():
            for i, tensor in tensors.items():
                if has_events(tensor.device):
                    few = few_of(tensor)
                    self._few[few.device, few.dtype][i] = few
        self._before = [bits_of(few.values()) for few in self._few.values()]

    def compare(self, error_of: Callable[[int], MakeError | None]) -> None:
        """Start to compare the values with those of now. `error_of` returns what makes the error if the tensor of an index
        differs; None: it may differ."""
        for ((device, _), few), before in zip(self._few.items(), self._before, strict=True):
            about = [(error_of(i), values.numel()) for i, values in few.items()]
            if any(make is not None for make, _ in about):
                try:
                    differs = retry_on_oom(lambda few=few, before=before: bits_of(few.values()) != before, device)
                except Exception as error:
                    if is_out_of_memory(error):
                        continue
                    raise
                _read_later(about, differs)

    def found_different(self) -> list[Refused]:
        """Return the errors of tensors that differed, from comparisons on these devices, of whatever step, that have arrived
        since the last call."""
        return _found({device for device, _ in self._few})


def read_later(error: MakeError, differs: torch.Tensor) -> None:
    """Start to read whether something differs, which is this error."""
    _read_later([(error, 1)], differs.view(1))


def _read_later(about: list[tuple[MakeError | None, int]], differs: torch.Tensor) -> None:
    with _LOCK:
        _READS.setdefault(differs.device, AsyncReads(differs.device)).add(about, differs)


_LOCK = threading.Lock()
_READS: dict[torch.device, AsyncReads[list[tuple[MakeError | None, int]]]] = {}
"""The comparisons that have not arrived. A result concerns an earlier step, and is told in whichever comes next."""


def found_at_the_end(device: torch.device) -> list[Refused]:
    """Wait for the comparisons on this device. Return the errors of tensors that differed."""
    with _LOCK:
        reads = _READS.get(device)
    if reads is not None:
        with suppress(RuntimeError):  # a device that failed has told so before
            reads.wait()
    return _found({device})


def _found(devices: Iterable[torch.device]) -> list[Refused]:
    with _LOCK:  # autograd runs a thread per device
        arrived = [each for device in devices if device in _READS for each in _READS[device].arrived()]
    found: list[Refused] = []
    for about, differs in arrived:
        parts = differs.split([size for _, size in about])
        pairs = zip((make for make, _ in about), parts, strict=True)
        found += [make() for make, part in pairs if make is not None and bool(part.numpy().any())]
    return found


def few_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a few values, spread evenly over the storage if the tensor fills it, else over each dimension."""
    values = tensor if tensor.dtype in CONCATENATED else tensor.view(INTEGERS[tensor.itemsize])
    if values.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(values):
        step = max(1, tensor.numel() // VALUES)
        return values.as_strided((-(-tensor.numel() // step),), (step,))
    each = round(VALUES ** (1 / sum(size > 1 for size in tensor.shape)))
    return values[tuple(slice(None, None, max(1, size // each)) for size in tensor.shape)]


def bits_of(few: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return a copy of these values in one tensor, bit for bit, so that NaN equals itself."""
    with torch.no_grad():
        values = torch.cat([each if each.dim() == 1 else each.flatten() for each in few])
        return values.view(INTEGERS[values.itemsize])
