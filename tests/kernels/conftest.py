from __future__ import annotations

import platform
from collections.abc import Iterator

import pytest

from pagedserve.kernels import native

IS_ARM = platform.machine().lower() in ("aarch64", "arm64")
ISAS = ("scalar", "neon") if IS_ARM else ("scalar", "avx2", "avx512")
# Sets that have packed linears of their own, and share all other kernels with one of the above.
LINEAR_ISAS = ("neon_dotprod", "neon_i8mm") if IS_ARM else ("avx2_vnni", "amx")
LINEAR_FILES = ("test_linear", "test_experts")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "isa" in metafunc.fixturenames:
        is_linear = metafunc.module.__name__.rpartition(".")[2] in LINEAR_FILES
        metafunc.parametrize("isa", ISAS + LINEAR_ISAS if is_linear else ISAS, indirect=True)


@pytest.fixture
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test once per instruction set that this machine can run, on two threads."""
    if not native.available():
        pytest.skip("the native library is not built in this environment")
    if request.param not in native.available_isas():
        pytest.skip(f"this CPU or this build cannot run {request.param} kernels")
    before = native.num_threads()
    native.set_num_threads(2)
    native.select_isa(request.param)
    yield request.param
    native.select_isa(None)
    native.set_num_threads(before)


@pytest.fixture(params=[1, 3])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    if not native.available():
        pytest.skip("the native library is not built in this environment")
    before = native.num_threads()
    native.set_num_threads(request.param)
    yield request.param
    native.set_num_threads(before)
