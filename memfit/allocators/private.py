"""Private pools, which CUDA graph capture and torch.cuda.MemPool use."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from memfit._errors import UsageError
from memfit.allocators.blocks import Pool

PoolId = tuple[int, int]


class PrivatePool:
    """A separate small and large pool. Their memory is released only once the pool has no users."""

    __slots__ = ("held", "large", "no_split", "pool_id", "small", "users")

    def __init__(self, pool_id: PoolId) -> None:
        self.pool_id = pool_id
        self.no_split = False
        self.small = Pool(small=True, owner=self)
        self.large = Pool(small=False, owner=self)
        self.users = 0
        self.held = 0
        """Bytes of its segments."""


class Route(NamedTuple):
    """Sends allocations to a private pool for as long as it is in place."""

    pool: PrivatePool
    streams: Collection[int] | None
    """Streams whose allocations it sends; None for all."""


class PrivatePools:
    """All private pools of an allocator, and the routes to them now in place."""

    __slots__ = ("_new", "_pools", "routes")

    def __init__(self, new: Callable[[Pool], None]) -> None:
        self._new = new
        """Called with each new pool, and again when a pool stops splitting blocks."""
        self._pools: dict[PoolId, PrivatePool] = {}
        self.routes: list[Route] = []

    def __iter__(self) -> Iterator[PrivatePool]:
        return iter(list(self._pools.values()))

    def get(self, pool_id: PoolId) -> PrivatePool:
        """Return the pool with that id, created if there is none; a new pool has no users."""
        found = self._pools.get(pool_id)
        if found is None:
            found = self._pools[pool_id] = PrivatePool(pool_id)
            self._new(found.small)
            self._new(found.large)
        return found

    def known(self, pool_id: PoolId) -> PrivatePool:
        """Return the pool with that id. Raises UsageError if there is none."""
        if pool_id not in self._pools:
            raise UsageError(
                f"private pool {pool_id}",
                found=f"there are {sorted(self._pools) or 'none'}",
                next_move="create_pool or begin_pool first",
            )
        return self._pools[pool_id]

    def drop(self, pool: PrivatePool) -> None:
        """Delete a pool that holds no memory."""
        del self._pools[pool.pool_id]

    def forbid_splitting(self, pool: PrivatePool) -> None:
        """Stop splitting the pool's blocks."""
        pool.no_split = True
        self._new(pool.small)
        self._new(pool.large)

    def begin(self, pool_id: PoolId, streams: Collection[int] | None) -> None:
        """Route allocations to the pool. The latest of several routes takes precedence."""
        if any(route.pool.pool_id == pool_id for route in self.routes):
            raise UsageError(
                f"allocations to pool {pool_id}", found="they go there already", next_move="end_pool before another begin_pool"
            )
        pool = self.get(pool_id)
        pool.users += 1
        self.routes.append(Route(pool, streams))

    def end(self, pool_id: PoolId) -> None:
        """Remove the route to the pool."""
        self.routes = [route for route in self.routes if route.pool.pool_id != pool_id]

    def routed(self, pool: Pool, stream: int) -> Pool:
        """Return the pool that serves an allocation on `stream` meant for `pool`."""
        for route in reversed(self.routes):
            if route.streams is None or stream in route.streams:
                return route.pool.small if pool.small else route.pool.large
        return pool
