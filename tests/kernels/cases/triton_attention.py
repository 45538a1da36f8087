"""Paged attention in Triton against dense attention over the gathered keys, in fp64.

Outputs are poisoned, and so is every slot that no query sees: what is read or left unwritten by mistake shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.testing import assert_close

from pagedserve.kernels import reference
from pagedserve.kernels.triton import attention
from tests.helpers.paged_batch import as_cached
from tests.kernels.cases import Case
from tests.kernels.cases.triton_kv_cache import gpu_pool

BF16, FP16, FP32, INT8, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.float8_e4m3fn
_TOLERANCE = {FP32: (2e-5, 1e-4), FP16: (2e-3, 2e-3), BF16: (1e-2, 1.6e-2)}  # absolute, relative
_GONE = 2**30  # a block-table entry that may not be followed


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows of a step, and what the model asks of attention."""

    rows: Sequence[tuple[int, int]]  # (keys, queries) of each
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = FP32
    kv_dtype: torch.dtype | None = None  # None: as dtype
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    num_splits: int | None = None  # None: as planned

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


MIXED = ((5, 5), (60, 33), (70, 1), (40, 40))
DECODE = ((700, 1), (1, 1), (257, 1))
LONG = ((8192, 1), (1, 1), (3000, 1), (8191, 2048), (777, 777), (17, 3))
MANY = tuple((1 + 37 * i % 2000, 1) for i in range(300))

_SMALL = {
    "mixed": Batch(rows=MIXED),
    "mixed-bf16-int8": Batch(rows=MIXED, dtype=BF16, kv_dtype=INT8),
    "mixed-bf16-fp8": Batch(rows=MIXED, dtype=BF16, kv_dtype=FP8, block_size=4),
    "mixed-fp16": Batch(rows=MIXED, dtype=FP16, num_heads=3, num_kv_heads=1),
    "mixed-bf16-fp16": Batch(rows=MIXED[:3], dtype=BF16, kv_dtype=FP16, num_heads=2),
    "window": Batch(rows=MIXED, window=9, block_size=8),
    "window-of-one": Batch(rows=MIXED, window=1, dtype=BF16),
    "window-wider-than-tiles": Batch(rows=((90, 30), (140, 1), (99, 3)), window=50),
    "soft-cap": Batch(rows=MIXED, soft_cap=1.5, num_heads=8, num_kv_heads=1),
    "sinks": Batch(rows=MIXED, sinks=True),
    "blocks-of-one": Batch(rows=((33, 20), (40, 1)), block_size=1, head_dim=80),
    "blocks-of-128": Batch(rows=((200, 20), (140, 1)), block_size=128, head_dim=96),
    "dim-128": Batch(rows=((50, 50), (60, 1)), head_dim=128, dtype=BF16, num_heads=4, num_kv_heads=1),
    "dim-256": Batch(rows=((20, 20), (40, 1)), head_dim=256, num_heads=1, num_kv_heads=1),
    "dim-8": Batch(rows=((20, 20), (40, 1)), head_dim=8, num_heads=7, num_kv_heads=1),
    "twenty-heads-a-group": Batch(rows=((20, 20), (40, 1)), num_heads=20, num_kv_heads=1),
    "splits": Batch(rows=DECODE, num_splits=4, head_dim=32, num_kv_heads=1),
    "splits-int8": Batch(rows=DECODE, num_splits=2, kv_dtype=INT8, head_dim=32, num_kv_heads=1),
    "splits-window": Batch(rows=DECODE, num_splits=4, window=300, head_dim=32, num_kv_heads=1),
    "splits-sinks": Batch(rows=DECODE, num_splits=4, sinks=True, head_dim=32, num_kv_heads=1),
    "empty-rows": Batch(rows=((40, 1), (0, 1), (0, 1))),
}  # fmt: skip
_FULL = {
    "llama": Batch(rows=LONG, num_heads=32, num_kv_heads=8, head_dim=128, dtype=BF16),
    "llama-fp16-block-64": Batch(rows=LONG, num_heads=32, num_kv_heads=8, head_dim=128, dtype=FP16, block_size=64),
    "llama-int8": Batch(rows=LONG, num_heads=32, num_kv_heads=8, head_dim=128, dtype=BF16, kv_dtype=INT8),
    "llama-fp8": Batch(rows=LONG, num_heads=32, num_kv_heads=8, head_dim=128, dtype=BF16, kv_dtype=FP8),
    "llama-fp32": Batch(rows=LONG[2:], num_heads=32, num_kv_heads=8, head_dim=128),
    "opt": Batch(rows=LONG, num_heads=40, num_kv_heads=40, head_dim=128, dtype=FP16, block_size=32),
    "smol": Batch(rows=LONG, num_heads=9, num_kv_heads=3, head_dim=64, dtype=BF16),
    "smol-fp8": Batch(rows=LONG, num_heads=9, num_kv_heads=3, dtype=BF16, kv_dtype=FP8, block_size=32),
    "dim-80": Batch(rows=LONG, num_heads=32, num_kv_heads=32, head_dim=80, dtype=BF16),
    "dim-96": Batch(rows=LONG, num_heads=32, num_kv_heads=32, head_dim=96, dtype=BF16, block_size=32),
    "gemma": Batch(rows=LONG, num_heads=8, num_kv_heads=1, head_dim=256, dtype=BF16, window=1024, soft_cap=50.0),
    "gemma-int8": Batch(rows=LONG, num_heads=8, num_kv_heads=4, head_dim=256, dtype=BF16, kv_dtype=INT8),
    "mistral": Batch(rows=LONG, num_heads=32, num_kv_heads=8, head_dim=128, dtype=BF16, window=4096),
    "sinks": Batch(rows=LONG, num_heads=64, num_kv_heads=8, head_dim=64, dtype=BF16, window=128, sinks=True),
    "many-rows": Batch(rows=MANY, num_heads=32, num_kv_heads=8, head_dim=128, dtype=BF16),
}  # fmt: skip


def cases() -> list[Case]:
    found = [Case(name, partial(_check, batch)) for name, batch in _SMALL.items()]
    found += [
        Case("same-bits-twice-and-alone", partial(_check_bits, Batch(rows=MIXED[:3], dtype=BF16))),
        Case("same-bits-alone-split", partial(_check_bits, Batch(rows=DECODE[::2], num_splits=4, head_dim=32))),
        Case("shorter-plans-change-no-bit", _check_shorter_plans),
        Case("tiles", _check_tiles),
    ]
    found += [Case(f"full-{name}", partial(_check, batch), full_size=True) for name, batch in _FULL.items()]
    found += [
        Case(f"full-bits-{name}", partial(_check_bits, _FULL[name]), full_size=True)
        for name in ("llama", "llama-fp8", "gemma")
    ]
    return found


@dataclass
class Inputs:
    """A batch on a device: its query, a layer of a pool, and the keys and values an oracle wants."""

    batch: Batch
    query: torch.Tensor
    kv_cache: torch.Tensor
    block_tables: torch.Tensor
    sinks: torch.Tensor | None
    keys: list[torch.Tensor] = field(default_factory=list)  # per row [keys, num_kv_heads, head_dim], as cached
    values: list[torch.Tensor] = field(default_factory=list)


def _make(batch: Batch, device: torch.device) -> Inputs:
    generator = torch.Generator(device=device).manual_seed(len(batch.rows))
    randn = partial(torch.randn, generator=generator, device=device)
    kv_dtype = batch.kv_dtype or batch.dtype
    size, heads = batch.block_size, batch.num_kv_heads
    blocks_of = [-(-length // size) for length, _ in batch.rows]
    order = torch.randperm(sum(blocks_of) + 3, generator=generator, device=device).int()
    tables = torch.full((len(batch.rows), max(blocks_of) + 1), _GONE, dtype=torch.int32, device=device)
    pool = gpu_pool(device, len(order), heads, size, batch.head_dim, kv_dtype)
    num_tokens = sum(queries for _, queries in batch.rows)
    # Inside a wider tensor, as queries are in a fused projection.
    query = randn(num_tokens, batch.num_heads + 2, batch.head_dim).to(batch.dtype)[:, : batch.num_heads]
    sinks = randn(batch.num_heads) if batch.sinks else None
    made = Inputs(batch, query, pool[:, 1], tables, sinks)
    taken = 0
    for row, ((length, queries), count) in enumerate(zip(batch.rows, blocks_of, strict=True)):
        blocks = order[taken : taken + count]
        taken += count
        key, value = (randn(length, heads, batch.head_dim).to(batch.dtype) for _ in range(2))
        positions = torch.arange(length, device=device)
        seen = 0 if batch.window is None else max(0, length - queries + 1 - batch.window)
        slots = blocks[positions // size].long() * size + positions % size
        reference.write_kv(key[seen:], value[seen:], made.kv_cache, slots[seen:])
        tables[row, seen // size : count] = blocks[seen // size :]
        made.keys.append(as_cached(key, kv_dtype))
        made.values.append(as_cached(value, kv_dtype))
    return made


def _heads(batch: Batch) -> attention.Heads:
    return attention.Heads(
        num_heads=batch.num_heads,
        num_kv_heads=batch.num_kv_heads,
        head_dim=batch.head_dim,
        dtype=batch.dtype,
        kv_dtype=batch.kv_dtype or batch.dtype,
    )


def _run(made: Inputs, *, rows: Sequence[int] | None = None) -> torch.Tensor:
    """The kernels' output for all rows or for some; a row of no keys has one query all the same, as in a graph."""
    batch, device = made.batch, made.query.device
    rows = range(len(batch.rows)) if rows is None else rows
    counts = [queries for _, queries in batch.rows]
    starts = [sum(counts[:row]) for row in range(len(counts))]
    query = torch.cat([made.query[starts[row] : starts[row] + counts[row]] for row in rows])
    query_start_loc = torch.tensor([0, *(counts[row] for row in rows)], device=device).cumsum(0).int()
    seq_lens = torch.tensor([batch.rows[row][0] for row in rows], dtype=torch.int32, device=device)
    heads = _heads(batch)
    longest = max(batch.rows[row][0] for row in rows)
    plan = attention.make_plan(query_start_loc, len(query), max(counts[row] for row in rows), longest, heads)
    workspace = attention.make_workspace(heads, device)
    if batch.num_splits is not None:
        plan.num_splits = batch.num_splits
        size = len(rows) * batch.num_heads * batch.num_splits
        workspace.partial = torch.full((size, batch.head_dim), torch.nan, device=device)
        workspace.partial_lse = torch.full((size,), torch.nan, device=device)
    out = torch.full(query.shape, torch.nan, dtype=batch.dtype, device=device)
    tables = made.block_tables[list(rows)]
    options: dict[str, Any] = {"sliding_window": batch.window, "soft_cap": batch.soft_cap, "sinks": made.sinks}
    attention.attend(
        query, made.kv_cache, query_start_loc, seq_lens, tables, plan, workspace, scale=batch.scale, out=out, **options
    )
    return out


def _dense(made: Inputs, row: int, query: torch.Tensor) -> torch.Tensor:
    """The row's attention over its whole context, in fp64 where that is quick. query: [queries, num_heads, head_dim]"""
    batch, (length, queries) = made.batch, made.batch.rows[row]
    dtype = torch.float64 if length * queries <= 2**16 else torch.float32
    group = batch.num_heads // batch.num_kv_heads
    keys, values = (x[row].to(dtype).repeat_interleave(group, 1).transpose(0, 1) for x in (made.keys, made.values))
    scores = query.to(dtype).transpose(0, 1) @ keys.transpose(1, 2) * batch.scale
    if batch.soft_cap is not None:
        scores = batch.soft_cap * torch.tanh(scores / batch.soft_cap)
    device = query.device
    distance = torch.arange(length - queries, length, device=device)[:, None] - torch.arange(length, device=device)
    visible = (distance >= 0) & (distance < (batch.window or length + 1))
    scores = scores.masked_fill(~visible, -torch.inf)
    if made.sinks is not None:
        sinks = made.sinks.to(dtype)[:, None, None].expand(-1, queries, 1)
        scores = torch.cat((scores, sinks), dim=-1)
        values = torch.cat((values, torch.zeros_like(values[:, :1])), dim=1)
    return (torch.softmax(scores, dim=-1) @ values).transpose(0, 1)


def _check(batch: Batch, device: torch.device) -> None:
    made = _make(batch, device)
    absolute, relative = _TOLERANCE[batch.dtype]
    outs = _run(made).split([queries for _, queries in batch.rows])
    queries = made.query.split([queries for _, queries in batch.rows])
    for row, (length, _) in enumerate(batch.rows):
        if length == 0:
            assert outs[row].isnan().all(), f"row {row} has no keys and was written"
            continue
        wanted = _dense(made, row, queries[row])
        assert_close(outs[row].to(wanted.dtype), wanted, atol=absolute, rtol=relative, msg=f"row {row}: {{}}".format)


def _check_bits(batch: Batch, device: torch.device) -> None:
    """The same bits again, and for a row alone where its keys are split in as many parts."""
    made = _make(batch, device)
    out = _run(made)
    assert torch.equal(out, _run(made)), "another run gave other bits"
    counts = [queries for _, queries in batch.rows]
    for row, part in enumerate(out.split(counts)):
        if counts[row] > 1 or batch.num_splits is not None:
            assert torch.equal(part, _run(made, rows=[row])), f"row {row} has other bits alone"


def _check_shorter_plans(device: torch.device) -> None:
    """A plan for the longest context gives the bits of one for these lengths."""
    heads = _heads(Batch(rows=(), num_heads=2, num_kv_heads=1, head_dim=32))
    facts = attention.Device(capability=80, num_sms=132)
    counts = [attention.count_splits(1, heads, length, facts) for length in (300, 1000, 2**17)]
    assert counts == [2, 4, 32], counts
    outs = []
    for num_splits in counts[1:]:
        batch = Batch(rows=((1000, 1),), num_heads=2, num_kv_heads=1, head_dim=32, num_splits=num_splits)
        outs.append(_run(_make(batch, device)))
    assert torch.equal(*outs)


def _check_tiles(device: torch.device) -> None:
    """Every query of a row of several lies in one tile, in order; rows of one query are in none."""
    counts = torch.randint(0, 40, (150,), generator=torch.Generator().manual_seed(0))
    counts[::3] = 1
    loc = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))).int().to(device)
    heads = _heads(Batch(rows=(), num_heads=2, num_kv_heads=1))
    plan = attention.make_plan(loc, int(counts.sum()), int(counts.max()), 40, heads)
    queries = plan.prefill.rows // heads.group
    wanted = [(row, first) for row, n in enumerate(counts.tolist()) if n > 1 for first in range(0, n, queries)]
    found = list(zip(plan.tile_rows.tolist(), plan.tile_starts.tolist(), strict=True))
    assert found[: len(wanted)] == wanted
    assert all(row == -1 for row, _ in found[len(wanted) :])
