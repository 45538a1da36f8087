"""Finding, binding and forcing the native library; what it refuses; its threads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import pagedserve
from pagedserve.errors import ConfigError
from pagedserve.kernels import cpu, native
from tests.helpers.paged_batch import make_paged_batch

needs_native = pytest.mark.skipif(not native.available(), reason="the native library is not built here")

SILU_TWICE = """
import torch
from pagedserve.kernels import native, ops
x = torch.tensor([[1.0, 2.0]])
assert torch.allclose(ops.silu_mul(x), torch.nn.functional.silu(x[:, :1]) * 2)
ops.silu_mul(x)
print("isa", native.isa() if native.available() else "none")
"""


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    source = str(Path(pagedserve.__path__[-1]).parent)
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_missing_library_costs_one_warning_line_and_falls_back() -> None:
    gone = "import pagedserve.kernels.native as native; native.LIBRARY_NAME = 'libpagedserve_gone.so'\n"
    done = run_python(gone + SILU_TWICE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["isa", "none"]
    assert done.stderr.count("\n") == 1 and "no native CPU kernels" in done.stderr


@needs_native
def test_a_library_of_another_abi_is_refused_with_one_line() -> None:
    done = run_python("import pagedserve.kernels.native as native; native.ABI_VERSION = 999\n" + SILU_TWICE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["isa", "none"]
    assert done.stderr.count("\n") == 1 and "ABI version" in done.stderr


@needs_native
def test_disabled_by_the_environment_without_a_warning() -> None:
    done = run_python(SILU_TWICE, PAGEDSERVE_DISABLE_NATIVE="1")
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["isa", "none"], "")


@needs_native
def test_the_environment_forces_an_instruction_set() -> None:
    assert run_python(SILU_TWICE, PAGEDSERVE_CPU_ISA="scalar").stdout.split() == ["isa", "scalar"]
    done = run_python(SILU_TWICE, PAGEDSERVE_CPU_ISA="mmx")
    assert done.returncode != 0
    assert "ConfigError: PAGEDSERVE_CPU_ISA=mmx" in done.stderr and "scalar" in done.stderr


@needs_native
def test_the_best_instruction_set_is_the_default() -> None:
    native.select_isa("scalar")
    assert native.isa() == "scalar"
    assert native.describe().startswith("scalar, ")
    native.select_isa(None)
    assert native.isa() == native.available_isas()[0]
    with pytest.raises(ConfigError, match="sse9"):
        native.select_isa("sse9")
    assert native.isa() == native.available_isas()[0]


# ---- refusals ---------------------------------------------------------------------------------------------------


@needs_native
@pytest.mark.parametrize(
    ("x", "weight", "match"),
    [
        (torch.zeros(2, 8, dtype=torch.float64), torch.zeros(8), "x must be fp32"),
        (torch.zeros(2, 8, device="meta"), torch.zeros(8), "x must be fp32 on the CPU"),
        (torch.zeros(8), torch.zeros(8), "2 or 3 dimensions"),
        (torch.zeros(8, 2).T, torch.zeros(8), "contiguous"),
        (torch.zeros(2, 8), torch.zeros(9), "weight has shape"),
        (torch.zeros(2, 8), torch.zeros(16)[::2], "weight"),
    ],
)
def test_rms_norm_refuses(x: torch.Tensor, weight: torch.Tensor, match: str) -> None:
    with pytest.raises((TypeError, ValueError), match=match):
        cpu.rms_norm(x, weight, 1e-5, None, None)


@needs_native
def test_rms_norm_refuses_a_residual_or_out_of_another_shape() -> None:
    x, weight = torch.zeros(2, 8), torch.zeros(8)
    with pytest.raises(ValueError, match="residual has shape"):
        cpu.rms_norm(x, weight, 1e-5, torch.zeros(3, 8), None)
    with pytest.raises(ValueError, match="out has shape"):
        cpu.rms_norm(x, weight, 1e-5, None, torch.zeros(2, 9))
    with pytest.raises(ValueError, match="residual"):
        cpu.rms_norm(torch.zeros(2, 2, 8), weight, 1e-5, torch.zeros(2, 2, 8), None)


@needs_native
def test_rotary_embedding_refuses() -> None:
    query, cos_sin = torch.zeros(2, 3, 8), torch.zeros(10, 8)
    with pytest.raises(ValueError, match=r"positions\[1\] is 10, the cos/sin table ends at 10"):
        cpu.rotary_embedding(torch.tensor([0, 10]), query, None, cos_sin)
    with pytest.raises(ValueError, match=r"positions\[0\] is -1"):
        cpu.rotary_embedding(torch.tensor([-1, 0]), query, None, cos_sin)
    with pytest.raises(TypeError, match="positions must be"):
        cpu.rotary_embedding(torch.tensor([0, 1], dtype=torch.int32), query, None, cos_sin)
    with pytest.raises(ValueError, match="rotary_dim is 10"):
        cpu.rotary_embedding(torch.tensor([0, 1]), query, None, torch.zeros(10, 10))
    with pytest.raises(ValueError, match="key"):
        cpu.rotary_embedding(torch.tensor([0, 1]), query, torch.zeros(2, 3, 16), cos_sin)


@needs_native
def test_write_kv_refuses() -> None:
    key, kv_cache = torch.zeros(2, 1, 8), torch.zeros(4, 2, 1, 32)
    for slot in (-2, 16):
        with pytest.raises(ValueError, match=rf"slot_mapping\[1\] is {slot}, the pool has 16 slots"):
            cpu.write_kv(key, key, kv_cache, torch.tensor([0, slot]))
    with pytest.raises(ValueError, match="slot_mapping has shape"):
        cpu.write_kv(key, key, kv_cache, torch.tensor([0]))
    with pytest.raises(ValueError, match="value has shape"):
        cpu.write_kv(key, torch.zeros(1, 1, 8), kv_cache, torch.tensor([0, 1]))
    with pytest.raises(TypeError, match="kv_cache must be fp32, bf16, fp16 or int8"):
        cpu.write_kv(key, key, kv_cache.double(), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="contiguous within a block"):
        cpu.write_kv(key, key, torch.zeros(4, 2, 1, 64)[..., ::2], torch.tensor([0, 1]))
    with pytest.raises(ConfigError, match="power of two"):
        cpu.write_kv(key, key, torch.zeros(4, 2, 1, 24), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"block_size \* 12\] with head_dim 8"):
        cpu.write_kv(key, key, torch.zeros(4, 2, 1, 32, dtype=torch.int8), torch.tensor([0, 1]))
    odd = torch.zeros(4 * 96 + 2, dtype=torch.int8)[2:].view(4, 2, 1, 48)
    with pytest.raises(ConfigError, match="multiples of 4"):
        cpu.write_kv(key, key, odd, torch.tensor([0, 1]))


@needs_native
def test_paged_attention_refuses() -> None:
    batch = make_paged_batch([20, 5], [2, 5])

    def attend(**changes: object) -> None:
        arguments = {
            "query": batch.query,
            "kv_cache": batch.kv_cache,
            "query_start_loc": batch.query_start_loc,
            "seq_lens": batch.seq_lens,
            "block_tables": batch.block_tables,
            "scale": 1.0,
            "sliding_window": None,
            "soft_cap": None,
            "out": None,
        }
        cpu.paged_attention(**(arguments | changes))

    attend()
    tables = batch.block_tables.clone()
    tables[0, 1] = 99
    with pytest.raises(ValueError, match=r"block_tables\[0, 1\] is 99, the pool has \d+ blocks"):
        attend(block_tables=tables)
    with pytest.raises(ValueError, match="row 0 needs 2 blocks, its table has room for 1"):
        attend(block_tables=batch.block_tables[:, :1].contiguous())
    with pytest.raises(ValueError, match="row 1 has 5 query tokens and 4 tokens of context"):
        attend(seq_lens=torch.tensor([20, 4], dtype=torch.int32))
    with pytest.raises(ValueError, match=r"query_start_loc\[2\] is 7, query has 6 tokens"):
        attend(query=batch.query[:6])
    with pytest.raises(TypeError, match=r"seq_lens must be torch\.int32"):
        attend(seq_lens=batch.seq_lens.long())
    with pytest.raises(ValueError, match="3 query heads cannot share 2 KV heads"):
        attend(query=torch.zeros(7, 3, 16))
    with pytest.raises(ValueError, match="must not be negative"):
        attend(sliding_window=-1)


@needs_native
def test_swap_blocks_refuses() -> None:
    pool = torch.zeros(4, 8)
    with pytest.raises(ValueError, match="pair 1 copies block 0 of 4 to block 4 of 4"):
        cpu.swap_blocks(pool, pool, torch.tensor([[0, 1], [0, 4]]))
    with pytest.raises(ValueError, match="one dtype and shape"):
        cpu.swap_blocks(pool, torch.zeros(4, 9), torch.tensor([[0, 1]]))
    with pytest.raises(ValueError, match="contiguous"):
        cpu.swap_blocks(pool.T, pool.T, torch.tensor([[0, 1]]))


# ---- threads ----------------------------------------------------------------------------------------------------


@needs_native
def test_the_pool_is_resized_and_refuses_nonsense() -> None:
    before = native.num_threads()
    try:
        for count in (4, 1, 2):
            native.set_num_threads(count)
            assert native.num_threads() == count
            x = torch.randn(500, 128)
            assert torch.allclose(cpu.gated_activation("silu", x, None), x[:, :64].sigmoid() * x[:, :64] * x[:, 64:])
        with pytest.raises(ValueError, match="num_threads is 0"):
            native.set_num_threads(0)
    finally:
        native.set_num_threads(before)


@needs_native
def test_callers_on_several_threads_do_not_mix() -> None:
    failures: list[int] = []

    def work(seed: int) -> None:
        x = torch.randn(300, 256, generator=torch.Generator().manual_seed(seed))
        wanted = cpu.gated_activation("silu", x, None)
        for _ in range(50):
            if not torch.equal(cpu.gated_activation("silu", x, None), wanted):
                failures.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@needs_native
@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="threads have no affinity on this system")
def test_beside_a_busy_process_every_piece_is_done_once() -> None:
    """Workers leave and come back between pieces there; the caller's own affinity is nobody's business."""
    x, weight = torch.randn(600, 512), torch.rand(512)
    before, allowed = native.num_threads(), os.sched_getaffinity(0)
    native.set_num_threads(1)
    residual = torch.zeros_like(x)
    wanted = cpu.rms_norm(x, weight, 1e-5, residual, None)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        native.set_num_threads(3)
        ends = time.monotonic() + 1.5
        while time.monotonic() < ends:
            residual = torch.zeros_like(x)
            assert torch.equal(cpu.rms_norm(x, weight, 1e-5, residual, None), wanted)
            assert torch.equal(residual, x)  # a piece done twice would add x twice
    finally:
        native.set_num_threads(before)
        for process in busy:
            process.kill()
            process.wait()
    assert os.sched_getaffinity(0) == allowed


@needs_native
def test_a_forked_child_makes_its_own_pool() -> None:
    code = """
import os, sys, torch
from pagedserve.kernels import cpu, native
native.set_num_threads(3)
x = torch.randn(400, 256)
wanted = cpu.gated_activation("silu", x, None)
child = os.fork()
same = all(torch.equal(cpu.gated_activation("silu", x, None), wanted) for _ in range(20))
if child == 0:
    os._exit(0 if same and native.num_threads() == 3 else 1)
sys.exit(os.waitpid(child, 0)[1] or not same)
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr
