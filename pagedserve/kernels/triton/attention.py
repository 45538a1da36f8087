"""Paged attention in Triton: what a step's launches are, and their plan. The kernels are in attention_kernels.py.

A step's rows may have one query or many. Those of one take `decode_kernel`, their keys split over programs and merged
where they are many; the others take `prefill_kernel`. Each kernel finds out on the device which rows are its own, so
nothing here waits for the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from pagedserve.kernels.triton import attention_kernels as kernels
from pagedserve.kernels.triton.configs import Device, Heads, Tile, decode_tile, device_facts, prefill_tile
from pagedserve.kernels.triton.kv_cache import cache_strides, cache_views, format_of
from pagedserve.kernels.triton.variants import Launch

MAX_SPLITS = 32
_MIN_SHARE = 256  # keys a split has at least: fewer are not worth merging
_LOG2_E = 1.4426950408889634


@dataclass(slots=True, kw_only=True)
class Plan:
    """The launches of a step, the same for all layers."""

    num_splits: int  # 0: no row of one query
    decode: Tile
    prefill: Tile
    tile_rows: torch.Tensor | None  # int32 [num_tiles]: see plan_tiles_kernel; None: no row of several queries
    tile_starts: torch.Tensor | None
    native_fp8: bool  # whether the GPU converts fp8; if not, it is read as bytes


@dataclass(slots=True, kw_only=True)
class Workspace:
    """Where splits leave their parts, at fixed addresses: CUDA graphs hold them."""

    partial: torch.Tensor  # fp32 [rows, head_dim], a row for each sequence, query head and split
    partial_lse: torch.Tensor  # fp32 [rows]


def count_splits(num_seqs: int, heads: Heads, max_seq_len: int, device: Device) -> int:
    """Into how many parts the keys of rows of one query are split: as many as fill the GPU twice, 1 to 32.

    A shorter `max_seq_len` only leaves out parts that would be empty, so it changes no bit of any result.
    """
    ctas = 2 * device.num_sms * decode_tile(heads, device.capability).ctas_per_sm
    wanted = triton.next_power_of_2(triton.cdiv(ctas, max(1, num_seqs * heads.num_kv_heads)))
    useful = triton.next_power_of_2(triton.cdiv(max(1, max_seq_len), _MIN_SHARE))
    return min(wanted, useful, MAX_SPLITS)


def make_workspace(heads: Heads, device: torch.device) -> Workspace:
    """Room for the parts of any step: splits grow only while few sequences run."""
    facts = device_facts(device)
    ctas = 2 * facts.num_sms * decode_tile(heads, facts.capability).ctas_per_sm
    # num_seqs * num_kv_heads * splits < 2 * ctas, for rounding up to a power of two less than doubles.
    rows = 2 * ctas * heads.group
    partial = torch.empty(rows, heads.head_dim, dtype=torch.float32, device=device)
    return Workspace(partial=partial, partial_lse=torch.empty(rows, dtype=torch.float32, device=device))


def make_plan(
    query_start_loc: torch.Tensor,  # int32 [num_seqs + 1]
    num_tokens: int,
    max_query_len: int,
    max_seq_len: int,
    heads: Heads,
) -> Plan:
    """The launches of a step, from what the host knows; a graph is planned with the largest lengths it may meet."""
    facts = device_facts(query_start_loc.device)
    num_seqs = query_start_loc.shape[0] - 1
    plan = Plan(
        num_splits=0,
        decode=decode_tile(heads, facts.capability),
        prefill=prefill_tile(heads, facts.capability),
        tile_rows=None,
        tile_starts=None,
        native_fp8=facts.capability >= 89,
    )
    if max_query_len == 1 or num_seqs > 1:
        plan.num_splits = count_splits(num_seqs, heads, max_seq_len, facts)
    if max_query_len > 1:
        launch = plan_tiles_launch(query_start_loc, num_tokens, plan.prefill.rows // heads.group)
        launch.run()
        plan.tile_rows, plan.tile_starts = launch.arguments["tile_rows"], launch.arguments["tile_starts"]
    return plan


def attend(
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    kv_cache: torch.Tensor,  # one layer, five dimensions: see reference.split_kv
    query_start_loc: torch.Tensor,  # int32 [num_seqs + 1]
    seq_lens: torch.Tensor,  # int32 [num_seqs]; rows of 0 keys are left as they are in `out`
    block_tables: torch.Tensor,  # int32 [num_seqs, max_blocks_per_seq]
    plan: Plan,
    workspace: Workspace,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,  # [num_heads]
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
    """Causal attention of each row's query tokens, the last of its seq_lens tokens, over the paged context.

    A row's numbers depend on its batch only through `plan.num_splits`.
    """
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device) if out is None else out
    rows = (query_start_loc, seq_lens, block_tables)
    for launch in launches(query, out, kv_cache, rows, plan, workspace, scale, sliding_window, soft_cap, sinks):
        launch.run()
    return out


def launches(
    query: torch.Tensor,
    out: torch.Tensor,
    kv_cache: torch.Tensor,
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],  # query_start_loc, seq_lens, block_tables
    plan: Plan,
    workspace: Workspace,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> list[Launch]:
    """What `attend` runs."""
    common = _common(query, out, kv_cache, rows, scale, sliding_window, soft_cap, sinks, plan.native_fp8)
    found = []
    if plan.num_splits:
        found.append(_decode_launch(common, plan, workspace))
    if plan.num_splits > 1:
        found.append(_merge_launch(common, plan, workspace))
    if plan.tile_rows is not None:
        found.append(_prefill_launch(common, plan))
    return found


def paged_attention(
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    kv_cache: torch.Tensor,  # one layer, five dimensions: see reference.split_kv
    query_start_loc: torch.Tensor,  # int32 [num_seqs + 1]
    seq_lens: torch.Tensor,  # int32 [num_seqs]
    block_tables: torch.Tensor,  # int32 [num_seqs, max_blocks_per_seq]
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    out: torch.Tensor | None,
) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
    """`attend` with a plan and a workspace of its own, made from the shapes alone."""
    num_tokens, num_heads, head_dim = query.shape
    heads = Heads(
        num_heads=num_heads,
        num_kv_heads=kv_cache.shape[2],
        head_dim=head_dim,
        dtype=query.dtype,
        kv_dtype=kv_cache.dtype,
    )
    max_seq_len = block_tables.shape[1] * cache_views(kv_cache, head_dim)[0].shape[2]
    plan = make_plan(query_start_loc, num_tokens, num_tokens, max_seq_len, heads)
    return attend(
        query, kv_cache, query_start_loc, seq_lens, block_tables, plan, make_workspace(heads, query.device),
        scale=scale, sliding_window=sliding_window, soft_cap=soft_cap, out=out,
    )  # fmt: skip


def plan_tiles_launch(query_start_loc: torch.Tensor, num_tokens: int, queries: int) -> Launch:
    """Finds the tiles of prefill_kernel, `queries` queries each, into tensors of its own."""
    num_seqs = query_start_loc.shape[0] - 1
    # A row of several queries has at least two, and at most one tile that is not full.
    num_tiles = num_tokens // queries + min(num_seqs, num_tokens // 2)
    tiles = torch.empty(2, num_tiles, dtype=torch.int32, device=query_start_loc.device)
    seqs = triton.next_power_of_2(max(num_seqs, 128))
    tiles_per_program = max(1, 8192 // seqs)
    return Launch(
        kernel=kernels.plan_tiles_kernel,
        grid=(triton.cdiv(num_tiles, tiles_per_program),),
        arguments={
            "query_start_loc": query_start_loc,
            "tile_rows": tiles[0],
            "tile_starts": tiles[1],
            "num_seqs": num_seqs,
            "num_tiles": num_tiles,
        },
        constexprs={"QUERIES": queries, "SEQS": seqs, "TILES": tiles_per_program},
    )


@dataclass(slots=True, kw_only=True)
class _Common:
    """What the attention kernels have in common."""

    arguments: dict[str, Any]
    constexprs: dict[str, Any]
    num_heads: int
    num_kv_heads: int
    num_seqs: int


def _common(
    query: torch.Tensor,
    out: torch.Tensor,
    kv_cache: torch.Tensor,
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],  # query_start_loc, seq_lens, block_tables
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    native_fp8: bool,
) -> _Common:
    num_heads, head_dim = query.shape[1:]
    keys, values, key_scales, value_scales = cache_views(kv_cache, head_dim)
    if native_fp8 and kv_cache.dtype is torch.float8_e4m3fn:
        keys, values = keys.view(torch.float8_e4m3fn), values.view(torch.float8_e4m3fn)
    query_start_loc, seq_lens, block_tables = rows
    arguments = {
        "query": query,
        "out": out,
        "key_cache": keys,
        "value_cache": values,
        "key_scales": key_scales,
        "value_scales": value_scales,
        "query_start_loc": query_start_loc,
        "seq_lens": seq_lens,
        "block_tables": block_tables,
        "sinks": sinks,
        "query_token_stride": query.stride(0),
        "query_head_stride": query.stride(1),
        "out_token_stride": out.stride(0),
        "out_head_stride": out.stride(1),
        "table_stride": block_tables.stride(0),
        **cache_strides(keys, key_scales),
        "inner": 0.0 if soft_cap is None else scale / soft_cap,
        "factor": (scale if soft_cap is None else soft_cap) * _LOG2_E,
    }
    constexprs = {
        "GROUP": num_heads // keys.shape[1],
        "WINDOW": sliding_window or 0,
        "SOFT_CAP": soft_cap is not None,
        "FORMAT": format_of(kv_cache.dtype),
        "HEAD_DIM": head_dim,
        "DIM": max(16, triton.next_power_of_2(head_dim)),
        "BLOCK_SIZE": keys.shape[2],
    }
    return _Common(
        arguments=arguments,
        constexprs=constexprs,
        num_heads=num_heads,
        num_kv_heads=keys.shape[1],
        num_seqs=seq_lens.shape[0],
    )


def _launch(
    kernel: Any, grid: tuple[int, ...], tile: Tile, values: dict[str, Any], constexprs: dict[str, Any]
) -> Launch:
    """The kernel's arguments, in its order, from all that are known."""
    names = kernel.arg_names
    return Launch(
        kernel=kernel,
        grid=grid,
        arguments={name: values[name] for name in names if name in values},
        constexprs={name: constexprs[name] for name in names if name in constexprs},
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _prefill_launch(common: _Common, plan: Plan) -> Launch:
    tile = plan.prefill
    values = common.arguments | {"tile_rows": plan.tile_rows, "tile_starts": plan.tile_starts}
    constexprs = common.constexprs | {"ROWS": tile.rows, "KEYS": tile.keys}
    return _launch(kernels.prefill_kernel, (plan.tile_rows.shape[0], common.num_kv_heads), tile, values, constexprs)


def _decode_launch(common: _Common, plan: Plan, workspace: Workspace) -> Launch:
    tile = plan.decode
    grid = (plan.num_splits, common.num_kv_heads, common.num_seqs)
    return _launch(kernels.decode_kernel, grid, tile, *_split(common, plan, workspace))


def _merge_launch(common: _Common, plan: Plan, workspace: Workspace) -> Launch:
    tile = Tile(rows=1, keys=plan.decode.keys, num_warps=4, num_stages=1)
    grid = (common.num_heads, common.num_seqs)
    return _launch(kernels.merge_kernel, grid, tile, *_split(common, plan, workspace))


def _split(common: _Common, plan: Plan, workspace: Workspace) -> tuple[dict[str, Any], dict[str, Any]]:
    values = common.arguments | {
        "partial": workspace.partial,
        "partial_lse": workspace.partial_lse,
        "num_heads": common.num_heads,
        "num_splits": plan.num_splits,
    }
    sizes = {"ROWS": plan.decode.rows, "KEYS": plan.decode.keys, "SHARE": _MIN_SHARE, "MAX_SPLITS": MAX_SPLITS}
    return values, common.constexprs | sizes
