"""What a step costs the host: scheduler, core and runner around a model that does nothing.

Run `python benchmarks/host_time.py [--sequences 1,64,256] [--steps 200] [--json]`. The model is a table of made-up
logits; all else is real: decisions, rows, inputs and their copy, metadata, sampling, results, the messages that go out.
Times are CPU seconds of the thread that steps, so they say nearly the same on a busy machine; medians over decode steps
without prompts. On a CPU they hold the draws themselves (of a small vocabulary), on a GPU (`--device cuda`) only giving
them to it. With `ahead` steps are decided before the results of those before them are known, as beside a GPU.
The goal: under 1 ms at 256 sequences.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks.machine import idle_share
from pagedserve.attention import AttentionSpec, select
from pagedserve.config import CacheConfig, SchedulerConfig
from pagedserve.engine.core import EngineCore
from pagedserve.executor.inline import InlineStep
from pagedserve.messages import AddRequest, EngineCoreOutputs
from pagedserve.sampling.sampler import Sampler
from pagedserve.sampling_params import SamplingParams
from pagedserve.scheduler.scheduler import Scheduler
from pagedserve.sequence import Request
from pagedserve.step import SchedulerOutput
from pagedserve.worker.kv_storage import KVStorage
from pagedserve.worker.model_runner import ModelRunner
from pagedserve.worker.rows import Rows
from pagedserve.worker.step_inputs import StepGraph, StepInputs

BLOCK_SIZE = 16
PROMPT_LEN = 512
WARM_UP = 20
GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "seed": 1}
PENALISED = {"temperature": 0.8, "frequency_penalty": 0.5, "seed": 1}


class NullModel:
    """Nobody asks it anything: prompts have no wishes."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


class NullGraph(StepGraph):
    """Answers with numbers that were there before."""

    def __init__(self, num_rows: int, num_tokens: int, vocab_size: int, device: torch.device) -> None:
        super().__init__(None)
        self._hidden = torch.zeros((num_tokens, 1), device=device)
        self._logits = torch.randn((num_rows, vocab_size), device=device)

    def __call__(self, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        num_tokens, num_sampled = inputs.counts
        return self._hidden[:num_tokens], self._logits[:num_sampled]


class NullExecutor:
    """A runner without a model, in this thread."""

    def __init__(self, num_seqs: int, num_blocks: int, vocab_size: int, device: torch.device) -> None:
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        spec = AttentionSpec(
            num_heads=8,
            num_kv_heads=2,
            head_dim=64,
            block_size=BLOCK_SIZE,
            dtype=dtype,
            kv_cache_dtype=dtype,
            device=device,
            scale=0.125,
        )
        attention = select(spec)(spec)
        num_tokens = num_seqs * PROMPT_LEN
        self.runner = ModelRunner(
            NullModel(),
            attention=attention,
            storage=KVStorage(
                num_device_blocks=num_blocks,
                num_host_blocks=0,
                num_layers=1,
                layer_block_shape=attention.layer_block_shape,
                dtype=dtype,
                device=device,
            ),
            rows=Rows(num_seqs, BLOCK_SIZE),
            sampler=Sampler(vocab_size),
            device=device,
            make_graph=lambda model, samples: NullGraph(num_seqs, num_tokens, vocab_size, device),
        )

    def submit(self, output: SchedulerOutput) -> InlineStep:
        return InlineStep(self.runner, output)


class Stopwatch:
    """CPU seconds of this thread inside functions, by name, since it was last read."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def wrap(self, name: str, owner: Any, attribute: str) -> None:
        function: Callable[..., Any] = getattr(owner, attribute)
        self.seconds[name] = 0.0

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] += time.thread_time() - started

        setattr(owner, attribute, timed)

    def read(self) -> dict[str, float]:
        read = dict(self.seconds)
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        return read


def measure(
    num_seqs: int, num_steps: int, *, ahead: bool, params: dict[str, Any], vocab_size: int, device: torch.device
) -> dict[str, float]:
    """Medians over steps, in microseconds: the whole step, and its parts."""
    max_len = PROMPT_LEN + num_steps + 2 * WARM_UP + 8
    num_blocks = num_seqs * (max_len // BLOCK_SIZE + 2) + 64
    config = SchedulerConfig(max_num_seqs=num_seqs, max_num_batched_tokens=num_seqs * PROMPT_LEN, max_queue_len=0)
    scheduler = Scheduler(
        config,
        CacheConfig(block_size=BLOCK_SIZE),
        num_device_blocks=num_blocks,
        num_host_blocks=0,
        max_model_len=max_len,
    )
    executor = NullExecutor(num_seqs, num_blocks, vocab_size, device)
    sent: list[EngineCoreOutputs] = []
    core = EngineCore(scheduler, executor, sent.append, looks_ahead=ahead)  # type: ignore[arg-type]
    for i in range(num_seqs):
        prompt = [i * PROMPT_LEN + k for k in range(PROMPT_LEN)]
        request = Request(
            request_id=str(i),
            prompt_token_ids=[token % vocab_size for token in prompt],
            sampling_params=SamplingParams(max_tokens=max_len, ignore_eos=True, **params),
            seed=i,
            cache_salt=str(i),
        )
        core.handle(AddRequest(request=request))
    for _ in range(WARM_UP):
        core.step()
    watch = Stopwatch()
    for name, owner, attribute in (
        ("schedule", scheduler, "schedule"),
        ("update", scheduler, "update"),
        ("submit", executor.runner, "submit"),
        ("sample", executor.runner, "sample"),
        ("result", executor.runner, "result"),
    ):
        watch.wrap(name, owner, attribute)
    wholes: list[float] = []
    parts: dict[str, list[float]] = {name: [] for name in watch.seconds}
    gc.collect()
    gc.disable()
    for _ in range(num_steps):
        sent.clear()
        started = time.thread_time()
        core.step()
        wholes.append(time.thread_time() - started)
        for name, seconds in watch.read().items():
            parts[name].append(seconds)
    gc.enable()
    assert scheduler.stats().num_running == num_seqs
    micro = {name: round(1e6 * statistics.median(seconds), 1) for name, seconds in parts.items()}
    return {"step": round(1e6 * statistics.median(wholes), 1), "least": round(1e6 * min(wholes), 1), **micro}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", default="1,64,256")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--vocab-size", type=int, default=256, help="small, so that on a CPU the draws hardly count")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--json", action="store_true", help="print one JSON line and nothing else")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(arguments.device)
    result: dict[str, Any] = {"benchmark": "host_time", "device": arguments.device, "idle": round(idle_share(), 3)}
    result["us"] = {
        f"{wishes}, {'ahead' if ahead else 'in turn'}/{num_seqs}": measure(
            num_seqs,
            arguments.steps,
            ahead=ahead,
            params=params,
            vocab_size=arguments.vocab_size,
            device=device,
        )
        for wishes, params in (("greedy", GREEDY), ("sampled", SAMPLED), ("penalties", PENALISED))
        for ahead in (False, True)
        for num_seqs in map(int, arguments.sequences.split(","))
    }
    if arguments.json:
        print(json.dumps(result))
        return
    for name, numbers in result["us"].items():
        print(f"{name:24}" + "".join(f"{key} {value:7.1f}  " for key, value in numbers.items()))


if __name__ == "__main__":
    main()
