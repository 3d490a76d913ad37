"""All-reduces gradients in few collectives, in place, with at most two buckets of extra memory.

Large gradients are reduced in place. Small and non-contiguous ones travel in buckets of DistributedDataParallel's size
(bucket_cap_mb=25). The number of collectives depends on the parameters alone. Not covered: overlap with backward, which
`overlapped.py` does with the same memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from memfit.hardware.exhausted import retry_on_oom
from memfit.ranks.ranks import Ranks

BUCKET = 25 << 20
"""Bucket size in bytes."""
ALONE = 4 << 20
"""Size in bytes from which a gradient is reduced by itself: copying it would take longer than another collective."""


class Reducer:
    """Sums gradients over `ranks`. Buckets are allocated up front: nothing is allocated between the ranks' agreement and the
    all-reduce. `overlaps`: collectives may also run during a backward, where large gradients need bucket space too.

    Attributes: `buffer` (the bucket memory), `collectives` (how many have carried gradients so far).
    """

    def __init__(self, ranks: Ranks, parameters: Sequence[torch.Tensor], *, overlaps: bool = False) -> None:
        self._ranks = ranks
        # half-precision gradients accumulate in float32
        sizes = [p.numel() * max(4, p.element_size()) for p in parameters if p.requires_grad]
        room = sum(size for size in sizes if size < ALONE or overlaps)
        self.buffer = torch.empty(min(BUCKET, room), dtype=torch.uint8, device=ranks.device)
        self.buffer.zero_()  # untouched memory is not resident yet, and plans would not count it
        self.collectives = 0

    def sum(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the gradients summed over all ranks, in place where they are dense. Every rank passes the same number of
        gradients, with the same shapes, dtypes and layouts."""
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
        """Group neighbours of one dtype into buckets that fit into the buffer. A larger gradient gets a bucket of its own."""
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
        """All-reduce these gradients in one collective."""
        total = sum(gradient.numel() for gradient in gradients)
        if total > self._capacity(gradients[0]):
            make = partial(torch.empty, total, dtype=gradients[0].dtype, device=self._ranks.device)
            flat = retry_on_oom(make, self._ranks.device)
        else:
            flat = self.buffer[: total * gradients[0].element_size()].view(gradients[0].dtype)
        places = [place.view(gradient.shape) for place, gradient in zip(flat.split([g.numel() for g in gradients]), gradients)]
        torch._foreach_copy_(places, list(gradients))  # pyright: ignore[reportPrivateImportUsage]
        self._ranks.sum([flat])
        self.collectives += 1
        torch._foreach_copy_(list(gradients), places)  # pyright: ignore[reportPrivateImportUsage]

    def _rows(self, gradient: torch.Tensor) -> torch.Tensor:
        """Sum a sparse gradient: concatenate the rows of all ranks, and add up rows with the same index."""
        gradient = gradient.coalesce()
        indices, values = self._ranks.concatenated(gradient.indices().t()), self._ranks.concatenated(gradient.values())
        self.collectives += 2
        return torch.sparse_coo_tensor(indices.t(), values, gradient.shape, check_invariants=False).coalesce()
