"""Predicted peaks of single operations against `max_memory_allocated` as others published it.

    python benchmarks/operations.py FOLDER

FOLDER holds gpu_op_peaks.csv, which is not part of this project: the plain PyTorch and Hugging Face rows of the Liger-Kernel
benchmark (github.com/linkedin/Liger-Kernel, benchmark/scripts), on A100, H100 and RTX 3090. Each operation is written here as
there, run forward and backward three times on fake tensors, and its timeline goes through the simulated allocator. Nothing is
fitted, but for the embedding rows: their process held other things, the same for all rows of one shape; that constant is taken
from the row with the largest vocabulary, which is not judged.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from common import MiB, save, table

TIMES = 3
CAPABILITY = {"A100": (8, 0), "H100": (9, 0), "3090": (8, 6)}


def main(folder: Path) -> None:
    file = folder / "gpu_op_peaks.csv"
    if not file.exists():
        print(f"skipped: there is no {file}")
        return
    rows = [one for line in csv.DictReader(file.open()) if (one := predicted_row(line)) is not None]
    constants = embedding_constants(rows)
    judged = []
    for row in rows:
        held = constants.get(row["shape"], (0, None))
        if row is not held[1]:
            judged.append(row | {"error": (row["predicted"] + held[0]) / row["measured"] - 1})
    shown = [(r["kernel"], r["gpu"], r["x"], f"{r['error']:+.4%}") for r in judged]
    print(table("predicted against measured peak of single operations", ("operation", "GPU", "size", "error"), shown))
    errors = [abs(r["error"]) for r in judged]
    summary = {
        "rows": len(judged),
        "median": median(errors),
        "worst": max(errors),
        "within 0.05 %": sum(e <= 5e-4 for e in errors),
        "within 1 %": sum(e <= 1e-2 for e in errors),
    }
    print(json.dumps(summary, indent=1))
    kept = [{name: r[name] for name in ("kernel", "gpu", "x", "error")} for r in judged]
    save("operations", {"summary": summary, "rows": kept})


def predicted_row(line: dict[str, str]) -> dict[str, Any] | None:
    config = json.loads(line["config"])
    build = OPERATIONS.get(line["kernel"])
    if build is None:
        return None
    gpu = next(name for name in CAPABILITY if name in line["gpu"])
    return {
        "kernel": line["kernel"],
        "gpu": gpu,
        "x": int(line["x_value"]),
        "shape": (line["kernel"], line["config"]) if line["kernel"] == "embedding" else None,
        "predicted": peak_of(build, int(line["x_value"]), config, CAPABILITY[gpu]),
        "measured": float(line["max_memory_allocated_MiB"]) * MiB,
    }


def embedding_constants(rows: list[dict[str, Any]]) -> dict[Any, tuple[float, dict[str, Any]]]:
    """By shape: the bytes that the process held besides, and the row they were told from."""
    found: dict[Any, tuple[float, dict[str, Any]]] = {}
    for row in sorted((r for r in rows if r["shape"]), key=lambda r: r["x"]):
        found[row["shape"]] = (row["measured"] - row["predicted"], row)
    return found


def peak_of(build: Callable[[int, dict[str, Any]], Callable[[], Any]], x: int, config: dict, capability: Any) -> int:
    """Most bytes handed out while the operation runs forward and backward some times."""
    import torch

    from memfit.kernels.scratch import scratch
    from memfit.kernels.substitute import cuda_kernels
    from memfit.kernels.target import Target
    from memfit.profiling.allocator import caching_peak
    from memfit.tracing.fake import FakeWorld
    from memfit.tracing.flop_counter import Counts
    from memfit.tracing.ledger import Ledger

    world = FakeWorld()
    ledger = Ledger(torch.device("cpu"), inside=scratch, counts=Counts())
    with world.entered(), ledger, cuda_kernels(Target(capability)):
        full = build(x, config)
        ledger.phase("forward")
        for _ in range(TIMES):
            full()
        timeline = ledger.timeline()
    operations = timeline.operations
    assert operations is not None
    products = operations.flops.any()
    return caching_peak(timeline, 1, capability=capability, workspaces=2 if products else 0).allocated


# ---- the operations, as the source writes them


def dtype_of(config: dict[str, Any]) -> Any:
    import torch

    return getattr(torch, config["dtype"].removeprefix("torch."))


def cross_entropy(x: int, config: dict[str, Any]) -> Callable[[], Any]:
    import torch

    rows = config["B"] * config["T"]
    logits, labels = torch.empty(rows, x, requires_grad=True), torch.empty(rows, dtype=torch.int64)
    loss = torch.nn.CrossEntropyLoss()
    return lambda: loss(logits, labels).backward()


def embedding(x: int, config: dict[str, Any]) -> Callable[[], Any]:
    import torch

    own, other = torch.nn.Embedding(x, config["D"]), torch.nn.Embedding(x, config["D"])
    ids = torch.empty(config["B"], config["T"], dtype=torch.int64)

    def full(kept: Any = other) -> None:
        out = own(ids)
        out.backward(torch.empty_like(out))

    return full


def layer_norm(x: int, config: dict[str, Any]) -> Callable[[], Any]:
    import torch

    own, other = torch.nn.LayerNorm(x), torch.nn.LayerNorm(x)
    given = torch.empty(config["M"], x, requires_grad=True)
    grad = torch.empty_like(given)
    return lambda kept=other: own(given).backward(grad, retain_graph=True)


def rms_norm(x: int, config: dict[str, Any]) -> Callable[[], Any]:
    import torch

    weight, other = torch.ones(x, requires_grad=True), torch.ones(x, requires_grad=True)
    given = torch.empty(config["M"], x, dtype=dtype_of(config), requires_grad=True)
    grad = torch.empty_like(given)

    def forward() -> torch.Tensor:
        hidden = given.to(torch.float32)
        variance = hidden.pow(2).mean(-1, keepdim=True)
        hidden = hidden * torch.rsqrt(variance + config["eps"])
        return weight * hidden.to(given.dtype)

    def full(kept: Any = other) -> None:
        y = forward()
        y.backward(grad, retain_graph=True)

    return full


def swiglu(x: int, config: dict[str, Any]) -> Callable[[], Any]:
    import torch
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    sizes = {name: config[name] for name in ("hidden_size", "intermediate_size", "hidden_act")}
    torch.set_default_dtype(dtype_of(config))
    layer = LlamaMLP(LlamaConfig(**sizes))
    torch.set_default_dtype(torch.float32)
    given = torch.empty(config["B"], x, config["hidden_size"], dtype=dtype_of(config), requires_grad=True)

    def full() -> None:
        y = layer(given)
        y.backward(torch.empty_like(y), retain_graph=True)

    return full


def kl_div(x: int, config: dict[str, Any]) -> Callable[[], Any]:
    import torch

    rows = config["B"] * config["T"]
    given = torch.empty(rows, x, requires_grad=True).log_softmax(dim=-1)
    target = torch.empty(rows, x).softmax(dim=-1)
    loss = torch.nn.KLDivLoss(reduction="batchmean")
    return lambda: loss(given, target).backward(retain_graph=True)


def fused_linear_jsd(x: int, config: dict[str, Any]) -> Callable[[], Any]:
    import torch

    dtype, hidden, vocabulary = dtype_of(config), config["H"], config["V"]
    student, teacher = (torch.nn.Linear(hidden, vocabulary, bias=False, dtype=dtype) for _ in range(2))
    given = torch.empty(x, hidden, dtype=dtype, requires_grad=True)
    taught = torch.empty(x, hidden, dtype=dtype)
    divergence = torch.nn.KLDivLoss(reduction="batchmean", log_target=True)

    def jsd(log_q: torch.Tensor, log_p: torch.Tensor) -> torch.Tensor:
        log_q, log_p = log_q.to(torch.float), log_p.to(torch.float)
        m = torch.lerp(torch.exp(log_p), torch.exp(log_q), 0.5)
        loss = 0.5 * divergence(torch.log(m), log_p) + 0.5 * divergence(torch.log(m), log_q)
        return loss.to(dtype)

    def forward() -> torch.Tensor:
        logits, taught_logits = student(given), teacher(taught)
        student_log = torch.log_softmax(logits / 1.0, dim=-1)
        teacher_log = torch.log_softmax(taught_logits / 1.0, dim=-1)
        return jsd(student_log, teacher_log)

    return lambda: forward().backward()


def softmax(x: int, config: dict[str, Any]) -> Callable[[], Any]:
    import torch

    own = torch.nn.Softmax(dim=-1)
    given = torch.empty(x, dtype=dtype_of(config), requires_grad=True)

    def full() -> None:
        y = own(given)
        y.backward(torch.ones_like(y), retain_graph=True)

    return full


OPERATIONS = {
    function.__name__: function
    for function in (cross_entropy, embedding, layer_norm, rms_norm, swiglu, kl_div, fused_linear_jsd, softmax)
}

if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
