"""Where a decode step's time goes: the whole step, its native part, and with --profile every op of it."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import TYPE_CHECKING, Any

from pagedserve.cli.flags import add_engine_flags, llm_from_args
from pagedserve.errors import ConfigError
from pagedserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pagedserve.engine.llm import LLM
    from pagedserve.kernels.step_profile import StepProfile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch-sizes", default="1,8,32", help="sequences that decode together (default: 1,8,32)")
    parser.add_argument("--context-len", type=int, default=128, help="tokens before the first step (default: 128)")
    parser.add_argument("--num-steps", type=int, default=40, help="steps measured at each size (default: 40)")
    parser.add_argument("--compare-eager", action="store_true", help="measure each size again under --enforce-eager")
    parser.add_argument("--profile", action="store_true", help="a table of the step's ops against the machine's limits")
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    try:
        sizes = [int(size) for size in args.batch_sizes.split(",")]
    except ValueError:
        sizes = [0]
    if min(sizes) < 1 or args.num_steps < 1 or args.context_len < 1:
        raise ConfigError("--batch-sizes, --context-len and --num-steps must be 1 or more")
    # Otherwise the second size would find the first one's prompts.
    args.enable_prefix_caching = False
    results = []
    for is_eager in sorted({args.enforce_eager, args.enforce_eager or args.compare_eager}):
        args.enforce_eager = is_eager
        with llm_from_args(args) as llm:
            ceilings = _ceilings() if args.profile else None
            for size in sizes:
                result = _measure(llm, size, args.context_len, args.num_steps, ceilings)
                results.append({"eager": is_eager, **result})
    results.sort(key=lambda result: result["batch_size"])
    if args.json:
        print(json.dumps(results))
        return 0
    for result in results:
        _print(result)
    return 0


def _measure(
    llm: LLM, size: int, context_len: int, num_steps: int, ceilings: tuple[float, float] | None
) -> dict[str, Any]:
    from pagedserve.kernels import native
    from pagedserve.kernels.step_profile import StepProfile

    engine, forwards, profile = llm.engine, [], StepProfile()
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=3 * num_steps + 2)
    ids = [engine.add_request([5 + (7 * i + j) % 200 for j in range(context_len)], params) for i in range(size)]
    waiting = set(ids)
    while waiting:
        waiting -= {output.request_id for output in engine.step() if output.outputs[0].token_ids}

    engine.step()
    while engine.client.core.use_quiet_moment():
        pass  # a GPU captures the step that it has just seen

    def timed_step() -> tuple[float, float]:
        """Seconds in all, and in the step program."""
        forwards.clear()
        began = time.perf_counter()
        engine.step()
        return time.perf_counter() - began, sum(forwards)

    with native.observing(lambda program, counts, inputs, seconds: forwards.append(float(seconds.sum()))):
        times = [timed_step() for _ in range(num_steps)]
    if ceilings is not None:
        # Steps of their own: adding up the ops takes longer than Python's whole share of a step.
        with native.observing(profile.observe):
            for _ in range(num_steps):
                engine.step()
    for request in ids:
        engine.abort(request)
    engine.step()
    step = statistics.median(total for total, _ in times)
    result = {
        "batch_size": size,
        "context_len": context_len,
        "step_ms": round(step * 1e3, 3),
        "tokens_per_second": round(size / step, 1),
    }
    if any(forward for _, forward in times):
        result["forward_ms"] = round(statistics.median(forward for _, forward in times) * 1e3, 3)
        result["rest_ms"] = round(statistics.median(total - forward for total, forward in times) * 1e3, 3)
    if ceilings is not None and profile.num_steps:
        result["ops"] = _table(profile, ceilings)
        result["ceilings"] = {"gb_per_second": round(ceilings[0], 1), "gflop_per_second": round(ceilings[1])}
    return result


def _ceilings() -> tuple[float, float]:
    from pagedserve.kernels import native
    from pagedserve.kernels.step_profile import measure_ceilings

    return measure_ceilings(native.num_threads() if native.available() else 1)


def _table(profile: StepProfile, ceilings: tuple[float, float]) -> list[dict[str, Any]]:
    bandwidth, arithmetic = ceilings
    rows = []
    for cost in profile.sorted():
        gigabytes = cost.num_bytes / cost.seconds / 1e9
        gigaflops = cost.flops / cost.seconds / 1e9
        rows.append(
            {
                "op": cost.label,
                "calls": cost.calls // profile.num_steps,
                "ms": round(cost.seconds / profile.num_steps * 1e3, 3),
                "share": round(cost.seconds / profile.seconds, 3),
                "gb_per_second": round(gigabytes, 1),
                "of_bandwidth": round(gigabytes / bandwidth, 2),
                "gflop_per_second": round(gigaflops, 1),
                "of_arithmetic": round(gigaflops / arithmetic, 2),
            }
        )
    return rows


def _print(result: dict[str, Any]) -> None:
    ops, ceilings = result.pop("ops", []), result.pop("ceilings", None)
    print("  ".join(f"{name} {value}" for name, value in result.items()))
    if not ops:
        return
    print(f"ceilings: {ceilings['gb_per_second']} GB/s read, {ceilings['gflop_per_second']} GFLOP/s fp32")
    print(f"{'op':<34}{'calls':>6}{'ms':>9}{'share':>7}{'GB/s':>8}{'of it':>7}{'GFLOP/s':>9}{'of it':>7}")
    for row in ops:
        print(
            f"{row['op']:<34}{row['calls']:>6}{row['ms']:>9.3f}{row['share']:>7.0%}{row['gb_per_second']:>8.1f}"
            f"{row['of_bandwidth']:>7.0%}{row['gflop_per_second']:>9.1f}{row['of_arithmetic']:>7.0%}"
        )
    print()
