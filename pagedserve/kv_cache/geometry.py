"""Geometry: how many blocks tokens take, where layers see only a window of what came before.

Layers with one window form a layer group, and groups hold equally many layers, so one pool serves them all: a physical
block holds `block_size` tokens of one group's layers. A sequence has a lane of blocks for each group. A block that the
next token of a group cannot see any more has passed: its place in the lane stays, the block goes back to the pool.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from pagedserve.step import KVCacheSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """`windows` has one entry for each layer group: a token sees itself and the window - 1 tokens before it, or all.

    `max_step_tokens` bounds what one step computes of a sequence, and so how far a window reaches at once.
    """

    block_size: int
    windows: tuple[int | None, ...] = (None,)
    max_step_tokens: int = sys.maxsize

    @classmethod
    def of(cls, spec: KVCacheSpec, max_step_tokens: int) -> Geometry:
        """That of a worker's pools."""
        return cls(block_size=spec.block_size, windows=spec.windows, max_step_tokens=max_step_tokens)

    @property
    def num_groups(self) -> int:
        return len(self.windows)

    @property
    def has_windows(self) -> bool:
        return any(window is not None for window in self.windows)

    @property
    def widest(self) -> int:
        """The group that sees furthest back."""
        return max(range(self.num_groups), key=lambda group: self.windows[group] or sys.maxsize)

    def num_passed(self, group: int, position: int) -> int:
        """Blocks of a lane that the token at `position` and all after it cannot see."""
        window = self.windows[group]
        return 0 if window is None else max(position - window + 1, 0) // self.block_size

    def num_blocks_of(self, num_tokens: int, num_shared_tokens: int = 0) -> int:
        """Most blocks that a sequence holds at once until it has `num_tokens`, but for its first, shared tokens."""
        num_blocks = -(-num_tokens // self.block_size) - num_shared_tokens // self.block_size
        return sum(min(num_blocks, self.most_blocks(group)) for group in range(self.num_groups))

    def most_blocks(self, group: int) -> int:
        """Most blocks that a lane holds at once: a window, what a step adds to it, and the cut blocks at both ends."""
        window = self.windows[group]
        return sys.maxsize if window is None else (window + self.max_step_tokens - 3) // self.block_size + 2

    def num_beam_blocks(self, num_prompt_tokens: int, num_tokens: int, width: int) -> int:
        """Most blocks that `width` beams hold at once until they have `num_tokens`, sharing nothing but the prompt."""
        num_shared_tokens = num_prompt_tokens // self.block_size * self.block_size
        return self.num_blocks_of(num_shared_tokens) + width * self.num_blocks_of(num_tokens, num_shared_tokens)

    def longest(self, num_blocks: int) -> int:
        """Tokens of the longest sequence for which so many blocks are enough; sys.maxsize where all groups slide."""
        low, high = 0, num_blocks * self.block_size
        if self.num_blocks_of(2**40) <= num_blocks:
            return sys.maxsize
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.num_blocks_of(middle) <= num_blocks else (low, middle - 1)
        return low
