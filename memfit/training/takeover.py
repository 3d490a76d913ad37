"""Taking over models that came in DistributedDataParallel or DataParallel: the wrapper goes on answering, the training is ours.

The wrapper stays the script's object (`.module`, its keys, `isinstance`); its forward leads to the module inside, whose
gradients are reduced once per backward. Its own reducer is never armed. Not covered: DataParallel over several devices,
communication hooks, and wrappers that shard the parameters themselves: refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from memfit._errors import Refused
from memfit.batches.tree import map_leaves
from memfit.engine.intercept import Interception

PREFIX = "module."


@dataclass(frozen=True)
class TakenOver:
    """A model and the wrapper that it came in."""

    outer: nn.Module
    """What the script calls."""
    inner: nn.Module
    """What is trained."""
    group: Any = None
    """The process group its gradients were to be reduced over."""
    mean: bool = False
    """Whether sums are means over processes, as the wrapper makes them."""
    shares_buffers: bool = True
    """Whether buffers are rank 0's."""

    def called(self, *args: Any, **kwargs: Any) -> Any:
        """The module inside, called as the wrapper would: with tensors moved to its device."""
        args, kwargs = map_leaves(self._moved, (args, kwargs))
        return self.inner(*args, **kwargs)

    def answering(self, answer: Callable[..., Any]) -> Interception:
        """An interception of the wrapper's forward, by `answer(plain, args, kwargs)`."""

        def handler(plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            args, kwargs = map_leaves(self._moved, (args, kwargs))
            return answer(self.inner, args, kwargs)

        return Interception(self.outer, handler)

    def straight(self) -> Interception:
        """One that leads straight to the module inside."""
        return self.answering(lambda plain, args, kwargs: plain(*args, **kwargs))

    def takes_both_keys(self) -> Callable[[], None]:
        """Let the wrapper load states with and without its prefix; returns what takes that back."""
        return self.outer.register_load_state_dict_pre_hook(_with_prefix).remove

    def check_syncs(self) -> None:
        """Raise Refused inside the wrapper's no_sync()."""
        if isinstance(self.outer, DistributedDataParallel) and not self.outer.require_backward_grad_sync:
            raise Refused(
                "a backward inside no_sync()",
                found="memfit reduces once per backward already, and one iteration of its loader is one optimizer step",
                next_move="remove no_sync() and the accumulation around it; target_batch= says how many samples a step has",
            )

    def _moved(self, leaf: Any) -> Any:
        ids = getattr(self.outer, "device_ids", None)
        return leaf.to(ids[0]) if ids and isinstance(leaf, torch.Tensor) else leaf


def taken_over(model: nn.Module) -> TakenOver | None:
    """The model inside a wrapper; None where it came as it is. Raises Refused for what cannot be taken over."""
    if isinstance(model, DataParallel):
        return _from_data_parallel(model)
    if isinstance(model, DistributedDataParallel):
        return _from_distributed(model)
    name = type(model).__name__
    if name.startswith("FSDP") or name in ("FullyShardedDataParallel", "DeepSpeedEngine", "ShardedDataParallel"):
        raise Refused(
            f"wrapping a model inside {name}",
            found="it holds, gathers and reduces the parameters itself, in forwards that memfit would cut",
            next_move="pass the plain model to memfit.wrap, before it is sharded",
        )
    return None


def refuse_synchronised_norms(model: nn.Module) -> None:
    """Raise Refused for layers whose forward waits for other processes, which may run other numbers of micro-batches."""
    name = next((name for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)), None)
    if name is not None:
        raise Refused(
            f"training with SyncBatchNorm ({name}) over several processes",
            found="its forward waits for the same forward on every process, and processes may cut their shares differently",
            next_move="use BatchNorm, whose statistics are rank 0's, or GroupNorm, which needs none",
        )


def _from_data_parallel(model: DataParallel[Any]) -> TakenOver:
    if len(model.device_ids) > 1:
        count = len(model.device_ids)
        raise Refused(
            f"wrapping a model in nn.DataParallel over {count} devices",
            found="it runs them as threads of one process, and gathers what they need on the first",
            next_move="pass the module inside it, and start one process per device: "
            f"torchrun --nproc_per_node={count} train.py",
        )
    return TakenOver(model, model.module)


def _from_distributed(model: DistributedDataParallel) -> TakenOver:
    hooks = getattr(model, "_comm_hooks", None)
    if hooks:
        raise Refused(
            "wrapping a model in DistributedDataParallel with a communication hook",
            found=f"{getattr(hooks[0][0], '__name__', hooks[0][0])} would not be called: memfit reduces gradients itself, once",
            next_move="leave the hook away",
        )
    if getattr(model, "mixed_precision", None) is not None:
        raise Refused(
            "wrapping a model in DistributedDataParallel with mixed_precision=",
            found="it casts parameters around its own forward, which memfit replaces",
            next_move="leave it away and use torch.autocast, or precision='bfloat16' in memfit.wrap",
        )
    return TakenOver(
        model, model.module, group=model.process_group, mean=True, shares_buffers=bool(model.broadcast_buffers)
    )


def _with_prefix(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
    if state and not any(key.startswith(PREFIX) for key in state):
        for key in list(state):
            state[PREFIX + key] = state.pop(key)


def loss_of_outer(taken: TakenOver | None, loss_fn: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """`loss_fn` given the wrapper where it would be given the module inside."""
    return loss_fn if taken is None else partial(_of_outer, taken, loss_fn)


def _of_outer(taken: TakenOver, loss_fn: Callable[[Any, Any], Any], model: Any, batch: Any) -> Any:
    return loss_fn(taken.outer if model is taken.inner else model, batch)
