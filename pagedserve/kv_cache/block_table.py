"""BlockTable: from a sequence's logical blocks to physical ones."""

from __future__ import annotations

from pagedserve.kv_cache.block import Block

# Stands where a block has passed out of the window; the worker never reads the entry.
PASSED = Block(0)


class BlockTable:
    """Block i of a lane holds tokens `i * block_size` and on, of one layer group. All lanes are equally long.

    They grow at their end; copy-on-write replaces an entry, and the first `num_passed` of each lane have become PASSED.
    The first `num_sent` entries are known to the sequence's row in the worker. `digests` name the content of full
    blocks, each computed once, after `root`; at most `max_findable` blocks may be found by others, and the first
    `num_registered` have been entered into the pool's index. There is something to do once `due` tokens are computed.
    A table is whole on the device or whole on the host.
    """

    __slots__ = (
        "digests", "due", "lanes", "max_findable", "num_hits", "num_passed", "num_registered", "num_sent", "on_host",
        "root",
    )  # fmt: skip

    def __init__(self, root: bytes, max_findable: int, num_groups: int = 1):
        self.root = root
        self.max_findable = max_findable
        self.digests: list[bytes] = []
        self.clear(num_groups)

    def clear(self, num_groups: int) -> None:
        """No blocks; what they would be called stays."""
        self.lanes: list[list[Block]] = [[] for _ in range(num_groups)]
        self.num_passed = [0] * num_groups
        self.num_sent = 0
        self.on_host = False
        self.num_registered = 0
        self.due = 0
        # (blocks found, blocks to take for the rest) when the index was last walked for this table.
        self.num_hits: tuple[int, int] | None = None

    def __len__(self) -> int:
        return len(self.lanes[0])

    def shared_blocks(self, index: int, end: int) -> list[Block]:
        """Blocks at `index` that others hold too, so that tokens up to `end` cannot be written into them.

        Forks share all lanes. Who shares less, a block that begins as its own would, has not written yet, is due, and
        will copy it: until then its owner may write on behind what it shares.
        """
        if index >= len(self) or (end < self.due and self.lanes[0][index].ref_count == 1):
            return []
        return [lane[index] for lane in self.lanes if lane[index].ref_count > 1]

    @property
    def blocks(self) -> list[Block]:
        """All blocks that are held, the deepest last."""
        if len(self.lanes) == 1:
            return self.lanes[0][self.num_passed[0] :]
        return [block for column in zip(*self.lanes, strict=True) for block in column if block is not PASSED]
