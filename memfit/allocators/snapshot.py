"""Reads the pickle of torch.cuda.memory._snapshot() without running anything in it.

Not covered: stack frames, times and annotations, which are skipped; a device's total memory, which a snapshot does not hold.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from memfit._errors import UsageError
from memfit._units import GiB, format_bytes
from memfit.allocators.blocks import ADDRESS_BITS, NO_POOL
from memfit.allocators.layout import BlockView, SegmentView
from memfit.allocators.opcodes import objection
from memfit.allocators.settings import INTERVALS, UNLIMITED, VARIABLES, AllocatorSettings

HIGHEST_BITS, SIZE_BITS = ADDRESS_BITS - 1, 48
"""Bits that hold every address and size of a real process. A replay uses the addresses above for what it adds."""
DEVICE_BITS = 10
"""No machine has more than a thousand devices."""
LARGEST = 4 * GiB
"""Largest snapshot file, in bytes, that is read by default."""
_STATES = {"active_awaiting_free": "active_pending_free"}
"""A state's name in torch's documentation, and the one that torch's code writes."""
_HOW = "record it with torch.cuda.memory._record_memory_history() and torch.cuda.memory._dump_snapshot(path)"


class TraceEntry(NamedTuple):
    """One action of the allocator."""

    action: str
    """"alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap", "oom",
    "snapshot", "user_defined" or what later versions of torch add."""
    address: int
    """For "oom", the bytes the device had free."""
    size: int
    """Bytes of the request or the segment."""
    stream: int
    pool_id: tuple[int, int] | None
    """None if the version of torch did not record it."""


@dataclass(frozen=True)
class DeviceMemory:
    """One device's part of a snapshot."""

    trace: tuple[TraceEntry, ...]
    """The recorded entries, oldest first; what came before the first is unknown."""
    segments: tuple[SegmentView, ...]
    """The segments when the snapshot was taken, by address."""


@dataclass(frozen=True)
class Snapshot:
    """A snapshot of a process's device memory."""

    devices: tuple[DeviceMemory, ...]
    settings: AllocatorSettings
    """The recorded settings; the defaults if none were recorded."""
    settings_recorded: bool
    """Whether they could be read in full; only their text holds a segment size that is not torch's default."""


def read_snapshot(path: str | Path, *, largest: int = LARGEST) -> Snapshot:
    """Read a snapshot from a file of torch.cuda.memory._dump_snapshot.

    Raises UsageError if the file is too large, truncated, not a snapshot, or holds anything but containers and scalars. Nothing
    in it is run.
    """
    try:
        if Path(path).exists() and not Path(path).is_file():
            _refuse(path, "it is no file", "pass the path of a snapshot file")
        size = Path(path).stat().st_size
        if size > largest:
            _refuse(path, f"it has {format_bytes(size)}, more than {format_bytes(largest)}", f"largest={size} still reads it")
        data = Path(path).read_bytes()
    except OSError as error:
        _refuse(path, f"it cannot be read: {error.strerror}", "pass the path of a snapshot file")
    against = objection(data)
    if against is not None:
        _refuse(path, against, _HOW)
    return parse_snapshot(_load(path, data), name=str(path))


class _ContainersAlone(pickle.Unpickler):
    """An unpickler that loads no code and no outside references: a second guard behind the check of the opcodes."""

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}, which is code")

    def persistent_load(self, pid: Any, /) -> NoReturn:
        raise pickle.UnpicklingError("it refers to something outside the file")


def _load(path: str | Path, data: bytes) -> object:
    try:
        return _ContainersAlone(io.BytesIO(data)).load()
    except Exception as error:  # a damaged pickle can raise anything; no user code runs here
        _refuse(path, f"it does not unpickle: {error or type(error).__name__}", _HOW)


def _shown(value: object) -> str:
    """Describe a value briefly, however large or nested it is."""
    if isinstance(value, int):
        return str(value) if abs(value) < 1 << 70 else "a number of more than 70 bits"
    return repr(value)[:80] if isinstance(value, (str, bytes, float)) else f"a {type(value).__name__}"


def _refuse(name: object, found: str, next_move: str) -> NoReturn:
    raise UsageError(f"the memory snapshot {name}", found=found, next_move=next_move)


def parse_snapshot(content: object, *, name: str = "given as an object") -> Snapshot:
    """Parse what torch.cuda.memory._snapshot() returns. Raises UsageError for anything else."""
    if not isinstance(content, Mapping) or "segments" not in content or "device_traces" not in content:
        keys = ", ".join(map(_shown, islice(content, 5))) if isinstance(content, Mapping) else f"a {type(content).__name__}"
        _refuse(name, f"it holds {keys or 'nothing'}, not 'segments' and 'device_traces'", _HOW)
    reader = _Reader(name)
    traces = [
        tuple(reader.entry(entry, f"entry {at} of device {device}'s trace") for at, entry in enumerate(reader.rows(trace)))
        for device, trace in enumerate(reader.rows(content["device_traces"]))
    ]
    segments: dict[int, list[SegmentView]] = {}
    for at, segment in enumerate(reader.rows(content["segments"])):
        device = reader.number(segment, "device", f"segment {at}", default=0, bits=DEVICE_BITS)
        segments.setdefault(device, []).append(reader.segment(segment, f"segment {at}"))
    count = max([len(traces), *(device + 1 for device in segments)])
    devices = tuple(_device(traces[at] if at < len(traces) else (), segments.get(at, [])) for at in range(count))
    return Snapshot(devices, *reader.settings(content.get("allocator_settings")))


def _device(trace: tuple[TraceEntry, ...], segments: list[SegmentView]) -> DeviceMemory:
    return DeviceMemory(trace, tuple(sorted(segments, key=lambda each: each.address)))


class _Reader:
    """Reads values from a snapshot's dicts, and names the place of a wrong one."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._seen: dict[int, Sequence[Any]] = {}

    def wrong(self, where: str, found: str) -> NoReturn:
        _refuse(self.name, f"{where}: {found}", "record it again with torch.cuda.memory._dump_snapshot")

    def rows(self, value: object) -> Sequence[Any]:
        """Return a list that may appear only once: a few bytes could otherwise make one list be read a thousand times."""
        if not isinstance(value, (list, tuple)):
            self.wrong("a list", f"a {type(value).__name__}")
        if value and id(value) in self._seen:
            self.wrong("a list", f"its {len(value)} entries occur in several places")
        self._seen[id(value)] = value
        return value

    def number(self, row: object, key: str, where: str, *, default: int | None = None, bits: int = 64) -> int:
        """Return an unsigned integer of at most `bits` bits. Streams are recorded as signed: see `stream`."""
        if not isinstance(row, Mapping):
            self.wrong(where, f"a {type(row).__name__} instead of a dict")
        value = row.get(key, default)
        if type(value) is not int or not 0 <= value < 1 << bits:
            self.wrong(where, f"its {key!r} is {_shown(value)}, not a number from 0 on")
        return value

    def entry(self, row: Any, where: str) -> TraceEntry:
        action = row.get("action") if isinstance(row, Mapping) else None
        if not isinstance(action, str):
            self.wrong(where, "it has no action")
        place = "device_free" if action == "oom" and "device_free" in row else "addr"
        memory = "alloc" in action or "free" in action or "map" in action
        address = self.number(row, place, where, default=0, bits=HIGHEST_BITS if memory else 64)
        size = self.number(row, "size", where, default=0, bits=SIZE_BITS if memory else 64)
        return TraceEntry(action, address, size, self.stream(row, where), self.pool_id(row, "pool_id", where))

    def stream(self, row: Mapping[str, Any], where: str) -> int:
        value = row.get("stream", 0)
        if type(value) is not int or not -(2**63) <= value < 2**64:
            self.wrong(where, f"its stream is {_shown(value)}, not a number")
        return value % 2**64

    def pool_id(self, row: Mapping[str, Any], key: str, where: str) -> tuple[int, int] | None:
        value = row.get(key)
        if value is None:
            return None
        if not isinstance(value, (list, tuple)) or len(value) != 2 or any(type(part) is not int for part in value):
            self.wrong(where, f"its {key!r} is {_shown(value)}, not a pair of numbers")
        return value[0], value[1]

    def segment(self, row: Any, where: str) -> SegmentView:
        address = self.number(row, "address", where, bits=HIGHEST_BITS)
        kind = row.get("segment_type", "large")
        blocks, at = [], address
        for place, each in enumerate(self.rows(row.get("blocks", []))):
            block = self.block(each, at, f"block {place} of {where}")
            blocks.append(block)
            at += block.size
        size = self.number(row, "total_size", where)
        if at != address + size:
            self.wrong(where, f"its blocks have {at - address} bytes, not the segment's {size}")
        pool_id = self.pool_id(row, "segment_pool_id", where) or NO_POOL
        expandable = row.get("is_expandable", False) is True
        return SegmentView(address, size, self.stream(row, where), kind == "small", pool_id, expandable, tuple(blocks))

    def block(self, row: object, address: int, where: str) -> BlockView:
        size = self.number(row, "size", where, bits=SIZE_BITS)
        assert isinstance(row, Mapping)
        state = row.get("state")
        state = _STATES.get(state, state) if isinstance(state, str) else state
        if not isinstance(state, str) or state not in ("inactive", "active_allocated", "active_pending_free"):
            self.wrong(where, f"its state is {state!r}")
        if size == 0:
            self.wrong(where, "it has no bytes")
        return BlockView(address, size, self.number(row, "requested_size", where, default=size), state)

    def settings(self, row: Any) -> tuple[AllocatorSettings, bool]:
        """Return the recorded text's settings, overridden by the recorded values, and whether the text could be read."""
        if not isinstance(row, Mapping):
            return AllocatorSettings(), False
        text = next((row[name] for name in VARIABLES if isinstance(row.get(name), str)), "")
        try:
            return self._over(AllocatorSettings.from_text(text), row), True
        except UsageError:
            return self._over(AllocatorSettings(), row), False

    def _over(self, settings: AllocatorSettings, row: Mapping[str, Any]) -> AllocatorSettings:
        split, threshold = row.get("max_split_size"), row.get("garbage_collection_threshold")
        if type(split) is int:
            settings = replace(settings, max_split_size=UNLIMITED if split in (-1, 0) else split)
        if isinstance(threshold, float):
            settings = replace(settings, garbage_collection_threshold=threshold)
        if isinstance(row.get("expandable_segments"), bool):
            settings = replace(settings, expandable_segments=row["expandable_segments"])
        divisions = row.get("roundup_power2_divisions")
        if isinstance(divisions, Mapping) and len(divisions) == INTERVALS:
            counts = tuple(self.number(divisions, key, "roundup_power2_divisions") for key in divisions)
            settings = replace(settings, roundup_power2_divisions=counts)
        return settings
