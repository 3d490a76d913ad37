"""Noticing draws from torch's generator on the host while an epoch is under way: dropout, augmentation, the loop's own.

How many there are depends on how a batch is cut and divided, so that no later epoch may be drawn from where they leave off. Not
covered: draws between epochs (a validation loader's seed), which are alike however batches are cut, and sampling itself.
"""

from __future__ import annotations

import torch


class Watch:
    """Attribute `drew`: whether there were any so far."""

    def __init__(self) -> None:
        self.drew = False
        self._state: bytes | None = None

    def mark(self) -> None:
        """From now on draws count."""
        if not self.drew:
            self._state = _state()

    def look(self) -> None:
        """Count draws since the mark."""
        if not self.drew and self._state is not None:
            self.drew = self._state != _state()

    def rest(self) -> None:
        """Until the next mark nothing counts."""
        self._state = None


def _state() -> bytes:
    return torch.get_rng_state().numpy().tobytes()
