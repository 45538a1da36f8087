"""Paged attention: a kernel for rows of several queries, one for rows of one query, and what plans them.

The rows of a step may be of both kinds. Neither kernel is told which are which: each finds out on the device and leaves
the others alone, so a step is planned without waiting for the GPU. Online softmax as in arXiv 2205.14135; splits
of the context merged as in arXiv 2311.01282.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagedserve.kernels.triton.arithmetic import dot, narrow, tanh

# These come anew each step, from anywhere in a buffer: kernels are not compiled again for where.
_ROWS = ["query_start_loc", "seq_lens", "block_tables"]
_TILES = ["tile_rows", "tile_starts"]
# Scores begin here and masked ones are -inf: a row that has seen nothing yet needs no special case.
_LOWEST: tl.constexpr = tl.constexpr(-1.0e30)


@triton.jit
def _attend(
    peak, total, acc, q,  # running maximum (times factor) [ROWS], sum [ROWS], output [ROWS, DIM]; queries [ROWS, DIM]
    begin, end,  # keys: whole tiles from `begin`, a multiple of KEYS
    lowest, highest,  # keys that may be read are lowest .. highest - 1; only looked at where MASKED
    positions,  # [ROWS] of the queries; only looked at where MASKED
    table, keys, values,  # of the row, of the KV head
    key_scales, value_scales, scales_start,  # of the layer, or None; where the KV head's begin
    block_stride, token_stride, scale_block_stride, scale_token_stride,
    inner, factor,  # scores are dot * factor, or tanh(dot * inner) * factor
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, FORMAT: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The rows' attention over the keys begin .. end - 1, added to what they have."""
    DTYPE: tl.constexpr = q.dtype
    dims = tl.arange(0, DIM)
    for start in range(begin, end, KEYS):
        tokens = start + tl.arange(0, KEYS)
        if MASKED:
            readable = (tokens >= lowest) & (tokens < highest)
        # A small block's entry is read for each of its keys, from the nearest cache. Read once and spread over them by
        # a reshape, Triton 3.6 no longer sees that rows are aligned: loads become narrow and do not run ahead.
        if BLOCK_SIZE >= KEYS:
            blocks = tl.load(table + start // BLOCK_SIZE).to(tl.int64)
            offsets = start % BLOCK_SIZE + tl.arange(0, KEYS)
        elif MASKED:
            blocks = tl.load(table + tokens // BLOCK_SIZE, mask=readable, other=0).to(tl.int64)
            offsets = tokens % BLOCK_SIZE
        else:
            blocks = tl.load(table + tokens // BLOCK_SIZE).to(tl.int64)
            offsets = tokens % BLOCK_SIZE
        place = blocks * block_stride + offsets * token_stride
        if MASKED:
            mask = readable[:, None] & (dims < HEAD_DIM)[None, :]
            k = tl.load(keys + place[:, None] + dims[None, :], mask=mask, other=0.0)
            v = tl.load(values + place[:, None] + dims[None, :], mask=mask, other=0.0)
        elif DIM == HEAD_DIM:
            k = tl.load(keys + place[:, None] + dims[None, :])
            v = tl.load(values + place[:, None] + dims[None, :])
        else:
            mask = (dims < HEAD_DIM)[None, :]
            k = tl.load(keys + place[:, None] + dims[None, :], mask=mask, other=0.0)
            v = tl.load(values + place[:, None] + dims[None, :], mask=mask, other=0.0)

        scores = dot(q, tl.trans(decode(k, FORMAT, DTYPE)), tl.zeros([q.shape[0], KEYS], tl.float32), DTYPE)
        if FORMAT != "float":
            scale_place = scales_start + blocks * scale_block_stride + offsets * scale_token_stride
            if MASKED:
                k_scale = tl.load(key_scales + scale_place, mask=readable, other=0.0)
                v_scale = tl.load(value_scales + scale_place, mask=readable, other=0.0)
            else:
                k_scale = tl.load(key_scales + scale_place)
                v_scale = tl.load(value_scales + scale_place)
            scores = scores * k_scale[None, :]
        if SOFT_CAP:
            scores = tanh(scores * inner)
        if MASKED:
            visible = readable[None, :] & (tokens[None, :] <= positions[:, None])
            if WINDOW > 0:
                visible = visible & (tokens[None, :] > positions[:, None] - WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=1) * factor)
        p = tl.exp2(scores * factor - new_peak[:, None])
        kept = tl.exp2(peak - new_peak)
        total = total * kept + tl.sum(p, axis=1)
        if FORMAT != "float":
            p = p * v_scale[None, :]
        acc = dot(p, decode(v, FORMAT, DTYPE), acc * kept[:, None], DTYPE)
        peak = new_peak
    return peak, total, acc


@triton.jit
def decode(codes, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """What was read of a cache as floats; fp8 as bytes goes through fp16, its numbers 2^-8 of what they mean."""
    if FORMAT == "fp8" and codes.dtype == tl.uint8:
        wide = codes.to(tl.uint16)
        bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        return (bits.to(tl.float16, bitcast=True) * 256.0).to(DTYPE)
    else:
        return codes


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=[*_ROWS, *_TILES])
def prefill_kernel(
    query, out,  # [num_tokens, num_heads, head_dim]
    key_cache, value_cache,  # [num_blocks, num_kv_heads, block_size, head_dim]
    key_scales, value_scales,  # fp32 [num_blocks, num_kv_heads, block_size] or None
    query_start_loc, seq_lens, block_tables,  # int32 [num_seqs + 1], [num_seqs], [num_seqs, max_blocks]
    tile_rows, tile_starts,  # int32 [num_tiles]: a tile's row (-1: none) and its first query within the row
    sinks,  # [num_heads] or None
    query_token_stride, query_head_stride, out_token_stride, out_head_stride, table_stride,
    cache_block_stride, cache_head_stride, cache_token_stride,
    scale_block_stride, scale_head_stride, scale_token_stride,
    inner, factor,
    GROUP: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, FORMAT: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """A tile of queries of one row, with all query heads that share a KV head. Grid (num_tiles, num_kv_heads)."""
    # The last tiles of a row see most keys: they begin first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    row = tl.load(tile_rows + tile)
    if row < 0:
        return
    kv_head = tl.program_id(1)
    first = tl.load(tile_starts + tile)
    token = tl.load(query_start_loc + row)
    num_queries = tl.load(query_start_loc + row + 1) - token
    context = tl.load(seq_lens + row) - num_queries

    QUERIES: tl.constexpr = ROWS // GROUP
    lanes = tl.arange(0, ROWS)
    queries = first + lanes // GROUP
    heads = kv_head * GROUP + lanes % GROUP
    real = (lanes < QUERIES * GROUP) & (queries < num_queries)
    dims = tl.arange(0, DIM)
    mask = real[:, None] & (dims < HEAD_DIM)[None, :]
    tokens = (token + queries).to(tl.int64)
    q = tl.load(
        query + (tokens * query_token_stride + heads * query_head_stride)[:, None] + dims[None, :], mask=mask, other=0.0
    )
    peak, total, acc = _nothing_seen(sinks, heads, True, ROWS, DIM)

    table = block_tables + row.to(tl.int64) * table_stride
    keys, values = key_cache + kv_head * cache_head_stride, value_cache + kv_head * cache_head_stride
    scales_start = kv_head * scale_head_stride
    positions = context + queries
    begin = 0
    seen = 0
    last = context + tl.minimum(first + QUERIES, num_queries) - 1
    middle = (context + first + 1) // KEYS * KEYS  # every query of the tile sees all keys before it
    if WINDOW > 0:
        # Blocks behind the window may be gone; keys that only some queries see lie before `inside`.
        seen = tl.maximum(context + first + 1 - WINDOW, 0)
        begin = seen // KEYS * KEYS
        inside = tl.cdiv(tl.maximum(last + 1 - WINDOW, 0), KEYS) * KEYS
        inside = tl.minimum(inside, tl.cdiv(last + 1, KEYS) * KEYS)
        peak, total, acc = _attend(
            peak, total, acc, q, begin, inside, seen, last + 1, positions,
            table, keys, values, key_scales, value_scales, scales_start,
            cache_block_stride, cache_token_stride, scale_block_stride, scale_token_stride, inner, factor,
            WINDOW, SOFT_CAP, FORMAT, HEAD_DIM, DIM, BLOCK_SIZE, KEYS, True,
        )  # fmt: skip
        begin = inside
        middle = tl.maximum(middle, inside)
    peak, total, acc = _attend(
        peak, total, acc, q, begin, middle, seen, last + 1, positions,
        table, keys, values, key_scales, value_scales, scales_start,
        cache_block_stride, cache_token_stride, scale_block_stride, scale_token_stride, inner, factor,
        WINDOW, SOFT_CAP, FORMAT, HEAD_DIM, DIM, BLOCK_SIZE, KEYS, False,
    )  # fmt: skip
    peak, total, acc = _attend(
        peak, total, acc, q, middle, last + 1, seen, last + 1, positions,
        table, keys, values, key_scales, value_scales, scales_start,
        cache_block_stride, cache_token_stride, scale_block_stride, scale_token_stride, inner, factor,
        WINDOW, SOFT_CAP, FORMAT, HEAD_DIM, DIM, BLOCK_SIZE, KEYS, True,
    )  # fmt: skip
    place = (tokens * out_token_stride + heads * out_head_stride)[:, None] + dims[None, :]
    total = tl.where(total > 0.0, total, 1.0)  # lanes without a query may have seen nothing
    tl.store(out + place, narrow(acc / total[:, None], out.dtype.element_ty), mask=mask)


@triton.jit
def _nothing_seen(sinks, heads, counted, ROWS: tl.constexpr, DIM: tl.constexpr):
    """Running maximum, sum and output of rows before their first key. A sink is a score that has no value: part of the
    sum only (arXiv 2309.17453 as gpt-oss has it); `counted`: whether it is in this program's part."""
    peak = tl.full([ROWS], _LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + heads).to(tl.float32) * 1.4426950408889634
        peak = tl.where(counted, sink, peak)
        total = tl.where(counted, total + 1.0, total)
    return peak, total, tl.zeros([ROWS, DIM], tl.float32)


@triton.jit
def _share(seq_len, num_splits, SHARE: tl.constexpr, WINDOW: tl.constexpr, KEYS: tl.constexpr):
    """How one query's keys are split: the first key it sees, where its tiles begin, and keys a split. Of a row without
    keys the beginning is its length."""
    seen = 0
    if WINDOW > 0:
        seen = tl.maximum(seq_len - WINDOW, 0)
    begin = seen // KEYS * KEYS
    share = tl.cdiv(tl.cdiv(seq_len - begin, num_splits), KEYS) * KEYS
    return seen, begin, tl.maximum(share, SHARE)


@triton.jit(do_not_specialize=["table_stride", "num_heads", "num_splits"], do_not_specialize_on_alignment=_ROWS)
def decode_kernel(
    query, out,  # [num_tokens, num_heads, head_dim]
    partial, partial_lse,  # fp32 [num_seqs, num_heads, num_splits, head_dim], [.., num_splits]
    key_cache, value_cache,  # [num_blocks, num_kv_heads, block_size, head_dim]
    key_scales, value_scales,  # fp32 [num_blocks, num_kv_heads, block_size] or None
    query_start_loc, seq_lens, block_tables,  # int32 [num_seqs + 1], [num_seqs], [num_seqs, max_blocks]
    sinks,  # [num_heads] or None
    query_token_stride, query_head_stride, out_token_stride, out_head_stride, table_stride,
    cache_block_stride, cache_head_stride, cache_token_stride,
    scale_block_stride, scale_head_stride, scale_token_stride,
    inner, factor,
    num_heads, num_splits,
    GROUP: tl.constexpr, SHARE: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    FORMAT: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """A share of the keys of a row of one query, for all query heads of a KV head.

    Grid (num_splits, num_kv_heads, num_seqs): it depends on no length, so that a CUDA graph may hold it; shares that
    are empty end at once."""
    row = tl.program_id(2)
    seq_len = tl.load(seq_lens + row)
    seen, begin, share = _share(seq_len, num_splits, SHARE, WINDOW, KEYS)
    split = tl.program_id(0)
    start, end = begin + split * share, tl.minimum(begin + (split + 1) * share, seq_len)
    if start >= seq_len:
        return
    token = tl.load(query_start_loc + row)
    if tl.load(query_start_loc + row + 1) - token != 1:
        return
    kv_head = tl.program_id(1)
    lanes = tl.arange(0, ROWS)
    heads = kv_head * GROUP + tl.minimum(lanes, GROUP - 1)
    dims = tl.arange(0, DIM)
    mask = (lanes < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    q = tl.load(
        query + token.to(tl.int64) * query_token_stride + (heads * query_head_stride)[:, None] + dims[None, :],
        mask=mask, other=0.0,
    )  # fmt: skip
    peak, total, acc = _nothing_seen(sinks, heads, split == 0, ROWS, DIM)
    table = block_tables + row.to(tl.int64) * table_stride
    keys, values = key_cache + kv_head * cache_head_stride, value_cache + kv_head * cache_head_stride
    scales_start = kv_head * scale_head_stride
    peak, total, acc = _attend(
        peak, total, acc, q, start, end, seen, end, tl.zeros([ROWS], tl.int32) + (seq_len - 1),
        table, keys, values, key_scales, value_scales, scales_start,
        cache_block_stride, cache_token_stride, scale_block_stride, scale_token_stride, inner, factor,
        WINDOW, SOFT_CAP, FORMAT, HEAD_DIM, DIM, BLOCK_SIZE, KEYS, True,
    )  # fmt: skip
    result = acc / total[:, None]
    if begin + share >= seq_len:  # the only share
        place = token.to(tl.int64) * out_token_stride + (heads * out_head_stride)[:, None] + dims[None, :]
        tl.store(out + place, narrow(result, out.dtype.element_ty), mask=mask)
    else:
        part = (row * num_heads + heads) * num_splits + split
        tl.store(partial + part[:, None] * HEAD_DIM + dims[None, :], result, mask=mask)
        tl.store(partial_lse + part, peak + tl.log2(total), mask=lanes < GROUP)


@triton.jit(do_not_specialize=["num_heads", "num_splits"], do_not_specialize_on_alignment=_ROWS)
def merge_kernel(
    out,  # [num_tokens, num_heads, head_dim]
    partial, partial_lse,  # as decode_kernel left them
    query_start_loc, seq_lens,  # int32 [num_seqs + 1], [num_seqs]
    out_token_stride, out_head_stride, num_heads, num_splits,
    MAX_SPLITS: tl.constexpr, SHARE: tl.constexpr, WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """One output of decode_kernel's shares, weighted by their sums. Grid (num_heads, num_seqs)."""
    row = tl.program_id(1)
    seq_len = tl.load(seq_lens + row)
    _, begin, share = _share(seq_len, num_splits, SHARE, WINDOW, KEYS)
    if begin + share >= seq_len:
        return
    token = tl.load(query_start_loc + row)
    if tl.load(query_start_loc + row + 1) - token != 1:
        return
    head = tl.program_id(0)
    splits = tl.arange(0, MAX_SPLITS)
    dims = tl.arange(0, DIM)
    used = splits < tl.cdiv(seq_len - begin, share)
    place = (row * num_heads + head) * num_splits + splits
    lse = tl.load(partial_lse + place, mask=used, other=float("-inf"))
    weights = tl.exp2(lse - tl.max(lse, axis=0))
    parts = tl.load(
        partial + place[:, None] * HEAD_DIM + dims[None, :],
        mask=used[:, None] & (dims < HEAD_DIM)[None, :], other=0.0,
    )  # fmt: skip
    result = tl.sum(parts * weights[:, None], axis=0) / tl.sum(weights, axis=0)
    place_out = token.to(tl.int64) * out_token_stride + head * out_head_stride + dims
    tl.store(out + place_out, narrow(result, out.dtype.element_ty), mask=dims < HEAD_DIM)


@triton.jit(do_not_specialize=["num_seqs", "num_tiles"], do_not_specialize_on_alignment=[*_ROWS, *_TILES])
def plan_tiles_kernel(
    query_start_loc,  # int32 [num_seqs + 1]
    tile_rows, tile_starts,  # int32 [num_tiles]
    num_seqs, num_tiles,
    QUERIES: tl.constexpr, SEQS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Which row and which of its queries each tile of prefill_kernel has; -1 beyond the last. Rows of one query have no
    tile. Grid (ceil(num_tiles / TILES))."""
    seqs = tl.arange(0, SEQS)
    starts = tl.load(query_start_loc + seqs, mask=seqs < num_seqs, other=0)
    counts = tl.load(query_start_loc + seqs + 1, mask=seqs < num_seqs, other=0) - starts
    ends = tl.cumsum(tl.where(counts > 1, tl.cdiv(counts, QUERIES), 0), axis=0)
    tiles = tl.program_id(0) * TILES + tl.arange(0, TILES)
    before = ends[None, :] <= tiles[:, None]  # [TILES, SEQS]: rows whose tiles are all before this one
    rows = tl.sum(before.to(tl.int32), axis=1)
    firsts = tl.max(tl.where(before, ends[None, :], 0), axis=1)
    mask = tiles < num_tiles
    tl.store(tile_rows + tiles, tl.where(rows < num_seqs, rows, -1), mask=mask)
    tl.store(tile_starts + tiles, (tiles - firsts) * QUERIES, mask=mask)
