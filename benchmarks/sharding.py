"""What each process holds where a training is sharded: state of the optimizer, and the step's peak against its prediction.

    python benchmarks/sharding.py [--processes 2,3,4] [--steps 4]

Real processes over gloo on the CPU, glibc's thresholds pinned. State is counted in tensors; the peak is the kernel's, as
memfit's budget counts it. Predictions of "gradients" and "parameters" are upper ones: what is gathered counts for the whole
step.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from common import PINNED, save, table

LEVELS = ("off", "optimizer", "gradients", "parameters")


def held(level: str, steps: int) -> dict[str, Any]:
    """What this process holds after some steps."""
    import torch
    from zoo import FAMILIES, first_batch

    import memfit
    from memfit.engine.gradients import bytes_here

    family, rank = FAMILIES["gpt"], int(os.environ["RANK"])
    torch.manual_seed(0)
    model = family.build("bench")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = first_batch(family, 4, size="bench", seed=rank)
    run = memfit.wrap(model, optimizer, loss_fn=family.loss, micro_batch=2, sample=batch, shard=level)
    for _ in range(steps):
        run.step(batch)
    stats = run.stats()
    state = [t for values in optimizer.state.values() for t in values.values() if isinstance(t, torch.Tensor)]
    plan = run.plan
    assert plan is not None
    found = {
        "state": sum(map(bytes_here, state)),
        "predicted": stats["peak_predicted"],
        "upper": plan.predicted.upper + plan.held,
        "measured": stats["peak_measured"],
    }
    run.undo()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", default="2,3,4")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--levels", default=",".join(LEVELS))
    asked = parser.parse_args()
    os.environ.update(PINNED)
    from processes import Processes

    rows = []
    for size in map(int, asked.processes.split(",")):
        for level in asked.levels.split(","):
            processes = Processes(size, patience=900)  # each begins anew: what one training left would count for the next
            for rank, found in enumerate(processes.run(held, level, asked.steps)):
                rows.append({"processes": size, "level": level, "rank": rank, **found})
            processes.end()
    lines = [
        (
            *(str(row[name]) for name in ("processes", "level", "rank")),
            *(f"{row[name] / 2**20:.1f}" for name in ("state", "predicted", "measured")),
            f"{row['measured'] / row['predicted'] - 1:+.1%}",
        )
        for row in rows
    ]
    header = ("processes", "level", "rank", "state MiB", "predicted MiB", "measured MiB", "measured")
    print(table("What each process holds", header, lines))
    save("sharding", {"rows": rows})


if __name__ == "__main__":
    main()
