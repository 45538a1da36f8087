"""KV memory in use and request rate, paged against contiguous reservation (the paper's figures 2 and 12).

Run `python benchmarks/paper/memory.py [--json] [--plot FILE]`. The paged side is the real scheduler and KV cache
manager; the contiguous side reserves one piece of memory a request by a buddy allocator, as the paper models Orca: for
the longest sequence (max), for the next power of two of the output's true length (pow2), or for exactly that length
(oracle). Both have the same pool (12 GB of OPT-13B's KV), the same step times and the same traces.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from simulation import (
    BLOCK_SIZE,
    BYTES_PER_TOKEN,
    MAX_MODEL_LEN,
    POOL_BYTES,
    Arrival,
    CountingWorker,
    Simulation,
    StepTime,
    mean_normalised_latency,
    trace,
)

NUM_SLOTS = POOL_BYTES // BYTES_PER_TOKEN
POLICIES = ("oracle", "pow2", "max")
MAX_NUM_SEQS = 512
# A prompt that a contiguous system takes in must be computed whole, in one step.
MAX_NUM_BATCHED_TOKENS = 2048
# Ours are cut. With ShareGPT's few sequences a small budget lets a prompt's arithmetic fit into the time that reading
# the weights takes; Alpaca's many sequences fill a step by themselves.
PAGED_NUM_BATCHED_TOKENS = {"sharegpt": 192, "alpaca": 2048}
# The mean normalised latency that a rate may cost, seconds a token: several times that of an idle machine.
LATENCY_LIMIT = 0.2
# Length of the traces that measure rates. An hour is the paper's: in shorter ones the smallest system, whose requests
# take longest, ends before its queue has grown. Alpaca's requests are short and many.
SECONDS = {"sharegpt": 3600.0, "alpaca": 120.0}


@dataclass
class Usage:
    """Means over the steps in which somebody waits, as shares of the pool."""

    live: float
    held: float
    num_running: float


class BuddyAllocator:
    """Pieces whose sizes are powers of two, each split from one twice as large."""

    def __init__(self, num_slots: int):
        self._free: dict[int, set[int]] = {}
        start = 0
        for order in reversed(range(num_slots.bit_length())):
            if num_slots & (1 << order):
                self._free.setdefault(order, set()).add(start)
                start += 1 << order

    def allocate(self, num_slots: int) -> tuple[int, int] | None:
        """(start, order), or None if no piece is large enough."""
        order = (num_slots - 1).bit_length()
        larger = [o for o, starts in self._free.items() if o >= order and starts]
        if not larger:
            return None
        found = min(larger)
        start = self._free[found].pop()
        while found > order:
            found -= 1
            self._free.setdefault(found, set()).add(start + (1 << found))
        return start, order

    def release(self, piece: tuple[int, int]) -> None:
        start, order = piece
        while (start ^ (1 << order)) in self._free.get(order, ()):
            buddy = start ^ (1 << order)
            self._free[order].remove(buddy)
            start, order = min(start, buddy), order + 1
        self._free.setdefault(order, set()).add(start)


def reserved_len(policy: str, arrival: Arrival) -> int:
    """Slots that a contiguous system sets aside for a request."""
    if policy == "max":
        return MAX_MODEL_LEN
    output_len = arrival.output_len if policy == "oracle" else 1 << (arrival.output_len - 1).bit_length()
    return min(arrival.prompt_len + output_len, MAX_MODEL_LEN)


def run_contiguous(arrivals: list[Arrival], policy: str) -> tuple[float, Usage]:
    """Iteration-level batching over reserved pieces: normalised latency and use of memory."""
    allocator = BuddyAllocator(NUM_SLOTS)
    step_time = StepTime()
    queue: deque[int] = deque()
    # index -> [piece, tokens computed, output tokens]
    running: dict[int, list] = {}
    latencies: dict[int, float] = {}
    samples: list[tuple[int, int, int]] = []
    now, next_arrival = 0.0, 0
    while len(latencies) < len(arrivals):
        while next_arrival < len(arrivals) and arrivals[next_arrival].time <= now:
            queue.append(next_arrival)
            next_arrival += 1
        if not queue and not running:
            now = arrivals[next_arrival].time
            continue
        num_tokens = len(running)
        while queue and len(running) < MAX_NUM_SEQS:
            arrival = arrivals[queue[0]]
            if num_tokens + arrival.prompt_len > MAX_NUM_BATCHED_TOKENS:
                break
            piece = allocator.allocate(reserved_len(policy, arrival))
            if piece is None:
                break
            running[queue.popleft()] = [piece, arrival.prompt_len - 1, 0]
            num_tokens += arrival.prompt_len
        live = 0
        for state in running.values():
            state[1] += 1
            state[2] += 1
            live += state[1]
        now += step_time(num_tokens, live)
        if queue:
            samples.append((live, sum(1 << state[0][1] for state in running.values()), len(running)))
        for index in [i for i, state in running.items() if state[2] >= arrivals[i].output_len]:
            allocator.release(running.pop(index)[0])
            latencies[index] = now - arrivals[index].time
    return mean_normalised_latency(arrivals, latencies), usage_of(samples, NUM_SLOTS)


def run_paged(arrivals: list[Arrival], max_num_batched_tokens: int) -> tuple[float, Usage, float]:
    """The same with this project's scheduler; also the share of what is held that is live."""
    num_blocks = NUM_SLOTS // BLOCK_SIZE
    simulation = Simulation(
        arrivals,
        CountingWorker(StepTime(), seconds_per_block=BYTES_PER_TOKEN * BLOCK_SIZE / 25e9),
        num_blocks=num_blocks,
        num_host_blocks=num_blocks,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    samples = []
    for step, _ in enumerate(simulation.steps()):
        if step % 10 == 0:
            stats = simulation.scheduler.stats()
            if stats.num_waiting:
                held = round(stats.kv_cache_usage * num_blocks) * BLOCK_SIZE
                samples.append((simulation.worker.num_live_tokens, held, stats.num_running))
    usage = usage_of(samples, num_blocks * BLOCK_SIZE)
    return simulation.normalised_latency(), usage, usage.live / usage.held if usage.held else 0.0


def usage_of(samples: list[tuple[int, int, int]], num_slots: int) -> Usage:
    # The ramp at the start and the end of a trace says nothing.
    samples = samples[len(samples) // 5 : -len(samples) // 5 or None]
    count = max(len(samples), 1)
    live, held, running = (sum(column) / count for column in zip(*samples, strict=True)) if samples else (0, 0, 0)
    return Usage(live / num_slots, held / num_slots, running)


def latency_of(system: str, data: str, arrivals: list[Arrival]) -> float:
    if system == "paged":
        return run_paged(arrivals, PAGED_NUM_BATCHED_TOKENS[data])[0]
    return run_contiguous(arrivals, system)[0]


def sustained_rate(system: str, data: str, seconds: float) -> float:
    """The highest rate, to about 2 %, of `seconds` of arrivals whose normalised latency is within the limit."""

    def is_bearable(rate: float, seconds: float) -> bool:
        return latency_of(system, data, trace(data, math.ceil(rate * seconds), rate)) <= LATENCY_LIMIT

    # Short traces find the neighbourhood; they bear more than long ones, never less by much.
    high = 0.5
    while is_bearable(high, seconds / 20):
        high *= 1.3
    low = high / 2
    while high / low > 1.02:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if is_bearable(middle, seconds) else (low, middle)
    return low


def measure(num_requests: int) -> dict[str, object]:
    result: dict[str, object] = {"benchmark": "paper/memory", "num_requests": num_requests}
    for data in ("sharegpt", "alpaca"):
        overload = trace(data, num_requests, 1000.0)
        memory: dict[str, dict[str, float]] = {}
        _, usage, live_of_held = run_paged(overload, PAGED_NUM_BATCHED_TOKENS[data])
        memory["paged"] = {
            "live_of_held": round(live_of_held, 4),
            "live_of_pool": round(usage.live, 4),
            "num_running": round(usage.num_running, 1),
        }
        for policy in POLICIES:
            usage = run_contiguous(overload, policy)[1]
            memory[policy] = {
                "live_of_held": round(usage.live / usage.held, 4),
                "live_of_pool": round(usage.live, 4),
                "num_running": round(usage.num_running, 1),
            }
        rates = {system: round(sustained_rate(system, data, SECONDS[data]), 3) for system in ("paged", *POLICIES)}
        result[data] = {
            "memory": memory,
            "requests_per_second": rates,
            "paged_over": {policy: round(rates["paged"] / rates[policy], 2) for policy in POLICIES},
        }
    return result


def plot(result: dict[str, object], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 4))
    systems = ("paged", *POLICIES)
    for offset, data in enumerate(("sharegpt", "alpaca")):
        places = [i + 0.4 * offset for i in range(len(systems))]
        left.bar(places, [100 * result[data]["memory"][s]["live_of_pool"] for s in systems], 0.4, label=data)
        right.bar(places, [result[data]["requests_per_second"][s] for s in systems], 0.4, label=data)
    left.set(ylabel="% of the KV pool that holds live tokens", title="memory, somebody always waiting")
    right.set(ylabel="requests per second", yscale="log", title="at equal normalised latency")
    for axes in (left, right):
        axes.set_xticks([i + 0.2 for i in range(len(systems))], systems)
        axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON line and nothing else")
    parser.add_argument("--plot", metavar="FILE", help="write a PNG (needs matplotlib)")
    parser.add_argument("--requests", type=int, default=800, help="requests at once, to measure memory")
    arguments = parser.parse_args()
    result = measure(arguments.requests)
    print(json.dumps(result) if arguments.json else json.dumps(result, indent=2))
    if arguments.plot:
        plot(result, arguments.plot)


if __name__ == "__main__":
    main()
