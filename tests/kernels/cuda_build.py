"""Builds csrc/cuda with nvcc, for cards that are not here, and reads off what its kernels will take of one.

`python -m tests.kernels.cuda_build` prints the table of all of them (about two minutes of CPU time); `--write` keeps it
in cuda_resources.json, against which later builds are checked.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"
KEPT = Path(__file__).with_name("cuda_resources.json")
HEAD_DIMS = (64, 80, 96, 128, 256)
CAPABILITIES = (80, 90)
# Per multiprocessor: CUDA C++ Programming Guide, table of compute capabilities. A CTA gets 1 KiB less than all of it.
_SHARED_BYTES = {80: 164 << 10, 90: 228 << 10}
_REGISTERS, _WARPS, _CTAS, _RESERVED_SHARED = 65536, 64, 32, 1024
_DTYPES = {"Float": 0, "BFloat16": 1, "Half": 2}
_CODES = {"Int8": 3, "Float8E4M3": 4}
_DECODE_WARPS = 4


@dataclass(frozen=True)
class Kernel:
    capability: int
    name: str  # as in "decode_mma<BFloat16, Int8, 128, 8>"
    registers: int
    stack_bytes: int
    spilled_bytes: int

    @property
    def key(self) -> str:
        return f"sm_{self.capability} {self.name}"

    @property
    def arguments(self) -> list[str]:
        """Of the template; empty where there is none."""
        return re.findall(r"\w+", self.name.partition("<")[2])

    @property
    def is_decode(self) -> bool:
        return self.name.startswith("decode_")

    @property
    def head_dim(self) -> int:
        return int(self.arguments[-2] if self.name.startswith("decode_mma") else self.arguments[-1])

    def shared_query(self) -> tuple[int, int, int, int]:
        """What ps_cuda_decode_shared_bytes wants: head_dim, rows, dtype, cache dtype."""
        if not self.name.startswith("decode_mma"):
            return self.head_dim, 1, 0, 0
        dtype, codes = _DTYPES[self.arguments[0]], self.arguments[1]
        return self.head_dim, int(self.arguments[-1]), dtype, _CODES.get(codes, dtype)

    def ctas_per_sm(self, shared_bytes: int) -> int:
        """How many are resident at once; 0 where one does not fit."""
        total = _SHARED_BYTES[self.capability]
        if shared_bytes > total - _RESERVED_SHARED:
            return 0
        per_warp = -(-self.registers * 32 // 256) * 256
        by_shared = total // (shared_bytes + _RESERVED_SHARED)
        return min(_REGISTERS // (per_warp * _DECODE_WARPS), by_shared, _WARPS // _DECODE_WARPS, _CTAS)


def nvcc() -> str | None:
    return shutil.which("nvcc")


def nvcc_version() -> str:
    told = subprocess.run([str(nvcc()), "--version"], capture_output=True, text=True, check=True).stdout
    return re.search(r"V([\d.]+)", told)[1]


def build(
    folder: Path, capabilities: Sequence[int], head_dims: Sequence[int], *, without: str = "-"
) -> tuple[Path, list[Kernel]]:
    """The library in `folder`, built with the project's flags, and what ptxas said of each kernel. Files whose name
    contains `without` come without their kernels."""
    options = ["-std=c++17", "-O3", "-DPS_HEAD_DIMS_CHOSEN", f"-I{CSRC / 'include'}", "-Xptxas", "-v", "-cudart=static"]
    options += ["-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall,-Wextra"]
    dims = [f"-DPS_HEAD_DIM_{dim}=1" for dim in head_dims]
    for capability in capabilities:
        options += ["-gencode", f"arch=compute_{capability},code=sm_{capability}"]

    def compiled(path: Path) -> tuple[Path, str]:
        target = folder / f"{path.name}.o"
        own = [] if without in path.name else dims
        return target, _run(str(nvcc()), *options, *own, "-c", str(path), "-o", str(target))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(compiled, sorted((CSRC / "cuda").glob("*.cu"))))
    library = folder / "libpagedserve_cuda.so"
    _run(str(nvcc()), "-shared", "-cudart=static", "-o", str(library), *(str(path) for path, _ in results))
    said = "".join(text for _, text in results)
    assert "warning" not in said, said
    return library, parse(said)


def parse(said: str) -> list[Kernel]:
    """ptxas -v, one kernel after another."""
    found = re.findall(
        r"Compiling entry function '(\w+)' for 'sm_(\d+)'.*?"
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers",
        said,
        re.DOTALL,
    )
    names = _run("c++filt", *(name for name, *_ in found)).splitlines() if found else []
    return [
        Kernel(int(capability), _short(name), int(registers), int(stack), int(stores) + int(loads))
        for name, (_, capability, stack, stores, loads, registers) in zip(names, found, strict=True)
    ]


def _short(name: str) -> str:
    """ "ps::decode_mma<ps::Half, ps::Same<ps::Half>, 64, 8>(...)" without namespaces, types of types and parameters."""
    name = name.removeprefix("void ").replace("ps::", "").replace("(anonymous namespace)::", "").partition("(")[0]
    return re.sub(r"(\w+)<(?:BFloat16|Half|Float)>", r"\1", name)


def kept() -> dict[str, Kernel]:
    """Kernels of the last `--write`; empty where another nvcc wrote them, which may allocate otherwise."""
    told = json.loads(KEPT.read_text()) if KEPT.is_file() else {"nvcc": None}
    return {k.key: k for k in map(_kernel, told["kernels"])} if told["nvcc"] == nvcc_version() else {}


def _kernel(fields: dict) -> Kernel:
    return Kernel(**fields)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    with tempfile.TemporaryDirectory() as folder:
        _, kernels = build(Path(folder), CAPABILITIES, HEAD_DIMS)
    kernels.sort(key=lambda kernel: kernel.key)
    for kernel in kernels:
        print(f"{kernel.key:60} {kernel.registers:4} registers {kernel.spilled_bytes:4} bytes spilled")
    if parser.parse_args().write:
        lines = ",\n".join("  " + json.dumps(asdict(kernel)) for kernel in kernels)
        KEPT.write_text(f'{{"nvcc": "{nvcc_version()}", "kernels": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
