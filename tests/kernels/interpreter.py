"""Runs cases under Triton's interpreter in a process of their own: Triton reads the variable when it decorates kernels.

As a program: `TRITON_INTERPRET=1 python -m tests.kernels.interpreter MODULE [NAME ...]` prints one JSON object a case.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import torch

from tests.kernels.cases import Case

ROOT = Path(__file__).parents[2]


def small_cases(module: str) -> list[str]:
    """Names of the module's cases that the interpreter can take."""
    return [case.name for case in import_module(module).cases() if not case.full_size]


def interpreted(module: str, names: Sequence[str], **environment: str) -> dict[str, str]:
    """Runs the named cases of a module. Name -> why it failed, "" where it passed."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.interpreter", module, *names],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    failures = {report["name"]: report["failure"] for report in reports}
    lost = f"no result: the process ended with {done.returncode}\n{done.stderr[-4000:]}"
    return {name: failures.get(name, lost) for name in names}


def report(case: Case, device: torch.device) -> dict[str, object]:
    """Runs a case: its name, why it failed (or "") and its seconds."""
    start = time.perf_counter()
    try:
        case.run(device)
        failure = ""
    except Exception:
        failure = traceback.format_exc()
    return {"name": case.name, "failure": failure, "seconds": round(time.perf_counter() - start, 2)}


def main() -> None:
    module, *names = sys.argv[1:]
    for case in import_module(module).cases():
        if case.name in names or (not names and not case.full_size):
            print(json.dumps(report(case, torch.device("cpu"))), flush=True)


if __name__ == "__main__":
    main()
