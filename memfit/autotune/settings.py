"""The user's settings, checked once at the entry point."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from memfit.batches.pieces import part_of
from memfit.hardware.catalogue import Card
from memfit.profiling.loop import MEMFITS, Loop


@dataclass(frozen=True)
class Settings:
    """The arguments of `wrap`, as given."""

    target_batch: int | None = None
    """Samples per optimizer step across all ranks (the effective batch); None: the script's own batches."""
    micro_batch: int | None = None
    """Samples per forward, if fixed by the user."""
    whole: bool = False
    """Whether micro_batch="off" asks for this rank's whole batch at once."""
    precision: str = "auto"
    """auto, off, fast, or a precision to compute in."""
    lowers: bool = True
    """Whether "auto" may lower the precision if nothing else fits. (More sharding is tried before.)"""
    checkpoint: tuple[str, ...] | None = None
    """Blocks to checkpoint, if fixed by the user; None: memfit chooses."""
    all_blocks: bool = False
    """Whether checkpoint="all" asks for every block."""
    script_accumulation: int = 1
    """Gradient accumulation of the script: its loader batches per optimizer step."""
    accumulate_in: str = "float32"
    """dtype in which gradients of half precision parameters accumulate. float32, or param: the parameter's own."""
    allow_inexact: tuple[str, ...] = ()
    """Names of modules that may mix samples."""
    batchnorm: str = "micro"
    """Batch norm's running statistics: of each micro-batch ("micro"), or of the effective batch ("whole")."""
    methods: tuple[str, ...] = ()
    """Methods of the model besides forward whose calls are cut."""
    weight: Callable[[Any], float] | None = None
    """Weight of a micro-batch, if given by the user."""
    split: Callable[[Any, Any], Any] | None = None
    """How to cut a batch, if given by the user."""
    leftover: int | None = None
    """Samples in an epoch's last, smaller effective batch, according to the loader (0: none; None: unknown)."""
    card: Card | None = None
    """The GPU to plan for, if it is not the local one."""
    counted: bool = False
    """Whether profiles count FLOPs and name operations. Profiles for a GPU that is not local always do."""

    shard: str = "auto"
    """auto, or what is sharded: off, optimizer, gradients, parameters."""
    rank: int = 0
    """Rank of this process."""
    ranks: int = 1
    """World size: number of ranks that train together."""
    loop: Loop = MEMFITS
    """What the script's loop does around forward and backward, as far as `profile` knows."""

    def asked(self) -> dict[str, str]:
        """Return the requested setting of each lever, in words."""
        found = {
            "target_batch": "the script's own" if self.target_batch is None else str(self.target_batch),
            "micro_batch": "off" if self.whole else "auto" if self.micro_batch is None else str(self.micro_batch),
            "precision": self.precision,
            "checkpoint": "all" if self.all_blocks else _blocks_asked(self.checkpoint),
            "accumulate_in": self.accumulate_in,
        }
        if self.ranks > 1:
            found["shard"] = self.shard
        if self.script_accumulation > 1:
            found["script_accumulation"] = str(self.script_accumulation)
        if self.batchnorm != "micro":
            found["batchnorm"] = self.batchnorm
        if self.methods:
            found["methods"] = ", ".join(self.methods)
        if self.allow_inexact:
            found["allow_inexact"] = ", ".join(self.allow_inexact)
        return found

    @property
    def share(self) -> int | None:
        """Samples per loader batch on this rank; None: as the script's loader yields them."""
        return None if self.target_batch is None else part_of(self.together or 0, self.rank, self.ranks)

    @property
    def together(self) -> int | None:
        """Samples per loader batch across all ranks; None: as the scripts' loaders yield them."""
        return None if self.target_batch is None else self.target_batch // self.script_accumulation


def _blocks_asked(blocks: tuple[str, ...] | None) -> str:
    return "auto" if blocks is None else ", ".join(blocks) or "off"
