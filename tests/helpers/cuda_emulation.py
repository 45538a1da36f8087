"""csrc/cuda compiled for the CPU: a library of the same C ABI, whose kernels run on fibers (csrc/tests)."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"
_OPTIONS = ("-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-DPS_CUDA_EMULATION")
_WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas")
_INCLUDES = tuple(f"-I{CSRC / folder}" for folder in ("tests", "cuda", "include"))


def build() -> Path:
    """The library, built unless one of these very sources lies in build/ (about 20 s of CPU time)."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler here")
    sources = [*sorted((CSRC / "cuda").glob("*.cu")), CSRC / "tests" / "cuda_emulation.cpp"]
    digest = hashlib.sha256(" ".join([compiler, *_OPTIONS]).encode())
    for path in [*sources, *_headers()]:
        digest.update(path.read_bytes())
    folder = ROOT / "build" / "cuda-emulation" / digest.hexdigest()[:16]
    library = folder / "libpagedserve_cuda_emulation.so"
    if library.is_file():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one process builds, the others wait
        if not library.is_file():
            _build(compiler, sources, library)
    return library


def _build(compiler: str, sources: Sequence[Path], library: Path) -> None:
    def compiled(path: Path) -> Path:
        target = library.with_name(f"{path.name}.o")
        _run(compiler, *_OPTIONS, *_WARNINGS, *_INCLUDES, "-x", "c++", "-c", str(path), "-o", str(target))
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, sources))
    linked = library.with_name("linked.so")
    _run(compiler, "-shared", "-o", str(linked), *map(str, objects))
    linked.rename(library)
    for path in objects:
        path.unlink()


def _headers() -> list[Path]:
    found = [*(CSRC / "cuda").glob("*.cuh"), *(CSRC / "cuda").glob("*.h"), *(CSRC / "tests").glob("*.h")]
    return sorted([*found, CSRC / "include" / "pagedserve_cuda.h", CSRC / "cpu" / "half.h"])


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
