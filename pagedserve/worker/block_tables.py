"""Which blocks each row's tokens lie in: one int32 array that lives as long as the worker."""

from __future__ import annotations

import numpy as np


def grown(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """`array` with at least `shape`: itself, or a copy with each dimension that was too short at least doubled.

    Fresh space is zero and, being untouched, takes no memory yet.
    """
    if all(have >= want for have, want in zip(array.shape, shape, strict=True)):
        return array
    sizes = [have if have >= want else max(want, 2 * have) for have, want in zip(array.shape, shape, strict=True)]
    larger = np.zeros(sizes, dtype=array.dtype)
    larger[tuple(slice(0, have) for have in array.shape)] = array
    return larger


class BlockTables:
    """Rows of physical block ids in logical order, one row for each layer group.

    Lists of block ids come and go group after group, equally many of each.
    """

    def __init__(self, num_rows: int, num_blocks: int, block_size: int, num_groups: int = 1) -> None:
        """Room for `num_rows` tables of `num_blocks` blocks a group to begin with; both grow."""
        self.block_size = block_size
        self.num_groups = num_groups
        self.block_ids = np.zeros((num_groups, num_rows, num_blocks), dtype=np.int32)
        self.num_blocks = np.zeros(num_rows, dtype=np.int64)

    def grow(self, num_rows: int) -> None:
        self.block_ids = grown(self.block_ids, (self.num_groups, num_rows, self.block_ids.shape[2]))
        self.num_blocks = grown(self.num_blocks, (self.block_ids.shape[1],))

    def set(self, row: int, block_ids: list[int]) -> None:
        self.num_blocks[row] = 0
        self.append(row, block_ids)

    def append(self, row: int, block_ids: list[int]) -> None:
        columns = np.array(block_ids, dtype=np.int32).reshape(self.num_groups, -1)
        start = int(self.num_blocks[row])
        end = start + columns.shape[1]
        self.block_ids = grown(self.block_ids, (*self.block_ids.shape[:2], end))
        self.block_ids[:, row, start:end] = columns
        self.num_blocks[row] = end

    def replace(self, row: int, index: int, block_id: int, group: int) -> None:
        """Puts the copy that copy-on-write made in the place of the shared block."""
        if index >= self.num_blocks[row]:
            raise IndexError(f"block {index} of a row that has {self.num_blocks[row]}")
        self.block_ids[group, row, index] = block_id

    def copy(self, source: int, target: int) -> None:
        count = self.num_blocks[source]
        self.block_ids[:, target, :count] = self.block_ids[:, source, :count]
        self.num_blocks[target] = count

    def of(self, row: int) -> list[int]:
        """The row's table as a list of block ids."""
        return self.block_ids[:, row, : self.num_blocks[row]].reshape(-1).tolist()

    def gather(self, rows: np.ndarray, num_blocks: int) -> np.ndarray:
        """The first `num_blocks` entries of each of `rows`: int32 [num_groups, len(rows), num_blocks]."""
        return np.ascontiguousarray(self.block_ids[:, rows, :num_blocks])

    def slots(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """The slot (block * block_size + offset) of each token at (row, position): int64 [num_groups, num_tokens]."""
        index, offset = np.divmod(positions, self.block_size)
        # numpy lays the rows out first, while each group's slots are read as one array.
        return np.ascontiguousarray(self.block_ids[:, rows, index] * np.int64(self.block_size) + offset)
