"""Takes over the training of models in DistributedDataParallel or DataParallel, while the wrapper keeps working for the script.

The wrapper stays the script's object (`.module`, its keys, `isinstance`). Its forward calls the module inside, whose gradients
are reduced once per backward; its own reducer is never armed. Not covered, refused by name: DataParallel over several devices,
communication hooks, wrappers that shard the parameters.
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
from memfit.batches.tree import map_tensors
from memfit.engine.intercept import Interception

PREFIX = "module."


@dataclass(frozen=True)
class TakenOver:
    """A model and the wrapper it came in."""

    outer: nn.Module
    """The wrapper, which the script calls."""
    inner: nn.Module
    """The wrapped module, which is trained."""
    group: Any = None
    """The process group of the wrapper's gradient reduction."""
    mean: bool = False
    """Whether sums are averaged over ranks, as the wrapper does."""
    shares_buffers: bool = True
    """Whether buffers are broadcast from rank 0."""

    def called(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the wrapped module as the wrapper would, with tensors moved to its device."""
        args, kwargs = map_tensors(self._moved, (args, kwargs))
        return self.inner(*args, **kwargs)

    def answering(self, answer: Callable[..., Any]) -> Interception:
        """Returns an interception of the wrapper's forward by `answer(plain, args, kwargs)`."""

        def handler(plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            args, kwargs = map_tensors(self._moved, (args, kwargs))
            return answer(self.inner, args, kwargs)

        return Interception(self.outer, handler)

    def straight(self) -> Interception:
        """Returns an interception that calls the wrapped module directly."""
        return self.answering(lambda plain, args, kwargs: plain(*args, **kwargs))

    def takes_both_keys(self) -> Callable[[], None]:
        """Lets the wrapper load state dicts with and without its prefix. Returns a function that reverts this."""
        return self.outer.register_load_state_dict_pre_hook(_with_prefix).remove

    def check_syncs(self) -> None:
        """Raises Refused inside the wrapper's no_sync()."""
        if isinstance(self.outer, DistributedDataParallel) and not self.outer.require_backward_grad_sync:
            raise Refused(
                "a backward inside no_sync()",
                found="memfit reduces once per backward already, and one iteration of its loader is one optimizer step",
                next_move="remove no_sync() and the accumulation around it; target_batch= says how many samples a step has",
            )

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        ids = getattr(self.outer, "device_ids", None)
        return tensor.to(ids[0]) if ids else tensor


def taken_over(model: nn.Module) -> TakenOver | None:
    """Returns the wrapper and its module, or None for a plain model. Raises Refused for unsupported wrappers."""
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
    """Raises Refused for layers whose forward waits for other ranks, which may run other numbers of micro-batches."""
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
            next_move="remove the hook",
        )
    if getattr(model, "mixed_precision", None) is not None:
        raise Refused(
            "wrapping a model in DistributedDataParallel with mixed_precision=",
            found="it casts parameters around its own forward, which memfit replaces",
            next_move="remove it and use torch.autocast, or precision='bfloat16' in memfit.wrap",
        )
    return TakenOver(
        model, model.module, group=model.process_group, mean=True, shares_buffers=bool(model.broadcast_buffers)
    )


def _with_prefix(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
    if state and not any(key.startswith(PREFIX) for key in state):
        for key in list(state):
            state[PREFIX + key] = state.pop(key)


def loss_of_outer(taken: TakenOver | None, loss_fn: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Makes `loss_fn` receive the wrapper instead of the module inside."""
    return loss_fn if taken is None else partial(_of_outer, taken, loss_fn)


def _of_outer(taken: TakenOver, loss_fn: Callable[[Any, Any], Any], model: Any, batch: Any) -> Any:
    return loss_fn(taken.outer if model is taken.inner else model, batch)
