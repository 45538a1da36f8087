"""BlockTable: from a sequence's logical blocks to physical ones."""

from __future__ import annotations

from pagedserve.kv_cache.block import Block


class BlockTable:
    """Block i holds tokens `i * block_size` and on. Grows at its end; only copy-on-write replaces an entry.

    The first `num_sent` entries are known to the sequence's row in the worker. `digests` name the content of full
    blocks, each computed once, after `root`; at most `max_findable` blocks may be found by others, and the first
    `num_registered` have been entered into the pool's index; there is more to enter once `due` tokens are computed. A
    table is whole on the device or whole on the host.
    """

    __slots__ = (
        "blocks",
        "digests",
        "due",
        "max_findable",
        "num_hits",
        "num_registered",
        "num_sent",
        "on_host",
        "root",
    )

    def __init__(self, root: bytes, max_findable: int):
        self.blocks: list[Block] = []
        self.num_sent = 0
        self.on_host = False
        self.root = root
        self.max_findable = max_findable
        self.digests: list[bytes] = []
        self.num_registered = 0
        self.due = 0
        # (blocks found, of which held by others) when the index was last walked for this table.
        self.num_hits: tuple[int, int] | None = None

    @property
    def block_ids(self) -> list[int]:
        return [block.block_id for block in self.blocks]
