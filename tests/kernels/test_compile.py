"""Every Triton kernel as it is shipped compiles for sm_80 and sm_90, spills nothing and takes what is planned.

The interpreter accepts programs that the compiler refuses, so conformance alone proves nothing about a GPU. A compiler
of another version may allocate otherwise: kept numbers are compared where Triton is the one that gave them.
"""

from __future__ import annotations

import pytest

from pagedserve.kernels.triton.variants import Variant, all_variants
from tests.kernels import aot

REPRESENTATIVE = [variant for variant in all_variants() if variant.representative]
OTHERS = [variant for variant in all_variants() if not variant.representative]


def check(variants: list[Variant]) -> None:
    kept, wrong = aot.kept(), []
    for (name, capability), (found, faults) in aot.compile_all(variants).items():
        wrong += [f"{name} sm_{capability}: {fault}" for fault in faults]
        if found is None or not aot.kept_by_this_triton():
            continue
        before = kept.get((name, capability))
        if before is None:
            wrong.append(f"{name} sm_{capability}: not in {aot.KEPT.name}; run `python -m tests.kernels.aot --write`")
        elif found.ctas_per_sm < before.ctas_per_sm:
            wrong.append(f"{name} sm_{capability}: {found.ctas_per_sm} CTAs/SM, were {before.ctas_per_sm}")
    assert not wrong, "\n".join(wrong)


def test_names_are_unique() -> None:
    names = [variant.name for variant in all_variants()]
    assert len(set(names)) == len(names)


def test_representative_kernels_compile_without_spills() -> None:
    check(REPRESENTATIVE)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_other_kernels_do() -> None:
    check(OTHERS)


def test_a_kernel_that_spills_is_told() -> None:
    variant = REPRESENTATIVE[0]
    resources = aot.Resources(variant.name, 90, registers=255, stack_bytes=40, shared_bytes=57 << 10, num_warps=16)
    faults = aot.faults(variant, aot.Compiled(resources, ptx="", sass="", seconds=0.0))
    assert "spilled" in faults[0] and "0 CTAs fit" in faults[1]
