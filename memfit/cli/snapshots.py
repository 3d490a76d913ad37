"""Says in words how a recorded memory snapshot compares with the simulated allocator."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from memfit._units import format_bytes
from memfit.allocators.agreement import Agreement, Figure
from memfit.allocators.replay import replay
from memfit.allocators.snapshot import read_snapshot


def replayed(file: Path) -> tuple[str, bool]:
    """Replay a pickle of `torch.cuda.memory._snapshot()`; return (lines, whether every device's replay is identical).

    Nothing in the file is executed. Raises UsageError if it is no snapshot.
    """
    snapshot = read_snapshot(file)
    found = [(index, replay(snapshot, device=index)) for index, memory in enumerate(snapshot.devices) if memory.trace]
    if not found:
        return "no device of this snapshot has a trace: record with torch.cuda.memory._record_memory_history()", False
    lines = [line for index, agreement in found for line in _told(index, agreement)]
    return "\n".join(lines), all(agreement.identical for _, agreement in found)


def _told(index: int, found: Agreement) -> Iterator[str]:
    verdict = "identical" if found.identical else "differs"
    segments = f"{found.compared} segments allocated or freed alike" if found.compared else "no segment allocated or freed"
    same = f"{found.allocations} allocations at the same addresses, {segments}"
    yield f"device {index}: {verdict}; {same}"
    if found.difference:
        yield f"  first difference  {found.difference}"
    if found.assumed:
        yield f"  assumed           {found.assumed} blocks older than the trace"
    yield f"  reserved, peak    {_both(found.peak_reserved)}"
    yield f"  reserved, end     {_both(found.reserved)}"
    yield f"  allocated, end    {_both(found.allocated)}"
    yield f"  allocated, peak   {format_bytes(found.peak_allocated)} replayed"


def _both(figure: Figure) -> str:
    if figure.recorded == figure.replayed:
        return f"{format_bytes(figure.recorded)} recorded and replayed"
    return f"{figure.recorded} bytes recorded, {figure.replayed} replayed"
