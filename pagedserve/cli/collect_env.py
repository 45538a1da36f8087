"""`pagedserve collect-env`: what a bug report needs, and nothing private (keys are never shown)."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from importlib import metadata
from typing import Any

from pagedserve import __version__, envs

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "safetensors",
    "gguf",
    "fastapi",
    "uvicorn",
    "uvloop",
    "pydantic",
    "msgspec",
    "numpy",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON line")


def run(args: argparse.Namespace) -> int:
    facts = collect()
    if args.json:
        print(json.dumps(facts))
        return 0
    for section, values in facts.items():
        print(f"[{section}]")
        for name, value in values.items():
            print(f"  {name}: {value}")
    return 0


def collect() -> dict[str, dict[str, Any]]:
    """Facts by section; each is cheap and none can fail the command."""
    return {
        "pagedserve": {"version": __version__, **_native()},
        "machine": _machine(),
        "python": {"version": sys.version.split()[0], "implementation": platform.python_implementation()},
        "packages": {name: _version(name) for name in PACKAGES},
        "cuda": _cuda(),
        "environment": envs.snapshot(),
    }


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _machine() -> dict[str, Any]:
    facts: dict[str, Any] = {
        "platform": platform.platform(),
        "architecture": platform.machine(),
        "cpu": _cpu_model(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        facts["memory_gib"] = round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)
    return facts


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def _native() -> dict[str, Any]:
    from pagedserve.kernels import native

    return {"cpu_kernels": native.describe()}


def _cuda() -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        return {"available": False, "torch_built_with": torch.version.cuda or "no CUDA"}
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {"available": True, "torch_built_with": torch.version.cuda, "devices": devices}
