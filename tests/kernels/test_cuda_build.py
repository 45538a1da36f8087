"""csrc/cuda as nvcc builds it: no spills, as many CTAs a multiprocessor as planned, a library that loads anywhere."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.kernels import cuda_build
from tests.kernels.cuda_build import Kernel

pytestmark = [
    pytest.mark.skipif(cuda_build.nvcc() is None, reason="nvcc is not installed"),
    pytest.mark.timeout(900),
]

# What the decode kernels are planned for: enough CTAs that one loads keys while another begins or ends.
_PLANNED_CTAS = {(80, 64): 1, (80, 80): 1, (80, 96): 1, (80, 128): 1, (80, 256): 1,
                 (90, 64): 2, (90, 80): 2, (90, 96): 2, (90, 128): 2, (90, 256): 1}  # fmt: skip


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Kernel]]:
    """For one card, one head size and bf16: 20 s of CPU time, where all of them take ten times as much."""
    return cuda_build.build(tmp_path_factory.mktemp("cuda"), (90,), (128,), without="_f16")


def check(library: Path, kernels: list[Kernel]) -> None:
    size = ctypes.CDLL(str(library)).ps_cuda_decode_shared_bytes
    size.restype, size.argtypes = ctypes.c_int64, [ctypes.c_int64, ctypes.c_int64, ctypes.c_int, ctypes.c_int]
    kept, wrong = cuda_build.kept(), []
    for kernel in kernels:
        shared = size(*kernel.shared_query()) if kernel.is_decode else 0
        ctas = kernel.ctas_per_sm(shared)
        print(f"{kernel.key:60} {kernel.registers:4} registers {shared:7} bytes shared {ctas:3} CTAs/SM")
        if kernel.spilled_bytes or kernel.stack_bytes:
            wrong.append(f"{kernel.key}: {kernel.spilled_bytes} bytes spilled, stack of {kernel.stack_bytes}")
        if kernel.is_decode and (shared == 0 or ctas < _PLANNED_CTAS[kernel.capability, kernel.head_dim]):
            wrong.append(f"{kernel.key}: {ctas} CTAs of {shared} bytes on an SM")
        before = kept.get(kernel.key)
        if before is not None and kernel.registers > before.registers + 8:
            wrong.append(f"{kernel.key}: {kernel.registers} registers, were {before.registers}")
    assert not wrong, "\n".join(wrong)


def test_kernels_spill_nothing_and_fit_as_planned(built: tuple[Path, list[Kernel]]) -> None:
    library, kernels = built
    names = {kernel.name for kernel in kernels}
    formats = ("Same", "Int8", "Float8E4M3")
    assert names == {f"decode_mma<BFloat16, {kv}, 128, {rows}>" for kv in formats for rows in (8, 16)} | {
        "decode_fma<128>",
        "plan_decode",
        "copy_blocks",
    }
    check(library, kernels)


@pytest.mark.slow
def test_every_kernel_for_every_card(tmp_path: Path) -> None:
    library, kernels = cuda_build.build(tmp_path, cuda_build.CAPABILITIES, cuda_build.HEAD_DIMS)
    assert len(kernels) == 2 * (4 * 13 + 7 + 2)  # of 256 dimensions only 8 rows
    check(library, kernels)


def test_a_kernel_that_spills_is_told() -> None:
    name = "_ZN2ps10decode_mmaINS_8BFloat16ENS_4SameIS1_EELi128ELi8EEEvNS_16DecodeParametersE"
    said = f"""ptxas info    : Compiling entry function '{name}' for 'sm_90'
ptxas info    : Function properties for {name}
    48 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers"""
    (kernel,) = cuda_build.parse(said)
    assert kernel == Kernel(90, "decode_mma<BFloat16, Same, 128, 8>", 255, 48, 28)
    assert kernel.shared_query() == (128, 8, 1, 1)
    assert [kernel.ctas_per_sm(size) for size in (0, 98304, 120 << 10, 228 << 10)] == [2, 2, 1, 0]


def test_the_machine_code_is_what_was_meant(built: tuple[Path, list[Kernel]]) -> None:
    """Copies of 16 bytes that go past the registers, tensor cores, matrices from shared memory, no local memory."""
    if find_spec("triton") is None:
        pytest.skip("Triton, which brings cuobjdump, is not installed")
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    objects = built[0].parent / "decode_bf16.cu.o"
    code = subprocess.run([tool, "-sass", objects], capture_output=True, text=True, check=True).stdout
    functions = code.split("Function :")[1:]
    assert len(functions) == 2
    for function in functions:
        copies = re.findall(r"LDGSTS\.\S+", function)
        assert copies and all(copy.endswith(".128") and "BYPASS" in copy for copy in copies), copies
        assert "HMMA.16816.F32.BF16" in function
        assert "LDSM.16.M88.4" in function and "LDSM.16.MT88.4" in function and "MOVM.16.MT88" in function
        assert not re.search(r"\b(LDL|STL)\b", function)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_a_device_it_loads_and_says_so(built: tuple[Path, list[Kernel]]) -> None:
    program = """
import torch
from pagedserve.errors import ConfigError
from pagedserve.kernels import cuda, native_cuda

print(native_cuda.why_not())
assert native_cuda.size("ps_cuda_decode_row_tile", 128, 9, 1) == 16
pairs = torch.tensor([[0, 1]])
for call in (
    lambda: native_cuda.resident_ctas(128, 4, torch.bfloat16, torch.int8),
    lambda: native_cuda.call("ps_cuda_copy_blocks", 16, 4, 32, pairs.data_ptr(), 1, None),
):
    try:
        call()
    except ConfigError as error:
        assert "no CUDA device: " in str(error), error
    else:
        raise AssertionError("it ran")
try:
    native_cuda.resident_ctas(64, 4, torch.bfloat16, torch.int8)
except ConfigError as error:
    assert "no decode kernel for" in str(error), error
try:
    cuda.DecodeStep(seq_lens=torch.ones(1, dtype=torch.int32), block_tables=torch.ones(1, 1, dtype=torch.int32))
except ValueError as error:
    assert "must be on a CUDA device, it is on cpu" in str(error), error
"""
    environment = {**os.environ, "PAGEDSERVE_CUDA_LIBRARY": str(built[0])}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=cuda_build.ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("no CUDA device: ")
