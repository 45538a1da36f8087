"""What one other busy process costs: offline decoding alone and beside a process that never sleeps, in turn.

    python benchmarks/busy_neighbour.py [--model M] [--batch-sizes 8,32] [--seconds 4] [--rounds 3]

One JSON line: tokens/s alone and beside it, and their ratio, for each batch size. On a machine of N cores the engine's
threads and the neighbour share N cores, so an ideal pool keeps (N - 1) / N to 1 of its speed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from machine import idle_share

from pagedserve import LLM, SamplingParams
from pagedserve.kernels import native


@contextmanager
def busy_process() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def tokens_per_second(llm: LLM, batch_size: int, seconds: float) -> float:
    """Of decoding, once every sequence has its first token."""
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=llm.engine.max_model_len - 4)
    ids = [llm.engine.add_request([5 + i, 6, 7, 8], params) for i in range(batch_size)]
    for _ in range(3):
        llm.engine.step()
    steps, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        llm.engine.step()
        steps += 1
    took = time.perf_counter() - started
    for request in ids:
        llm.engine.abort(request)
    llm.engine.step()
    return steps * batch_size / took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--batch-sizes", default="8,32")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of measurements, in turn")
    args = parser.parse_args()
    idle = idle_share()
    result: dict[str, object] = {
        "cores": os.cpu_count(),
        "threads": native.num_threads(),
        "idle_before": round(idle, 3),
    }
    with LLM(args.model, kv_cache_memory="1GiB", enable_prefix_caching=False) as llm:
        for size in map(int, args.batch_sizes.split(",")):
            alone, beside = [], []
            for _ in range(args.rounds):
                alone.append(tokens_per_second(llm, size, args.seconds))
                with busy_process():
                    time.sleep(0.2)
                    beside.append(tokens_per_second(llm, size, args.seconds))
            ratios = [b / a for a, b in zip(alone, beside, strict=True)]
            result[f"batch {size}"] = {
                "alone": round(statistics.median(alone), 1),
                "beside": round(statistics.median(beside), 1),
                "ratio": round(statistics.median(ratios), 3),
            }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
