"""Several processes over gloo: seconds per optimizer step against DistributedDataParallel, and what an agreement takes.

    python benchmarks/distributed.py [--processes 2] [--rounds 30]

Every way of training has a model of its own in the same processes, and they take turns, step by step, in an order that moves
on: equal processes differ by up to 1.29. `by hand` is DistributedDataParallel with all micro-batches but the last in no_sync(),
as its documentation writes it; `every micro-batch` leaves no_sync() out; `accelerate` is its gradient_accumulation_steps with
accumulate(). `reducing beside` sums gradients while the last micro-batch's backward runs, `reducing after` once it has;
`memfit, step` does what it finds to be faster. A step is 8 micro-batches on each process. Processor seconds are those of both
processes; what else runs on the machine disturbs them less.
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median
from typing import Any

from common import save, table

ACCUMULATION, SAMPLES = 8, 1
"""Micro-batches per step on each process, and samples in each."""
WARM = 24
"""Rounds before those that count: planning, proofs that are repeated, and both ways of reducing gradients tried."""


def raced(rounds: int) -> dict[str, list[tuple[float, float]]]:
    """(seconds, processor seconds) of the steps of each way, on this process."""
    import contextlib
    import copy
    import os

    import accelerate
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from zoo import FAMILIES, first_batch

    import memfit

    family, rank = FAMILIES["gpt"], int(os.environ["RANK"])
    torch.manual_seed(0)
    start = family.build("bench")
    batch = first_batch(family, ACCUMULATION * SAMPLES, size="bench", seed=rank)

    def made() -> tuple[Any, Any]:
        model = copy.deepcopy(start)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4)

    def stepping(beside: bool | None) -> Any:
        """Gradients reduced beside the last micro-batch, after it, or as memfit decides."""
        model, optimizer = made()
        run = memfit.wrap(model, optimizer, loss_fn=family.loss, micro_batch=SAMPLES, sample=batch)
        run._core.team.reduction.overlap.forced = beside
        return lambda: run.step(batch)

    def scripted() -> Any:
        model, optimizer = made()
        memfit.wrap(model, optimizer, micro_batch=SAMPLES)

        def step() -> None:
            optimizer.zero_grad()
            family.script_loss(model, batch).backward()
            optimizer.step()

        return step

    def distributed(syncs_each: bool) -> Any:
        model, optimizer = made()
        model = DistributedDataParallel(model)

        def step() -> None:
            optimizer.zero_grad()
            for number in range(ACCUMULATION):
                last = number == ACCUMULATION - 1
                piece = cut(batch, number * SAMPLES, (number + 1) * SAMPLES)
                with contextlib.nullcontext() if last or syncs_each else model.no_sync():
                    (family.script_loss(model, piece) / ACCUMULATION).backward()
            optimizer.step()

        return step

    def accelerated() -> Any:
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION)
        model, optimizer = accelerator.prepare(*made())

        def step() -> None:
            for number in range(ACCUMULATION):
                piece = cut(batch, number * SAMPLES, (number + 1) * SAMPLES)
                with accelerator.accumulate(model):
                    accelerator.backward(family.script_loss(model, piece))
                    optimizer.step()
                    optimizer.zero_grad()

        return step

    ways = {"memfit, step": stepping(None), "memfit, script": scripted(), "accelerate": accelerated()}
    ways |= {"step, reducing beside": stepping(True), "step, reducing after": stepping(False)}
    ways |= {"by hand": distributed(False), "every micro-batch": distributed(True)}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(-WARM, rounds):
        for name in turned(list(ways), number):
            dist.barrier()
            begun, working = time.perf_counter(), time.process_time()
            ways[name]()
            worked = time.process_time() - working  # waiting in a barrier takes the processor, too
            dist.barrier()
            if number >= 0:
                found[name].append((time.perf_counter() - begun, worked))
    return found


def turned(names: list[str], number: int) -> list[str]:
    """The names in the order of round `number`."""
    start = number % len(names)
    return names[start:] + names[:start]


def cut(batch: Any, start: int, stop: int) -> Any:
    if isinstance(batch, dict):
        return {name: cut(value, start, stop) for name, value in batch.items()}
    return type(batch)(cut(item, start, stop) for item in batch) if isinstance(batch, (list, tuple)) else batch[start:stop]


def agreed(rounds: int) -> list[float]:
    """Seconds of an exchange that steps have: script mode one, step mode three (its optimizer steps are made good, too).

    40 numbers are what a model of 1000 parameters agrees on.
    """
    import torch

    from memfit.ranks.ranks import Ranks

    ranks, found = Ranks(torch.device("cpu")), []
    for _ in range(rounds):
        ranks.agree([0.0], "a benchmark")
        begun = time.perf_counter()
        ranks.agree([1.0] * 40, "a benchmark")
        found.append(time.perf_counter() - begun)
    return found


def main(processes: int, rounds: int) -> None:
    from processes import Processes

    pool = Processes(processes, patience=3600.0)
    told = pool.run(raced, rounds)
    agreement = median(pool.run(agreed, 300)[0])
    pool.end()
    seconds = {name: [wall for wall, _ in steps] for name, steps in told[0].items()}
    worked = {name: [sum(cpu for _, cpu in of_all) for of_all in zip(*(own[name] for own in told))] for name in told[0]}
    ratios, of_processor = ({name: of_by_hand(each, name) for name in each} for each in (seconds, worked))
    rows = [
        (name, f"{median(seconds[name]) * 1e3:.1f}", f"{ratios[name]:.3f}", f"{of_processor[name]:.3f}") for name in seconds
    ]
    title = f"{processes} processes, {ACCUMULATION} micro-batches of {SAMPLES}, {rounds} rounds"
    print(table(title, ("way", "ms", "of by hand", "of its processor seconds"), rows))
    print(f"an agreement: {agreement * 1e6:.0f} us")
    result = {
        "processes": processes,
        "rounds": rounds,
        "by hand": median(seconds["by hand"]),
        "ratios": ratios,
        "processor ratios": of_processor,
        "agreement": agreement,
    }
    print(json.dumps(result))
    save("distributed", result)


def of_by_hand(seconds: dict[str, list[float]], name: str) -> float:
    """The median of how much longer a way took than the one by hand in the same round."""
    return median(a / b for a, b in zip(seconds[name], seconds["by hand"]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    main(arguments.processes, arguments.rounds)
