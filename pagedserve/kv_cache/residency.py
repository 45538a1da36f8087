"""When memory goes back to the system: what stood idle for a whole period was not needed in it."""

from __future__ import annotations

from collections.abc import Callable

from pagedserve.kv_cache.block_pool import BlockPool

PERIOD_SECONDS = 30.0
# Returning a block costs some 20 us, and it happens between two steps.
MAX_BLOCKS = 256


class Residency:
    """Watches a pool and names the blocks beyond its `num_resident` that nobody needed for a period."""

    def __init__(self, pool: BlockPool, clock: Callable[[], float]):
        self._pool = pool
        self._clock = clock
        self._period_end = clock() + PERIOD_SECONDS
        self._least_idle = pool.num_idle

    def take_unneeded(self) -> list[int]:
        """Ids of blocks whose content is forgotten and whose memory may be returned; call it once a step."""
        self._least_idle = min(self._least_idle, self._pool.num_idle)
        now = self._clock()
        if now < self._period_end:
            return []
        count = min(self._least_idle, self._pool.num_surplus, MAX_BLOCKS)
        self._period_end = now + PERIOD_SECONDS
        self._least_idle = self._pool.num_idle - count
        return self._pool.give_back(count)
