"""PrefixCache: which blocks of a pool hold the beginning of a prompt.

A prefix of n blocks is usable when each layer group still has what the token after it will see: all n blocks, or the
last ones that its window reaches.
"""

from __future__ import annotations

from pagedserve.kv_cache.block import Block
from pagedserve.kv_cache.block_pool import BlockPool
from pagedserve.kv_cache.block_table import PASSED, BlockTable
from pagedserve.kv_cache.geometry import Geometry
from pagedserve.kv_cache.prefix_hash import extend_digests
from pagedserve.sequence import Sequence


class PrefixCache:
    """Look-ups and entries of one pool's index. A group's digests are the chain's, with the group's name behind."""

    def __init__(self, pool: BlockPool, geometry: Geometry):
        self._pool = pool
        self._geometry = geometry
        self._block_size = geometry.block_size
        self._names = [bytes([group]) if group else b"" for group in range(geometry.num_groups)]
        self._all_seeing = [group for group, window in enumerate(geometry.windows) if window is None]
        self._sliding = [group for group, window in enumerate(geometry.windows) if window is not None]
        # Blocks that this step copies from: nobody may overwrite them before.
        self.pinned: list[Block] = []

    # -- look-up -------------------------------------------------------------------------------------------------------

    def find(self, digest: bytes, group: int) -> Block | None:
        """The block of that group with that content."""
        return self._pool.find(digest + self._names[group])

    def digests_of(self, sequence: Sequence, table: BlockTable) -> list[bytes]:
        """Digests of the blocks that a look-up may use: full, findable, and without the last token."""
        limit = min((len(sequence.token_ids) - 1) // self._block_size, table.max_findable)
        extend_digests(table.digests, limit, sequence.token_ids, self._block_size, table.root)
        return table.digests if len(table.digests) == limit else table.digests[:limit]

    def num_usable(self, digests: list[bytes]) -> int:
        """Blocks of the longest usable prefix."""
        length = len(digests)
        for group in self._all_seeing:
            length = next((i for i in range(length) if self.find(digests[i], group) is None), length)
        longer = length + 1
        while length < longer:
            longer = length
            for group in self._sliding:
                length = self._last_run(digests, length, group)
        return length

    def is_usable_still(self, digests: list[bytes], length: int) -> bool:
        """Whether `length` is likely still the answer of `num_usable`: its end is there, and what follows is not."""
        groups = range(len(self._names))
        if length and any(self.find(digests[length - 1], group) is None for group in groups):
            return False
        return length == len(digests) or any(self.find(digests[length], group) is None for group in groups)

    def lanes(self, digests: list[bytes], length: int) -> list[list[Block]]:
        """The blocks of a usable prefix; PASSED stands for those that no token will see."""
        lanes = []
        for group in range(len(self._names)):
            num_passed = self._geometry.num_passed(group, length * self._block_size)
            found = [self.find(digest, group) for digest in digests[num_passed:length]]
            lanes.append([PASSED] * num_passed + [block for block in found if block is not None])
        return lanes

    def _last_run(self, digests: list[bytes], length: int, group: int) -> int:
        """The largest number of blocks, up to `length`, before which the group has all that its window reaches."""
        index = length - 1
        while index >= self._geometry.num_passed(group, length * self._block_size):
            if self.find(digests[index], group) is None:
                length = index
            index -= 1
        return length

    # -- blocks that match in part -------------------------------------------------------------------------------------

    def take_opening(self, sequence: Sequence, table: BlockTable) -> int:
        """Share the block of each group with the most of the tokens after the table's; returns how many all have."""
        start = len(table) * self._block_size
        wanted = sequence.token_ids[start : min(start + self._block_size, len(sequence.token_ids) - 1)]
        parent = table.digests[len(table) - 1] if len(table) else table.root
        found = [self._pool.find_opening(parent + name, wanted) for name in self._names]
        num_tokens = min(0 if match is None else match[1] for match in found)
        if not num_tokens:
            return 0
        blocks = [match[0] for match in found if match is not None]
        num_free = sum(block.ref_count == 0 for block in blocks)
        if num_free < len(blocks) or any(_is_of_use_to_others(block, num_tokens) for block in blocks):
            # All are copied. Free ones are held beside their copies until the step has run.
            room = self._pool.num_free - num_free
            if num_free and room < self._geometry.num_blocks_of(len(sequence.token_ids), start):
                return 0
            for block in blocks:
                self._pool.retain(block)
            self.pinned += blocks
        for block, lane in zip(blocks, table.lanes, strict=True):
            self._pool.retain(block)
            lane.append(block)
        return num_tokens

    def unpin(self) -> None:
        """The copies are on their way."""
        for block in self.pinned:
            self._pool.release(block)
        self.pinned.clear()

    # -- entries -------------------------------------------------------------------------------------------------------

    def register(self, sequence: Sequence, table: BlockTable, num_blocks: int) -> None:
        """Make the first `num_blocks` blocks, all full, findable."""
        start = table.num_registered
        if start >= num_blocks:
            return
        token_ids, digests, block_size = sequence.token_ids, table.digests, self._block_size
        extend_digests(digests, num_blocks, token_ids, block_size, table.root)
        for lane, name in zip(table.lanes, self._names, strict=True):
            parent = digests[start - 1] if start else table.root
            for index in range(start, num_blocks):
                block = lane[index]
                place = index * block_size
                digest = digests[index]
                if block is not PASSED:
                    self._pool.register(block, digest + name, parent + name, token_ids[place : place + block_size])
                parent = digest

    def register_tail(self, sequence: Sequence, table: BlockTable) -> None:
        """Let the partly filled last blocks be found by what they begin with."""
        num_full = sequence.num_computed_tokens // self._block_size
        if num_full >= min(len(table), table.max_findable):
            return
        extend_digests(table.digests, num_full, sequence.token_ids, self._block_size, table.root)
        parent = table.digests[num_full - 1] if num_full else table.root
        tail = sequence.token_ids[num_full * self._block_size : sequence.num_computed_tokens]
        for lane, name in zip(table.lanes, self._names, strict=True):
            self._pool.register_opening(lane[num_full], parent + name, tail)


def _is_of_use_to_others(block: Block, num_tokens: int) -> bool:
    """Whether writing on behind these tokens would lose anything that is found."""
    return block.digest is not None or (block.opening is not None and len(block.opening[1]) > num_tokens)
