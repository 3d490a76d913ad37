"""Measured peak against the budget and against the prediction, with a memory limit really set on the process.

    python benchmarks/memory.py [--rooms 0.03,0.12] [--glibc pinned] [family ...]

Each case is a fresh process that plans and trains some steps in step mode. Three rooms per family. With glibc's thresholds
pinned (to judge the prediction), RLIMIT_DATA is set so that the process may grow by the room, and memfit finds that out by
itself. With glibc as shipped, what it frees stays reserved, and RLIMIT_DATA counts that: the room is passed as budget=, the
kernel's own record of resident memory is held against it (as a cgroup would), and RLIMIT_DATA stands at three times the room.

`predicted` and `measured` are on the scale that is limited: reserved bytes under RLIMIT_DATA, of which kernels hardly touch
some. `resident_predicted` is what lay in RAM beside the model after planning and the predicted peak of the tensors; `resident`
the kernel's record under the plan that was in force at the end.
"""

from __future__ import annotations

import json
import sys
from statistics import median

from common import CORRECTED, FAMILIES, MiB, anonymous_peak, child, limit_data, reset_peak, save, status, table

ROOMS = (0.03, 0.12, 0.4)
"""Rooms as a share of what the whole batch would need, above what the smallest micro-batch needs."""
STEPS, EPOCH, MOST = 7, 4, 60


def run_case(family_name: str, share: float) -> dict:
    import torch
    from torch.utils.data import DataLoader
    from zoo import FAMILIES as ZOO

    import memfit
    from memfit.hardware.heap import give_back_free_heap
    from memfit.profiling.allocator import thresholds_pinned

    family = ZOO[family_name]
    model = family.build("bench", dropout=0.1)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    loader = DataLoader(family.dataset(size="bench", n=128), batch_size=8, collate_fn=family.collate)
    warm_up(family, model)
    room = room_for(family, share)
    give_back_free_heap()  # what measuring the room left behind is not the training's
    # Nothing below may fail: the limit is real.
    before = status()["RssAnon"]
    pinned = thresholds_pinned()
    limit_data(room if pinned else 3 * room)
    there = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    budget = None if pinned else there + room
    run = memfit.wrap(model, optimizer, loader, loss_fn=family.loss, target_batch=32, budget=budget)
    planning = anonymous_peak() - before
    beside = status()["RssAnon"] - there
    reset_peak()
    batches, measured, plan, highest = iter(run.loader), 0, run.plan, 0
    for step in range(MOST):
        batch = next(batches, None)
        if batch is None:
            batches = iter(run.loader)
            batch = next(batches)
        run.step(batch)
        same = run.plan is plan
        plan = run.plan
        if not same:  # the plan before it does not count for the prediction of this one
            highest = max(highest, anonymous_peak())
            reset_peak()
        measured = measured + 1 if same and run.stats()["peak_measured"] is not None else 0
        if step + 1 >= STEPS and measured >= EPOCH:  # the largest samples came by under the last plan
            break
    resident = anonymous_peak()
    errors = sum(event.kind == "out of memory" for event in run.events)
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    stats = run.stats()
    return {
        "family": family_name,
        "room": room,
        "growth": max(highest, resident) - before,
        "planning_growth": planning,
        "predicted": plan.predicted.peak + plan.held,
        "at_most": plan.predicted.upper + plan.held,
        "measured": stats["peak_measured"],
        "resident_predicted": plan.predicted.peak + beside,
        "resident": resident,
        "limit": plan.limit,
        "micro_batch": plan.micro_batch,
        "checkpoint": len(plan.checkpoint),
        "errors": errors,
        "parameters": parameters,
    }


def warm_up(family, model) -> None:
    """Let libraries set themselves up before the limit is set: one sample forward and backward, gradients dropped."""
    from zoo import first_batch

    batch = first_batch(family, 1, size="bench")
    family.loss(model, batch).backward()
    for p in model.parameters():
        p.grad = None


def room_for(family, share: float) -> int:
    """A room between what one sample needs and what the whole batch of 32 needs, by a profile in this process."""
    import torch
    from zoo import first_batch

    import memfit

    model = family.build("bench", dropout=0.1)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    sample = first_batch(family, 32, size="bench")
    profile = memfit.profile(model, optimizer, sample, loss_fn=family.loss)
    there = profile.model.parameter_bytes
    least, whole = profile.peak(1).upper - there, profile.peak(32, accumulates=False).upper - there
    return int(least * 1.15 + share * max(0, whole - least)) + 96 * MiB


def main(names: list[str]) -> None:
    rooms, libraries = ROOMS, ("pinned", "shipped")
    if names[:1] == ["--rooms"]:
        rooms, names = tuple(map(float, names[1].split(","))), names[2:]
    if names[:1] == ["--glibc"]:
        libraries, names = (names[1],), names[2:]
    rows, results = [], []
    for pinned in (library == "pinned" for library in libraries):
        for name in names or FAMILIES:
            for share in rooms:
                found = child("memory.py", ["--case", name, str(share)], pinned=pinned)
                results.append({"pinned": pinned, "share": share, **found})
                rows.append(row(name, share, pinned, found))
                print(*rows[-1], flush=True)
                # Kept as it goes: a full run takes long.
                save("memory", {"cases": results, "summary": summarise(results)})
    print(table("measured peak against room and prediction", HEADER, rows))
    summary = summarise(results)
    print(json.dumps(summary, indent=1))


HEADER = ("family", "share", "glibc", "room MiB", "growth", "within", "micro", "ckpt", "predicted", "measured", "error")


def row(name: str, share: float, pinned: bool, found: dict) -> tuple:
    glibc = "pinned" if pinned else "shipped"
    if "died" in found:
        return (name, share, glibc, "-", "-", f"DIED {found['died']}: {found['error']}", "-", "-", "-", "-", "-")
    error = found["predicted"] / found["measured"] - 1
    return (
        name,
        share,
        glibc,
        found["room"] // MiB,
        found["growth"] // MiB,
        "yes" if found["growth"] <= found["room"] and not found["errors"] else "NO",
        found["micro_batch"],
        found["checkpoint"],
        found["predicted"] // MiB,
        found["measured"] // MiB,
        f"{error:+.2%}",
    )


def summarise(results: list[dict]) -> dict:
    alive = [r for r in results if "died" not in r]
    above = [r for r in alive if r["measured"] > 100 * MiB and r["pinned"]]
    tensors = [r for r in above if r["family"] not in CORRECTED]
    in_ram = [abs(r["resident_predicted"] / r["resident"] - 1) for r in tensors if "resident" in r]
    judged = [abs(r["predicted"] / r["measured"] - 1) for r in above if r["family"] not in CORRECTED]
    # The same without what the process held before it was wrapped, libraries above all: a harder measure.
    of_growth = [
        abs((r["predicted"] - r["measured"]) / r["growth"]) for r in above if r["family"] not in CORRECTED and r["growth"]
    ]
    return {
        "cases": len(results),
        "died": len(results) - len(alive),
        "above_room": sum(r["growth"] > r["room"] for r in alive),
        "above_at_most": sum(r["measured"] > r["at_most"] for r in alive),
        "out_of_memory_errors": sum(r["errors"] for r in alive),
        "pinned_median_error": median(judged) if judged else None,
        "pinned_worst_error": max(judged) if judged else None,
        "pinned_resident_median_error": median(in_ram) if in_ram else None,
        "pinned_resident_worst_error": max(in_ram) if in_ram else None,
        "pinned_median_error_of_growth": median(of_growth) if of_growth else None,
        "pinned_worst_error_of_growth": max(of_growth) if of_growth else None,
        "room_used_pinned": median(r["growth"] / r["room"] for r in alive if r["pinned"]) if above else None,
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        print(json.dumps(run_case(sys.argv[2], float(sys.argv[3]))))
    else:
        main(sys.argv[1:])
