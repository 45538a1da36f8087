"""How much memory a pool holds: little while little is needed, and no longer than it is needed."""

from __future__ import annotations

from pagedserve.kv_cache.block import Block
from pagedserve.kv_cache.block_pool import BlockPool
from pagedserve.kv_cache.residency import MAX_BLOCKS, PERIOD_SECONDS, Residency


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def taken(pool: BlockPool, count: int) -> list[Block]:
    return [pool.allocate() for _ in range(count)]


def cached(pool: BlockPool, count: int, name: str) -> list[Block]:
    """Blocks that were computed, can be found, and are free."""
    blocks = taken(pool, count)
    for index, block in enumerate(blocks):
        pool.register(block, f"{name}{index}".encode(), b"parent", [index, 1, 2, 3])
    for block in reversed(blocks):
        pool.release(block)
    return blocks


def test_cached_blocks_are_overwritten_before_more_than_the_resident_ones_are_touched() -> None:
    pool = BlockPool(10, num_resident=4)
    first = cached(pool, 3, "a")
    assert {block.block_id for block in first} == {0, 1, 2}
    assert taken(pool, 1)[0].block_id == 3, "up to four, what is cached stays"
    assert [block in first for block in taken(pool, 3)] == [True, True, True]
    assert pool.find(b"a0") is None
    assert {block.block_id for block in taken(pool, 6)} == {4, 5, 6, 7, 8, 9}, "running requests get all there is"
    assert pool.num_free == 0 and pool.num_surplus == 6


def test_blocks_that_hold_nothing_are_taken_before_unused_ones() -> None:
    pool = BlockPool(10)
    a, b, _ = taken(pool, 3)
    pool.release(a)
    pool.release(b)
    assert {block.block_id for block in taken(pool, 3)} == {0, 1, 3}


def test_without_a_limit_everything_cached_stays_until_the_pool_is_full() -> None:
    pool = BlockPool(6)
    cached(pool, 4, "a")
    taken(pool, 2)
    assert all(pool.find(f"a{i}".encode()) for i in range(4))


def test_what_was_idle_for_a_whole_period_is_given_back() -> None:
    clock = Clock()
    pool = BlockPool(20, num_resident=5)
    residency = Residency(pool, clock)
    running = taken(pool, 12)
    assert residency.take_unneeded() == []
    for block in running[:9]:
        pool.release(block)
    clock.now += PERIOD_SECONDS
    assert residency.take_unneeded() == [], "they were needed in this period"
    clock.now += PERIOD_SECONDS - 1
    again = taken(pool, 4)
    assert residency.take_unneeded() == []
    for block in again:
        pool.release(block)
    clock.now += 1
    given = residency.take_unneeded()
    assert len(given) == 5, "at their busiest, five of the nine were idle"
    assert pool.num_surplus == 2 and pool.num_free == 17
    clock.now += PERIOD_SECONDS
    assert len(residency.take_unneeded()) == 2, "five blocks stay, three of them running"
    assert pool.num_surplus == 0
    clock.now += PERIOD_SECONDS
    assert residency.take_unneeded() == []
    pool.check(running[9:])


def test_content_that_is_given_back_is_not_found_and_the_oldest_goes_first() -> None:
    clock = Clock()
    pool = BlockPool(20, num_resident=3)
    residency = Residency(pool, clock)
    held = taken(pool, 6)
    for index, block in enumerate(held):
        pool.register(block, bytes([index]), b"parent", [index])
    for block in held:
        pool.release(block)
    clock.now += PERIOD_SECONDS
    residency.take_unneeded()
    clock.now += PERIOD_SECONDS
    assert residency.take_unneeded() == [block.block_id for block in held[:3]]
    assert [pool.find(bytes([index])) is not None for index in range(6)] == [False] * 3 + [True] * 3
    pool.check([])


def test_little_at_a_time_and_nothing_without_a_limit() -> None:
    clock = Clock()
    for num_resident, expected in ((10, MAX_BLOCKS), (None, 0)):
        pool = BlockPool(1000, num_resident=num_resident)
        residency = Residency(pool, clock)
        for block in taken(pool, 900):
            pool.release(block)
        residency.take_unneeded()
        clock.now += PERIOD_SECONDS
        residency.take_unneeded()
        clock.now += PERIOD_SECONDS
        assert len(residency.take_unneeded()) == expected
