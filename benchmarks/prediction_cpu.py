"""What a step is predicted to hold on the CPU against what the kernel counts, with glibc's thresholds pinned.

    python benchmarks/prediction_cpu.py [--precision float32] [--checkpoint off] [--optimizer sgd] [--continue] [family ...]

Each case (family, precision, checkpointing, optimizer) is a fresh process, in which three sizes of micro-batch run in steps of
three micro-batches by a plan that prescribes the size. `measured` is the most anonymous memory of such a step (VmHWM without
file pages) beside what the process holds afterwards without model, gradients and optimizer state: what `Profile.peak(n)`
counts. `stayed` is by how much that has grown since before the run: code that kernels generate for a new size and keep, which a
plan adds. The profile is made before any step. `traced` is the prediction from fake tensors alone, `predicted` that of
`memfit.profile`, which has also run a few micro-batches, and `planned` that of a plan, whose checkpointing is composed on a
trace without, against `measured` and `stayed` together. Samples are collated for each micro-batch, ragged ones all at once, as
otherwise only the first micro-batch has the longest.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from statistics import median, quantiles
from typing import Any

from common import MiB, anonymous_peak, child, reset_peak, result_of_today, save, status, table

SIZES: dict[str, tuple[int, int, int]] = {
    "gpt": (1, 2, 4),
    "gpt_untied": (1, 2, 4),
    "lora": (2, 3, 4),
    "bert": (2, 4, 6),
    "vit": (4, 8, 16),
    "t5": (2, 4, 6),
    "convnext": (8, 16, 24),
    "resnet": (8, 16, 24),
    "unet": (2, 4, 8),
    "lstm": (8, 16, 32),
    "moe": (2, 4, 8),
    "dlrm": (2048, 4096, 6144),
    "dit": (2, 4, 8),
}
"""Micro-batches of each family; most come to more than 100 MiB."""
ACCUMULATION = 3
STEPS = 1
OPTIMIZERS = ("sgd", "adamw_foreach", "adamw_loop")
LEAST = 100 * MiB
"""What is measured below this is listed, and not judged: the kernel counts with an error of its own."""


def run_case(name: str, precision: str, checkpoint: str, optimizer_name: str) -> dict[str, Any]:
    import torch
    from zoo import FAMILIES, MORE

    import memfit

    family = {**FAMILIES, **MORE}[name]
    model = family.build("bench", dropout=0.1)
    optimizer = optimizer_for(optimizer_name, model, sparse=name == "dlrm")
    sizes = SIZES[name]
    samples = family.dataset(size="bench", n=ACCUMULATION * sizes[-1])
    warm_up(family, model, samples, precision)
    sample = batch_of(family, samples, sizes[-1], collated=True)
    lever = {"checkpoint": checkpoint, "precision": precision}
    traced = traced_profile(model, optimizer, sample, family.loss, **lever)
    profile = memfit.profile(model, optimizer, sample, loss_fn=family.loss, **lever)
    plain = profile
    if checkpoint != "off":
        plain = memfit.profile(model, optimizer, sample, loss_fn=family.loss, precision=precision)
    there = profile.model.parameter_bytes
    rows = []
    for n in sizes:
        torch.manual_seed(0)
        batch = batch_of(family, samples, ACCUMULATION * n, collated=family.ragged)
        before = settled() - there - state_of(optimizer)
        budget = memfit.probe()
        known = {"target_batch": ACCUMULATION * n, "micro_batch": n}
        if profile.source == "measured":  # that of the plain step does not tell what checkpointing saves
            plan = memfit.plan(profile, budget, **known)
        else:
            plan = memfit.plan(plain, budget, **known, checkpoint=checkpoint)
        run = memfit.apply(plan, model, optimizer, loss_fn=family.loss)
        run.step(batch)  # the optimizer's state comes into being, and how micro-batches are weighted is found out
        reset_peak()
        for _ in range(STEPS):
            run.step(batch)
        peak, made = anonymous_peak(), run.plan
        assert made is not None and made.micro_batch == n
        run.undo()
        optimizer.zero_grad(set_to_none=True)
        del run
        after = settled() - there - state_of(optimizer)
        rows.append(
            {
                "samples": n,
                "measured": peak - after,
                "stayed": after - before,
                "traced": None if traced is None else traced.peak(n).allocated,
                "predicted": profile.peak(n).expected,
                "planned": made.predicted.peak,
                "at_most": profile.peak(n).upper,
                "blocks": len(made.checkpoint),
            }
        )
    return {"source": profile.source, "rows": rows}


def optimizer_for(name: str, model: Any, *, sparse: bool) -> Any:
    """Few optimizers take sparse gradients: there Adagrad stands for AdamW, and SGD has no momentum."""
    from torch.optim import SGD, Adagrad, AdamW

    trained = [p for p in model.parameters() if p.requires_grad]
    if name == "sgd":
        return SGD(trained, lr=1e-3, momentum=0.0 if sparse else 0.9)
    return (Adagrad if sparse else AdamW)(trained, lr=1e-4, foreach=name.endswith("foreach"))


def warm_up(family: Any, model: Any, samples: Any, precision: str) -> None:
    """Let libraries set themselves up: two samples forward and backward, gradients dropped."""
    import torch

    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
        loss = family.loss(model, batch_of(family, samples, 2, collated=True))
    loss.backward()
    model.zero_grad(set_to_none=True)


def batch_of(family: Any, samples: Any, n: int, *, collated: bool) -> Any:
    from torch.utils.data import default_collate

    from memfit.batches.samples import SampleBatch

    found = SampleBatch([samples[i] for i in range(n)], family.collate or default_collate)
    return found.collate() if collated else found


def traced_profile(model: Any, optimizer: Any, sample: Any, loss_fn: Any, *, checkpoint: str, precision: str) -> Any:
    """What `memfit.profile` begins with; None where tracing fails."""
    import torch

    import memfit
    from memfit.autotune.settings import Settings
    from memfit.levers.checkpoint import candidate_blocks
    from memfit.modes.step_mode import Stepper
    from memfit.runtime.core import Core

    here = torch.device("cpu")
    core = Core(model, optimizer, here, memfit.probe(device=here), Settings(), compiled=False)
    task = Stepper(core, loss_fn, lambda batch: loss_fn(model, batch)).task(sample)
    lever = "off" if precision == "float32" else precision
    found = core.planner.profile(task, lever, candidate_blocks(model) if checkpoint == "all" else ())
    return None if found.source == "measured" else found


def state_of(optimizer: Any) -> int:
    """Bytes of the optimizer's state that is there."""
    return sum(v.nbytes for state in optimizer.state.values() for v in state.values() if hasattr(v, "nbytes"))


def settled() -> int:
    """The anonymous memory this process holds once all that can be let go of is gone."""
    from memfit.hardware.heap import give_back_free_heap

    gc.collect()
    give_back_free_heap()
    return status()["RssAnon"]


def main(arguments: argparse.Namespace) -> None:
    cases = [
        (name, precision, checkpoint, optimizer)
        for name in arguments.families or SIZES
        for precision in arguments.precision or ("float32", "bfloat16")
        for checkpoint in arguments.checkpoint or ("off", "all")
        for optimizer in arguments.optimizer or OPTIMIZERS
    ]
    results = result_of_today("prediction_cpu").get("cases", []) if arguments.resume else []
    done = {tuple(found["case"]) for found in results}
    for case in cases:
        if case in done:
            continue
        results.append({"case": case, **child("prediction_cpu.py", ["--case", *case], pinned=True)})
        for line in lines_of(results[-1]):
            print(*line, flush=True)
        # Kept as it goes: a full run takes long.
        save("prediction_cpu", {"cases": results, "summary": summarise(results)})
    print(table("predicted against measured", HEADER, [line for found in results for line in lines_of(found)]))
    print(json.dumps(summarise(results), indent=1))


CASE, COLUMNS = ("family", "precision", "checkpoint", "optimizer"), ("traced", "predicted", "planned")
HEADER = (*CASE, "samples", "measured MiB", *COLUMNS, "stayed MiB")


def lines_of(found: dict[str, Any]) -> list[tuple[Any, ...]]:
    if "died" in found:
        return [(*found["case"], f"DIED {found['died']}: {found['error']}", *["-"] * 5)]
    return [
        (
            *found["case"],
            row["samples"],
            f"{row['measured'] / MiB:.1f}",
            *("-" if row[column] is None else f"{error(row, column):+.2%}" for column in COLUMNS),
            f"{row['stayed'] / MiB:.1f}",
        )
        for row in found["rows"]
    ]


def summarise(results: list[dict[str, Any]]) -> dict[str, Any]:
    rows = [(found["case"], row) for found in results if "died" not in found for row in found["rows"]]
    judged = [(case, row) for case, row in rows if row["measured"] >= LEAST]
    families = {name: [(case, row) for case, row in judged if case[0] == name] for name in SIZES}
    return {
        "cases": len(rows),
        "died": sum("died" in found for found in results),
        "judged": len(judged),
        "above_at_most": sum(row["measured"] > row["at_most"] for _, row in judged),
        **{column: errors(judged, column) for column in COLUMNS},
        "by_family": {
            name: {column: errors(own, column) for column in COLUMNS} for name, own in families.items() if own
        },
    }


def errors(judged: list[tuple[Any, dict[str, Any]]], column: str) -> dict[str, float] | None:
    """Median, 95th percentile and worst of the relative errors, without their signs."""
    found = sorted(abs(error(row, column)) for _, row in judged if row[column] is not None)
    if len(found) < 2:
        return None
    return {"median": median(found), "95 %": quantiles(found, n=20, method="inclusive")[-1], "worst": found[-1]}


def error(row: dict[str, Any], column: str) -> float:
    """By what share of what was measured a prediction is too high."""
    measured = row["measured"] + (row["stayed"] if column == "planned" else 0)
    return row[column] / measured - 1


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("families", nargs="*", metavar="family")
    parser.add_argument("--precision", action="append", choices=("float32", "bfloat16"))
    parser.add_argument("--checkpoint", action="append", choices=("off", "all"))
    parser.add_argument("--optimizer", action="append", choices=OPTIMIZERS)
    parser.add_argument("--continue", dest="resume", action="store_true", help="keep today's cases")
    return parser.parse_args()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        print(json.dumps(run_case(*sys.argv[2:])))
    else:
        main(parsed())
