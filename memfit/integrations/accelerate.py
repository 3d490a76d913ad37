"""Hugging Face accelerate with memfit inside: a drop-in for `accelerate.Accelerator`.

    from memfit.integrations.accelerate import Accelerator
    accelerator = Accelerator(target_batch=1024)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

An iteration of the prepared loader is an optimizer step over a whole effective batch, so everything around it keeps its
meaning: `accumulate` does nothing, `sync_gradients` is always True, schedulers step once. Not covered: DeepSpeed, FSDP,
Megatron-LM and XLA, which hold the training themselves and are refused by name.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import send_to_device
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

import memfit
from memfit import Refused, Run, UsageError

SHARDING = {
    "FSDP": ("fsdp_plugin", "ACCELERATE_USE_FSDP"),
    "DeepSpeed": ("deepspeed_plugin", "ACCELERATE_USE_DEEPSPEED"),
    "Megatron-LM": ("megatron_lm_plugin", "ACCELERATE_USE_MEGATRON_LM"),
}
"""What holds the training itself: accelerate's argument for it, and what `accelerate launch` sets."""
SERVED = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "MULTI_NPU")
"""Kinds of training that leave the model whole on every process."""


class Accelerator(accelerate.Accelerator):
    """`accelerate.Accelerator`, whose prepared loader yields effective batches that memfit fits into memory.

    Arguments beside accelerate's own:
        target_batch: samples per optimizer step over all processes. None: what the script would have had, its loader's batch
            times the processes times `gradient_accumulation_steps`, which is 1 from then on.
        budget, micro_batch, checkpoint, plan, allow_inexact, accumulate_in: as in `memfit.wrap`.

    Attribute `run`: the memfit.Run, once a model has been prepared with its optimizer. MEMFIT=off in the environment makes it
    accelerate's own. Raises Refused for DeepSpeed, FSDP, Megatron-LM and XLA, UsageError where a launcher started several
    processes and accelerate counts one.
    """

    def __init__(
        self,
        *args: Any,
        target_batch: int | None = None,
        budget: int | float | str | None = None,
        micro_batch: int | str = "auto",
        checkpoint: str | Sequence[str] = "auto",
        plan: Any = None,
        allow_inexact: Sequence[str] = (),
        accumulate_in: str = "float32",
        gradient_accumulation_steps: int = 1,
        gradient_accumulation_plugin: Any = None,
        **kwargs: Any,
    ) -> None:
        self.run: Run | None = None
        self._off = os.environ.get("MEMFIT", "").lower() == "off"
        if self._off:
            own = {"gradient_accumulation_plugin": gradient_accumulation_plugin}
            super().__init__(*args, gradient_accumulation_steps=gradient_accumulation_steps, **own, **kwargs)
            return
        steps = gradient_accumulation_steps
        if gradient_accumulation_plugin is not None:
            steps = gradient_accumulation_plugin.num_steps
        for name, (argument, variable) in SHARDING.items():
            if kwargs.get(argument) is not None or os.environ.get(variable, "false") == "true":
                raise _not_served(name)
        self._accumulated, self._target = steps, target_batch
        self._settings: dict[str, Any] = {
            "budget": budget,
            "micro_batch": micro_batch,
            "checkpoint": checkpoint,
            "plan": plan,
            "allow_inexact": allow_inexact,
            "accumulate_in": accumulate_in,
            "precision": "off",
        }
        super().__init__(*args, **kwargs)
        kind = self.distributed_type
        if kind.name not in SERVED:
            raise _not_served(str(kind.value))
        _check_counts(self.num_processes)

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """As accelerate's; a model that comes together with its optimizer is trained by memfit, on the first loader among them.

        Models without an optimizer, and further loaders (for evaluation), are prepared by accelerate alone.
        """
        if self._off:
            return super().prepare(*args, device_placement=device_placement)
        models = [obj for obj in args if isinstance(obj, nn.Module)]
        optimizers = [obj for obj in args if isinstance(obj, Optimizer)]
        if not models or not optimizers:
            return super().prepare(*args, device_placement=device_placement)
        if len(models) > 1 or len(optimizers) > 1 or self.run is not None:
            raise Refused(
                f"preparing {len(models)} models with {len(optimizers)} optimizers"
                + (" beside those prepared before" if self.run is not None else ""),
                found="this version of memfit trains one model with one optimizer",
                next_move="prepare models that are not trained by themselves, without an optimizer",
            )
        loader = next((obj for obj in args if isinstance(obj, DataLoader)), None)
        placed = device_placement or [None] * len(args)
        if len(placed) != len(args):
            raise ValueError(f"`device_placement` should be a list with {len(args)} elements (the number of objects passed).")
        model = self.prepare_model(models[0], device_placement=placed[args.index(models[0])])
        target = self._whole(loader)
        self.run = memfit.wrap(model, optimizers[0], loader, target_batch=target, **self._settings)
        self.run.script_batch = self._script_batch(loader)
        ready: dict[int, Any] = {id(models[0]): model}
        if loader is not None:
            ready[id(loader)] = OnDevice(self.run.loader, self.device, self.device_placement)
        for obj, place in zip(args, placed):
            if id(obj) not in ready and not isinstance(obj, LRScheduler):
                ready[id(obj)] = self._prepare_one(obj, first_pass=True, device_placement=place)
        for obj in args:
            if isinstance(obj, LRScheduler):
                ready[id(obj)] = self.prepare_scheduler(obj)
        return tuple(ready[id(obj)] for obj in args)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """As accelerate's, without DistributedDataParallel: memfit reduces gradients itself, once per backward."""
        return super().prepare_model(
            model, device_placement=device_placement, evaluation_mode=evaluation_mode if self._off else True
        )

    def prepare_scheduler(self, scheduler: LRScheduler) -> Any:
        """As accelerate's; it steps once per optimizer step, whatever the number of processes."""
        if self._off:
            return super().prepare_scheduler(scheduler)
        if getattr(scheduler, "_is_accelerate_prepared", False):
            return scheduler
        own = [opt for opt in self._optimizers if getattr(scheduler, "optimizer", None) is opt.optimizer]
        found = AcceleratedScheduler(
            scheduler,
            own or self._optimizers,
            step_with_optimizer=self.step_scheduler_with_optimizer,
            split_batches=True,
        )
        found._is_accelerate_prepared = True  # type: ignore[attr-defined]
        self._schedulers.append(found)
        return found

    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None) -> None:
        """As accelerate's, with memfit's figures of the last step beside: memory, sizes, samples per second."""
        own = {} if self.run is None else {f"memfit/{k}": v for k, v in self.run.stats().items() if v is not None}
        super().log({**own, **values}, step=step, log_kwargs=log_kwargs or {})

    def free_memory(self, *objects: Any) -> Any:
        """As accelerate's; the model is given back as it was before `prepare`."""
        if self.run is not None:
            self.run.undo()
            self.run = None
        return super().free_memory(*objects)

    def _whole(self, loader: DataLoader[Any] | None) -> int | None:
        """Samples per optimizer step over all processes."""
        if self._target is not None:
            return self._target
        found = self._script_batch(loader)
        if found is None and self._accumulated > 1:
            raise UsageError(
                f"gradient_accumulation_steps={self._accumulated} without target_batch=",
                found="the loader does not say how many samples its batches have",
                next_move="pass target_batch=, the samples per optimizer step over all processes",
            )
        return found

    def _script_batch(self, loader: DataLoader[Any] | None) -> int | None:
        """Samples per optimizer step over all processes that accelerate alone would have had; None if not known."""
        size = getattr(loader, "batch_size", None)
        return None if size is None else size * self._accumulated * (1 if self.split_batches else self.num_processes)


def _check_counts(counted: int) -> None:
    """Raise UsageError where a launcher started several processes and accelerate takes each for the only one, as it does on
    machines without GPUs."""
    asked = os.environ.get("WORLD_SIZE", "")
    started = dist.get_world_size() if dist.is_initialized() else int(asked) if asked.isdecimal() else 1
    if counted == 1 and started > 1:
        raise UsageError(
            "training with accelerate on one process",
            found=f"the launcher started {started}, and accelerate found no GPU for them: each would count itself the main one",
            next_move="set ACCELERATE_USE_CPU=true in the environment, or pass cpu=True to Accelerator, to train on CPUs",
        )


def _not_served(name: str) -> Refused:
    return Refused(
        f"training with {name} through memfit.integrations.accelerate",
        found="it holds, cuts and reduces the training itself",
        next_move="use accelerate.Accelerator for it, or choose a configuration without: accelerate config",
    )


class OnDevice:
    """A loader whose batches are on `device`; everything else is the loader's."""

    def __init__(self, loader: Any, device: torch.device, moves: bool) -> None:
        self.loader, self.device, self._moves = loader, device, moves

    def __iter__(self) -> Iterator[Any]:
        moves = self._moves and self.device.type != "cpu"
        for batch in self.loader:
            yield send_to_device(batch, self.device, non_blocking=True) if moves else batch

    def __len__(self) -> int:
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """As accelerate's loaders: to the sampler, where it takes one."""
        tell = getattr(getattr(self.loader, "sampler", None), "set_epoch", None)
        if callable(tell):
            tell(epoch)

    def __getattr__(self, name: str) -> Any:
        if name == "loader" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.loader, name)


__all__ = ["Accelerator", "OnDevice"]
