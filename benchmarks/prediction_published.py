"""Predicted peaks of whole training runs against those that documentations publish.

    python benchmarks/prediction_published.py FOLDER [name ...]

FOLDER holds gpu_published_peaks.csv, which is not part of this project: tables of litgpt, Hugging Face and Lightning. Judged
are the rows whose configuration is complete and that one process made, or several that hold the same: no compilation, no
sharded or quantised parameters. The models are written in published_models.py from their sources, on the meta device, and
profiled for the card of the row (`memfit.profile(..., device=...)`). Nothing is fitted. Only errors are written to the results.

Where a run is known to have computed otherwise than its row says, or than torch does today, it is predicted again as it ran;
both errors are printed. The first is the one that is judged.
"""

from __future__ import annotations

import csv
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from common import MiB, save, table

UNITS = {"GB(1e9)": 10**9, "MiB": MiB, "MB": MiB}
"""What memory_summary calls MB are MiB."""
NORM = "norms in float32, as litgpt's are since 2023-10-24, three days before its table came"
ADAM = "torch 2.0's Adam, with two temporaries of the parameters' size; the figure is of 2023-07-19"
SOFTMAX = "torch 1.10's softmax, which keeps its input for backward"


@dataclass(frozen=True)
class Case:
    """A training to profile."""

    card: str
    """The GPU's name."""
    build: Callable[[], tuple[Any, Any, Any, Any]]
    """Makes model, optimizer, a batch, and the function that gives the loss of both."""
    accumulates: bool = False
    """Gradients are there when a step begins."""
    copies: int = 0
    """Further copies of the gradients that are held: DDP's buckets."""
    then: tuple[str, Callable[[], tuple[Any, Any, Any, Any]]] | None = None
    """What was different in the run, and the training with it."""


def main(folder: Path, names: list[str]) -> None:
    file = folder / "gpu_published_peaks.csv"
    if not file.exists():
        print(f"skipped: there is no {file}")
        return
    lines = list(csv.DictReader(file.open()))
    context = next(float(line["value"]) * MiB for line in lines if line["model"] == "(none)")
    rows = []
    for (model, method), batches in grouped(lines).items():
        if names and not any(name in f"{model} {method}" for name in names):
            continue
        start = time.perf_counter()
        rows += judged(case_of(model, method), batches, context)
        print(f"{model[:40]}, {method}: {time.perf_counter() - start:.0f} s", flush=True)
    report(rows, partly=bool(names))


def grouped(lines: list[dict[str, str]]) -> dict[tuple[str, str], list[dict[str, str]]]:
    """The rows that are judged, by model and method."""
    found: dict[tuple[str, str], list[dict[str, str]]] = {}
    for line in lines:
        method = line["method"]
        if method == "DDP":
            method = "DDP, Fabric" if "fabric" in line["source"] else "DDP, Trainer"
        if case_of(line["model"], method) is not None:
            found.setdefault((line["model"], method), []).append(line)
    return found


def case_of(model: str, method: str) -> Case | None:
    """The training of a row; None where its configuration is not complete, or not covered."""
    from published_models import METHODS, SHAPES

    if model in SHAPES and method in METHODS:
        wide = ("", lambda: litgpt(model, method, wide_norm=True)) if SHAPES[model].gated else None
        return Case("a100-40gb", lambda: litgpt(model, method), then=wide and (NORM, wide[1]))
    return {
        "weights only": Case("v100-16gb", bert),
        "HF Trainer full": Case("v100-16gb", bert, accumulates=True, then=(SOFTMAX, lambda: bert(keeps_input=True))),
        "TP1": Case("a100-40gb", feed_forward),
        "DDP, Fabric": Case("a100-40gb", demo, copies=1, then=(ADAM, lambda: demo(two_temporaries=True))),
        "DDP, Trainer": Case("a100-40gb", demo, copies=1),
    }.get(method)


def judged(case: Case | None, batches: list[dict[str, str]], context: float) -> list[dict[str, Any]]:
    """A row with its error for each of the batch sizes of one training."""
    assert case is not None
    now = predictions(case, batches, context)
    then = predictions(replace(case, build=case.then[1]), batches, context) if case.then else [None] * len(batches)
    rows = []
    for line, predicted, before in zip(batches, now, then):
        measured = float(line["value"]) * UNITS[line["unit"]]
        row = {name: line[name] for name in ("source", "model", "method", "micro_batch", "metric")}
        rows.append(row | {"predicted": predicted, "measured": measured, "error": predicted / measured - 1})
        if case.then and before is not None:
            rows[-1] |= {"differs": case.then[0], "error as it ran": before / measured - 1}
    return rows


def predictions(case: Case, lines: list[dict[str, str]], context: float) -> list[float]:
    """What each row measured, in bytes, as predicted."""
    model, optimizer, batch, loss_fn = case.build()
    if lines[0]["method"] == "weights only":
        return [context + held_by(model)]
    import memfit

    profile = memfit.profile(model, optimizer, batch, loss_fn=loss_fn, device=case.card)
    found = []
    for line in lines:
        peak = profile.peak(int(line["micro_batch"]), accumulates=case.accumulates)
        shown = (peak.reserved or 0) + context if "NVML" in line["metric"] else float(peak.allocated)
        found.append(shown + case.copies * profile.model.gradient_bytes)
    return found


def held_by(model: Any) -> int:
    """Bytes of segments that a model takes alone."""
    from memfit.allocators.caching import CachingAllocator

    allocator = CachingAllocator()
    for tensor in (*model.parameters(), *model.buffers()):
        allocator.malloc(tensor.numel() * tensor.element_size())
    return allocator.peak_reserved


def report(rows: list[dict[str, Any]], partly: bool) -> None:
    shown = [
        (
            row["model"].partition(" (")[0][:30],
            row["method"],
            row["micro_batch"],
            row["metric"],
            f"{row['predicted'] / 1e9:.3f}",
            f"{row['measured'] / 1e9:.3f}",
            f"{row['error']:+.2%}",
            f"{row['error as it ran']:+.2%}" if "differs" in row else "",
        )
        for row in rows
    ]
    header = ("model", "method", "batch", "metric", "predicted GB", "measured GB", "error", "as it ran")
    print(table("predicted against published peaks", header, shown))
    for words in dict.fromkeys(row["differs"] for row in rows if "differs" in row):
        print(f"as it ran: {words}")
    errors = [abs(row["error"]) for row in rows]
    ran = [abs(row.get("error as it ran", row["error"])) for row in rows]
    summary = {
        "rows": len(rows),
        "median": median(errors),
        "worst": max(errors),
        "within 5 %": sum(e <= 0.05 for e in errors),
        "as it ran, median": median(ran),
        "as it ran, worst": max(ran),
    }
    print(json.dumps(summary, indent=1))
    if not partly:
        kept = [{name: value for name, value in row.items() if name not in ("predicted", "measured")} for row in rows]
        save("prediction_published", {"summary": summary, "rows": kept})


# ---- the trainings


def litgpt(name: str, method: str, wide_norm: bool = False) -> tuple[Any, Any, Any, Any]:
    """lit-gpt's fine-tuning on Alpaca; the longest sample is the first."""
    import torch
    from published_models import METHODS, SHAPES, LitGPT, chunked_loss

    shape = replace(SHAPES[name], wide_norm=wide_norm)
    with torch.device("meta"):
        model = LitGPT(shape, METHODS[method])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    ids = torch.zeros(5, shape.longest, dtype=torch.int64)
    return model, optimizer, (ids, ids.clone()), chunked_loss


def bert(keeps_input: bool = False) -> tuple[Any, Any, Any, Any]:
    """Hugging Face's Trainer, which sets gradients to zero and keeps them (torch 1.10)."""
    import torch
    from published_models import LoopAdamW, SoftmaxWithInput
    from transformers import BertConfig, BertForSequenceClassification

    sizes: dict[str, Any] = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
    config = BertConfig(**sizes | {"intermediate_size": 4096, "attn_implementation": "eager"})
    with torch.device("meta"):
        model = BertForSequenceClassification(config)
    ids = torch.zeros(5, 512, dtype=torch.int64)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.zeros(5, dtype=torch.int64)}

    def loss_fn(model: Any, batch: Any) -> Any:
        own = torch.nn.functional.softmax
        if keeps_input:
            torch.nn.functional.softmax = lambda x, dim, dtype=None: SoftmaxWithInput.apply(x)  # pyright: ignore
        try:
            return model(**batch).loss
        finally:
            torch.nn.functional.softmax = own

    return model.train(), LoopAdamW(model.parameters()), batch, loss_fn


def feed_forward() -> tuple[Any, Any, Any, Any]:
    import torch
    from published_models import FeedForward

    with torch.device("meta"):
        model = FeedForward(8192, 8192)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=True)
    return model, optimizer, torch.zeros(5, 8192), lambda model, batch: model(batch).sum()


def demo(two_temporaries: bool = False) -> tuple[Any, Any, Any, Any]:
    import torch
    from published_models import DemoTransformer, TwoTemporariesAdam

    with torch.device("meta"):
        model = DemoTransformer()
    kind = TwoTemporariesAdam if two_temporaries else torch.optim.Adam
    ids = torch.zeros(5, 35, dtype=torch.int64)

    def loss_fn(model: Any, batch: Any) -> Any:
        return torch.nn.functional.nll_loss(model(*batch), batch[1].view(-1))

    return model, kind(model.parameters(), lr=0.1), (ids, ids.clone()), loss_fn


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), sys.argv[2:])
