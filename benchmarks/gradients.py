"""Gradients with memfit against one whole batch in plain PyTorch: families x losses x ways of running, ragged sizes.

    python benchmarks/gradients.py

float64, relative L2 over all parameters. BatchNorm families are compared with their norms in eval mode: batch statistics are
the one accepted difference. Then 20 AdamW steps with clipping and a schedule, and parameters in bfloat16 with 64 micro-batches.
"""

from __future__ import annotations

import copy
import statistics
import warnings
from collections.abc import Callable
from typing import Any

import torch
from common import save, table
from helpers import wrapped
from torch import Tensor, nn
from zoo import FAMILIES, first_batch
from zoo.losses import Variant, variants_for
from zoo.plain import gradients_of, optimizer_and_schedule, relative_error, train_plain

SAMPLES, MICRO = 11, 3
INSIDE_FLOAT32 = ("t5",)
"""Families that compute a softmax in float32 inside, whatever their weights are in."""


class Opaque(torch.autograd.Function):
    """An operation that nobody knows: what follows it runs by replay."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


def law_one(names: tuple[str, ...]) -> list[dict[str, Any]]:
    found = []
    for name in names:
        family = FAMILIES[name]
        batch = first_batch(family, SAMPLES, dtype=torch.float64)
        for variant in variants_for(family):
            for way in ("accumulate", "replay", "step"):
                found.append({"family": name, "loss": variant.name, "way": way, **one_case(family, variant, way, batch)})
    return found


def one_case(family: Any, variant: Variant, way: str, batch: Any) -> dict[str, Any]:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        scores = family.logits(model, batch)
        return variant.loss(Opaque.apply(scores) if way == "replay" else scores, batch)

    model = frozen_norms(family.build("tiny", dtype=torch.float64))
    plain = copy.deepcopy(model)
    loss(plain, batch).backward()
    if way == "step":
        ran = step_gradients(model, loss, batch)
    else:
        run = wrapped(model, MICRO, share=SAMPLES)
        loss(model, batch).backward()
        run.undo()
        ran = gradients_of(model)
    return {"error": relative_error(ran, gradients_of(plain))}


def step_gradients(model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], batch: Any) -> dict[str, Tensor | None]:
    seen: dict[str, Tensor | None] = {}
    run = wrapped(model, MICRO, share=SAMPLES, loss_fn=loss, before_step=lambda: seen.update(gradients_of(model)))
    run.step(batch)
    run.undo()
    return seen


def frozen_norms(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
    return model


def twenty_steps(name: str) -> dict[str, Any]:
    """Parameters after 20 optimizer steps, against the whole batch."""
    family = FAMILIES[name]
    batches = [first_batch(family, SAMPLES, dtype=torch.float64, seed=seed) for seed in range(20)]
    plain = frozen_norms(family.build("tiny", dtype=torch.float64))
    model = copy.deepcopy(plain)
    train_plain(plain, batches, family.script_loss)
    optimizer, scheduler = optimizer_and_schedule(model)
    run = wrapped(model, MICRO, share=SAMPLES, optimizer=optimizer)
    for batch in batches:
        optimizer.zero_grad()
        family.script_loss(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    run.undo()
    return {"family": name, "error": relative_error(dict(model.named_parameters()), dict(plain.named_parameters()))}


def half_precision(name: str, micro_batches: int = 64, draws: int = 5) -> dict[str, Any]:
    """Distance of bfloat16 gradients to float64's: in micro-batches of one sample, over that of the whole batch.

    Root mean square over several draws of weights and data: the distances of a single one scatter by some percent.
    """
    found = [half_precision_once(name, micro_batches, seed) for seed in range(draws)]
    cut, uncut = ((sum(pair[i] ** 2 for pair in found) / draws) ** 0.5 for i in (0, 1))
    return {"family": name, "whole": uncut, "cut": cut, "ratio": cut / uncut}


def half_precision_once(name: str, micro_batches: int, seed: int) -> tuple[float, float]:
    family = FAMILIES[name]
    exact = frozen_norms(family.build("tiny", dtype=torch.float64, seed=seed))
    family.script_loss(exact, first_batch(family, micro_batches, dtype=torch.float64, seed=seed)).backward()
    batch = first_batch(family, micro_batches, dtype=torch.bfloat16, seed=seed)
    whole = frozen_norms(family.build("tiny", dtype=torch.bfloat16, seed=seed))
    model = copy.deepcopy(whole)
    family.script_loss(whole, batch).backward()
    run = wrapped(model, 1, share=micro_batches)
    family.script_loss(model, batch).backward()
    run.undo()
    want = gradients_of(exact)
    cut, uncut = (relative_error(gradients_of(m), want) for m in (model, whole))
    return cut, uncut


def main() -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    laws = law_one(tuple(FAMILIES))
    rows = []
    for name in FAMILIES:
        for way in ("accumulate", "replay", "step"):
            errors = [case["error"] for case in laws if case["family"] == name and case["way"] == way]
            rows.append((name, way, len(errors), f"{statistics.median(errors):.1e}", f"{max(errors):.1e}"))
    print(table("gradient against the whole batch, float64", ("family", "way", "losses", "median", "worst"), rows))
    steps = [twenty_steps(name) for name in FAMILIES]
    print(table("parameters after 20 AdamW steps", ("family", "error"), [(s["family"], f"{s['error']:.1e}") for s in steps]))
    halves = [half_precision(name) for name in ("mlp", "gpt", "bert", "vit", "resnet_group", "convnext", "unet", "lstm")]
    cells = [(h["family"], f"{h['whole']:.3e}", f"{h['cut']:.3e}", f"{h['ratio']:.3f}") for h in halves]
    print(table("bfloat16 parameters, 64 micro-batches: distance to float64", ("family", "whole", "cut", "ratio"), cells))
    exact = [case["error"] for case in laws if case["family"] not in INSIDE_FLOAT32]
    summary = {
        "cases": len(laws),
        "worst": max(exact),
        "worst_with_float32_inside": max(case["error"] for case in laws),
        "worst_after_20_steps": max(s["error"] for s in steps if s["family"] not in INSIDE_FLOAT32),
        "worst_bfloat16_ratio": max(h["ratio"] for h in halves),
    }
    print(summary)
    print(save("gradients", {"summary": summary, "cases": laws, "steps": steps, "bfloat16": halves}))


if __name__ == "__main__":
    main()
