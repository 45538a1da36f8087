"""The only module that reads `os.environ`: every variable, its type and its default.

Values are read at call time, so tests may set them with `monkeypatch.setenv`.
"""

from __future__ import annotations

import os
from pathlib import Path

from pagedserve.config import parse_bytes


def cache_dir() -> Path:
    """PAGEDSERVE_CACHE_DIR: models, converted tokenizers, packed weights (default ~/.cache/pagedserve)."""
    value = os.environ.get("PAGEDSERVE_CACHE_DIR")
    return Path(value) if value else Path.home() / ".cache" / "pagedserve"


def packed_cache_bytes() -> int:
    """PAGEDSERVE_PACKED_CACHE: most bytes of packed weights kept in the cache folder, such as 8GiB (default 20GiB);
    0: none are kept."""
    return parse_bytes(os.environ.get("PAGEDSERVE_PACKED_CACHE") or "20GiB", "PAGEDSERVE_PACKED_CACHE")


def api_keys() -> tuple[str, ...]:
    """PAGEDSERVE_API_KEY: one key or several, separated by commas; added to those of --api-key."""
    return tuple(key for key in os.environ.get("PAGEDSERVE_API_KEY", "").split(",") if key)


def cpu_isa() -> str | None:
    """PAGEDSERVE_CPU_ISA: force the native kernels' instruction set (scalar, avx2, avx512, neon)."""
    return os.environ.get("PAGEDSERVE_CPU_ISA") or None


def native_disabled() -> bool:
    """PAGEDSERVE_DISABLE_NATIVE=1: use the torch reference ops though the native library is there."""
    return os.environ.get("PAGEDSERVE_DISABLE_NATIVE", "") not in ("", "0")


def triton_interpreted() -> bool:
    """TRITON_INTERPRET=1: Triton's own switch; its kernels run on CPU tensors, slowly, instead of native ones."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def cuda_library() -> Path | None:
    """PAGEDSERVE_CUDA_LIBRARY: a libpagedserve_cuda elsewhere, such as the one that emulates csrc/cuda on the CPU."""
    value = os.environ.get("PAGEDSERVE_CUDA_LIBRARY")
    return Path(value) if value else None


def log_level() -> str:
    """PAGEDSERVE_LOG_LEVEL: debug, info, warning or error (default info)."""
    return os.environ.get("PAGEDSERVE_LOG_LEVEL", "info")


def no_color() -> bool:
    """NO_COLOR: plain log lines (https://no-color.org)."""
    return "NO_COLOR" in os.environ


def of_core() -> dict[str, str]:
    """What the core's process is given: all of ours, and OPENBLAS_THREAD_TIMEOUT, unless that is set.

    The threads of numpy's BLAS, which nothing there uses, then sleep at once instead of spinning for 50 ms, just while
    the cores are wanted for importing torch.
    """
    return {"OPENBLAS_THREAD_TIMEOUT": "4", **os.environ}


def snapshot() -> dict[str, str]:
    """The variables of ours that are set, for `pagedserve collect-env`; keys are never shown."""
    shown = {name: value for name, value in sorted(os.environ.items()) if name.startswith("PAGEDSERVE_")}
    if "PAGEDSERVE_API_KEY" in shown:
        shown["PAGEDSERVE_API_KEY"] = "(set)"
    return shown
