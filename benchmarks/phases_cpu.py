"""What the phases of a plain training loop, without memfit, are predicted to hold on the CPU against what the kernel counts.

    python benchmarks/phases_cpu.py [--loop NAME] [family ...]

Each case (family, loop) is a fresh process with glibc's thresholds pinned. `training` is the most anonymous memory (VmHWM
without file pages) of a step whose variables hold the batch, the model's output and the loss of the last one, `evaluation` that
of three batches in eval mode without gradients after it; both beside what the process holds afterwards without model, gradients
and optimizer state. Predictions are `profile.peak(n, accumulates=False)` and `profile.evaluation(n)` of
`memfit.profile(..., plain_loop=True)`, made before the first step.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from common import MiB, anonymous_peak, child, reset_peak, save, table
from prediction_cpu import LEAST, batch_of, optimizer_for, settled, state_of, warm_up

SIZES = {"gpt": ((2, 4), (4, 16)), "bert": ((4, 6), (8, 24)), "vit": ((8, 16), (16, 64)), "convnext": ((8, 16), (16, 48))}
"""Micro-batches, and batches of the evaluation."""
LOOPS: dict[str, dict[str, Any]] = {
    "after step": {},
    "clipped, before forward": {"max_grad_norm": 1.0, "zero_grad": "before forward"},
    "before backward": {"clip_grad_value": 0.1, "zero_grad": "before backward"},
    "to zero": {"max_grad_norm": 1.0, "zero_grad": "to zero"},
}


class Script:
    """The lines of a plain training script."""

    def __init__(self, family: Any, model: Any, optimizer: Any, loop: dict[str, Any]) -> None:
        self.family, self.model, self.optimizer, self.loop = family, model, optimizer, loop

    def train(self, batches: list[Any]) -> None:
        import torch

        zero_grad, kept = self.loop.get("zero_grad", "after step"), {}
        handle = self.model.register_forward_hook(lambda module, args, output: kept.__setitem__("out", output))
        for number, source in enumerate(batches):
            if number == len(batches) - 1:
                reset_peak()
            batch = copied(source)
            if zero_grad in ("before forward", "to zero"):
                self.optimizer.zero_grad(set_to_none=zero_grad != "to zero")
            loss = self.family.loss(self.model, batch)
            if zero_grad == "before backward":
                self.optimizer.zero_grad()
            loss.backward()
            if "max_grad_norm" in self.loop:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.loop["max_grad_norm"])
            if "clip_grad_value" in self.loop:
                torch.nn.utils.clip_grad_value_(self.model.parameters(), self.loop["clip_grad_value"])
            self.optimizer.step()
            if zero_grad == "after step":
                self.optimizer.zero_grad()
        handle.remove()

    def evaluate(self, batches: list[Any]) -> None:
        import torch

        kept: dict[str, Any] = {}
        handle = self.model.register_forward_hook(lambda module, args, output: kept.__setitem__("out", output))
        self.model.eval()
        with torch.no_grad():
            for source in batches:
                batch = copied(source)
                kept["loss"] = self.family.loss(self.model, batch)
        self.model.train()
        handle.remove()


def first(batch: Any, samples: int) -> Any:
    """So many samples of a batch, in memory of their own."""
    from memfit.batches.tree import map_leaves

    return map_leaves(lambda leaf: leaf[:samples].clone() if hasattr(leaf, "clone") else leaf, batch)


def copied(batch: Any) -> Any:
    """The batch as a loader would make it: in memory of its own."""
    from memfit.batches.tree import map_leaves

    return map_leaves(lambda leaf: leaf.clone() if hasattr(leaf, "clone") else leaf, batch)


def run_case(name: str, which: str) -> dict[str, Any]:
    import torch
    from zoo import FAMILIES

    import memfit

    family, loop = FAMILIES[name], LOOPS[which]
    model = family.build("bench", dropout=0.1)
    optimizer = optimizer_for("adamw_loop", model, sparse=False)
    sizes, evaluations = SIZES[name]
    samples = family.dataset(size="bench", n=max(evaluations))
    warm_up(family, model, samples, "float32")
    whole = batch_of(family, samples, max(evaluations), collated=True)  # padded to one length
    sample = first(whole, 6)
    asked = {**loop, "plain_loop": True, "evaluation": evaluations[0]}
    profile = memfit.profile(model, optimizer, sample, loss_fn=family.loss, **asked)
    there, rows = profile.model.parameter_bytes, []
    for n, m in zip(sizes, evaluations):
        torch.manual_seed(0)
        batches = [first(whole, n), first(whole, m)]
        script = Script(family, model, optimizer, loop)
        script.train(batches[:1] * 3)
        training = anonymous_peak()
        gradients_there = any(p.grad is not None for p in model.parameters())
        script.evaluate(batches[1:])
        reset_peak()
        script.evaluate(batches[1:] * 3)
        evaluation = anonymous_peak()
        optimizer.zero_grad(set_to_none=True)
        after = settled() - there - state_of(optimizer)
        for phase, measured, size, peak in (
            ("training", training, n, profile.peak(n, accumulates=False)),
            ("evaluation", evaluation, m, profile.evaluation(m)),
        ):
            rows.append({"phase": phase, "samples": size, "measured": measured - after, "predicted": peak.expected})
        rows[-1]["gradients_there"] = gradients_there
        del batches, script
    return {"source": profile.source, "rows": rows}


def main(arguments: argparse.Namespace) -> None:
    results = []
    for name in arguments.families or SIZES:
        for which in arguments.loop or LOOPS:
            results.append({"case": (name, which), **child("phases_cpu.py", ["--case", name, which], pinned=True)})
            for line in lines_of(results[-1]):
                print(*line, flush=True)
            save("phases_cpu", {"cases": results, "worst": worst(results)})
    print(table("predicted against measured", HEADER, [line for found in results for line in lines_of(found)]))


HEADER = ("family", "loop", "phase", "samples", "measured MiB", "error")


def lines_of(found: dict[str, Any]) -> list[tuple[Any, ...]]:
    if "died" in found:
        return [(*found["case"], f"DIED {found['died']}: {found['error']}", "-", "-", "-")]
    return [
        (*found["case"], row["phase"], row["samples"], f"{row['measured'] / MiB:.1f}", f"{error(row):+.2%}")
        for row in found["rows"]
    ]


def worst(results: list[dict[str, Any]]) -> dict[str, float]:
    """The largest relative error of each phase, of what is large enough to be judged."""
    rows = [row for found in results for row in found.get("rows", ()) if row["measured"] >= LEAST]
    return {
        phase: max((abs(error(row)) for row in rows if row["phase"] == phase), default=0.0)
        for phase in ("training", "evaluation")
    }


def error(row: dict[str, Any]) -> float:
    """By what share of what was measured a prediction is too high."""
    return row["predicted"] / row["measured"] - 1


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("families", nargs="*", metavar="family")
    parser.add_argument("--loop", action="append", choices=tuple(LOOPS))
    return parser.parse_args()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        print(json.dumps(run_case(*sys.argv[2:])))
    else:
        main(parsed())
