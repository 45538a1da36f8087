"""Openings: blocks that begin with the tokens on which a prompt goes on after its last full hit.

The tail of a finished conversation, a prompt that differs within a block, the last block of a prompt that is cached
whole: none of them is a full hit, all of them have most of a block's work done. Such a block is copied (see
`KVCacheManager.take_prefix`).
"""

from __future__ import annotations

from array import array

from pagedserve.kv_cache.block import Block

# Blocks that are compared with a prompt: the latest ones with its beginning. Bounds a look-up where thousands of
# conversations open with the same words.
_MAX_ALIKE = 8


class Openings:
    """An index of blocks by the digest of what precedes them and their first `min_tokens` tokens."""

    def __init__(self, min_tokens: int):
        self.min_tokens = min_tokens
        self._alike: dict[tuple[object, ...], list[Block]] = {}

    def add(self, block: Block, parent: bytes, token_ids: list[int]) -> None:
        """`block` holds these tokens after what `parent` names; what was known of it before is replaced."""
        if block.opening is not None:
            self.remove(block)
        if len(token_ids) < self.min_tokens:
            return
        key = (parent, *token_ids[: self.min_tokens])
        block.opening = (key, array("i", token_ids))
        alike = self._alike.get(key)
        if alike is None:
            self._alike[key] = [block]
            return
        alike.append(block)
        if len(alike) > _MAX_ALIKE:
            alike.pop(0).opening = None

    def remove(self, block: Block) -> None:
        """The block is no longer found; nothing happens where it was not."""
        if block.opening is None:
            return
        key = block.opening[0]
        alike = self._alike[key]
        alike.remove(block)
        if not alike:
            del self._alike[key]
        block.opening = None

    def find(self, parent: bytes, token_ids: list[int]) -> tuple[Block, int] | None:
        """The block that has the most of these tokens at its beginning, and how many; None below `min_tokens`."""
        best = None
        longest = 0
        for block in reversed(self._alike.get((parent, *token_ids[: self.min_tokens]), ())):
            assert block.opening is not None
            length = _common_len(block.opening[1], token_ids)
            if length > longest:
                best, longest = block, length
        return None if best is None else (best, longest)

    def check(self, blocks: list[Block]) -> None:
        """Prove that exactly the blocks with an opening are in the index; AssertionError tells what is wrong."""
        found = [block for alike in self._alike.values() for block in alike]
        assert len(found) == len(set(found)), "the index of openings has a block twice"
        assert set(found) == {block for block in blocks if block.opening is not None}
        for key, alike in self._alike.items():
            assert 0 < len(alike) <= _MAX_ALIKE
            assert all(block.opening is not None and block.opening[0] == key for block in alike)


def _common_len(have: array[int], want: list[int]) -> int:
    length = 0
    for a, b in zip(have, want, strict=False):
        if a != b:
            break
        length += 1
    return length
