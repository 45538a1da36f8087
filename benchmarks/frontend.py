"""What the HTTP front end costs a token: many streams through one API process, over a core that computes nothing.

Run `python benchmarks/frontend.py [--connections 1000] [--json]`. The server is `pagedserve serve --executor null`;
HTTP, server-sent events, text, channel and scheduler are the real ones. Every stream is read to its end by raw sockets
and must be whole. What counts is CPU time of the API process: tokens per second of it are what one core can stream.
Where `chunks` is well below `tokens` the process had too little CPU and joined tokens, so measure on an idle machine.
`--profile FILE` writes where the time goes (needs py-spy).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent))

from machine import idle_share

from pagedserve.config import DEFAULT_MODEL

GOAL_TOKENS_PER_SECOND = 10_000
STARTUP_SECONDS = 120


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_server(model: str, num_seqs: int, port: int) -> subprocess.Popen[bytes]:
    """A ready server without a model."""
    command = [sys.executable, "-m", "pagedserve.cli", "serve", "--model", model, "--executor", "null"]
    command += ["--port", str(port), "--max-num-seqs", str(num_seqs), "--max-queue-len", "0"]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + STARTUP_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5)
            return server
        except (urllib.error.URLError, TimeoutError):
            time.sleep(0.1)
    server.kill()
    raise SystemExit("the server did not become ready")


async def read_stream(port: int, route: str, body: bytes) -> int:
    """One request on a connection of its own; the number of chunks, or -1 where the stream was not whole."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {route} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    writer.write(f"{head}Connection: close\r\n\r\n".encode() + body)
    answer = await reader.read(-1)
    writer.close()
    is_whole = answer.startswith(b"HTTP/1.1 200") and b"data: [DONE]" in answer and b'"error"' not in answer
    return answer.count(b"data: {") if is_whole else -1


async def drive(port: int, connections: int, num_tokens: int, route: str) -> list[int]:
    asked: dict[str, object] = {"max_tokens": num_tokens, "stream": True, "ignore_eos": True}
    words = "The quick brown fox jumps over the lazy dog and runs through the forest until night falls. " * 2
    if route.endswith("chat/completions"):
        asked["messages"] = [{"role": "user", "content": words}]
    else:
        asked["prompt"] = words
    body = json.dumps(asked).encode()
    return await asyncio.gather(*(read_stream(port, route, body) for _ in range(connections)))


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def measure(model: str, connections: int, num_tokens: int, route: str, profile: str | None) -> dict[str, object]:
    port = free_port()
    idle = idle_share()
    server = start_server(model, connections, port)
    try:
        api = psutil.Process(server.pid)
        (core,) = [child for child in api.children() if "core_main" in " ".join(child.cmdline())]
        asyncio.run(drive(port, 8, 16, route))  # imports and first uses are not what is measured
        spy = None
        if profile is not None:
            spy = subprocess.Popen(
                ["py-spy", "record", "--pid", str(api.pid), "--output", profile, "--duration", "3600"]
            )
            time.sleep(2)
        api_before, core_before, started = cpu_seconds(api), cpu_seconds(core), time.perf_counter()
        chunks = asyncio.run(drive(port, connections, num_tokens, route))
        seconds = time.perf_counter() - started
        api_seconds, core_seconds = cpu_seconds(api) - api_before, cpu_seconds(core) - core_before
        if spy is not None:
            spy.send_signal(2)
            spy.wait()
        total = connections * num_tokens
        return {
            "benchmark": "frontend",
            "route": route,
            "connections": connections,
            "broken_streams": sum(count < 0 for count in chunks),
            "tokens": total,
            "chunks": sum(chunks),
            "seconds": round(seconds, 2),
            "tokens_per_second": round(total / seconds),
            "api_us_per_token": round(1e6 * api_seconds / total, 1),
            "core_us_per_token": round(1e6 * core_seconds / total, 1),
            "tokens_per_api_cpu_second": round(total / api_seconds),
            "goal": GOAL_TOKENS_PER_SECOND,
            "api_peak_mb": round(api.memory_info().rss / 1e6),
            "idle_share": round(idle, 2),
        }
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_MODEL, help="whose tokenizer and template are used")
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=100, help="of each stream")
    parser.add_argument("--route", default="/v1/completions")
    parser.add_argument("--profile", metavar="FILE", help="write a flame graph of the API process (SVG)")
    parser.add_argument("--json", action="store_true", help="print one JSON line and nothing else")
    arguments = parser.parse_args()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit[1], limit[1]))
    result = measure(arguments.model, arguments.connections, arguments.tokens, arguments.route, arguments.profile)
    print(json.dumps(result) if arguments.json else json.dumps(result, indent=2))
    sys.exit(1 if result["broken_streams"] else 0)


if __name__ == "__main__":
    main()
