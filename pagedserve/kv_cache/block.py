"""Block: one physical KV block of a pool."""

from __future__ import annotations


class Block:
    """`block_size` token slots at place `block_id` of a pool.

    `ref_count` is the number of block tables that hold it; 0 means it waits in the pool's free queue. A `digest` names
    the content of a full block (see `prefix_hash`), and stays while the block is free, until its space is needed.
    """

    __slots__ = ("block_id", "digest", "ref_count")

    def __init__(self, block_id: int):
        self.block_id = block_id
        self.ref_count = 0
        self.digest: bytes | None = None

    def __repr__(self) -> str:
        name = self.digest.hex()[:8] if self.digest else "-"
        return f"Block({self.block_id}, refs={self.ref_count}, digest={name})"
