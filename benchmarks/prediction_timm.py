"""Predicted against measured peaks of timm's models on an A100, as the driver showed them to somebody else.

    python benchmarks/prediction_timm.py FOLDER --timm PATH --predictions FILE [--models N] [name ...]

FOLDER holds gpu_timm_peaks.csv, which is not part of this project: timm's training script, one A100 of 40 GB, each model at its
own image size, batches of 8 to 128. PATH is where `pip install --target PATH --no-deps timm torchvision pillow` put timm (this
torch has no torchvision of its own, whose operators are declared here instead). What was predicted is kept in FILE, so that
judging again takes no tracing. Only errors are written to the results.

Traced is that script's own loop, gradients gone after each step; the loader holds the next batch on the device as well, in
bytes and in floats. Nobody said which torch and which optimizer; SGD with momentum is what the script takes if not told
otherwise. The driver's figure contains a context, cuDNN and kernels: one constant, taken from one row each of the CALIBRATION
models, which are not judged. What convolutions hold inside (`memfit/kernels/scratch.py`) was fitted to the same models.

Rows that cannot be of a training that ran are dropped, by what the source itself says: at the card's limit; smaller than the
source's own sum over fake tensors and the least context an A100 was seen with; larger than, or just as large as, the row of
another, larger batch.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

from common import MiB, save, table

LIMIT, CONTEXT = 38_500 * MiB, 922 * MiB
"""Bytes from which on a row is at the card's limit; bytes of an A100's context before kernels are loaded (torch 1.13, in
stas00/ml-engineering)."""
CAPABILITY = (8, 0)
ITERATIONS = 3
COVERAGE, CONVOLUTIONAL = 0.95, 0.1
"""Share of rows that a bound is to cover; share of convolutions in the arithmetic from which on a step counts as such."""
CALIBRATION = (
    *("cs3darknet_l", "darknetaa53", "ecaresnet50t", "ese_vovnet39b", "ese_vovnet19b_slim", "convnext_nano_ols"),
    *("efficientnet_b3_g8_gn", "dm_nfnet_f1", "efficientnetv2_rw_t", "efficientnet_b2", "efficientnet_b0_g16_evos"),
    *("coatnet_0_224", "convnext_femto_ols", "deit3_huge_patch14_224", "beit_large_patch16_384", "convnext_xxlarge"),
    *("deit_base_distilled_patch16_384", "deit_small_distilled_patch16_224", "ecaresnext50t_32x4d", "davit_huge_fl"),
)
"""Models that were looked at to calibrate, one row of each for the constant."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--timm", type=Path)
    parser.add_argument("--predictions", type=Path, required=True)
    parser.add_argument("--models", type=int, default=0)
    parser.add_argument("names", nargs="*")
    asked = parser.parse_intermixed_args()
    file = asked.folder / "gpu_timm_peaks.csv"
    if not file.exists():
        print(f"skipped: there is no {file}")
        return
    measured = measured_rows(file)
    names = asked.names or spread(sorted(measured), asked.models)
    if asked.timm is not None:
        predict(names, measured, asked.timm, asked.predictions)
    predicted = json.loads(asked.predictions.read_text())
    judge(measured, {name: found for name, found in predicted.items() if "died" not in found})


def spread(names: list[str], count: int) -> list[str]:
    """That many of the names, evenly; all where it is 0."""
    return names if not count else names[:: max(1, len(names) // count)]


def measured_rows(file: Path) -> dict[str, dict[int, float]]:
    """Bytes by model and batch, without runs that ran out of memory."""
    found: dict[str, dict[int, float]] = defaultdict(dict)
    all_of: dict[str, list[float]] = defaultdict(list)
    for line in csv.DictReader(file.open()):
        size, least = float(line["measured_max_gpu_mib"]) * MiB, float(line["fake_last_mib"]) * MiB
        if least + CONTEXT < size <= LIMIT:
            found[line["timm_model"]][int(line["batch"])] = size
        all_of[line["timm_model"]].append(size)
    for name, sizes in all_of.items():
        found[name] = {batch: size for batch, size in found[name].items() if sizes.count(size) == 1}
    return {name: kept for name, rows in found.items() if (kept := growing(rows))}


def growing(rows: dict[int, float]) -> dict[int, float]:
    kept: dict[int, float] = {}
    for batch, size in sorted(rows.items(), reverse=True):
        if size < min(kept.values(), default=float("inf")):
            kept[batch] = size
    return dict(sorted(kept.items()))


# ---- predicting


def predict(names: list[str], measured: dict[str, dict[int, float]], timm: Path, file: Path) -> None:
    declare_torchvision(timm)
    known = json.loads(file.read_text()) if file.exists() else {}
    for name in names:
        if name in known or name not in measured:
            continue
        start = time.perf_counter()
        try:
            known[name] = predicted(name, sorted(measured[name]))
        except Exception as error:
            known[name] = {"died": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]}
        known[name]["seconds"] = time.perf_counter() - start
        file.write_text(json.dumps(known))
        print(name, known[name].get("died", ""), f"{known[name]['seconds']:.1f} s", flush=True)


def declare_torchvision(timm: Path) -> None:
    import torch

    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    sys.path.append(str(timm))
    globals()["_library"] = library  # as long as this lives, so do the operators


def predicted(name: str, batches: list[int]) -> dict[str, Any]:
    """Reserved bytes by batch, and what else is known of the step."""
    from memfit.profiling.allocator import caching_peak
    from memfit.profiling.timeline import fit

    model, size = built(name)
    start = time.perf_counter()
    timeline = fit(looped(model, size, 2), 2, looped(model, size, 3), 3)
    traced = time.perf_counter() - start
    assert timeline is not None, "it runs in another way for another batch"
    per_image = size[0] * size[1] * size[2]
    rows = {}
    for batch in batches:
        held = caching_peak(timeline, batch, capability=CAPABILITY)
        ahead = batch * per_image * 5  # the next batch, in bytes and in floats
        rows[str(batch)] = {"reserved": held.reserved + ahead, "allocated": held.allocated + ahead}
    return {
        "rows": rows,
        "parameters": sum(p.numel() for p in model.parameters()),
        "convolutions": convolutions(timeline, batches),
        "traced": traced,
    }


def looped(model: Any, size: tuple[int, int, int], batch: int) -> Any:
    """The timeline of some iterations of timm's training loop."""
    import torch

    from memfit.kernels.scratch import scratch
    from memfit.kernels.substitute import cuda_kernels
    from memfit.kernels.target import Target
    from memfit.profiling.counts import Counts
    from memfit.profiling.fake import FakeWorld
    from memfit.profiling.ledger import Ledger
    from memfit.profiling.sandbox import leave_no_trace
    from memfit.profiling.shadow import shadow_optimizer, step_by_lists

    world, cpu = FakeWorld(), torch.device("cpu")
    own = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ledger = Ledger(cpu, inside=scratch, counts=Counts())
    with leave_no_trace(model, cpu, buffers=False), world.replacing(model) as twins, world.entered(), ledger:
        ledger.present((*model.parameters(), *model.buffers()), "parameters")
        optimizer = shadow_optimizer(own, lambda t: twins.get(id(t)), world.twin)
        step_by_lists(optimizer)
        with cuda_kernels(Target(CAPABILITY)):
            ledger.phase("forward")
            for _ in range(ITERATIONS):
                images, labels = torch.empty(batch, *size), torch.empty(batch, dtype=torch.int64)
                loss = loss_of(model, images, labels)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return ledger.timeline()


def built(name: str) -> tuple[Any, tuple[int, int, int]]:
    """The model with whatever lies in memory as weights, and the size of its images."""
    import timm
    import torch

    changed = {n: getattr(torch.nn.init, n) for n in dir(torch.nn.init) if n.endswith("_") and not n.startswith("_")}
    for n in changed:
        setattr(torch.nn.init, n, lambda tensor, *args, **kwargs: tensor)
    try:
        model = timm.create_model(name, pretrained=False)
    finally:
        for n, function in changed.items():
            setattr(torch.nn.init, n, function)
    return model.train(), timm.data.resolve_model_data_config(model)["input_size"]


def loss_of(model: Any, images: Any, labels: Any) -> Any:
    """timm's LabelSmoothingCrossEntropy."""
    import torch

    logs = torch.nn.functional.log_softmax(model(images), dim=-1)
    nll = -logs.gather(dim=-1, index=labels.unsqueeze(1)).squeeze(1)
    return (0.9 * nll - 0.1 * logs.mean(dim=-1)).mean()


def convolutions(timeline: Any, batches: list[int]) -> dict[str, Any]:
    """Their share of the arithmetic, and their largest operands by batch, in bytes: what workspaces may depend on."""
    operations = timeline.operations
    kinds = [index for index, (name, _) in enumerate(operations.kinds) if name.startswith("convolution")]
    chosen = [index for index, kind in enumerate(operations.kind.tolist()) if kind in kinds]
    flops = operations.flops_at(8)
    largest = {str(b): float(operations.moved_at(b)[chosen].max(initial=0.0)) for b in batches} if chosen else {}
    return {"share": float(flops[chosen].sum() / max(1.0, flops.sum())), "largest": largest}


# ---- judging


def judge(measured: dict[str, dict[int, float]], predicted: dict[str, Any]) -> None:
    names = sorted(name for name in predicted if name in measured)
    calibration = [name for name in names if name in CALIBRATION]
    rows = [
        (name, batch, size, predicted[name]["rows"][str(batch)]["reserved"])
        for name in names
        for batch, size in measured[name].items()
        if str(batch) in predicted[name]["rows"]
    ]
    smallest = [min(measured[name]) for name in calibration]  # where all else is least
    known = {(n, b): (size, guess) for n, b, size, guess in rows}
    constant = median(known[n, b][0] - known[n, b][1] for n, b in zip(calibration, smallest) if (n, b) in known)
    judged = [(n, b, (guess + constant) / size - 1) for n, b, size, guess in rows if n not in calibration]
    errors = sorted(abs(error) for _, _, error in judged)
    slopes = slopes_of(measured, predicted, set(calibration))
    apart = [row for row in rows if row[0] not in calibration]
    share = {name: found["convolutions"]["share"] for name, found in predicted.items()}
    kinds = {
        "plain": [row for row in apart if share[row[0]] <= CONVOLUTIONAL],
        "convolutions": [row for row in apart if share[row[0]] > CONVOLUTIONAL],
    }
    bounds = {kind: interval(part, constant) for kind, part in kinds.items() if part}
    summary = {
        "models": len({n for n, _, _ in judged}),
        "rows": len(judged),
        "calibration rows": len(calibration),
        "constant MiB": round(constant / MiB),
        "median": median(errors),
        "90th percentile": errors[int(0.9 * len(errors))],
        "worst": errors[-1],
        "slope in batch, median": median(slopes) if slopes else None,
        "intervals": bounds,
        "seconds to trace, median": median(f["traced"] for f in predicted.values()),
        "seconds to trace, most": max(f["traced"] for f in predicted.values()),
    }
    worst = sorted(judged, key=lambda row: -abs(row[2]))[:40]
    print(table("the farthest off", ("model", "batch", "error"), [(n, b, f"{e:+.2%}") for n, b, e in worst]))
    print(json.dumps(summary, indent=1))
    save("prediction_timm", {"summary": summary, "rows": [{"model": n, "batch": b, "error": e} for n, b, e in judged]})


def interval(rows: list[tuple[str, int, float, float]], constant: float) -> dict[str, float]:
    """Bounds from half of the models, judged on the other half: shares of the reserved bytes (split conformal prediction)."""
    names = sorted({name for name, *_ in rows})
    halves = [names[::2], names[1::2]]
    known, judged = ([row for row in rows if row[0] in half] for half in halves)
    residuals = sorted((size - constant) / guess - 1 for *_, size, guess in known)
    rank = min(len(residuals), math.ceil((len(residuals) + 1) * COVERAGE)) - 1
    upper, lower = max(0.0, residuals[rank]), max(0.0, -residuals[len(residuals) - 1 - rank])
    over = [(constant + guess * (1 + upper)) / size - 1 for *_, size, guess in judged]
    return {
        "lower": lower,
        "upper": upper,
        "rows": len(judged),
        "covered": sum(o >= 0 for o in over) / len(over),
        "above the lower bound": sum(constant + g * (1 - lower) <= s for *_, s, g in judged) / len(judged),
        "over-reservation, median": median(over),
    }


def slopes_of(measured: dict[str, dict[int, float]], predicted: dict[str, Any], without: set[str]) -> list[float]:
    """Predicted over measured growth with the batch, per model."""
    found = []
    for name, rows in measured.items():
        guess = predicted.get(name, {"rows": {}})["rows"]
        both = [batch for batch in rows if str(batch) in guess]
        if name in without or len(both) < 2:
            continue
        few, many = min(both), max(both)
        found.append((guess[str(many)]["reserved"] - guess[str(few)]["reserved"]) / (rows[many] - rows[few]))
    return found


if __name__ == "__main__":
    main()
