"""Blocks saved by sharing, for parallel samples and beams (the paper's figure 15).

Run `python benchmarks/paper/sharing.py [--json] [--plot FILE]`. The real scheduler and KV cache manager run the paper's
traces; what is counted in every step is the entries of all block tables against the different blocks in them. Samples
of one request have the same length here. Which beams survive depends on the model: a beam's next-token distribution is
made up as a Zipf law whose exponent is drawn anew for each token, which gives 0.1 to 4 nats of entropy, as language
models have.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from simulation import BLOCK_SIZE, BYTES_PER_TOKEN, POOL_BYTES, CountingWorker, Simulation, StepTime, trace

from pagedserve.sampling_params import BeamParams

# Shares that the paper reports, lowest and highest of its three sizes.
PAPER = {
    ("alpaca", "parallel"): (0.061, 0.098),
    ("alpaca", "beam"): (0.376, 0.552),
    ("sharegpt", "parallel"): (0.162, 0.305),
    ("sharegpt", "beam"): (0.443, 0.663),
}
RATES = {"alpaca": 4.0, "sharegpt": 0.4}
SIZES = (2, 4, 6)
NUM_TAIL_TOKENS = 200


def candidates(width: int, rng: random.Random) -> Iterator[list[tuple[int, float]]]:
    """The best 2 x width next tokens of one beam after another."""
    ranks = range(1, NUM_TAIL_TOKENS + 1)
    laws = []
    for step in range(32):
        exponent = 0.8 + 3.2 * step / 31
        total = sum(rank**-exponent for rank in ranks)
        laws.append([-exponent * math.log(rank) - math.log(total) for rank in ranks[: 2 * width]])
    while True:
        law = rng.choice(laws)
        yield [(rng.randrange(10, 50_000), logprob + rng.gauss(0.0, 1e-3)) for logprob in law]


def saved_share(data: str, kind: str, size: int, num_requests: int) -> dict[str, float]:
    """1 - blocks / table entries, over all steps; and the copies that copy-on-write made for each request."""
    arrivals = trace(data, num_requests, RATES[data])
    worker = CountingWorker(StepTime(), candidates=candidates(size, random.Random(size)))
    simulation = Simulation(arrivals, worker, num_blocks=POOL_BYTES // BYTES_PER_TOKEN // BLOCK_SIZE)
    simulation.params = (
        {"n": size} if kind == "parallel" else {"n": size, "beam": BeamParams(width=size), "ignore_eos": True}
    )
    entries = blocks = 0
    for step, _ in enumerate(simulation.steps()):
        if step % 4 == 0:
            tables = [row.block_ids for row in worker.rows.values()]
            entries += sum(map(len, tables))
            blocks += len(set().union(*tables))
    stats = simulation.scheduler.stats()
    return {
        "saved": round(1 - blocks / entries, 4),
        "copied_blocks_per_request": round(stats.num_copied_blocks / num_requests, 1),
        "preemptions": stats.num_preemptions,
    }


def measure(num_requests: int) -> dict[str, object]:
    result: dict[str, object] = {"benchmark": "paper/sharing", "num_requests": num_requests}
    for (data, kind), (low, high) in PAPER.items():
        shares = {str(size): saved_share(data, kind, size, num_requests) for size in SIZES}
        result[f"{data}/{kind}"] = {"paper": [low, high], **shares}
    return result


def plot(result: dict[str, object], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(9, 4), sharey=True)
    for axes, kind in zip(panels, ("parallel", "beam"), strict=True):
        for offset, data in enumerate(("alpaca", "sharegpt")):
            numbers = result[f"{data}/{kind}"]
            places = [i + 0.4 * offset for i in range(len(SIZES))]
            axes.bar(places, [100 * numbers[str(size)]["saved"] for size in SIZES], 0.4, label=data)
            for limit in numbers["paper"]:
                axes.axhline(100 * limit, color=f"C{offset}", linestyle=":", linewidth=1)
        axes.set_xticks([i + 0.2 for i in range(len(SIZES))], SIZES)
        axes.set(title=kind, xlabel="samples or beams")
        axes.legend()
    panels[0].set_ylabel("% of blocks saved (dotted: the paper's range)")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON line and nothing else")
    parser.add_argument("--plot", metavar="FILE", help="write a PNG (needs matplotlib)")
    parser.add_argument("--requests", type=int, default=400, help="requests in each trace")
    arguments = parser.parse_args()
    result = measure(arguments.requests)
    print(json.dumps(result) if arguments.json else json.dumps(result, indent=2))
    if arguments.plot:
        plot(result, arguments.plot)


if __name__ == "__main__":
    main()
