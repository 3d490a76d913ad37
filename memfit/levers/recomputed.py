"""Restores the RNG and the state that a block's forward began with while the block is recomputed in backward.

torch's checkpoint restores only torch's own RNG state. A block may read state that a forward writes, anywhere (a running
center, a counter). Without this, it would compute something else the second time, and write that state twice. The first
recomputation shows which places change, and occasional later ones check again. Forwards in between save these places alone.
Not covered: tensors that are not parameters and larger than `undo_state.LARGE`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from memfit.engine.asked_numbers import is_asked_of
from memfit.engine.call_context import is_faking
from memfit.engine.compose_state import Composition
from memfit.engine.gradients import is_sharded
from memfit.engine.places import Place, TensorPlace, with_graph
from memfit.engine.random_state import HostRandom
from memfit.engine.state_changes import holds
from memfit.engine.state_snapshot import StateSnapshot
from memfit.engine.version_checks import Unchanged

_AGAIN = "recomputing a block of the model in backward"
_KNOWN: weakref.WeakKeyDictionary[nn.Module, Moving] = weakref.WeakKeyDictionary()
"""What is known about blocks. It outlives the plans that checkpoint them."""


class Moving:
    """Tracks the state that changes while the blocks of one model compute. One block may read what another one writes."""

    def __init__(self) -> None:
        self._places: dict[tuple[Any, ...], Place] | None = None
        self._proven = weakref.WeakSet[Composition]()
        self._forwards: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._copies: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
        self._versions: dict[int, int | None] = {}
        self._held: weakref.WeakKeyDictionary[nn.Module, set[int] | None] = weakref.WeakKeyDictionary()
        self.in_block = False
        """Whether a block that is checkpointed computes now. Blocks inside it are checkpointed, too, if that was asked for."""

    def within(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a block's forward that sets `in_block` while it runs."""

        def run(*args: Any, **kwargs: Any) -> Any:
            outer, self.in_block = self.in_block, True
            try:
                return forward(*args, **kwargs)
            finally:
                self.in_block = outer

        return run

    def begun(self, block: nn.Module) -> Callable[[], AbstractContextManager[None]]:
        """Save the state before a block's forward. Returns a function that makes the context of its recomputation: the state is
        as it was before that forward, and afterwards as it was before the recomputation."""
        if is_faking():
            return nullcontext
        number = self._forwards[block] = self._forwards.get(block, 0) + 1
        elsewhere = self._places is not None and self._is_elsewhere(block, self._places)
        counts = self._places is not None and any(is_asked_of(place.value()) for place in self._places.values())
        if self._places is not None and number & (number - 1) and not (elsewhere or counts):
            values = [(place, place.value()) for place in self._all_places().values()]
            return lambda: _put_for_a_while(values)
        copy = self._copy if elsewhere or counts else self._copy_of_written  # (what a counter decides may begin at any time)
        snapshot = StateSnapshot([block], copy)
        seen: list[list[tuple[Place, Any]]] = []

        @contextmanager
        def looking() -> Iterator[None]:
            if not seen:  # the first recomputation shows it; later ones see restored state
                seen.append(snapshot.moved())
            there = StateSnapshot([block], copy)
            try:
                with _put_for_a_while(seen[0]):
                    yield
            finally:
                # What was put back after the forward (outputs that it leaves in attributes) moves in the recomputation alone.
                known = {place.key for place, _ in seen[0]}
                again = [(place, value) for place, value in there.moved() if place.key not in known]
                for place, value in again:
                    place.put(value)
                self._places = (self._places or {}) | {place.key: place for place, _ in (*seen[0], *again)}
                self._held[block] = _holders_in(block, self._places)

        return looking

    def knows(self, composition: Composition) -> None:
        """Save the places, too, that a proof has seen move, if only later."""
        self._proven.add(composition)

    def _all_places(self) -> dict[tuple[Any, ...], Place]:
        proven = (with_graph(place) for each in self._proven for place in each.moved)
        return {place.key: place for place in proven} | (self._places or {})

    def _is_elsewhere(self, block: nn.Module, places: Iterable[tuple[Any, ...]]) -> bool:
        """Whether the script has replaced a tensor or container of the block that its forward writes into."""
        there = _holders_in(block, places)
        known = self._held.setdefault(block, set())
        if known is None or not known <= there:
            self._held[block] = None  # until a recomputation has shown what moves now
            return True
        known |= there
        return False

    def _copy_of_written(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a copy, or None if nobody wrote the tensor since its first copy. (Writes through `.data` do not bump the
        version, so they are detected at first only.)"""
        version = None if tensor.is_inference() else tensor._version
        before, self._versions[id(tensor)] = self._versions.get(id(tensor)), version
        unwritten = self._places is not None and version == before is not None
        return None if unwritten and TensorPlace(tensor, "").key not in self._all_places() else self._copy(tensor)

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a host copy, shared by all blocks while the values stay the same."""
        copy = self._copies.get(id(tensor))
        if copy is None or not holds(tensor, copy):
            # On the host, because plans use the device's memory to the last byte, and most of these tensors never change.
            copy = self._copies[id(tensor)] = tensor.detach().to("cpu", copy=True)
        return copy


@contextmanager
def _put_for_a_while(values: Iterable[tuple[Place, Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for place, value in values:
            stack.callback(place.put, place.value())
            place.put(value)
        yield


def _holders_in(block: nn.Module, places: Iterable[tuple[Any, ...]]) -> set[int]:
    """Return which of the tensors and containers that hold these places are attributes or buffers of a block."""
    holders = {part for key in places for part in key if type(part) is int}
    tables = (table for module in block.modules() for table in (module.__dict__, module._buffers))
    return holders.intersection(_identity(value, holders) for table in tables for value in table.values())


def _identity(value: Any, holders: set[int]) -> int:
    """Return what the key of a place in a tensor or a container has. A tensor whose data is assigned gets another storage in
    every forward. (A stand-in for an output is not looked into.)"""
    plain = type(value) in (torch.Tensor, nn.Parameter) and value.layout is torch.strided and not value.is_nested
    return value.untyped_storage()._cdata if plain and id(value) not in holders else id(value)


def moving_of(blocks: Iterable[nn.Module]) -> Moving:
    """Return the tracker for these blocks of one model."""
    blocks = list(blocks)
    moving = next((known for block in blocks if (known := _KNOWN.get(block)) is not None), None) or Moving()
    _KNOWN.update((block, moving) for block in blocks)
    return moving


def moved_in_blocks(model: nn.Module, composition: Composition) -> None:
    """Have blocks of the model save what this composition moves, as long as it is in use and they are checkpointed."""
    if composition.moved:
        moving_of(model.modules()).knows(composition)


class RecomputeContext:
    """The context in which a block is recomputed, once per backward. `begun` makes the context of the state that its
    forward began with."""

    def __init__(self, begun: Callable[[], AbstractContextManager[None]], between: Callable[[], None]) -> None:
        self._begun, self._between, self._host = begun, between, HostRandom.capture()
        self._parameters: Unchanged | None = None

    def ran(self, block: nn.Module) -> None:
        """Record the parameters after the forward: they must not change before the recomputation."""
        if not is_faking() and not is_sharded(block):
            self._parameters = Unchanged(list(block.parameters()))

    def __enter__(self) -> None:
        self._between()
        with ExitStack() as stack:
            if self._parameters is not None:
                self._parameters.check_data(_AGAIN)
                self._parameters.compare(_AGAIN)
            stack.callback(HostRandom.capture().restore)
            self._host.restore()
            stack.enter_context(self._begun())
            self._left = stack.pop_all()

    def __exit__(self, *error: Any) -> None:
        self._left.close()
