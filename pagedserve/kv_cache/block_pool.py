"""BlockPool: all blocks of one memory, who is free, and which contents can be found again.

The free queue is in eviction order: its head is taken first. A released block that holds nothing findable goes to the
head, one with a digest to the tail, so what may be hit again is overwritten last and least recently used first.

Blocks that were never used are no part of the queue: on a CPU they take no memory yet. They are taken before anything
that may be hit is overwritten, but only until `num_resident` blocks are in use or kept; beyond it they wait until
nothing else is left.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from pagedserve.kv_cache.block import Block
from pagedserve.kv_cache.openings import Openings


class BlockPool:
    """`num_blocks` blocks with reference counts, a free queue, an index from digest to block, and one of openings."""

    def __init__(self, num_blocks: int, min_opening: int = 1, num_resident: int | None = None):
        """`min_opening`: the fewest tokens of a block that are worth being found (see `Openings`).

        `num_resident`: blocks that may hold memory though no table needs so many (default: all).
        """
        self._openings = Openings(min_opening)
        self._blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._free: OrderedDict[Block, None] = OrderedDict()
        self._unused = self._blocks[::-1]  # their memory is the system's; the lowest is taken first
        self._num_resident = num_blocks if num_resident is None else num_resident
        self._index: dict[bytes, Block] = {}

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def num_free(self) -> int:
        """Blocks that no table holds; findable ones among them count, for they can be overwritten."""
        return len(self._free) + len(self._unused)

    @property
    def num_idle(self) -> int:
        """Free blocks that hold memory."""
        return len(self._free)

    @property
    def num_surplus(self) -> int:
        """Blocks that hold memory beyond `num_resident`."""
        return max(0, len(self._blocks) - len(self._unused) - self._num_resident)

    @property
    def usage(self) -> float:
        """Share of the blocks that tables hold."""
        return 1.0 - self.num_free / len(self._blocks) if self._blocks else 0.0

    def allocate(self) -> Block:
        """The block that was of use longest ago, its old content forgotten. KeyError if none is free."""
        if self._unused and self._takes_unused():
            block = self._unused.pop()
        else:
            block, _ = self._free.popitem(last=False)
        if block.opening is not None or block.digest is not None:
            self.forget(block)
        block.ref_count = 1
        return block

    def _takes_unused(self) -> bool:
        head = next(iter(self._free), None)
        if head is None:
            return True
        is_findable = head.digest is not None or head.opening is not None
        return is_findable and len(self._blocks) - len(self._unused) < self._num_resident

    def give_back(self, count: int) -> list[int]:
        """Ids of up to `count` free blocks, of use longest ago, whose memory the worker may return to the system."""
        given = []
        for _ in range(min(count, len(self._free))):
            block, _ = self._free.popitem(last=False)
            self.forget(block)
            self._unused.append(block)
            given.append(block.block_id)
        return given

    def retain(self, block: Block) -> None:
        """One more table holds `block`; a free one leaves the queue and keeps its content."""
        if block.ref_count == 0:
            del self._free[block]
        block.ref_count += 1

    def release(self, block: Block) -> None:
        """One table fewer holds `block`. Release a chain's deepest block first: it is then evicted first."""
        assert block.ref_count > 0, f"{block} is released but nobody holds it"
        block.ref_count -= 1
        if block.ref_count == 0:
            self._free[block] = None
            if block.digest is None and block.opening is None:
                self._free.move_to_end(block, last=False)

    def find(self, digest: bytes) -> Block | None:
        """The block with that content, free or held."""
        return self._index.get(digest)

    def find_opening(self, parent: bytes, token_ids: list[int]) -> tuple[Block, int] | None:
        """The block that begins, after `parent`, with the most of these tokens, free or held; and how many."""
        return self._openings.find(parent, token_ids)

    def register(self, block: Block, digest: bytes, parent: bytes, token_ids: list[int]) -> None:
        """Make a full block findable. Where two blocks have one content, the first stays the one that is found."""
        if block.digest is None and digest not in self._index:
            block.digest = digest
            self._index[digest] = block
            self._openings.add(block, parent, token_ids)

    def register_opening(self, block: Block, parent: bytes, token_ids: list[int]) -> None:
        """Make a partly filled block findable; what is found of a full one stays."""
        if block.digest is None and (block.opening is None or len(block.opening[1]) < len(token_ids)):
            self._openings.add(block, parent, token_ids)

    def forget(self, block: Block) -> None:
        """The block is no longer findable; what tables it serves does not change."""
        self._openings.remove(block)
        if block.digest is not None:
            del self._index[block.digest]
            block.digest = None

    def overwrite(self, block: Block, num_tokens: int) -> None:
        """Its only holder keeps the first `num_tokens` tokens and writes others behind them."""
        if block.digest is not None or (block.opening is not None and len(block.opening[1]) > num_tokens):
            self.forget(block)

    def discard(self, block: Block) -> None:
        """Nobody will want this content here again: forget it, and take the block first if it is free."""
        self.forget(block)
        if block.ref_count == 0:
            self._free.move_to_end(block, last=False)

    def forget_all(self) -> None:
        """Nothing is findable any more."""
        for block in self._blocks:
            self.forget(block)

    def check(self, held: Iterable[Block]) -> None:
        """Prove the accounts, given every entry of every table, repetitions too. AssertionError tells what is wrong."""
        references: dict[Block, int] = {}
        for block in held:
            references[block] = references.get(block, 0) + 1
        unused = set(self._unused)
        assert len(unused) == len(self._unused) and not unused & self._free.keys(), "a block is free twice"
        for block in self._blocks:
            count = references.pop(block, 0)
            assert block.ref_count == count, f"{block} is in {count} tables"
            is_free = block in self._free or block in unused
            assert is_free == (count == 0), f"{block}: free queue and references disagree"
            assert block not in unused or (block.digest is None and block.opening is None), f"{block} holds nothing"
            assert block.digest is None or self._index.get(block.digest) is block, (
                f"{block} is not what its digest finds"
            )
        assert not references, f"tables hold blocks of another pool: {list(references)}"
        self._openings.check(self._blocks)
        for digest, block in self._index.items():
            assert block.digest == digest, f"the index has {block} under another digest"
