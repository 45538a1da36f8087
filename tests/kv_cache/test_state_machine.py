"""Random lives of sequences over small pools: the accounts hold after every move, and no content is ever wrong.

The model of the memory is a list of tokens' prefixes for each block; it is written and copied as a worker would do it.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagedserve.kv_cache.block import Block
from pagedserve.kv_cache.block_pool import BlockPool
from pagedserve.kv_cache.manager import KVCacheManager
from pagedserve.sequence import Sequence
from tests.helpers.factories import make_request

BLOCK = 4


class PoolMachine(RuleBasedStateMachine):
    """BlockPool against a list of references and a dictionary of contents."""

    @initialize(num_blocks=st.integers(1, 6))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.held: list[Block] = []
        self.contents: dict[bytes, Block] = {}
        self.openings: dict[Block, list[int]] = {}

    @precondition(lambda self: self.pool.num_free)
    @rule()
    def allocate(self) -> None:
        block = self.pool.allocate()
        assert block not in self.held
        self.contents = {d: b for d, b in self.contents.items() if b is not block}
        self.openings.pop(block, None)
        self.held.append(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), digest=st.sampled_from([b"a", b"b", b"c"]))
    def register(self, data: st.DataObject, digest: bytes) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.pool.register(block, digest, b"parent", list(digest * 3))
        if digest not in self.contents and block not in self.contents.values():
            self.contents[digest] = block
            self.openings[block] = list(digest * 3)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), token_ids=st.lists(st.sampled_from(b"abc"), min_size=1, max_size=3))
    def register_opening(self, data: st.DataObject, token_ids: list[int]) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.pool.register_opening(block, b"parent", token_ids)
        if block not in self.contents.values() and len(token_ids) > len(self.openings.get(block, [])):
            self.openings[block] = token_ids

    @precondition(lambda self: self.held)
    @rule(data=st.data(), num_tokens=st.integers(0, 2))
    def overwrite(self, data: st.DataObject, num_tokens: int) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.pool.overwrite(block, num_tokens)
        if block in self.contents.values() or len(self.openings.get(block, [])) > num_tokens:
            self.contents = {d: b for d, b in self.contents.items() if b is not block}
            self.openings.pop(block, None)

    @rule(token_ids=st.lists(st.sampled_from(b"abc"), min_size=1, max_size=3))
    def find_opening(self, token_ids: list[int]) -> None:
        def common(block: Block) -> int:
            pairs = zip(self.openings[block], token_ids, strict=False)
            return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(self.openings[block]), len(token_ids)))

        longest = max(map(common, self.openings), default=0)
        found = self.pool.find_opening(b"parent", token_ids)
        assert (found[1] if found else 0) == longest
        assert found is None or common(found[0]) == longest

    @rule(digest=st.sampled_from([b"a", b"b", b"c"]))
    def find_and_retain(self, digest: bytes) -> None:
        block = self.pool.find(digest)
        assert block is self.contents.get(digest)
        if block is not None:
            self.pool.retain(block)
            self.held.append(block)

    @precondition(lambda self: self.contents)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        block = self.contents.pop(data.draw(st.sampled_from(sorted(self.contents))))
        self.pool.discard(block)
        del self.openings[block]

    @rule()
    def forget_all(self) -> None:
        self.pool.forget_all()
        self.contents.clear()
        self.openings.clear()

    @invariant()
    def accounts(self) -> None:
        self.pool.check(self.held)
        assert self.pool.num_free + len(set(self.held)) == self.pool.num_blocks


class ManagerMachine(RuleBasedStateMachine):
    """KVCacheManager against what the blocks hold."""

    @initialize(
        num_blocks=st.integers(2, 20),
        num_host_blocks=st.integers(0, 12),
        caching=st.booleans(),
        windows=st.sampled_from([(None,), (None,), (None,), (5,), (1,), (9,), (None, 6), (4, None, 7), (8, 8)]),
    )
    def start(self, num_blocks: int, num_host_blocks: int, caching: bool, windows: tuple[int | None, ...]) -> None:
        self.windows = windows
        self.manager = KVCacheManager(
            block_size=BLOCK,
            num_device_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            enable_prefix_caching=caching,
            windows=windows,
            max_step_tokens=9,
        )
        self.device = [[None] * BLOCK for _ in range(num_blocks)]
        self.host = [[None] * BLOCK for _ in range(self.manager.host.num_blocks)]
        self.live: list[Sequence] = []
        self.swapped: list[list[Sequence]] = []
        self.salts: dict[int, str | None] = {}
        self.next_id = 0

    def choose(self, data: st.DataObject) -> Sequence:
        return data.draw(st.sampled_from(self.live))

    @precondition(lambda self: len(self.live) < 6)
    @rule(token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=14), salt=st.sampled_from([None, None, "x"]))
    def open(self, token_ids: list[int], salt: str | None) -> None:
        sequence = self.new(token_ids, salt)
        self.manager.open(sequence, make_request(token_ids, cache_salt=salt))
        self.manager.take_prefix(sequence)
        assert sequence.num_computed_tokens < len(token_ids)

    def new(self, token_ids: list[int], salt: str | None) -> Sequence:
        self.next_id += 1
        sequence = Sequence(self.next_id, 0, list(token_ids), len(token_ids))
        self.live.append(sequence)
        self.salts[sequence.seq_id] = salt
        return sequence

    @precondition(lambda self: self.live)
    @rule(data=st.data(), num_tokens=st.integers(1, 9), token_id=st.integers(0, 1), succeeds=st.booleans())
    def compute(self, data: st.DataObject, num_tokens: int, token_id: int, succeeds: bool) -> None:
        sequence = self.choose(data)
        if not sequence.num_uncomputed_tokens:
            sequence.token_ids.append(token_id)
        start = sequence.num_computed_tokens
        end = min(start + num_tokens, len(sequence.token_ids))
        missing = self.manager.num_missing_blocks([sequence], [end])
        free = self.manager.num_free_blocks
        new_blocks = self.manager.write(sequence, end)
        assert (new_blocks is None) == (missing > free)
        assert self.manager.num_free_blocks == (free if new_blocks is None else free - missing)
        if new_blocks is None:
            return
        sequence.num_computed_tokens = end
        self.execute()
        for group, lane in enumerate(self.lanes(sequence)):
            for position in range(start, end):
                self.device[lane[position // BLOCK]][position % BLOCK] = self.content(sequence, position, group)
        if succeeds:
            self.manager.commit(self.manager.take_writes())
            table = self.manager._tables[sequence.seq_id]
            for group, window in enumerate(self.windows):
                if window is not None:
                    assert (len(table) - table.num_passed[group] - 1) * BLOCK < window + BLOCK - 1
                    assert len(table) - table.num_passed[group] <= self.manager.geometry.most_blocks(group)
        else:
            self.manager.take_writes()

    def lanes(self, sequence: Sequence) -> list[list[int]]:
        return [[block.block_id for block in lane] for lane in self.manager._tables[sequence.seq_id].lanes]

    def execute(self) -> None:
        ops, _ = self.manager.take_block_ops()
        for source, target in ops.swap_out:
            self.host[target] = self.device[source].copy()
        for source, target in ops.swap_in:
            self.device[target] = self.host[source].copy()
        for source, target in ops.copy:
            self.device[target] = self.device[source].copy()

    def content(self, sequence: Sequence, position: int, group: int) -> tuple[object, ...]:
        return (group, self.salts[sequence.seq_id], *sequence.token_ids[: position + 1])

    @precondition(lambda self: self.live and len(self.live) < 6)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = self.choose(data)
        child = self.new(parent.token_ids, self.salts[parent.seq_id])
        self.manager.fork(parent, child)

    @precondition(lambda self: len(self.live) > 1)
    @rule(data=st.data())
    def preempt_and_attach(self, data: st.DataObject) -> None:
        sequence, source = self.choose(data), self.choose(data)
        if sequence is source or self.salts[sequence.seq_id] != self.salts[source.seq_id]:
            return
        pairs = zip(sequence.token_ids, source.token_ids, strict=False)
        common = next(
            (i for i, (a, b) in enumerate(pairs) if a != b), min(map(len, (sequence.token_ids, source.token_ids)))
        )
        num_tokens = min(common, source.num_computed_tokens, len(sequence.token_ids) - 1)
        if self.manager.can_attach(source, num_tokens):
            self.manager.release(sequence)
            self.manager.attach(source, sequence, num_tokens)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def preempt_and_return(self, data: st.DataObject) -> None:
        sequence = self.choose(data)
        self.manager.release(sequence)
        self.manager.take_prefix(sequence)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        sequence = self.choose(data)
        self.live.remove(sequence)
        self.manager.close(sequence)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        group = data.draw(st.lists(st.sampled_from(self.live), min_size=1, max_size=3, unique_by=lambda s: s.seq_id))
        num_blocks, room = self.manager.num_held_blocks(group), self.manager.host.num_free
        assert self.manager.swap_out(group) == (num_blocks <= room)
        if num_blocks <= room:
            self.swapped.append(group)
            self.live = [s for s in self.live if s not in group]
            self.execute()

    @precondition(lambda self: self.swapped)
    @rule()
    def swap_in(self) -> None:
        group = self.swapped[0]
        if self.manager.num_held_blocks(group) <= self.manager.num_free_blocks:
            self.manager.swap_in(group)
            self.live += self.swapped.pop(0)
            self.execute()

    @precondition(lambda self: self.swapped)
    @rule()
    def close_on_the_host(self) -> None:
        for sequence in self.swapped.pop():
            self.manager.close(sequence)

    @rule()
    def reset(self) -> None:
        self.manager.reset_prefix_cache()

    @invariant()
    def accounts_and_contents(self) -> None:
        self.manager.check()
        for sequence in self.live:
            num_computed = sequence.num_computed_tokens
            assert len(self.manager._tables[sequence.seq_id]) == -(-num_computed // BLOCK)
            for group, lane in enumerate(self.lanes(sequence)):
                first = max(num_computed - self.windows[group] + 1, 0) if self.windows[group] else 0
                for position in range(first, num_computed):
                    found = self.device[lane[position // BLOCK]][position % BLOCK]
                    assert found == self.content(sequence, position, group)

    def teardown(self) -> None:
        for sequence in [*self.live, *(s for group in self.swapped for s in group)]:
            self.manager.close(sequence)
        self.manager.take_block_ops()
        self.manager.check()
        assert self.manager.device.usage == self.manager.host.usage == 0.0


TestPool = PoolMachine.TestCase
TestManager = ManagerMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestManager.settings = settings(max_examples=160, stateful_step_count=40, deadline=None)
