"""A mixture of experts as one op, against the same products as one op for each expert, called from Python.

    python benchmarks/experts.py
    python benchmarks/experts.py --shape 4096,14336,8,2 --formats int4 --rows 1,32

Runs are taken in turn; the figures are best times, so a ratio means something on a busy machine too.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from machine import idle_share

from pagedserve.kernels import cpu, native
from pagedserve.kernels.native import PackedExperts, PackedMatrix


def op_by_op(
    x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, gate_up: list[PackedMatrix], down: list[PackedMatrix]
) -> torch.Tensor:
    """Expert after expert, on the rows that chose it."""
    total = torch.zeros_like(x)
    for expert in chosen.unique().tolist():
        tokens, ranks = (chosen == expert).nonzero(as_tuple=True)
        hidden = cpu.gated_activation("silu", cpu.linear(x[tokens], gate_up[expert], None, None, None), None)
        total.index_add_(0, tokens, cpu.linear(hidden, down[expert], None, None, None) * weights[tokens, ranks, None])
    return total


def matrix(fmt: str, out_features: int, in_features: int) -> PackedMatrix:
    packed = PackedMatrix(fmt, out_features, in_features)
    packed.pack(0, torch.randn(out_features, in_features) / in_features**0.5)
    return packed


def best(run: Callable[[], object], other: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Best seconds of each, taken in turn."""
    found = [float("inf"), float("inf")]
    for _ in range(repeats):
        for i, function in enumerate((run, other)):
            started = time.perf_counter()
            function()
            found[i] = min(found[i], time.perf_counter() - started)
    return found[0], found[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1024,512,32,4", help="hidden size, expert size, experts, experts a token")
    parser.add_argument("--formats", default="int4,int8,bfloat16")
    parser.add_argument("--rows", default="1,8,32,256")
    parser.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args()
    hidden, inner, num_experts, top_k = map(int, args.shape.split(","))
    print(
        f"{native.describe()}; {idle_share():.0%} idle; hidden {hidden}, {num_experts} experts of {inner}, top {top_k}"
    )
    print(f"{'format':10} {'rows':>5} {'op by op us':>12} {'one op us':>10} {'ratio':>6}")
    for fmt in args.formats.split(","):
        pairs = [[matrix(fmt, inner, hidden), matrix(fmt, inner, hidden)] for _ in range(num_experts)]
        downs = [matrix(fmt, hidden, inner) for _ in range(num_experts)]
        fused = [matrix(fmt, 2 * inner, hidden) for _ in range(num_experts)]
        one_op = partial(cpu.experts, gate_up=PackedExperts(pairs), down=PackedExperts([[m] for m in downs]))
        for rows in map(int, args.rows.split(",")):
            x = torch.randn(rows, hidden)
            chosen = cpu.route(torch.randn(rows, num_experts), top_k, True)
            slow, fast = best(
                partial(op_by_op, x, *chosen, fused, downs),
                partial(one_op, x, *chosen, kind="silu", out=None),
                args.repeats,
            )
            print(f"{fmt:10} {rows:5} {slow * 1e6:12.0f} {fast * 1e6:10.0f} {slow / fast:6.2f}")


if __name__ == "__main__":
    main()
