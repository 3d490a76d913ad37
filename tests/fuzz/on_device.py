"""A script's source moved to a device: its model, what it builds beside it, and its batches, inside the loop."""

from __future__ import annotations

import os
import re

PLACE = "FUZZ_DEVICE"
"""The environment variable that names the device; processes that run seeds inherit it."""
MAKES = re.compile(r"\btorch\.(zeros|ones|arange|tensor|linspace|full|rand|randn|randperm)\(")
BATCH = re.compile(r"^( *)((?:x, z, y|x, y) = .*)$", re.MULTILINE)
HELD = re.compile(r"^(held(?:_z)? = .*)$", re.MULTILINE)


def on_device(source: str) -> str:
    """The same source where no device is asked for."""
    device = os.environ.get(PLACE, "")
    if not device:
        return source
    lines = [line if "generator=" in line else MAKES.sub(rf'functools.partial(torch.\1, device="{device}")(', line) for line in source.splitlines()]
    source = "\n".join(lines) + "\n"
    source = source.replace("model = Net().double()", f'model = Net().double().to("{device}")')
    source = HELD.sub(rf'\1.to("{device}")', source)
    return BATCH.sub(lambda found: f"{found[0]}\n{found[1]}" + _moved(found[2].partition(" = ")[0], device), source)


def _moved(names: str, device: str) -> str:
    return f'{names} = (part.to("{device}", non_blocking=True) for part in ({names}))'
