"""A manager, and sequences that are computed, forked and ended in it."""

from __future__ import annotations

from itertools import count

from pagedserve.kv_cache.manager import KVCacheManager
from pagedserve.sequence import Sequence
from tests.helpers.factories import make_request

BLOCK = 4
seq_ids = count()


def make_manager(num_blocks: int = 16, num_host_blocks: int = 0, **options: bool) -> KVCacheManager:
    return KVCacheManager(block_size=BLOCK, num_device_blocks=num_blocks, num_host_blocks=num_host_blocks, **options)


def open_sequence(manager: KVCacheManager, token_ids: list[int], **options: object) -> Sequence:
    sequence = Sequence(next(seq_ids), 0, list(token_ids), len(token_ids))
    manager.open(sequence, make_request(token_ids, **options))
    return sequence


def compute(manager: KVCacheManager, sequence: Sequence, num_tokens: int | None = None) -> list[int]:
    """A step that computes tokens of one sequence, and succeeds."""
    end = len(sequence.token_ids) if num_tokens is None else sequence.num_computed_tokens + num_tokens
    new_blocks = manager.write(sequence, end)
    assert new_blocks is not None
    sequence.num_computed_tokens = end
    manager.commit(manager.take_writes())
    manager.check()
    return new_blocks


def fork(manager: KVCacheManager, parent: Sequence) -> Sequence:
    child = Sequence(next(seq_ids), 1, list(parent.token_ids), parent.num_prompt_tokens)
    manager.fork(parent, child)
    manager.check()
    return child


def blocks_of(manager: KVCacheManager, *sequences: Sequence) -> list[list[int]]:
    return [manager.row_block_ids(sequence) for sequence in sequences]


def used(manager: KVCacheManager) -> int:
    return manager.device.num_blocks - manager.num_free_blocks
