"""Detects draws from torch's CPU generator during an epoch: dropout, augmentation, the loop's own.

Their number depends on how a batch is cut and divided, so no later epoch may draw from where they leave the generator. Not
covered: draws between epochs (a validation loader's seed), which are the same however batches are cut, and sampling itself.
"""

from __future__ import annotations

import torch


class Watch:
    """Detects other draws. Attribute `drew`: whether there were any so far."""

    def __init__(self) -> None:
        self.drew = False
        self._state: bytes | None = None

    def mark(self) -> None:
        """Count draws from now on."""
        if not self.drew:
            self._state = _state()

    def look(self) -> None:
        """Check for draws since the mark."""
        if not self.drew and self._state is not None:
            self.drew = self._state != _state()

    def rest(self) -> None:
        """Count nothing until the next mark."""
        self._state = None


def _state() -> bytes:
    return torch.get_rng_state().numpy().tobytes()
