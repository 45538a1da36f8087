"""The native libraries from csrc, as a bare machine has none."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu.check import Check

ROOT = Path(__file__).parents[2]
_ENTRY = re.compile(r"Compiling entry function '([^']+)' for '(sm_\d+a?)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")


def run(check: Check) -> None:
    """Into pagedserve/lib, where the package looks; what registers and spills nvcc reports is kept."""
    check.measure("cpu library", lambda: _cpu(check))
    check.measure("cuda library", lambda: build_cuda(check))


def _cpu(check: Check) -> None:
    from pagedserve.kernels import native

    if check.scale == "tiny" or native.available():
        check.record("cpu library", "is there", quiet=True)
        return
    _build(check, ["-DPS_CUDA=OFF"], ROOT / "build" / "gpu-check-cpu", "pagedserve_cpu")
    check.record("cpu library", "built", quiet=True)


def build_cuda(check: Check, architectures: str = "") -> None:
    """For the card that is here, or for `architectures` as CMake writes them."""
    sources = ROOT / "csrc" / "cuda"
    if not sources.is_dir():
        check.skip("cuda kernels", "there is no csrc/cuda")
        return
    if shutil.which("nvcc") is None:
        check.skip("cuda kernels", "nvcc is not on PATH")
        return
    if check.scale == "tiny":
        check.skip("cuda kernels", "compiling takes minutes of a CPU")
        return
    if not architectures:
        import torch

        major, minor = torch.cuda.get_device_capability() if check.on_gpu else (9, 0)
        architectures = f"{major}{minor}-real"
    flags = ["-DPS_CUDA=ON", f"-DCMAKE_CUDA_ARCHITECTURES={architectures}"]
    text = _build(check, flags, ROOT / "build" / "gpu-check-cuda", "pagedserve_cuda")
    kernels = resources(text)
    spilling = {name: spilled for name, _, spilled in kernels if spilled}
    check.record("cuda kernels", len(kernels), "kernels", note=f"for {architectures}")
    most = max((registers for _, registers, _ in kernels), default=0)
    check.record("most registers of a cuda kernel", most, quiet=True)
    check.check("no cuda kernel spills", not spilling, note=", ".join(list(spilling)[:3]))


def resources(text: str) -> list[tuple[str, int, int]]:
    """Kernel, registers and bytes spilled, from what `ptxas -v` printed."""
    found: list[tuple[str, int, int]] = []
    name, spilled = "", 0
    for line in text.splitlines():
        if match := _ENTRY.search(line):
            name, spilled = f"{match[1]} {match[2]}", 0
        elif match := _SPILLS.search(line):
            spilled = int(match[2]) + int(match[3])
        elif (match := _REGISTERS.search(line)) and name:
            found.append((name, int(match[1]), spilled))
            name = ""
    return found


def _build(check: Check, flags: list[str], folder: Path, target: str) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    cmake = shutil.which("cmake") or str(Path(sys.executable).with_name("cmake"))
    jobs = str(os.cpu_count() or 4)
    text = ""
    for command in (
        [cmake, "-S", str(ROOT), "-B", str(folder), *generator, *flags],
        [cmake, "--build", str(folder), "--target", target, "--parallel", jobs, "--verbose"],
    ):
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False,
            timeout=max(check.left, 5),
        )  # fmt: skip
        text += done.stdout
        if done.returncode:
            print(done.stdout[-8000:])
            wrong = [line for line in done.stdout.splitlines() if "error" in line.lower()]
            raise RuntimeError(f"{' '.join(command[:2])} failed: {(wrong or ['see the log'])[0][:200]}")
    return text
