"""A drop-in for Hugging Face's `accelerate.Accelerator` that trains with memfit.

    from memfit.integrations.accelerate import Accelerator
    accelerator = Accelerator(target_batch=1024)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

One iteration of the prepared loader is one optimizer step over a whole effective batch, so the rest of the loop keeps its
meaning: `accumulate` does nothing, `sync_gradients` is always True, schedulers step once. accelerate itself prepares
evaluation loaders. Not covered: DeepSpeed, FSDP, Megatron-LM and XLA, which run the training themselves and raise Refused by
name; `no_sync`, which has no effect, because every backward reduces the gradients over all ranks.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import GradientAccumulationPlugin, save
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

import memfit
from memfit import Refused, Run, UsageError
from memfit.integrations.loaders import OnDevice, RankPlace, as_configured
from memfit.integrations.metrics import gather_uneven
from memfit.integrations.trackers import STEPS_APART, Follower, processes_here

LOGGER = logging.getLogger("memfit")
SHARDING = {
    "FSDP": ("fsdp_plugin", "ACCELERATE_USE_FSDP"),
    "DeepSpeed": ("deepspeed_plugin", "ACCELERATE_USE_DEEPSPEED"),
    "Megatron-LM": ("megatron_lm_plugin", "ACCELERATE_USE_MEGATRON_LM"),
}
"""Plugins that run the training themselves: accelerate's argument, and the variable that `accelerate launch` sets."""
SERVED = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "MULTI_NPU")
"""Distributed types that keep the full model on every rank."""

PLACE = "memfit_run.bin"
"""File in a saved state's folder with the run's position in its data."""


OWN = ("target_batch", "budget", "micro_batch", "checkpoint", "plan", "shard", "allow_inexact", "accumulate_in")
"""Arguments that accelerate does not have."""


class Accelerator(accelerate.Accelerator):
    """An `accelerate.Accelerator` whose prepared loader yields effective batches that memfit fits into memory.

    Arguments besides accelerate's own:
        target_batch: the effective batch size: samples per optimizer step over all ranks. None: the batch size of the loader
            times the world size times `gradient_accumulation_steps`, which then becomes 1.
        budget, micro_batch, checkpoint, plan, shard, allow_inexact, accumulate_in: as in `memfit.wrap`.

    Attribute `run`: the memfit.Run, once a model is prepared with its optimizer. After `init_trackers`, TensorBoard and others
    receive its metrics during training, Weights & Biases with what the script logs. MEMFIT=off in the environment returns
    accelerate's own class, with `run` None. Raises Refused for DeepSpeed, FSDP, Megatron-LM and XLA, and UsageError if a
    launcher started several processes and accelerate counts one.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Create this class, or accelerate's own with MEMFIT=off."""
        if os.environ.get("MEMFIT", "").lower() != "off":
            return super().__new__(cls)
        found = accelerate.Accelerator(*args, **{name: value for name, value in kwargs.items() if name not in OWN})
        found.run = None  # type: ignore[attr-defined]
        return found

    def __init__(
        self,
        *args: Any,
        target_batch: int | None = None,
        budget: int | float | str | None = None,
        micro_batch: int | str = "auto",
        checkpoint: str | Sequence[str] = "auto",
        plan: Any = None,
        shard: str = "auto",
        allow_inexact: Sequence[str] = (),
        accumulate_in: str = "float32",
        gradient_accumulation_steps: int = 1,
        gradient_accumulation_plugin: Any = None,
        **kwargs: Any,
    ) -> None:
        if gradient_accumulation_plugin is not None:
            steps = gradient_accumulation_plugin.num_steps
        else:  # like accelerate, prefer the setting of `accelerate launch`
            steps = int(os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", gradient_accumulation_steps))
        for name, (argument, variable) in SHARDING.items():
            if kwargs.get(argument) is not None or os.environ.get(variable, "false") == "true":
                raise _not_served(name)
        self.run: Run | None = None
        self._follower: Follower | None = None
        self._batches: OnDevice | None = None
        self._alone: list[nn.Module] = []
        self._accumulated, self._target = steps, target_batch
        self._settings: dict[str, Any] = {
            "budget": budget,
            "micro_batch": micro_batch,
            "checkpoint": checkpoint,
            "plan": plan,
            "shard": shard,
            "allow_inexact": allow_inexact,
            "accumulate_in": accumulate_in,
            "precision": "off",
        }
        super().__init__(*args, gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1), **kwargs)
        kind = self.distributed_type
        if kind.name not in SERVED:
            raise _not_served(str(kind.value))
        _check_counts(self.num_processes)

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """Prepare objects as accelerate does. memfit trains a model that comes with or before its optimizer, on the first
        loader that comes with the optimizer.

        accelerate alone prepares models without an optimizer, and further loaders (for evaluation).
        """
        placed = device_placement or [None] * len(args)
        if len(placed) != len(args):
            raise ValueError(f"`device_placement` should be a list with {len(args)} elements (the number of objects passed).")
        optimizers = [obj for obj in args if isinstance(obj, Optimizer)]
        models = [obj for obj in args if isinstance(obj, nn.Module)]
        if not optimizers:
            self._alone += models
            return super().prepare(*args, device_placement=device_placement)
        models = models or [model for model in self._alone if _trains(optimizers[0], model)]
        if len(models) != 1 or len(optimizers) > 1 or self.run is not None:
            raise _not_one(len(models), len(optimizers), again=self.run is not None)
        places = {id(obj): place for obj, place in zip(args, placed)}
        ready = self._trained(models[0], optimizers[0], next((o for o in args if isinstance(o, DataLoader)), None), places)
        for obj, place in zip(args, placed):
            if id(obj) not in ready and not isinstance(obj, LRScheduler):
                ready[id(obj)] = self._prepare_one(obj, first_pass=True, device_placement=place)
        for obj in args:
            if isinstance(obj, LRScheduler):
                ready[id(obj)] = self.prepare_scheduler(obj)
        found = [ready[id(obj)] for obj in args]
        return tuple(found) if len(found) > 1 else found[0]

    def _trained(
        self, given: nn.Module, optimizer: Optimizer, loader: DataLoader[Any] | None, places: dict[int, Any]
    ) -> dict[int, Any]:
        """Wrap the model and the loader that memfit trains. Returns their replacements by id."""
        model = given if id(given) not in places else self.prepare_model(given, device_placement=places[id(given)])
        source, target = loader, self._whole(loader)
        if loader is not None:
            source = as_configured(loader, self.dataloader_config, RankPlace(self.process_index, self.num_processes))
        run: memfit.Run = memfit.wrap(model, optimizer, source, target_batch=target, **self._settings)  # pyright: ignore[reportAssignmentType]
        self.run, run.script_batch = run, self._script_batch(loader)
        if self.is_main_process:
            self._follower = Follower(run, self.trackers, processes_here(self.num_processes))
        ready: dict[int, Any] = {id(given): model}
        if loader is not None:
            place = places.get(id(loader))
            moves = self.device_placement if place is None else place
            ready[id(loader)] = self._batches = OnDevice(run.loader, self.device, moves)
        return ready

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare a model as accelerate does, without DistributedDataParallel: memfit reduces gradients once per backward."""
        return super().prepare_model(model, device_placement=device_placement, evaluation_mode=True)

    def prepare_scheduler(self, scheduler: LRScheduler) -> Any:
        """Prepare a scheduler as accelerate does. It steps once per optimizer step, for any world size."""
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

    @property
    def gradient_accumulation_steps(self) -> int:
        """Always 1: one iteration is one optimizer step."""
        return 1

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, gradient_accumulation_steps: int) -> None:
        if gradient_accumulation_steps != 1:
            raise UsageError(
                f"gradient_accumulation_steps = {gradient_accumulation_steps} on an existing Accelerator",
                found="an iteration of its loader is an optimizer step over a whole effective batch",
                next_move="pass it to Accelerator(...), or target_batch=, the samples per optimizer step over all processes",
            )

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run backward as accelerate does. Raises UsageError if memfit trains no model: nobody would reduce its gradients."""
        if self.run is None:
            raise UsageError(
                "accelerator.backward(loss)",
                found="no model was prepared together with its optimizer, so memfit has nothing to train",
                next_move="call accelerator.prepare(model, optimizer, loader), or use accelerate.Accelerator",
            )
        super().backward(loss, **kwargs)

    def unwrap_model(self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> nn.Module:
        """Unwrap as accelerate does. A model in training keeps mixed precision in its forward until `free_memory`."""
        kept = self.run is not None and model is self.run.model
        if kept and not keep_fp32_wrapper and "_original_forward" in vars(model):
            LOGGER.warning("unwrap_model(keep_fp32_wrapper=False): a model in training keeps its mixed precision")
        return super().unwrap_model(model, keep_fp32_wrapper or kept, keep_torch_compile)

    @contextmanager
    def join_uneven_inputs(self, joinables: Sequence[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Join as accelerate does, except the model that memfit trains, which makes the same number of steps on every rank."""
        others = [each for each in joinables if self.run is None or each is not self.run.model]
        if others:
            with super().join_uneven_inputs(others, even_batches):
                yield
            return
        samplers = [sampler for sampler in map(_batch_sampler, self._dataloaders) if hasattr(sampler, "even_batches")]
        before = [sampler.even_batches for sampler in samplers]
        try:
            for sampler in samplers:
                sampler.even_batches = sampler.even_batches if even_batches is None else even_batches
            yield
        finally:
            for sampler, even in zip(samplers, before):
                sampler.even_batches = even

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Skip batches as accelerate does; for a training loader, effective batches. In an epoch that `load_state` resumes,
        they count from its start, so that scripts which skip finished batches skip nothing twice."""
        if isinstance(dataloader, OnDevice):
            return dataloader.after(num_batches)
        return super().skip_first_batches(dataloader, num_batches)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather as accelerate does; a training batch in full, even if ranks have different numbers of samples."""
        training = self._batches is not None and self._batches.iterating and not self.gradient_state.in_dataloader
        if not training or self.num_processes == 1:
            return super().gather_for_metrics(input_data, use_gather_object)
        nothing = self.run is not None and self.run.batch_samples == 0  # its batch is a placeholder
        return gather_uneven(input_data, objects=use_gather_object, nothing=nothing)

    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None) -> None:
        """Log as accelerate does. Adds memfit's metrics of the last step for trackers that get none during training."""
        for tracker in self.trackers:
            own = {}
            if self._follower is not None and tracker.name not in STEPS_APART:
                own = self._follower.figures(tracker)
            tracker.log({**own, **values}, step=step, **(log_kwargs or {}).get(tracker.name, {}))

    def end_training(self) -> None:
        """End training as accelerate does, after logging the metrics of the last steps."""
        self._stop_following()
        super().end_training()

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """Save as accelerate does, with the position in the data. Training can resume from it with any world size."""
        place = None if self.run is None else self.run.state_dict(whole=False)
        folder = super().save_state(output_dir, safe_serialization, **kwargs)
        if place is not None:
            each = self.project_configuration.save_on_each_node
            save(place, os.path.join(folder, PLACE), save_on_each_node=each)
        return folder

    def load_state(self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Load as accelerate does. The next iteration of the prepared loader yields the rest of the interrupted epoch, so that
        nothing has to be skipped. A folder that accelerate saved without memfit has no position, so the data start over.

        Raises UsageError, before anything is loaded, for the state of another model, target batch or data set.
        """
        hook = self.register_load_state_pre_hook(self._go_to_place)
        try:
            super().load_state(input_dir, load_kwargs, **kwargs)
        finally:
            hook.remove()

    def _go_to_place(self, models: list[nn.Module], folder: str) -> None:
        path = os.path.join(folder, PLACE)
        if self.run is not None and os.path.exists(path):
            self.run.load_state_dict(torch.load(path, weights_only=True))

    def free_memory(self, *objects: Any) -> Any:
        """Free memory as accelerate does, and restore the model to its state before `prepare`."""
        self._stop_following()
        if self.run is not None:
            self.run.undo()
            self.run = self._batches = None
        self._alone.clear()
        return super().free_memory(*objects)

    def _stop_following(self) -> None:
        if self._follower is not None:
            self._follower.end()
            self._follower = None

    def _whole(self, loader: DataLoader[Any] | None) -> int | None:
        """Return the samples per optimizer step over all ranks."""
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
        """Return the samples per optimizer step, over all ranks, that accelerate alone would use; None if unknown."""
        size = getattr(loader, "batch_size", None) or getattr(_batch_sampler(loader), "batch_size", None)
        return None if size is None else size * self._accumulated * (1 if self.split_batches else self.num_processes)


def _check_counts(counted: int) -> None:
    """Raise UsageError if a launcher started several processes and accelerate takes each for the only one, as it does without
    GPUs."""
    asked = os.environ.get("WORLD_SIZE", "")
    started = dist.get_world_size() if dist.is_initialized() else int(asked) if asked.isdecimal() else 1
    if counted == 1 and started > 1:
        raise UsageError(
            "training with accelerate on one process",
            found=f"the launcher started {started}, and accelerate found no GPU for them: each would count itself the main one",
            next_move="set ACCELERATE_USE_CPU=true in the environment, or pass cpu=True to Accelerator, to train on CPUs",
        )


def _trains(optimizer: Optimizer, model: nn.Module) -> bool:
    """Whether the optimizer trains parameters of the model."""
    inside = {id(p) for p in model.parameters()}
    return any(id(p) in inside for group in optimizer.param_groups for p in group["params"])


def _batch_sampler(loader: Any) -> Any:
    """Return what produces the loader's batches of indices."""
    return getattr(loader, "batch_sampler", None) or getattr(loader, "sampler", None)


def _not_one(models: int, optimizers: int, *, again: bool) -> Refused:
    return Refused(
        f"preparing {models} models with {optimizers} optimizers" + (" beside those prepared before" if again else ""),
        found="this version of memfit trains one model with one optimizer",
        next_move="prepare the model with its optimizer, and models you do not train in a separate call",
    )


def _not_served(name: str) -> Refused:
    return Refused(
        f"training with {name} through memfit.integrations.accelerate",
        found="it holds, cuts and reduces the training itself",
        next_move="use accelerate.Accelerator for it, or choose a configuration without: accelerate config",
    )


__all__ = ["Accelerator", "OnDevice"]
