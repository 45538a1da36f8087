"""KVCacheManager: the only face of the KV cache that the scheduler sees.

It answers in counts and block ids, and gathers the copies that the next step must make (`take_block_ops`). Blocks are
taken when a token needs them and not before, so a sequence wastes less than one block. Design: PagedAttention (Kwon et
al., SOSP 2023).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from itertools import chain

from pagedserve.kv_cache.block import Block
from pagedserve.kv_cache.block_pool import BlockPool
from pagedserve.kv_cache.block_table import BlockTable
from pagedserve.kv_cache.prefix_hash import extend_digests, root_digest
from pagedserve.kv_cache.residency import Residency
from pagedserve.sequence import Request, Sequence
from pagedserve.step import BlockOps

# Most sequences need no block in most steps; they share this list, which nobody changes.
_NO_BLOCKS: list[int] = []

# A block is copied for the sake of its first tokens if they are at least an eighth of it. On two cores a block of 16
# tokens of the demo model is copied in 0.13 ms, and one prompt token computed in 0.7 ms, so that a single one pays;
# both grow with the model, only the copy with the block. Two of 16 leave a margin of ten, and tell openings apart.
_MIN_OPENING_SHARE = 8


class KVCacheManager:
    """Block tables of all live sequences over a device pool and a host pool."""

    def __init__(
        self,
        *,
        block_size: int,
        num_device_blocks: int,
        num_host_blocks: int = 0,
        enable_prefix_caching: bool = True,
        num_resident_blocks: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`num_resident_blocks`: device blocks that keep their memory while nobody needs so many (default: all)."""
        self.block_size = block_size
        self.device = BlockPool(
            num_device_blocks, max(block_size // _MIN_OPENING_SHARE, 1), num_resident=num_resident_blocks
        )
        self._residency = Residency(self.device, clock)
        # A larger host pool could never be emptied again by the device pool it serves.
        self.host = BlockPool(min(num_host_blocks, num_device_blocks))
        self._enable_prefix_caching = enable_prefix_caching
        self._tables: dict[int, BlockTable] = {}
        self._block_ops = BlockOps()
        self._replaced: list[tuple[int, int, int]] = []
        # Sequences of which this step completes a block: it may be found once the step has been computed.
        self._completing: list[Sequence] = []
        # Blocks that this step copies from: nobody may overwrite them before.
        self._pinned: list[Block] = []
        # Whether all tokens that count as computed are so: not while a step is under way, nor after one that failed.
        self._is_settled = True
        # Totals since the start.
        self.num_swapped_out_blocks = 0
        self.num_swapped_in_blocks = 0
        self.num_copied_blocks = 0

    # -- lives of sequences --------------------------------------------------------------------------------------------

    def open(self, sequence: Sequence, request: Request, *, num_findable_tokens: int | None = None) -> None:
        """Give a sequence its (empty) table. Blocks beyond `num_findable_tokens` are never shown to others."""
        if not self._enable_prefix_caching:
            num_findable_tokens = 0
        max_findable = sys.maxsize if num_findable_tokens is None else num_findable_tokens // self.block_size
        root = root_digest(self.block_size, request.adapter, request.cache_salt) if max_findable else b""
        self._tables[sequence.seq_id] = BlockTable(root, max_findable)

    def fork(self, parent: Sequence, child: Sequence, *, num_unsent: int = 0) -> None:
        """`child` starts with all blocks of `parent`, and copies the last one when it first writes into it.

        `num_unsent`: how many of them the child's row will not know, because it is made from the parent's row as that
        was before this step.
        """
        source = self._tables[parent.seq_id]
        table = BlockTable(source.root, source.max_findable)
        table.digests = source.digests.copy()
        self._tables[child.seq_id] = table
        self._share(source, table, len(source.blocks))
        table.num_registered = source.num_registered
        table.due = source.due
        table.num_sent = source.num_sent - num_unsent
        child.num_computed_tokens = parent.num_computed_tokens

    def attach(self, source: Sequence, sequence: Sequence, num_tokens: int) -> None:
        """A sequence without blocks shares those of the first `num_tokens` tokens, which `source` has computed."""
        table = self._tables[sequence.seq_id]
        assert not table.blocks and num_tokens <= source.num_computed_tokens
        self._share(self._tables[source.seq_id], table, -(-num_tokens // self.block_size))
        table.due = 0
        sequence.num_computed_tokens = num_tokens

    def release(self, sequence: Sequence) -> None:
        """Give all blocks back; the table stays, empty, and nothing is computed."""
        self._empty(sequence, self._tables[sequence.seq_id])
        sequence.num_computed_tokens = 0

    def close(self, sequence: Sequence) -> None:
        """Give all blocks back and forget the table."""
        self._empty(sequence, self._tables.pop(sequence.seq_id))

    def row_block_ids(self, sequence: Sequence) -> list[int]:
        """The whole table, for a worker that has no row of this sequence."""
        table = self._tables[sequence.seq_id]
        table.num_sent = len(table.blocks)
        return table.block_ids

    # -- writing -------------------------------------------------------------------------------------------------------

    def num_blocks_of(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def num_missing_blocks(self, sequences: Seq[Sequence], ends: Seq[int]) -> int:
        """Exactly how many free blocks it takes that each sequence may write up to its end, copies included."""
        block_size = self.block_size
        missing = 0
        writers: dict[Block, int] = {}
        for sequence, end in zip(sequences, ends, strict=True):
            blocks = self._tables[sequence.seq_id].blocks
            first = sequence.num_computed_tokens // block_size
            num_blocks = -(-end // block_size)
            if num_blocks > len(blocks):
                missing += num_blocks - len(blocks)
            if first < len(blocks) and blocks[first].ref_count > 1 and end > sequence.num_computed_tokens:
                writers[blocks[first]] = writers.get(blocks[first], 0) + 1
        for block, count in writers.items():
            # Where all its holders write, the last one keeps the block.
            missing += count if block.ref_count > count else count - 1
        return missing

    def write(self, sequence: Sequence, end: int) -> list[int] | None:
        """Make room for the tokens from `num_computed_tokens` to `end`; None, and no change, where blocks are lacking.

        Returns the ids of blocks that the sequence's row does not know yet. A shared block that would be written into
        is copied first, unless this sequence is the last that holds it.
        """
        table = self._tables[sequence.seq_id]
        blocks = table.blocks
        block_size = self.block_size
        num_blocks = len(blocks)
        missing = -(-end // block_size) - num_blocks
        first = sequence.num_computed_tokens // block_size
        copies = first < num_blocks and blocks[first].ref_count > 1
        if missing > 0 or copies:
            if max(missing, 0) + copies > self.device.num_free:
                return None
            if copies:
                self._copy_on_write(sequence.seq_id, table, first)
            for _ in range(missing):
                blocks.append(self.device.allocate())
        if end >= table.due:
            self._completing.append(sequence)
            if first < num_blocks:
                self.device.overwrite(blocks[first], sequence.num_computed_tokens % block_size)
        num_sent = table.num_sent
        if num_sent == len(blocks):
            return _NO_BLOCKS
        table.num_sent = len(blocks)
        return [block.block_id for block in blocks[num_sent:]]

    def commit(self) -> None:
        """The step has been computed: blocks that it completed can be found from now on, and the end of a prompt."""
        self._is_settled = True
        block_size = self.block_size
        for sequence in self._completing:
            table = self._tables.get(sequence.seq_id)
            if table is None or table.on_host:
                continue
            num_computed, num_prompt_tokens = sequence.num_computed_tokens, sequence.num_prompt_tokens
            num_full = num_computed // block_size
            self._register(sequence, table, min(num_full, table.max_findable))
            if num_full >= table.max_findable:
                table.num_registered = table.due = sys.maxsize
                continue
            table.num_registered = num_full
            table.due = (num_full + 1) * block_size
            if num_computed < num_prompt_tokens:
                table.due = min(table.due, num_prompt_tokens)
            elif num_computed == num_prompt_tokens:
                self._register_tail(sequence, table)
        self._completing.clear()

    def rollback(self) -> None:
        """The step failed: nothing that it completed may be found."""
        self._completing.clear()

    def take_block_ops(self) -> tuple[BlockOps, list[tuple[int, int, int]]]:
        """What is due to blocks before the next forward, and the table entries that copy-on-write replaced."""
        self._is_settled = False
        for block in self._pinned:
            self.device.release(block)
        self._pinned.clear()
        self._block_ops.discard = self._residency.take_unneeded()
        taken = self._block_ops, self._replaced
        if taken[0] or taken[1]:
            self._block_ops, self._replaced = BlockOps(), []
            return taken
        return BlockOps(), []

    # -- prefix cache --------------------------------------------------------------------------------------------------

    def num_blocks_to_admit(self, sequence: Sequence, *, use_prefix: bool, exact: bool = False) -> int:
        """Free blocks that all tokens of a sequence without blocks would take; hits on held blocks cost none.

        Unless `exact`, asking again while nothing has changed around the first miss costs two look-ups, however long
        the prompt: the answer may be out of date, but is of use to whoever waits.
        """
        num_blocks = -(-len(sequence.token_ids) // self.block_size)
        table = self._tables[sequence.seq_id]
        if not use_prefix or not table.max_findable:
            return num_blocks
        digests = self._prompt_digests(sequence, table)
        if table.num_hits is not None and not exact:
            hits, held = table.num_hits
            first_hit_stays = hits == 0 or self.device.find(digests[hits - 1]) is not None
            if first_hit_stays and (hits == len(digests) or self.device.find(digests[hits]) is None):
                return num_blocks - held
        found = self._hits(digests)
        held = sum(block.ref_count > 0 for block in found)
        table.num_hits = (len(found), held)
        return num_blocks - held

    def take_prefix(self, sequence: Sequence) -> int:
        """Share the longest prefix that is in the cache, and hold it at once; returns its number of tokens.

        The last token is never among them: it must be computed for its logits. Behind the last full block that was
        found, a block that begins as the prompt goes on is shared too: the first write copies it, as it would a
        sibling's. The tail of a finished sequence that the prompt continues is simply written on.
        """
        table = self._tables[sequence.seq_id]
        assert not table.blocks
        if not table.max_findable:
            return 0
        found = self._hits(self._prompt_digests(sequence, table))
        for block in found:
            self.device.retain(block)
        table.blocks = found
        table.num_registered = len(found) if len(found) < table.max_findable else sys.maxsize
        table.due = 0
        sequence.num_computed_tokens = len(found) * self.block_size
        sequence.num_computed_tokens += self._take_opening(sequence, table)
        return sequence.num_computed_tokens

    def reset_prefix_cache(self) -> None:
        """Nothing computed so far is ever found again; running sequences keep their blocks, hidden from others."""
        self.device.forget_all()
        for table in self._tables.values():
            if table.blocks:
                table.max_findable = 0
                table.num_registered = table.due = sys.maxsize
            table.num_hits = None

    # -- preemption ----------------------------------------------------------------------------------------------------

    def num_held_blocks(self, sequences: Iterable[Sequence]) -> int:
        """Different blocks that these sequences hold, on either side."""
        return len({block for s in sequences for block in self._tables[s.seq_id].blocks})

    def num_held_tokens(self, sequences: Iterable[Sequence]) -> int:
        """Computed tokens in these blocks, those that several sequences share counted once."""
        seen: set[Block] = set()
        num_tokens = 0
        for sequence in sequences:
            for index, block in enumerate(self._tables[sequence.seq_id].blocks):
                if block not in seen:
                    seen.add(block)
                    num_tokens += min(self.block_size, sequence.num_computed_tokens - index * self.block_size)
        return num_tokens

    def swap_out(self, sequences: Seq[Sequence]) -> bool:
        """Move all blocks to the host, each once however many share it; False, and no change, if they do not fit."""
        tables = [self._tables[s.seq_id] for s in sequences]
        unique = dict.fromkeys(block for table in tables for block in table.blocks)
        if len(unique) > self.host.num_free:
            return False
        moved = {block: self.host.allocate() for block in unique}
        self._block_ops.swap_out += [(block.block_id, target.block_id) for block, target in moved.items()]
        self.num_swapped_out_blocks += len(moved)
        self._move(tables, moved, self.device, self.host)
        for block in unique:
            if block.ref_count == 0:
                self.device.discard(block)
        return True

    def swap_in(self, sequences: Seq[Sequence]) -> None:
        """Move all blocks back; the device must have `num_held_blocks(sequences)` free.

        What the device can still (or again) find is shared instead of copied.
        """
        tables = [self._tables[s.seq_id] for s in sequences]
        moved: dict[Block, Block] = {}
        for sequence, table in zip(sequences, tables, strict=True):
            num_findable = min(sequence.num_computed_tokens // self.block_size, len(table.digests), table.max_findable)
            for index, block in enumerate(table.blocks):
                if block in moved:
                    continue
                found = self.device.find(table.digests[index]) if index < num_findable else None
                if found is not None:
                    self.device.retain(found)
                    moved[block] = found
                else:
                    moved[block] = self.device.allocate()
                    self._block_ops.swap_in.append((block.block_id, moved[block].block_id))
                    self.num_swapped_in_blocks += 1
            if table.max_findable:
                table.num_registered = table.due = 0
        self._move(tables, moved, self.host, self.device)

    # -- proof ---------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Prove the accounts of both pools; AssertionError tells what is wrong."""
        for pool, on_host, pinned in ((self.device, False, self._pinned), (self.host, True, [])):
            held = (block for t in self._tables.values() if t.on_host is on_host for block in t.blocks)
            pool.check(chain(held, pinned))
        for seq_id, table in self._tables.items():
            assert table.num_sent <= len(table.blocks), f"sequence {seq_id}: more blocks sent than there are"
            assert len(set(table.blocks)) == len(table.blocks), f"sequence {seq_id} has a block twice"

    @property
    def num_free_blocks(self) -> int:
        """Free blocks of the device."""
        return self.device.num_free

    @property
    def num_tables(self) -> int:
        """Live sequences."""
        return len(self._tables)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _share(self, source: BlockTable, table: BlockTable, num_blocks: int) -> None:
        table.blocks = source.blocks[:num_blocks]
        table.max_findable = min(table.max_findable, source.max_findable)
        for block in table.blocks:
            self.device.retain(block)

    def _empty(self, sequence: Sequence, table: BlockTable) -> None:
        if self._is_settled and not table.on_host:
            self._register_tail(sequence, table)
        pool = self.host if table.on_host else self.device
        for block in reversed(table.blocks):
            pool.release(block)
        table.blocks = []
        table.num_sent = 0
        table.num_registered = table.due = 0
        table.num_hits = None
        table.on_host = False

    def _copy_on_write(self, seq_id: int, table: BlockTable, index: int) -> None:
        shared, own = table.blocks[index], self.device.allocate()
        self._block_ops.copy.append((shared.block_id, own.block_id))
        self.num_copied_blocks += 1
        self.device.release(shared)
        table.blocks[index] = own
        if index < table.num_sent:
            self._replaced.append((seq_id, index, own.block_id))

    def _register(self, sequence: Sequence, table: BlockTable, num_blocks: int) -> None:
        """Enter the first `num_blocks` blocks, all full, into the index."""
        start = table.num_registered
        if start >= num_blocks:
            return
        token_ids, digests, block_size = sequence.token_ids, table.digests, self.block_size
        extend_digests(digests, num_blocks, token_ids, block_size, table.root)
        parent = digests[start - 1] if start else table.root
        for index in range(start, num_blocks):
            digest = digests[index]
            place = index * block_size
            self.device.register(table.blocks[index], digest, parent, token_ids[place : place + block_size])
            parent = digest

    def _register_tail(self, sequence: Sequence, table: BlockTable) -> None:
        """Let the partly filled last block be found by what it begins with."""
        num_full = sequence.num_computed_tokens // self.block_size
        if num_full >= min(len(table.blocks), table.max_findable):
            return
        extend_digests(table.digests, num_full, sequence.token_ids, self.block_size, table.root)
        parent = table.digests[num_full - 1] if num_full else table.root
        tail = sequence.token_ids[num_full * self.block_size : sequence.num_computed_tokens]
        self.device.register_opening(table.blocks[num_full], parent, tail)

    def _take_opening(self, sequence: Sequence, table: BlockTable) -> int:
        """Share the block with the most of the tokens after the table's; returns how many it has."""
        num_blocks = len(table.blocks)
        start = num_blocks * self.block_size
        wanted = sequence.token_ids[start : min(start + self.block_size, len(sequence.token_ids) - 1)]
        found = self.device.find_opening(table.digests[num_blocks - 1] if num_blocks else table.root, wanted)
        if found is None:
            return 0
        block, num_tokens = found
        is_free = block.ref_count == 0
        assert block.opening is not None
        if not is_free or block.digest is not None or num_tokens < len(block.opening[1]):
            # Its content is of use to others. A free one is held beside its copy until the step has run.
            num_blocks_to_come = self.num_blocks_of(len(sequence.token_ids)) - num_blocks
            if is_free and self.device.num_free <= num_blocks_to_come:
                return 0
            self.device.retain(block)
            self._pinned.append(block)
        self.device.retain(block)
        table.blocks.append(block)
        return num_tokens

    def _prompt_digests(self, sequence: Sequence, table: BlockTable) -> list[bytes]:
        """Digests of the blocks that a look-up may use: full, findable, and without the last token."""
        limit = min((len(sequence.token_ids) - 1) // self.block_size, table.max_findable)
        extend_digests(table.digests, limit, sequence.token_ids, self.block_size, table.root)
        return table.digests if len(table.digests) == limit else table.digests[:limit]

    def _hits(self, digests: list[bytes]) -> list[Block]:
        found = []
        for digest in digests:
            block = self.device.find(digest)
            if block is None:
                break
            found.append(block)
        return found

    def _move(self, tables: list[BlockTable], moved: dict[Block, Block], source: BlockPool, target: BlockPool) -> None:
        """Point tables at the other pool. A new block comes with one reference, for the first table that takes it."""
        taken: set[Block] = set()
        for table in tables:
            for block in reversed(table.blocks):
                source.release(block)
            for index, block in enumerate(table.blocks):
                table.blocks[index] = moved[block]
                if block in taken:
                    target.retain(moved[block])
                taken.add(block)
            table.num_sent = 0
            table.on_host = target is self.host
