"""The shipped configurations of the attention kernels: shapes of Llama, Gemma and others in the formats that serve.

Other group and block sizes compile much alike.
"""

from __future__ import annotations

import torch

from pagedserve.kernels.triton import attention
from pagedserve.kernels.triton.configs import Heads, Tile, decode_tile, prefill_tile
from pagedserve.kernels.triton.kv_cache import gpu_layer_block_shape
from pagedserve.kernels.triton.variants import Launch, Variant, type_name

_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
_FORMATS = ((_BF16, _BF16), (_FP16, _FP16), (_BF16, torch.int8), (_BF16, torch.float8_e4m3fn))
_SHAPES = ((64, 3), (80, 1), (96, 1), (128, 4), (256, 8))  # head_dim, query heads of a KV head
_NUM_KV_HEADS, _BLOCK_SIZE = 8, 16


def variants() -> list[Variant]:
    shapes = [(dtype, kv_dtype, *shape, None, None) for shape in _SHAPES for dtype, kv_dtype in _FORMATS]
    shapes += [
        (_BF16, _BF16, 128, 4, 4096, None),
        (_BF16, _BF16, 256, 2, 1024, 50.0),
        (_FP32, _FP32, 128, 4, None, None),
    ]
    found = []
    for capability in (80, 90):
        for dtype, kv_dtype, head_dim, group, window, soft_cap in shapes:
            heads = Heads(
                num_heads=group * _NUM_KV_HEADS,
                num_kv_heads=_NUM_KV_HEADS,
                head_dim=head_dim,
                dtype=dtype,
                kv_dtype=kv_dtype,
            )
            tiles = {"prefill": prefill_tile(heads, capability), "decode": decode_tile(heads, capability)}
            made = meta_launches(heads, capability, tiles, window, soft_cap)
            shape = f"{type_name(dtype)}-{type_name(kv_dtype)}-d{head_dim}-g{group}{'-window' if window else ''}"
            for kind, tile in tiles.items():
                tensor_core = (
                    "wgmma.mma_async" if kind == "prefill" and capability >= 90 and dtype != _FP32 else "mma.sync"
                )
                found.append(
                    made[kind].variant(
                        f"{kind}-sm{capability}-{shape}",
                        capabilities=(capability,),
                        ctas_per_sm=tile.ctas_per_sm,
                        expects={capability: (tensor_core,) if tile.num_stages == 1 else (tensor_core, "cp.async")},
                        representative=shape == "bf16-bf16-d128-g4" or (kind, shape) == ("decode", "bf16-i8-d128-g4"),
                    )
                )
            if shape == "bf16-bf16-d128-g4" and capability == 80:
                found += [made[kind].variant(f"{kind}-d128", representative=True) for kind in ("plan", "merge")]
    return found


def meta_launches(
    heads: Heads,
    capability: int,
    tiles: dict[str, Tile],
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> dict[str, Launch]:
    """A step's launches by name, with tensors that take no memory."""
    num_seqs, num_tokens, max_blocks = 64, 512, 512

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    query = empty(num_tokens, heads.num_heads + 2 * heads.num_kv_heads, heads.head_dim, dtype=heads.dtype)
    block = gpu_layer_block_shape(heads.num_kv_heads, _BLOCK_SIZE, heads.head_dim, heads.kv_dtype)
    rows = (empty(num_seqs + 1), empty(num_seqs), empty(num_seqs, max_blocks))
    plan_tiles = attention.plan_tiles_launch(rows[0], num_tokens, tiles["prefill"].rows // heads.group)
    plan = attention.Plan(
        num_splits=8,
        decode=tiles["decode"],
        prefill=tiles["prefill"],
        tile_rows=plan_tiles.arguments["tile_rows"],
        tile_starts=plan_tiles.arguments["tile_starts"],
        native_fp8=capability >= 89,
    )
    decode, merge, prefill = attention.launches(
        query[:, : heads.num_heads],
        empty(num_tokens, heads.num_heads, heads.head_dim, dtype=heads.dtype),
        empty(64, 32, *block, dtype=heads.kv_dtype)[:, 0],
        rows,
        plan,
        attention.Workspace(
            partial=empty(4096, heads.head_dim, dtype=torch.float32), partial_lse=empty(4096, dtype=torch.float32)
        ),
        heads.head_dim**-0.5,
        sliding_window,
        soft_cap,
        None,
    )
    return {"plan": plan_tiles, "decode": decode, "merge": merge, "prefill": prefill}
