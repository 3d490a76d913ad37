"""Counts the FLOPs and the memory traffic of operations while a step is traced.

FLOPs are torch's own count (torch.utils.flop_counter), which covers matrix products, convolutions and attention. All other
operations are bound by memory. Not covered: operations of other libraries.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from memfit.profiling.operations import Operations


class Counts:
    """Collects the operations of a step, in order."""

    def __init__(self) -> None:
        from torch.utils.flop_counter import flop_registry

        self._registry = {**flop_registry, **{cpu: flop_registry[gpu] for cpu, gpu in _SAME.items()}}
        self._kinds: dict[tuple[str, str], int] = {}
        self._names: dict[Any, str] = {}
        self.restart()

    def restart(self) -> None:
        """Discards the operations counted so far."""
        self._rows: list[tuple[float, float, int, int, int]] = []

    def name(self, func: Any) -> str:
        """Returns the name of an operation, without overload and "aten."."""
        found = self._names.get(func)
        if found is None:
            found = self._names[func] = str(func._overloadpacket).removeprefix("aten.")
        return found

    def add(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, out: Any, event: int, owner: int) -> None:
        """Counts one operation; `event` is the next event of the timeline, `owner` the index of the module it runs for."""
        if func.is_view or func in _FREE:
            return
        given, made = _tensors(args), _tensors(out if isinstance(out, (tuple, list)) else (out,))
        moved = sum(t.numel() * t.element_size() for t in (*given, *made))
        count = self._registry.get(func._overloadpacket)
        flops = 0.0 if count is None else float(count(*args, **(kwargs or {}), out_val=out))
        dtype = str((given or made)[0].dtype).removeprefix("torch.") if given or made else ""
        kind = self._kinds.setdefault((self.name(func), dtype), len(self._kinds))
        self._rows.append((flops, float(moved), event, owner, kind))

    def operations(self, owners: tuple[str, ...]) -> Operations:
        """Returns the operations counted since the last restart, with all figures as fixed."""
        rows = np.array(self._rows, dtype=np.float64).reshape(-1, 5)
        none = np.zeros(len(rows))
        whole = rows[:, 2:].astype(np.int32)
        return Operations(rows[:, 0], none, rows[:, 1], none, whole[:, 0], whole[:, 1], whole[:, 2], owners, tuple(self._kinds))


def _tensors(values: Any) -> list[torch.Tensor]:
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += [item for item in value if isinstance(item, torch.Tensor)]
    return [t for t in found if t.layout is torch.strided]


_SAME = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: torch.ops.aten._scaled_dot_product_flash_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        torch.ops.aten._scaled_dot_product_flash_attention_backward
    ),
}
"""Operations without a FLOP formula in torch, and operations with the same arguments that have one."""
_FREE = frozenset(
    {
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.new_empty.default,
        torch.ops.aten.new_empty_strided.default,
        torch.ops.aten._unsafe_view.default,
        torch.ops.aten.detach.default,
        torch.ops.aten._local_scalar_dense.default,
    }
)
"""Operations that move no data."""
