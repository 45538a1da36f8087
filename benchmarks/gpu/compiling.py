"""Every Triton kernel that serving launches, compiled: on a card into its cache, anywhere ahead of time."""

from __future__ import annotations

import time

from benchmarks.gpu.check import Check


def on_card(check: Check, shard: int, num_shards: int) -> None:
    """A share of the shipped variants, compiled for this card into Triton's cache, where the other phases find them."""
    import torch

    from pagedserve.kernels.triton.variants import all_variants

    target = 90 if torch.cuda.get_device_capability() >= (9, 0) else 80
    variants = [variant for variant in all_variants() if target in variant.capabilities]
    for variant in variants[shard::num_shards]:
        check.measure(f"jit {variant.name}", lambda variant=variant: _warm_up(check, variant))


def _warm_up(check: Check, variant: object) -> None:
    started = time.perf_counter()
    compiled = variant.warm_up()
    took = time.perf_counter() - started
    note = ""
    if compiled is not None:
        compiled._init_handles()
        note = f"{compiled.n_regs} registers, {compiled.n_spills} spills, {compiled.metadata.shared} bytes shared"
        if compiled.n_spills:
            check.check(f"no spills: {variant.name}", False, note=note)
    check.record(f"jit {variant.name}", round(took, 2), "s", note=note, quiet=True)


def ahead_of_time(check: Check, pattern: str = "", processes: int | None = None) -> None:
    """All variants for sm_80 and sm_90, without a card: registers, stack and shared memory of each."""
    from pagedserve.kernels.triton.variants import all_variants
    from tests.kernels import aot

    variants = [variant for variant in all_variants() if pattern in variant.name]
    if not variants:
        raise ValueError(f"no variant's name has {pattern!r} in it")
    if check.scale == "tiny":
        variants = variants[:2]
    results = aot.compile_all(variants, processes=processes)
    for (name, capability), (resources, wrong) in results.items():
        note = "; ".join(wrong)
        if resources is not None:
            numbers = f"{resources.registers} registers, {resources.shared_bytes} bytes shared"
            note = f"{numbers}; {note}" if note else numbers
        check.check(f"{name} sm_{capability}", not wrong, note=note, quiet=not wrong)
    check.record("triton variants", len(results), "compilations")
