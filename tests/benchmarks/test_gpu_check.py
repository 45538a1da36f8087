"""The GPU check: every phase's code on next to no work, and that nothing that goes wrong in one costs another."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import build, report
from benchmarks.gpu.check import ASSUMED, Check, DeviceLostError, append, read

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu_check.py"
# Those that take seconds each are left to the slow run of everything.
QUICK_PHASES = "environment,build,jit,conformance,llama,decode,prefill,opt,host,eager,ops,swap,launches"


def run(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600, **options)


def rows_of(out: Path) -> list[dict[str, Any]]:
    summary = json.loads((out / "gpu_check.json").read_text())
    assert summary["rows"] == read(out / "gpu_check.jsonl")
    return summary["rows"]


def checked_dry_run(done: subprocess.CompletedProcess[str], out: Path) -> dict[str, Any]:
    """Nothing went wrong; values by name."""
    log = (out / "gpu_check.log").read_text()
    assert done.returncode == 0, done.stdout[-3000:] + log[-3000:]
    rows = rows_of(out)
    assert report.failures(rows) == []
    assert {row["status"] for row in rows if row["kind"] == "phase"} == {"done"}
    assert done.stdout.rstrip().splitlines()[-1].endswith(" s")
    return {row["name"]: row["value"] for row in rows if row["kind"] == "value"}


def test_phases_run_without_a_card(tmp_path: Path) -> None:
    done = run("--device", "cpu", "--tiny", "--only", QUICK_PHASES, "--out", tmp_path)
    values = checked_dry_run(done, tmp_path)
    assert values["copy bandwidth"] > 0
    for begins in (
        "Llama-3-8B: decode, 3",
        "OPT-13B: trace",
        "prefill ",
        "add + rms_norm",
        "swap out",
        "launch of our",
    ):
        assert any(name.startswith(begins) for name in values), begins


@pytest.mark.slow
def test_all_phases_run_without_a_card(tmp_path: Path) -> None:
    values = checked_dry_run(run("--device", "cpu", "--tiny", env=_with_out(tmp_path)), tmp_path)
    assert values["greedy as transformers, float32"] is True
    assert values["http: 2 clients: all answered"] is True


def test_variants_are_compiled_ahead_of_time(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    done = run("--compile-only", "--only", "triton", "--variants", "write-bf16-bf16-d64", "--out", tmp_path)
    found = [row for row in rows_of(tmp_path) if row["kind"] == "value"]
    assert done.returncode == 0, done.stdout
    compiled = [row["name"] for row in found if "registers" in row["note"]]
    assert compiled
    assert {name.rpartition("_")[2] for name in compiled} == {"80", "90"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--compile-only and --device cpu --tiny run anywhere"),
        (("--device", "cpu"), "give --tiny with it"),
        (("--device", "cpu", "--tiny", "--only", "decode,nonsense"), "no phase nonsense; there are environment"),
        (("--compile-only", "--skip", "decode"), "no phase decode; there are triton, nvcc"),
    ],
)
def test_a_mistake_is_one_line(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    import torch

    if not arguments and torch.cuda.is_available():
        pytest.skip("there is a card here")
    done = run(*arguments, "--out", tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


# ---- what goes wrong ----------------------------------------------------------------------------------------

_PHASES = """
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from benchmarks.gpu.phases import Phase, Runner

def good(check, attempt):
    check.measure("first", lambda: check.record("first", 1.0))

def raises(check, attempt):
    check.measure("bad", lambda: 1 / 0)
    check.measure("good", lambda: check.record("good", 2.0))
    raise ValueError("the phase\\nitself")

def crashes(check, attempt):
    check.measure("before", lambda: check.record("before", 1.0))
    check.measure("abort", lambda: os.kill(os.getpid(), signal.SIGSEGV))
    check.measure("after", lambda: check.record("after", float(attempt)))

def loses(check, attempt):
    def lost():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    check.measure("lost", lost)
    check.measure("behind", lambda: check.record("behind", float(attempt)))

def hangs(check, attempt):
    check.measure("quick", lambda: check.record("quick", 1.0))
    child = os.fork()
    if child == 0:
        Path({out!r}, "grandchild").write_text(str(os.getpid()))
    check.measure("sleep", lambda: time.sleep(600))

def busy(check, attempt):
    check.measure("no time", lambda: check.record("no time", 1.0), needs=1e6)

phases = [Phase(f.__name__, f, 20, 20) for f in (good, raises)]
phases += [Phase(f.__name__, f, 20, 20, attempts=3) for f in (crashes, loses)]
phases += [Phase("hangs", hangs, 4, 4), Phase("busy", busy, 20, 20), Phase("left out", good, 0, 0)]
phases += [Phase("last", good, 20, 20), Phase("beside", good, 20, 20, beside=True)]
Runner(Path({out!r}), device="cpu", scale="full", budget=60).run(phases)
"""


@pytest.fixture(scope="module")
def troubled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("troubled")
    script = _PHASES.format(root=str(ROOT), out=str(out))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    grandchild = int((out / "grandchild").read_text())
    assert not Path(f"/proc/{grandchild}").exists() or "Z" in _state(grandchild)
    return read(out / "gpu_check.jsonl")


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_every_phase_ends_and_says_how(troubled: list[dict[str, Any]]) -> None:
    assert {row["name"]: row["status"] for row in troubled if row["kind"] == "phase"} == {
        "good": "done",
        "raises": "ended with an error",
        "crashes": "done, 2 processes",
        "loses": "done, 2 processes",
        "hangs": "stopped at its time limit",
        "busy": "done",
        "last": "done",
        "beside": "done",
    }


def test_what_was_measured_is_kept_and_what_crashed_is_passed_over(troubled: list[dict[str, Any]]) -> None:
    found = {(row["phase"], row["name"]): row["value"] for row in troubled if row["kind"] == "value"}
    assert found[("crashes", "before")] == 1.0
    assert found[("crashes", "after")] == 1.0  # by the second process
    assert found[("loses", "behind")] == 1.0
    assert found[("raises", "good")] == 2.0
    assert found[("hangs", "quick")] == found[("last", "first")] == found[("beside", "first")] == 1.0
    assert sum(row["name"] == "before" and row["kind"] == "value" for row in troubled) == 1


def test_what_went_wrong_is_named(troubled: list[dict[str, Any]]) -> None:
    wrong = {(row["phase"], row["name"]): row["note"] for row in report.failures(troubled)}
    assert wrong[("raises", "bad")] == "ZeroDivisionError: division by zero"
    assert wrong[("raises", "raises")] in ("ValueError: the phase", "ended with an error")
    assert "took its process with it" in wrong[("crashes", "abort")]
    assert "illegal memory access" in wrong[("loses", "lost")]
    assert "running when time was over" in wrong[("hangs", "sleep")]
    assert ("crashes", "before") not in wrong
    text = "\n".join(report.table(troubled, 12.0))
    assert "hangs: hangs: stopped at its time limit" in text
    assert "busy" not in text.partition("-- went wrong")[2]


def test_goals_decide_and_ceilings_are_taken_from_the_first_phase(tmp_path: Path) -> None:
    results = tmp_path / "rows.jsonl"

    def phase(name: str, seconds: float = 60.0) -> Check:
        return Check(name, results, device="cpu", scale="quick", seconds=seconds, out=tmp_path)

    check = phase("a")
    assert check.ceiling("copy bandwidth") == ASSUMED["copy bandwidth"]
    check.record("copy bandwidth", 2.0e12, "B/s")
    assert phase("b").ceiling("copy bandwidth") == 2.0e12
    check.record("share", 91.5, "%", goal=90)
    check.record("gap", 70.0, "us", goal=50, at_most=True)
    check.check("equal", True)
    check.check("unequal", False, note="by one")
    append(results, {"cut": "off"})
    with results.open("a") as file:
        file.write('{"phase": "a", "kind": "va')
    lines = list(report.table(read(results), 3.0))
    assert next(line for line in lines if line.startswith("share")).split()[-1] == "met"
    assert "MISSED" in next(line for line in lines if line.startswith("gap"))
    assert "by one" in next(line for line in lines if line.startswith("unequal"))
    assert not any(line.startswith("equal") for line in lines)
    assert lines[-1] == "1 checks passed; 1 of 2 goals met; 2 missed or failed, 0 went wrong; 3 s"
    assert report.finish(results, tmp_path / "all.json", seconds=3.0, scale="quick", device="cpu")


def test_a_lost_device_ends_the_process(tmp_path: Path) -> None:
    check = Check("a", tmp_path / "rows.jsonl", device="cpu", scale="tiny", seconds=60, out=tmp_path)

    def lose() -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    with pytest.raises(DeviceLostError):
        check.measure("x", lose)
    again = Check("a", tmp_path / "rows.jsonl", device="cpu", scale="tiny", seconds=60, out=tmp_path)
    assert not again.measure("x", lose)


def test_what_nvcc_says_of_kernels_is_read() -> None:
    text = """
ptxas info    : Compiling entry function '_Z6decodePf' for 'sm_90'
ptxas info    : Function properties for _Z6decodePf
    8 bytes stack frame, 12 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 96 registers, used 1 barriers, 400 bytes cmem[0]
ptxas info    : Compiling entry function '_Z4copyPf' for 'sm_90'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers
"""
    assert build.resources(text) == [("_Z6decodePf sm_90", 96, 16), ("_Z4copyPf sm_90", 32, 0)]


def test_wheels_are_pinned_and_wanted() -> None:
    lines = (ROOT / "benchmarks" / "gpu_wheels.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert {"msgspec", "llguidance", "fastapi", "uvicorn", "pydantic-core"} <= pins.keys()


def _with_out(folder: Path) -> dict[str, str]:
    import os

    return {**os.environ, "OUT": str(folder)}
