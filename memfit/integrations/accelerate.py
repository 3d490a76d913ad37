"""Hugging Face accelerate with memfit inside: a drop-in for `accelerate.Accelerator`.

    from memfit.integrations.accelerate import Accelerator
    accelerator = Accelerator(target_batch=1024)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

An iteration of the prepared loader is an optimizer step over a whole effective batch, so everything around it keeps its
meaning: `accumulate` does nothing, `sync_gradients` is always True, schedulers step once. Not covered: DeepSpeed, FSDP,
Megatron-LM and XLA, which hold the training themselves and are refused by name.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import accelerate
import torch
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import save, send_to_device
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

PLACE = "memfit_run.bin"
"""File in the folder of a saved state: where the run stands in its data."""


class Accelerator(accelerate.Accelerator):
    """`accelerate.Accelerator`, whose prepared loader yields effective batches that memfit fits into memory.

    Arguments beside accelerate's own:
        target_batch: samples per optimizer step over all processes. None: what the script would have had, its loader's batch
            times the processes times `gradient_accumulation_steps`, which is 1 from then on.
        budget, micro_batch, checkpoint, plan, allow_inexact, accumulate_in: as in `memfit.wrap`.

    Attribute `run`: the memfit.Run, once a model has been prepared with its optimizer.
    Raises Refused for DeepSpeed, FSDP, Megatron-LM and XLA.
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
        steps = gradient_accumulation_steps
        if gradient_accumulation_plugin is not None:
            steps = gradient_accumulation_plugin.num_steps
        for name, (argument, variable) in SHARDING.items():
            if kwargs.get(argument) is not None or os.environ.get(variable, "false") == "true":
                raise _not_served(name)
        self.run: Run | None = None
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

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """As accelerate's; a model that comes together with its optimizer is trained by memfit, on the first loader among them.

        Models without an optimizer, and further loaders (for evaluation), are prepared by accelerate alone.
        """
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
        return super().prepare_model(model, device_placement=device_placement, evaluation_mode=True)

    def prepare_scheduler(self, scheduler: LRScheduler) -> Any:
        """As accelerate's; it steps once per optimizer step, whatever the number of processes."""
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

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """As accelerate's, with the place in the data beside: the state goes on from there on any number of processes."""
        place = None if self.run is None else self.run.state_dict(whole=False)
        folder = super().save_state(output_dir, safe_serialization, **kwargs)
        if place is not None:
            each = self.project_configuration.save_on_each_node
            save(place, os.path.join(folder, PLACE), save_on_each_node=each)
        return folder

    def load_state(self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """As accelerate's; the next iteration of the prepared loader yields the rest of the interrupted epoch, so that nothing
        has to be skipped. A folder that accelerate saved without memfit has no place in the data, which then begin anew.

        Raises UsageError, before anything is loaded, for the state of another model, target batch or data set.
        """
        hook = self.register_load_state_pre_hook(self._go_to_place)
        try:
            super().load_state(input_dir, load_kwargs, **kwargs)
        finally:
            hook.remove()

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """As accelerate's; batches are effective ones. In an epoch that `load_state` goes on with they count from its start,
        so that scripts which skip what was done before skip nothing twice."""
        if not isinstance(dataloader, OnDevice):
            return super().skip_first_batches(dataloader, num_batches)
        return OnDevice(dataloader.loader, self.device, self.device_placement, first=num_batches)

    def _go_to_place(self, models: list[nn.Module], folder: str) -> None:
        path = os.path.join(folder, PLACE)
        if self.run is not None and os.path.exists(path):
            self.run.load_state_dict(torch.load(path, weights_only=True))

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
        size = getattr(loader, "batch_size", None)
        if loader is None or size is None:
            if self._accumulated > 1:
                raise UsageError(
                    f"gradient_accumulation_steps={self._accumulated} without target_batch=",
                    found="the loader does not say how many samples its batches have",
                    next_move="pass target_batch=, the samples per optimizer step over all processes",
                )
            return None
        return size * self._accumulated * (1 if self.split_batches else self.num_processes)


def _not_served(name: str) -> Refused:
    return Refused(
        f"training with {name} through memfit.integrations.accelerate",
        found="it holds, cuts and reduces the training itself",
        next_move="use accelerate.Accelerator for it, or choose a configuration without: accelerate config",
    )


class OnDevice:
    """A loader whose batches are on `device`, from the `first` of an epoch on; everything else is the loader's."""

    def __init__(self, loader: Any, device: torch.device, moves: bool, first: int = 0) -> None:
        self.loader, self.device, self._moves, self._first = loader, device, moves, first

    def __iter__(self) -> Iterator[Any]:
        moves = self._moves and self.device.type != "cpu"
        for batch in self._batches():
            yield send_to_device(batch, self.device, non_blocking=True) if moves else batch

    def __len__(self) -> int:
        return len(self.loader) - self._first

    def _batches(self) -> Iterator[Any]:
        begin_at = getattr(self.loader, "begin_at", None)
        if not self._first or (begin_at is not None and begin_at(self._first)):
            return iter(self.loader)
        return itertools.islice(self.loader, self._first, None)

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
