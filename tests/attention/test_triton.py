"""The Triton backend and its kernels, run by Triton's interpreter in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.kernels.interpreter import ROOT, interpreted, small_cases

pytestmark = pytest.mark.timeout(900)  # the interpreter takes 40 s of an idle core
MODULES = ("tests.kernels.cases.triton_kv_cache", "tests.kernels.cases.triton_attention")


@pytest.fixture(scope="module")
def failures(request: pytest.FixtureRequest) -> dict[tuple[str, str], str]:
    """(module, name) of each case that is selected -> why it failed, or ""."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    selected = [(item.callspec.params.get("module"), item.callspec.params.get("name")) for item in items]
    found = {}
    for module in MODULES:
        names = [name for of, name in selected if of == module]
        if names:
            found |= {(module, name): failure for name, failure in interpreted(module, names).items()}
    return found


@pytest.mark.parametrize(("module", "name"), [(module, name) for module in MODULES for name in small_cases(module)])
def test_case(failures: dict[tuple[str, str], str], module: str, name: str) -> None:
    assert failures[module, name] == "", failures[module, name]


def test_the_backend_passes_what_all_backends_do() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "tests/attention/test_backends.py",
            "-k",
            "triton and not own_window and not 8-None and not 16-9",
        ],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and " passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-6000:]
