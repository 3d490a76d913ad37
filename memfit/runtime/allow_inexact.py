"""Checks the names in `allow_inexact`: modules, buffers, attributes of modules, and the causes that refusals name.

Not covered: whether what is named mixes samples at all, and attributes of objects outside the model, which are accepted.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from memfit._errors import UsageError

CAUSES = ("the loss", "the structure of the output", "the state of the model")
"""Causes in refusals that are no part of the model."""
OPENINGS = ("output", "a list outside", "a dict outside", "the variable ")
"""Prefixes of the names of outputs and of containers outside the model."""


def inexact_from(names: Any, model: nn.Module) -> tuple[str, ...]:
    """Return the names as a tuple. Raises UsageError if `names` is no list of names, or a name matches nothing."""
    if isinstance(names, str):
        raise UsageError(
            f"allow_inexact={names!r}",
            found="it is a string, and would be read letter by letter",
            next_move=f"did you mean ({names!r},)?",
        )
    found = tuple(names) if isinstance(names, Iterable) else (names,)
    if not isinstance(names, Iterable) or not all(isinstance(name, str) for name in found):
        raise UsageError(
            f"allow_inexact={names!r}",
            found="not a list of names",
            next_move="pass the names that a refusal shows, such as ('the loss',)",
        )
    for name in found:
        if not is_known(name, model):
            raise _unknown(name, found, model)
    return found


def is_known(name: str, model: nn.Module) -> bool:
    """Return whether a refusal may show this name for the model."""
    if name in CAUSES or name.startswith(OPENINGS) or name == type(model).__name__ or name in dict(model.named_buffers()):
        return True
    modules = dict(model.named_modules())
    owner, _, attribute = name.rpartition(".")
    if owner in modules and name:
        return name in modules or attribute in set(_attributes(modules[owner]))
    return bool(owner) and owner.split(".")[0] not in dict(model.named_children())  # of an object outside the model


def _attributes(module: nn.Module) -> Iterator[str]:
    """Yield the attributes a module has, and those its class's code names: the first forward makes many of them."""
    yield from dir(module)
    for kind in type(module).__mro__:
        for function in vars(kind).values():
            if isinstance(function, types.FunctionType):
                yield from function.__code__.co_names


def _unknown(name: str, names: tuple[str, ...], model: nn.Module) -> UsageError:
    known = [*CAUSES, type(model).__name__, *(name for name, _ in model.named_modules() if name), *dict(model.named_buffers())]
    otherwise = "use the name that a refusal shows, such as 'the loss' or a module's"
    near = difflib.get_close_matches(name, known, n=1)
    return UsageError(
        f"allow_inexact={names!r}",
        found=f"the model has no module, buffer or attribute {name!r}, and no refusal names it",
        next_move=f"did you mean {near[0]!r}?" if near else otherwise,
    )
