"""A backend by the name of nccl: gloo, given the device's memory as the host's (`native/kernels/collectives.cpp`)."""

from __future__ import annotations

from datetime import timedelta
from typing import Any


class _Options:
    """What a script may set; none of it means anything here."""

    def __init__(self) -> None:
        self.is_high_priority_stream = False
        self._timeout = timedelta(minutes=10)


def fill() -> None:
    """Put it where `torch.distributed` looks for it."""
    import torch.distributed.distributed_c10d as c10d

    if not c10d._GLOO_AVAILABLE or c10d._NCCL_AVAILABLE:
        return

    class ProcessGroupNCCL(c10d.ProcessGroupGloo):
        """Gloo's, which answers to the other name."""

        Options = _Options

        def __init__(self, store: Any, rank: int, size: int, options: _Options) -> None:
            super().__init__(store, rank, size, timeout=options._timeout)

    module: Any = c10d
    module.ProcessGroupNCCL = ProcessGroupNCCL
    module._NCCL_AVAILABLE, module.default_pg_nccl_timeout = True, _Options()._timeout
