"""Load a running OpenAI-compatible server and measure what its clients feel.

TTFT: seconds to the first token. TPOT: seconds a token after the first, by request. ITL: gaps between chunks. E2EL: the
whole request. Goodput counts the requests a second that meet every goal of `--goodput`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from pagedserve import envs
from pagedserve.cli.bench.statistics import parse_percentiles, print_table, summarize
from pagedserve.cli.bench.workload import WorkItem, add_workload_arguments, make_workload
from pagedserve.errors import ConfigError

METRICS = ("ttft", "tpot", "itl", "e2el")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", help="the server")
    parser.add_argument("--endpoint", default="completions", choices=("completions", "chat"), help="what to call")
    parser.add_argument("--model", help="model to ask for (default: the first that is served)")
    parser.add_argument("--api-key", help="key to send (default: PAGEDSERVE_API_KEY)")
    parser.add_argument("--max-concurrency", type=int, default=16, help="requests in flight (default: 16)")
    parser.add_argument("--request-rate", type=float, default=float("inf"), help="arrivals a second, Poisson")
    parser.add_argument("--num-warmups", type=int, default=2, help="requests before the clock starts (default: 2)")
    parser.add_argument("--temperature", type=float, default=0.0, help="sampling temperature (default: 0)")
    parser.add_argument("--no-ignore-eos", dest="ignore_eos", action="store_false", help="let answers end early")
    parser.add_argument("--goodput", nargs="*", default=[], metavar="METRIC:MS", help="goals, such as ttft:500 tpot:50")
    parser.add_argument("--metric-percentiles", type=parse_percentiles, default=[90, 99], help="default: 90,99")
    parser.add_argument("--label", default="", help="a word to keep with the result")
    add_workload_arguments(parser, num_prompts=64)


@dataclass(slots=True)
class Measured:
    """Times of one request, in seconds."""

    ttft: float = 0.0
    e2el: float = 0.0
    itl: list[float] = field(default_factory=list)
    num_input: int = 0
    num_output: int = 0
    error: str | None = None

    @property
    def tpot(self) -> float:
        return (self.e2el - self.ttft) / (self.num_output - 1) if self.num_output > 1 else 0.0


def run(args: argparse.Namespace) -> int:
    goals = _parse_goals(args.goodput)
    if args.max_concurrency < 1 or not args.request_rate > 0:
        raise ConfigError("--max-concurrency and --request-rate must be above 0")
    measured, seconds = asyncio.run(_drive(args, make_workload(args)))
    result = _report(args, goals, measured, seconds)
    if args.json:
        print(json.dumps(result))
    else:
        print_table(" serving ", _flatten(result))
    return 1 if result["failed"] else 0


async def _drive(args: argparse.Namespace, work: list[WorkItem]) -> tuple[list[Measured], float]:
    key = args.api_key or next(iter(envs.api_keys()), None)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    base = args.base_url.rstrip("/").removesuffix("/v1") + "/v1"
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=args.max_concurrency)
    async with httpx.AsyncClient(headers=headers, timeout=httpx.Timeout(3600, connect=5), limits=limits) as client:
        try:
            model = args.model or (await client.get(f"{base}/models")).raise_for_status().json()["data"][0]["id"]
        except (httpx.HTTPError, KeyError, IndexError, ValueError) as error:
            raise ConfigError(f"{args.base_url} does not list its models ({error!r}); is the server up?") from error
        slots = asyncio.Semaphore(args.max_concurrency)

        async def one(item: WorkItem) -> Measured:
            async with slots:
                return await _request(client, base, model, item, args)

        await asyncio.gather(*(one(item) for item in work[: args.num_warmups]))
        rng = random.Random(args.workload_seed)
        started = time.perf_counter()
        tasks = []
        for item in work:
            tasks.append(asyncio.create_task(one(item)))
            if args.request_rate != float("inf"):
                await asyncio.sleep(rng.expovariate(args.request_rate))
        measured = await asyncio.gather(*tasks)
        return measured, time.perf_counter() - started


async def _request(
    client: httpx.AsyncClient, base: str, model: str, item: WorkItem, args: argparse.Namespace
) -> Measured:
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": item.output_len,
        "temperature": args.temperature,
        "ignore_eos": args.ignore_eos,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if args.endpoint == "chat":
        path = "chat/completions"
        body["messages"] = [{"role": "user", "content": item.prompt}]
    else:
        path = "completions"
        body["prompt"] = item.prompt
    measured = Measured()
    started = last = time.perf_counter()
    try:
        async with client.stream("POST", f"{base}/{path}", json=body) as response:
            if response.status_code != 200:
                measured.error = f"HTTP {response.status_code}: {(await response.aread())[:200]!r}"
                return measured
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                now = time.perf_counter()
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    measured.error = str(chunk["error"])
                    return measured
                if chunk.get("usage"):
                    measured.num_input = chunk["usage"]["prompt_tokens"]
                    measured.num_output = chunk["usage"]["completion_tokens"]
                if not any(_has_text(choice) for choice in chunk["choices"]):
                    continue
                if measured.ttft == 0.0:
                    measured.ttft = now - started
                else:
                    measured.itl.append(now - last)
                last = now
        measured.e2el = last - started
    except httpx.HTTPError as error:
        measured.error = repr(error)
    return measured


def _has_text(choice: dict[str, Any]) -> bool:
    return bool(choice.get("text") or choice.get("delta", {}).get("content"))


def _report(args: argparse.Namespace, goals: dict[str, float], all_: list[Measured], seconds: float) -> dict[str, Any]:
    done = [m for m in all_ if m.error is None]
    times: dict[str, list[float]] = {
        "ttft": [m.ttft for m in done],
        "tpot": [m.tpot for m in done if m.num_output > 1],
        "itl": [gap for m in done for gap in m.itl],
        "e2el": [m.e2el for m in done],
    }
    num_output = sum(m.num_output for m in done)
    num_total = num_output + sum(m.num_input for m in done)
    result: dict[str, Any] = {
        "label": args.label,
        "completed": len(done),
        "failed": len(all_) - len(done),
        "duration_s": round(seconds, 3),
        "max_concurrency": args.max_concurrency,
        "input_tokens": num_total - num_output,
        "output_tokens": num_output,
        "request_throughput": round(len(done) / seconds, 3),
        "output_throughput": round(num_output / seconds, 2),
        "total_throughput": round(num_total / seconds, 2),
    }
    if goals:
        good = sum(all(getattr(m, name) * 1e3 <= limit for name, limit in goals.items()) for m in done)
        result["goodput"] = round(good / seconds, 3)
    for name in METRICS:
        result[f"{name}_ms"] = summarize(times[name], args.metric_percentiles)
    errors = [m.error for m in all_ if m.error]
    if errors:
        result["first_error"] = errors[0]
    return result


def _parse_goals(texts: list[str]) -> dict[str, float]:
    goals = {}
    for text in texts:
        name, _, limit = text.partition(":")
        try:
            goals[name] = float(limit)
        except ValueError:
            goals[name] = -1.0
        if name not in ("ttft", "tpot", "e2el") or goals[name] <= 0:
            raise ConfigError(f"--goodput {text!r}: use ttft:MS, tpot:MS or e2el:MS")
    return goals


def _flatten(result: dict[str, Any]) -> dict[str, object]:
    rows: dict[str, object] = {}
    for name, value in result.items():
        if isinstance(value, dict):
            rows.update({f"{name} {key}": number for key, number in value.items()})
        else:
            rows[name] = value
    return rows
