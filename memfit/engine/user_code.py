"""Tells the user's code from that of installed packages, and what code names."""

from __future__ import annotations

import sys
import sysconfig
import types
from collections.abc import Iterator

_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def is_installed(module: str | None) -> bool:
    """Whether a module is not the user's: built-in, of the standard library, of an installed package, or of memfit."""
    found = sys.modules.get(module or "")
    if module in (None, "__main__") or found is None:  # code run by exec() has no module
        return False
    file = getattr(found, "__file__", None)
    if file is None:
        return getattr(getattr(found, "__spec__", None), "origin", None) in ("built-in", "frozen")
    return file.startswith(_INSTALLED) or module.partition(".")[0] in ("memfit", "torch")


def names_in(code: types.CodeType) -> Iterator[str]:
    """Yield the names that code and its inner functions look up, globals and attributes alike."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_in(constant)


def slots_of(kind: type) -> Iterator[str]:
    """Yield the names of the attributes that a class keeps in slots."""
    for base in kind.__mro__:
        names = base.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__"):
                yield f"_{base.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name
