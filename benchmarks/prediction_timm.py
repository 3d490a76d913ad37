"""Predicted against measured peaks of timm's models on an A100, as the driver showed them to somebody else.

    python benchmarks/prediction_timm.py FOLDER --timm PATH --predictions FILE [--models N] [name ...]

FOLDER holds gpu_timm_peaks.csv, which is not part of this project: timm's training script, one A100 of 40 GB, each model at its
own image size, batches of 8 to 128. PATH is where `pip install --target PATH --no-deps timm==1.0.9 torchvision pillow` put timm
(this torch has no torchvision of its own, whose operators are declared here instead). What was predicted is kept in FILE, so
that judging again takes no tracing. Only errors are written to the results.

`timm_rows.py` says which rows are judged, `timm_step.py` what is traced. Two numbers are fitted, jointly, to one row of each
of the CALIBRATION models, none of which is judged: what the backward of convolutions holds inside
(`memfit/kernels/scratch.py`), and what the driver shows beside the allocator's segments (a context, cuDNN, kernels). Of the
factors tried, the best has the least mean error on these rows, each with its own constant, the median of what is missing.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

from common import MiB, save, table
from timm_bounds import bounds
from timm_rows import CALIBRATION, Rows, calibration_rows, measured_rows


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
    if asked.timm is not None:
        others = [name for name in sorted(measured) if name not in CALIBRATION]
        names = [*calibration_rows(measured), *(asked.names or spread(others, asked.models))]
        predict(names, measured, asked.timm, asked.predictions)
    predicted = json.loads(asked.predictions.read_text())
    judge(measured, {name: found for name, found in predicted.items() if "died" not in found})


def spread(names: list[str], count: int) -> list[str]:
    """That many of the names, evenly; all where it is 0."""
    return names if not count else names[:: max(1, len(names) // count)]


def predict(names: list[str], measured: Rows, timm: Path, file: Path) -> None:
    from timm_step import declare_torchvision, predicted

    declare_torchvision(timm)
    known = json.loads(file.read_text()) if file.exists() else {}
    calibration = calibration_rows(measured)
    for name in names:
        if name in known or name not in measured:
            continue
        start = time.perf_counter()
        try:
            known[name] = predicted(name, sorted(measured[name]), calibration.get(name))
        except Exception as error:
            known[name] = {"died": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]}
        known[name]["seconds"] = time.perf_counter() - start
        file.write_text(json.dumps(known))
        print(name, known[name].get("died", ""), f"{known[name]['seconds']:.1f} s", flush=True)


def fitted(measured: Rows, predicted: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Mean error of the calibration rows and their constant, by factor."""
    found = {}
    rows = [(measured[n][b], predicted[n]["tried"]) for n, b in calibration_rows(measured).items() if n in predicted]
    for factor in rows[0][1]:
        constant = median(size - tried[factor] for size, tried in rows)
        found[factor] = mean(abs((tried[factor] + constant) / size - 1) for size, tried in rows), constant
    return found


def judge(measured: Rows, predicted: dict[str, Any]) -> None:
    from memfit.kernels.scratch import BACKWARD

    fits = fitted(measured, predicted)
    lines = [(factor, f"{error:.2%}", f"{constant / MiB:.0f}") for factor, (error, constant) in fits.items()]
    print(table("calibration", ("factor", "mean error", "constant, MiB"), lines))
    constant = fits[str(BACKWARD)][1]
    rows = [
        (name, batch, size, found["rows"][str(batch)]["reserved"])
        for name, found in sorted(predicted.items())
        if name not in CALIBRATION
        for batch, size in measured.get(name, {}).items()
    ]
    judged = [(n, b, (guess + constant) / size - 1) for n, b, size, guess in rows]
    errors = sorted(abs(error) for _, _, error in judged)
    share = {name: found["convolutions"] for name, found in predicted.items()}
    summary = {
        "models": len({n for n, _, _ in judged}),
        "rows": len(judged),
        "calibration rows": sum(n in predicted for n in calibration_rows(measured)),
        "factor of least mean error": min(fits, key=lambda factor: fits[factor][0]),
        "factor": BACKWARD,
        "constant MiB": round(constant / MiB),
        "median": median(errors),
        "90th percentile": errors[int(0.9 * len(errors))],
        "worst": errors[-1],
        "slope in batch, median": median(slopes_of(rows)),
        "bounds": bounds(rows, constant, share),
        "seconds to trace, median": median(f["traced"] for f in predicted.values()),
        "seconds to trace, most": max(f["traced"] for f in predicted.values()),
    }
    worst = sorted(judged, key=lambda row: -abs(row[2]))[:40]
    print(table("the farthest off", ("model", "batch", "error"), [(n, b, f"{e:+.2%}") for n, b, e in worst]))
    print(json.dumps(summary, indent=1))
    save("prediction_timm", {"summary": summary, "rows": [{"model": n, "batch": b, "error": e} for n, b, e in judged]})


def slopes_of(rows: list[tuple[str, int, float, int]]) -> list[float]:
    """Predicted over measured growth with the batch, for each model with two rows at least."""
    found = []
    for name in {name for name, *_ in rows}:
        own = sorted((batch, size, guess) for n, batch, size, guess in rows if n == name)
        if len(own) > 1:
            (_, few, guess_few), *_, (_, many, guess_many) = own
            found.append((guess_many - guess_few) / (many - few))
    return found


if __name__ == "__main__":
    main()
