"""Implements `wrap`: probe the device, profile the model, plan, apply the plan, return the run."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, overload

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from memfit._announce import say_plan, tell_of_plans
from memfit._arguments import (
    check_data,
    check_model,
    check_module,
    check_optimizer,
    check_plan,
    check_sharded,
    settings_from,
)
from memfit._asked import ASKED, Asked, PlanReady, allowed_for, check_not_asked
from memfit._errors import RankFailed
from memfit._several import BESIDE, Runs, wrap_several
from memfit._values import check_flag
from memfit.autotune.settings import Settings
from memfit.capture.workloads import LossFn
from memfit.distributed.join import WRAPPING, agree_to_begin, beginning, beside
from memfit.distributed.unwrap_ddp import TakenOver, loss_of_outer, refuse_synchronised_norms, taken_over
from memfit.engine.intercept import interception_of, is_compiled
from memfit.engine.step_hooks import hooks_after_steps
from memfit.hardware.budget import probe, shared_among
from memfit.loading.inner import leftover
from memfit.loading.iterate import PassedThrough
from memfit.loading.loader import EffectiveLoader
from memfit.loading.pool import planning_pool
from memfit.modes.script_mode import Script
from memfit.modes.step_mode import Stepper
from memfit.planning.plan import Plan
from memfit.ranks.join import join
from memfit.ranks.ranks import Ranks
from memfit.runtime.accumulation_guard import AccumulationGuard
from memfit.runtime.core import Core
from memfit.runtime.rank_facts import FactsExchange
from memfit.runtime.team import Team
from memfit.tracing.build_profile import model_facts
from memfit.training.run import Run
from memfit.training.sharding import Sharding


@overload
def wrap(
    model: nn.Module,
    optimizer: Optimizer,
    loader: Any = None,
    *,
    target_batch: int | None = None,
    loss_fn: LossFn | None = None,
    sample: Any = None,
    budget: int | float | str | None = None,
    micro_batch: int | str = "auto",
    precision: str = "auto",
    checkpoint: str | Sequence[str] = "auto",
    shard: str = "auto",
    offload: str = "auto",
    plan: Plan | str | Path | None = None,
    enabled: bool = True,
    before_step: Callable[[], Any] | None = None,
    script_accumulation: int = 1,
    weight: Callable[[Any], float] | None = None,
    split: Callable[[Any, Any], Any] | None = None,
    methods: Sequence[str] = (),
    allow_inexact: Sequence[str] = (),
    batchnorm: str = "micro",
    accumulate_in: str = "float32",
) -> Run: ...


@overload
def wrap(model: Sequence[nn.Module], optimizer: Any, loader: Any = None, **settings: Any) -> Runs: ...


@overload
def wrap(model: nn.Module, optimizer: Sequence[Optimizer], loader: Any = None, **settings: Any) -> Runs: ...


def wrap(  # pyright: ignore[reportInconsistentOverload]
    model: Any,
    optimizer: Any,
    loader: Any = None,
    *,
    target_batch: int | None = None,
    loss_fn: LossFn | None = None,
    sample: Any = None,
    budget: int | float | str | None = None,
    micro_batch: int | str = "auto",
    precision: str = "auto",
    checkpoint: str | Sequence[str] = "auto",
    shard: str = "auto",
    offload: str = "auto",
    plan: Plan | str | Path | None = None,
    enabled: bool = True,
    before_step: Callable[[], Any] | None = None,
    script_accumulation: int = 1,
    weight: Callable[[Any], float] | None = None,
    split: Callable[[Any, Any], Any] | None = None,
    methods: Sequence[str] = (),
    allow_inexact: Sequence[str] = (),
    batchnorm: str = "micro",
    accumulate_in: str = "float32",
) -> Run | Runs:
    """Fit the training of `model` into memory, with the same gradients.

    In script mode (no `loss_fn`) the training loop does not change: one iteration of the returned loader is one optimizer
    step over one whole effective batch. memfit plans inside the first training call. In step mode
    (`loss_fn(model, batch) -> scalar`) memfit plans here, and the loop calls `run.step(batch)`.

    Arguments:
        model: the module to train; it stays the same object. Or a list of modules, including frozen ones (script mode).
        optimizer: a torch optimizer over (some of) its parameters; it stays the same object. Or a list of optimizers.
        loader: a DataLoader, any iterable of whole batches, or None for scripts that fetch batches themselves.
        target_batch: the effective batch size: samples per optimizer step. None keeps the script's own batches and cuts them.
        loss_fn: the loss of a batch, for step mode.
        sample: one batch as the loader would yield it, to plan with `loss_fn` if there is no loader.
        budget: the most device memory this process may hold: bytes (int), "6GiB" (str), a fraction of the device (float in
            (0, 1]), or None to take what is free. On the CPU it excludes what the process holds already.
        micro_batch: samples per forward: "auto", "off" (the whole share of this rank) or a number.
        precision: "auto" (lower only if nothing else fits), "off", "fast" (lower for speed), or a precision.
        checkpoint: the blocks with activation checkpointing: "auto", "off", "all" or block names.
        shard: what is sharded across the ranks: "auto" (only what does not fit otherwise), "off", "optimizer" (its state,
            ZeRO stage 1), "gradients" (and these, stage 2), "parameters" (all, stage 3). Always off on a single process.
        offload: "auto" or "off".
        plan: a Plan or the path of a saved one, used instead of planning.
        enabled: False trains without memfit, as if this call were absent; so does MEMFIT=off in the environment.
        before_step: step mode: called once per step on the total gradient, before the optimizer's step (clip there).
        script_accumulation: the gradient accumulation steps of the script itself: its iterations per optimizer step.
        weight: step mode: the weight of a micro-batch, if memfit cannot infer it.
        split: (batch, sizes) -> batches of those sizes, if memfit cannot cut it; in script mode `batch` is (args, kwargs).
        methods: script mode: methods that the script calls besides `forward`, such as "encode_image"; their calls are cut too.
        allow_inexact: names of modules that may mix samples of a batch; the report lists them.
        batchnorm: how batch norm updates its running statistics: with each micro-batch in turn ("micro"), or once with the
            whole effective batch ("whole"). Either way samples are normalized with the statistics of their micro-batch.
        accumulate_in: "float32" or "param": the dtype in which half-precision gradients accumulate.

    Raises UsageError (a ValueError) for invalid arguments, DoesNotFit (a ValueError) if no plan fits, Refused (a RuntimeError)
    if micro-batches would change the training, and PlanFileError (a ValueError). Nothing has changed then.
    """
    if isinstance(model, (list, tuple)) or isinstance(optimizer, (list, tuple)):
        settings = {k: v for k, v in locals().items() if k not in ("model", "optimizer", "loader")}
        return wrap_several(wrap, _frozen, model, optimizer, loader, settings)
    check_flag("enabled", enabled)
    asked = ASKED.get()
    if not enabled or os.environ.get("MEMFIT", "").lower() == "off":
        check_not_asked(asked)
        run = Run(model, optimizer, loader, core=None, off="MEMFIT=off in the environment" if enabled else "enabled=False")
        run.plainly(loss_fn, before_step)
        return run
    if asked is not None:
        target_batch, budget = asked.target_batch or target_batch, asked.budget or budget
    given = _Given(model, optimizer, loader, taken_over(model), asked, loss_fn, before_step, target_batch, sample, budget, plan)
    device = check_model(given.trained, given.optimizer)
    ranks = join(device, given.group)
    runs: list[Run] = []
    try:
        with beginning(ranks):
            settings = settings_from(
                given.trained,
                target_batch=target_batch,
                loss_fn=loss_fn,
                before_step=before_step,
                micro_batch=micro_batch,
                precision=precision,
                checkpoint=checkpoint,
                shard=shard,
                offload=offload,
                script_accumulation=script_accumulation,
                weight=weight,
                split=split,
                methods=methods,
                allow_inexact=allow_inexact,
                batchnorm=batchnorm,
                accumulate_in=accumulate_in,
            )
            runs.append(_wrapped(given, settings, device, ranks))
    except RankFailed:
        for run in runs:
            run.undo()
        raise
    say_plan(runs[0], loader, target_batch)
    return runs[0]


@dataclass(frozen=True)
class _Given:
    """The arguments of `wrap` that are not settings."""

    model: nn.Module
    optimizer: Optimizer
    loader: Any
    taken: TakenOver | None
    asked: Asked | None
    loss_fn: LossFn | None
    before_step: Callable[[], Any] | None
    target_batch: int | None
    sample: Any
    budget: int | float | str | None
    plan: Plan | str | Path | None

    @property
    def trained(self) -> nn.Module:
        """The trained module, without a wrapper such as DistributedDataParallel."""
        return self.model if self.taken is None else self.taken.inner

    @property
    def group(self) -> Any:
        """The process group over which that wrapper reduces gradients, or None."""
        return None if self.taken is None else self.taken.group


def _wrapped(given: _Given, settings: Settings, device: torch.device, ranks: Ranks | None) -> Run:
    """Run `wrap` once the ranks that train together are known."""
    model, optimizer, loss_fn, asked = given.trained, given.optimizer, given.loss_fn, given.asked
    check_optimizer(optimizer, model)
    loader = given.loader.source if isinstance(given.loader, (EffectiveLoader, PassedThrough)) else given.loader
    check_data(loader, given.sample, given.target_batch, loss_fn)
    plan = check_plan(given.plan, model_facts(model, optimizer).fingerprint, model)
    shard = settings.shard if plan is None else plan.shard
    check_sharded(shard, ranks)
    if ranks is not None:
        refuse_synchronised_norms(model)
        about = {"loss_fn": "none" if loss_fn is None else "given", "precision": settings.precision}
        agree_to_begin(ranks, model, optimizer, loader, target_batch=given.target_batch, **about)
        plan = plan if plan is None else plan.on_rank(ranks.rank, ranks.size)
        settings = replace(settings, rank=ranks.rank, ranks=ranks.size)
    allowed, card = allowed_for(given.budget, device, asked)
    together = 1 if ranks is None else beside(ranks, device)
    allowed = shared_among(allowed, together) if given.budget is None else allowed
    _undo_earlier(given.model, optimizer, keep=BESIDE.get().runs)
    known = replace(settings, leftover=None if ranks else leftover(loader, settings.share), card=card)
    core = Core(model, optimizer, device, allowed, known, compiled=is_compiled(model))
    core.memory.expect_states_of(BESIDE.get().optimizers)
    core.memory.train()
    if ranks is not None:
        core.team = _team(core, ranks, given.taken, steps=loss_fn is not None, whole=shard in ("auto", "off"))
    run = Run(given.model, optimizer, None, core=core)
    core.owner = run
    run.script_batch = _script_batch(loader, settings)
    tell_of_plans(run, core, asked, in_script=loss_fn is None and plan is None)
    run.loader = _effective(loader, settings.together, loss_fn, run, ranks, core.tell)
    if isinstance(core.team, Team):
        core.team.exchange(_rank_facts(core, core.team.ranks, run, plan))
    guard = None
    if given.target_batch is not None and loader is not None:
        guard = AccumulationGuard(given.target_batch, settings.script_accumulation)
    script = _script(core, run, guard if loss_fn is None else None)
    if plan is not None:
        core.in_force.fix(plan)
    sharding = None if ranks is None else Sharding(core, ranks, shard)
    run.train_sharded(sharding)
    try:
        run.take_over(given.taken, in_script=loss_fn is None)
        if loss_fn is not None:
            stepper = Stepper(core, loss_of_outer(given.taken, loss_fn), run.whole_loss(loss_fn, script))
            prepare = partial(_prepare, stepper, core, loader, given.sample, settings.share)
            _shared(sharding, prepare, stepper.plan_again)
            _tell_others(core, prepare)
            run.take_steps(stepper, loss_fn, given.before_step)
            run.intercept_evaluation(script)
        else:
            _shared(sharding, lambda: None, lambda: None)
            _tell_others(core, lambda: None)
            run.intercept(script)
    except PlanReady:
        raise
    except BaseException as error:
        if sharding is not None and sharding.level != "off":
            sharding.failed(error)  # other ranks may be waiting for this rank's shards
        run.undo()
        raise
    run.follow(guard, script)
    return run


def _team(core: Core, ranks: Ranks, taken: TakenOver | None, *, steps: bool, whole: bool) -> Team:
    """Return what trains a run together with the other ranks. `steps`: memfit runs the optimizer steps. `whole`: this rank may
    hold all parameters and optimizer state."""
    team = Team(ranks, core.model, core.staging, taken, overlaps=steps and whole)
    if team.overlap is not None:
        team.overlap.note = partial(core.note, "note")
    if steps:
        team.take_steps(core.optimizer)
    return team


def _script(core: Core, run: Run, guard: AccumulationGuard | None = None) -> Script:
    """Return script mode for this run. The loader is its own, or that of another model wrapped by the same call."""
    drawing = next(iter(BESIDE.get().runs), run)
    return Script(core, lambda: drawing.batch_samples, lambda: drawing.batches, guard)


def _frozen(model: nn.Module, optimizer: Optimizer, budget: int | float | str | None) -> Run:
    """Wrap a model without trainable parameters. Its forwards are cut if they do not fit. `optimizer` is another model's."""
    check_module(model)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    _undo_earlier(model, optimizer, keep=BESIDE.get().runs)
    core = Core(model, optimizer, device, probe(budget=budget, device=device), Settings(), compiled=is_compiled(model))
    run = Run(model, None, None, core=core)
    core.owner = run
    run.intercept(_script(core, run))
    return run


def _shared(sharding: Sharding | None, prepare: Callable[[], None], again: Callable[[], None]) -> None:
    """Plan now if possible, with as much sharding as the plan needs."""
    if sharding is None:
        prepare()
    else:
        sharding.begin(prepare, again)


def _script_batch(loader: Any, settings: Settings) -> int | None:
    """Return the samples per optimizer step, over all ranks, that the script has without a target; None if unknown."""
    size = loader.batch_size if isinstance(loader, DataLoader) else None
    return None if size is None else size * settings.ranks * settings.script_accumulation


def _rank_facts(core: Core, ranks: Ranks, run: Run, plan: Plan | None) -> FactsExchange:
    """Return the exchange of plans and speeds between ranks. An existing plan for all ranks sets their shares."""
    rank_facts = FactsExchange(core, ranks, run.measured_peak)
    shares = run.loader.shares if isinstance(run.loader, EffectiveLoader) else None
    rank_facts.shares = shares
    if shares is not None and plan is not None and len(plan.ranks) == ranks.size and sum(plan.shares) == sum(shares.latest):
        shares.latest = plan.shares
    return rank_facts


def _tell_others(core: Core, prepare: Callable[[], None]) -> None:
    """Exchange the plan with the other ranks. Plan again if the ranks agree on another precision."""
    if core.team.rank_facts is None:
        return
    before = core.settings.precision
    core.team.rank_facts.meet(WRAPPING)
    if core.settings.precision != before:
        prepare()
        core.team.rank_facts.meet(WRAPPING)


def _undo_earlier(model: nn.Module, optimizer: Optimizer, keep: Sequence[Run]) -> None:
    """Undo earlier wraps of this model and optimizer, so that wrapping again plans again."""
    found = [interception.owner for module in model.modules() if (interception := interception_of(module)) is not None]
    found += [getattr(hook, "__self__", None) for hook in hooks_after_steps(optimizer)]
    for owner in found:
        if isinstance(owner, Run) and owner not in keep:
            owner.undo()


def _effective(
    loader: Any,
    size: int | None,
    loss_fn: LossFn | None,
    run: Run,
    ranks: Ranks | None,
    tell: Callable[[str], None],
) -> Any:
    if loader is None:
        return None
    if isinstance(loader, DataLoader):
        collated = loss_fn is None
        return EffectiveLoader(
            loader, share=size, collated=collated, on_batch=run.on_batch, apart=run.drew, ranks=ranks, tell=tell
        )
    return PassedThrough(loader, run.on_batch)


def _prepare(stepper: Stepper, core: Core, loader: Any, sample: Any, share: int | None) -> None:
    """Plan for step mode now if a sample or the loader has data to plan with, and it is known how many samples a step takes.
    Otherwise the first step plans."""
    if sample is not None:
        stepper.prepare(stepper.ordered(sample), share)
        return
    if not isinstance(loader, DataLoader):
        return
    share = share or loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    found = planning_pool(loader) if share else None
    if found is None:
        return
    pool, said = found
    ordered = stepper.ordered(pool)
    if ordered.ragged:
        core.note("note", f"samples differ in size: {said}")
    stepper.prepare(ordered, share)
