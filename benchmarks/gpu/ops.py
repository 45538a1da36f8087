"""Everything in a step that is no matrix product and no attention: fused ops, sampling, copies of blocks, launches."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu import clock
from benchmarks.gpu.check import Check, percent


def fused(check: Check) -> None:
    """GB/s of the ops between products, as shares of copy bandwidth; and products that read weights alone."""
    rows_of = check.choose(full=(2048, 64, 8192), quick=(2048,), tiny=(4,))
    width, inner = check.choose(full=(4096, 14336), quick=(4096, 14336), tiny=(64, 96))
    for rows in rows_of:
        for name, make in (
            ("add + rms_norm", _norm),
            ("silu_mul", _silu),
            ("rotary", _rotary),
            ("write_kv", _write_kv),
        ):
            label = f"{name} {rows}"
            check.measure(
                label, lambda make=make, label=label, rows=rows: _report(check, label, *make(check, rows, width, inner))
            )
    for rows in check.choose(full=(1, 8, 64, 256), quick=(1, 64), tiny=(2,)):
        label = f"linear {rows} x {width} -> {2 * inner}"
        check.measure(label, lambda rows=rows, label=label: _linear(check, label, rows, width, 2 * inner))


def _report(check: Check, label: str, calls: list[Callable[[], Any]], num_bytes: int) -> None:
    took = clock.seconds(calls, check.device)
    share = percent(num_bytes / took, check.ceiling("copy bandwidth"))
    check.record(label, share, "% of copy", note=f"{took * 1e6:.1f} us, {num_bytes / took / 1e9:.0f} GB/s")


def _norm(check: Check, rows: int, width: int, inner: int) -> tuple[list[Callable[[], Any]], int]:
    from pagedserve.kernels import ops

    weight = _random(check, width)
    calls = []
    for _ in range(_copies(check, rows * width * 4)):
        x, residual, out = (_random(check, rows, width) for _ in range(3))
        calls.append(lambda x=x, r=residual, o=out: ops.rms_norm(x, weight, 1e-5, residual=r, out=o))
    return calls, 4 * rows * width * weight.element_size()


def _silu(check: Check, rows: int, width: int, inner: int) -> tuple[list[Callable[[], Any]], int]:
    from pagedserve.kernels import ops

    calls = []
    for _ in range(_copies(check, rows * inner * 6)):
        x, out = _random(check, rows, 2 * inner), _random(check, rows, inner)
        calls.append(lambda x=x, o=out: ops.silu_mul(x, out=o))
    return calls, 3 * rows * inner * _random(check, 1).element_size()


def _rotary(check: Check, rows: int, width: int, inner: int) -> tuple[list[Callable[[], Any]], int]:
    from pagedserve.kernels import ops

    head_dim = check.choose(full=128, quick=128, tiny=16)
    num_heads, num_kv_heads = width // head_dim, max(1, width // head_dim // 4)
    cos_sin = torch.rand(rows, head_dim, device=check.device)
    positions = torch.arange(rows, device=check.device)
    calls = []
    for _ in range(_copies(check, rows * width * 4)):
        qkv = _random(check, rows, num_heads + 2 * num_kv_heads, head_dim)
        query, key = qkv[:, :num_heads], qkv[:, num_heads : num_heads + num_kv_heads]
        calls.append(lambda q=query, k=key: ops.rotary_embedding(positions, q, k, cos_sin))
    numbers = 2 * rows * (num_heads + num_kv_heads) * head_dim
    return calls, numbers * _random(check, 1).element_size()


def _write_kv(check: Check, rows: int, width: int, inner: int) -> tuple[list[Callable[[], Any]], int]:
    from pagedserve.kernels import ops

    head_dim, num_kv_heads = check.choose(full=(128, 8), quick=(128, 8), tiny=(32, 2))
    num_blocks = -(-rows // 16)
    slots = torch.randperm(num_blocks * 16, device=check.device)[:rows]
    calls = []
    for _ in range(_copies(check, rows * num_kv_heads * head_dim * 8)):
        pool = _random(check, num_blocks, 2, num_kv_heads, 16, head_dim)
        key, value = (_random(check, rows, num_kv_heads, head_dim) for _ in range(2))
        calls.append(lambda k=key, v=value, p=pool: ops.write_kv(k, v, p, slots))
    return calls, 4 * rows * num_kv_heads * head_dim * _random(check, 1).element_size()


def _linear(check: Check, label: str, rows: int, width: int, out_features: int) -> None:
    from pagedserve.kernels import ops

    weights = [_random(check, out_features, width) for _ in range(_copies(check, 2 * width * out_features))]
    x = _random(check, rows, width)
    took = clock.seconds([lambda w=w: ops.linear(x, w) for w in weights], check.device)
    share = percent(weights[0].nbytes / took, check.ceiling("copy bandwidth"))
    plain = clock.seconds([lambda w=w: F.linear(x, w) for w in weights], check.device)
    check.record(label, share, "% of copy", note=f"{took * 1e6:.1f} us; torch's {plain * 1e6:.1f} us")


def sampling(check: Check) -> None:
    """Microseconds of a draw for 256 rows of 128k tokens."""
    rows, vocab = check.choose(full=(256, 128256), quick=(256, 128256), tiny=(1, 64))
    logits = [torch.randn(rows, vocab, device=check.device) * 4 for _ in range(check.choose(full=3, quick=3, tiny=1))]
    kinds = {
        "greedy": (0.0, 0.0, 0, 1.0),
        "temperature": (0.8, 0.0, 0, 1.0),
        "top_k 50, top_p 0.95": (0.8, 0.0, 50, 0.95),
        "top_p 0.9": (0.8, 0.0, 0, 0.9),
        "min_p 0.05": (0.8, 0.05, 0, 1.0),
    }
    for name, values in kinds.items():
        label = f"sampling {name}"
        check.measure(label, lambda label=label, values=values: _sample(check, label, logits, values))
    check.measure("sampling penalties", lambda: _penalties(check, logits))
    check.measure("sampling logprobs", lambda: _logprobs(check, logits))


def _sample(check: Check, label: str, logits: list[torch.Tensor], values: tuple[float, float, int, float]) -> None:
    from pagedserve.kernels import ops

    rows = logits[0].shape[0]
    temperature, min_p, top_k, top_p = values

    def column(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype, device=check.device)

    arguments = (
        column(temperature, torch.float32), column(min_p, torch.float32), column(top_k, torch.int64),
        column(top_p, torch.float64), torch.rand(rows, dtype=torch.float64, device=check.device),
    )  # fmt: skip
    took = clock.seconds([lambda x=x: ops.sample(x, *arguments) for x in logits], check.device)
    check.record(label, round(took * 1e6, 1), "us", note=f"{logits[0].nbytes / took / 1e9:.0f} GB/s of logits")


def _penalties(check: Check, logits: list[torch.Tensor]) -> None:
    from pagedserve.kernels import ops

    rows, vocab = logits[0].shape
    length = check.choose(full=2048, quick=2048, tiny=20)
    ids = torch.randint(0, vocab, (rows, length), dtype=torch.int32, device=check.device)
    everyone = torch.arange(rows, device=check.device)
    prompt_lens, lengths = torch.full_like(everyone, length // 2), torch.full_like(everyone, length)
    ones = torch.ones(rows, device=check.device)
    arguments = (everyone, ids, everyone, prompt_lens, lengths, ones * 1.1, ones * 0.1, ones * 0.1)
    took = clock.seconds([lambda x=x: ops.apply_penalties(x, *arguments) for x in logits], check.device)
    check.record("sampling penalties", round(took * 1e6, 1), "us", note=f"over {length} tokens a row")


def _logprobs(check: Check, logits: list[torch.Tensor]) -> None:
    from pagedserve.kernels import ops

    ids = torch.zeros(logits[0].shape[0], dtype=torch.int64, device=check.device)
    took = clock.seconds([lambda x=x: ops.logprobs(x, ids, 5) for x in logits], check.device)
    check.record("sampling logprobs", round(took * 1e6, 1), "us", note="5 of each row")


def swap(check: Check) -> None:
    """Blocks between the pools and within the device's, as preemption and copy-on-write move them."""
    check.measure("swap", lambda: _swap(check))


def _swap(check: Check) -> None:
    from pagedserve.step import BlockOps
    from pagedserve.worker.kv_storage import KVStorage

    num_blocks = check.choose(full=1024, quick=256, tiny=8)
    shape = check.choose(full=(2, 8, 16, 128), quick=(2, 8, 16, 128), tiny=(2, 2, 16, 8))
    dtype = torch.bfloat16 if check.on_gpu else torch.float32
    storage = KVStorage(
        num_device_blocks=2 * num_blocks,
        num_host_blocks=num_blocks,
        num_layers=check.choose(full=32, quick=32, tiny=2),
        layer_block_shape=shape,
        dtype=dtype,
        device=check.device,
    )
    num_bytes = num_blocks * storage.device_pool[0].nbytes
    scattered = random.Random(0).sample(range(2 * num_blocks), num_blocks)
    pairs = list(zip(scattered, range(num_blocks), strict=True))
    back = [(host, block) for block, host in pairs]
    others = sorted(set(range(2 * num_blocks)) - set(scattered))
    moves = {
        "swap out": BlockOps(swap_out=pairs),
        "swap in": BlockOps(swap_in=back),
        "copy blocks": BlockOps(copy=list(zip(scattered, others, strict=True))),
    }
    for name, block_ops in moves.items():
        storage.execute(block_ops)  # the first touches the memory
        took = min(_timed(check, lambda block_ops=block_ops: storage.execute(block_ops)) for _ in range(3))
        times = 2 if name == "copy blocks" else 1
        check.record(
            name,
            round(times * num_bytes / took / 1e9, 1),
            "GB/s",
            note=f"{num_blocks} scattered blocks of {num_bytes // num_blocks >> 10} KiB",
        )


def _timed(check: Check, work: Callable[[], Any]) -> float:
    import time

    clock.synchronize(check.device)
    started = time.perf_counter()
    work()
    clock.synchronize(check.device)
    return time.perf_counter() - started


def launches(check: Check) -> None:
    """What the host pays for a launch, and a graph for a node."""
    check.measure("launches", lambda: _launches(check))


def _launches(check: Check) -> None:
    from pagedserve.kernels import ops

    count = check.choose(full=300, quick=300, tiny=3)
    x, y, weight = _random(check, 1, 4096), _random(check, 1, 4096), _random(check, 4096)
    matrix = _random(check, 64, 4096)
    for name, call in {
        "launch of our add": lambda: ops.add(x, y),
        "launch of our rms_norm": lambda: ops.rms_norm(x, weight, 1e-5, residual=y, out=x),
        "launch of torch's add": lambda: x.add_(y),
        "launch of torch's linear": lambda: F.linear(x, matrix),
    }.items():
        took = clock.host_seconds(call, check.device, count)
        check.record(name, round(took * 1e6, 2), "us of the host")
    if check.on_gpu:
        took = clock.seconds([lambda: ops.add(x, y)] * 100, check.device)
        check.record("node of a graph", round(took * 1e6, 2), "us", note="an add of one row, behind another")


def _random(check: Check, *shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16 if check.on_gpu else torch.float32, device=check.device)


def _copies(check: Check, num_bytes: int) -> int:
    return max(1, min(8, -(-(256 << 20) // max(1, num_bytes)))) if check.on_gpu else 1
