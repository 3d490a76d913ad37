"""Bytes in words."""

from __future__ import annotations

import re

_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def size(value: int | str) -> int:
    """Bytes of "8GiB", or of a number of bytes. Raises ValueError for anything else."""
    found = re.fullmatch(r"\s*([\d.]+)\s*([A-Za-z]*)\s*", str(value))
    if found is None or found[2].upper() not in _UNITS:
        raise ValueError(f"{value!r} is no size: write it like 2GiB, 300MiB or 1000000")
    return int(float(found[1]) * _UNITS[found[2].upper()])
