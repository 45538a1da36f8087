"""Tile sizes of the attention kernels: one table, chosen from what compiles without spills; no card has timed them yet.

`capability` is 10 * major + minor of a GPU; 0 is Triton's interpreter, which is slow and gets small tiles.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Shapes of an attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype  # of queries
    kv_dtype: torch.dtype

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True)
class Tile:
    rows: int  # queries times the heads of a group; decode pads its group to it
    keys: int  # per iteration
    num_warps: int
    num_stages: int
    ctas_per_sm: int = 1  # planned residents


# (capability from which on, head_dim up to which) -> tile; the last that fits is taken.
_PREFILL = {
    (0, 256): Tile(32, 32, 4, 1),
    (80, 64): Tile(128, 64, 8, 3),
    (80, 128): Tile(128, 32, 8, 3),
    (80, 256): Tile(64, 32, 8, 3),
    (90, 64): Tile(128, 64, 4, 3, 2),
    (90, 128): Tile(128, 64, 8, 3),
    (90, 256): Tile(128, 32, 8, 3),
}
_DECODE = {
    (0, 256): Tile(16, 32, 4, 1, 1),
    (80, 64): Tile(16, 128, 4, 3, 4),
    (80, 128): Tile(16, 64, 4, 3, 4),
    (80, 256): Tile(16, 32, 4, 3, 3),
    (90, 64): Tile(16, 128, 4, 3, 4),
    (90, 128): Tile(16, 64, 4, 3, 4),
    (90, 256): Tile(16, 32, 4, 3, 3),
}
# fp32 products take three of TF32, and their operands twice the room.
_PREFILL_FP32 = {(0, 256): _PREFILL[0, 256], (80, 128): Tile(32, 16, 4, 1), (80, 256): Tile(16, 16, 4, 1)}
_DECODE_FP32 = {(0, 256): _DECODE[0, 256], (80, 128): Tile(16, 32, 4, 1, 2), (80, 256): Tile(16, 16, 4, 1, 2)}


def prefill_tile(heads: Heads, capability: int) -> Tile:
    """For rows of several queries."""
    tile = _choose(_PREFILL_FP32 if heads.dtype is torch.float32 else _PREFILL, heads.head_dim, capability)
    if heads.kv_dtype.itemsize == 1 and capability >= 80:
        # Codes that become floats leave fewer registers: half the rows a warp, but for wide heads on sm_90.
        if capability >= 90 and heads.head_dim <= 64:
            tile = replace(tile, num_warps=8, ctas_per_sm=1)
        elif capability < 90 and heads.head_dim > 64:
            tile = replace(tile, rows=min(tile.rows, 64))
    return replace(tile, rows=max(tile.rows, _power_of_two(heads.group)))


def decode_tile(heads: Heads, capability: int) -> Tile:
    """For rows of one query."""
    tile = _choose(_DECODE_FP32 if heads.dtype is torch.float32 else _DECODE, heads.head_dim, capability)
    tile = replace(tile, rows=max(tile.rows, _power_of_two(heads.group)))
    if heads.kv_dtype.itemsize > 1:
        return tile
    # Codes pass through registers to become floats: fewer at once.
    ctas_per_sm = min(tile.ctas_per_sm, 3 if capability >= 90 else 2)
    return replace(tile, keys=max(16, tile.keys // 2), ctas_per_sm=ctas_per_sm)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _choose(table: dict[tuple[int, int], Tile], head_dim: int, capability: int) -> Tile:
    level = max(least for least, _ in table if least <= capability)
    return table[min(key for key in table if key[0] == level and key[1] >= head_dim)]


@dataclass(frozen=True)
class Device:
    capability: int
    num_sms: int


@cache
def device_facts(device: torch.device) -> Device:
    """Of a GPU, for which tensors without storage stand too; anything else is the interpreter, which plans as for a
    small one."""
    if device.type == "meta" and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    if device.type != "cuda":
        return Device(capability=0, num_sms=2)
    properties = torch.cuda.get_device_properties(device)
    return Device(10 * properties.major + properties.minor, properties.multi_processor_count)
