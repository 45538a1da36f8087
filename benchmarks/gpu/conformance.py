"""Every kernel against its definition, on the device, by the cases that pytest runs under the interpreter."""

from __future__ import annotations

import time
from importlib import import_module

import torch

from benchmarks.gpu import clock
from benchmarks.gpu.check import Check


def run(check: Check, shard: int = 0, num_shards: int = 1) -> None:
    """A share of the cases, small ones first; a case that fails costs itself alone.

    Shards run side by side: compiling what a case needs takes longer than the case.
    """
    cases = all_cases(check)[shard::num_shards]
    if check.scale == "tiny":  # one of each module: the interpreter takes seconds a case
        first: dict[str, tuple[str, object]] = {}
        for name, case in cases:
            first.setdefault(name.partition(":")[0], (name, case))
        cases = list(first.values())
    # fp32 products in TF32 would be compared with exact ones.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    for name, case in cases:
        check.measure(name, lambda name=name, case=case: _run(check, name, case), needs=3.0)


def all_cases(check: Check) -> list[tuple[str, object]]:
    """(module:case, case), those for a card only where there is one."""
    from tests.kernels import cases

    found = []
    for module_name in cases.MODULES:
        module = module_name.rpartition(".")[2]
        if module.startswith("cuda") and not check.on_gpu:
            check.skip(f"{module}: cases", "they run on a card; pytest runs them on an emulation")
            continue
        try:
            made = import_module(module_name).cases()
        except Exception as error:
            check.fail(f"{module}: cases", error)
            continue
        found += [(f"{module}:{case.name}", case) for case in made if check.on_gpu or not case.full_size]
    return sorted(found, key=lambda item: item[1].full_size)


def _run(check: Check, name: str, case: object) -> None:
    started = time.perf_counter()
    try:
        case.run(check.device)
        clock.synchronize(check.device)
    except AssertionError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        check.check(name, False, note="; ".join(lines)[:200])
        return
    finally:
        if check.on_gpu:
            torch.cuda.empty_cache()
    check.check(name, True, note=f"{time.perf_counter() - started:.2f} s", quiet=True)
