"""Builds a Profile by tracing the model, or by measuring micro-batches of two neighboring sizes where tracing fails."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memfit.engine.gradients import sparse_parameters
from memfit.engine.shadow_optimizer import shadow_optimizer, step
from memfit.engine.staged import Staging
from memfit.engine.weighting import Weighting
from memfit.engine.work import Work
from memfit.hardware.exhausted import is_out_of_memory, retry_on_oom
from memfit.kernels.target import Target
from memfit.profiling.loop import MEMFITS, Loop
from memfit.profiling.profile import ModelFacts, ModuleFacts, Profile, affine
from memfit.profiling.timeline import Timeline, fit, split_like
from memfit.tracing.failures import telling_failures
from memfit.tracing.fake import FakeWorld
from memfit.tracing.ledger import Ledger
from memfit.tracing.plain_loop import clip
from memfit.tracing.sandbox import steps_undone
from memfit.tracing.timing import Stopwatch, clone_of_optimizer
from memfit.tracing.trace import MakeWork, Manner, Trace, trace_step

SIZES, CHECK = (2, 3), 5
"""Sizes of the traced micro-batches. Two sizes give every allocation as fixed + per sample; the third checks the fit. One
sample is left out because operators treat dimensions of size one differently."""


@dataclass(frozen=True)
class Subject:
    """The model to profile, and the settings to profile it with."""

    model: nn.Module
    """The model."""
    optimizer: Optimizer
    """Its optimizer."""
    device: torch.device
    """Device the model computes on."""
    weighting: Weighting
    """How micro-batches are weighted."""
    precision: str
    """The precision the step computes in."""
    precision_is_lever: bool = False
    """Whether memfit's autocast sets that precision."""
    checkpoint: tuple[str, ...] = ()
    """Blocks under activation checkpointing."""
    blocks: tuple[str, ...] = ()
    """Blocks to record: the candidates for activation checkpointing."""
    levers: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Returns a context manager that applies the levers (memory optimizations) to the model."""
    target: Target | None = None
    """The GPU whose kernels are traced, if the model is on another device."""
    counted: bool = False
    """Whether FLOPs and memory traffic are counted."""
    in_float32: bool = True
    """Whether gradients of half-precision parameters accumulate in float32."""
    loop: Loop = MEMFITS
    """What the script's own loop does around forward and backward."""


def traced_profile(
    subject: Subject,
    make_work: MakeWork,
    available: int,
    sizes: Sequence[int] | None = None,
    like: Profile | None = None,
) -> Profile:
    """Builds a Profile by tracing the step on fake tensors; `available` is the most samples `make_work` can provide.

    `like` is a profile of the same step on samples of another size. If both steps run the same way, one trace is enough. With
    `sizes`, only the optimizer step is reused from it. Raises TraceFailed for whatever is raised on fake tensors: measuring
    then raises the user's own errors again.
    """
    if like is not None and like.timeline is not None and sizes is None and available >= SIZES[1]:
        one = traced_profile(subject, make_work, available, SIZES[1:], like)
        found = None if one.timeline is None else split_like(one.timeline, SIZES[1], like.timeline)
        return traced_profile(subject, make_work, available) if found is None else replace(one, timeline=found)
    affinely = sizes is None and available >= CHECK
    chosen = SIZES if affinely else tuple(sizes or range(1, available + 1))
    batches = (*SIZES, CHECK) if affinely and like is None and subject.loop.evaluation is not None else ()
    trace = trace_step(
        subject.model,
        subject.optimizer,
        make_work,
        chosen,
        subject.weighting,
        subject.device,
        check=CHECK if affinely else None,
        blocks=subject.blocks,
        levers=subject.levers,
        like=None if like is None else like.timeline,
        manner=Manner(subject.target, subject.counted, subject.in_float32, subject.loop, batches),
    )
    whole = affine(trace.timelines[0], trace.timelines[1], trace.timelines[2], (*SIZES, CHECK)) if affinely else None
    own, evaluation = trace.timelines[0].recomputed(), _evaluated(trace.evaluated)
    return Profile(
        **_circumstances(subject),
        timeline=whole if whole is not None else (trace.timelines[0] if len(chosen) == 1 else None),
        points=tuple((n, t.peak(n)) for n, t in zip(chosen, trace.timelines)),
        source="traced" if whole is not None else "traced at single sizes",
        blocks=tuple(b for b in subject.blocks if b not in own and b not in subject.checkpoint),
        script_blocks=tuple(b for b in subject.blocks if b in own),
        written_buffers=trace.written,
        without_rule=trace.without_rule,
        evaluated=evaluation,
        notes=(*_guess_notes(trace.guesses), *_evaluation_notes(subject.loop, trace, evaluation)),
    )


def _evaluated(timelines: Sequence[Timeline]) -> Timeline | None:
    """One evaluation for batches of every size; None where the traces do not fit one."""
    if not timelines:
        return None
    small, large, third = timelines
    whole = fit(small, SIZES[0], large, SIZES[1])
    return None if whole is None or whole.peak(CHECK) != third.peak(CHECK) else whole


def _evaluation_notes(loop: Loop, trace: Trace, found: Timeline | None) -> tuple[str, ...]:
    """Why the requested evaluation is unknown."""
    if loop.evaluation is None or found is not None:
        return ()
    reason = f"tracing takes a batch of {CHECK} samples" if not trace.evaluated else "other sizes compute differently"
    return (f"the evaluation is unknown: {trace.unevaluated or reason}",)


def measured_profile(
    subject: Subject,
    work: Work,
    available: int,
    staging: Staging,
    reason: str,
    smallest: int = 1,
    *,
    reserved: bool = False,
) -> Profile:
    """Builds a Profile by running micro-batches of `smallest` samples and one more, where tracing fails. `reserved` selects
    that scale of `Meter`: bytes requested, not bytes resident in RAM."""
    watch = Stopwatch(subject.model, staging, subject.weighting, subject.device, reserved=reserved, trimmed=True)
    facts = model_facts(subject.model, subject.optimizer)
    state = state_bytes(subject.optimizer)
    standing = facts.parameter_bytes + facts.gradient_bytes + state
    with subject.levers(), watch.session(work, smallest):
        timings = [watch.run(work, n) for n in (smallest, smallest + 1) if n <= min(available, work.samples)]
    found = Profile(
        **_circumstances(subject),
        timeline=None,
        points=(),
        source="measured",
        standing=standing,
        stepping=stepping_bytes(
            subject.optimizer,
            subject.device,
            facts.gradient_bytes,
            subject.loop,
            by_rows=sparse_parameters(subject.model),
        ),
        notes=(
            f"profiled by measuring micro-batches of {smallest} and {smallest + 1} samples, because tracing failed: {reason}",
            *_unseen_notes(subject.loop),
        ),
    )
    return found.with_timings(tuple(timings), 0.0)


def model_facts(model: nn.Module, optimizer: Optimizer) -> ModelFacts:
    """Returns what identifies the model and its optimizer, and the bytes of parameters and gradients."""
    parameters = list({id(p): p for p in model.parameters()}.values())
    trained = [p for p in parameters if p.requires_grad]
    digest = hashlib.sha256(type(optimizer).__name__.encode())
    for name, p in model.named_parameters():
        digest.update(f"{name}{tuple(p.shape)}{p.dtype}{p.requires_grad}".encode())
    return ModelFacts(
        name=type(model).__name__,
        parameters=sum(p.numel() for p in parameters),
        trainable=sum(p.numel() for p in trained),
        parameter_bytes=_bytes(parameters) + _bytes(list(model.buffers())),
        gradient_bytes=_bytes(trained),
        optimizer=optimizer_name(optimizer),
        fingerprint=digest.hexdigest()[:16],
    )


def optimizer_name(optimizer: Optimizer) -> str:
    """Returns the optimizer's class, and whether its step is fused: a fused step takes less memory and rounds differently."""
    fused = any(group.get("fused") for group in optimizer.param_groups)
    return f"{type(optimizer).__name__}{' (fused)' if fused else ''}"


def module_facts(model: nn.Module) -> tuple[ModuleFacts, ...]:
    """Returns every module of the model, with the parameters that it holds itself."""
    seen: set[int] = set()
    found = []
    for name, module in model.named_modules():
        own = [p for p in module.parameters(recurse=False) if id(p) not in seen]
        seen.update(map(id, own))
        trained = sum(p.numel() for p in own if p.requires_grad)
        found.append(ModuleFacts(name, type(module).__name__, sum(p.numel() for p in own), trained))
    return tuple(found)


def state_bytes(optimizer: Optimizer) -> int:
    """Returns the bytes of optimizer state after a step: the existing state, and what a small clone creates for the rest."""
    there = sum(_bytes(_tensors(state)) for state in optimizer.state.values())
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    missing = _bytes([p for p in trained if p not in optimizer.state])
    if not missing:
        return there
    return there + int(missing * retry_on_oom(lambda: _state_per_byte(optimizer), trained[0].device))


AS_ADAM = 2.0
"""Bytes of state per byte of parameters: two moments (Kingma and Ba 2015, arXiv:1412.6980)."""


def _state_per_byte(optimizer: Optimizer) -> float:
    """Bytes of state that the optimizer creates per byte of parameters."""
    clone, chosen, _ = clone_of_optimizer(optimizer, limit=1 << 20)
    for p in chosen:
        p.grad = torch.zeros_like(p)
    try:
        with steps_undone(optimizer, chosen[0].device):
            step(clone)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return AS_ADAM  # one that takes no dense gradients, such as torch's SparseAdam
    return sum(_bytes(_tensors(clone.state[p])) for p in chosen if p in clone.state) / max(1, _bytes(chosen))


def state_there(optimizer: Optimizer) -> int:
    """Returns the bytes of optimizer state that already exist."""
    there = [v for state in optimizer.state.values() if isinstance(state, dict) for v in state.values()]
    return sum(v.numel() * v.element_size() for v in there if isinstance(v, torch.Tensor))


def stepping_bytes(
    optimizer: Optimizer,
    device: torch.device,
    otherwise: int,
    loop: Loop = MEMFITS,
    *,
    by_rows: Sequence[torch.Tensor] = (),
) -> int:
    """Returns the temporary bytes of gradient clipping and of the optimizer step, beyond parameters, gradients and state. They
    come from a step on fake tensors; returns `otherwise` where that fails (foreach takes another copy of the parameters). Not
    covered: parameters `by_rows`, whose gradients are sparse: their steps take less than the backward that made the rows."""
    world, ledger = FakeWorld(), Ledger(device)
    left_out = set(map(id, by_rows))
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad and id(p) not in left_out]
    twins = {id(p): world.parameter(p) for p in trained}
    shadow = shadow_optimizer(optimizer, lambda p: twins.get(id(p)), world.twin)
    try:
        with steps_undone(optimizer, device, real=False), telling_failures(world), world.entered(), ledger:
            for p in twins.values():
                p.grad = torch.zeros_like(p)
            step(shadow)
            ledger.restart()
            ledger.window()
            clip(twins.values(), loop, device.type)
            step(shadow)
    except Exception:
        return otherwise
    return max(0, ledger.timeline().growth(1))


def trains_in_half(model: nn.Module) -> bool:
    """Whether gradients come in half precision, so that the dtype they accumulate in matters."""
    return any(p.requires_grad and p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters())


def _circumstances(subject: Subject) -> dict[str, Any]:
    target = subject.target
    here = torch.cuda.get_device_capability(subject.device) if subject.device.type == "cuda" else None
    capability = here if target is None else target.capability
    return {
        "model": model_facts(subject.model, subject.optimizer),
        "device": subject.device.type if target is None else target.kind,
        "capability": capability,
        "precision": subject.precision,
        "precision_is_lever": subject.precision_is_lever,
        "checkpoint": subject.checkpoint,
        "accumulate_in": "float32" if subject.in_float32 or not trains_in_half(subject.model) else "param",
        "modules": module_facts(subject.model) if subject.counted else (),
        "loop": subject.loop,
    }


def _unseen_notes(loop: Loop) -> tuple[str, ...]:
    """Names the parts of the loop that a measurement does not include."""
    asked = {"zero_grad": loop.gradients_stay, "plain_loop": loop.plain, "evaluation": loop.evaluation is not None}
    names = ", ".join(name for name, is_asked in asked.items() if is_asked)
    return (f"{names}: not checked, as that takes a trace",) if names else ()


def _guess_notes(guesses: Sequence[str]) -> tuple[str, ...]:
    if not guesses:
        return ()
    return (f"the model reads computed values ({', '.join(guesses)}); tracing guessed them",)


def _tensors(state: Any) -> list[torch.Tensor]:
    return [v for v in state.values() if isinstance(v, torch.Tensor)] if isinstance(state, dict) else []


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
