"""From the command to the first token: `pagedserve serve` started again and again, warm, one source tree or several.

    python benchmarks/startup.py --runs 10
    python benchmarks/startup.py --pythons old/.venv/bin/python,.venv/bin/python   # in turn: for comparison

The clock runs from before the process is made until the answer to a completion of one token is there; the port is asked
every few milliseconds. Medians, and the phases that the server's own log tells of.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

from pagedserve.config import DEFAULT_MODEL

_POLL_SECONDS = 0.005
_PHASE = re.compile(rb"\] (\S.*) \((\d+\.\d+) s\)|INFO +(\S.*) \((\d+\.\d+) s\)")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def first_token(python: str, model: str, extra: Sequence[str]) -> float:
    """Seconds of one start. RuntimeError where the server ends before it answers."""
    port = free_port()
    command = [python, "-m", "pagedserve.cli", "serve", model, "--port", str(port), "--host", "127.0.0.1", *extra]
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        while not _answers(port, model):
            if process.poll() is not None:
                raise RuntimeError(process.stderr.read().decode() if process.stderr else "the server ended")
            time.sleep(_POLL_SECONDS)
        return time.perf_counter() - started
    finally:
        process.terminate()
        process.communicate()


def _answers(port: int, model: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = {"model": model, "prompt": "The capital of France is", "max_tokens": 1, "temperature": 0}
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        return answer.status == 200
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
    pythons = args.pythons.split(",")
    seconds: dict[str, list[float]] = {python: [] for python in pythons}
    for python in pythons:
        first_token(python, args.model, args.extra)  # warms caches, and bytecode
    for _ in range(args.runs):
        for python in pythons:
            seconds[python].append(first_token(python, args.model, args.extra))
    for python, found in seconds.items():
        median, best = statistics.median(found), min(found)
        ratio = median / statistics.median(seconds[pythons[0]])
        print(f"{python}: first token after {median:.2f} s (best {best:.2f}), {ratio:.2f} of the first")


if __name__ == "__main__":
    main()
