"""pagedserve beside llama.cpp and vLLM on this CPU: the same prompts, the same client, one after another.

    python benchmarks/compare_cpu.py --llama-bin DIR --vllm BIN --vllm-preload LIB:LIB --vllm-pythonpath DIR
    python benchmarks/compare_cpu.py --llama-bin DIR --only pagedserve,llama --json-out result.json --plot plot.png

Prints one JSON line and a Markdown table of ratios against their goals. Decode and prefill come from each engine's own
batch bench (vLLM, which has none that fits: over HTTP, the time of 65 tokens less that of 1); the rest over HTTP with
`pagedserve bench serve` as everybody's client, or with --load-script, a client that takes --url, --model, --requests,
--concurrency, --mean-in, --mean-out, --shared-prefix and --label and prints JSON with out_tok_s. A peer that is not
given, does not start or does not answer in time is "not measured". Run it on an idle machine: the idle share before
each engine is part of the result. Peers install from the package index; benchmarks/README.md says how.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compare_files import hf_folder, requantized
from compare_processes import Server, run_for_json
from compare_report import as_markdown, plot
from machine import idle_share

from pagedserve import catalog, envs
from pagedserve.config import DEFAULT_MODEL

HERE = Path(__file__).parent
SHARED_PREFIX = 500  # words, a token each
# Runs a script with aiohttp clients that open a connection for each request: llama.cpp's server may close one that is
# kept alive just as the next request is sent on it, which is no fault of its engine.
FRESH_CONNECTIONS = """
import functools, runpy, sys, aiohttp
aiohttp.TCPConnector = functools.partial(aiohttp.TCPConnector, force_close=True)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@dataclass(frozen=True)
class Sizes:
    """How much work is done. Requests, by number of clients, fill a batch for a while and still end on slow peers."""

    requests: dict[int, int]
    decoded: int
    decode_prompt: int
    prefill_prompt: int


FULL = Sizes({1: 3, 8: 16, 16: 32, 32: 48}, 64, 128, 512)
QUICK = Sizes({1: 1, 8: 4, 16: 4, 32: 4}, 4, 8, 32)


class Comparison:
    """Collects figures by engine; whatever goes wrong with one engine is noted and leaves the others alone."""

    def __init__(self, args: argparse.Namespace, source: Path):
        self.args = args
        self.source = source
        self.sizes = QUICK if args.quick else FULL
        self.deadline = time.monotonic() + args.deadline
        self.results: dict[str, dict[str, Any]] = {}

    def attempt(self, engine: str, what: str, measure: Callable[[float], dict[str, Any]], limit: float) -> None:
        """Adds what `measure(seconds it may take)` finds to the engine's figures."""
        found = self.results.setdefault(engine, {})
        left = self.deadline - time.monotonic()
        if left < 10:
            found.setdefault("errors", []).append(f"{what}: out of time")
            return
        print(f"[{self.args.deadline - left:4.0f} s] {engine}: {what}", file=sys.stderr, flush=True)
        try:
            found |= measure(min(limit, left))
        except Exception as error:
            found.setdefault("errors", []).append(f"{what}: {type(error).__name__}: {error}")

    # -- batch benches ---------------------------------------------------------------------------------------------

    def pagedserve_offline(self, engine: str, weights_dtype: str) -> None:
        command = [sys.executable, str(HERE / "offline_decode.py"), "--json", "--weights-dtype", weights_dtype]
        command += ["--quick"] if self.args.quick else []
        self.attempt(engine, "offline", lambda limit: run_for_json(command, limit), 120)

    def llama_offline(self, engine: str, kind: str | None) -> None:
        def measure(limit: float) -> dict[str, Any]:
            model = self.llama_model(kind)
            bench = [str(self.args.llama_bin / "llama-batched-bench"), "-m", str(model), "-t", str(self.args.threads)]
            bench += ["-c", "8192", "-b", "2048", "-ub", "512", "-fa", "on", "--output-format", "jsonl"]
            result: dict[str, Any] = {"idle": round(idle_share(), 3)}
            for batch in (1, 8, 32):
                sizes = ["-npp", str(self.sizes.decode_prompt), "-ntg", str(self.sizes.decoded), "-npl", str(batch)]
                result[f"decode_{batch}"] = run_for_json([*bench, *sizes], limit)["speed_tg"]
            sizes = ["-npp", str(self.sizes.prefill_prompt), "-ntg", "2", "-npl", "1"]
            result["prefill_512"] = run_for_json([*bench, *sizes], limit)["speed_pp"]
            return result

        self.attempt(engine, "llama-batched-bench", measure, 150)

    def llama_model(self, kind: str | None) -> Path:
        if kind is None:
            return self.source
        return requantized(self.args.llama_bin / "llama-quantize", self.source, self.args.work, kind)

    # -- servers ---------------------------------------------------------------------------------------------------

    def serve(self, server: Server, *, starts: int, clients: tuple[int, ...], offline: bool = False) -> None:
        """Starts the server `starts` times, so that the last start is a warm one, and loads it."""

        def measure(limit: float) -> dict[str, Any]:
            end = time.monotonic() + limit
            for _ in range(starts - 1):
                with server.running(end - time.monotonic()):
                    pass
            with server.running(end - time.monotonic()):
                found = self.results[server.label]
                found["first_token_s"] = round(server.seconds_to_first_token or 0, 2)
                if offline:
                    found |= decode_over_http(server, self.sizes, end - time.monotonic())
                for count in clients:
                    if count == max(clients):
                        with server.memory_watched():
                            found[f"http_{count}"] = self.load(server, count, end - time.monotonic())
                    else:
                        found[f"http_{count}"] = self.load(server, count, end - time.monotonic())
                found["memory_mib"] = round(server.memory.total)
                found["memory_torch_libraries_mib"] = round(server.memory.torch_libraries)
            return {}

        self.attempt(server.label, "server", measure, self.args.server_limit)

    def load(self, server: Server, clients: int, limit: float) -> float:
        """Output tokens a second. 16 clients share a prefix, as in the table; all others do not."""
        prefix = SHARED_PREFIX if clients == 16 else 0
        if self.args.load_script is not None:
            command = [sys.executable, "-c", FRESH_CONNECTIONS, str(self.args.load_script)]
            command += ["--url", server.url, "--model", server.model]
            command += ["--requests", str(self.sizes.requests[clients]), "--concurrency", str(clients)]
            command += ["--shared-prefix", str(prefix), "--label", server.label]
            result = run_for_json(command, limit)
            if result["failed"]:
                raise RuntimeError(f"{result['failed']} requests failed: {result['err']}")
            return result["out_tok_s"]
        command = [sys.executable, "-m", "pagedserve.cli", "bench", "serve", "--json", "--base-url", server.url]
        command += ["--model", server.model, "--num-prompts", str(self.sizes.requests[clients]), "--range-ratio", "0.5"]
        command += ["--max-concurrency", str(clients), "--prefix-len", str(prefix)]
        return run_for_json(command, limit)["output_tokens_per_second"]

    def pagedserve_server(self, engine: str) -> Server:
        port = free_port()
        command = [sys.executable, "-m", "pagedserve.cli", "serve", "--port", str(port), "--model", str(self.source)]
        command += ["--served-model-name", "m", *self.args.serve_args]
        return Server(engine, command, port, "m", self.log("pagedserve"), dict(os.environ))

    def llama_server(self, engine: str, kind: str | None) -> Server:
        port = free_port()
        command = [str(self.args.llama_bin / "llama-server"), "-m", str(self.llama_model(kind)), "--port", str(port)]
        # 32 slots that share one context: no slot keeps a long request out, and no memory is set aside for each.
        command += ["-t", str(self.args.threads), "-c", "16384", "-np", "32", "--kv-unified", "-fa", "on", "--no-webui"]
        return Server(engine, command, port, "m", self.log(engine), dict(os.environ))

    def vllm_server(self, engine: str) -> Server:
        port = free_port()
        folder = hf_folder(self.source, self.args.work)
        command = [str(self.args.vllm), "serve", str(folder), "--served-model-name", "m", "--port", str(port)]
        command += ["--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--max-model-len", "4096"]
        extra = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_TARGET_DEVICE": "cpu", "HF_HUB_OFFLINE": "1"}
        extra |= {"VLLM_NO_USAGE_STATS": "1", "LD_PRELOAD": self.args.vllm_preload}
        extra["PYTHONPATH"] = self.args.vllm_pythonpath
        return Server(engine, command, port, "m", self.log("vllm"), {**os.environ, **extra})

    def log(self, name: str) -> Path:
        self.args.work.mkdir(parents=True, exist_ok=True)
        return self.args.work / f"{name.replace(' ', '-')}.log"


def decode_over_http(server: Server, sizes: Sizes, limit: float) -> dict[str, float]:
    """Decode and prefill of a server whose prompts may be token ids, by differences of whole answers."""
    end = time.monotonic() + limit
    rng = random.Random(0)

    def seconds(prompts: list[list[int]], max_tokens: int) -> float:
        def one(prompt: list[int]) -> None:
            body = {"model": server.model, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
            server.post({**body, "temperature": 0}, timeout=max(1.0, end - time.monotonic()))

        started = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
            list(pool.map(one, prompts))
        return time.perf_counter() - started

    def prompts(count: int, length: int) -> list[list[int]]:
        return [[rng.randrange(100, 40000) for _ in range(length)] for _ in range(count)]

    found = {}
    for batch in (1, 8, 32):
        first = seconds(prompts(batch, sizes.decode_prompt), 1)
        whole = seconds(prompts(batch, sizes.decode_prompt), 1 + sizes.decoded)
        found[f"decode_{batch}"] = round(batch * sizes.decoded / (whole - first), 1)
    found["prefill_512"] = round(sizes.prefill_prompt / seconds(prompts(1, sizes.prefill_prompt), 1), 1)
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def compare(run: Comparison) -> None:
    args, only = run.args, run.args.only.split(",")

    def servers(engine: str, make: Callable[[], Server], **how: Any) -> None:
        run.results.setdefault(engine, {})["idle_server"] = round(idle_share(), 3)
        try:
            server = make()
        except Exception as error:
            run.results[engine].setdefault("errors", []).append(f"cannot be prepared: {error}")
            return
        run.serve(server, **how)

    if "pagedserve" in only:
        run.pagedserve_offline("pagedserve", "auto")
        run.pagedserve_offline("pagedserve bf16", "bfloat16")
        servers("pagedserve", lambda: run.pagedserve_server("pagedserve"), starts=2, clients=(1, 8, 16, 32))
    if "llama" in only and args.llama_bin is not None:
        for engine, kind in (("llama.cpp", None), ("llama.cpp Q4_0", "Q4_0"), ("llama.cpp BF16", "BF16")):
            run.llama_offline(engine, kind)
        servers("llama.cpp", lambda: run.llama_server("llama.cpp", None), starts=2, clients=(1, 8, 16, 32))
        servers("llama.cpp Q4_0", lambda: run.llama_server("llama.cpp Q4_0", "Q4_0"), starts=1, clients=(16,))
    if "vllm" in only and args.vllm is not None:
        servers("vLLM", lambda: run.vllm_server("vLLM"), starts=1, clients=(16, 32, 1, 8), offline=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-bin", type=Path, help="folder of llama-server, llama-batched-bench, llama-quantize")
    parser.add_argument("--vllm", type=Path, help="the vllm command of its environment")
    parser.add_argument("--vllm-preload", default="", help="LD_PRELOAD of vLLM: libtcmalloc_minimal and libiomp5")
    parser.add_argument("--vllm-pythonpath", default="", help="PYTHONPATH of vLLM")
    parser.add_argument("--model", type=Path, help="a GGUF file (default: the demo model's)")
    parser.add_argument("--work", type=Path, default=envs.cache_dir() / "compare", help="converted models, logs")
    parser.add_argument("--only", default="pagedserve,llama,vllm")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--quick", action="store_true", help="very little work: to see that every engine answers")
    parser.add_argument("--load-script", type=Path, help="client instead of `pagedserve bench serve`")
    parser.add_argument("--serve-args", nargs=argparse.REMAINDER, default=[], help="last: more flags of `serve`")
    parser.add_argument("--server-limit", type=float, default=330, help="seconds for one server, starts included")
    parser.add_argument("--deadline", type=float, default=720, help="seconds in all")
    parser.add_argument("--json-out", type=Path, help="also write the JSON line here")
    parser.add_argument("--plot", type=Path, help="write tokens/s against clients as a PNG here (needs matplotlib)")
    args = parser.parse_args()

    # A signal must not leave servers behind: as an exception it goes through every `finally`.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    run = Comparison(args, args.model or catalog.fetch(DEFAULT_MODEL))
    machine = machine_of(args.threads)
    try:
        compare(run)
    finally:
        result = {"machine": machine, "engines": run.results}
        line = json.dumps(result)
        print(line)
        if args.json_out is not None:
            args.json_out.write_text(line + "\n")
        print(as_markdown(run.results))
        if args.plot is not None:
            plot(run.results, args.plot)


def machine_of(threads: int) -> dict[str, Any]:
    from pagedserve.kernels import native

    model = next((x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")), "")
    isa = native.isa() if native.available() else "none"
    return {"cpu": model.partition(":")[2].strip(), "threads": threads, "isa": isa}


if __name__ == "__main__":
    main()
