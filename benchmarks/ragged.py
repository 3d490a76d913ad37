"""Samples of very different lengths: micro-batches by length against arrival order, and long ones that come late.

    python benchmarks/ragged.py

First: seconds per step at the same memory, the same gradient, in turns in one process. Then 200 steps under a memory limit
really set on the process, with a plan made while batches are short; once with a data set that can be indexed, once streamed.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Iterator
from statistics import median

from common import MiB, anonymous_peak, child, limit_data, reset_peak, save, status, table

LONGEST, TARGET = 256, 64


def sample(length: int, seed: int) -> dict:
    import torch

    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(1, 8000, (length,), generator=generator)
    return {"input_ids": text, "labels": text.clone()}


def lengths(n: int, seed: int = 0) -> list[int]:
    """Log-normal, as sentences and documents are: most are short, a few fill the model's whole length."""
    import torch

    drawn = torch.empty(n).log_normal_(3.6, 0.8, generator=torch.Generator().manual_seed(seed))
    return [int(length) for length in drawn.clamp(8, LONGEST)]


def ordered_against_arrival() -> dict:
    import torch
    from torch.utils.data import DataLoader
    from zoo import FAMILIES as ZOO
    from zoo.plain import gradients_of, relative_error

    import memfit

    family = ZOO["bert"]
    model = family.build("bench")
    data = [sample(length, i) for i, length in enumerate(lengths(TARGET * 2))]
    longest = family.collate([sample(LONGEST, i) for i in range(8)])
    profile = memfit.profile(model, adamw(model), longest, loss_fn=family.loss)
    budget = profile.peak(6).expected + 32 * MiB
    by_hand = max(n for n in range(1, 65) if profile.peak(n).expected + 16 * MiB <= budget)

    mine, plain = copy.deepcopy(model), copy.deepcopy(model)
    grabbed: dict = {}
    run = memfit.wrap(
        mine,
        torch.optim.SGD(mine.parameters(), lr=0.0),
        DataLoader(data, batch_size=8, collate_fn=family.collate),
        loss_fn=family.loss,
        target_batch=TARGET,
        budget=budget,
        before_step=lambda: grabbed.update(gradients_of(mine)),
    )
    batches = list(run.loader)
    for _ in range(3):
        for batch in batches:
            run.step(batch)

    def arrival(start: int) -> None:
        plain.zero_grad(set_to_none=True)
        pieces = [family.collate(data[i : min(i + by_hand, start + TARGET)]) for i in range(start, start + TARGET, by_hand)]
        total = sum(family.count(piece) for piece in pieces)
        for piece in pieces:
            (family.loss(plain, piece) * (family.count(piece) / total)).backward()

    times: dict[str, list[float]] = {"memfit": [], "arrival": []}
    error = 0.0
    for _ in range(4):
        for index, batch in enumerate(batches):
            times["memfit"].append(once(lambda batch=batch: run.step(batch)))
            times["arrival"].append(once(lambda index=index: arrival(index * TARGET)))
            error = max(error, relative_error(grabbed, gradients_of(plain)))
    ours, theirs = median(times["memfit"]), median(times["arrival"])
    return {
        "budget": budget,
        "micro_batch_by_hand": by_hand,
        "by_size": run.plan.by_size,
        "memfit": ours,
        "arrival": theirs,
        "speed": theirs / ours,
        "gradient_error": error,
    }


def adamw(model):
    import torch

    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def once(function) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def long_ones_late(streamed: bool, steps: int = 200) -> dict:
    """Short samples for the first half, then ever longer ones."""
    import torch
    from torch.utils.data import DataLoader, IterableDataset
    from zoo import FAMILIES as ZOO

    import memfit
    from memfit.profiling.allocator import thresholds_pinned

    family = ZOO["bert"]
    model = small_bert()
    wanted = [16 + (i % 8) for i in range(steps * 16 // 2)]
    wanted += [min(LONGEST, 16 + (i * 7) % LONGEST) for i in range(steps * 16 - len(wanted))]

    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[dict]:
            return (sample(length, i) for i, length in enumerate(wanted))

    class Indexed(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return len(wanted)

        def __getitem__(self, index: int) -> dict:
            return sample(wanted[index], index)

    loader = DataLoader(Stream() if streamed else Indexed(), batch_size=4, collate_fn=family.collate)
    family.loss(model, family.collate([sample(32, 0)])).backward()  # libraries set themselves up
    model.zero_grad(set_to_none=True)
    before = status()["RssAnon"]
    room, pinned = 320 * MiB, thresholds_pinned()
    # What glibc frees stays reserved as it is shipped: there the room is a budget on resident memory (see memory.py).
    limit_data(room if pinned else 8 * room)
    there = sum(p.numel() * p.element_size() for p in model.parameters())
    budget = None if pinned else there + room
    run = memfit.wrap(model, adamw(model), loader, loss_fn=family.loss, target_batch=16, budget=budget)
    reset_peak()
    done = 0
    for batch in run.loader:
        run.step(batch)
        done += 1
    return {
        "streamed": streamed,
        "pinned": pinned,
        "steps": done,
        "errors": sum(event.kind == "out of memory" for event in run.events),
        "replanned": sum(event.kind == "replan" for event in run.events),
        "growth": anonymous_peak() - before,
        "room": room,
        "said": [event.message for event in run.events if event.kind in ("note", "replan")][:6],
    }


def small_bert():
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=8192,
        max_position_embeddings=LONGEST,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        use_cache=False,
    )
    return BertForMaskedLM(config).train()


def main() -> None:
    ordered = child("ragged.py", ["--ordered"], pinned=True, timeout=1800)
    print(json.dumps(ordered, indent=1))
    late = [
        child("ragged.py", ["--late", kind], pinned=pinned, timeout=1800)
        for pinned in (True, False)
        for kind in ("indexed", "streamed")
    ]
    header = ("data", "glibc", "steps", "errors", "re-planned", "growth MiB", "room MiB")
    rows = [
        (
            "streamed" if r["streamed"] else "indexed",
            "pinned" if r["pinned"] else "shipped",
            *(r[key] for key in ("steps", "errors", "replanned")),
            *(r[key] // MiB for key in ("growth", "room")),
        )
        for r in late
        if "died" not in r
    ]
    print(table("long samples that come late", header, rows))
    print([r for r in late if "died" in r])
    print(save("ragged", {"ordered": ordered, "late": late}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--ordered"]:
        print(json.dumps(ordered_against_arrival()))
    elif sys.argv[1:2] == ["--late"]:
        print(json.dumps(long_ones_late(sys.argv[2] == "streamed")))
    else:
        main()
