"""What modules of the script's own say of themselves in words and truth values: a forward may return something else by it.

Not covered: numbers, which count more often than they tell kinds of calls apart.
"""

from __future__ import annotations

from collections.abc import Hashable

from torch import nn

from memfit.profiling.kept import is_installed

MOST = 8
"""Values that are told apart; where there are more, they are none by which kinds of calls differ."""


class Flags:
    """The attributes of a model's modules that are words or truth values."""

    def __init__(self, model: nn.Module) -> None:
        own = [vars(module) for module in model.modules() if not is_installed(type(module).__module__)]
        self._found = [
            (held, name)
            for held in own
            for name, value in held.items()
            if type(value) in (bool, str) and name != "training" and not name.startswith("_")
        ]
        self._met: set[Hashable] = set()

    def now(self) -> Hashable:
        """What they are."""
        if not self._found:
            return ()
        found = tuple(value if type(value := held.get(name)) in (bool, str) else None for held, name in self._found)
        self._met.add(found)
        if len(self._met) > MOST:
            self._found = []
        return found
