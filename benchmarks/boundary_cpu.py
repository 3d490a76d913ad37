"""The largest micro-batch that is predicted to fit against the largest that really runs, with a memory limit really set.

    python benchmarks/boundary_cpu.py [--limits 10] [family ...]

One fresh process per family, with glibc's thresholds pinned. For every room it forks; RLIMIT_DATA lets the fork grow by so much
and no more; the fork makes a profile, and tells from it. `predicted` is the largest size whose `Profile.peak` is expected to
stay within what is left, `sure` the one whose upper bound does, `planned` the largest that a plan would take, which keeps a
margin besides. A size runs if two plain steps of two micro-batches do, in a loop written by hand, in a fork of that fork: with
the same limit, and beside what making the profile has left there (kernels above all, up to 53 MiB for convolutions). Rooms lie
evenly between what one sample takes and what the largest micro-batch does, a little off.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from common import MiB, child, limit_data, save, table

MOST: dict[str, int] = {
    "gpt": 8,
    "gpt_untied": 8,
    "lora": 8,
    "bert": 12,
    "vit": 24,
    "t5": 8,
    "convnext": 32,
    "resnet": 32,
    "unet": 16,
    "lstm": 32,
    "dit": 12,
}
"""The largest micro-batch of each family that is looked at."""


def run_family(name: str, limits: int) -> dict[str, Any]:
    import torch
    from zoo import FAMILIES, MORE, first_batch

    import memfit
    family, share = {**FAMILIES, **MORE}[name], 2 * MOST[name]
    model = family.build("bench", dropout=0.1)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    sizes = list(range(1, MOST[name] + 1))
    sample = first_batch(family, share, size="bench")
    # Nothing runs in this process: forks would find the kernels made, and not see what making them takes.
    ends = in_fork(lambda: grown(memfit.profile(model, optimizer, sample, loss_fn=family.loss), sizes[0], sizes[-1]))
    assert ends is not None
    low, high = ends["low"], ends["high"]
    gc.collect()
    cases = []
    for k in range(limits):
        room = int(low + (k + 0.63) / limits * (high - low)) + 8 * MiB
        told = in_fork(lambda room=room: judge(family, model, optimizer, sample, share, sizes, room))
        cases.append({"family": name, "room": room, **(told or {"died": True})})
    return {"cases": cases}


def judge(family: Any, model: Any, optimizer: Any, sample: Any, share: int, sizes: list[int], room: int) -> dict[str, int]:
    """What is told within the room, and what runs there."""
    from memfit.batches.samples import count_elements

    # Predictions are for the longest beside gradients of others: they come last here.
    samples = sorted(family.dataset(size="bench", n=share), key=count_elements)
    limit_data(room)
    told = predict(family, model, optimizer, sample, sizes)
    gc.collect()
    runs: dict[int, bool] = {}

    def fits(n: int) -> bool:
        if n not in runs:
            runs[n] = in_fork(lambda: steps(family, model, optimizer, samples, n)) is not None
        return runs[n]

    return {**told, "actual": largest(sizes, fits)}


def grown(profile: Any, smallest: int, largest: int) -> dict[str, int]:
    """What micro-batches of these sizes are expected to take beside the parameters."""
    there = profile.model.parameter_bytes
    return {"low": profile.peak(smallest).expected - there, "high": profile.peak(largest).expected - there}


def predict(family: Any, model: Any, optimizer: Any, sample: Any, sizes: list[int]) -> dict[str, int]:
    """The largest of `sizes` that fits by the profile, and by the plan; 0 where none does."""
    import memfit

    profile = memfit.profile(model, optimizer, sample, loss_fn=family.loss)
    budget = memfit.probe()
    allowed = budget.limit - max(0, budget.held - profile.model.parameter_bytes)
    peaks = {n: profile.peak(n).plus(profile.kept_for((n,))) for n in sizes}
    return {
        "predicted": max((n for n in sizes if peaks[n].expected <= allowed), default=0),
        "sure": max((n for n in sizes if peaks[n].upper <= allowed), default=0),
        "planned": max((n for n in sizes if peaks[n].upper <= allowed - budget.margin), default=0),
        "allowed": allowed,
        "margin": budget.margin,
    }


def steps(family: Any, model: Any, optimizer: Any, samples: Any, n: int) -> dict[str, int]:
    """Two plain steps of two micro-batches of `n` samples; whatever goes wrong ends the process."""
    from torch.utils.data import default_collate

    last = len(samples) - n
    pieces = [[samples[i] for i in range(start, start + n)] for start in (last - n, last)]
    for _ in range(2):
        optimizer.zero_grad(set_to_none=True)
        for piece in pieces:
            (family.loss(model, (family.collate or default_collate)(piece)) / 2).backward()
        optimizer.step()
    return {"ran": n}


def largest(sizes: list[int], fits: Callable[[int], bool]) -> int:
    """The largest size that fits, where all below it do; 0 where none does."""
    low, high = 0, len(sizes)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(sizes[middle - 1]) else (low, middle - 1)
    return sizes[low - 1] if low else 0


def in_fork(what: Callable[[], dict[str, int]]) -> dict[str, int] | None:
    """What a fork of this process finds; None where it does not live to tell."""
    receive, send = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            os.write(send, json.dumps(what()).encode())
            os._exit(0)
        finally:
            os._exit(1)
    os.close(send)
    with os.fdopen(receive) as told:
        text = told.read()
    return json.loads(text) if os.waitpid(process, 0)[1] == 0 and text else None


def main(arguments: argparse.Namespace) -> None:
    results: list[dict[str, Any]] = []
    for name in arguments.families or MOST:
        found = child("boundary_cpu.py", ["--family", name, str(arguments.limits)], pinned=True, timeout=3600)
        results += found.get("cases", [{"family": name, **found}])
        print(name, *(f"{c['predicted']}/{c['actual']}" for c in found.get("cases", ())), found.get("error", ""), flush=True)
        # Kept as it goes: a full run takes long.
        save("boundary_cpu", {"cases": results, "summary": summarise(results)})
    told = [c for c in results if "actual" in c]
    header = ("family", "room MiB", "predicted", "sure", "planned", "actual")
    print(table("largest micro-batch", header, [(c["family"], c["room"] // MiB, *(c[k] for k in header[2:])) for c in told]))
    print(json.dumps(summarise(results), indent=1))


def summarise(results: list[dict[str, Any]]) -> dict[str, Any]:
    told = [c for c in results if "actual" in c]
    return {
        "cases": len(told),
        "died": len(results) - len(told),
        **{
            column: {
                "equal": sum(c[column] == c["actual"] for c in told) / max(1, len(told)),
                "above": sum(c[column] > c["actual"] for c in told),
                "below": sum(c[column] < c["actual"] for c in told),
            }
            for column in ("predicted", "sure", "planned")
        },
    }


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("families", nargs="*", metavar="family")
    parser.add_argument("--limits", type=int, default=10, help="rooms per family")
    return parser.parse_args()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--family"]:
        os.environ["OMP_NUM_THREADS"] = "1"  # forks have no threads of their parent's
        print(json.dumps(run_family(sys.argv[2], int(sys.argv[3]))))
    else:
        main(parsed())
