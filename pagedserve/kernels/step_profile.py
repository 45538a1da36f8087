"""What the ops of a step cost: time as measured, bytes and arithmetic as their arguments say."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pagedserve.kernels import native

_FLOAT_BYTES = 4
_KV_BYTES = {0: 4, 1: 2, 2: 2, 3: 1}  # ps_dtype -> bytes of a number


@dataclass(slots=True)
class OpCost:
    """All calls of one kind of op, over the steps that were observed."""

    label: str
    calls: int = 0
    seconds: float = 0.0
    num_bytes: int = 0  # that must move at least once: weights, keys and values, activations
    flops: int = 0


class StepProfile:
    """Sums up step programs while it observes: `with native.observing(profile.observe)`."""

    def __init__(self) -> None:
        self.costs: dict[str, OpCost] = {}
        self.num_steps = 0
        self.seconds = 0.0

    def observe(
        self, program: native.StepProgram, counts: Sequence[int], inputs: Sequence[int], seconds: np.ndarray
    ) -> None:
        self.num_steps += 1
        self.seconds += float(seconds.sum())
        for (name, arguments), took in zip(program.ops, seconds.tolist(), strict=True):
            words = [_word(argument, counts, inputs) for argument in arguments]
            label, num_bytes, flops = _COSTS.get(name, _unknown(name))(words)
            cost = self.costs.setdefault(label, OpCost(label))
            cost.calls += 1
            cost.seconds += took
            cost.num_bytes += num_bytes
            cost.flops += flops

    def sorted(self) -> list[OpCost]:
        """The most expensive first."""
        return sorted(self.costs.values(), key=lambda cost: -cost.seconds)


def measure_ceilings(num_threads: int) -> tuple[float, float]:
    """This machine's GB/s of reading 256 MB, and GFLOP/s of fp32 products in cache, both by torch's own kernels."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        numbers, matrix = torch.ones(2**26), torch.ones(1024, 1024)
        read = _best_seconds(numbers.sum)
        multiply = _best_seconds(lambda: matrix @ matrix)
    finally:
        torch.set_num_threads(before)
    return numbers.nbytes / read / 1e9, 2 * 1024**3 / multiply / 1e9


def _best_seconds(run: Callable[[], object]) -> float:
    def once() -> float:
        started = time.perf_counter()
        run()
        return time.perf_counter() - started

    return min(once() for _ in range(8))


def _word(argument: tuple[int, int, int], counts: Sequence[int], inputs: Sequence[int]) -> int:
    """An argument as the call gets it; places in the program's own memory, which nothing here looks at, are 0."""
    kind, index, value = argument
    match kind:
        case native.COUNT:
            return value * counts[index]
        case native.INPUT:
            return inputs[index] + value
        case native.BUFFER:
            return 0
    return value


# ---- bytes and arithmetic: (label, bytes, flops) from the words of a call ------------------------------------------

_Cost = tuple[str, int, int]


def _linear(words: list[int]) -> _Cost:
    num_rows, weight = words[4], native.LinearWeightStruct.from_address(words[5])
    fmt, wide, deep = weight.format, weight.out_features, weight.in_features
    num_bytes = native.packed_bytes(fmt, wide, deep) + _FLOAT_BYTES * num_rows * (wide + deep)
    return f"linear {list(native.LINEAR_FORMATS)[fmt]} {deep} -> {wide}", num_bytes, 2 * num_rows * wide * deep


def _attention(words: list[int], num_heads: int, kv_address: int, rows_address: int, window: int) -> _Cost:
    kv = native.KVCacheStruct.from_address(kv_address)
    rows = native.AttentionRowsStruct.from_address(rows_address)
    queries = np.diff(native.int32s_at(rows.query_start_loc, rows.num_seqs + 1))
    context = native.int32s_at(rows.seq_lens, rows.num_seqs)
    seen = np.minimum(context, window + queries - 1) if window else context
    # A query sees what stands before it, and at most the window.
    pairs = sum(
        int(np.minimum(np.arange(n - q + 1, n + 1), window or n).sum())
        for n, q in zip(context.tolist(), queries.tolist(), strict=True)
    )
    token_bytes = 2 * kv.num_kv_heads * kv.head_dim * _KV_BYTES[kv.dtype]
    return "attention", int(seen.sum()) * token_bytes, 4 * pairs * num_heads * kv.head_dim


def _rms_norm(words: list[int]) -> _Cost:
    num_numbers = words[9] * words[10] * words[11]
    return "rms_norm", _FLOAT_BYTES * num_numbers * (4 if words[6] else 2), 4 * num_numbers


def _gated_activation(words: list[int]) -> _Cost:
    num_numbers = words[5] * words[6]
    return "gated_activation", _FLOAT_BYTES * 3 * num_numbers, 10 * num_numbers


def _unknown(name: str) -> Callable[[list[int]], _Cost]:
    return lambda words: (name.removeprefix("ps_"), 0, 0)


_COSTS: dict[str, Callable[[list[int]], _Cost]] = {
    "ps_linear": _linear,
    "ps_rotary_attention": lambda w: _attention(w, w[4], w[10], w[11], w[13]),
    "ps_paged_attention": lambda w: _attention(w, w[4], w[5], w[6], w[8]),
    "ps_rms_norm": _rms_norm,
    "ps_gated_activation": _gated_activation,
}
