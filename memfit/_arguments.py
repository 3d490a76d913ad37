"""Validates the user's arguments before anything changes. Each error says what was asked, what was found and what to do next.

`_values.py` has the checks that need only the value itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin  # pyright: ignore[reportAttributeAccessIssue]
from torch.utils.data import DataLoader, IterableDataset

from memfit._errors import Refused, UsageError
from memfit._hooks import check_backward_hooks
from memfit._values import (
    check_count,
    check_functions,
    choice_of,
    is_one_of,
    micro_batch_from,
    names_from,
    not_of_type,
    precision_from,
)
from memfit.autotune.settings import Settings
from memfit.batches.tree import tensors
from memfit.hardware.budget import torchs_name
from memfit.levers.checkpoint import candidate_blocks
from memfit.planning.plan import Plan
from memfit.planning.sharding import LEVELS
from memfit.ranks.ranks import Ranks
from memfit.runtime.allow_inexact import inexact_from


def check_model(model: Any, optimizer: Any) -> torch.device:
    """Return the one device of the model's parameters. Raises UsageError or Refused if memfit cannot train the model, or inputs
    of a frozen one that the optimizer holds (a prompt, a picture)."""
    check_module(model)
    _check_wrappers(model)
    parameters = list(model.parameters())
    if any(isinstance(p, UninitializedTensorMixin) for p in parameters):
        raise UsageError("wrapping a lazy model", found="its parameters have no shape yet", next_move="run one forward first")
    _check_trainable(model, [*parameters, *_parameters_of(optimizer)] if parameters else [])
    return _one_device(model, parameters)


def check_same_device(asked: Any, here: torch.device) -> None:
    """Raise UsageError unless `device=` names the type of device that holds the model."""
    if asked is None or torch.device(torchs_name(asked)).type == here.type:
        return
    raise UsageError(
        f"device={str(asked)!r}",
        found=f"the model is on {here}",
        next_move="move it there, omit device=, or name a card of the catalogue, like 'a100-40gb'",
    )


def check_module(model: Any) -> None:
    """Raise UsageError unless `model` is a torch.nn.Module."""
    if not isinstance(model, nn.Module):
        raise UsageError(
            "training a model",
            found=f"the model is of type {type(model).__name__}",
            next_move="pass the torch.nn.Module first, then its optimizer, then the loader",
        )


def check_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Check that the optimizer trains the model and that its step needs no closure. Raises UsageError or Refused."""
    if not hasattr(optimizer, "param_groups") or not callable(getattr(optimizer, "step", None)):
        raise UsageError(
            "memfit.wrap(model, optimizer, loader)",
            found=f"the optimizer is of type {type(optimizer).__name__}, without param_groups and step()",
            next_move="pass the torch.optim.Optimizer second",
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise Refused(
            "wrapping torch.optim.LBFGS",
            found="its step calls the closure several times per batch; memfit runs an effective batch once",
            next_move="use an optimizer whose step() takes no closure, or enabled=False",
        )
    trained = {id(p) for p in _parameters_of(optimizer)}
    frozen = not any(p.requires_grad for p in model.parameters())
    if not frozen and not any(id(p) in trained for p in model.parameters()):
        raise UsageError(
            f"training {type(model).__name__} with {type(optimizer).__name__}",
            found="the optimizer holds none of the model's parameters",
            next_move="build it from this model's parameters(), after moving or converting the model",
        )
    check_backward_hooks(model)


def check_data(loader: Any, sample: Any, target_batch: int | None, loss_fn: Any) -> None:
    """Raise UsageError if the loader or the sample does not fit the other arguments."""
    check_loader(loader, target_batch, loss_fn)
    check_sample(sample, loss_fn)


def check_loader(loader: Any, target_batch: int | None, loss_fn: Any) -> None:
    """Raise UsageError unless the loader is iterable and, with a `target_batch`, can be regrouped into effective batches."""
    if loader is None:
        return
    if isinstance(loader, DataLoader):
        _check_length(loader, target_batch)
        return
    if not isinstance(loader, Iterable) or isinstance(loader, (str, bytes, Mapping)):
        of_what = "whose items are no batches" if isinstance(loader, Iterable) else "which cannot be iterated"
        raise UsageError(
            "memfit.wrap(model, optimizer, loader)",
            found=f"the loader is of type {type(loader).__name__}, {of_what}",
            next_move="pass a torch.utils.data.DataLoader, any iterable of batches, or None",
        )
    if isinstance(loader, Sized) and length_of(loader) == 0:
        raise _without_batches(f"the {type(loader).__name__} is empty")
    if target_batch is not None:
        raise UsageError(
            f"target_batch={target_batch} with a loader of type {type(loader).__name__}",
            found="its batches are fixed: memfit regroups only those of a torch.utils.data.DataLoader",
            next_move="omit target_batch (its batches are then the effective batches, and cut), or pass the DataLoader",
        )


def check_sample(sample: Any, loss_fn: Any) -> None:
    """Raise UsageError if the sample has no use (script mode) or no values (meta tensors)."""
    if sample is not None and loss_fn is None:
        raise UsageError(
            "sample= without loss_fn=",
            found="in script mode the first training call makes the plan, from the model's inputs",
            next_move="omit sample=, or pass loss_fn= and call run.step(batch)",
        )
    if any(t.is_meta for t in tensors(sample)):
        raise UsageError(
            "planning with sample=",
            found="it holds tensors on the meta device, which have shapes but no values",
            next_move="pass a real batch, or plan without training: memfit.profile(model, optimizer, sample, loss_fn=...)",
        )


def check_accumulate_in(asked: Any) -> None:
    """Raise UsageError unless `asked` names a known dtype for gradient accumulation: "float32" or "param"."""
    if not is_one_of(asked, ("float32", "param")):
        raise choice_of("accumulate_in", asked, ("float32", "param"))


def settings_from(
    model: nn.Module,
    *,
    target_batch: Any,
    loss_fn: Any,
    before_step: Any,
    micro_batch: Any,
    precision: Any,
    checkpoint: Any,
    shard: Any,
    offload: Any,
    script_accumulation: Any,
    weight: Any,
    split: Any,
    methods: Any,
    allow_inexact: Any,
    batchnorm: Any,
    accumulate_in: Any,
) -> Settings:
    """Return the arguments as Settings. Raises UsageError for an invalid argument."""
    if target_batch is not None:
        check_count("target_batch", target_batch)
    _check_functions(loss_fn, before_step, weight, split)
    _check_accumulation(target_batch, script_accumulation, loss_fn)
    _check_offload_and_norms(offload, batchnorm)
    check_shard(shard)
    check_accumulate_in(accumulate_in)
    micro, whole = micro_batch_from(micro_batch)
    blocks, every = blocks_from(checkpoint, model)
    return Settings(
        target_batch=target_batch,
        micro_batch=micro,
        whole=whole,
        precision=precision_from(precision),
        checkpoint=blocks,
        all_blocks=every,
        script_accumulation=script_accumulation,
        accumulate_in=accumulate_in,
        shard=shard,
        allow_inexact=inexact_from(allow_inexact, model),
        batchnorm=batchnorm,
        methods=_methods_from(methods, model, loss_fn),
        weight=weight,
        split=split,
    )


def check_plan(plan: Any, fingerprint: str, model: nn.Module) -> Plan | None:
    """Return the plan, loaded if a path is given. Raises UsageError or PlanFileError unless it fits this model."""
    if plan is None:
        return None
    if isinstance(plan, (str, Path)):
        plan = Plan.load(plan)
    if not isinstance(plan, Plan):
        raise not_of_type("plan=", plan, "a memfit.Plan or the path of a saved one")
    if plan.fingerprint != fingerprint:
        from memfit._errors import PlanFileError

        raise PlanFileError(
            f"using a plan for {plan.model} with {plan.optimizer}",
            found=f"it was made for another model or optimizer than this {type(model).__name__} (other parameters, or others "
            "frozen)",
            next_move="plan again for this one",
        )
    unknown = [name for name in plan.checkpoint if name not in dict(model.named_modules())]
    if unknown:
        raise UsageError("using a plan", found=f"the model has no block {unknown[0]!r}", next_move="plan again")
    return plan


# ---- parts


def _check_wrappers(model: nn.Module) -> None:
    if isinstance(model, torch.jit.ScriptModule):
        raise Refused(
            "wrapping a scripted model",
            found="torch.jit does not let its forward be intercepted",
            next_move="wrap the Python module it was scripted from",
        )


def _parameters_of(optimizer: Any) -> list[torch.Tensor]:
    return [p for group in getattr(optimizer, "param_groups", ()) for p in group["params"]]


def _check_trainable(model: nn.Module, parameters: Sequence[torch.Tensor]) -> None:
    if not any(p.requires_grad for p in parameters):
        raise UsageError(
            f"training {type(model).__name__}",
            found="none of its parameters requires a gradient",
            next_move="unfreeze parameters to train (requires_grad_()) before wrapping",
        )


def _one_device(model: nn.Module, parameters: Sequence[torch.Tensor]) -> torch.device:
    devices = sorted({str(p.device) for p in parameters})
    if "meta" in devices:
        name = next(name for name, p in model.named_parameters() if p.is_meta)
        raise UsageError(
            f"training {type(model).__name__}",
            found=f"{name} is on the meta device: it has a shape but no values",
            next_move="load the weights first; memfit.profile and memfit.plan take such models as they are",
        )
    if len(devices) > 1:
        raise Refused(
            f"training {type(model).__name__} on several devices",
            found=f"its parameters are on {' and '.join(devices)}",
            next_move="move the whole model to one device with model.to(...)",
        )
    return parameters[0].device


def _check_length(loader: DataLoader[Any], target_batch: int | None) -> None:
    if isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__len__"):
        return
    length = length_of(loader.dataset)
    if length is None:
        return
    if length == 0:
        raise UsageError("training from this loader", found="its dataset is empty", next_move="pass one with samples")
    if target_batch is None and length_of(loader) == 0:
        raise _without_batches(f"its {length} samples make no batch of {loader.batch_size} with drop_last=True")
    drops = loader.drop_last or getattr(loader.batch_sampler, "drop_last", False)
    if target_batch is not None and target_batch > length and drops:
        raise UsageError(
            f"target_batch={target_batch} with drop_last=True",
            found=f"the dataset has {length} samples, so every epoch would be dropped",
            next_move=f"use a target of at most {length}, or drop_last=False (one batch of {length} per epoch)",
        )


def length_of(sized: Any) -> int | None:
    """Return the length of a loader or a data set, or None if it is unknown. Some raise to say so."""
    try:
        return len(sized)
    except Exception:
        return None


def _without_batches(found: str) -> UsageError:
    return UsageError("training from this loader", found=f"there is no batch in it: {found}", next_move="pass one with batches")


def _check_functions(loss_fn: Any, before_step: Any, weight: Any, split: Any) -> None:
    check_functions(loss_fn=loss_fn, before_step=before_step, weight=weight, split=split)
    if loss_fn is None and (before_step is not None or weight is not None):
        name = "before_step" if before_step is not None else "weight"
        raise UsageError(
            f"{name}= without loss_fn=",
            found="in script mode the loop and its step are the script's own",
            next_move="pass loss_fn= and call run.step(batch), or do it in the loop",
        )


def _check_accumulation(target_batch: int | None, script_accumulation: Any, loss_fn: Any) -> None:
    check_count("script_accumulation", script_accumulation)
    if script_accumulation > 1 and loss_fn is not None:
        raise UsageError(
            f"script_accumulation={script_accumulation} with loss_fn=",
            found="each run.step(batch) is a whole optimizer step, so nothing accumulates",
            next_move="omit script_accumulation=; target_batch= is the samples of one run.step(batch)",
        )
    if target_batch is not None and target_batch % script_accumulation:
        raise UsageError(
            f"target_batch={target_batch} with script_accumulation={script_accumulation}",
            found="the target does not divide evenly into the iterations of one step",
            next_move=f"use a target that is a multiple of {script_accumulation}",
        )


def check_shard(shard: Any) -> None:
    """Raise UsageError unless `shard` is a known sharding level."""
    if not is_one_of(shard, ("auto", *LEVELS)):
        raise choice_of("shard", shard, ("auto", *LEVELS))


def check_sharded(shard: str, ranks: Ranks | None) -> None:
    """Raise UsageError if sharding is asked for and this is the only process."""
    if ranks is None and shard not in ("auto", "off"):
        raise UsageError(
            f"shard={shard!r}",
            found="a single process trains, and holds everything",
            next_move="start several (torchrun --nproc_per_node=2 train.py), or omit shard=",
        )


def _methods_from(value: Any, model: nn.Module, loss_fn: Any) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name for name in names_from("methods", value) if name != "forward"))
    missing = [name for name in names if not callable(getattr(model, name, None))]
    if missing:
        raise UsageError(
            f"methods={list(names)!r}",
            found=f"{type(model).__name__} has no method {missing[0]!r}",
            next_move="name methods that the script calls on the model, such as ['encode_image']",
        )
    if names and loss_fn is not None:
        raise UsageError(
            f"methods={list(names)!r} with loss_fn=",
            found="a loss_fn gets micro-batches, on which it may call any method of the model",
            next_move="omit methods=",
        )
    taken = [name for name in names if name in _ANSWERED or isinstance(getattr(model, name), nn.Module)]
    if taken:
        raise UsageError(
            f"methods={list(names)!r}",
            found=f"{taken[0]!r} is a module, or a method that every torch module has",
            next_move="wrap that module itself, or name methods of the model's own",
        )
    return names


_ANSWERED = frozenset(dir(nn.Module))


def _check_offload_and_norms(offload: Any, batchnorm: Any) -> None:
    if not is_one_of(offload, ("auto", "off")):
        raise UsageError(f"offload={offload!r}", found="this version keeps it off", next_move="omit offload=")
    if not is_one_of(batchnorm, ("micro", "whole")):
        raise choice_of("batchnorm", batchnorm, ("micro", "whole"))


def blocks_from(value: Any, model: nn.Module) -> tuple[tuple[str, ...] | None, bool]:
    """Return (the prescribed blocks or None, whether all were asked for). Raises UsageError."""
    if is_one_of(value, ("auto", "off", "all")):
        found = {"auto": None, "off": (), "all": candidate_blocks(model)}
        return found[value], value == "all"
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise choice_of("checkpoint", value, ("auto", "off", "all", "a list of block names"))
    names = tuple(value)
    known = dict(model.named_modules())
    unknown = [name for name in names if not isinstance(name, str) or name not in known or not name]
    if unknown:
        raise UsageError(
            f"checkpoint={list(names)!r}",
            found=f"the model has no block {unknown[0]!r}",
            next_move=f"use names such as {', '.join(candidate_blocks(model)[:3]) or 'those of its submodules'}",
        )
    return names, False
