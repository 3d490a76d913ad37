"""How much glibc as shipped holds beyond the tensors: what `HEAP_WASTE` in memfit/profiling/allocator.py is chosen by.

    python benchmarks/heap.py [family ...]

Each case is a fresh process without any limit, trained for some steps at a prescribed micro-batch. Waste is what was measured
above the tensors of the timeline, as a share of those of them that live in the C library's heap (below 32 MiB).
"""

from __future__ import annotations

import json
import sys

from common import CORRECTED, FAMILIES, MiB, anonymous_peak, child, reset_peak, save, status, table

MICRO = (2, 8, 16, 32)
STEPS = 2


def run_case(family_name: str, micro: int, checkpoint: str) -> dict:
    import torch
    from torch.utils.data import DataLoader
    from zoo import FAMILIES as ZOO

    import memfit
    from memfit.planning.checkpointed import with_blocks
    from memfit.profiling.allocator import heap_peak

    family = ZOO[family_name]
    model = family.build("bench", dropout=0.1)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    loader = DataLoader(family.dataset(size="bench", n=64), batch_size=8, collate_fn=family.collate)
    sample = next(iter(loader))
    profile = memfit.profile(model, optimizer, sample, loss_fn=family.loss)
    run = memfit.wrap(
        model, optimizer, loader, loss_fn=family.loss, target_batch=32, micro_batch=micro, checkpoint=checkpoint, budget="16GiB"
    )
    before = status()["RssAnon"] - profile.model.parameter_bytes
    reset_peak()
    for _ in range(STEPS):
        for batch in run.loader:
            run.step(batch)
    there = with_blocks(profile, profile.blocks) if checkpoint == "all" else profile
    timeline = there.timeline
    tensors = timeline.peak(micro)
    return {
        "family": family_name,
        "micro_batch": micro,
        "checkpoint": checkpoint,
        "measured": anonymous_peak() - before,
        "tensors": int(tensors),
        "heap": int(heap_peak(timeline, micro, True)),
    }


def main(names: list[str]) -> None:
    results = []
    for name in names or FAMILIES:
        for checkpoint in ("off", "all"):
            for micro in MICRO:
                found = child("heap.py", ["--case", name, str(micro), checkpoint], pinned=False)
                if "died" in found:
                    print(name, micro, checkpoint, found)
                    continue
                found["waste"] = (found["measured"] - found["tensors"]) / max(1, found["heap"])
                results.append(found)
                print(*found.values(), flush=True)
    sizes = ("measured", "tensors", "heap")
    rows = [
        (r["family"], r["micro_batch"], r["checkpoint"], *(r[k] // MiB for k in sizes), f"{r['waste']:.2f}") for r in results
    ]
    print(table("glibc as shipped", ("family", "micro", "checkpoint", "measured", "tensors", "heap", "waste"), rows))
    plain = sorted(r["waste"] for r in results if r["family"] not in CORRECTED)
    summary = {"cases": len(plain), "median": plain[len(plain) // 2], "p95": plain[int(len(plain) * 0.95)], "most": plain[-1]}
    print(summary)
    print(save("heap", {"summary": summary, "cases": results}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        print(json.dumps(run_case(sys.argv[2], int(sys.argv[3]), sys.argv[4])))
    else:
        main(sys.argv[1:])
