"""Wraps loaders that are no torch DataLoader: any iterable of whole batches passes through and is counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from memfit.batches.cut import shared_samples
from memfit.loading.loader import BatchInfo


class PassedThrough:
    """Yields the batches of `source`, and calls `on_batch` before each one; everything else is the source's."""

    def __init__(self, source: Iterable[Any], on_batch: Callable[[BatchInfo], None]) -> None:
        self.source = source
        self._on_batch = on_batch
        self._epochs = 0

    def __iter__(self) -> Iterator[Any]:
        epoch, self._epochs = self._epochs, self._epochs + 1
        index, batches = 0, iter(self.source)
        while True:
            started = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._on_batch(BatchInfo(epoch, index, shared_samples(batch), time.perf_counter() - started))
            yield batch
            index += 1

    def __len__(self) -> int:
        return len(self.source)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "source" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.source, name)
