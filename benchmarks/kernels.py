"""Speed of the native CPU kernels, on the shapes of SmolLM2-135M and Llama-3-8B, and of the ops on a GPU where one is.

    python benchmarks/kernels.py                      a table
    python benchmarks/kernels.py --json               the same as one JSON line
    python benchmarks/kernels.py --isa avx2 --only decode
    python benchmarks/kernels.py --only gpu           the GPU's rows alone

Every case is the best of --repeats runs over data that rotates among copies, so that a small case does not sit in
the cache. The share of idle CPU time before the run is printed: numbers from a busy machine mean little.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import gpu_ops
import torch
from machine import idle_share

from pagedserve.kernels import cpu, native

SHAPES = {"smollm2-135m": (9, 3, 64), "llama-3-8b": (32, 8, 128)}  # query heads, KV heads, head_dim
BLOCK_SIZE = 16


@dataclass
class Result:
    name: str
    microseconds: float
    gb_per_s: float
    gflop_per_s: float


def best_seconds(run: Callable[[int], object], repeats: int) -> float:
    """Best of `repeats` timings of run(i), each long enough to be timed."""
    run(0)
    calls = 1
    while True:
        started = time.perf_counter()
        for i in range(calls):
            run(i)
        if time.perf_counter() - started > 0.005:
            break
        calls *= 2
    timings = []
    for _ in range(repeats):
        started = time.perf_counter()
        for i in range(calls):
            run(i)
        timings.append((time.perf_counter() - started) / calls)
    return min(timings)


def attention_case(
    shape: str, query_lens: list[int], seq_lens: list[int], kv_dtype: torch.dtype, repeats: int
) -> tuple[float, int, int]:
    """Seconds, bytes of K and V that must be read, floating point operations."""
    num_heads, num_kv_heads, head_dim = SHAPES[shape]
    blocks = [-(-length // BLOCK_SIZE) for length in seq_lens]
    num_blocks = sum(blocks)
    layer_bytes = num_blocks * 2 * num_kv_heads * BLOCK_SIZE * head_dim * kv_dtype.itemsize
    num_layers = max(1, min(30, 2**28 // layer_bytes))
    pool = torch.randn(num_blocks, num_layers, 2, num_kv_heads, BLOCK_SIZE * head_dim).to(kv_dtype)
    order = torch.randperm(num_blocks).int()
    tables = torch.zeros(len(seq_lens), max(blocks), dtype=torch.int32)
    taken = 0
    for row, count in enumerate(blocks):
        tables[row, :count] = order[taken : taken + count]
        taken += count
    starts = torch.tensor([0, *torch.tensor(query_lens).cumsum(0)], dtype=torch.int32)
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    query = torch.randn(sum(query_lens), num_heads, head_dim)
    out = torch.empty_like(query)

    def run(i: int) -> None:
        layer = pool[:, i % num_layers]
        cpu.paged_attention(query, layer, starts, lens, tables, 0.125, None, None, out)

    seen = sum(q * (n - q) + q * (q + 1) // 2 for q, n in zip(query_lens, seq_lens, strict=True))
    read = sum(seq_lens) * 2 * num_kv_heads * head_dim * kv_dtype.itemsize
    return best_seconds(run, repeats), read, 4 * seen * num_heads * head_dim


def attention_cases(repeats: int) -> Iterator[Result]:
    cases = []
    for shape in SHAPES:
        for batch, context in ((1, 160), (1, 2048), (1, 8192), (8, 160), (32, 160), (32, 1024)):
            cases.append((shape, "decode", f"{batch} x {context}", [1] * batch, [context] * batch))
        for length in (128, 512, 2048):
            cases.append((shape, "prefill", str(length), [length], [length]))
        cases.append((shape, "prefill", "128 of 2048", [128], [2048]))
    for shape, kind, label, query_lens, seq_lens in cases:
        for kv_dtype in (torch.bfloat16, torch.float32):
            name = f"{kind} {shape} {str(kv_dtype).removeprefix('torch.')} {label}"
            yield _result(name, *attention_case(shape, query_lens, seq_lens, kv_dtype, repeats))


def elementwise_cases(repeats: int) -> Iterator[Result]:
    hidden, intermediate, num_heads, num_kv_heads, head_dim = 576, 1536, 9, 3, 64
    weight = torch.randn(hidden)
    angles = torch.outer(torch.arange(2048.0), 10000.0 ** -torch.linspace(0, 1, head_dim // 2))
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    for rows in (1, 32, 512):
        x, residual, out = torch.randn(rows, hidden), torch.randn(rows, hidden), torch.empty(rows, hidden)
        seconds = best_seconds(lambda _: cpu.rms_norm(x, weight, 1e-5, residual, out), repeats)  # noqa: B023
        yield _result(f"rms_norm+residual {rows} x {hidden}", seconds, rows * hidden * 16, rows * hidden * 5)
        gate_up, half = torch.randn(rows, 2 * intermediate), torch.empty(rows, intermediate)
        seconds = best_seconds(lambda _: cpu.gated_activation("silu", gate_up, half), repeats)  # noqa: B023
        yield _result(f"silu_mul {rows} x {intermediate}", seconds, rows * intermediate * 12, rows * intermediate * 5)
        qkv = torch.randn(rows, num_heads + 2 * num_kv_heads, head_dim)
        query, key, value = qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        positions = torch.arange(rows)
        seconds = best_seconds(lambda _: cpu.rotary_embedding(positions, query, key, cos_sin), repeats)  # noqa: B023
        rotated = rows * (num_heads + num_kv_heads) * head_dim
        yield _result(f"rotary {rows} x {num_heads}+{num_kv_heads} x {head_dim}", seconds, rotated * 8, rotated * 3)
        pool = torch.zeros(rows // BLOCK_SIZE + 1, 2, num_kv_heads, BLOCK_SIZE * head_dim, dtype=torch.bfloat16)
        seconds = best_seconds(lambda _: cpu.write_kv(key, value, pool, positions), repeats)  # noqa: B023
        yield _result(f"write_kv bf16 {rows}", seconds, rows * num_kv_heads * head_dim * 2 * 6, 0)
    pool = torch.zeros(64, 30 * 2 * num_kv_heads * BLOCK_SIZE * head_dim, dtype=torch.bfloat16)
    pairs = torch.arange(64).view(32, 2)
    seconds = best_seconds(lambda _: cpu.swap_blocks(pool, pool, pairs), repeats)
    yield _result("copy_blocks 32", seconds, 32 * pool.shape[1] * 4, 0)


def gpu_cases(repeats: int) -> Iterator[Result]:
    return (_result(*case) for case in gpu_ops.cases(repeats))


def _result(name: str, seconds: float, read: int, flop: int) -> Result:
    return Result(name, round(seconds * 1e6, 2), round(read / seconds / 1e9, 2), round(flop / seconds / 1e9, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON line")
    parser.add_argument("--isa", help="instruction set to force (default: the best)")
    parser.add_argument("--threads", type=int, help="threads (default: torch's number)")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    if not native.available():
        raise SystemExit("the native library is not built: pip install -e .")
    native.select_isa(options.isa)
    if options.threads:
        native.set_num_threads(options.threads)
    machine = {"isa": native.isa(), "threads": native.num_threads(), "idle_share": round(idle_share(), 3)}
    has_gpu = torch.cuda.is_available()
    machine["gpu"] = torch.cuda.get_device_name() if has_gpu else "none here: rows of GPU ops are left out"
    results = []
    if not options.json:
        print(machine)
        print(f"{'case':48} {'us':>10} {'GB/s':>8} {'GFLOP/s':>8}")
    on_cpu = () if options.only.startswith("gpu") else (attention_cases, elementwise_cases)
    for cases in (*on_cpu, *((gpu_cases,) if has_gpu else ())):
        for result in _chosen(cases, options.only, options.repeats):
            results.append(result)
            if not options.json:
                print(f"{result.name:48} {result.microseconds:10.2f} {result.gb_per_s:8.2f} {result.gflop_per_s:8.1f}")
    if options.json:
        print(json.dumps(machine | {"results": [asdict(result) for result in results]}))


def _chosen(cases: Callable[[int], Iterator[Result]], only: str, repeats: int) -> Iterator[Result]:
    return (result for result in cases(repeats) if only in result.name)


if __name__ == "__main__":
    main()
