"""Torch's library, loaded before torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux loads libraries this way")

LINES = "[line for line in open('/proc/self/maps') if line.rstrip().endswith('libtorch_cpu.so')]"
MAPPED = f"len({{line.split()[-1] for line in {LINES}}})"
BASES = f"[line for line in {LINES} if line.split()[2] == '00000000']"


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout


def test_torch_finds_it_in_place() -> None:
    said = run(
        "import sys; from pagedserve.kernels import torch_ahead\n"
        "thread = torch_ahead.begin()\n"
        "if thread is None: print('torch for GPUs'); sys.exit()\n"
        "thread.join()\n"
        f"assert {MAPPED} == 1 and 'torch' not in sys.modules\n"
        f"before = {BASES}\n"
        "import torch\n"
        f"assert {BASES} == before, 'it was loaded again'\n"
        "assert torch.arange(6.0).reshape(2, 3).sum(0).tolist() == [3.0, 5.0, 7.0]\n"
        "assert torch_ahead.begin() is None\n"
        "print('well')"
    )
    assert said.strip() in ("well", "torch for GPUs")


def test_torch_may_be_imported_meanwhile() -> None:
    said = run(
        "from pagedserve.kernels import torch_ahead; torch_ahead.begin(); import torch\n"
        "print(int(torch.ones(3, 3).matmul(torch.ones(3, 3)).sum()))"
    )
    assert said.strip() == "27"


def test_what_cannot_be_loaded_is_left_to_the_import(tmp_path: Path) -> None:
    library = tmp_path / "torch" / "lib" / "libtorch_global_deps.so"
    library.parent.mkdir(parents=True)
    library.write_text("no library")
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('broken')")
    said = run(
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from pagedserve.kernels import torch_ahead\n"
        "torch_ahead.begin().join()\n"
        f"assert {MAPPED} == 0\n"
        "try: import torch\n"
        "except ImportError as error: print(error)"
    )
    assert said.strip() == "broken"
