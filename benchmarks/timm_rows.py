"""Which rows of gpu_timm_peaks.csv are judged, which calibrate, and which cannot be of a training that ran.

Rows are dropped by what the source itself says of them, never by what is predicted:

- at the card's limit, or smaller than the source's own sum over fake tensors: the run stopped before its peak. Larger batches
  of that model stopped as well;
- of two batches where the larger one takes no more, one did not run as the other did, and nobody says which: both.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path

from common import MiB

LIMIT = int(0.94 * 40_960) * MiB
"""Bytes from which on a row is at the limit of the source's card."""
CALIBRATION = (
    *("cs3darknet_l", "darknetaa53", "ecaresnet50t", "ese_vovnet39b", "ese_vovnet19b_slim", "convnext_nano_ols"),
    *("efficientnet_b3_g8_gn", "dm_nfnet_f1", "efficientnetv2_rw_t", "efficientnet_b2", "efficientnet_b0_g16_evos"),
    *("coatnet_0_224", "convnext_femto_ols", "deit3_huge_patch14_224", "beit_large_patch16_384", "convnext_xxlarge"),
    *("deit_base_distilled_patch16_384", "deit_small_distilled_patch16_224", "ecaresnext50t_32x4d", "davit_huge_fl"),
)
"""Models of which one row each was looked at; none of them is judged."""

Rows = dict[str, dict[int, float]]
"""Bytes by model and batch."""


def measured_rows(file: Path) -> Rows:
    """The rows of trainings that ran."""
    everything: dict[str, dict[int, tuple[float, float]]] = defaultdict(dict)
    for line in csv.DictReader(file.open()):
        sizes = float(line["measured_max_gpu_mib"]) * MiB, float(line["fake_last_mib"]) * MiB
        everything[line["timm_model"]][int(line["batch"])] = sizes
    return {name: kept for name, rows in everything.items() if (kept := growing(before_limit(rows)))}


def before_limit(rows: dict[int, tuple[float, float]]) -> dict[int, float]:
    """The batches below the first that stopped, from (measured, the source's own sum)."""
    kept = {}
    for batch, (size, least) in sorted(rows.items()):
        if size > LIMIT or size < least:
            break
        kept[batch] = size
    return kept


def growing(rows: dict[int, float]) -> dict[int, float]:
    """The batches that take more than every smaller one, and less than every larger one."""
    return {
        batch: size
        for batch, size in rows.items()
        if all((other < batch) == (taken < size) and taken != size for other, taken in rows.items() if other != batch)
    }


def calibration_rows(measured: Rows) -> dict[str, int]:
    """One batch of each calibration model: in alphabetical order of the models by turns the smallest and the largest."""
    turns = enumerate(sorted(CALIBRATION))
    return {name: (min if turn % 2 == 0 else max)(measured[name]) for turn, name in turns if name in measured}
