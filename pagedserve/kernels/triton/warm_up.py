"""Compiling the kernels that a server will launch before it launches them: several processes, no GPU, one cache.

Triton compiles a kernel where it is first launched, half a second each and one after the other. The same calls on
tensors without storage tell which kernels those will be; processes beside the one that loads weights compile them into
Triton's cache (TRITON_CACHE_DIR), where the first launch finds them. A file in that cache tells the next start of the
same model that nothing is left to do.

`python -m pagedserve.kernels.triton.warm_up CAPABILITY` compiles what stands on its standard input.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from pagedserve.kernels.triton.variants import Launch, Variant

# More would fight for the cores that load weights; a model has some twenty kernels.
MAX_PROCESSES = 8
# A compiler that takes longer hangs; the kernel is then compiled at its first launch.
TIMEOUT_SECONDS = 120.0


class CompileAhead:
    """The compilations of one start: begun on creation, over when `wait` returns."""

    def __init__(self, launches: Iterable[Launch], capability: int, num_processes: int | None = None) -> None:
        """`capability`: of the GPU that will run them, 10 * major + minor."""
        self._began = time.monotonic()
        variants = [_to_json(variant) for variant in distinct(launches)]
        self._done = _mark_of(variants, capability)
        if self._done.exists():
            variants = []
        self.num_variants = len(variants)  # that are not known to be there
        count = min(num_processes or max(1, (os.cpu_count() or 2) // 2), MAX_PROCESSES, len(variants))
        self._processes = [_start(variants[i::count], capability) for i in range(count)]

    def wait(self) -> float:
        """Seconds that it took. Whatever could not be compiled is left to its first launch, which will say why."""
        codes = []
        for process in self._processes:
            left = self._began + TIMEOUT_SECONDS - time.monotonic()
            try:
                codes.append(process.wait(max(left, 0.1)))
            except subprocess.TimeoutExpired:
                process.kill()
                codes.append(process.wait())
        if codes and not any(codes):
            with contextlib.suppress(OSError):  # a folder that cannot be written: the next start compiles again
                self._done.touch()
        self._processes = []
        return time.monotonic() - self._began


def distinct(launches: Iterable[Launch]) -> list[Variant]:
    """What Triton compiles for these launches, each once, in order of first use."""
    variants = {}
    for launch in launches:
        variant = launch.variant("")
        variants.setdefault(json.dumps(_to_json(variant), sort_keys=True), variant)
    return list(variants.values())


def _mark_of(variants: Sequence[dict[str, Any]], capability: int) -> Path:
    """A file in Triton's cache, for these kernels as they are written now. Whoever empties the cache takes it along."""
    modules = [import_module(name).__file__ for name in sorted({variant["module"] for variant in variants})]
    facts = json.dumps([triton.__version__, capability, variants], sort_keys=True).encode()
    code = b"".join(Path(path).read_bytes() for path in modules if path)
    return Path(triton.knobs.cache.dir) / f"pagedserve-{hashlib.sha256(facts + code).hexdigest()[:32]}"


def _start(variants: Sequence[dict[str, Any]], capability: int) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, str(capability)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdin is not None
    with process.stdin:
        process.stdin.write(json.dumps(variants).encode())
    return process


def _to_json(variant: Variant) -> dict[str, Any]:
    return {
        "module": variant.kernel.fn.__module__,
        "kernel": variant.kernel.fn.__name__,
        "signature": dict(variant.signature),
        # Types are the only constexprs that JSON does not know.
        "constexprs": {k: {"dtype": v.name} if isinstance(v, tl.dtype) else v for k, v in variant.constexprs.items()},
        "num_warps": variant.num_warps,
        "num_stages": variant.num_stages,
    }


def _from_json(fields: dict[str, Any]) -> Variant:
    return Variant(
        name=fields["kernel"],
        kernel=getattr(import_module(fields["module"]), fields["kernel"]),
        signature=fields["signature"],
        constexprs={k: tl.dtype(v["dtype"]) if isinstance(v, dict) else v for k, v in fields["constexprs"].items()},
        num_warps=fields["num_warps"],
        num_stages=fields["num_stages"],
    )


class TargetOnly:
    """A driver that knows for which GPU to compile, and has none."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_for(variants: Iterable[Variant], capability: int) -> None:
    """Compiles into Triton's cache, one after the other, without a GPU; this process can launch nothing afterwards."""
    driver.set_active(TargetOnly(capability))
    for variant in variants:
        try:
            variant.warm_up()
        except (triton.CompilationError, RuntimeError):
            continue  # the first launch will say so, where somebody can act on it


def main() -> int:
    """The other processes' entry point."""
    compile_for([_from_json(fields) for fields in json.load(sys.stdin)], int(sys.argv[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
