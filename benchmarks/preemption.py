"""Swap, recompute and auto under overload, in pools that are too small.

Run `python benchmarks/preemption.py [--json] [--plot FILE]`. The real scheduler and KV cache manager on machines that
differ in the speed of copies to the host and of computing: the step times are those of OPT-13B on an A100, or ten times
slower for prompts. Every request arrives at once; the pool holds a few of them. Goals: everything finishes, wasted work
stays bounded, and auto is never more than 10 % behind the better of the two others.
"""

from __future__ import annotations

import argparse
import json
import logging

from simulation import BLOCK_SIZE, BYTES_PER_TOKEN, CountingWorker, Simulation, StepTime, trace

BYTES_PER_BLOCK = BYTES_PER_TOKEN * BLOCK_SIZE
A100 = StepTime()
SLOW_PREFILL = StepTime(per_token=10 * A100.per_token)
# Step times, and bytes a second of a copy between device and host.
MACHINES = {
    "A100, copies 25 GB/s": (A100, 25e9),
    "A100, copies 2 GB/s": (A100, 2e9),
    "A100, copies 0.2 GB/s": (A100, 2e8),
    "slow prefill, copies 25 GB/s": (SLOW_PREFILL, 25e9),
    "slow prefill, copies 2 GB/s": (SLOW_PREFILL, 2e9),
}
POOLS = (150, 300)
MODES = ("swap", "recompute", "auto")


def run(
    step_time: StepTime, bytes_per_second: float, num_blocks: int, mode: str, num_requests: int
) -> dict[str, float]:
    """One run to its end; it raises if nothing moves for long."""
    arrivals = trace("sharegpt", num_requests, 1000.0)
    worker = CountingWorker(step_time, seconds_per_block=BYTES_PER_BLOCK / bytes_per_second)
    simulation = Simulation(
        arrivals,
        worker,
        num_blocks=num_blocks,
        num_host_blocks=num_blocks,
        preemption_mode=mode,
        max_num_seqs=64,
        max_num_batched_tokens=512,
    )
    num_tokens = idle_steps = 0
    for output in simulation.steps():
        num_tokens += output.num_tokens
        idle_steps = 0 if output.num_tokens else idle_steps + 1
        if idle_steps > 10:
            raise RuntimeError(f"livelock: ten steps without a token ({mode}, {num_blocks} blocks)")
    stats = simulation.scheduler.stats()
    assert len(simulation.latencies) == num_requests
    return {
        "seconds": round(simulation.now, 2),
        "mean_latency": round(sum(simulation.latencies.values()) / num_requests, 2),
        "normalised_latency": round(simulation.normalised_latency(), 4),
        "preemptions": stats.num_preemptions,
        "swapped_blocks": stats.num_swapped_out_blocks,
        "wasted_share": round(stats.num_wasted_tokens / num_tokens, 4),
    }


def measure(num_requests: int) -> dict[str, object]:
    result: dict[str, object] = {"benchmark": "preemption", "num_requests": num_requests}
    worst = 0.0
    for machine, speeds in MACHINES.items():
        for num_blocks in POOLS:
            runs = {mode: run(*speeds, num_blocks, mode, num_requests) for mode in MODES}
            best = min(runs["swap"]["seconds"], runs["recompute"]["seconds"])
            behind = runs["auto"]["seconds"] / best - 1
            worst = max(worst, behind)
            result[f"{machine}, {num_blocks} blocks"] = {**runs, "auto_behind_best": round(behind, 4)}
    result["worst_auto_behind_best"] = round(worst, 4)
    return result


def plot(result: dict[str, object], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    scenarios = [name for name, value in result.items() if isinstance(value, dict)]
    figure, axes = pyplot.subplots(figsize=(9, 4))
    for offset, mode in enumerate(MODES):
        places = [i + 0.25 * offset for i in range(len(scenarios))]
        axes.bar(places, [result[name][mode]["seconds"] for name in scenarios], 0.25, label=mode)
    axes.set_xticks([i + 0.25 for i in range(len(scenarios))], [s.replace(", ", "\n") for s in scenarios], fontsize=6)
    axes.set_ylabel("seconds for all requests")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON line and nothing else")
    parser.add_argument("--plot", metavar="FILE", help="write a PNG (needs matplotlib)")
    parser.add_argument("--requests", type=int, default=120, help="requests, all at once")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    result = measure(arguments.requests)
    print(json.dumps(result) if arguments.json else json.dumps(result, indent=2))
    if arguments.plot:
        plot(result, arguments.plot)


if __name__ == "__main__":
    main()
