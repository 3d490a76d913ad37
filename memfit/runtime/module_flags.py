"""A model's flags: the str and bool attributes of the script's own modules, and which modules the model has.

A forward may branch on them, so findings about it hold only while they stay the same.

Not covered: numbers, and what a model reads elsewhere (`engine/read_numbers.py`); hooks, which come and go for inspection.
"""

from __future__ import annotations

from collections.abc import Hashable

from torch import nn

from memfit.engine.modules import modules_of
from memfit.engine.user_code import is_installed

MOST = 16
"""Variants that are told apart; if a model has more, flags of that kind are no longer watched."""


class Flags:
    """Watches the flags of a model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        own = [vars(module) for module in modules_of(model) if not is_installed(type(module).__module__)]
        self._found = [
            (held, name)
            for held in own
            for name, value in held.items()
            if type(value) in (bool, str) and name != "training" and not name.startswith("_")
        ]
        self._words: set[Hashable] = set()
        self._parts: dict[Hashable, int] = {}

    def now(self) -> Hashable:
        """Return the current flags, as a hashable key."""
        words = tuple(value if type(value := held.get(name)) in (bool, str) else None for held, name in self._found)
        if words not in self._words:
            self._words.add(words)
            if len(self._words) > MOST:
                self._found = []
        if len(self._parts) > MOST:
            return words
        parts = tuple(map(id, modules_of(self._model)))
        return words, self._parts.setdefault(parts, len(self._parts))
