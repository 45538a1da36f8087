"""csrc as other CPUs see it: an AArch64 build under qemu-user, and this build on an x86 without AVX.

Debian: `apt install g++-aarch64-linux-gnu qemu-user-static`.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2]
AARCH64 = [
    "-DCMAKE_SYSTEM_NAME=Linux",
    "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
    "-DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++",
]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def tool(*names: str) -> str:
    for name in names:
        path = shutil.which(name)
        if path is not None:
            return path
    pytest.skip(f"{names[0]} is not installed")


def build(where: Path, *options: str) -> Path:
    cmake = tool("cmake")
    # SKBUILD keeps the library in the build folder, out of the source tree.
    configure = [cmake, "-S", str(CSRC), "-B", str(where), "-DPS_TESTS=ON", "-DSKBUILD=1", *options]
    subprocess.run(configure, check=True, capture_output=True)
    done = subprocess.run([cmake, "--build", str(where), "-j", "2"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "warning:" not in done.stdout + done.stderr
    return where / "csrc" / "compare_isas"


def run(*command: str) -> dict[str, list[str]]:
    """The program's lines per instruction set, all of which must be ok."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    lines: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        lines.setdefault(line.split()[0], []).append(line)
        assert line.endswith(" ok")
    return lines


def test_aarch64_under_an_emulator(tmp_path: Path) -> None:
    tool("aarch64-linux-gnu-g++")
    emulator = tool("qemu-aarch64-static", "qemu-aarch64")
    program = str(build(tmp_path, *AARCH64))

    def sets(cpu: str) -> set[str]:
        return set(run(emulator, "-cpu", cpu, "-L", "/usr/aarch64-linux-gnu", program))

    assert sets("cortex-a72") == {"neon", "scalar"}
    assert sets("neoverse-n1") == {"neon_dotprod", "neon", "scalar"}
    assert sets("max") == {"neon_i8mm", "neon_dotprod", "neon", "scalar"}


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="this is about x86")
def test_an_x86_without_avx_meets_no_avx_instruction(tmp_path: Path) -> None:
    emulator = tool("qemu-x86_64-static", "qemu-x86_64")
    program = str(build(tmp_path))
    assert set(run(emulator, "-cpu", "Nehalem", program)) == {"scalar"}
    assert "scalar" in run(program)
