"""What the control plane costs: schedule + update alone, and the hashes of a long prompt.

Run `python benchmarks/scheduler.py [--json] [--plot FILE]`. No model and no worker: results are made up between the two
calls, outside the measured time, which is CPU time of the thread and so says the same on a busy machine. The goals: at
most 500 us a step with 256 running sequences, time linear in their number, and under 20 ms for the first look-up of a
prompt of 100,000 tokens, which is never hashed again.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from pagedserve.config import CacheConfig, SchedulerConfig
from pagedserve.sampling_params import SamplingParams
from pagedserve.scheduler.scheduler import Scheduler
from pagedserve.sequence import Request
from pagedserve.step import ModelRunnerOutput, SchedulerOutput

BLOCK_SIZE = 16
NUM_RUNNING = (1, 64, 256, 1024)
LONG_PROMPT = 100_000
CACHED_PROMPT = 32_768


def make_scheduler(num_seqs: int, num_blocks: int, max_model_len: int = 200_000) -> Scheduler:
    """A scheduler that admits everything at once."""
    return Scheduler(
        SchedulerConfig(max_num_seqs=num_seqs, max_num_batched_tokens=10_000_000, max_queue_len=0),
        CacheConfig(block_size=BLOCK_SIZE),
        num_device_blocks=num_blocks,
        num_host_blocks=0,
        max_model_len=max_model_len,
    )


def make_request(name: str, prompt: list[int], max_tokens: int = 100_000) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return Request(request_id=name, prompt_token_ids=prompt, sampling_params=params, seed=0, eos_token_ids=(2,))


def made_up_result(output: SchedulerOutput) -> ModelRunnerOutput:
    """One token for each scheduled sequence."""
    seq_ids = output.seq_ids
    return ModelRunnerOutput(
        step_id=output.step_id,
        seq_ids=list(seq_ids),
        sampled_token_ids=[[7] for _ in seq_ids],
        sampled_logprobs=[-0.5] * len(seq_ids),
    )


def step(scheduler: Scheduler) -> float:
    """CPU seconds of one schedule + update."""
    started = time.thread_time()
    output = scheduler.schedule()
    scheduled = time.thread_time()
    result = made_up_result(output)
    resumed = time.thread_time()
    scheduler.update(output, result)
    return (scheduled - started) + (time.thread_time() - resumed)


def decode_seconds(num_running: int, prompt_len: int, num_steps: int, shared: bool) -> list[float]:
    """Seconds of each of `num_steps` decoding steps; with `shared`, all prompts are one and come from the cache."""
    blocks_each = (num_steps + 40) // BLOCK_SIZE + 2
    prompt_blocks = prompt_len // BLOCK_SIZE + 2
    num_blocks = prompt_blocks * (1 if shared else num_running) + blocks_each * num_running + 64
    scheduler = make_scheduler(num_running, int(num_blocks * 1.05))
    prompt = list(range(100, 100 + prompt_len))
    for i in range(num_running):
        scheduler.add(make_request(str(i), prompt if shared else [i * prompt_len + t for t in prompt]))
        if i == 0:
            step(scheduler)  # so that the prompt is in the cache for the others
    for _ in range(20):
        step(scheduler)
    return [step(scheduler) for _ in range(num_steps)]


def lookup_seconds() -> dict[str, float]:
    """The admission of a prompt of 100,000 tokens that is in the cache, and the steps in which it cannot yet run."""
    prompt = list(range(LONG_PROMPT))
    scheduler = make_scheduler(2, 3 * LONG_PROMPT // BLOCK_SIZE)
    scheduler.add(make_request("first", prompt, max_tokens=1))
    while scheduler.num_unfinished:
        step(scheduler)
    scheduler.add(make_request("again", prompt))
    admission = step(scheduler)
    assert scheduler.stats().prefix_cache_hits > LONG_PROMPT - 2 * BLOCK_SIZE
    # A pool that is nearly full: the same prompt waits, and every step asks again whether it fits.
    crowded = make_scheduler(2, LONG_PROMPT // BLOCK_SIZE + 20)
    crowded.add(make_request("holds memory", list(range(10, 10 + 20 * BLOCK_SIZE)), max_tokens=4096))
    step(crowded)
    crowded.add(make_request("waits", prompt))
    first_wait = step(crowded)
    waits = [step(crowded) for _ in range(50)]
    assert crowded.stats().num_waiting == 1
    return {"admission_ms": admission * 1e3, "first_wait_ms": first_wait * 1e3, "wait_ms": median_ms(waits)}


def median_ms(seconds: list[float]) -> float:
    return statistics.median(seconds) * 1e3


def measure(num_steps: int) -> dict[str, object]:
    """All numbers; seconds are medians over steps, and minima, which a busy machine disturbs less."""
    gc.disable()
    steps: dict[str, dict[str, float]] = {}
    for name, prompt_len, shared in (("prompt_64", 64, False), ("prompt_32k_cached", CACHED_PROMPT, True)):
        for num_running in NUM_RUNNING:
            seconds = decode_seconds(num_running, prompt_len, num_steps, shared)
            gc.collect()
            steps[f"{name}/{num_running}"] = {
                "median_us": round(median_ms(seconds) * 1e3, 1),
                "min_us": round(min(seconds) * 1e6, 1),
                "us_per_sequence": round(min(seconds) * 1e6 / num_running, 3),
            }
    return {
        "benchmark": "scheduler",
        "steps": steps,
        "lookup_100k": {k: round(v, 3) for k, v in lookup_seconds().items()},
    }


def plot(result: dict[str, object], path: str) -> None:
    """Step time over the number of running sequences."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    steps: dict[str, dict[str, float]] = result["steps"]  # type: ignore[assignment]
    for name in ("prompt_64", "prompt_32k_cached"):
        axes.plot(NUM_RUNNING, [steps[f"{name}/{n}"]["median_us"] for n in NUM_RUNNING], marker="o", label=name)
    axes.axhline(500, color="grey", linestyle=":", label="goal at 256")
    axes.set(xscale="log", yscale="log", xlabel="running sequences", ylabel="schedule + update, us")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON line and nothing else")
    parser.add_argument("--plot", metavar="FILE", help="write a PNG (needs matplotlib)")
    parser.add_argument("--steps", type=int, default=200, help="steps measured for each point")
    arguments = parser.parse_args()
    result = measure(arguments.steps)
    if arguments.json:
        print(json.dumps(result))
    else:
        for name, numbers in result["steps"].items():  # type: ignore[attr-defined]
            print(f"{name:24} {numbers['median_us']:9.1f} us a step, {numbers['us_per_sequence']:.2f} us a sequence")
        for name, value in result["lookup_100k"].items():  # type: ignore[attr-defined]
            print(f"100k-token prompt, {name:14} {value:9.3f}")
    if arguments.plot:
        plot(result, arguments.plot)


if __name__ == "__main__":
    main()
