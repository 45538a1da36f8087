"""Over HTTP, where the web server's packages are there: streaming clients, and blocks that come back."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.gpu import shapes
from benchmarks.gpu.check import Check

ROOT = Path(__file__).parents[2]
_NEEDED = ("fastapi", "uvicorn", "pydantic", "msgspec", "llguidance", "httptools", "httpx", "tokenizers")
_MAIN = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from pagedserve.cli import main; sys.exit(main())"


def run(check: Check) -> None:
    missing = [name for name in _NEEDED if not _can_import(name)]
    if missing:
        check.skip("http", f"not installed: {', '.join(missing)}")
        return
    config = check.choose(full=shapes.LLAMA_3_8B, quick=shapes.LLAMA_3_8B, tiny=shapes.TINY_LLAMA)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-c", _MAIN, "serve", str(shapes.folder(config)), "--port", str(port), "--load-format", "dummy",
        "--device", check.device_name, "--max-num-seqs", "256", "--swap-space", "0",
    ]  # fmt: skip
    if check.scale == "tiny":
        command += ["--num-device-blocks", "400", "--num-threads", "1"]
    server = subprocess.Popen(command, stdout=sys.stdout, stderr=sys.stderr)
    try:
        check.measure("http: start", lambda: _wait(check, server, port))
        for clients in check.choose(full=(64, 256), quick=(64,), tiny=(2,)):
            name = f"http: {clients} clients"
            check.measure(name, lambda clients=clients, name=name: _bench(check, name, port, clients), needs=6.0)
        check.measure("http: blocks come back", lambda: _blocks(check, port))
    finally:
        with contextlib.suppress(ProcessLookupError):
            server.send_signal(signal.SIGTERM)
        try:
            server.wait(5)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _can_import(name: str) -> bool:
    try:
        import_module(name)
    except Exception as error:
        print(f"{name}: {error}")
        return False
    return True


def _wait(check: Check, server: subprocess.Popen[bytes], port: int) -> None:
    started = time.monotonic()
    while check.left > 5:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with code {server.returncode}; the log says why")
        with contextlib.suppress(urllib.error.URLError, OSError):
            if urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).status == 200:
                check.record("http: start", round(time.monotonic() - started, 1), "s")
                return
        time.sleep(0.2)
    raise TimeoutError("the server was not ready in time")


def _bench(check: Check, name: str, port: int, clients: int) -> None:
    prompts = check.choose(full=2 * clients, quick=clients, tiny=4)
    lengths = check.choose(full=("512", "128"), quick=("256", "64"), tiny=("16", "4"))
    command = [
        sys.executable, "-c", _MAIN, "bench", "serve", "--json", "--base-url", f"http://127.0.0.1:{port}",
        "--num-prompts", str(prompts), "--max-concurrency", str(clients), "--input-len", lengths[0],
        "--output-len", lengths[1],
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=sys.stderr, text=True, env=environment, timeout=max(check.left, 3),
        check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"the client ended with code {done.returncode}; the log says why")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    ttft, itl = result["ttft_ms"], result["itl_ms"]
    note = f"TTFT {_median(ttft)} ms, ITL {_median(itl)} ms, {result['failed']} failed"
    check.record(name, round(result["output_throughput"], 1), "tokens/s", note=note)
    check.check(f"{name}: all answered", result["failed"] == 0)


def _median(values: Any) -> str:
    if isinstance(values, dict):
        value = next((values[key] for key in ("median", "p50", "mean") if key in values), None)
        return "?" if value is None else f"{value:.1f}"
    return str(values)


def _blocks(check: Check, port: int) -> None:
    """A client that leaves in the middle, then an idle server: no block stays in use."""
    body = json.dumps({"prompt": [1, 2, 3], "max_tokens": 300, "ignore_eos": True, "stream": True}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", data=body, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        answer.readline()
    usage = 1.0
    for _ in range(50):
        page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
        lines = [line for line in page.splitlines() if line.startswith("vllm:kv_cache_usage_perc")]
        usage = max((float(line.rsplit(" ", 1)[1]) for line in lines), default=1.0)
        if usage == 0.0:
            break
        time.sleep(0.1)
    check.check("http: blocks come back", usage == 0.0, note=f"KV usage {usage:.3f} after a client left")
