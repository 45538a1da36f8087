"""Digests: what makes two blocks the same, and what does not (C080, C081)."""

from __future__ import annotations

import itertools

from pagedserve.kv_cache.prefix_hash import extend_digests, root_digest

ROOT = root_digest(4, None, None)


def digests(token_ids: list[int], root: bytes = ROOT) -> list[bytes]:
    result: list[bytes] = []
    extend_digests(result, len(token_ids) // 4, token_ids, 4, root)
    return result


def test_only_full_blocks_have_digests() -> None:
    assert [len(digests(list(range(n)))) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_equal_prefixes_have_equal_digests_and_no_more() -> None:
    a, b = digests([1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9]), digests([1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 8, 8])
    assert a[:2] == b[:2] and a[2] != b[2]


def test_a_block_after_another_prefix_is_another_block() -> None:
    assert digests([1, 1, 1, 1, 5, 6, 7, 8])[1] != digests([2, 2, 2, 2, 5, 6, 7, 8])[1]


def test_tokens_that_collide_in_a_polynomial_hash_do_not_here() -> None:
    assert digests([10, 50, 0, 0]) != digests([10 + 1, 50 - 31, 0, 0])


def test_growing_piece_by_piece_gives_the_digests_of_the_whole() -> None:
    token_ids = list(range(40))
    grown: list[bytes] = []
    for num_blocks in (0, 1, 1, 4, 10):
        extend_digests(grown, num_blocks, token_ids, 4, ROOT)
        assert len(grown) == num_blocks
    assert grown == digests(token_ids)


def test_adapter_salt_and_block_size_are_part_of_the_content() -> None:  # C081
    keys = [None, "", "1", "a", "b", "\x00", "\ud800"]
    roots = [root_digest(size, adapter, salt) for size, adapter, salt in itertools.product((4, 8), keys, keys)]
    assert len(set(roots)) == len(roots)


def test_huge_token_ids_have_digests_too() -> None:
    assert digests([2**40, 0, 0, 0]) != digests([0, 2**40, 0, 0])
