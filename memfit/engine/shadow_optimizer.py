"""A copy of an optimizer over copies (twins) of its parameters. It steps like the original, which stays unchanged."""

from __future__ import annotations

import traceback
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from memfit.hardware.exhausted import is_out_of_memory

STEPPED_BY_LISTS = ("cuda", "xpu")
"""Devices where optimizers use foreach by default. torch decides that by the type of the tensors, which differs while tracing
(`_default_to_fused_or_foreach` in torch/optim/optimizer.py)."""


def shadow_optimizer(
    optimizer: Optimizer,
    parameter: Callable[[torch.Tensor], torch.Tensor | None],
    twin: Callable[[torch.Tensor], torch.Tensor],
) -> Optimizer:
    """Build an optimizer with the same settings over the twins of the parameters, without hooks and patched methods."""
    shadow = object.__new__(type(optimizer))
    shadow.__dict__.update({k: v.copy() if type(v) in (list, dict, set) else v for k, v in optimizer.__dict__.items()})
    shadow.__dict__.pop("step", None)  # schedulers put their counting step on the instance
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        shadow.__dict__[name] = OrderedDict()
    shadow.param_groups = [
        {k: twin(v) if isinstance(v, torch.Tensor) else v for k, v in group.items() if k != "params"}
        | {"params": [q for q in map(parameter, group["params"]) if q is not None]}
        for group in optimizer.param_groups
    ]
    shadow.state = defaultdict(dict)
    for p, state in optimizer.state.items():
        owner = parameter(p) if isinstance(p, torch.Tensor) else p
        if owner is not None:
            shadow.state[owner] = {k: twin(v) if isinstance(v, torch.Tensor) else v for k, v in state.items()}
    return shadow


def step(shadow: Optimizer) -> None:
    """Step like the original. If its own code raises (a mode the script sets later, a closure it needs), step like its
    torch.optim base class, or else allocate two state tensors per parameter."""
    try:
        shadow.step()
        return
    except Exception as error:
        if is_out_of_memory(error) or not _is_own(error):
            raise
    kinds = (kind for kind in type(shadow).__mro__[1:] if kind.__module__.startswith("torch.optim") and kind is not Optimizer)
    base = next((kind for kind in kinds if "step" in vars(kind)), None)
    if base is not None:
        base.step(shadow)  # type: ignore[attr-defined]
        return
    for group in shadow.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and not shadow.state[parameter]:
                shadow.state[parameter].update(first=torch.zeros_like(parameter), second=torch.zeros_like(parameter))


def _is_own(error: Exception) -> bool:
    """Whether the error was raised outside torch."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return not frame.filename.startswith(str(Path(torch.__file__).parent))


def step_by_lists(optimizer: Optimizer) -> None:
    """Enable foreach for parameter groups that would use it on CUDA (`_default_to_fused_or_foreach` in
    torch/optim/optimizer.py)."""
    for group in optimizer.param_groups:
        plain = not group.get("fused") and not group.get("differentiable")
        if "foreach" in group and group["foreach"] is None and plain:
            group["foreach"] = True


def states(optimizer: Optimizer) -> Iterator[tuple[Any, list[torch.Tensor]]]:
    """Yield each key of the optimizer's state (mostly a parameter) with its state tensors."""
    for parameter, state in optimizer.state.items():
        values = state.values() if isinstance(state, dict) else ()
        yield parameter, [value for value in values if isinstance(value, torch.Tensor)]
