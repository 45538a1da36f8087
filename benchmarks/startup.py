"""From the command to the first token: `pagedserve serve` started again and again with warm caches.

    python benchmarks/startup.py --runs 10
    python benchmarks/startup.py --pythons before/.venv/bin/python,after/.venv/bin/python     # in turn, to compare

The clock runs from before the process is made until the answer to a completion of one token is there; the port is asked
every few milliseconds. Below the medians: when the server's log said what, in the fastest start of each interpreter.
"""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from machine import idle_share

from pagedserve.config import DEFAULT_MODEL

_POLL_SECONDS = 0.005


@dataclass
class Start:
    """One start: when its first token was there, and its log's lines with their times."""

    seconds: float = 0.0
    lines: list[tuple[float, str]] = field(default_factory=list)


def start_once(python: str, model: str, extra: Sequence[str]) -> Start:
    """RuntimeError where the server ends before it answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [python, "-m", "pagedserve.cli", "serve", model, "--port", str(port), *extra]
    found, began = Start(), time.perf_counter()
    # From a folder without packages: `-m` would take the one that lies where this was started.
    here = Path(__file__).parent
    process = subprocess.Popen(command, cwd=here, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None

    def read(stream: Sequence[str] = process.stderr) -> None:
        found.lines += ((time.perf_counter() - began, line.rstrip()) for line in stream)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        while not _answers(port, model):
            if process.poll() is not None:
                raise RuntimeError(f"{' '.join(command)} ended with status {process.returncode}")
            time.sleep(_POLL_SECONDS)
        found.seconds = time.perf_counter() - began
    finally:
        process.terminate()
        process.wait()
        reader.join()
    return found


def _answers(port: int, model: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = {"model": model, "prompt": "The capital of France is", "max_tokens": 1, "temperature": 0}
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--pythons", default=sys.executable, help="interpreters, one a source tree, taken in turn")
    parser.add_argument("extra", nargs="*", help="further options of `pagedserve serve`, behind --")
    args = parser.parse_args()
    starts: dict[str, list[Start]] = {python: [] for python in args.pythons.split(",")}
    print(f"{idle_share():.0%} idle")
    for python in starts:
        start_once(python, args.model, args.extra)  # warms caches and bytecode
    for _ in range(args.runs):
        for python, found in starts.items():
            found.append(start_once(python, args.model, args.extra))
    first = 0.0
    for python, found in starts.items():
        median, best = statistics.median(s.seconds for s in found), min(found, key=lambda s: s.seconds)
        first = first or median
        print(
            f"{python}: first token after {median:.2f} s (best {best.seconds:.2f}), {median / first:.2f} of the first"
        )
        for at, line in best.lines:
            if at < best.seconds:
                print(f"    {at:.3f}  {line}")


if __name__ == "__main__":
    main()
