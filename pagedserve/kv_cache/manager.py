"""KVCacheManager: the only face of the KV cache that the scheduler sees.

It answers in counts and block ids, and gathers the copies that the next step must make (`take_block_ops`). Blocks are
taken when a token needs them and not before, so a sequence wastes less than one block; those that a sliding window has
left behind go back after each step. Design: PagedAttention (Kwon et al., SOSP 2023). Where layers form several groups
(see `geometry`), a list of block ids is that of the first group, then that of the second, and so on, equally long.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from itertools import chain

from pagedserve.kv_cache.block import Block
from pagedserve.kv_cache.block_pool import BlockPool
from pagedserve.kv_cache.block_table import PASSED, BlockTable
from pagedserve.kv_cache.geometry import Geometry
from pagedserve.kv_cache.prefix_cache import PrefixCache
from pagedserve.kv_cache.prefix_hash import root_digest
from pagedserve.kv_cache.residency import Residency
from pagedserve.sequence import Request, Sequence
from pagedserve.step import BlockOps

# Sequences of which a step completes a block, or the prompt, or leaves a block behind; and where what it computes ends.
Writes = list[tuple[Sequence, int]]

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
        windows: tuple[int | None, ...] = (None,),
        max_step_tokens: int = sys.maxsize,
        num_resident_blocks: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`windows` and `max_step_tokens`: see `Geometry`. `num_resident_blocks`: device blocks that keep their memory
        while nobody needs so many (default: all)."""
        self.block_size = block_size
        self.geometry = Geometry(block_size=block_size, windows=windows, max_step_tokens=max_step_tokens)
        self.device = BlockPool(
            num_device_blocks, max(block_size // _MIN_OPENING_SHARE, 1), num_resident=num_resident_blocks
        )
        self._residency = Residency(self.device, clock)
        # A larger host pool could never be emptied again by the device pool it serves.
        self.host = BlockPool(min(num_host_blocks, num_device_blocks))
        self.num_groups = self.geometry.num_groups
        self._prefixes = PrefixCache(self.device, self.geometry)
        self._has_windows = self.geometry.has_windows
        self._enable_prefix_caching = enable_prefix_caching
        self._tables: dict[int, BlockTable] = {}
        self._block_ops = BlockOps()
        self._replaced: list[tuple[int, int, int, int]] = []
        self._writes: Writes = []
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
        self._tables[sequence.seq_id] = BlockTable(root, max_findable, self.num_groups)

    def fork(self, parent: Sequence, child: Sequence, *, num_unsent: int = 0) -> None:
        """`child` starts with all blocks of `parent`, and copies the last one when it first writes into it.

        `num_unsent`: how many of them the child's row will not know, because it is made from the parent's row as that
        was before this step.
        """
        source = self._tables[parent.seq_id]
        table = BlockTable(source.root, source.max_findable, self.num_groups)
        table.digests = source.digests.copy()
        self._tables[child.seq_id] = table
        self._share(table, [lane.copy() for lane in source.lanes], source.num_passed.copy())
        table.num_registered, table.due = source.num_registered, source.due
        table.num_sent = source.num_sent - num_unsent
        child.num_computed_tokens = parent.num_computed_tokens

    def can_attach(self, source: Sequence, num_tokens: int) -> bool:
        """Whether `source` still has all that the token after its first `num_tokens` sees."""
        num_passed = self._tables[source.seq_id].num_passed
        return all(num_passed[g] <= self.geometry.num_passed(g, num_tokens) for g in range(self.num_groups))

    def attach(self, source: Sequence, sequence: Sequence, num_tokens: int) -> None:
        """A sequence without blocks shares those of the first `num_tokens` tokens, which `source` has computed."""
        table, other = self._tables[sequence.seq_id], self._tables[source.seq_id]
        assert not len(table) and num_tokens <= source.num_computed_tokens
        table.max_findable = min(table.max_findable, other.max_findable)
        num_blocks = -(-num_tokens // self.block_size)
        num_passed = [self.geometry.num_passed(group, num_tokens) for group in range(self.num_groups)]
        lanes = [[PASSED] * n + lane[n:num_blocks] for n, lane in zip(num_passed, other.lanes, strict=True)]
        self._share(table, lanes, num_passed)
        sequence.num_computed_tokens = num_tokens

    def release(self, sequence: Sequence) -> None:
        """Give all blocks back; the table stays, empty, and nothing is computed.

        What counts as computed now can be found by others, so it must not be more than what steps have brought back.
        """
        self._empty(sequence, self._tables[sequence.seq_id])
        sequence.num_computed_tokens = 0

    def close(self, sequence: Sequence) -> None:
        """Give all blocks back and forget the table; for what can be found then, see `release`."""
        self._empty(sequence, self._tables.pop(sequence.seq_id))

    def row_block_ids(self, sequence: Sequence) -> list[int]:
        """The whole table, for a worker that has no row of this sequence."""
        table = self._tables[sequence.seq_id]
        table.num_sent = len(table)
        return [block.block_id for lane in table.lanes for block in lane]

    # -- writing -------------------------------------------------------------------------------------------------------

    def num_blocks_of(self, num_tokens: int, num_shared_tokens: int = 0) -> int:
        """Most blocks held at once until there are `num_tokens` tokens, but for those of the first, shared ones."""
        return self.geometry.num_blocks_of(num_tokens, num_shared_tokens)

    def num_missing_blocks(self, sequences: Seq[Sequence], ends: Seq[int]) -> int:
        """Exactly how many free blocks it takes that each sequence may write up to its end, copies included."""
        block_size = self.block_size
        missing = 0
        writers: dict[Block, int] = {}
        for sequence, end in zip(sequences, ends, strict=True):
            table = self._tables[sequence.seq_id]
            first = sequence.num_computed_tokens // block_size
            num_blocks = len(table)
            if end > num_blocks * block_size:
                missing += (-(-end // block_size) - num_blocks) * len(table.lanes)
            if end > sequence.num_computed_tokens:
                for block in table.shared_blocks(first, end):
                    writers[block] = writers.get(block, 0) + 1
        for block, count in writers.items():
            # Where all its holders write, the last one keeps the block.
            missing += count if block.ref_count > count else count - 1
        return missing

    def num_blocks_to_come(self, sequences: Seq[Sequence]) -> int:
        """Free blocks that these sequences will take until all tokens they have are computed."""
        ends = [sequence.num_tokens for sequence in sequences]
        if not self._has_windows:
            return self.num_missing_blocks(sequences, ends)
        missing = 0
        for sequence, end in zip(sequences, ends, strict=True):
            table = self._tables[sequence.seq_id]
            num_new = -(-end // self.block_size) - len(table)
            for group, num_passed in enumerate(table.num_passed):
                missing += max(min(num_new, self.geometry.most_blocks(group) - len(table) + num_passed), 0)
        return missing

    def write(self, sequence: Sequence, end: int) -> list[int] | None:
        """Make room for the tokens from `num_computed_tokens` to `end`; None, and no change, where blocks are lacking.

        Returns the ids of blocks that the sequence's row does not know yet. A shared block that would be written into
        is copied first, unless this sequence is the last that holds it.
        """
        table = self._tables[sequence.seq_id]
        blocks = table.lanes[0]
        block_size = self.block_size
        num_blocks = len(blocks)
        first = sequence.num_computed_tokens // block_size
        if (
            end >= table.due or end > num_blocks * block_size or (first < num_blocks and blocks[first].ref_count > 1)
        ) and not self._make_ready(sequence, table, end):
            return None
        num_sent = table.num_sent
        num_blocks = len(blocks)
        if num_sent == num_blocks:
            return _NO_BLOCKS
        table.num_sent = num_blocks
        return [block.block_id for lane in table.lanes for block in lane[num_sent:]]

    def _make_ready(self, sequence: Sequence, table: BlockTable, end: int) -> bool:
        """Copy, allocate and note down what the tokens up to `end` ask for; False, and no change, if blocks lack."""
        block_size = self.block_size
        lanes = table.lanes
        num_blocks = len(lanes[0])
        missing = -(-end // block_size) - num_blocks
        first, num_kept = divmod(sequence.num_computed_tokens, block_size)
        is_inside = first < num_blocks
        num_copies = len(table.shared_blocks(first, end))
        if max(missing, 0) * len(lanes) + num_copies > self.device.num_free:
            return False
        if num_copies:
            self._copy_on_write(sequence.seq_id, table, first)
        for _ in range(missing):
            for lane in lanes:
                lane.append(self.device.allocate())
        if end >= table.due:
            self._writes.append((sequence, end))
            if is_inside:
                for lane in lanes:
                    self.device.overwrite(lane[first], num_kept)
        return True

    def take_writes(self) -> Writes:
        """What the step that was just decided will complete: for `commit`, once it has."""
        writes, self._writes = self._writes, []
        return writes

    def commit(self, writes: Writes) -> None:
        """A step has been computed: blocks that it completed can be found from now on, and the end of a prompt; those
        that it left behind are free."""
        block_size = self.block_size
        for sequence, num_computed in writes:
            table = self._tables.get(sequence.seq_id)
            if table is None or table.on_host or sequence.num_computed_tokens < num_computed:
                continue  # it ended, or lost its blocks
            num_prompt_tokens = sequence.num_prompt_tokens
            num_full = num_computed // block_size
            self._prefixes.register(sequence, table, min(num_full, table.max_findable))
            if num_full >= table.max_findable:
                table.num_registered = table.due = sys.maxsize
            else:
                table.num_registered = num_full
                table.due = (num_full + 1) * block_size
                if num_computed < num_prompt_tokens:
                    table.due = min(table.due, num_prompt_tokens)
                elif num_computed == num_prompt_tokens:
                    self._prefixes.register_tail(sequence, table)
            if self._has_windows:
                self._slide(table, num_computed)

    def take_block_ops(self) -> tuple[BlockOps, list[tuple[int, int, int, int]]]:
        """What is due to blocks before the next forward, and the table entries that copy-on-write replaced."""
        self._prefixes.unpin()
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
        num_tokens = len(sequence.token_ids)
        table = self._tables[sequence.seq_id]
        if not use_prefix or not table.max_findable:
            return self.num_blocks_of(num_tokens)
        digests = self._prefixes.digests_of(sequence, table)
        if table.num_hits is not None and not exact:
            num_hits, num_blocks = table.num_hits
            if self._prefixes.is_usable_still(digests, num_hits):
                return num_blocks
        num_hits = self._prefixes.num_usable(digests)
        num_blocks = self.num_blocks_of(num_tokens, num_hits * self.block_size)
        for lane in self._prefixes.lanes(digests, num_hits):
            num_blocks += sum(block.ref_count == 0 for block in lane if block is not PASSED)
        table.num_hits = (num_hits, num_blocks)
        return num_blocks

    def take_prefix(self, sequence: Sequence) -> int:
        """Share the longest prefix that is in the cache, and hold it at once; returns its number of tokens.

        The last token is never among them: it must be computed for its logits. Behind the last full block that was
        found, a block that begins as the prompt goes on is shared too: the first write copies it, as it would a
        sibling's. The tail of a finished sequence that the prompt continues is simply written on.
        """
        table = self._tables[sequence.seq_id]
        assert not len(table)
        if not table.max_findable:
            return 0
        digests = self._prefixes.digests_of(sequence, table)
        num_hits = self._prefixes.num_usable(digests)
        num_tokens = num_hits * self.block_size
        num_passed = [self.geometry.num_passed(group, num_tokens) for group in range(self.num_groups)]
        self._share(table, self._prefixes.lanes(digests, num_hits), num_passed)
        table.num_registered = num_hits if num_hits < table.max_findable else sys.maxsize
        sequence.num_computed_tokens = num_tokens + self._prefixes.take_opening(sequence, table)
        return sequence.num_computed_tokens

    def reset_prefix_cache(self) -> None:
        """Nothing computed so far is ever found again; running sequences keep their blocks, hidden from others."""
        self.device.forget_all()
        for table in self._tables.values():
            if len(table):
                table.max_findable = table.due = 0
                table.num_registered = sys.maxsize
            table.num_hits = None

    # -- preemption ----------------------------------------------------------------------------------------------------

    def num_held_blocks(self, sequences: Iterable[Sequence]) -> int:
        """Different blocks that these sequences hold, on either side."""
        return len({block for s in sequences for block in self._tables[s.seq_id].blocks})

    def num_held_tokens(self, sequences: Iterable[Sequence]) -> int:
        """Computed tokens that would be lost with these blocks, those that several sequences share counted once."""
        seen: set[Block] = set()
        num_tokens = num_passed_tokens = 0
        for sequence in sequences:
            table = self._tables[sequence.seq_id]
            num_passed = table.num_passed[self.geometry.widest]
            # Siblings have most of what has passed in common: their prompt.
            num_passed_tokens = max(num_passed_tokens, num_passed * self.block_size)
            for index, block in enumerate(table.lanes[self.geometry.widest]):
                if index >= num_passed and block not in seen:
                    seen.add(block)
                    num_tokens += min(self.block_size, sequence.num_computed_tokens - index * self.block_size)
        return num_tokens + num_passed_tokens

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
            for group, lane in enumerate(table.lanes):
                for index, block in enumerate(lane):
                    if block in moved or block is PASSED:
                        continue
                    found = self._prefixes.find(table.digests[index], group) if index < num_findable else None
                    if found is not None:
                        self.device.retain(found)
                        moved[block] = found
                    else:
                        moved[block] = self.device.allocate()
                        self._block_ops.swap_in.append((block.block_id, moved[block].block_id))
                        self.num_swapped_in_blocks += 1
            if table.max_findable:
                table.num_registered = 0
            table.due = 0
        self._move(tables, moved, self.host, self.device)

    # -- proof ---------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Prove the accounts of both pools; AssertionError tells what is wrong."""
        for pool, on_host, pinned in ((self.device, False, self._prefixes.pinned), (self.host, True, [])):
            held = (block for t in self._tables.values() if t.on_host is on_host for block in t.blocks)
            pool.check(chain(held, pinned))
        for seq_id, table in self._tables.items():
            assert table.num_sent <= len(table), f"sequence {seq_id}: more blocks sent than there are"
            assert len(set(table.blocks)) == len(table.blocks), f"sequence {seq_id} has a block twice"
            for lane, num_passed in zip(table.lanes, table.num_passed, strict=True):
                assert len(lane) == len(table), f"sequence {seq_id}: lanes of different lengths"
                assert [block is PASSED for block in lane] == [i < num_passed for i in range(len(lane))]

    @property
    def num_free_blocks(self) -> int:
        """Free blocks of the device."""
        return self.device.num_free

    @property
    def num_tables(self) -> int:
        """Live sequences."""
        return len(self._tables)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _share(self, table: BlockTable, lanes: list[list[Block]], num_passed: list[int]) -> None:
        table.lanes, table.num_passed = lanes, num_passed
        table.due = 0
        for block in table.blocks:
            self.device.retain(block)

    def _empty(self, sequence: Sequence, table: BlockTable) -> None:
        if not table.on_host:
            self._prefixes.register_tail(sequence, table)
        pool = self.host if table.on_host else self.device
        for block in reversed(table.blocks):
            pool.release(block)
        table.clear(self.num_groups)

    def _copy_on_write(self, seq_id: int, table: BlockTable, index: int) -> None:
        for group, lane in enumerate(table.lanes):
            shared = lane[index]
            if shared.ref_count == 1:
                continue
            own = lane[index] = self.device.allocate()
            self._block_ops.copy.append((shared.block_id, own.block_id))
            self.num_copied_blocks += 1
            self.device.release(shared)
            if index < table.num_sent:
                self._replaced.append((seq_id, index, own.block_id, group))

    def _slide(self, table: BlockTable, position: int) -> None:
        """Give back what the token at `position` cannot see, and come again when more has passed."""
        for group, window in enumerate(self.geometry.windows):
            if window is None:
                continue
            lane, start = table.lanes[group], table.num_passed[group]
            end = max(self.geometry.num_passed(group, position), start)
            for index in range(start, end):
                self.device.release(lane[index])
                lane[index] = PASSED
            table.num_passed[group] = end
            table.due = min(table.due, (end + 1) * self.block_size + window - 1)

    def _move(self, tables: list[BlockTable], moved: dict[Block, Block], source: BlockPool, target: BlockPool) -> None:
        """Point tables at the other pool. A new block comes with one reference, for the first table that takes it."""
        taken: set[Block] = set()
        for table in tables:
            for block in reversed(table.blocks):
                source.release(block)
            for lane in table.lanes:
                for index, block in enumerate(lane):
                    if block is PASSED:
                        continue
                    lane[index] = moved[block]
                    if block in taken:
                        target.retain(moved[block])
                    taken.add(block)
            table.num_sent = 0
            table.on_host = target is self.host
