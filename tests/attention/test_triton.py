"""Attention and KV-cache kernels in Triton, run by its interpreter: the cases of kernels/cases/triton_attention.py."""

from __future__ import annotations

import pytest

from tests.kernels.interpreter import interpreted, small_cases

MODULE = "tests.kernels.cases.triton_attention"


@pytest.fixture(scope="module")
def failures(request: pytest.FixtureRequest) -> dict[str, str]:
    """Name of each case that is selected -> why it failed, or ""."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    return interpreted(MODULE, [item.callspec.params["name"] for item in items if "name" in item.callspec.params])


@pytest.mark.parametrize("name", small_cases(MODULE))
def test_case(failures: dict[str, str], name: str) -> None:
    assert failures[name] == "", failures[name]
