"""Replays a recorded trace through the simulated allocator, and checks that it takes and releases the same segments.

The driver's decisions come from the trace: where segments lie, and when the driver refused one, which shows as released
segments. Everything else is simulated and compared: which request needs a segment, the segment's size, the address of each
block, which segments are released, what is left at the end.

Not recorded, so not distinguished: torch.cuda.empty_cache() from running out of memory; which private pools never split (pass
`no_split`); private pools at all, in traces from before torch recorded them; settings that changed while recording; expandable
segments that grew for a request before it ran out of memory; uses on other streams that ended while memory was released for a
request that their blocks would have served.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from memfit._errors import UsageError
from memfit._units import format_bytes
from memfit.allocators.agreement import Agreement, Figure, at_end, difference_at_end, no_agreement
from memfit.allocators.blocks import NO_POOL
from memfit.allocators.caching import CachingAllocator
from memfit.allocators.driver import Driver
from memfit.allocators.events import SEGMENT_ACTIONS, Exhausted, SegmentEvent
from memfit.allocators.layout import adopt, layout_of
from memfit.allocators.release import garbage, oversize
from memfit.allocators.rules import SMALL, rounded_size
from memfit.allocators.settings import AllocatorSettings
from memfit.allocators.snapshot import HIGHEST_BITS, DeviceMemory, Snapshot, TraceEntry
from memfit.allocators.undo import Beginning, CannotUndo, undo

_GIVES = ("segment_free", "segment_unmap")
_ALWAYS = 1 << 62
_ELSEWHERE = 1 << HIGHEST_BITS
"""Addresses from here on occur in no real process. Segments that the trace does not know get them."""


def replay(
    snapshot: Snapshot,
    *,
    device: int = 0,
    settings: AllocatorSettings | None = None,
    device_memory: int | None = None,
    no_split: Collection[tuple[int, int]] = (),
) -> Agreement:
    """Replay one device's trace and compare it with the recording; `settings` replaces the recorded settings.

    `device_memory` (bytes) is needed if a memory fraction is set. Raises UsageError if there is no such device.
    """
    if not 0 <= device < len(snapshot.devices):
        raise UsageError(
            f"a replay of device {device}",
            found=f"the snapshot has {len(snapshot.devices)} devices",
            next_move="pass device= of one of them, from 0",
        )
    memory = snapshot.devices[device]
    settings = snapshot.settings if settings is None else settings
    driver = _TraceDriver(first_address=_ELSEWHERE)
    allocator = CachingAllocator(settings, device_memory=device_memory, driver=driver)
    try:
        beginning = undo(memory, settings, no_split=no_split)
    except CannotUndo as reason:
        return no_agreement(memory, f"what was there before the trace cannot be worked out: {reason}")
    run = _Replay(allocator, driver, memory, beginning, no_split)
    run.whole_trace()
    return run.agreement(beginning.assumed)


class _TraceDriver(Driver):
    """A driver that places segments where the trace has them, and refuses on demand."""

    hint: TraceEntry | None = None
    refusals = 0

    def back(self, size: int) -> bool:
        if self.refusals:
            self.refusals -= 1
            return False
        return super().back(size)

    def place(self, size: int) -> int:
        hint, self.hint = self.hint, None
        if hint is not None and (hint.size == size or hint.action == "segment_map") and hint.address + size <= _ELSEWHERE:
            return hint.address
        return super().place(size)


class _Replay:
    """The allocator, the trace, and the first difference between them."""

    def __init__(
        self,
        allocator: CachingAllocator,
        driver: _TraceDriver,
        memory: DeviceMemory,
        beginning: Beginning,
        no_split: Collection[tuple[int, int]],
    ) -> None:
        self.allocator, self.driver, self.memory = allocator, driver, memory
        self.no_split = no_split
        self.difference = ""
        self.compared = self.allocations = 0
        self.recorded = self.recorded_peak = sum(segment.size for segment in beginning.segments)
        self.moved: dict[int, int] = {}
        self.pools: set[tuple[int, int]] = set()
        self.group: list[TraceEntry] = []
        """Segment events since the program's last call to the allocator."""
        for pool_id in {segment.pool_id for segment in beginning.segments}:
            self.use(pool_id)
        adopt(allocator, beginning.segments, beginning.lowest)
        for segment in beginning.segments:
            for block in segment.blocks:
                self.moved[block.address] = block.address

    def use(self, pool_id: tuple[int, int]) -> None:
        """Mark a private pool as in use when it first appears."""
        if pool_id != NO_POOL and pool_id not in self.pools:
            self.pools.add(pool_id)
            self.allocator.create_pool(pool_id, no_split=pool_id in self.no_split)

    def whole_trace(self) -> None:
        trace = self.memory.trace
        last_give = _next_give(trace)
        for at, entry in enumerate(trace):
            if entry.action in SEGMENT_ACTIONS:
                self.count(entry)
                self.group.append(entry)
            elif entry.action == "alloc":
                self.allocate(at, entry)
            elif entry.action == "oom":
                self.run_out(at, entry)
            elif entry.action == "free_requested":
                self.flush(at)
                self.free(at, entry, at_once=_completes_at_once(trace, at))
            elif entry.action == "free_completed" and not last_give[at]:
                # If segments are released next, the wait for all streams completes the block: it stays pending until then.
                self.allocator.complete(-self.moved.get(entry.address, entry.address))
                self.allocator.poll()
        self.flush(len(trace))

    def count(self, entry: TraceEntry) -> None:
        self.recorded += -entry.size if entry.action in _GIVES else entry.size
        self.recorded_peak = max(self.recorded_peak, self.recorded)

    # ---- what the program did

    def allocate(self, at: int, entry: TraceEntry) -> None:
        group, self.group = self.group, []
        gives = [each for each in group if each.action in _GIVES]
        takes = [each for each in group if each.action not in _GIVES]
        self.use(entry.pool_id or NO_POOL)
        if gives:
            self.give_back(gives, entry)
        self.driver.hint = takes[0] if takes and not self.difference else None
        try:
            address = self.malloc(entry)
        except Exhausted as error:
            self.differ(at, f"{entry.size} bytes were allocated; replayed: {error.asked} cannot be had")
            return
        finally:
            self.driver.hint, self.driver.refusals = None, 0
        self.compare(at, group)
        if address != entry.address:
            self.differ(at, f"{entry.size} bytes at {entry.address:#x}; replayed: at {address:#x}")
        self.allocations += not self.difference
        self.moved[entry.address] = address

    def run_out(self, at: int, entry: TraceEntry) -> None:
        """Replay an allocation for which the driver refused every segment."""
        group, self.group = self.group, []
        self.driver.refusals = _ALWAYS
        try:
            self.allocator.free(self.malloc(entry))
            self.differ(at, f"no memory for {entry.size} bytes; replayed: a cached block serves them")
        except Exhausted:
            pass
        finally:
            self.driver.refusals = 0
        self.compare(at, group)

    def malloc(self, entry: TraceEntry) -> int:
        pool_id = entry.pool_id or NO_POOL
        if pool_id == NO_POOL:
            return self.allocator.malloc(entry.size, entry.stream)
        self.allocator.begin_pool(pool_id)
        try:
            return self.allocator.malloc(entry.size, entry.stream)
        finally:
            self.allocator.end_pool(pool_id)
            self.allocator.release_pool(pool_id)

    def give_back(self, gives: list[TraceEntry], entry: TraceEntry) -> None:
        """Reproduce what released these segments before an allocation."""
        refusals = refusals_for(self.allocator, entry.size, entry.stream, [each.address for each in gives])
        if refusals is None or any(each.pool_id not in (None, NO_POOL) for each in gives):
            self.empty(gives)
        else:
            self.driver.refusals = refusals

    def empty(self, gives: list[TraceEntry]) -> None:
        """Do what torch.cuda.empty_cache() does, for each pool that released something."""
        pool_ids = {each.pool_id or NO_POOL for each in gives}
        for pool_id in pool_ids - {NO_POOL}:
            self.pools.discard(pool_id)
            self.allocator.release_pool(pool_id)
            self.allocator.empty_cache(pool_id)
            self.use(pool_id)
        if NO_POOL in pool_ids:
            self.allocator.empty_cache()

    def flush(self, at: int) -> None:
        """Replay segment events without an allocation after them: the cache was emptied."""
        group, self.group = self.group, []
        if group:
            self.empty([each for each in group if each.action in _GIVES])
            self.compare(at, group)

    def free(self, at: int, entry: TraceEntry, *, at_once: bool) -> None:
        address = self.moved.pop(entry.address, None) if at_once else self.moved.get(entry.address)
        if address is None:
            self.differ(at, f"{entry.address:#x} is freed, and nothing is allocated there")
            return
        if not at_once:
            self.allocator.used_on(address, -address)
        self.allocator.free(address)

    # ---- what differs

    def compare(self, at: int, group: list[TraceEntry]) -> None:
        """Compare the segment events of one call of the program with those of the replay."""
        replayed = list(self.allocator.events)
        self.allocator.events.clear()
        recorded = [SegmentEvent(e.action, e.address, e.size, e.stream, e.pool_id or NO_POOL) for e in group]
        for place in range(max(len(recorded), len(replayed))):
            was = recorded[place] if place < len(recorded) else None
            now = replayed[place] if place < len(replayed) else None
            if was != now:
                self.differ(at, f"{_words(was)}; replayed: {_words(now)}")
                return
            self.compared += not self.difference

    def differ(self, at: int, words: str) -> None:
        """Record the first difference; the replay continues with its own addresses."""
        if not self.difference:
            self.difference = f"entry {at} of {len(self.memory.trace)}: recorded {words}"

    def agreement(self, assumed: int) -> Agreement:
        if not self.difference:
            self.difference = difference_at_end(self.memory.segments, layout_of(self.allocator))
        allocated, reserved = at_end(self.memory.segments)
        return Agreement(
            identical=not self.difference,
            difference=self.difference,
            compared=self.compared,
            allocations=self.allocations,
            assumed=assumed,
            peak_reserved=Figure(self.recorded_peak, self.allocator.peak_reserved),
            reserved=Figure(reserved, self.allocator.reserved),
            allocated=Figure(allocated, self.allocator.allocated),
            peak_allocated=self.allocator.peak_allocated,
        )


def refusals_for(allocator: CachingAllocator, size: int, stream: int, gone: list[int]) -> int | None:
    """Return how often the driver refused a segment for this request, if exactly those at `gone` were released, in order.

    None if emptying the cache explains the releases as well.
    """
    settings, allowed = allocator.settings, allocator.allowed
    rounded = rounded_size(size, settings)
    shelf = (allocator.small if rounded <= SMALL else allocator.large).shelf(stream)
    if allocator.search(shelf, rounded) < len(shelf.blocks):
        return None
    old = [block.address for block in garbage(allocator, allowed)] if allocator.collects and allowed is not None else []
    big = [] if settings.splits_everything else [b for b in oversize(allocator, shelf, rounded) if b.address not in old]
    first = old + [block.address for block in big]
    if not first or gone[: len(first)] != first:
        return None
    if len(gone) > len(first):
        return 1 + (sum(block.size for block in big) >= max(rounded, settings.max_split_size))
    return 1 if big else 0


def _completes_at_once(trace: Sequence[TraceEntry], at: int) -> bool:
    after = trace[at + 1] if at + 1 < len(trace) else None
    return after is not None and after.action == "free_completed" and after.address == trace[at].address


def _next_give(trace: Sequence[TraceEntry]) -> list[bool]:
    """Return for each entry whether segments are released before the program's next call."""
    answers, giving = [False] * len(trace), False
    for at in range(len(trace) - 1, -1, -1):
        answers[at] = giving
        if trace[at].action in _GIVES:
            giving = True
        elif trace[at].action in ("alloc", "free_requested", "oom"):
            giving = False
    return answers


def _words(event: SegmentEvent | None) -> str:
    if event is None:
        return "nothing more"
    return f"{event.action} of {format_bytes(event.size)} ({event.size} bytes) at {event.address:#x}, stream {event.stream}"
