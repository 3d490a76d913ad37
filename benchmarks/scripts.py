"""The gallery of scripts (tests/scripts), each as it is and with the one line: whether they train the same, what they take
under a real memory limit, and what the line costs.

    python benchmarks/scripts.py [exact] [memory] [cost]      # all three without a name; each adds its part to today's file

The limit is that of a memory cgroup (version 1, which has to be writable), as a container's is: what goes over it is killed.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import child, result_of_today, save, table
from cost import interleaved, replay_cost, rounded

# isort: split
import gallery  # tests/gallery.py; common.py has put its folder on the path

PART = 3
"""The limit is one part in so many of what the plain script needs."""
MEMORY: dict[str, str] = {
    "adversarial": "--width 20 --batch-size 32000 --times 20",
    "clip_methods": "--width 8 --batch-size 1200 --times 4",
    "ctc_speech": "--width 8 --batch-size 1000 --times 40",
    "dcgan": "--width 10 --batch-size 3000 --times 4",
    "detection_lists": "--width 16 --batch-size 1500 --times 20",
    "diffusion": "--width 12 --batch-size 6000 --times 8",
    "digits_nll": "--width 8 --batch-size 4000 --times 6",
    "distillation": "--width 48 --batch-size 32000 --times 40",
    "gpt_own_loop": "--width 4 --batch-size 2000",
    "graph": "--width 8 --batch-size 2000 --times 20",
    "lora_bf16": "--width 4 --batch-size 1500 --times 20",
    "moe_aux": "--width 8 --batch-size 2000 --times 20",
    "multitask": "--width 20 --batch-size 32000 --times 40",
    "siamese_triplet": "--width 8 --batch-size 2000 --times 3",
    "simclr": "--width 4 --batch-size 200",
    "superres": "--width 8 --batch-size 64",
    "token_classification": "--width 4 --batch-size 2500 --times 30",
    "vae": "--width 64 --batch-size 16000 --times 20",
    "word_lm": "--width 8 --batch-size 2500 --times 40",
}
"""Sizes at which the plain scripts need several hundred MiB, mostly of activations; memfit's own libraries take some 80 of the
limit. (policy_gradient acts on one sample at a time: there is nothing to cut.)"""
STEPS = 4
INEXACT: dict[str, dict[str, Any]] = {"moe_aux": {"allow_inexact": ["layers"]}}
"""Scripts whose samples mix inside the forward, and what accepts that."""
CONSUMED = {"clip_methods": "all pairs of a batch are compared", "simclr": "all pairs of a batch are compared",
            "dcgan": "a gradient goes on into another model"}  # fmt: skip
"""Scripts whose losses do not separate, or whose output values are consumed before the loss, and why."""
DIFFERS = {
    "clip_methods": "dropout, drawn for each micro-batch",
    "ctc_speech": "nothing is drawn",
    "dcgan": "batch statistics of each micro-batch",
    "diffusion": "noise and timesteps are drawn by the loop, for the whole batch: the same",
    "digits_nll": "batch statistics of each micro-batch; dropout",
    "distillation": "dropout",
    "gpt_own_loop": "dropout",
    "graph": "batch statistics of each micro-batch; dropout",
    "lora_bf16": "dropout; bfloat16",
    "multitask": "dropout",
    "policy_gradient": "dropout; runs whole",
    "siamese_triplet": "batch statistics of each micro-batch",
    "simclr": "batch statistics of each micro-batch",
    "token_classification": "dropout",
    "vae": "noise, drawn inside the model for each micro-batch",
    "word_lm": "dropout",
}
"""Why scripts that run as they come end with other numbers when they are cut."""
MICRO_BATCH = 5


def exact() -> dict[str, Any]:
    """Losses and parameters of both forms, in both precisions; and of the scripts as they come."""
    rows, as_they_come = [], []
    for name in gallery.NAMES:
        settings = INEXACT.get(name, {})
        with tempfile.TemporaryDirectory() as place:
            row: dict[str, Any] = {"script": name, "lines": len(gallery.lines_of(name)) - 1}
            for dtype in ("float32", "float64"):
                options = ("--dtype", dtype)
                kept = gallery.plain(name, Path(place), *options)
                cut = gallery.wrapped(name, Path(place), *options, micro_batch=MICRO_BATCH, **settings)
                whole = gallery.wrapped(name, Path(place), *options, micro_batch="off")
                row[f"losses_{dtype}"] = gallery.losses_apart(cut, kept)
                row[f"parameters_{dtype}"] = gallery.parameters_apart(cut, kept)
                same = gallery.losses_apart(whole, kept) == gallery.parameters_apart(whole, kept) == 0.0
                row["whole_is_plain"] = same and row.get("whole_is_plain", True)
            row["recomputes"] = "two passes" in cut.err
            row["accepted"] = " ".join(f"{key}={value}" for key, value in settings.items())
            rows.append(row)
            kept = gallery.plain(name, Path(place), "--as-it-comes")
            cut = gallery.wrapped(name, Path(place), "--as-it-comes", micro_batch=MICRO_BATCH, **settings)
            apart = gallery.losses_apart(cut, kept), gallery.parameters_apart(cut, kept)
            because = DIFFERS.get(name, "nothing is drawn") if not settings else "samples mix inside the forward"
            as_they_come.append({"script": name, "losses": apart[0], "parameters": apart[1], "because": because})
        print(rows[-1], flush=True)
    print(table(f"with the line, micro-batches of {MICRO_BATCH}, and without", tuple(rows[0]), _cells(rows)))
    print(table("the same as they come", tuple(as_they_come[0]), _cells(as_they_come)))
    free = [row["script"] for row in rows if row["script"] not in CONSUMED]
    share = sum(not row["recomputes"] for row in rows if row["script"] in free) / len(free)
    print(f"without recomputation, of the {len(free)} whose losses separate: {share:.0%}")
    return {"exact": rows, "as_they_come": as_they_come, "free_share": share, "recompute": CONSUMED}


def memory() -> dict[str, Any]:
    """The scripts with large batches in a third of the memory that they need."""
    rows = []
    with tempfile.TemporaryDirectory() as place:
        for name, options in MEMORY.items():
            script = Path(place) / f"{name}.py"
            script.write_text(gallery.LINE.sub(r"\1", (gallery.SCRIPTS / f"{name}.py").read_text()))

            def ran(script: Path = script, options: str = options, **settings: Any) -> dict[str, Any]:
                arguments = [json.dumps(settings), str(script), *options.split(), "--steps", str(STEPS)]
                return child("script_child.py", arguments, pinned=False)

            need = ran(memory=None, enabled=False)["grown"]
            limit = need // PART
            plain, wrapped = ran(memory=limit, enabled=False), ran(memory=limit, **INEXACT.get(name, {}))
            row = {
                "script": name,
                "needs_MiB": need >> 20,
                "limit_MiB": limit >> 20,
                "plain": "killed" if plain.get("died") == -9 else plain.get("error", "lives"),
                "wrapped": "trains" if "died" not in wrapped else "killed" if wrapped["died"] == -9 else wrapped["error"],
                "peak_MiB": wrapped.get("grown", 0) >> 20,
            }
            rows.append(row)
            print(row, flush=True)
    print(table(f"under 1/{PART} of what the plain script needs", tuple(rows[0]), _cells(rows)))
    return {"memory": rows, "options": MEMORY, "steps": STEPS}


def script_cost(samples: int, micro: int, rounds: int = 400) -> dict[str, Any]:
    """Seconds per optimizer step of a script with the line, and of the same loop cut by hand, on a tiny model."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    import memfit

    torch.manual_seed(0)
    model, by_hand = (nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)) for _ in range(2))
    x, y = torch.randn(samples, 64), torch.randint(0, 10, (samples,))
    own, theirs = (torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, by_hand))
    memfit.wrap(model, own, micro_batch=micro)
    parts = samples // micro

    def line() -> None:
        own.zero_grad()
        F.cross_entropy(model(x), y).backward()
        own.step()

    def hand() -> None:
        theirs.zero_grad()
        for start in range(0, samples, micro):
            (F.cross_entropy(by_hand(x[start : start + micro]), y[start : start + micro]) / parts).backward()
        theirs.step()

    mine, plain = interleaved([line, hand], rounds)
    return {"micro_batches": parts, "by_hand_us": plain * 1e6, "memfit_us": mine * 1e6, "own_us": (mine - plain) * 1e6}


def cost() -> dict[str, Any]:
    """What stand-ins cost on a tiny model, told apart by batches and micro-batches, and what replay does."""
    runs = [script_cost(4 * count, 4) for count in (2, 4, 16, 64)]
    pairs = itertools.pairwise(runs)
    slopes = [(b["own_us"] - a["own_us"]) / (b["micro_batches"] - a["micro_batches"]) for a, b in pairs]
    each = statistics.median(slopes)
    batch = statistics.median(run["own_us"] - each * run["micro_batches"] for run in runs)
    print(table("own cost of stand-ins", tuple(runs[0]), _cells(runs)))
    print(f"{batch:.0f} us per effective batch + {each:.0f} us per micro-batch")
    replays = [replay_cost(name, rounds) for name, rounds in (("gpt", 7), ("hf_gpt2", 7), ("vit", 20), ("resnet_group", 20))]
    print(table("replay", tuple(replays[0]), _cells(replays)))
    return {"standins": runs, "us_per_batch": batch, "us_per_micro_batch": each, "replay": replays}


def _cells(rows: list[dict[str, Any]]) -> list[tuple[object, ...]]:
    return [tuple(rounded(value) for value in row.values()) for row in rows]


SECTIONS: dict[str, Callable[[], dict[str, Any]]] = {"exact": exact, "memory": memory, "cost": cost}


def main() -> None:
    unknown = set(sys.argv[1:]) - set(SECTIONS)
    if unknown:
        raise SystemExit(f"no section {sorted(unknown)}: {', '.join(SECTIONS)}")
    for name in sys.argv[1:] or SECTIONS:
        found = SECTIONS[name]()
        kept = {key: value for key, value in result_of_today("scripts").items() if key != "machine"}
        print(save("scripts", {**kept, **found}))


if __name__ == "__main__":
    main()
