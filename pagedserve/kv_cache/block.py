"""Block: one physical KV block of a pool."""

from __future__ import annotations

from array import array


class Block:
    """`block_size` token slots at place `block_id` of a pool.

    `ref_count` is the number of block tables that hold it; 0 means it waits in the pool's free queue. A `digest` names
    the content of a full block (see `prefix_hash`); `opening` are the tokens of a full or partly filled one, and the
    key under which `openings` has it. Both stay while the block is free, until its space is needed.
    """

    __slots__ = ("block_id", "digest", "opening", "ref_count")

    def __init__(self, block_id: int):
        self.block_id = block_id
        self.ref_count = 0
        self.digest: bytes | None = None
        self.opening: tuple[tuple[object, ...], array[int]] | None = None

    def __repr__(self) -> str:
        name = self.digest.hex()[:8] if self.digest else "-"
        return f"Block({self.block_id}, refs={self.ref_count}, digest={name})"
