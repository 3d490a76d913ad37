"""The functions of memfit besides `wrap`, each usable on its own: profile, plan, apply, verify."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memfit._arguments import blocks_from, check_accumulate_in, check_module, check_optimizer, check_same_device
from memfit._errors import UsageError
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
from memfit._wrap import wrap
from memfit.autotune.settings import Settings
from memfit.autotune.task import Task
from memfit.batches.tree import tensors
from memfit.capture.workloads import LossFn
from memfit.engine.intercept import is_compiled
from memfit.engine.planning_scope import reaching
from memfit.hardware.budget import Budget, card_named, probe
from memfit.levers.checkpoint import candidate_blocks, checkpointed
from memfit.modes.call_kinds import CallKinds
from memfit.modes.step_mode import Stepper
from memfit.planning.plan import Plan
from memfit.planning.search import Demand, search
from memfit.profiling.loop import Loop
from memfit.profiling.profile import Profile
from memfit.reporting.verification import Verification
from memfit.runtime.core import Core
from memfit.training.run import Run


def profile(
    model: nn.Module,
    optimizer: Optimizer,
    sample: Any,
    *,
    loss_fn: LossFn | None = None,
    device: str | None = None,
    precision: str = "off",
    checkpoint: str | Sequence[str] = "off",
    accumulate_in: str = "float32",
    max_grad_norm: float | None = None,
    clip_grad_value: float | None = None,
    zero_grad: str = "after step",
    plain_loop: bool = False,
    evaluation: int | None = None,
) -> Profile:
    """Measure or trace what one optimizer step of `model` costs, for any micro-batch size. The model does not change.

    `sample` is one batch with at least two samples along the first dimension of its tensors, as `loss_fn(model, sample)`
    takes it. Without `loss_fn` it is the model's input (a tuple is unpacked, a mapping is passed by keyword). Models on the
    meta device are traced, not timed. `precision`, `checkpoint` and `accumulate_in` are as in `wrap`, with explicit values.
    `device` names a GPU that is not in this machine ("a100-40gb", "rtx-4090", "24GiB"). Its kernels are traced, its caching
    allocator is simulated, and its seconds are modelled. Nothing is computed, so the model may be on the meta device.

    The other arguments describe the training loop. `max_grad_norm` and `clip_grad_value` clip gradients as
    `torch.nn.utils.clip_grad_norm_` and `clip_grad_value_` do. `zero_grad` says when gradients are freed: "after step", with
    the step; "before forward", once the next batch is loaded; "before backward", after the next forward; "to zero", never
    (`set_to_none=False`). `plain_loop=True` profiles a loop without memfit: variables keep the batch, the model's outputs and
    the loss alive until the next ones exist, and gradients accumulate in the parameters. (memfit's own runs hold none of
    these: a script's `out` is a lazy tensor, and outputs are joined only if the script reads them.) `evaluation` is the number
    of samples in an evaluation batch; `Profile.evaluation` has its peak.

    Raises UsageError for a sample that cannot be cut, an unknown device, or a model that needs real data to be profiled for
    another device. Errors of the model itself propagate.
    """
    elsewhere = card_named(device)
    check_module(model)
    check_optimizer(optimizer, model)
    loop = Loop.checked(
        max_grad_norm=max_grad_norm,
        clip_grad_value=clip_grad_value,
        evaluation=evaluation,
        zero_grad=zero_grad,
        plain=plain_loop,
    )
    check_functions(loss_fn=loss_fn)
    check_accumulate_in(accumulate_in)
    asked = precision_from(precision)
    if asked == "fast":
        found = "a profile has one precision; a plan finds the fastest"
        raise UsageError("precision='fast'", found=found, next_move="use one of off, float32, bfloat16, float16")
    blocks, every = blocks_from(checkpoint, model)
    on_meta = any(p.is_meta for p in model.parameters())
    here = torch.device("cpu") if on_meta else next(model.parameters()).device
    if elsewhere is None:
        check_same_device(device, here)
        _check_values(sample, on_meta)
    allowed = probe(device=here if elsewhere is None else device)
    settings = Settings(card=elsewhere, counted=True, accumulate_in=accumulate_in, loop=loop)
    core = Core(model, optimizer, here, allowed, settings, compiled=is_compiled(model))
    if loss_fn is not None:
        task = Stepper(core, loss_fn, lambda batch: loss_fn(model, batch)).task(sample)
    else:
        # The model's own call shows what the model returns. Its forward does not.
        called = model if plain_loop or evaluation is not None else model.forward
        task = CallKinds(core).task(called, _as_call(sample))
    lever = "off" if asked in ("auto", "off") else asked
    with reaching(loss_fn):
        return _profiled(core, task, lever, candidate_blocks(model) if every else blocks or ())


def _profiled(core: Core, task: Task, lever: str, blocks: Sequence[str]) -> Profile:
    """Return the profile of a task, with timings if its device is in this machine."""
    model, elsewhere = core.model, core.settings.card
    found = core.planner.profile(task, lever, tuple(blocks))
    if elsewhere is not None:
        return core.planner.measurer.timed(task, found)
    if any(p.is_meta for p in model.parameters()):
        return found
    with checkpointed(model, found.checkpoint):
        return core.planner.with_single(task, core.planner.measurer.timed(task, found, thoroughly=True))


def plan(
    profile: Profile,
    budget: Budget,
    *,
    target_batch: int,
    micro_batch: int | str = "auto",
    checkpoint: str | Sequence[str] = "auto",
) -> Plan:
    """Find the fastest plan for `target_batch` samples per optimizer step that fits the budget. This is a pure function.

    `micro_batch` is "auto", "off" (the whole batch) or a number. `checkpoint` is "auto", "off", "all" or block names.
    Raises UsageError for invalid arguments, and DoesNotFit, which says how much memory would be needed.
    """
    if not isinstance(profile, Profile):
        raise not_of_type("memfit.plan(profile, budget)", profile, "what memfit.profile(model, optimizer, sample) returned")
    if not isinstance(budget, Budget):
        raise not_of_type("memfit.plan(profile, budget)", budget, f"memfit.probe(budget={budget!r})")
    _check_same_card(profile, budget)
    check_count("target_batch", target_batch)
    size, whole = micro_batch_from(micro_batch)
    blocks = _known_blocks(checkpoint, profile)
    demand = Demand(target_batch, target_batch, micro_batch=target_batch if whole else size, checkpoint=blocks)
    # On the device here, the held memory already includes the model. On a card that is not here, nothing is held yet.
    held = max(0, budget.held - profile.model.parameter_bytes) if budget.device.here else budget.held
    return search([profile], budget.with_held(held), demand)


def apply(
    plan: Plan | str | Path, model: nn.Module, optimizer: Optimizer, loader: Any = None, *, loss_fn: LossFn | None = None
) -> Run:
    """Train `model` by an existing plan (a Plan, or the path of a saved one), without planning.

    Returns a Run, as `wrap` does. Raises PlanFileError if the plan was made for another model.
    """
    if not isinstance(plan, (Plan, str, Path)):
        raise not_of_type("memfit.apply(plan, model, optimizer)", plan, "a memfit.Plan or the path of a saved one")
    given = plan if isinstance(plan, Plan) else Plan.load(plan)
    return wrap(model, optimizer, loader, loss_fn=loss_fn, target_batch=given.target_batch, plan=given)


def verify(run: Run) -> Verification:
    """Compare the gradients of one effective batch, computed whole and in at least three unequal micro-batches.

    Uses the largest set of samples (at most 32) that fits whole. Each micro-batch gets its slice of the whole's random draws.
    Nothing changes. Script mode needs one training step first. Raises UsageError if there is nothing to compare.
    """
    if not isinstance(run, Run):
        raise not_of_type("memfit.verify(run)", run, "the Run that memfit.wrap returned")
    return run.verify()


def _check_values(sample: Any, on_meta: bool) -> None:
    """Raise UsageError if the sample is on the meta device and the model is not."""
    if not on_meta and any(t.is_meta for t in tensors(sample)):
        raise UsageError(
            "a profile of a model on this machine",
            found="the sample has tensors on the meta device (no values), and a profile times micro-batches",
            next_move="pass a real batch, or name the card it is for, like device='a100-40gb'",
        )


def _check_same_card(profile: Profile, budget: Budget) -> None:
    """Raise UsageError unless the profile and the budget are for the same device."""
    own = None if profile.card is None else profile.card.title
    other = None if budget.device.here else budget.device.name
    if own == other:
        return
    words = "here" if own is None else f"for {own}, which is not here"
    raise UsageError(
        f"a plan with a budget on {budget.device.name}",
        found=f"the profile was made {words}",
        next_move="make both for one device: memfit.profile(..., device=NAME) and memfit.probe(device=NAME)",
    )


def _known_blocks(checkpoint: Any, profile: Profile) -> tuple[str, ...] | None:
    """Return the requested blocks, or None for the planner's choice or the profile's own blocks. Raises UsageError."""
    if profile.checkpoint and not is_one_of(checkpoint, ("auto",)):
        raise UsageError(
            f"checkpoint={checkpoint!r}",
            found=f"the profile was made with {len(profile.checkpoint)} blocks checkpointed, and its plans checkpoint them",
            next_move="omit checkpoint, or make the profile without it",
        )
    if profile.source == "measured" and not is_one_of(checkpoint, ("auto", "off")):
        raise UsageError(
            f"checkpoint={checkpoint!r}",
            found="a measured profile does not tell what checkpointing would save",
            next_move=f"make it with memfit.profile(..., checkpoint={checkpoint!r}), and omit checkpoint here",
        )
    if is_one_of(checkpoint, ("auto", "off", "all")):
        return {"auto": None, "off": (), "all": profile.blocks}[checkpoint]
    if isinstance(checkpoint, str):
        raise choice_of("checkpoint", checkpoint, ("auto", "off", "all", "a list of block names"))
    blocks = names_from("checkpoint", checkpoint)
    unknown = sorted(set(blocks) - set(profile.blocks))
    if unknown:
        raise UsageError(
            f"checkpoint={list(blocks)!r}",
            found=f"the profile has no block {unknown[0]!r}",
            next_move=f"use names such as {', '.join(profile.blocks[:3]) or '(it has none)'}",
        )
    return blocks


def _as_call(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(sample, Mapping) or hasattr(sample, "keys"):
        return (), dict(sample)
    return (sample, {}) if isinstance(sample, tuple) else ((sample,), {})


