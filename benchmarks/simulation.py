"""What the simulations share: request traces, the time of a step, and a worker that only counts.

The scheduler and the KV cache manager are the real ones; only the model and its clock are made up.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from pagedserve.config import CacheConfig, SchedulerConfig
from pagedserve.sampling_params import SamplingParams
from pagedserve.scheduler.scheduler import Scheduler
from pagedserve.sequence import Request
from pagedserve.step import ModelRunnerOutput, SchedulerOutput

# OPT-13B: 40 layers of 5,120 channels, keys and values in fp16; the paper's pool of 12 GB beside its weights.
BYTES_PER_TOKEN = 2 * 40 * 5120 * 2
POOL_BYTES = 12 * 2**30
MAX_MODEL_LEN = 2048
BLOCK_SIZE = 16

# Mean prompt and output lengths of the paper's data sets, and the spread of logarithms that gives their shape.
LENGTHS = {"sharegpt": (161.31, 337.99, 1.0, 0.8), "alpaca": (19.31, 58.45, 0.5, 0.8)}


@dataclass(frozen=True)
class Arrival:
    """One request of a trace."""

    time: float
    prompt_len: int
    output_len: int


def trace(name: str, num_requests: int, rate: float, seed: int = 0) -> list[Arrival]:
    """Poisson arrivals at `rate` a second with log-normal lengths, scaled so that their means are the data set's."""
    rng = random.Random(seed)
    mean_in, mean_out, sigma_in, sigma_out = LENGTHS[name]
    prompts = _lengths(rng, num_requests, mean_in, sigma_in, MAX_MODEL_LEN // 2)
    outputs = _lengths(rng, num_requests, mean_out, sigma_out, MAX_MODEL_LEN // 2 - 1)
    now = 0.0
    arrivals = []
    for prompt_len, output_len in zip(prompts, outputs, strict=True):
        now += rng.expovariate(rate)
        arrivals.append(Arrival(now, prompt_len, output_len))
    return arrivals


def _lengths(rng: random.Random, count: int, mean: float, sigma: float, longest: int) -> list[int]:
    raw = [math.exp(rng.gauss(0.0, sigma)) for _ in range(count)]
    scale = mean * count / sum(raw)
    for _ in range(20):  # cutting at both ends moves the mean, so that the scale has to follow
        lengths = [max(1, min(round(x * scale), longest)) for x in raw]
        scale *= mean * count / sum(lengths)
    return lengths


# An A100 of 40 GB as engines use it: 80 % of the memory's speed, half of the fp16 arithmetic.
BYTES_PER_SECOND = 0.8 * 1.555e12
FLOPS = 0.5 * 312e12


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on an A100 with OPT-13B: launches, then weights or arithmetic, then the context's KV."""

    overhead: float = 5e-3
    weights: float = 26e9 / BYTES_PER_SECOND
    per_token: float = 2 * 13e9 / FLOPS
    per_context_token: float = BYTES_PER_TOKEN / BYTES_PER_SECOND

    def __call__(self, num_tokens: int, num_context_tokens: int) -> float:
        return (
            self.overhead + max(self.weights, num_tokens * self.per_token) + num_context_tokens * self.per_context_token
        )


@dataclass
class Row:
    """What a worker knows of a sequence, as far as counting goes."""

    num_tokens: int
    num_computed: int
    block_ids: list[int]
    params: SamplingParams


@dataclass
class CountingWorker:
    """Keeps rows as a worker does, samples token 7, and knows how long everything takes."""

    step_time: StepTime
    seconds_per_block: float = 0.0
    candidates: Iterator[list[tuple[int, float]]] | None = None
    rows: dict[int, Row] = field(default_factory=dict)

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        rows = self.rows
        for parent, child, _ in output.forks:
            row = rows[parent]
            rows[child] = Row(row.num_tokens, row.num_computed, row.block_ids.copy(), row.params)
        for seq_id in output.released:
            del rows[seq_id]
        for seq_id, _ in output.appended:
            rows[seq_id].num_tokens += 1
        for new in output.new:
            rows[new.seq_id] = Row(
                len(new.token_ids), new.num_computed_tokens, new.block_ids.copy(), new.sampling_params
            )
        result = ModelRunnerOutput(step_id=output.step_id)
        num_context_tokens = 0
        columns = zip(output.seq_ids, output.num_scheduled, output.num_computed, output.new_block_ids, strict=True)
        for seq_id, num_scheduled, num_computed, new_block_ids in columns:
            row = rows[seq_id]
            row.block_ids += new_block_ids
            row.num_computed = num_computed + num_scheduled
            num_context_tokens += row.num_computed
            if row.num_computed == row.num_tokens:
                self._sample(seq_id, row, result)
        for seq_id, index, block_id, _ in output.replaced_blocks:
            rows[seq_id].block_ids[index] = block_id
        for child, parent in output.shared_logits:
            rows[child].num_computed = rows[parent].num_computed
            self._sample(child, rows[child], result)
        num_swaps = len(output.block_ops.swap_out) + len(output.block_ops.swap_in)
        result.swap_seconds = num_swaps * self.seconds_per_block
        result.forward_seconds = self.step_time(output.num_tokens, num_context_tokens) if output.seq_ids else 0.0
        return result

    def _sample(self, seq_id: int, row: Row, result: ModelRunnerOutput) -> None:
        result.seq_ids.append(seq_id)
        result.sampled_logprobs.append(0.0)
        if row.params.beam is not None:
            assert self.candidates is not None
            result.sampled_token_ids.append([])
            result.candidates[seq_id] = next(self.candidates)
            return
        result.sampled_token_ids.append([7])
        row.num_tokens += 1

    @property
    def num_live_tokens(self) -> int:
        """Tokens whose keys and values are in the pool, those of shared blocks once for each sequence."""
        return sum(row.num_computed for row in self.rows.values())


class Simulation:
    """The scheduler over a trace, on a made-up clock."""

    def __init__(
        self,
        arrivals: list[Arrival],
        worker: CountingWorker,
        *,
        num_blocks: int,
        num_host_blocks: int = 0,
        bytes_per_block: int = BYTES_PER_TOKEN * BLOCK_SIZE,
        **options: object,
    ):
        self.now = 0.0
        self.worker = worker
        self.scheduler = Scheduler(
            SchedulerConfig(**{"max_num_seqs": 256, "max_num_batched_tokens": 2048, "max_queue_len": 0, **options}),
            CacheConfig(block_size=BLOCK_SIZE),
            num_device_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            max_model_len=MAX_MODEL_LEN,
            bytes_per_block=bytes_per_block,
            clock=lambda: self.now,
        )
        self._arrivals = arrivals
        self._next = 0
        self.params: dict[str, object] = {}
        self.latencies: dict[int, float] = {}

    @property
    def num_waiting(self) -> int:
        return self.scheduler.stats().num_waiting

    def steps(self) -> Iterator[SchedulerOutput]:
        """Run to the end, pausing after each step."""
        arrivals = self._arrivals
        while self._next < len(arrivals) or self.scheduler.has_work():
            while self._next < len(arrivals) and arrivals[self._next].time <= self.now:
                self._add(self._next)
                self._next += 1
            if not self.scheduler.has_work():
                self.now = arrivals[self._next].time
                continue
            output = self.scheduler.schedule()
            result = self.worker.execute(output)
            self.now += result.forward_seconds + result.swap_seconds
            outputs = self.scheduler.update(output, result)
            for finished in outputs.finished:
                index = int(finished.request_id)
                self.latencies[index] = self.now - arrivals[index].time
            yield output

    def normalised_latency(self) -> float:
        """Mean over requests of latency over output length, seconds a token."""
        return mean_normalised_latency(self._arrivals, self.latencies)

    def _add(self, index: int) -> None:
        arrival = self._arrivals[index]
        # Ids that no other request has: these data sets are measured without prefix sharing.
        first = index * MAX_MODEL_LEN
        params = SamplingParams(**{"max_tokens": arrival.output_len, "temperature": 1.0, **self.params})
        self.scheduler.add(
            Request(
                request_id=str(index),
                prompt_token_ids=list(range(first, first + arrival.prompt_len)),
                sampling_params=params,
                seed=index,
                arrival_time=arrival.time,
            )
        )


def mean_normalised_latency(arrivals: list[Arrival], latencies: dict[int, float]) -> float:
    return sum(latencies[i] / arrivals[i].output_len for i in latencies) / len(latencies)
