"""The build where there is no compiler, or a broken one: it succeeds, says so, and makes no library."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def configure(where: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("cmake is not installed")
    command = [cmake, "-S", str(ROOT), "-B", str(where), "-DSKBUILD=1", *options]
    inherited = {name: value for name, value in os.environ.items() if name not in ("CXX", "CXXFLAGS")}
    return subprocess.run(command, env=inherited | environment, capture_output=True, text=True, timeout=120)


@pytest.fixture
def tools_without_a_compiler(tmp_path: Path) -> str:
    """A PATH with what CMake needs to build, but no compiler."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in ("make", "ninja", "sh", "uname", "cat"):
        found = shutil.which(tool)
        if found:
            (folder / tool).symlink_to(found)
    return str(folder)


def test_no_compiler(tmp_path: Path, tools_without_a_compiler: str) -> None:
    done = configure(tmp_path / "build", PATH=tools_without_a_compiler)
    assert done.returncode == 0, done.stderr
    assert "no working C++ compiler" in done.stderr
    assert not list(tmp_path.rglob("csrc"))


def test_a_compiler_that_does_not_work(tmp_path: Path) -> None:
    done = configure(tmp_path / "build", CXX="/bin/false")
    assert done.returncode == 0, done.stderr
    assert "no working C++ compiler" in done.stderr


def test_with_a_compiler_every_set_of_this_machine_is_built(tmp_path: Path) -> None:
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler here")
    done = configure(tmp_path / "build")
    assert done.returncode == 0, done.stderr
    assert "are left out" not in done.stderr and "not built" not in done.stderr


def test_cuda_kernels_that_were_asked_for_need_an_nvcc(tmp_path: Path) -> None:
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler here")
    done = configure(tmp_path / "on", "-DPS_CUDA=ON", CUDACXX="/bin/false")
    assert done.returncode != 0 and "PS_CUDA=ON, but there is no nvcc that works" in done.stderr
    done = configure(tmp_path / "off", "-DPS_CUDA=OFF", CUDACXX="/bin/false")
    assert done.returncode == 0 and "CUDA" not in done.stdout, done.stderr
    done = configure(tmp_path / "wrong", "-DPS_CUDA=MAYBE")
    assert done.returncode != 0 and "PS_CUDA is AUTO, ON or OFF, not MAYBE" in done.stderr
