"""The Dockerfiles as a linter sees them, and what the build is given."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILES = sorted((ROOT / "docker").glob("Dockerfile*"))


def test_both_are_here() -> None:
    assert [path.name for path in DOCKERFILES] == ["Dockerfile", "Dockerfile.cpu"]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_the_linter_has_nothing_to_say(path: Path) -> None:
    linter = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if linter is None:
        pytest.skip("hadolint is not installed (it comes with the extra `test` on Linux)")
    done = subprocess.run([linter, "--no-color", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_build_sees_what_the_package_is_made_of_and_nothing_else() -> None:
    """.dockerignore names all that pyproject.toml and CMakeLists.txt read."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    allowed = {line[1:] for line in lines if line.startswith("!")}
    assert "*" in lines
    assert allowed == {"pyproject.toml", "CMakeLists.txt", "README.md", "csrc", "pagedserve"}
    assert all((ROOT / name).exists() for name in allowed)
