"""What a forward asks of counters in tensors: `if self.step.item() > 1000`, `if self.step % 10 == 0`. (What it decides without
reading them on the host is no branch.)"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from memfit.engine.asked_numbers import Notes, Operation, Question, asked, is_asked_of, value_of

_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    name: getattr(operator, function)
    for function, names in {
        "add": ("add",), "sub": ("sub", "subtract"), "mul": ("mul", "multiply"),
        "truediv": ("div", "divide", "true_divide", "truediv"),
        "floordiv": ("floor_divide", "floordiv"), "mod": ("remainder", "mod"), "gt": ("gt", "greater"), "lt": ("lt", "less"),
        "ge": ("ge", "greater_equal"), "le": ("le", "less_equal"), "eq": ("eq",), "ne": ("ne", "not_equal"),
    }.items()
    for name in names
}  # fmt: skip
_SAME = ("detach", "clone", "long", "int", "float", "double", "to", "squeeze", "view", "reshape", "cpu", "getitem")
"""Methods whose result has the same number."""
_READS: dict[str, Callable[[Any], Any]] = {"bool": operator.truth, "int": int, "index": int}


class TensorNotes(TorchFunctionMode):
    """Has tensors take notes of what they are asked. What is computed from them takes notes, too."""

    def __init__(self, counters: Iterable[tuple[torch.Tensor, Notes]]) -> None:
        super().__init__()
        self._known: dict[int, tuple[torch.Tensor, Notes, Question]] = {id(each): (each, notes, ()) for each, notes in counters}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = [self._known[id(arg)] for arg in args if id(arg) in self._known]
        return out if len(known) != 1 else self._follow(getattr(func, "__name__", ""), args, out, *known[0])

    def _follow(self, name: str, args: Any, out: Any, counter: torch.Tensor, notes: Notes, question: Question) -> Any:
        dunder = name.startswith("__")
        plain = name.strip("_")
        if dunder and plain in _READS:
            notes[(*question, Operation(_READS[plain], ()))] = None
            return out
        if plain == "item":
            if isinstance(out, bool):
                notes[question] = None
            return asked(out, notes, question)
        right, written = dunder and plain[0] == "r" and plain[1:] in _BINARY, not dunder and name.endswith("_")
        if dunder and plain[0] == "i" and plain[1:] in _BINARY:
            plain, written = plain[1:], True
        function = _BINARY.get(plain[1:] if right else plain)
        if plain in _SAME and isinstance(out, torch.Tensor):
            self._known[id(out)] = out, notes, question
        elif function is not None and len(args) == 2:
            others = [value_of(arg) for arg in args if arg is not counter]
            if len(others) == 1 and is_asked_of(others[0]):
                step = Operation(function, tuple(others), right or args[1] is counter)
                self._known[id(out)] = out, notes, (*question, step)
        elif written and args[0] is counter:
            del self._known[id(counter)]
        return out
