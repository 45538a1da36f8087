"""The ops of kernels/gpu.py on Triton kernels, run by its interpreter: the cases of triton_ops and triton_sampling."""

from __future__ import annotations

import pytest

from tests.kernels.interpreter import interpreted, small_cases

MODULES = ("tests.kernels.cases.triton_ops", "tests.kernels.cases.triton_sampling")


@pytest.fixture(scope="module")
def failures(request: pytest.FixtureRequest) -> dict[tuple[str, str], str]:
    """(module, name) of each case that is selected -> why it failed, or ""."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    chosen = [(item.callspec.params["module"], item.callspec.params["name"]) for item in items]
    found = {}
    for module in MODULES:
        if names := [name for of, name in chosen if of == module]:
            found.update({(module, name): why for name, why in interpreted(module, names).items()})
    return found


@pytest.mark.parametrize(("module", "name"), [(module, name) for module in MODULES for name in small_cases(module)])
def test_case(failures: dict[tuple[str, str], str], module: str, name: str) -> None:
    assert failures[module, name] == "", failures[module, name]
