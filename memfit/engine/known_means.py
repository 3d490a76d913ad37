"""Intercepts means of known losses, makes them safe for micro-batches without valid entries, and records denominators.

A torch function mode sees every call but slows down all operations inside. Replacing the functions in `torch.nn.functional`
costs nothing but misses earlier references (`from torch.nn.functional import cross_entropy`). Proofs do both and find out
which is needed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from memfit.batches.weights import KNOWN_LOSSES, Bound, Count, all_arguments, entries_mean, known_loss, valid_mean

# Operations after a mean that keep the loss proportional to it.
_LINEAR = ("Mul", "Div", "Neg", "ToCopy", "Clone", "Alias", "Squeeze", "Unsqueeze", "View", "Mean", "Sum")
HALF = (torch.bfloat16, torch.float16)
Slopes = list[tuple[int, torch.Tensor]]


@dataclass(frozen=True)
class KnownMean:
    """One known mean in a micro-batch."""

    mean: torch.Tensor
    """Its value, 0-dim: `entries_mean`, or `valid_mean` if it stands beside other terms."""
    entries: int
    """Number of entries, valid or not."""
    count: Count
    """Denominator of the true mean."""
    node: Any = field(init=False)
    """End of its graph, as the mean may be written in place (`loss += penalty`)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "node", self.mean.grad_fn)


class Terms:
    """Computes the means of known losses so that parts can be weighted, and lists them in `found`.

    `alone`: expects a loss that is one mean, and averages it over all entries. Otherwise the means are the true ones, and
    `shares[k]` multiplies the k-th if its true weight is known. `by_name`: True intercepts calls through attributes of
    torch.nn.functional (inside `standing_in()`), False intercepts every call with a mode, None does both.
    """

    def __init__(self, *, alone: bool, shares: Sequence[float] | None = None, by_name: bool | None = False) -> None:
        self.found: list[KnownMean] = []
        self.given: list[Any] = []
        """Ends of the graphs of the returned means."""
        self.only_by_name = True
        """Whether all means so far were called as attributes of torch.nn.functional."""
        self.lowest: torch.dtype | None = None
        """The half precision dtype of any result, if every call is intercepted."""
        self.slopes: Slopes = []
        """With `shares`, the gradients of the means by their number, after backward."""
        self._alone, self._shares, self._by_name = alone, shares, by_name
        self._modes = ExitStack() if not by_name else None
        self._outer: Terms | None = None
        self.is_answering = False

    def __enter__(self) -> Terms:
        if self._by_name is not False:
            self._outer, _ACTIVE.terms = getattr(_ACTIVE, "terms", None), self
        if self._modes is not None:
            if self._by_name is None:
                self._modes.enter_context(standing_in())
            self._modes.enter_context(_SeenCalls(self))
        return self

    def __exit__(self, *error: Any) -> None:
        if self._by_name is not False:
            _ACTIVE.terms = self._outer
        if self._modes is not None:
            self._modes.close()

    def answer(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a function of torch.nn.functional."""
        known = None if self.is_answering else known_loss(function)
        bound = None if known is None else known.bind(args, kwargs)
        if bound is None or bound["reduction"] != "mean":
            return function(*args, **kwargs)
        self.is_answering = True  # the mode sees the calls of a replaced function, too
        try:
            term = self._term(function, bound)
        finally:
            self.is_answering = False
        self.found.append(term)
        mean = term.mean if self._shares is None else self._corrected(term.mean, self._shares)
        self.given.append(mean.grad_fn)
        return mean

    def _corrected(self, mean: torch.Tensor, shares: Sequence[float]) -> torch.Tensor:
        number = len(self.found) - 1
        corrected = mean * shares[number]
        if corrected.requires_grad:
            corrected.register_hook(lambda gradient: self.slopes.append((number, gradient.detach())))
        return corrected

    def _term(self, function: Any, bound: Bound) -> KnownMean:
        if self._alone:
            return KnownMean(*entries_mean(function, bound))
        mean, count = valid_mean(function, bound)
        return KnownMean(mean, 1, count)


def told(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of torch.nn.functional through the active `Terms`, if any."""
    terms: Terms | None = getattr(_ACTIVE, "terms", None)
    return function(*args, **kwargs) if terms is None else terms.answer(function, args, kwargs)


def answering() -> bool:
    """Return whether the active `Terms` computes a known mean: the calls are not the script's."""
    terms: Terms | None = getattr(_ACTIVE, "terms", None)
    return terms is not None and terms.is_answering


class _SeenCalls(TorchFunctionMode):
    """Sees every torch function call."""

    def __init__(self, terms: Terms) -> None:
        super().__init__()
        self._terms = terms

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = all_arguments(func, kwargs or {})
        if known_loss(func) is None:
            result = func(*args, **kwargs)
            if isinstance(result, torch.Tensor) and result.dtype in HALF and self._terms.lowest is not torch.bfloat16:
                self._terms.lowest = result.dtype
            return result
        before = len(self._terms.found)
        result = self._terms.answer(func, args, kwargs)
        self._terms.only_by_name &= len(self._terms.found) == before
        return result


_ACTIVE = threading.local()


@contextmanager
def unseen() -> Iterator[None]:
    """Deactivate the current `Terms` for losses called by name."""
    before, _ACTIVE.terms = getattr(_ACTIVE, "terms", None), None
    try:
        yield
    finally:
        _ACTIVE.terms = before


def _stand_in(function: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement of `function` in torch.nn.functional. In other threads it calls `function`."""

    @wraps(function)
    def answered(*args: Any, **kwargs: Any) -> Any:
        return told(function, args, kwargs)

    return answered


_STAND_INS = {function: _stand_in(function) for function in KNOWN_LOSSES}


@contextmanager
def standing_in() -> Iterator[None]:
    """Replace the known losses in torch.nn.functional, so that the active `Terms` answers calls of these attributes."""
    # Functions that others put there (fused kernels) are unknown and stay.
    replaced = [(f, s) for f, s in _STAND_INS.items() if getattr(F, f.__name__) is f]
    try:
        for function, stand_in in replaced:
            setattr(F, function.__name__, stand_in)
        yield
    finally:
        for function, _ in replaced:
            setattr(F, function.__name__, function)


def is_only_term(loss: torch.Tensor, term: KnownMean) -> bool:
    """Whether `loss` depends on the parameters through `term` alone and linearly, according to its graph."""
    node, goal = loss.grad_fn, term.node
    for _ in range(16):
        if node is goal:
            return node is not None
        following = [] if node is None else [n for n, _ in node.next_functions if n is not None]
        if len(following) != 1 or not node.name().startswith(_LINEAR):  # type: ignore[union-attr]
            return False
        node = following[0]
    return False


def nodes_of(outputs: Iterable[torch.Tensor]) -> Iterator[torch.autograd.graph.Node]:
    """Yield the nodes of the graph that a backward from `outputs` visits."""
    open_, seen = [t.grad_fn for t in outputs if t.grad_fn is not None], set()
    while open_:
        node = open_.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        open_ += [following for following, _ in node.next_functions]


def leaves_of(outputs: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the leaves that a backward from `outputs` accumulates gradients in."""
    return [node.variable for node in nodes_of(outputs) if hasattr(node, "variable")]  # type: ignore[attr-defined]
