"""Step mode against the best of an exhaustive search over (micro-batch, checkpoint all or none) under the same limit.

    python benchmarks/speed.py [--precision auto] [--shares 0.5] [family ...]

One process per case. Its candidates are plain loops as a careful person writes them, which run in turns with memfit's own
steps. They have to keep the limit: the fastest run in processes of their own, where the memory they really take is measured
the way memfit's budget counts it. (glibc's thresholds are pinned.) The second row lets both sides compute in lower precision.
"""

from __future__ import annotations

import copy
import json
import math
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median
from typing import Any

from common import MiB, anonymous_peak, child, reset_peak, save, status, table

SHARES = {"auto": (0.15, 0.5), "fast": (0.5,)}
"""How much of the way from the least memory to that of the whole batch there is, by precision."""
CASES = ("gpt", "bert", "vit", "t5", "resnet", "convnext", "unet", "lstm")
TARGET, ROUNDS = 32, 4
BEHIND = 1.25
"""Ways by hand this much slower than the fastest of them in the first round are not run again."""
SIZES = (1, 2, 3, 4, 6, 8, 11, 16, 32)

Way = tuple[int, tuple[str, ...], str]
"""(samples per micro-batch, blocks checkpointed, precision)."""


def run_case(family_name: str, share: float, precision: str) -> dict:
    from torch.utils.data import DataLoader
    from zoo import FAMILIES as ZOO, first_batch

    import memfit

    family = ZOO[family_name]
    model = family.build("bench")
    sample = first_batch(family, TARGET, size="bench")
    profile = memfit.profile(model, adamw(model), sample, loss_fn=family.loss)
    least, whole = profile.peak(1).expected, profile.peak(TARGET, accumulates=False).expected
    budget = int(1.1 * least + share * (whole - least)) + 32 * MiB

    mine = copy.deepcopy(model)
    loader = DataLoader(family.dataset(size="bench", n=TARGET), batch_size=8, collate_fn=family.collate)
    run = memfit.wrap(
        mine, adamw(mine), loader, loss_fn=family.loss, target_batch=TARGET, budget=budget, precision=precision
    )
    batch = next(iter(run.loader))
    for _ in range(10):  # while micro-batch sizes are measured
        run.step(batch)

    by_hand = {way_name(*way): way for way in candidates(profile, budget, precision)}
    ways: dict[str, Callable[[], object]] = {"memfit": lambda: run.step(batch)}
    for name, way in by_hand.items():
        own = copy.deepcopy(model)
        ways[name] = plain_step(family, own, adamw(own), sample, *way)
    limit = Limit(family_name, by_hand, budget)
    times = timed(ways, limit)
    mine_seconds = times.pop("memfit")
    best = limit.fastest(times)
    plan = run.plan
    return {
        "family": family_name,
        "precision": precision,
        "budget": budget,
        "plan": f"{plan.micro_batch} x {plan.accumulation}, {len(plan.checkpoint)} blocks, {plan.precision}",
        "memfit": mine_seconds,
        "best": times[best],
        "best_way": best,
        "ratio": times[best] / mine_seconds,
        "candidates": times,
        "beyond_the_limit": limit.beyond,
    }


class Limit:
    """Which ways by hand keep the limit: measured in a process of their own, when that is asked."""

    def __init__(self, family_name: str, ways: dict[str, Way], budget: int) -> None:
        self.family_name, self.ways, self.budget = family_name, ways, budget
        self.kept: set[str] = set()
        self.beyond: dict[str, int] = {}
        """Bytes that those take which do not."""

    def keeps(self, name: str) -> bool:
        if name not in self.kept and name not in self.beyond:
            size, blocks, precision = self.ways[name]
            arguments = ["--held", self.family_name, str(size), ",".join(blocks), precision]
            held = child("speed.py", arguments, pinned=True)["held"]
            if held <= self.budget:
                self.kept.add(name)
            else:
                self.beyond[name] = held
        return name in self.kept

    def fastest(self, seconds: dict[str, float]) -> str:
        """The fastest that keeps it."""
        return next(name for name in sorted(seconds, key=lambda name: seconds[name]) if self.keeps(name))


def held_by_hand(family_name: str, size: int, blocks: tuple[str, ...], precision: str) -> dict[str, int]:
    """Bytes that a plain loop takes, as memfit's budget counts: growth of anonymous memory, and the model that is there."""
    from zoo import FAMILIES as ZOO, first_batch

    family = ZOO[family_name]
    model = family.build("bench")
    sample = first_batch(family, TARGET, size="bench")
    optimizer = adamw(model)  # (torch loads half of itself with the first optimizer)
    there = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    before = status()["RssAnon"]
    reset_peak()
    step = plain_step(family, model, optimizer, sample, size, blocks, precision)
    for _ in range(2):
        step()
    return {"held": anonymous_peak() - before + there}


def adamw(model):
    import torch

    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)


def candidates(profile, budget: int, precision: str) -> list[Way]:
    """What may fit: every size, with no blocks checkpointed or, where that does not fit, with all (which computes the same and
    the blocks once more, so it is slower where both fit), in every precision that is allowed."""
    from memfit.planning.checkpointed import with_blocks

    def fits(size: int, blocks: tuple[str, ...]) -> bool:
        return with_blocks(profile, blocks).peak(size, accumulates=size < TARGET).allocated <= budget

    found = []
    for size in SIZES:
        blocks = () if fits(size, ()) else profile.blocks
        if fits(size, blocks):
            found.append((size, blocks, "float32"))
    return found + [(n, b, "bfloat16") for n, b, _ in found if precision == "fast"]


def way_name(size: int, blocks: tuple[str, ...], precision: str) -> str:
    return f"{size} x {math.ceil(TARGET / size)}, {len(blocks)} blocks, {precision}"


def plain_step(
    family, model, optimizer, sample, size: int, blocks: tuple[str, ...], precision: str
) -> Callable[[], object]:
    import torch
    from zoo.plain import parts

    from memfit.levers.checkpoint import checkpoint_blocks

    if blocks:
        checkpoint_blocks(model, blocks, None)
    sizes = [size] * (TARGET // size) + ([TARGET % size] if TARGET % size else [])
    pieces = parts(sample, sizes)
    total = family.count(sample)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        for piece in pieces:
            with torch.autocast("cpu", torch.bfloat16) if precision == "bfloat16" else nullcontext():
                loss = family.loss(model, piece)
            (loss * (family.count(piece) / total)).backward()
        optimizer.step()

    return step


def timed(ways: dict[str, Callable[[], object]], limit: Limit) -> dict[str, float]:
    """The median seconds of each, run in turns; those beyond the limit that were faster than what keeps it, and those far
    behind that, are left out after the first round."""
    first = {name: once(way) for name, way in ways.items()}
    fastest = limit.fastest({name: seconds for name, seconds in first.items() if name != "memfit"})
    left = {name: way for name, way in ways.items() if name == "memfit" or first[name] <= BEHIND * first[fastest]}
    left = {name: way for name, way in left.items() if name not in limit.beyond}
    found: dict[str, list[float]] = {name: [] for name in left}
    for turn in range(ROUNDS):
        order = list(left.items())
        for name, way in order if turn % 2 else reversed(order):
            found[name].append(once(way))
    return {name: median(times) for name, times in found.items()}


def once(way: Callable[[], object]) -> float:
    start = time.perf_counter()
    way()
    return time.perf_counter() - start


def main(names: list[str]) -> None:
    precisions, results = ("auto", "fast"), []
    if names[:1] == ["--precision"]:
        precisions, names = (names[1],), names[2:]
    shares = SHARES
    if names[:1] == ["--shares"]:
        shares, names = dict.fromkeys(precisions, tuple(map(float, names[1].split(",")))), names[2:]
    for precision in precisions:
        for name in names or CASES:
            for share in shares[precision]:
                found = child("speed.py", ["--case", name, str(share), precision], pinned=True, timeout=1800)
                results.append({"share": share, **found})
                print(*results[-1].values(), flush=True)
                save("speed", summarised(results))  # kept as it goes: a full run takes long
    alive = [r for r in results if "died" not in r]
    rows = [
        (
            *(r["family"], r["precision"], r["budget"] // MiB, r["plan"]),
            *(f"{r[key]:.2f}" for key in ("memfit", "best")),
            r["best_way"],
            f"{r['ratio']:.3f}",
        )
        for r in alive
    ]
    header = ("family", "precision", "budget MiB", "plan", "memfit s", "best s", "best way", "ratio")
    print(table("speed against an exhaustive search", header, rows))
    print(json.dumps(summarised(results)["summary"], indent=1))


def summarised(results: list[dict]) -> dict:
    """The results with what the table of numbers asks for."""
    alive = [r for r in results if "died" not in r]
    summary: dict[str, Any] = {"died": len(results) - len(alive)}
    for precision in dict.fromkeys(r["precision"] for r in alive):
        ratios = [r["ratio"] for r in alive if r["precision"] == precision]
        summary[precision] = {
            "cases": len(ratios),
            "geometric_mean": math.exp(sum(map(math.log, ratios)) / len(ratios)),
            "worst": min(ratios),
        }
    return {"summary": summary, "cases": results}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        print(json.dumps(run_case(sys.argv[2], float(sys.argv[3]), sys.argv[4])))
    elif sys.argv[1:2] == ["--held"]:
        names = tuple(filter(None, sys.argv[4].split(",")))
        print(json.dumps(held_by_hand(sys.argv[2], int(sys.argv[3]), names, sys.argv[5])))
    else:
        main(sys.argv[1:])
