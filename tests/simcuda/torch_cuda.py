"""What `torch.cuda` bound while it was imported: classes of streams, events, properties; and storages made by themselves."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, NoReturn

import torch


class Properties:
    """What `torch.cuda.get_device_properties` tells."""

    def __init__(self, name: str, capability: tuple[int, int], total_memory: int, number: int) -> None:
        self.name = self.gcnArchName = name
        self.major, self.minor = capability
        self.total_memory = total_memory
        self.multi_processor_count = 108
        self.is_integrated = self.is_multi_gpu_board = 0
        self.max_threads_per_multi_processor, self.max_threads_per_block, self.warp_size = 2048, 1024, 32
        self.regs_per_multiprocessor, self.L2_cache_size = 65536, 40 << 20
        self.shared_memory_per_block, self.shared_memory_per_block_optin = 48 << 10, 163 << 10
        self.shared_memory_per_multiprocessor = 164 << 10
        self.clock_rate, self.memory_clock_rate, self.memory_bus_width = 1410000, 1215000, 5120
        self.uuid = f"51d0c0da-0000-0000-0000-{number:012x}"
        self.pci_bus_id, self.pci_device_id, self.pci_domain_id = number + 1, 0, 0

    def __repr__(self) -> str:
        return (
            f"_CudaDeviceProperties(name='{self.name}', major={self.major}, minor={self.minor}, "
            f"total_memory={self.total_memory >> 20}MB, multi_processor_count={self.multi_processor_count}, uuid={self.uuid})"
        )


class _StreamBase(torch.Stream):
    def __new__(cls, priority: int = 0, stream_id: int = 0, device_index: int = 0, device_type: int = 0, stream_ptr: int = 0):
        if device_type:
            return super().__new__(cls, stream_id=stream_id, device_index=device_index, device_type=device_type)
        return super().__new__(cls, torch.device("cuda", torch.cuda.current_device()), priority=priority)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    @property
    def priority(self) -> int:
        return 0

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -5


class _EventBase(torch.Event):
    """Keeps an event of the very class torch.Event: its own methods take no subclasses."""

    plain: torch.Event

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False):
        here = torch.device("cuda", torch.cuda.current_device())
        made = super().__new__(cls, here, enable_timing=enable_timing)
        made.plain = torch.Event(here, enable_timing=enable_timing)
        return made

    def record(self, stream: Any = None) -> None:
        self.plain.record(stream)

    def wait(self, stream: Any = None) -> None:
        self.plain.wait(stream)

    def query(self) -> bool:
        return self.plain.query()

    def synchronize(self) -> None:
        self.plain.synchronize()

    def elapsed_time(self, other: Any) -> float:
        return self.plain.elapsed_time(getattr(other, "plain", other))

    @property
    def cuda_event(self) -> int:
        return self.plain.event_id


class _NoGraph:
    """Refused by name: what a graph captured would have to run again."""

    def __new__(cls, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("the simulated device has no CUDA graphs and no private memory pools")


def fill(native: Any, *, name: str, capability: tuple[int, int], visible: Sequence[int]) -> None:
    """Put them there."""

    def properties(index: int) -> Properties:
        return Properties(name, capability, native.capacity(index), visible[index])

    core: Any = torch._C
    core._CudaStreamBase, core._CudaEventBase, core._CudaDeviceProperties = _StreamBase, _EventBase, Properties
    core._CUDAGraph = core._MemPool = _NoGraph
    here: Any = torch.cuda
    streams = importlib.reload(here.streams)
    here.Stream, here.Event, here.ExternalStream = streams.Stream, streams.Event, streams.ExternalStream
    here._cudart = core._cudart
    here._exchange_device = here._maybe_exchange_device = native.exchange_device
    here._is_in_bad_fork = core._cuda_isInBadFork
    here._CudaDeviceProperties, here._get_device_properties = Properties, properties
    here.default_generators = tuple(native.default_generator(i) for i in range(native.device_count()))
    here.CUDAGraph = here.graphs.CUDAGraph = here.MemPool = here.memory.MemPool = _NoGraph
    here.is_current_stream_capturing = here.graphs.is_current_stream_capturing = lambda: False
    torch.version.cuda = "12.8"
    torch.backends.cudnn.is_acceptable = lambda tensor: False  # without the warning that there is none
    _fill_storage()


def _fill_storage() -> None:
    """The CPU build refuses storages of other devices that are made by themselves."""
    plain = torch.UntypedStorage.__new__

    def new(cls: type, *args: Any, device: Any = None, **rest: Any) -> Any:
        if device is None or torch.device(device).type != "cuda":
            return plain(cls, *args, **rest) if device is None else plain(cls, *args, device=device, **rest)
        length = args[0] if args and isinstance(args[0], int) else len(args[0]) if args else 0
        made = torch.empty(length, dtype=torch.uint8, device=device)
        if args and not isinstance(args[0], int):
            made.copy_(torch.tensor(list(args[0]), dtype=torch.uint8))
        return made.untyped_storage()

    torch.UntypedStorage.__new__ = new
