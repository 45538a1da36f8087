"""Everything that only a GPU can prove, in one command and under six minutes, on a machine without a network.

    python benchmarks/gpu_check.py --out OUT            # on a card; --quick: 90 seconds of it
    python benchmarks/gpu_check.py --compile-only       # anywhere: every kernel compiled for sm_80 and sm_90
    python benchmarks/gpu_check.py --device cpu --tiny  # anywhere: every phase's code, on next to no work

Needs Python 3.11 or newer, torch with CUDA and its Triton, numpy, safetensors, tokenizers, transformers, jinja2 and
tqdm, and nvcc, cmake and ninja to build csrc. What else the engine imports is in gpu_wheels.txt (the HTTP phase is left
out where the web server is not there). Carry the wheels along where packages cannot be fetched:

    python -m pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux2014_x86_64 \\
        $(printf -- '--platform manylinux_2_%s_x86_64 ' 17 24 27 28 31 34 35) -d wheels -r benchmarks/gpu_wheels.txt
    python -m pip install --no-index --no-deps --target site wheels/*.whl && export PYTHONPATH=$PWD/site

Each phase runs in a process of its own with a time limit, so a crash or a hang costs that phase's rest at most: what
was measured is on the disk line by line (`gpu_check.jsonl`), what crashed is passed over when the phase goes on in
another. Building and compiling run side by side first; the short table comes last. Exit code 1: a check failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# From the root alone: modules of this folder must not stand in the way of others, nor other packages named `tests`.
sys.path[:] = [
    str(ROOT),
    *(path for path in sys.path if path and Path(path).resolve() != Path(__file__).resolve().parent),
]
# Processes that phases start find the package too, which a bare machine has not installed.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
for _name in ("benchmarks", "tests"):
    if _name not in sys.modules:
        sys.modules[_name] = _package = types.ModuleType(_name)
        _package.__path__ = [str(ROOT / _name)]

from benchmarks.gpu import report  # noqa: E402
from benchmarks.gpu.phases import COMPILE_PHASES, PHASES, Phase, Runner  # noqa: E402

BUDGETS = {"full": 345.0, "quick": 88.0, "tiny": 900.0}
COMPILE_BUDGET = 3600.0


def main(arguments: list[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    scale = "tiny" if args.tiny else "quick" if args.quick else "full"
    table = COMPILE_PHASES if args.compile_only else PHASES
    chosen = _chosen(table, args.only, args.skip)
    if isinstance(chosen, str):
        print(f"gpu_check: {chosen}", file=sys.stderr)
        return 2
    device = "cpu" if args.compile_only else args.device
    if device == "cuda" and (reason := _no_card()) is not None:
        print(f"gpu_check: {reason}; --compile-only and --device cpu --tiny run anywhere", file=sys.stderr)
        return 2
    if device == "cpu" and scale != "tiny" and not args.compile_only:
        print("gpu_check: --device cpu only shows that the phases run; give --tiny with it", file=sys.stderr)
        return 2
    out = Path(args.out or os.environ.get("OUT") or ROOT / "build" / "gpu-check")
    out.mkdir(parents=True, exist_ok=True)
    budget = args.budget or (COMPILE_BUDGET if args.compile_only else BUDGETS[scale])
    runner = Runner(out, device=device, scale=scale, budget=budget, pattern=args.variants)
    started = time.monotonic()
    try:
        runner.run(chosen)
    finally:
        took = time.monotonic() - started
        failed = report.finish(runner.results, out / "gpu_check.json", seconds=took, scale=scale, device=device)
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="90 seconds: the ceilings, conformance, the main figures")
    parser.add_argument("--tiny", action="store_true", help="next to no work, to see that every phase runs")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--compile-only", action="store_true", help="compile all kernels for sm_80 and sm_90, run none")
    parser.add_argument("--variants", default="", metavar="TEXT", help="of Triton kernels those whose name has this")
    parser.add_argument("--only", default="", metavar="NAMES", help="phases, with commas between them")
    parser.add_argument("--skip", default="", metavar="NAMES", help="phases to leave out")
    parser.add_argument("--budget", type=float, help="seconds for all (default: 345, 88 with --quick)")
    parser.add_argument("--out", help="folder for results (default: $OUT, else build/gpu-check)")
    return parser


def _chosen(table: tuple[Phase, ...], only: str, skip: str) -> list[Phase] | str:
    """The phases to run, or what is wrong with the names."""
    known = list(dict.fromkeys(phase.name for phase in table))
    wanted, unwanted = ({name.strip() for name in text.split(",") if name.strip()} for text in (only, skip))
    if strange := sorted((wanted | unwanted) - set(known)):
        return f"no phase {', '.join(strange)}; there are {', '.join(known)}"
    return [phase for phase in table if (not wanted or phase.name in wanted) and phase.name not in unwanted]


_DEVICES = """
import ctypes
driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
error = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
print("error", error) if error else print(count.value, "devices")
"""


def _no_card() -> str | None:
    """Why there is none. Another process asks the driver: this one must touch no device, for phases are its forks."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA"
    done = subprocess.run([sys.executable, "-c", _DEVICES], capture_output=True, text=True, check=False)
    said = ((done.stdout or done.stderr).strip().splitlines() or ["nothing"])[-1]
    count, _, what = said.partition(" ")
    return None if what == "devices" and int(count) else f"the CUDA driver finds no device ({said})"


if __name__ == "__main__":
    sys.exit(main())
