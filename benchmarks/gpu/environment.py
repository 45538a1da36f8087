"""What the machine is, and its two ceilings: how fast it copies and how fast it multiplies."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib import metadata

import torch

from benchmarks.gpu import clock
from benchmarks.gpu.check import Check

_PACKAGES = (
    *("torch", "triton", "numpy", "transformers", "tokenizers", "safetensors", "msgspec", "llguidance", "fastapi"),
    *("uvicorn", "pydantic", "gguf", "flashinfer-python", "flash-attn"),
)


def run(check: Check) -> None:
    check.measure("versions", lambda: _versions(check))
    check.measure("device", lambda: _device(check))
    check.measure("copy", lambda: _copy(check))
    check.measure("matmul", lambda: _matmul(check))


def _versions(check: Check) -> None:
    check.record("python", platform.python_version(), quiet=True)
    check.record("cores", os.cpu_count() or 0, quiet=True)
    missing = []
    for name in _PACKAGES:
        try:
            check.record(name, metadata.version(name), quiet=name not in ("torch", "triton"))
        except metadata.PackageNotFoundError:
            missing.append(name)
    check.record("not installed", ", ".join(missing) or "nothing")
    compiler = shutil.which("nvcc")
    if compiler:
        text = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
        check.record("nvcc", text.strip().splitlines()[-1] if text.strip() else compiler, quiet=True)


def _device(check: Check) -> None:
    if not check.on_gpu:
        check.record("device", "the CPU, to see that the phases run")
        return
    properties = torch.cuda.get_device_properties(0)
    check.record("device", properties.name)
    check.record("capability", f"{properties.major}.{properties.minor}", quiet=True)
    check.record("multiprocessors", properties.multi_processor_count, quiet=True)
    free, total = torch.cuda.mem_get_info()
    check.record("memory", round(total / 2**30, 1), "GiB", note=f"{free / 2**30:.1f} free")
    check.record("cuda of torch", torch.version.cuda or "", quiet=True)


def _copy(check: Check) -> None:
    num_bytes = check.choose(full=4 << 30, quick=4 << 30, tiny=1 << 20)
    source = torch.empty(num_bytes, dtype=torch.uint8, device=check.device).random_(0, 256)
    target = torch.empty_like(source)
    took = clock.seconds([lambda: target.copy_(source)], check.device, budget=0.3)
    check.record("copy bandwidth", 2 * num_bytes / took, "B/s", note=f"{2 * num_bytes / took / 1e12:.2f} TB/s")


def _matmul(check: Check) -> None:
    size = check.choose(full=8192, quick=8192, tiny=64)
    dtype = torch.bfloat16
    left = torch.randn(size, size, dtype=dtype, device=check.device)
    right = torch.randn(size, size, dtype=dtype, device=check.device)
    out = torch.empty_like(left)
    took = clock.seconds([lambda: torch.mm(left, right, out=out)], check.device, budget=0.3)
    rate = 2 * size**3 / took
    check.record("matmul rate", rate, "FLOP/s", note=f"{rate / 1e12:.0f} TFLOP/s, bf16, {size}^3")
