"""What a model says of itself: the words and truth values on modules of the script's own, and which modules it has.

By these a forward may do something else, so that what was found out about it holds as long as they stay the same.

Not covered: numbers, which count more often than they tell kinds of calls apart, hooks, which come and go to look at something,
and what a model reads elsewhere.
"""

from __future__ import annotations

from collections.abc import Hashable

from torch import nn

from memfit.engine.kept import is_installed
from memfit.engine.modules import modules_of

MOST = 16
"""What is told apart; where a model says more, nothing of that kind is looked at any more."""


class Flags:
    """A model's flags, as they are when `now` is called."""

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
        """What they are."""
        words = tuple(value if type(value := held.get(name)) in (bool, str) else None for held, name in self._found)
        if words not in self._words:
            self._words.add(words)
            if len(self._words) > MOST:
                self._found = []
        if len(self._parts) > MOST:
            return words
        parts = tuple(map(id, modules_of(self._model)))
        return words, self._parts.setdefault(parts, len(self._parts))
