"""The CUDA kernels, run on the CPU: numbers, races, reads and writes out of bounds, bank conflicts.

One process for all cases, since a wild access ends it.
"""

from __future__ import annotations

import pytest

from tests.helpers import cuda_emulation
from tests.kernels.interpreter import interpreted, small_cases

MODULE = "tests.kernels.cases.cuda"


@pytest.fixture(scope="module")
def failures(request: pytest.FixtureRequest) -> dict[str, str]:
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    names = [item.callspec.params["name"] for item in items if "name" in item.callspec.params]
    return interpreted(MODULE, names, PAGEDSERVE_CUDA_LIBRARY=str(cuda_emulation.build()))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", small_cases(MODULE))
def test_kernels_equal_attention_in_fp64(name: str, failures: dict[str, str]) -> None:
    assert not failures[name], failures[name]
