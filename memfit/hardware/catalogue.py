"""A catalogue of cards that are not present: their memory and speed, to plan a training before renting or buying one.

The figures lie in `devices.json`, each group with its sources. Memory is the total that torch reports, which is less than the
maker prints on the box. Of several reports under Linux the smallest counts, because drivers have kept more with every year.
Speed is the maker's dense peak (no sparsity), which no training reaches: it compares cards, and bounds the time.

Not covered: slices of a card (MIG, vGPU), several cards in one box, what else runs on the card, Windows (it shows a program the
whole memory and hands it out piece by piece), cards whose ECC is not set as delivered.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from memfit._errors import UsageError
from memfit._units import MiB, format_bytes, parse_bytes
from memfit.hardware.device import Device
from memfit.hardware.dtypes import cuda_fast_dtypes
from memfit.hardware.limits import Limit

CONTEXT = 500 * MiB
"""Bytes of a CUDA context with the kernels that a training loads. Published: 256 MiB idle (RTX 3090, torch 2.7,
InvokeAI #9413), 300 to 400 (pytorch #107667, #109888), 481 growing to 942 (A100, torch 2.1, stas00/ml-engineering), up to
1823 where all kernels are loaded at once (A100, torch 1.10, before CUDA 11.7 made loading lazy)."""

CONTEXT_ROCM = 800 * MiB
"""The same on ROCm, from a single report: an MI300X of 191.69 GiB had 186.02 GiB free and 4.89 GiB allocated by torch."""

SHOWN = 8
"""Most cards that an error lists."""


@dataclass(frozen=True)
class Card:
    """Describes a device by its maker's and its driver's figures, none of them measured by memfit."""

    name: str
    """The name by which `card` finds it: "a100-80gb", "rtx-4090"."""
    title: str
    """Its usual name."""
    aliases: tuple[str, ...]
    """Its other names, including names shared with other cards ("a100")."""
    vendor: str
    """"NVIDIA" or "AMD"; "" for an unnamed card."""
    architecture: str
    """The generation, as the maker names it: "Ampere", "CDNA 3"; "" for an unnamed card."""
    capability: tuple[int, int] | None
    """CUDA compute capability; None for AMD."""
    memory: int
    """Bytes that torch reports as the total (`torch.cuda.get_device_properties(...).total_memory`)."""
    bandwidth: float
    """Peak bytes per second between the chip and its memory; 0 if unknown."""
    flops: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Dense peak in FLOP per second by "float32" (without tensor cores), "tf32", "float16" and "bfloat16" (tensor cores,
    accumulating in float32: half the printed rate on GeForce). Dtypes the card lacks are omitted; empty if unknown."""
    sources: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    """Sources of the figures, by group: "memory", "bandwidth", "flops"."""
    unverified: tuple[str, ...] = ()
    """Groups of figures for which neither the named source nor a public copy or quotation could be opened; usually empty."""
    nominal: int = 0
    """Bytes that the maker prints on the box."""
    reported: bool = True
    """Whether `memory` was published for this exact card; False if it is derived from a sister card's, as `sources` says."""
    gfx: str = ""
    """The architecture's name in ROCm ("gfx942"); "" for NVIDIA."""

    def as_device(self) -> Device:
        """Return the idle card as `query_device` would describe it, in a process that has opened it and allocated nothing yet.

        `free` is the total minus the context (`CONTEXT`, `CONTEXT_ROCM`), which counts as held.
        """
        context = CONTEXT_ROCM if self.gfx else CONTEXT
        capability = _rocm_capability(self.gfx) if self.gfx else self.capability
        free = max(0, self.memory - context)
        return Device(
            kind="cuda",
            index=None,
            name=self.title,
            total=self.memory,
            free=free,
            held=self.memory - free,
            others=0,
            capability=capability,
            fast_dtypes=cuda_fast_dtypes(capability or (0, 0), self.gfx),
            here=False,
            limits=(Limit(f"memory of {self.title}", free, self.memory),),
            notes=tuple(self._notes(context)),
        )

    def _notes(self, context: int) -> Iterable[str]:
        yield f"not here: its figures are from the catalogue, with {format_bytes(context)} for the context"
        if not self.reported:
            yield f"its total of {format_bytes(self.memory)} is derived: {self.sources['memory'][0]}"
        if "memory" in self.unverified:
            yield f"its total of {format_bytes(self.memory)} is not verified"

    def __str__(self) -> str:
        return f"{self.name} ({format_bytes(self.memory)})"


def card(name: str) -> Card:
    """Look up a card by name: "a100-80gb", "RTX 4090", or "NVIDIA A100-SXM4-80GB" as torch and nvidia-smi print it.

    Case, blanks, hyphens, underscores and the makers' words ("NVIDIA", "GeForce", "Tesla", ...) do not matter. A size such as
    "24GiB" gives an unnamed card with that total: compute capability (8, 0), speed unknown.

    Raises UsageError if no card has that name, or several do ("a100").

    >>> card("rtx 4090").memory
    25250758656
    """
    size = _size(name)
    if size is not None:
        return _unnamed(name, size)
    found = _index().get(_key(name))
    if found is None:
        raise _unknown(name)
    if len(found) == 1:
        return found[0]
    raise UsageError(
        f"card {name!r}",
        found=f"{len(found)} cards go by that name: {', '.join(map(str, found))}",
        next_move=f"say which, like {found[0].name!r}",
    )


@functools.cache
def cards() -> tuple[Card, ...]:
    """Return all named cards, by vendor, architecture and name."""
    text = resources.files("memfit.hardware").joinpath("devices.json").read_text(encoding="utf-8")
    found = (_read(entry) for entry in json.loads(text))
    return tuple(sorted(found, key=lambda one: (one.vendor, one.architecture, one.name)))


# ---- names

_MAKERS_WORDS = {"nvidia", "geforce", "tesla", "amd", "instinct", "radeon", "gpu", "generation"}


def _key(name: str) -> str:
    """Normalize `name`: drop what people write differently."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    return "".join(word for word in words if word not in _MAKERS_WORDS).replace("mobile", "laptop")


@functools.cache
def _index() -> dict[str, tuple[Card, ...]]:
    """Map the keys of names, titles and aliases to cards; to several if a name is ambiguous."""
    found: dict[str, dict[str, Card]] = {}
    for one in cards():
        for name in (one.name, one.title, *one.aliases):
            found.setdefault(_key(name), {})[one.name] = one
    return {key: tuple(sorted(by_name.values(), key=_memory)) for key, by_name in found.items()}


def _memory(one: Card) -> int:
    return one.memory


def _unknown(name: str) -> UsageError:
    index, key = _index(), _key(name)
    near = [index[close] for close in difflib.get_close_matches(key, index, n=SHOWN, cutoff=0.5)]
    near += [found for other, found in index.items() if len(key) > 2 and key in other]
    names = list(dict.fromkeys(one.name for found in near for one in found))[:SHOWN]
    told = f"the {len(cards())} cards of the catalogue have other names"
    return UsageError(
        f"card {name!r}",
        found=f"{told}; the nearest: {', '.join(names)}" if names else told,
        next_move="use a name of memfit.hardware.catalogue.cards(), the size of its memory, like '24GiB', or torch's "
        "name of a device here, like 'cuda:0'",
    )


# ---- sizes


def _size(name: str) -> int | None:
    """Return the bytes that `name` means; None if it is not a size."""
    try:
        return parse_bytes(name)
    except UsageError:
        return None


def _unnamed(name: str, size: int) -> Card:
    if not size:
        raise UsageError(f"card {name!r}", found="that is 0 bytes", next_move="write a size like '24GiB'")
    return Card(
        name=_key(name),
        title=f"a card of {format_bytes(size)}",
        aliases=(),
        vendor="",
        architecture="",
        capability=(8, 0),
        memory=size,
        bandwidth=0.0,
        nominal=size,
    )


# ---- reading


def _read(entry: Mapping[str, Any]) -> Card:
    capability = entry["capability"]
    return Card(
        name=entry["name"],
        title=entry["title"],
        aliases=(*entry.get("aliases", ()), *entry.get("families", ())),
        vendor=entry["vendor"],
        architecture=entry["architecture"],
        capability=None if capability is None else (capability[0], capability[1]),
        memory=entry["memory"],
        bandwidth=float(entry["bandwidth"]),
        flops={dtype: float(rate) for dtype, rate in entry["flops"].items() if rate is not None},
        sources={group: tuple(texts) for group, texts in entry["sources"].items()},
        unverified=tuple(entry.get("unverified", ())),
        nominal=entry["nominal"],
        reported=entry["memory_how"] == "reported",
        gfx=entry.get("gfx", ""),
    )


def _rocm_capability(gfx: str) -> tuple[int, int]:
    """Return the capability that torch reports for a ROCm architecture: (9, 4) for "gfx942", (11, 0) for "gfx1100"."""
    digits = gfx.removeprefix("gfx")
    return int(digits[:-2]), int(digits[-2])
