"""What trials of a forward change: by a whole batch, by its parts in turn, and by each part alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from memfit.batches.pieces import bounds
from memfit.batches.tree import tensors
from memfit.capture.size_dependence import Positions, decides_by_position
from memfit.engine.compose_state import Last, Rule
from memfit.engine.places import MISSING, Place, TensorPlace, WithoutGraph, without_graph
from memfit.engine.random_slices import Draws
from memfit.equivalence.other_values import later_count, other_value
from memfit.equivalence.same_values import same
from memfit.hardware.exhausted import is_out_of_memory
from memfit.tracing.sandbox import Traces

Run = Callable[[int, int], object]
"""Runs the samples `start:stop` with the whole batch's random draws."""
Values = dict[tuple[Any, ...], tuple[Place, Any, Any]]
"""Maps a place's key to (place, value before, value after)."""


@dataclass(frozen=True)
class Trial:
    """Samples to find rules on."""

    run: Run
    sizes: Sequence[int]
    """Number of samples in each part."""


@dataclass(frozen=True)
class SeenEffects:
    """What one trial changed: by the whole, by its parts in turn, and by each part alone."""

    whole: Values
    in_turn: Values
    apart: list[Values]
    sizes: Sequence[int]
    by_position: bool
    returns: tuple[Any, Any]
    """What the last part returns after the others, and alone."""

    def before(self, key: tuple[Any, ...]) -> Any:
        """Return the value that a place had."""
        found = self.whole.get(key) or self.in_turn.get(key)
        return MISSING if found is None else found[1]

    def ends(self, key: tuple[Any, ...]) -> tuple[Any, Any]:
        """Return what the whole leaves, and what the parts leave when they run in turn."""
        return after(self.whole, key, self.before(key)), after(self.in_turn, key, self.before(key))

    def leaves(self, key: tuple[Any, ...], value: Any) -> bool:
        """Whether all runs leave this value, to the bit."""
        ends = [*self.ends(key), *(after(part, key, self.before(key)) for part in self.apart)]
        return all(same(value, end, 0.0) for end in ends)

    def moves(self, key: tuple[Any, ...]) -> bool:
        """Whether any run changes this place."""
        return any(key in values for values in (self.whole, self.in_turn, *self.apart))

    def all_move(self, key: tuple[Any, ...], *, reset: bool) -> bool:
        """Whether each of two parts changes this place, which is `reset` between them or not."""
        if not all(key in part for part in self.apart):
            return False
        return reset or not same(after(self.in_turn, key, self.before(key)), after(self.apart[0], key, self.before(key)), 0.0)

    @property
    def is_uneven(self) -> bool:
        """Whether only some of the parts change a place, or leave nothing there."""
        first, *others = self.apart
        if any(part.keys() != first.keys() for part in others):
            return True
        return any(_is_empty(part[key][2]) != _is_empty(first[key][2]) for part in others for key in first)

    def obeys(self, key: tuple[Any, ...], rule: Rule, closely: float) -> bool:
        """Whether this rule makes the whole's value from the parts' values, if they change it."""
        if not self.moves(key):
            return True
        wanted, before = self.ends(key)[0], self.before(key)
        parts = [after(part, key, before) for part in self.apart]
        try:
            made = parts if isinstance(rule, Last) else [rule.joined(before, parts, self.sizes)]
            return all(same(wanted, value, closely) for value in made)
        except (RuntimeError, TypeError, ValueError, KeyError, IndexError):
            return False


def seen_of(trial: Trial, aside: Callable[[], AbstractContextManager[Traces]], graphs: bool) -> SeenEffects:
    """Return what a trial changes. `aside` gives contexts that leave no trace. `graphs`: tensors with a graph are state too."""
    looks: list[tuple[int, Positions]] = []

    def watched(start: int, stop: int) -> object:
        looks.append((stop - start, Positions()))
        with looks[-1][1].watching():
            return trial.run(start, stop)

    pieces = list(bounds(trial.sizes))
    whole, _ = _values(watched, [(0, sum(trial.sizes))], aside, graphs)
    in_turn, after_others = _values(trial.run, pieces, aside, graphs)
    apart = [_values(watched, [piece], aside, graphs) for piece in pieces]
    returns = after_others, apart[-1][1]
    return SeenEffects(whole, in_turn, [part for part, _ in apart], trial.sizes, decides_by_position(looks), returns)


def decides_once_moved(trial: Trial, aside: Callable[[], AbstractContextManager[Traces]]) -> bool:
    """Return whether positions of samples decide after a forward has moved the state. `torch.cat([self.rows, h])[-64:]` takes
    rows by position; they are those of samples only as long as nothing is kept of earlier forwards."""
    looks: list[tuple[int, Positions]] = []
    whole = (0, sum(trial.sizes))
    with aside():
        trial.run(*whole)
        for start, stop in (whole, *bounds(trial.sizes)):
            looks.append((stop - start, Positions()))
            with looks[-1][1].watching():
                trial.run(start, stop)
    return decides_by_position(looks)


def doubled(
    twice: Callable[[int, int], Run], sizes: Sequence[int], aside: Callable[[], AbstractContextManager[Traces]]
) -> Iterator[Trial]:
    """Yield trials on the samples of each part twice, the last one first, unless draws cannot be sliced. Rules that hold for
    whole and parts by chance fail there. `twice(start, stop)` returns what runs these samples twice."""
    for start, stop in reversed(list(bounds(sizes))):
        run, draws, samples = twice(start, stop), Draws(), stop - start
        with aside(), draws.recording():
            run(0, 2 * samples)
        if not draws.unsliced:
            yield Trial(partial(_sliced, run, draws, 2 * samples), (samples, samples))


def _sliced(run: Run, draws: Draws, samples: int, start: int, stop: int) -> object:
    with draws.sliced(start, stop, samples):
        return run(start, stop)


def places_of(seen: Sequence[SeenEffects]) -> dict[tuple[Any, ...], Place]:
    """Return all places that trials change, by their keys."""
    return {key: found[0] for each in reversed(seen) for key, found in {**each.in_turn, **each.whole}.items()}


def from_other_values(
    still: Sequence[Place],
    moved: Sequence[tuple[Place, Any, Any]],
    trial: Trial,
    aside: Callable[[], AbstractContextManager[Traces]],
    graphs: bool,
) -> SeenEffects | None:
    """Return what a trial changes if it begins with other values where it is `still`, and later where it counts; None if there
    is no such place, or the forward cannot go on from there. State that moves hardly at first may move later: a slow copy of a
    net is equal to it before it trains, and others begin to move after some steps."""
    others = [(place, other_value(place.value())) for place in still if not is_trained(place)]
    others = [(place, value) for place, value in others if value is not None]
    counts = [(place, value) for place, *ends in moved if (value := later_count(*ends)) is not None]
    for chosen in ([*others, *counts], others) if counts else (others,):
        with aside():
            try:
                for place, value in chosen:
                    place.put(value)
                if chosen:
                    return seen_of(trial, aside, graphs)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
    return None


def is_trained(place: Place) -> bool:
    """Whether it is a parameter."""
    return isinstance(place, TensorPlace) and place.tensor.requires_grad


def after(values: Values, key: tuple[Any, ...], before: Any) -> Any:
    """Return a place's value after the run, or its old value if it did not change."""
    return values[key][2] if key in values else before


def _is_empty(value: Any) -> bool:
    """Whether it is a container or a tensor without anything in it."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 0
    return isinstance(value, (list, tuple, dict)) and not value


def _values(
    run: Run, pieces: Sequence[tuple[int, int]], aside: Callable[[], AbstractContextManager[Traces]], graphs: bool
) -> tuple[Values, Any]:
    """Return what runs over these pieces, in turn, change, and what the last one returns."""
    found: Values = {}
    with aside() as traces:
        for start, stop in pieces[:-1]:
            run(start, stop)
        last = run(*pieces[-1])
        for key, (place, before) in traces.moved().items():
            value = place.value()
            if not any(tensor.requires_grad for tensor in tensors(value)):
                found[key] = place, before, value
            elif graphs:
                found[key] = WithoutGraph(place), without_graph(before), without_graph(value)
    returned = last if isinstance(last, list) else [last]
    return found, [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in returned]
