"""Paged attention against the ceilings: decode as a share of copy bandwidth, prompts as a share of the matmul rate."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu import clock
from benchmarks.gpu.check import Check, NotHereError, percent

# What is read by a measurement in turn is several times a card's cache.
_ROTATED_BYTES = 256 << 20
_MOST_ROTATED = 6
_PEER_BYTES = 3 << 30
BACKENDS = ("triton", "cuda")


@dataclass(frozen=True)
class Heads:
    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


LLAMA_3_8B = Heads("Llama-3-8B", 32, 8, 128)
OPT_13B = Heads("OPT-13B", 40, 40, 128)
TINY = Heads("tiny", 4, 2, 32)
BLOCK_SIZE = 16


def decode(check: Check) -> None:
    heads = check.choose(full=LLAMA_3_8B, quick=LLAMA_3_8B, tiny=TINY)
    grid = check.choose(
        full=[(b, n) for n in (2048, 512, 8192, 32768) for b in (32, 64, 256, 8, 1, 512)],
        quick=[(1, 2048), (32, 2048), (256, 2048), (64, 8192)],
        tiny=[(2, 40)],
    )
    for num_seqs, context in grid:
        _decode_point(check, heads, num_seqs, context, "auto", peer=True)
    for kv_dtype in check.choose(full=("int8", "fp8_e4m3"), quick=(), tiny=("int8",)):
        for num_seqs, context in check.choose(full=[(64, 2048), (256, 2048)], quick=[], tiny=[(2, 40)]):
            _decode_point(check, heads, num_seqs, context, kv_dtype, peer=False)
    for num_seqs, context in check.choose(full=[(64, 2048)], quick=[], tiny=[]):
        _decode_point(check, OPT_13B, num_seqs, context, "auto", peer=True)


def _decode_point(check: Check, heads: Heads, num_seqs: int, context: int, kv_dtype: str, *, peer: bool) -> None:
    num_bytes = num_seqs * context * 2 * heads.num_kv_heads * heads.head_dim * 2
    label = f"{heads.name} {num_seqs} x {context}" + ("" if kv_dtype == "auto" else f" {kv_dtype}")
    if num_bytes > 20 << 30:
        return
    for name in available():
        title = f"decode {name} {label}"
        check.measure(title, partial(_decode, check, heads, num_seqs, context, name, kv_dtype, title))
    if peer and num_bytes <= _PEER_BYTES:
        check.measure(f"decode sdpa {label}", lambda: _decode_sdpa(check, heads, num_seqs, context, label))


def available() -> list[str]:
    """The paged backends that are there, and the reference where it is all that is."""
    from pagedserve.attention import BACKENDS as table

    return [name for name in BACKENDS if name in list(table)] or ["reference"]


def _decode(check: Check, heads: Heads, num_seqs: int, context: int, backend: str, kv_dtype: str, name: str) -> None:
    step = PagedStep.make(check, heads, backend, kv_dtype, [(1, context)] * num_seqs)
    took = clock.seconds(step.calls, check.device)
    bandwidth = check.ceiling("copy bandwidth")
    share = percent(step.kv_bytes / took, bandwidth)
    goal = None
    if check.on_gpu and kv_dtype == "auto":
        goal = 90.0 if step.kv_bytes >= 256 << 20 else 75.0 if num_seqs >= 32 and context >= 2048 else None
    check.record(name, share, "% of copy", goal=goal, note=f"{took * 1e6:.1f} us, {step.kv_bytes / 2**20:.0f} MiB")


def _decode_sdpa(check: Check, heads: Heads, num_seqs: int, context: int, label: str) -> None:
    dtype = _dtype(check)
    copies = _copies(num_seqs * context * 2 * heads.num_kv_heads * heads.head_dim * 2)
    calls = []
    for _ in range(copies):
        shape = (num_seqs, heads.num_kv_heads, context, heads.head_dim)
        key, value = (torch.randn(shape, dtype=dtype, device=check.device) for _ in range(2))
        query = torch.randn(num_seqs, heads.num_heads, 1, heads.head_dim, dtype=dtype, device=check.device)
        calls.append(lambda q=query, k=key, v=value: F.scaled_dot_product_attention(q, k, v, enable_gqa=True))
    took = clock.seconds(calls, check.device)
    num_bytes = num_seqs * context * 2 * heads.num_kv_heads * heads.head_dim * dtype.itemsize
    share = percent(num_bytes / took, check.ceiling("copy bandwidth"))
    check.record(f"decode sdpa {label}", share, "% of copy", note=f"{took * 1e6:.1f} us, contiguous")


def prefill(check: Check) -> None:
    heads = check.choose(full=LLAMA_3_8B, quick=LLAMA_3_8B, tiny=TINY)
    grid = check.choose(
        full=[(1, 8192, 0), (1, 2048, 0), (1, 4096, 0), (1, 16384, 0), (8, 1024, 0), (1, 2048, 6144), (4, 512, 4096)],
        quick=[(1, 8192, 0)],
        tiny=[(1, 20, 12), (1, 24, 0)],
    )
    for point in grid:
        _prefill_point(check, heads, *point)


def _prefill_point(check: Check, heads: Heads, num_seqs: int, length: int, context: int) -> None:
    label = f"{heads.name} {num_seqs} x {length}" + (f" after {context}" if context else "")
    for backend in available():
        name = f"prefill {backend} {label}"
        check.measure(name, partial(_prefill, check, heads, num_seqs, length, context, backend, name))
    if not context:
        check.measure(f"prefill sdpa {label}", partial(_prefill_sdpa, check, heads, num_seqs, length, label))


def _prefill(check: Check, heads: Heads, num_seqs: int, length: int, context: int, backend: str, name: str) -> None:
    step = PagedStep.make(check, heads, backend, "auto", [(length, context + length)] * num_seqs)
    took = clock.seconds(step.calls, check.device)
    flops = _flops(heads, num_seqs, length, context)
    share = percent(flops / took, check.ceiling("matmul rate"))
    goal = 60.0 if check.on_gpu and length >= 8192 else None
    check.record(name, share, "% of matmul", goal=goal, note=f"{took * 1e3:.2f} ms, {flops / took / 1e12:.0f} TFLOP/s")


def _prefill_sdpa(check: Check, heads: Heads, num_seqs: int, length: int, label: str) -> None:
    shape = (num_seqs, heads.num_heads, length, heads.head_dim)
    kv_shape = (num_seqs, heads.num_kv_heads, length, heads.head_dim)
    query = torch.randn(shape, dtype=_dtype(check), device=check.device)
    key, value = (torch.randn(kv_shape, dtype=_dtype(check), device=check.device) for _ in range(2))
    # Without enable_gqa, which keeps the fastest kernels away.
    groups = heads.num_heads // heads.num_kv_heads
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    took = clock.seconds([lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True)], check.device)
    flops = _flops(heads, num_seqs, length, 0)
    share = percent(flops / took, check.ceiling("matmul rate"))
    check.record(f"prefill sdpa {label}", share, "% of matmul", note=f"{flops / took / 1e12:.0f} TFLOP/s")


def _flops(heads: Heads, num_seqs: int, length: int, context: int) -> float:
    """Multiply-adds times 2 of scores and sums, of what causality leaves."""
    return 4.0 * num_seqs * heads.num_heads * heads.head_dim * (length * context + length * (length + 1) / 2)


@dataclass
class PagedStep:
    """One layer's attention over several sets of blocks, to be called in turn."""

    calls: list[Callable[[], Any]]
    kv_bytes: int  # that one call reads, codes and scales

    @classmethod
    def make(cls, check: Check, heads: Heads, backend: str, kv_dtype: str, rows: list[tuple[int, int]]) -> PagedStep:
        """`rows`: query length and sequence length of each; NotHereError where the backend cannot."""
        from pagedserve.attention import BACKENDS as table
        from pagedserve.attention import AttentionSpec

        device, dtype = check.device, _dtype(check)
        spec = AttentionSpec(
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            block_size=BLOCK_SIZE,
            dtype=dtype,
            kv_cache_dtype=_kv_dtype(kv_dtype, dtype),
            device=device,
            scale=heads.scale,
        )
        chosen = table.resolve(backend)
        if (reason := chosen.why_not(spec)) is not None:
            raise NotHereError(f"{backend}: {reason}")
        attention = chosen(spec)
        block_bytes = math.prod(attention.layer_block_shape) * spec.kv_cache_dtype.itemsize
        blocks_of = [-(-seq_len // BLOCK_SIZE) for _, seq_len in rows]
        kv_bytes = sum(seq_len * block_bytes // BLOCK_SIZE for _, seq_len in rows)
        copies = _copies(sum(blocks_of) * block_bytes) if check.on_gpu else 1
        pool = _pool(sum(blocks_of) * copies + 1, attention.layer_block_shape, spec.kv_cache_dtype, device)
        order = (torch.randperm(len(pool) - 1, generator=torch.Generator().manual_seed(0)) + 1).int()
        calls = []
        for copy in range(copies):
            ids = order[copy * sum(blocks_of) : (copy + 1) * sum(blocks_of)]
            calls.append(_call(attention, pool, ids, rows, blocks_of, heads, dtype, device))
        return cls(calls, kv_bytes)


def _call(
    attention: Any,
    pool: torch.Tensor,
    ids: torch.Tensor,
    rows: list[tuple[int, int]],
    blocks_of: list[int],
    heads: Heads,
    dtype: torch.dtype,
    device: torch.device,
) -> Callable[[], Any]:
    tables = torch.zeros((len(rows), max(blocks_of)), dtype=torch.int32)
    starts, slots, first = [0], [], 0
    for row, (query_len, seq_len) in enumerate(rows):
        tables[row, : blocks_of[row]] = ids[first : first + blocks_of[row]]
        positions = torch.arange(seq_len - query_len, seq_len)
        slots.append(tables[row, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE)
        starts.append(starts[-1] + query_len)
        first += blocks_of[row]
    metadata = attention.build_metadata(
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=torch.tensor([seq_len for _, seq_len in rows], dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        slot_mapping=torch.cat(slots).to(device),
        max_query_len=max(query_len for query_len, _ in rows),
        max_seq_len=max(seq_len for _, seq_len in rows),
    )
    query = torch.randn(starts[-1], heads.num_heads, heads.head_dim, dtype=dtype, device=device)
    key, value = (
        torch.randn(starts[-1], heads.num_kv_heads, heads.head_dim, dtype=dtype, device=device) for _ in range(2)
    )
    return lambda: attention.forward(query, key, value, pool, metadata)


def _pool(num_blocks: int, block_shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    pool = torch.zeros((num_blocks, *block_shape), dtype=dtype, device=device)
    if dtype.itemsize > 1:  # codes of 8 bits stay 0: their scales lie among them
        piece = max(1, (1 << 28) // max(1, pool[0].numel()))
        for first in range(0, num_blocks, piece):
            pool[first : first + piece].normal_()
    return pool


def _copies(num_bytes: int) -> int:
    return max(1, min(_MOST_ROTATED, -(-_ROTATED_BYTES // max(1, num_bytes))))


def _dtype(check: Check) -> torch.dtype:
    """The interpreter's products of bf16 are wrong, so it gets fp32."""
    return torch.bfloat16 if check.on_gpu else torch.float32


def _kv_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    return {"auto": dtype, "int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}[name]
