"""Names for the content of full blocks: a chain of SHA-256 digests.

A block's digest covers all tokens up to its end and everything else that the keys and values depend on, so equal
digests mean equal content, and a cryptographic hash leaves a client no way to make two contents meet.
"""

from __future__ import annotations

from array import array
from hashlib import sha256


def root_digest(block_size: int, adapter: str | None, cache_salt: str | None) -> bytes:
    """What precedes the first block. Strings are length-prefixed and None differs from every string."""
    parts = [b"pagedserve", block_size.to_bytes(4, "little")]
    for text in (adapter, cache_salt):
        if text is None:
            parts.append(b"\x00")
        else:
            encoded = text.encode("utf-8", "surrogatepass")
            parts.append(b"\x01" + len(encoded).to_bytes(8, "little") + encoded)
    return sha256(b"".join(parts)).digest()


def extend_digests(digests: list[bytes], num_blocks: int, token_ids: list[int], block_size: int, root: bytes) -> None:
    """Append what `digests` lacks of the digests of the first `num_blocks` blocks of `token_ids`."""
    start = len(digests)
    if start >= num_blocks:
        return
    raw = array("q", token_ids[start * block_size : num_blocks * block_size]).tobytes()
    width = block_size * 8
    digest = digests[-1] if digests else root
    for offset in range(0, len(raw), width):
        digest = sha256(digest + raw[offset : offset + width]).digest()
        digests.append(digest)
