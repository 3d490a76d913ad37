"""On a real GPU: what is predicted against what is reserved, seconds against a loop by hand, host waits, planning seconds.

    python benchmarks/gpu.py memory [--workers 8] [family ...]     # 8 families x 4 variants
    python benchmarks/gpu.py speed [family ...]                    # in turns with loops by hand, one family after the other
    python benchmarks/gpu.py billion                               # a transformer of 1 B parameters, far beyond the card
    python benchmarks/gpu.py all

Models are of usual sizes (GPT-2, BERT and T5 base, ViT-B/16, ResNet-50, ConvNeXt-T, a U-Net, an LSTM); data is synthetic. Every
case is a process of its own. `memory` runs several at a time, each within a budget; `speed` runs one at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from statistics import median
from typing import Any

from common import FAMILIES, MiB, child, save, table

TARGETS = {"gpt": 48, "bert": 192, "vit": 256, "t5": 96, "resnet": 256, "convnext": 256, "unet": 64, "lstm": 1024}
SIZE = os.environ.get("GPU_SIZE", "large")
"""Another one, such as bench, is to try this program with."""
VARIANTS = ("float32", "bfloat16", "checkpointed", "expandable")
BUDGET = os.environ.get("GPU_BUDGET", "8GiB")
STEPS, ROUNDS, BEHIND = 12, 3, 1.3
BILLION: dict[str, Any] = {"vocab_size": 50304, "n_positions": 1024, "n_embd": 2048, "n_layer": 18, "n_head": 16}


def memory_case(name: str, variant: str) -> dict[str, Any]:
    """Steps of memfit, then of a loop by hand at the same micro-batch."""
    import torch

    if variant == "expandable":
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"  # before the first allocation
    cuda = torch.cuda
    family, model, optimizer, samples = built(name)
    target = TARGETS[name]
    run, planning = wrapped(family, model, optimizer, samples, target, budget=BUDGET, **levers(variant))
    batch = next(iter(run.loader))
    for _ in range(STEPS):
        run.step(batch)
    plan, stats, profile = run.plan, run.stats(), run._core.profile
    cuda.reset_peak_memory_stats()
    for _ in range(2):
        run.step(batch)
    cuda.synchronize()
    reserved, allocated = cuda.max_memory_reserved(), cuda.max_memory_allocated()
    found: dict[str, Any] = {
        "micro_batch": plan.micro_batch,
        "accumulation": plan.accumulation,
        "blocks": len(plan.checkpoint),
        "planning": planning,
        "predicted": stats["peak_predicted"],
        "upper": plan.predicted.upper + plan.held,
        "measured": stats["peak_measured"],
        "reserved": reserved,
        "allocated": allocated,
        "held": plan.held,
        "excess": profile and profile.excess,
        "timed": [(timing.samples, timing.growth, timing.seconds) for timing in (profile.timings if profile else ())],
        "events": [event.kind for event in run.events if event.kind != "plan"],
    }
    blocks = plan.checkpoint
    run.undo()
    optimizer.zero_grad(set_to_none=True)
    optimizer.state.clear()
    cuda.empty_cache()
    hand = min((samples for _, samples, _ in plan.by_size), default=plan.micro_batch)  # of the longest
    step = by_hand(family, model, optimizer, samples[:target], hand, variant == "bfloat16", blocks)
    for i in range(3):
        if i == 1:
            cuda.reset_peak_memory_stats()
        step()
    cuda.synchronize()
    return {**found, "by_hand": cuda.max_memory_reserved(), "by_hand_allocated": cuda.max_memory_allocated()}


def levers(variant: str) -> dict[str, str]:
    precision = "bfloat16" if variant == "bfloat16" else "off"
    return {"precision": precision, "checkpoint": "all" if variant == "checkpointed" else "off"}


def speed_case(name: str, precision: str) -> dict[str, Any]:
    """Memfit's steps in turns with loops by hand, at its own micro-batch and at powers of two within the same budget."""
    import copy

    import torch

    from memfit._units import parse_bytes

    low = precision == "bfloat16"
    family, model, optimizer, samples = built(name)
    target = TARGETS[name]
    mine = copy.deepcopy(model)

    def hand(size: int) -> Callable[[], object]:
        return by_hand(family, model, optimizer, samples[:target], size, low, ())

    hand(1)()  # what the loop by hand holds counts as held
    beside = torch.cuda.memory_allocated()
    torch.cuda.empty_cache()
    settings = {"precision": precision if low else "off", "checkpoint": "off", "budget": parse_bytes(BUDGET) + beside}
    run, planning = wrapped(family, mine, adamw(mine), samples, target, **settings)
    batch = next(iter(run.loader))
    for _ in range(20):  # while sizes are measured
        run.step(batch)
    plan = run.plan
    ways: dict[str, Callable[[], object]] = {"memfit": lambda: run.step(batch)}
    powers = [n for n in (2**i for i in range(12)) if plan.micro_batch / 4 <= n <= target]
    for size in sorted({plan.micro_batch, *powers}):
        way = hand(size)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        way()
        if torch.cuda.max_memory_reserved() > plan.limit and size != plan.micro_batch:
            break
        ways[str(size)] = way
    seconds = timed(ways)
    best = min((n for n in seconds if n != "memfit"), key=lambda n: seconds[n])
    same = str(plan.micro_batch)
    found = {
        "micro_batch": plan.micro_batch,
        "planning": planning,
        "memfit": seconds["memfit"],
        "same": seconds[same],
        "best": seconds[best],
        "best_size": int(best),
        "seconds": seconds,
        "predicted_seconds": plan.predicted.seconds,
    }
    for label, way in (("memfit", ways["memfit"]), ("same", ways[same])):
        found[f"waits_{label}"], found[f"waits_at_{label}"] = waits_of(way)
        found[f"kernels_{label}"] = kernels_of(way) if os.environ.get("GPU_KERNELS") else None
    return found


def billion_case(target: str) -> dict[str, Any]:
    """A GPT of 1 B parameters with autocast to bfloat16, and a target batch that is far beyond the card."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    from transformers import GPT2Config, GPT2LMHeadModel

    import memfit

    with torch.device("cuda"):
        model = GPT2LMHeadModel(GPT2Config(**BILLION, use_cache=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    dataset = TensorDataset(torch.randint(0, 50304, (3 * int(target), 1024)))
    loader = DataLoader(dataset, batch_size=8)

    def loss_fn(model: Any, batch: Any) -> Any:
        return model(input_ids=batch[0], labels=batch[0]).loss

    begin = time.perf_counter()
    run = memfit.wrap(model, optimizer, loader, loss_fn=loss_fn, target_batch=int(target), precision="bfloat16")
    planning = time.perf_counter() - begin
    seconds, losses = [], []
    for batch in run.loader:
        torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        losses.append(float(run.step(batch)))
        seconds.append(time.perf_counter() - begin)
    plan, stats = run.plan, run.stats()
    tokens = int(target) * 1024
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "plan": str(plan),
        "planning": planning,
        "micro_batch": plan.micro_batch,
        "accumulation": plan.accumulation,
        "blocks": len(plan.checkpoint),
        "seconds": seconds,
        "predicted_seconds": plan.predicted.seconds,
        "tokens_per_second": tokens / seconds[-1],
        "predicted": stats["peak_predicted"],
        "measured": stats["peak_measured"],
        "reserved": torch.cuda.max_memory_reserved(),
        "limit": plan.limit,
        "losses": losses,
        "events": [event.kind for event in run.events if event.kind != "plan"],
    }


def built(name: str) -> tuple[Any, Any, Any, list[Any]]:
    """A family with its model on the device, and samples drawn before anything is timed."""
    from zoo import FAMILIES as ZOO

    family = ZOO[name]
    model = family.build(SIZE).cuda()
    dataset = family.dataset(size=SIZE, n=TARGETS[name])
    return family, model, adamw(model), [dataset[i] for i in range(TARGETS[name])]


def adamw(model: Any) -> Any:
    import torch

    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)


def wrapped(family: Any, model: Any, optimizer: Any, samples: list[Any], target: int, **settings: Any) -> tuple[Any, float]:
    """A run in step mode, and the seconds that planning took."""
    from torch.utils.data import DataLoader

    import memfit

    loader = DataLoader(samples, batch_size=8, collate_fn=family.collate)
    begin = time.perf_counter()
    run = memfit.wrap(model, optimizer, loader, loss_fn=family.loss, target_batch=target, **settings)
    return run, time.perf_counter() - begin


def by_hand(
    family: Any, model: Any, optimizer: Any, samples: list[Any], size: int, low: bool, blocks: tuple[str, ...]
) -> Callable[[], object]:
    """An accumulating loop as a careful person writes it: ragged samples sorted by length, weighted by what the loss counts.
    Micro-batches are collated as they are needed, as a loader without workers does."""
    import torch
    from torch.utils.data import default_collate

    from memfit.levers.checkpoint import checkpoint_blocks

    if blocks:
        checkpoint_blocks(model, blocks, None)
    if family.ragged:
        samples = sorted(samples, key=lambda sample: -len(sample["input_ids"]))
    collate = family.collate or default_collate
    pieces = [samples[i : i + size] for i in range(0, len(samples), size)]
    counts = [family.count(collate(piece)) for piece in pieces]
    shares = [count / sum(counts) for count in counts]
    device = torch.device("cuda")

    def step() -> None:
        from memfit.capture.workloads import moved

        optimizer.zero_grad(set_to_none=True)
        for piece, share in zip(pieces, shares):
            with torch.autocast("cuda", torch.bfloat16) if low else nullcontext():
                loss = family.loss(model, moved(collate(piece), device))
            (loss * share).backward()
        optimizer.step()

    return step


def timed(ways: dict[str, Callable[[], object]]) -> dict[str, float]:
    """The median seconds of each, run in turns; those far behind the fastest are left out after the first round."""
    first = {name: once(way) for name, way in ways.items()}
    fastest = min(first.values())
    left = {name: way for name, way in ways.items() if name == "memfit" or first[name] <= BEHIND * fastest}
    found: dict[str, list[float]] = {name: [] for name in left}
    for turn in range(ROUNDS):
        order = list(left.items())
        for name, way in order if turn % 2 else reversed(order):
            found[name].append(once(way))
    return {**first, **{name: median(times) for name, times in found.items()}}


def once(way: Callable[[], object]) -> float:
    """Seconds of a step, on the cache that the step before left."""
    import torch

    torch.cuda.empty_cache()  # of the other ways'
    way()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    way()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def waits_of(way: Callable[[], object]) -> tuple[int, list[str]]:
    """How often a step lets the host wait for the device, as torch's debug mode sees it, and where."""
    import torch

    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            way()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    synced = [w for w in heard if "called a synchronizing" in str(w.message)]
    return len(synced), sorted({f"{w.filename.rpartition('/memfit/')[2]}:{w.lineno}" for w in synced})


def kernels_of(way: Callable[[], object]) -> int | None:
    """How many kernels and copies a step launches."""
    import torch

    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
            way()
            torch.cuda.synchronize()
        return sum(event.count for event in profiled.key_averages() if event.key.startswith("cuda") and "aunch" in event.key)
    except (AssertionError, RuntimeError):  # no profiler there
        return None


def memory(names: list[str], variants: list[str], workers: int) -> dict[str, Any]:
    """All cases, several at a time."""
    cases = [(name, variant) for name in names for variant in variants]

    def one(case: tuple[str, str]) -> dict[str, Any]:
        found = {"family": case[0], "variant": case[1], **child("gpu.py", ["--case", "memory", *case], pinned=False)}
        print(*case, found["error"] if "died" in found else " ".join(map(str, _memory_row(found))), flush=True)
        return found

    with ThreadPoolExecutor(workers) as pool:
        rows = list(pool.map(one, cases))
    alive = [row for row in rows if "died" not in row]
    header = ("family", "variant", "micro", "blocks", "predicted MiB", "measured", "reserved", "by hand", "error", "planning s")
    print(table("memory", header, [_memory_row(row) for row in alive]))
    told = [row for row in alive if row["measured"]]
    errors = sorted(abs(row["predicted"] / row["measured"] - 1) for row in told)
    summary = {"died": len(rows) - len(alive), "above the upper bound": sum(row["measured"] > row["upper"] for row in told)}
    if errors:
        summary |= {"median": median(errors), "worst": errors[-1]}
    print(json.dumps(summary))
    return {"summary": summary, "cases": rows}


def _memory_row(row: dict[str, Any]) -> list[Any]:
    sizes = [f"{(row[key] or 0) / MiB:.0f}" for key in ("predicted", "measured", "reserved", "by_hand")]
    error = f"{row['predicted'] / row['measured'] - 1:+.1%}" if row["measured"] else "-"
    return [row["family"], row["variant"], row["micro_batch"], row["blocks"], *sizes, error, f"{row['planning']:.1f}"]


def speed(names: list[str], precisions: list[str]) -> dict[str, Any]:
    """All families, one after the other."""
    rows = []
    for precision in precisions:
        for name in names:
            found = child("gpu.py", ["--case", "speed", name, precision], pinned=False)
            rows.append({"family": name, "precision": precision, **found})
            print(json.dumps(rows[-1]), flush=True)
    alive = [row for row in rows if "died" not in row]
    header = (
        *("family", "precision", "micro", "memfit s", "same", "best", "best size"),
        *("waits", "by hand", "kernels", "by hand", "planning s"),
    )
    print(table("speed", header, [_speed_row(row) for row in alive]))
    return {"cases": rows}


def _speed_row(row: dict[str, Any]) -> list[Any]:
    times = [f"{row[key]:.4f}" for key in ("memfit", "same", "best")]
    counts = [row[f"{what}_{who}"] for what in ("waits", "kernels") for who in ("memfit", "same")]
    return [row["family"], row["precision"], row["micro_batch"], *times, row["best_size"], *counts, f"{row['planning']:.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("memory", "speed", "billion", "all"))
    parser.add_argument("families", nargs="*", metavar="family")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--variant", action="append", choices=VARIANTS)
    parser.add_argument("--target", default="256", help="samples per step of the large transformer")
    parser.add_argument("--precision", action="append", choices=("float32", "bfloat16"))
    wanted = parser.parse_args()
    names = wanted.families or list(FAMILIES)
    parts: dict[str, Callable[[], Any]] = {
        "memory": lambda: memory(names, wanted.variant or list(VARIANTS), wanted.workers),
        "speed": lambda: speed(names, wanted.precision or ["bfloat16"]),
        "billion": lambda: child("gpu.py", ["--case", "billion", wanted.target], pinned=False),
    }
    found: dict[str, Any] = {"device": device_name()}
    for name, part in parts.items():
        if wanted.what in (name, "all"):
            found[name] = part()
    if "billion" in found:
        print(json.dumps(found["billion"], indent=1))
    print(save(f"gpu_{wanted.what}", found))


def device_name() -> dict[str, Any]:
    import torch

    return {"name": torch.cuda.get_device_name(), "memory": torch.cuda.mem_get_info()[1], "cuda": torch.version.cuda}


CASES = {"memory": memory_case, "speed": speed_case, "billion": billion_case}

if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        print(json.dumps(CASES[sys.argv[2]](*sys.argv[3:])))
    else:
        main()
