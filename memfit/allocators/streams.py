"""Blocks freed while another stream still uses them: one event per stream. Each stream's events complete in order.

Not covered: the order in which a real process checks its streams. Here it is the order of their first use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from memfit.allocators.blocks import Block


class StreamEvents:
    """The outstanding events of every stream, and the blocks whose events are deferred."""

    __slots__ = ("_captured", "_complete", "_deferred", "_queues")

    def __init__(self) -> None:
        self._queues: dict[int, deque[Block]] = {}
        self._complete: dict[int, int] = {}
        self._deferred: list[Block] = []
        self._captured: dict[Block, set[int]] = {}

    def __bool__(self) -> bool:
        return bool(self._queues) or bool(self._deferred)

    def use(self, block: Block, stream: int, *, capturing: bool) -> None:
        """Mark the block as used on a stream besides its own."""
        if block.uses is None:
            block.uses = set()
        block.uses.add(stream)
        if capturing:
            self._captured.setdefault(block, set()).add(stream)

    def record(self, block: Block, *, capturing: bool) -> None:
        """Record one event for a freed block on every stream that uses it; during capture, defer that."""
        if capturing:
            self._deferred.append(block)
            return
        uses, block.uses = block.uses or (), None
        for stream in uses:
            block.events += 1
            self._queues.setdefault(stream, deque()).append(block)

    def record_deferred(self) -> list[Block]:
        """After a capture, drop its own uses and record events for earlier ones. Returns the blocks without events."""
        deferred, self._deferred = self._deferred, []
        for block in deferred:
            block.uses = (block.uses or set()) - self._captured.pop(block, set())
            self.record(block, capturing=False)
        return [block for block in deferred if block.events == 0]

    def complete(self, stream: int) -> None:
        """Complete all events recorded on the stream so far; the allocator frees the blocks when it polls."""
        if stream in self._queues:
            self._complete[stream] = len(self._queues[stream])

    def finished(self) -> list[Block]:
        """Remove the completed events, and return the blocks whose last event is done."""
        done = []
        for stream, count in self._complete.items():
            queue = self._queues[stream]
            for _ in range(count):
                self._one_done(queue.popleft(), done)
            if not queue:
                del self._queues[stream]
        self._complete.clear()
        return done

    def wait(self, chosen: Callable[[Block], bool]) -> list[Block]:
        """Wait for every event of the chosen blocks. Returns those with no events left."""
        done: list[Block] = []
        for stream, queue in list(self._queues.items()):
            ahead = self._complete.pop(stream, 0)
            kept = deque(block for block in queue if not chosen(block))
            still_ahead = sum(not chosen(block) for place, block in enumerate(queue) if place < ahead)
            for block in queue:
                if chosen(block):
                    self._one_done(block, done)
            del self._queues[stream]
            if kept:
                self._queues[stream] = kept
                self._complete[stream] = still_ahead
        return done

    def _one_done(self, block: Block, done: list[Block]) -> None:
        block.events -= 1
        if block.events == 0:
            done.append(block)
