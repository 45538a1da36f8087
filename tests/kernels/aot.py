"""Compiles kernels for GPUs that are not here, and reads off what they will take of one.

`python -m tests.kernels.aot` prints the table of every shipped variant; `--write` keeps it in aot_resources.json,
against which later compilations are checked. Nothing here imports pytest.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pagedserve.kernels.triton.variants import Variant, all_variants

CAPABILITIES = (80, 90)
KEPT = Path(__file__).with_name("aot_resources.json")
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

# Per multiprocessor: CUDA C++ Programming Guide, table of compute capabilities.
_SHARED_BYTES = {80: 164 << 10, 90: 228 << 10}
_REGISTERS, _MAX_WARPS, _MAX_CTAS, _RESERVED_SHARED = 65536, 64, 32, 1024


@dataclass(frozen=True)
class Resources:
    """What one variant takes on one target."""

    name: str
    capability: int
    registers: int  # of a thread
    stack_bytes: int  # of a thread; spilled registers lie there
    shared_bytes: int
    num_warps: int

    @property
    def ctas_per_sm(self) -> int:
        """How many can be resident at once."""
        per_warp = -(-self.registers * 32 // 256) * 256
        by_shared = _SHARED_BYTES[self.capability] // (self.shared_bytes + _RESERVED_SHARED)
        return min(_REGISTERS // (per_warp * self.num_warps), by_shared, _MAX_WARPS // self.num_warps, _MAX_CTAS)


@dataclass(frozen=True)
class Compiled:
    resources: Resources
    ptx: str
    sass: str  # empty unless asked for
    seconds: float


def compile_variant(variant: Variant, capability: int, *, sass: bool = False) -> Compiled:
    """Compiles for a target that need not be here. Raises what Triton raises."""
    start = time.perf_counter()
    names = variant.kernel.arg_names
    signature: dict[str, str] = {}
    constants = dict(variant.constexprs)
    alignments: dict[tuple[int], list[list[object]]] = {}
    for index, name in enumerate(names):
        kind, _, alignment = variant.signature.get(name, "constexpr").partition(":")
        if kind in ("None", "1"):
            constants[name] = None if kind == "None" else 1
            kind = "constexpr"
        signature[name] = kind
        if alignment:
            alignments[(index,)] = [["tt.divisibility", int(alignment)]]
    missing = {name for name, kind in signature.items() if kind == "constexpr"} ^ set(constants)
    assert not missing, f"{variant.name}: {sorted(missing)} are neither arguments nor constexprs of the kernel"
    source = ASTSource(fn=variant.kernel, signature=signature, constexprs=constants, attrs=alignments)
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=variant.options())
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _cuobjdump("--dump-resource-usage", file.name)
        listing = _cuobjdump("-sass", file.name) if sass else ""
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    resources = Resources(
        variant.name, capability, int(found[1]), int(found[2]), kernel.metadata.shared, kernel.metadata.num_warps
    )
    return Compiled(resources, kernel.asm["ptx"], listing, time.perf_counter() - start)


def _cuobjdump(*arguments: str) -> str:
    return subprocess.run([_TOOLS / "cuobjdump", *arguments], capture_output=True, text=True, check=True).stdout


def faults(variant: Variant, compiled: Compiled) -> list[str]:
    """What is wrong with a compiled variant, apart from comparison with what is kept."""
    found, resources = [], compiled.resources
    if resources.stack_bytes:
        found.append(f"{resources.stack_bytes} bytes of stack: registers are spilled")
    if resources.ctas_per_sm < variant.ctas_per_sm:
        found.append(f"{resources.ctas_per_sm} CTAs fit a multiprocessor, planned are {variant.ctas_per_sm}")
    found += [
        f"its PTX has no {wanted}"
        for wanted in variant.expects.get(resources.capability, ())
        if wanted not in compiled.ptx
    ]
    return found


@cache
def _by_name() -> dict[str, Variant]:
    return {variant.name: variant for variant in all_variants()}


def _job(arguments: tuple[str, int]) -> tuple[Resources | None, list[str]]:
    name, capability = arguments
    variant = _by_name()[name]
    try:
        compiled = compile_variant(variant, capability)
    except Exception as error:
        return None, [f"does not compile: {error}"]
    return compiled.resources, faults(variant, compiled)


def compile_all(
    variants: Iterable[Variant], capabilities: Sequence[int] = CAPABILITIES, processes: int | None = None
) -> dict[tuple[str, int], tuple[Resources | None, list[str]]]:
    """Compiles in parallel processes. (name, capability) -> resources (None: it does not compile) and faults."""
    jobs = [(v.name, c) for v in variants for c in capabilities if c in v.capabilities]
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(processes or os.cpu_count() or 1, max(1, len(jobs)))) as pool:
        return dict(zip(jobs, pool.map(_job, jobs, chunksize=1), strict=True))


def kept_by_this_triton() -> bool:
    """Whether the kept numbers are this compiler's."""
    return KEPT.exists() and json.loads(KEPT.read_text(encoding="utf-8"))["triton"] == triton.__version__


def kept() -> dict[tuple[str, int], Resources]:
    """The resources of the last `--write`."""
    rows = json.loads(KEPT.read_text(encoding="utf-8"))["variants"] if KEPT.exists() else []
    return {(row["name"], row["capability"]): Resources(**row) for row in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="variants whose name contains this")
    parser.add_argument("--write", action="store_true", help=f"keep the numbers in {KEPT.name}")
    arguments = parser.parse_args()
    results = compile_all([v for v in all_variants() if arguments.only in v.name])
    print(
        f"triton {triton.__version__}\n{'variant':44} {'sm':>3} {'regs':>4} {'stack':>5} {'shared':>7} {'CTAs/SM':>7}"
    )
    for (name, capability), (r, wrong) in results.items():
        numbers = "" if r is None else f"{r.registers:4} {r.stack_bytes:5} {r.shared_bytes:7} {r.ctas_per_sm:7}"
        print(f"{name:44} {capability:3} {numbers} {'; '.join(wrong)}")
    if arguments.write:
        new = {key: resources for key, (resources, _) in results.items() if resources is not None}
        rows = [asdict(r) for _, r in sorted(({**kept(), **new} if arguments.only else new).items())]
        lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
        KEPT.write_text(f'{{"triton": "{triton.__version__}", "variants": [\n{lines}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
