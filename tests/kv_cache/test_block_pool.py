"""BlockPool: counts, the order in which blocks are given away, and what can be found."""

from __future__ import annotations

import pytest

from pagedserve.kv_cache.block import Block
from pagedserve.kv_cache.block_pool import BlockPool


def taken(pool: BlockPool, count: int) -> list[Block]:
    return [pool.allocate() for _ in range(count)]


def register(
    pool: BlockPool, block: Block, digest: bytes, parent: bytes = b"", token_ids: tuple[int, ...] = ()
) -> None:
    pool.register(block, digest, parent, list(token_ids))


def test_every_block_is_free_at_first_and_given_once() -> None:
    pool = BlockPool(3)
    blocks = taken(pool, 3)
    assert {block.block_id for block in blocks} == {0, 1, 2}
    assert pool.num_free == 0 and pool.usage == 1.0
    with pytest.raises(KeyError):
        pool.allocate()


def test_a_block_is_free_when_its_last_holder_releases_it() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    pool.retain(block)
    pool.release(block)
    assert pool.num_free == 0
    pool.release(block)
    assert pool.num_free == 1


def test_releasing_a_free_block_is_an_error() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    pool.release(block)
    with pytest.raises(AssertionError, match="nobody holds it"):
        pool.release(block)


def test_a_free_block_is_found_until_its_space_is_needed() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    register(pool, block, b"content")
    pool.release(block)
    assert pool.find(b"content") is block
    assert pool.allocate() is block
    assert pool.find(b"content") is None and block.digest is None


def test_a_found_block_keeps_its_content_while_it_is_held() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    register(pool, block, b"content")
    pool.release(block)
    pool.retain(block)
    assert pool.num_free == 1
    assert pool.allocate() is not block
    assert pool.find(b"content") is block


def test_blocks_without_content_go_first_then_the_least_recently_used() -> None:
    pool = BlockPool(4)
    old, new, plain, _ = taken(pool, 4)
    register(pool, old, b"old")
    register(pool, new, b"new")
    for block in (old, new, plain):
        pool.release(block)
    assert taken(pool, 3) == [plain, old, new]


def test_use_makes_a_block_young_again() -> None:
    pool = BlockPool(2)
    first, second = taken(pool, 2)
    for block, digest in ((first, b"first"), (second, b"second")):
        register(pool, block, digest)
        pool.release(block)
    pool.retain(first)
    pool.release(first)
    assert taken(pool, 2) == [second, first]


def test_of_two_blocks_with_one_content_the_first_is_found() -> None:
    pool = BlockPool(2)
    first, second = taken(pool, 2)
    register(pool, first, b"same")
    register(pool, second, b"same")
    assert pool.find(b"same") is first and second.digest is None


def test_discarded_content_is_gone_and_its_block_is_taken_first() -> None:
    pool = BlockPool(3)
    a, b, c = taken(pool, 3)
    for block, digest in ((a, b"a"), (b, b"b"), (c, b"c")):
        register(pool, block, digest)
        pool.release(block)
    pool.discard(b)
    assert pool.find(b"b") is None
    assert pool.allocate() is b


def test_a_block_is_found_by_its_first_tokens_behind_the_same_parent() -> None:
    pool = BlockPool(4, 2)
    full, part, other, _ = taken(pool, 4)
    register(pool, full, b"full", b"root", (1, 2, 3, 4))
    pool.register_opening(part, b"root", [1, 2, 5])
    pool.register_opening(other, b"else", [1, 2, 3])
    assert pool.find_opening(b"root", [1, 2, 3, 9]) == (full, 3)
    assert pool.find_opening(b"root", [1, 2, 5, 9]) == (part, 3)
    assert pool.find_opening(b"root", [1, 2]) == (part, 2), "of equals the latest"
    assert pool.find_opening(b"root", [1]) is None and pool.find_opening(b"root", [1, 9, 3]) is None
    assert pool.find_opening(b"else", [1, 2, 3]) == (other, 3)


def test_openings_of_fewer_tokens_than_the_least_are_not_kept() -> None:
    pool = BlockPool(1, 2)
    block = pool.allocate()
    pool.register_opening(block, b"root", [1])
    assert block.opening is None


def test_a_free_opening_is_evicted_like_other_content_and_then_gone() -> None:
    pool = BlockPool(2)
    part, plain = taken(pool, 2)
    pool.register_opening(part, b"root", [1])
    pool.release(part)
    pool.release(plain)
    assert pool.allocate() is plain and pool.find_opening(b"root", [1]) == (part, 1)
    assert pool.allocate() is part and pool.find_opening(b"root", [1]) is None
    pool.check([part, plain])


def test_an_opening_grows_until_its_block_is_full() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    pool.register_opening(block, b"root", [1, 2])
    pool.register_opening(block, b"root", [1])
    assert pool.find_opening(b"root", [1, 2, 3]) == (block, 2)
    register(pool, block, b"full", b"root", (1, 2, 3, 4))
    pool.register_opening(block, b"root", [1, 2])
    assert pool.find_opening(b"root", [1, 2, 3]) == (block, 3)


@pytest.mark.parametrize(("num_kept", "found"), [(0, None), (1, None), (2, 2), (3, 2)])
def test_a_block_that_is_overwritten_is_not_found_by_what_it_held(num_kept: int, found: int | None) -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    pool.register_opening(block, b"root", [1, 2])
    pool.overwrite(block, num_kept)
    assert pool.find_opening(b"root", [1, 2, 3]) == (None if found is None else (block, found))
    pool.check([block])


def test_a_full_block_that_is_overwritten_is_not_found_at_all() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    register(pool, block, b"full", b"root", (1, 2, 3, 4))
    pool.overwrite(block, 3)
    assert pool.find(b"full") is None and pool.find_opening(b"root", [1, 2, 3]) is None


def test_of_many_blocks_that_begin_alike_the_latest_are_compared() -> None:
    pool = BlockPool(20)
    blocks = taken(pool, 20)
    for i, block in enumerate(blocks):
        register(pool, block, bytes([i]), b"root", (7, i))
    assert pool.find_opening(b"root", [7, 19]) == (blocks[19], 2)
    assert pool.find_opening(b"root", [7, 0]) == (blocks[19], 1)
    pool.check(blocks)


def test_forget_all_hides_held_and_free_blocks_alike() -> None:
    pool = BlockPool(2)
    held, free = taken(pool, 2)
    register(pool, held, b"held")
    register(pool, free, b"free")
    pool.release(free)
    pool.forget_all()
    assert pool.find(b"held") is None and pool.find(b"free") is None
    pool.check([held])


@pytest.mark.parametrize("held", [[], ["a"], ["a", "a", "b"]])
def test_check_sees_references_that_do_not_add_up(held: list[str]) -> None:
    pool = BlockPool(3)
    blocks = {"a": pool.allocate(), "b": pool.allocate()}
    with pytest.raises(AssertionError):
        pool.check([blocks[name] for name in held])
    pool.check(blocks.values())
