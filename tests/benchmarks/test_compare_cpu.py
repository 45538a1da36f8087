"""The comparison with other engines: its table says what was measured, and no process outlives it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""


def has_ended(pid: int) -> bool:
    """Gone, or waiting for its parent (here: the system's first process) to take note."""
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_the_table_tells_reached_from_missed_from_not_measured() -> None:
    from compare_report import as_markdown

    table = as_markdown(
        {
            "pagedserve": {
                "decode_1": 100.0, "decode_8": 300.0, "first_token_s": 3.0, "memory_mib": 900,
                "memory_torch_libraries_mib": 300, "idle": 0.99,
            },
            "llama.cpp": {"decode_1": 30.0, "decode_8": 100.0, "first_token_s": 1.0, "memory_mib": 500},
            "vLLM": {"first_token_s": 60.0, "memory_mib": 2000, "errors": ["server: TimeoutError: gave no token"]},
        }
    )  # fmt: skip
    rows = {line.split(" | ")[0].strip("| "): line for line in table.splitlines() if line.startswith("|")}
    assert "30: 3.33x (>= 2.5x: reached) | not measured | not measured" in rows["decode, 1 sequence"]
    assert "100: 3.00x (>= 3.5x: **not reached**)" in rows["decode, 8"]
    assert "1: 3.00x (<= 2x: **not reached**)" in rows["command to first token, warm"]
    assert "60: 0.05x (<= 0.125x: reached)" in rows["command to first token, warm"]
    # Against llama.cpp without torch's libraries, against vLLM with them.
    assert "500: 1.20x (<= 1.5x: reached)" in rows["peak memory, serving 32"]
    assert "2000: 0.45x (<= 0.333x: **not reached**)" in rows["peak memory, serving 32"]
    assert rows["prefill 512"].count("not measured") == 4
    assert "Not measured, vLLM: server: TimeoutError: gave no token" in table
    assert "CPU idle before pagedserve: 99%" in table


def test_a_server_that_never_answers_is_ended_with_all_its_children(tmp_path: Path, monkeypatch) -> None:
    import compare_processes

    monkeypatch.setattr(compare_processes, "_TERM_SECONDS", 0.3)
    log = tmp_path / "log"
    server = compare_processes.Server("stubborn", [sys.executable, "-c", STUBBORN], 9, "m", log, env=dict(os.environ))
    with pytest.raises(TimeoutError, match="stubborn gave no token"), server.running(timeout=4):
        raise AssertionError("it never served")
    assert has_ended(server.pid)
    assert has_ended(int(log.read_text().split()[0])), "its child, in a session of its own"


def test_a_server_that_ends_is_reported_at_once(tmp_path: Path) -> None:
    import compare_processes

    server = compare_processes.Server(
        "broken", [sys.executable, "-c", "raise SystemExit(3)"], 9, "m", tmp_path / "log", env=dict(os.environ)
    )
    with pytest.raises(RuntimeError, match="broken ended with status 3"), server.running(timeout=60):
        raise AssertionError("it never served")


def test_a_command_without_a_result_shows_what_it_said() -> None:
    import compare_processes

    assert compare_processes.run_for_json(
        [sys.executable, "-c", "print('x'); print('{\"a\": 1}'); print('y')"], 60
    ) == {"a": 1}
    with pytest.raises(RuntimeError, match="no such model"):
        compare_processes.run_for_json([sys.executable, "-c", "print('no such model')"], 60)
