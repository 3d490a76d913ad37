"""Tensors of collectives are nobody else's once they are done: with real processes, over gloo."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from processes import Processes

from memfit.ranks.launched import Launched
from memfit.ranks.ranks import Ranks

CPU = torch.device("cpu")
TIMES = 300
"""A thread of gloo's is late in one of six."""


@pytest.fixture(scope="module")
def two() -> Iterator[Processes]:
    found = Processes(2)
    yield found
    found.end()


def _joined() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")


def late(times: int) -> tuple[int, int]:
    """(how often tensors of a collective were still held when its wait returned, how often after `settle`)."""
    _joined()
    early = left = 0
    for _ in range(times):
        launched = Launched(lambda own: dist.all_reduce(own[0], async_op=True), [torch.ones(64)])
        launched.wait()
        early += launched._tensors[0]._use_count() > 1
        launched.settle()
        left += launched._tensors[0]._use_count() > 1
    return early, left


def test_they_are_gone_when_it_says_so(two: Processes) -> None:
    assert [left for _, left in two.run(late, TIMES)] == [0, 0]


@pytest.mark.slow
def test_they_are_late_without_it(two: Processes) -> None:
    """On a machine where threads run beside each other: that there is something to wait for."""
    assert all(early > 0 for early, _ in two.run(late, 10 * TIMES))


def held_after(times: int) -> int:
    """How many tensors of exchanges are held by others afterwards."""
    _joined()
    exchange, held = Ranks(CPU)._exchange, 0
    for i in range(times):
        assert exchange.objects({"of": dist.get_rank()}) == [{"of": 0}, {"of": 1}]
        assert [told.numbers for told in exchange.told(0, "a test", [float(i)] * 70)] == [[float(i)] * 70] * 2
        last = exchange._last
        exchange.settle()
        assert last is not None
        held += sum(tensor._use_count() > 1 for tensor in last._tensors)
    return held


def test_no_exchange_leaves_tensors_with_others(two: Processes) -> None:
    assert two.run(held_after, TIMES // 3) == [0, 0]
