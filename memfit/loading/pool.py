"""Picks a few samples of a dataset to plan and verify with: the longest found quickly, and some spread over all of it."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from memfit.batches.samples import SampleBatch
from memfit.loading.draws import preserved
from memfit.loading.longest import longest_samples, own_copy

LONGEST, SPREAD = 4, 28
"""Number of samples of each kind."""


def planning_pool(loader: DataLoader[Any], seconds: float = 0.5) -> tuple[SampleBatch, str] | None:
    """Return (samples to plan with, what is known of their sizes in words), or None if samples cannot be read by index.

    The dataset is read through a shallow copy, with all random generators preserved.
    """
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset) or loader.batch_sampler is None:
        return None
    scan = longest_samples(dataset, LONGEST, seconds)
    if not scan.samples:
        return None
    with preserved():
        own = own_copy(dataset, {})
        step = max(1, len(own) // SPREAD)
        spread = [own[i] for i in range(0, min(len(own), step * SPREAD), step)]
    if scan.complete:
        said = f"all {scan.seen} samples looked at"
    else:
        said = f"{scan.seen} of {len(own)} samples looked at; longer ones are planned for when they come"
    return SampleBatch([*scan.samples, *spread], loader.collate_fn), said
