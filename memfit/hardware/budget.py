"""Determines how much memory the training may use: the user's budget, checked against what the machine can give.

Not covered: memory that other processes take after the probe.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any

from memfit._errors import UsageError
from memfit._units import BEYOND, MiB, format_at_least, format_bytes, parse_bytes
from memfit.hardware.catalogue import Card, card
from memfit.hardware.device import Device, default_device, query_device
from memfit.hardware.nvml import load_nvml

if TYPE_CHECKING:
    import torch

_TORCHS_OWN = re.compile(r"\s*(cpu|cuda|xpu|mps|meta|hpu|xla|privateuseone)(?:[\s:]*(\d{1,4}))?\s*", re.IGNORECASE)

SMALLEST = 1 * MiB  # an int below this is not meant in bytes

# Measured under a real limit on the CPU: the kernel's peak follows the prediction to about 11 MiB (glibc's trimmed heap,
# Python's own objects). 1 % covers what grows with the size.
CPU_MARGIN = 16 * MiB
# Kernels and library handles that load after the probe take 100-200 MiB in the driver's figure, on models of 0.1-0.35 B
# parameters.
ACCELERATOR_MARGIN = 256 * MiB
SPARE = 32
"""A budget suggested for a present device is larger than needed by one part in this many: another run needed 2.4 % more."""


@dataclass(frozen=True)
class Budget:
    """The memory one process may use on one device."""

    limit: int
    """Most bytes the process may hold, on the scale of `held`."""
    held: int
    """Bytes it already holds and cannot reuse (cached allocator blocks do not count)."""
    margin: int
    """Bytes kept free for what cannot be predicted."""
    source: str
    """Where `limit` comes from, as text."""
    device: Device
    """The device as probed."""
    notes: tuple[str, ...] = ()
    """What the reader should know about these numbers."""

    @property
    def room(self) -> int:
        """Bytes left for training: limit - held - margin. Negative if nothing fits."""
        return self.limit - self.held - self.margin

    def with_held(self, held: int) -> Budget:
        """Return the same budget with `held` bytes counted as already held."""
        return replace(self, held=held)

    def with_room_for(self, missing: int) -> str:
        """Return the budget to ask for so that `missing` more bytes fit. The margin grows with the budget; and on a device that
        is present, planning again holds a little more."""
        kind, least = self.device.kind, self.limit + missing
        limit = least
        for _ in range(4):
            limit = least + max(0, margin_for(kind, limit) - margin_for(kind, self.limit))
        return format_at_least(limit + (limit // SPARE if self.device.here else 0))

    def __str__(self) -> str:
        lines = [f"budget on {self.device}, {self.source}"]
        for word, size in (("limit", self.limit), ("held", self.held), ("margin", self.margin), ("room", self.room)):
            lines.append(f"  {word:<8}{format_bytes(size):>10}")
        lines += [f"  {'note':<8}{note}" for note in (*self.notes, *self.device.notes)]
        return "\n".join(lines)


def probe(*, budget: int | float | str | None = None, device: torch.device | str | None = None) -> Budget:
    """Determine how much memory your training may use: ask the machine, or check your `budget` against what it can give.

    `budget` is the most memory this process may hold on the device (on the CPU: beyond what it holds now):

    - None: all it can get now (what it holds plus what is free);
    - an int: bytes;
    - a str: a size such as "6GiB", "800 MiB" or "24GB";
    - a float in (0, 1]: that fraction of the device's total.

    On CUDA the driver's figure counts (allocator, context and libraries). On the CPU an explicit budget covers what the
    training itself takes, not the interpreter: `held` is 0 until `Budget.with_held` sets what the model holds. Without an
    explicit budget, `held` is this process's anonymous memory. A budget larger than the available memory is lowered to it, with
    a note.

    `device` defaults to the current accelerator if torch has one, else the CPU. An accelerator gets its context if it has none
    yet; nothing is allocated. The name of a card that is not present ("a100-40gb", "rtx-4090", or a size such as "24GiB") gives
    the budget that the card would have.

    Raises UsageError if `budget` is implausible (6, 6.0, True, "6"), torch cannot use the device, or no card has
    that name.

    >>> memfit.probe(budget="6GiB", device="cpu").room
    6361249219
    """
    elsewhere = card_named(device)
    if elsewhere is not None:
        return budget_for(elsewhere.as_device(), budget)
    chosen = _device(device)
    return budget_for(query_device(chosen, nvml=load_nvml() if chosen.type == "cuda" else None), budget)


def shared_among(budget: Budget, processes: int) -> Budget:
    """Divide the free memory of a probed budget among `processes` that train on the same device."""
    if processes < 2:
        return budget
    limit = budget.held + (budget.limit - budget.held) // processes
    margin = margin_for(budget.device.kind, limit)
    return replace(budget, limit=limit, margin=margin, source=f"{budget.source}, shared by {processes} processes")


def card_named(device: object) -> Card | None:
    """Return the catalogue card that a `device=` names; None for what torch may know. Raises UsageError for an unknown card or
    what is not a name."""
    name = torchs_name(device)
    return card(name) if isinstance(name, str) and not _TORCHS_OWN.fullmatch(name) else None


def torchs_name(device: Any) -> Any:
    """Normalize a `device=` that torch knows: "cuda:0" for "Cuda 0". Other names stay. Raises UsageError for what is neither a
    name nor a torch.device."""
    own = _TORCHS_OWN.fullmatch(device) if isinstance(device, str) else None
    if own is not None:
        return own[1].lower() + (f":{int(own[2])}" if own[2] else "")
    # A torch.device has a `type` and an `index`. Checking these avoids importing torch.
    if device is None or isinstance(device, str) or (hasattr(device, "type") and hasattr(device, "index")):
        return device
    kind = type(device).__name__
    meant = f"'cuda:{device}'" if kind == "int" and 0 <= device < 1000 else "'cuda:0', 'cpu' or 'a100-40gb'"
    found = f"it is of type {kind}, not a name"
    raise UsageError(f"device={str(device)[:60]}", found=found, next_move=f"write it like {meant}")


def budget_for(device: Device, asked: int | float | str | None = None) -> Budget:
    """Compute the budget for a described device, without asking the machine. See `probe`."""
    if asked is None:
        limit = device.in_use + device.free
        source = f"probed ({device.limits[0].name})" if device.limits else "probed"
        source = source if device.here else f"all of {device.name}"
        return Budget(limit, device.in_use, margin_for(device.kind, limit), source, device)
    wanted = asked_bytes(asked, device.total)
    held = 0 if device.kind == "cpu" else device.in_use
    limit = min(wanted, held + device.free)
    notes = tuple(_notes(device, wanted, limit))
    return Budget(limit, held, margin_for(device.kind, limit), f"as asked: {asked!r}", device, notes)


def margin_for(kind: str, limit: int) -> int:
    """Return the bytes to keep free under `limit` on a device of this kind."""
    if kind == "cpu":
        return CPU_MARGIN + limit // 100
    return min(ACCELERATOR_MARGIN + limit // 100, limit // 10)


def asked_bytes(asked: int | float | str, total: int) -> int:
    """Return the bytes that a budget of `asked` means on a device of `total` bytes. Raises UsageError if it has no meaning."""
    if isinstance(asked, str):
        return _positive(parse_bytes(asked), asked)
    if isinstance(asked, bool) or not isinstance(asked, (Integral, float)):
        raise UsageError(f"budget={asked!r}", found=f"it is a {type(asked).__name__}", next_move=_FORMS)
    if isinstance(asked, float):
        return _share(asked, total)
    if abs(int(asked)) >= BEYOND:
        digits = f"a number of {int(asked).bit_length()} bits"
        raise UsageError(f"budget={digits}", found="no machine has as many bytes", next_move=_FORMS)
    if _positive(int(asked), asked) < SMALLEST:
        raise UsageError(f"budget={asked}", found=f"that is {asked} bytes", next_move=_meant(asked))
    return int(asked)


_FORMS = "give a size like '6GiB', bytes as an int, or a share of the device in (0, 1] like 0.9"


def _share(asked: float, total: int) -> int:
    if math.isfinite(asked) and 0 < asked <= 1:
        return int(asked * total)
    if math.isfinite(asked) and asked > 1:
        found = "a float is a share of the device's memory, at most 1.0"
        raise UsageError(f"budget={asked!r}", found=found, next_move=_meant(asked))
    found = "a share of the device's memory lies between 0 and 1"
    raise UsageError(f"budget={asked!r}", found=found, next_move=_FORMS)


def _positive(size: int, asked: object) -> int:
    if size <= 0:
        raise UsageError(f"budget={asked!r}", found=f"that is {size} bytes", next_move=_FORMS)
    return size


def _meant(number: int | float) -> str:
    """Suggest the user's number with the unit that was probably meant."""
    if number >= SMALLEST:
        return f"did you mean {int(number)} (bytes, an int)?"
    return f"did you mean '{number:g}GiB'?" if number < 1024 else f"did you mean '{number:.10g}MiB'?"


def _notes(device: Device, wanted: int, limit: int) -> Iterator[str]:
    if limit < wanted:
        bound = f" ({device.limits[0].name})" if device.limits else ""
        yield f"asked for {format_bytes(wanted)}, {format_bytes(limit)} are there{bound}: the smaller one counts"


def _device(device: torch.device | str | None) -> torch.device:
    import torch

    if device is None:
        return default_device()
    try:
        return torch.device(torchs_name(device))
    except RuntimeError as error:
        found = str(error).partition("\n")[0]
        raise UsageError(f"device={device!r}", found=found, next_move="write it like 'cuda:0' or 'cpu'") from None
