"""Rows of `benchmarks/kernels.py` for the ops on a GPU: bytes that must move, over a launch's time within a CUDA graph.

A graph of several launches over copies of the data: neither the launcher in Python nor, where the copies together are
larger than it, the L2 cache flatters or hides a kernel. Small cases stay in the cache, as they do when serving.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from pagedserve.kernels import ops

_CACHE_BYTES = 160 << 20  # more than any GPU's L2
_MAX_COPIES = 64


def seconds(make: Callable[[], Callable[[], object]], num_bytes: int, repeats: int) -> float:
    """Of one run of what `make` returns, best of `repeats` replays; `make` is called once a copy of the data."""
    runs = [make() for _ in range(max(2, min(_MAX_COPIES, _CACHE_BYTES // max(1, num_bytes) + 1)))]
    for run in runs[:2]:
        run()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    best = float("inf")
    for _ in range(repeats + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) * 1e-3 / len(runs))
    return best


def cases(repeats: int) -> Iterator[tuple[str, float, int, int]]:
    """Name, seconds, bytes, floating point operations of each op on the current GPU, at shapes of Llama-3-8B."""
    hidden, size, heads, kv_heads, head_dim, vocab = 4096, 14336, 32, 8, 128, 128256
    device, dtype = torch.device("cuda"), torch.bfloat16

    def randn(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, dtype=dtype, device=device)

    weight, table = randn(hidden), randn(vocab, hidden)
    cos_sin = randn(8192, head_dim, dtype=torch.float32)
    for rows in (1, 64, 256, 4096):

        def norm(rows: int = rows) -> Callable[[], object]:
            x, residual = randn(rows, hidden), randn(rows, hidden)
            return lambda: ops.rms_norm(x, weight, 1e-5, residual=residual, out=x)

        def gate(rows: int = rows) -> Callable[[], object]:
            x, out = randn(rows, 2 * size), randn(rows, size)
            return lambda: ops.silu_mul(x, out=out)

        def rotate(rows: int = rows) -> Callable[[], object]:
            query, key, _ = randn(rows, heads + 2 * kv_heads, head_dim).split((heads, kv_heads, kv_heads), dim=1)
            positions = torch.arange(rows, device=device)
            return lambda: ops.rotary_embedding(positions, query, key, cos_sin)

        def embed(rows: int = rows) -> Callable[[], object]:
            row_ids = torch.randint(0, vocab, (rows,), device=device)
            return lambda: ops.embedding(table, row_ids, dtype)

        for name, make, elements in (
            (f"rms_norm+residual {rows} x {hidden}", norm, 4 * rows * hidden),
            (f"silu_mul {rows} x {size}", gate, 3 * rows * size),
            (f"rotary {rows} x {heads}+{kv_heads} x {head_dim}", rotate, 2 * rows * (heads + kv_heads) * head_dim),
            (f"embedding {rows} x {hidden}", embed, 2 * rows * hidden),
        ):
            yield f"gpu {name}", seconds(make, 2 * elements, repeats), 2 * elements, 0
    for rows in (1, 64, 256):
        for name, top_k, top_p in (("", 0, 1.0), (" top_k 50", 50, 1.0), (" top_p 0.9", 0, 0.9)):

            def draw(rows: int = rows, top_k: int = top_k, top_p: float = top_p) -> Callable[[], object]:
                # Logits of a trained model are peaked: a few hundred tokens have nearly all of the mass.
                logits = randn(rows, vocab, dtype=torch.float32) * 4
                full = torch.full((rows,), 0.0, device=device)
                arguments = (full + 0.8, full, full.long() + top_k, full.double() + top_p, full.double() + 0.5)
                return lambda: ops.sample(logits, *arguments)

            yield f"gpu sample {rows} x {vocab}{name}", seconds(draw, 4 * rows * vocab, repeats), 4 * rows * vocab, 0

        def report(rows: int = rows) -> Callable[[], object]:
            logits, tokens = randn(rows, vocab, dtype=torch.float32) * 4, torch.arange(rows, device=device)
            return lambda: ops.logprobs(logits, tokens, 20)

        yield f"gpu logprobs {rows} x {vocab} top 20", seconds(report, 4 * rows * vocab, repeats), 4 * rows * vocab, 0
