"""What sharing saves on real work: several samples, beams, and a system prompt that all requests begin with.

Run `python benchmarks/sharing.py [--json] [--plot FILE]`. Each kind of work runs with sharing and without, in turn, in
engines of their own; what is reported is the peak of KV memory in use and output tokens a second. Without sharing
means, for samples, that a request of n is n requests; for beams, that a fork copies the parent's whole cache, as
engines with contiguous caches do; for the system prompt, that prefix caching is off.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from machine import idle_share

from pagedserve import LLM, SamplingParams
from pagedserve.config import DEFAULT_MODEL
from pagedserve.kv_cache.manager import KVCacheManager
from pagedserve.sampling_params import BeamParams
from pagedserve.scheduler import scheduler as scheduler_module
from pagedserve.sequence import Sequence

CONCURRENCY = 16
NUM_SAMPLES = 8
BEAM_WIDTH = 4
SYSTEM_PROMPT_LEN = 1000
PROMPT_LEN = 200
OUTPUT_LEN = 64

Work = tuple[list[list[int]], SamplingParams]


class CopyingManager(KVCacheManager):
    """Forks that share nothing: the child gets a copy of every block at once."""

    def fork(self, parent: Sequence, child: Sequence, *, num_unsent: int = 0) -> None:
        super().fork(parent, child, num_unsent=num_unsent)
        table = self._tables[child.seq_id]
        for index in range(len(table.blocks)):
            self._copy_on_write(child.seq_id, table, index)


@dataclass
class Run:
    """One engine's run over one kind of work."""

    peak_blocks: int
    peak_mb: float
    tokens_per_second: float
    copied_blocks: int
    cached_tokens: int


def prompts(llm: LLM, count: int, prompt_len: int, first: int) -> list[list[int]]:
    """Different pieces of English, each of `prompt_len` tokens."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    ids = llm.engine.tokenizer.encode(text[: 8 * (first + count * prompt_len)])
    return [ids[first + i * prompt_len :][:prompt_len] for i in range(count)]


def parallel(llm: LLM, num_requests: int) -> Work:
    """n samples of each prompt."""
    params = SamplingParams(n=NUM_SAMPLES, temperature=1.0, seed=1, max_tokens=OUTPUT_LEN, ignore_eos=True)
    return prompts(llm, num_requests, PROMPT_LEN, 0), params


def separate(llm: LLM, num_requests: int) -> Work:
    """The same as requests of one sample."""
    asked, params = parallel(llm, num_requests)
    single = SamplingParams(temperature=1.0, seed=1, max_tokens=params.max_tokens, ignore_eos=True)
    return [prompt for prompt in asked for _ in range(NUM_SAMPLES)], single


def beam(llm: LLM, num_requests: int) -> Work:
    """Beam search over each prompt."""
    params = SamplingParams(n=1, beam=BeamParams(width=BEAM_WIDTH), max_tokens=OUTPUT_LEN, ignore_eos=True)
    return prompts(llm, num_requests, PROMPT_LEN, 0), params


def system_prompt(llm: LLM, num_requests: int) -> Work:
    """One long beginning, and a short question of each request's own."""
    beginning = prompts(llm, 1, SYSTEM_PROMPT_LEN, 0)[0]
    questions = prompts(llm, num_requests, 32, SYSTEM_PROMPT_LEN)
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_LEN, ignore_eos=True)
    return [beginning + question for question in questions], params


def run(model: str, work: Callable[[LLM, int], Work], num_requests: int, num_seqs: int, **settings: Any) -> Run:
    """All requests, at most `num_seqs` sequences at once, in an engine of its own."""
    with LLM(model=model, max_num_seqs=num_seqs, num_device_blocks=4096, max_model_len=2048, **settings) as llm:
        asked, params = work(llm, num_requests)
        engine = llm.engine
        engine.add_request(asked[0][:8], SamplingParams(max_tokens=2))
        while engine.num_unfinished_requests:
            engine.step()
        for prompt in asked:
            engine.add_request(prompt, params)
        peak = num_tokens = cached = 0
        started = time.perf_counter()
        while engine.num_unfinished_requests:
            for output in engine.step():
                if output.finished:
                    num_tokens += sum(len(choice.token_ids) for choice in output.outputs)
                    cached += output.num_cached_tokens
            peak = max(peak, round(engine.stats.kv_cache_usage * engine.plan.num_device_blocks))
        seconds = time.perf_counter() - started
        return Run(
            peak_blocks=peak,
            peak_mb=round(peak * engine.plan.spec.bytes_per_block / 1e6, 1),
            tokens_per_second=round(num_tokens / seconds, 1),
            copied_blocks=engine.stats.num_copied_blocks,
            cached_tokens=cached,
        )


def without_sharing_forks(function: Callable[[], Run]) -> Run:
    """Runs with a manager whose forks copy."""
    scheduler_module.KVCacheManager = CopyingManager
    try:
        return function()
    finally:
        scheduler_module.KVCacheManager = KVCacheManager


def measure(model: str, num_requests: int, repeats: int) -> dict[str, object]:
    """Every kind of work with sharing and without, in turn; medians of rates, the last run's counts."""
    num_groups = max(1, CONCURRENCY // NUM_SAMPLES)
    kinds: dict[str, dict[str, Callable[[], Run]]] = {
        f"n={NUM_SAMPLES}": {
            "shared": lambda: run(model, parallel, num_requests // 4, num_groups * NUM_SAMPLES),
            "unshared": lambda: run(
                model, separate, num_requests // 4, num_groups * NUM_SAMPLES, enable_prefix_caching=False
            ),
        },
        f"beam={BEAM_WIDTH}": {
            "shared": lambda: run(model, beam, num_requests // 4, CONCURRENCY),
            "unshared": lambda: without_sharing_forks(lambda: run(model, beam, num_requests // 4, CONCURRENCY)),
        },
        f"system prompt of {SYSTEM_PROMPT_LEN}": {
            "shared": lambda: run(model, system_prompt, num_requests, CONCURRENCY),
            "unshared": lambda: run(model, system_prompt, num_requests, CONCURRENCY, enable_prefix_caching=False),
        },
    }
    result: dict[str, object] = {"benchmark": "sharing", "model": model, "idle_share": round(idle_share(), 2)}
    for name, sides in kinds.items():
        runs: dict[str, list[Run]] = {side: [] for side in sides}
        for _ in range(repeats):
            for side, function in sides.items():
                runs[side].append(function())
        numbers: dict[str, Any] = {}
        for side, done in runs.items():
            rate = statistics.median(r.tokens_per_second for r in done)
            numbers[side] = {**vars(done[-1]), "tokens_per_second": rate}
        numbers["memory_share"] = round(numbers["shared"]["peak_blocks"] / numbers["unshared"]["peak_blocks"], 3)
        numbers["speedup"] = round(numbers["shared"]["tokens_per_second"] / numbers["unshared"]["tokens_per_second"], 2)
        result[name] = numbers
    return result


def plot(result: dict[str, Any], path: str) -> None:
    """Peak memory and rate, side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [name for name, value in result.items() if isinstance(value, dict)]
    figure, panels = pyplot.subplots(1, 2, figsize=(9, 4))
    for axes, field, label in zip(
        panels, ("peak_mb", "tokens_per_second"), ("peak KV memory, MB", "output tokens/s"), strict=True
    ):
        for offset, side in enumerate(("shared", "unshared")):
            axes.bar(
                [i + 0.4 * offset for i in range(len(names))], [result[n][side][field] for n in names], 0.4, label=side
            )
        axes.set_xticks([i + 0.2 for i in range(len(names))], names)
        axes.set_ylabel(label)
        axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--json", action="store_true", help="print one JSON line and nothing else")
    parser.add_argument("--plot", metavar="FILE", help="write a PNG (needs matplotlib)")
    parser.add_argument(
        "--requests", type=int, default=48, help="requests with the system prompt; a quarter for others"
    )
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    result = measure(arguments.model, arguments.requests, arguments.repeats)
    print(json.dumps(result) if arguments.json else json.dumps(result, indent=2))
    if arguments.plot:
        plot(result, arguments.plot)


if __name__ == "__main__":
    main()
