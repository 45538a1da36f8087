"""Speed of linear layers on the CPU: packed formats beside torch, on the matrices of SmolLM2-135M.

    python benchmarks/linear.py                               a table
    python benchmarks/linear.py --json                        the same as one JSON line
    python benchmarks/linear.py --isa avx2 --rows 1,32 --formats int4,bfloat16

"layers" is one pass through the four projections of 30 layers, each with weights of its own, so that weights come
from where they would in a model; "head" is the output head. Figures are the best of --repeats passes. The share of
idle CPU time before the run is printed: numbers from a busy machine mean little.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from machine import idle_share

from pagedserve.kernels import cpu, native
from pagedserve.quantization.method import LinearWeight
from pagedserve.quantization.none import DenseMethod
from pagedserve.quantization.packed import PackedMethod, PackedWeight

HIDDEN, QKV, INTERMEDIATE, VOCAB, NUM_LAYERS = 576, 960, 1536, 49152, 30
LAYER = ((QKV, HIDDEN), (HIDDEN, HIDDEN), (2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))
HEAD = ((VOCAB, HIDDEN),)
FORMATS = ("float32", "bfloat16", "float16", "int8", "int4_sym", "int4", "int4_f32", "int8_g16")
PEERS = {"torch float32": torch.float32, "torch bfloat16": torch.bfloat16}


@dataclass
class Result:
    format: str
    part: str
    rows: int
    ms: float
    gb_per_s: float
    gflop_per_s: float


def best_seconds(run: Callable[[], object], repeats: int) -> float:
    run()
    timings = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        timings.append(time.perf_counter() - started)
    return min(timings)


def make_weight(fmt: str, out_features: int, in_features: int) -> LinearWeight:
    """Weights of one format; what they hold does not matter to the speed, so they need no quantising."""
    if fmt in PEERS:
        return DenseMethod(dtype=PEERS[fmt]).from_dense(torch.rand(out_features, in_features) - 0.5)
    if fmt in ("float32", "bfloat16", "float16"):
        return PackedMethod(fmt).from_dense(torch.rand(out_features, in_features) - 0.5)
    packed = native.PackedMatrix(fmt, out_features, in_features)
    packed.data.random_(0, 31)  # small codes, fp16 and fp32 scales near zero: no inf and no NaN
    return PackedWeight(packed)


def measure(fmt: str, rows_list: list[int], parts: list[str], repeats: int) -> list[Result]:
    results = []
    for part in parts:
        shapes = LAYER * NUM_LAYERS if part == "layers" else HEAD
        weights = [make_weight(fmt, *shape) for shape in shapes]
        dtype = PEERS.get(fmt, torch.float32)
        for rows in rows_list:
            inputs = {n: torch.randn(rows, n).to(dtype) for n in (HIDDEN, INTERMEDIATE)}
            outputs = {n: torch.empty(rows, n) for n in (QKV, HIDDEN, 2 * INTERMEDIATE, VOCAB)}

            def run(inputs=inputs, outputs=outputs, weights=weights) -> None:
                for weight in weights:
                    if isinstance(weight, PackedWeight):
                        cpu.linear(inputs[weight.in_features], weight.packed, None, None, outputs[weight.out_features])
                    else:
                        weight.matmul(inputs[weight.in_features])

            seconds = best_seconds(run, repeats)
            read = sum(weight.nbytes for weight in weights)
            work = sum(2 * rows * n * k for n, k in shapes)
            results.append(Result(fmt, part, rows, seconds * 1e3, read / seconds / 1e9, work / seconds / 1e9))
    return results


def memory_gb_per_s(repeats: int) -> float:
    """Reading 1 GiB with every thread."""
    data = torch.ones(2**28)
    return data.nbytes / best_seconds(lambda: data.sum(), repeats) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default=",".join((*FORMATS, *PEERS)))
    parser.add_argument("--rows", default="1,8,32,128,512")
    parser.add_argument("--parts", default="layers,head")
    parser.add_argument("--isa", help="force the kernels of one instruction set")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one JSON line instead of the table")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    native.set_num_threads(args.threads)
    native.select_isa(args.isa)
    idle = idle_share()
    header = {"isa": native.isa(), "threads": args.threads, "idle": round(idle, 3)}
    header["memory_gb_per_s"] = round(memory_gb_per_s(args.repeats), 1)
    if not args.json:
        print("  ".join(f"{name} {value}" for name, value in header.items()))
        print(f"{'format':16}{'part':8}{'rows':>5}{'ms':>10}{'GB/s':>8}{'GFLOP/s':>9}")
    results = []
    for fmt in args.formats.split(","):
        for result in measure(fmt, [int(n) for n in args.rows.split(",")], args.parts.split(","), args.repeats):
            results.append(result)
            if not args.json:
                print(
                    f"{result.format:16}{result.part:8}{result.rows:5}{result.ms:10.3f}{result.gb_per_s:8.1f}"
                    f"{result.gflop_per_s:9.1f}",
                    flush=True,
                )
    if args.json:
        print(json.dumps({**header, "results": [asdict(result) for result in results]}))


if __name__ == "__main__":
    main()
