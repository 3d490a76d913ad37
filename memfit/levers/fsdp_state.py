"""Shards as DTensors: converts full tensors to this rank's shard when a state is loaded, and gathers full tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from memfit.ranks.ranks import Ranks


def is_shard(value: Any) -> bool:
    """Whether a value is a DTensor, that is, one rank's shard."""
    return hasattr(value, "to_local")


def shard_like(value: Any, parameter: Any) -> Any:
    """Return this rank's shard of a full tensor that belongs to `parameter`. Anything else is returned unchanged."""
    if not isinstance(value, torch.Tensor) or is_shard(value) or value.shape != parameter.shape or not is_shard(parameter):
        return value
    from torch.distributed.tensor import DTensor

    local = parameter.to_local()
    start, stop = _rows(parameter)
    part = value.detach()[start:stop].to(device=local.device, dtype=value.dtype, copy=True)
    return DTensor.from_local(
        part, parameter.device_mesh, parameter.placements, run_check=False, shape=value.shape, stride=parameter.stride()
    )


def _rows(part: Any, rank: int | None = None) -> tuple[int, int]:
    """Return the rows that a rank holds, as torch.chunk splits them."""
    mesh = part.device_mesh
    each = -(-part.shape[0] // mesh.size()) if part.shape[0] else 0
    start = min(part.shape[0], each * (mesh.get_local_rank() if rank is None else rank))
    return start, min(part.shape[0], start + each)


def load_as_shards(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before a module loads its own parameters, replace full tensors by shards for the sharded parameters."""
    for name, p in module._parameters.items():
        if prefix + name in state and p is not None:
            state[prefix + name] = shard_like(state[prefix + name], p)


def full_tensor(part: Any, asking: Sequence[int], ranks: Ranks) -> torch.Tensor | None:
    """Gather the full tensor on the host of the requesting ranks."""
    local = part.to_local().detach().cpu().contiguous()
    mine = ranks.rank in asking
    whole = torch.empty(part.shape, dtype=part.dtype) if mine else None
    for owner in range(ranks.size):
        start, stop = _rows(part, owner)
        if start == stop:
            continue
        if owner == ranks.rank:
            for rank in asking:
                if rank != owner:
                    dist.send(local, ranks.everywhere(rank), group=ranks.talk)
            if whole is not None:
                whole[start:stop] = local
        elif whole is not None:
            dist.recv(whole[start:stop], ranks.everywhere(owner), group=ranks.talk)
    return whole
