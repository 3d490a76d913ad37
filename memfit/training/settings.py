"""What the user asked for, checked once at the door."""

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
    """Samples per optimizer step over all processes; None: the script's own batches."""
    micro_batch: int | None = None
    """Samples per forward, if prescribed."""
    whole: bool = False
    """Whether micro_batch="off" asked for the whole share at once."""
    precision: str = "auto"
    """auto, off, fast, or a precision to compute in."""
    checkpoint: tuple[str, ...] | None = None
    """Blocks to checkpoint, if prescribed; None: to be chosen."""
    all_blocks: bool = False
    """Whether checkpoint="all" asked for every block."""
    script_accumulation: int = 1
    """Loader batches that the script adds up per optimizer step."""
    accumulate_in: str = "float32"
    """float32: gradients of half precision parameters gather in float32; param: in their own precision."""
    allow_inexact: tuple[str, ...] = ()
    """Names of modules that may mix samples."""
    batchnorm: str = "micro"
    """Whose statistics batch norm's running ones are: each micro-batch's ("micro"), or the effective batch's ("whole")."""
    methods: tuple[str, ...] = ()
    """Methods of the model beside its forward whose calls are cut."""
    weight: Callable[[Any], float] | None = None
    """The weight of a micro-batch, if stated by hand."""
    split: Callable[[Any, Any], Any] | None = None
    """How to cut a batch, if stated by hand."""
    leftover: int | None = None
    """Samples in the last, smaller effective batch of an epoch, as the loader tells (0: none; None: unknown)."""
    card: Card | None = None
    """The GPU to plan for, where it is not the one that is here."""
    counted: bool = False
    """Whether profiles count arithmetic and name operations; without it only those for a card that is not here do."""

    shard: str = "auto"
    """auto, or what is held in parts: off, optimizer, gradients, parameters."""
    rank: int = 0
    """This process's number among those that train together."""
    ranks: int = 1
    """How many train together."""
    loop: Loop = MEMFITS
    """What the script's own loop does around forward and backward, as far as `profile` was told."""

    def asked(self) -> dict[str, str]:
        """What was asked of each lever, in words."""
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
        """Samples of each loader batch on this process; None: as the script's loader yields them."""
        return None if self.target_batch is None else part_of(self.together or 0, self.rank, self.ranks)

    @property
    def together(self) -> int | None:
        """Samples of each loader batch over all processes; None: as the scripts' loaders yield them."""
        return None if self.target_batch is None else self.target_batch // self.script_accumulation


def _blocks_asked(blocks: tuple[str, ...] | None) -> str:
    return "auto" if blocks is None else ", ".join(blocks) or "off"
