"""Units of FSDP2: shards every block, other large modules and the rest by themselves, and makes the model plain again."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memfit._errors import Refused
from memfit.engine.modules import modules_of
from memfit.engine.shadow_optimizer import held_by
from memfit.levers.checkpoint import candidate_blocks

LARGE = 8 << 20
"""Size in bytes from which a module outside the blocks (an embedding, a head) is gathered by itself."""


@dataclass(frozen=True)
class ShardLayout:
    """How a model is sharded."""

    share: float
    """This rank's fraction of all parameters."""
    units: tuple[int, ...]
    """Bytes of the parameters that are gathered together, per unit. Units are the blocks; the last one is everything else."""
    whole_while_training: bool
    """Whether all parameters stay gathered from the first forward to the end of backward (ZeRO stage 2)."""

    @property
    def gathered(self) -> int:
        """Bytes gathered or in flight at once: all parameters, or the block that computes and everything outside blocks; the
        next block; a block's gradients and the copy of them that is sent."""
        largest = max(self.units)
        parameters = sum(self.units) + largest if self.whole_while_training else self.units[-1] + 2 * largest
        return parameters + 2 * largest


def shard_units(model: nn.Module, mesh: Any, *, reshard: bool) -> dict[Any, int]:
    """Shard every block by itself, other large modules that share no parameters, and the rest together. Returns the bytes of
    parameters that are gathered together, per module."""
    from torch.distributed.fsdp import fully_shard

    blocks, others = units_of(model)
    units = [*blocks, *others, model]
    sizes = unit_bytes(model)
    for unit in units:
        fully_shard(unit, mesh=mesh, reshard_after_forward=None if unit is model else reshard)
        unit.set_gradient_divide_factor(1.0)  # type: ignore[attr-defined]  # weights already refer to the whole batch
        unit.set_force_sum_reduction_for_comms(True)  # type: ignore[attr-defined]
    # By default torch prefetches in the order of the forwards it has seen. It does not see those inside a backward, so ranks
    # in different backwards would gather in different orders.
    for unit, ahead in zip(units, [*blocks[:1], *blocks]):
        unit.set_modules_to_backward_prefetch([ahead if unit in blocks else unit])  # type: ignore[attr-defined]
    return sizes


def units_of(model: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """The blocks, and the other large modules that share no parameters."""
    modules = dict(model.named_modules())
    users = Counter(id(p) for m in modules_of(model) for p in m._parameters.values() if p is not None)
    blocks = [modules[name] for name in candidate_blocks(model)]
    inside = {id(m) for block in blocks for m in block.modules()}
    return blocks, [m for m in modules_of(model) if m is not model and id(m) not in inside and _large(m, users)]


def unit_bytes(model: nn.Module) -> dict[nn.Module, int]:
    """Return the bytes of the parameters that are gathered together, per unit of FSDP2; the model itself is the last unit. A
    parameter counts in the first unit that holds it."""
    blocks, others = units_of(model)
    seen: set[int] = set()
    sizes: dict[nn.Module, int] = {}
    for unit in (*blocks, *others, model):
        own = {id(p): p for p in unit.parameters() if id(p) not in seen}
        seen |= own.keys()
        sizes[unit] = sum(p.numel() * p.element_size() for p in own.values())
    return sizes


def _large(module: nn.Module, users: Counter[int]) -> bool:
    own = [p for p in module._parameters.values() if p is not None]
    return sum(p.numel() * p.element_size() for p in own) >= LARGE and all(users[id(p)] == 1 for p in own)


def unshard(units: Sequence[Any], classes: dict[nn.Module, type]) -> None:
    """Remove FSDP's hooks and classes. torch has no public way back (torch 2.13)."""
    from torch.distributed import _composable_state
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY

    for unit in units:
        for hooks in (unit._forward_pre_hooks, unit._forward_hooks):
            for key in [key for key, hook in hooks.items() if is_torchs(hook)]:
                del hooks[key]
        unit.__class__ = classes[unit]
        for key in (STATE_KEY, REGISTRY_KEY):
            unit.__dict__.pop(key, None)
        _composable_state._module_state_mapping.pop(unit, None)
    for module in classes:
        for mark in ("_is_fsdp_managed_module", "_fsdp_use_orig_params"):
            module.__dict__.pop(mark, None)


def check_shardable(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise Refused if the model cannot be sharded by FSDP2."""
    found = next(_obstacles(model, optimizer), None)
    if found is not None:
        raise Refused("sharding parameters or gradients", found=found, next_move="pass shard='optimizer' or 'off'")


def _obstacles(model: nn.Module, optimizer: Optimizer) -> Iterator[str]:
    import torch.distributed.fsdp as fsdp

    if not hasattr(getattr(fsdp, "FSDPModule", None), "set_force_sum_reduction_for_comms"):
        yield f"torch {torch.__version__} cannot yet sum gradient shards"
    held = {id(p) for p in model.parameters()}
    if any(id(p) not in held for group in optimizer.param_groups for p in group["params"]):
        yield "the optimizer trains parameters that are not the model's"
    if (attribute := held_by(optimizer)) is not None:
        yield f"{type(optimizer).__name__} has an optimizer or tensors of its own in `{attribute}`, which would stay whole"
    if others := _trained_elsewhere(model, optimizer):
        yield f"another optimizer trains {', '.join(others[:3])}, and would not see what takes their place"
    hooked = (name for name, p in model.named_parameters() if any(map(_is_the_scripts, _hooks_of(p))))
    if (name := next(hooked, None)) is not None:
        yield f"{name} has hooks, which a shard in its place would not have"
    for name, module in model.named_modules():
        if isinstance(module, nn.RNNBase):
            yield f"{name} keeps a list of its weights"
        if module.__dict__.get("sparse") is True:
            yield f"{name} has sparse gradients"


def _hooks_of(parameter: torch.Tensor) -> Iterator[Any]:
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        yield from (getattr(parameter, name, None) or {}).values()


def _is_the_scripts(hook: Any) -> bool:
    return not str(getattr(hook, "__module__", "")).startswith("memfit.")


def _trained_elsewhere(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Return the parameters that another optimizer of the script trains, and `optimizer` does not."""
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    left = {id(p): name for name, p in model.named_parameters() if p.requires_grad and id(p) not in own}
    if not left:
        return []
    alive = [each for each in gc.get_objects() if isinstance(each, Optimizer) and each is not optimizer]
    return [left[id(p)] for each in alive for group in each.param_groups for p in group["params"] if id(p) in left]


def is_torchs(hook: Any) -> bool:
    """Whether a hook belongs to fully_shard."""
    return type(getattr(hook, "__self__", None)).__name__ == "FSDPState"
