"""What step mode's loader yields: samples that are not collated yet, which answer as the batch that the script's loader gives.

`run.step(batch)` cuts between the samples and pads each micro-batch to its own longest one. A script that looks into its batch
(`x, y = batch`, `batch["labels"]`, `batch.to(device)`) collates it, once; what it may have changed there counts from then on,
so `run.step` cuts that one. Not covered: `isinstance(batch, dict)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

from memfit.batches.samples import SampleBatch


class LoadedBatch:
    """An effective batch of step mode's loader. `uncollated` are its samples."""

    def __init__(self, uncollated: SampleBatch) -> None:
        self.uncollated = uncollated

    @cached_property
    def collated(self) -> Any:
        """What the script's loader would give. Errors of its collate function propagate."""
        return self.uncollated.collate()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.collated)

    def __len__(self) -> int:
        return len(self.collated)

    def __getitem__(self, key: Any) -> Any:
        return self.collated[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.collated[key] = value

    def __contains__(self, key: Any) -> bool:
        return key in self.collated

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked by copy and pickle, before there is anything
            raise AttributeError(name)
        return getattr(self.collated, name)


def to_cut(batch: Any) -> Any:
    """Return what `run.step` cuts: the samples of a loader's batch, unless the script has looked into it."""
    if not isinstance(batch, LoadedBatch):
        return batch
    return batch.__dict__.get("collated", batch.uncollated)
