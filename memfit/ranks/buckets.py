"""Gradients summed over processes in few collectives, in place, with no more memory than two buckets.

Large gradients are reduced where they lie; small ones, and those whose elements do not lie in one piece, travel in buckets of
DistributedDataParallel's size (bucket_cap_mb=25). How many collectives that takes depends on the parameters alone. Not covered:
overlapping them with backward, which `overlapped.py` does through the same memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from memfit.hardware.exhausted import patiently
from memfit.ranks.ranks import Ranks

BUCKET = 25 << 20
"""Bytes of a bucket."""
ALONE = 4 << 20
"""Bytes from which on a gradient is reduced by itself: copying it would take longer than another collective."""


class Reducer:
    """Sums gradients over `ranks`. The buckets are there from the start, so that nothing is allocated between the processes'
    agreement and the sums. `overlaps`: sums may run beside a backward as well, for which large gradients need room, too.

    Attributes: `buffer` (the memory of buckets), `collectives` (how many carried gradients so far).
    """

    def __init__(self, ranks: Ranks, parameters: Sequence[torch.Tensor], *, overlaps: bool = False) -> None:
        self._ranks = ranks
        # (half precision gathers in float32)
        sizes = [p.numel() * max(4, p.element_size()) for p in parameters if p.requires_grad]
        room = sum(size for size in sizes if size < ALONE or overlaps)
        self.buffer = torch.empty(min(BUCKET, room), dtype=torch.uint8, device=ranks.device)
        self.buffer.zero_()  # memory that was never touched is not held yet, and plans would not count it
        self.collectives = 0

    def sum(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The gradients summed over all processes, in place where they are dense. Every process gives as many, of the same
        shapes, dtypes and layouts."""
        found = list(gradients)
        small: list[torch.Tensor] = []
        for i, gradient in enumerate(found):
            if gradient.is_sparse:
                found[i] = self._rows(gradient)
            elif gradient.numel() * gradient.element_size() >= ALONE and gradient.is_contiguous():
                self._ranks.sum([gradient])
                self.collectives += 1
            else:
                small.append(gradient)
        for bucket in self._buckets(small):
            self._through(bucket)
        return found

    def _buckets(self, gradients: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Neighbours of one dtype, as many as fit into the buffer together; what does not fit at all by itself."""
        found: list[list[torch.Tensor]] = []
        there = 0
        for gradient in gradients:
            new = not found or gradient.dtype != found[-1][0].dtype or there + gradient.numel() > self._capacity(gradient)
            if new:
                found.append([])
                there = 0
            found[-1].append(gradient)
            there += gradient.numel()
        return found

    def _capacity(self, gradient: torch.Tensor) -> int:
        return self.buffer.numel() // gradient.element_size()

    def _through(self, gradients: Sequence[torch.Tensor]) -> None:
        """One collective for these."""
        total = sum(gradient.numel() for gradient in gradients)
        if total > self._capacity(gradients[0]):
            make = partial(torch.empty, total, dtype=gradients[0].dtype, device=self._ranks.device)
            flat = patiently(make, self._ranks.device)
        else:
            flat = self.buffer[: total * gradients[0].element_size()].view(gradients[0].dtype)
        places = [place.view(gradient.shape) for place, gradient in zip(flat.split([g.numel() for g in gradients]), gradients)]
        torch._foreach_copy_(places, list(gradients))  # pyright: ignore[reportPrivateImportUsage]
        self._ranks.sum([flat])
        self.collectives += 1
        torch._foreach_copy_(list(gradients), places)  # pyright: ignore[reportPrivateImportUsage]

    def _rows(self, gradient: torch.Tensor) -> torch.Tensor:
        """A sparse gradient: the rows of all processes, those of the same index added up."""
        gradient = gradient.coalesce()
        indices, values = self._ranks.concatenated(gradient.indices().t()), self._ranks.concatenated(gradient.values())
        self.collectives += 2
        return torch.sparse_coo_tensor(indices.t(), values, gradient.shape, check_invariants=False).coalesce()
