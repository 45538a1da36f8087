"""What is kept free for steps: measured with the largest ones, subtracted from what is free, refused with a flag."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pagedserve.config import CacheConfig, ModelConfig, SchedulerConfig
from pagedserve.errors import ConfigError
from pagedserve.kernels import native
from pagedserve.model_files import resolve
from pagedserve.sampling_params import SamplingParams
from pagedserve.worker.decode_graphs import decode_sizes
from pagedserve.worker.step_inputs import StepGraph
from pagedserve.worker.step_memory import BYTES_PER_CAPTURE, StepMemory, measure_steps
from pagedserve.worker.worker import Worker
from pagedserve.worker.worst_steps import worst_steps
from tests.helpers.checkpoints import llama_config, random_tensors, write_checkpoint
from tests.helpers.recorder import CapturableBackend
from tests.helpers.tracked_memory import ScriptedDevice, TrackedDevice
from tests.worker.driver import Driver

MIB = 2**20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    return write_checkpoint(folder, llama_config(), random_tensors(llama_config()), tokenizer=False)


@pytest.fixture(autouse=True)
def keep_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    if native.available():
        native.set_num_threads(before)


def make_worker(checkpoint: Path, device: object, scheduler: dict | None = None, cache: dict | None = None) -> Worker:
    worker = Worker(
        ModelConfig(model=str(checkpoint), device="cpu", num_threads=1),
        CacheConfig(**(cache or {})),
        SchedulerConfig(**{"max_num_seqs": 6, "max_num_batched_tokens": 64, **(scheduler or {})}),
        resolve(str(checkpoint)),
        lambda phase: None,
    )
    worker._memory = device
    worker.load_model()
    return worker


def test_the_pool_is_a_share_of_what_the_largest_step_leaves(checkpoint: Path) -> None:
    settings = {"scheduler": {"max_num_seqs": 1000}, "cache": {"gpu_memory_utilization": 0.5}}
    without = make_worker(checkpoint, ScriptedDevice(free=100 * MIB, measured=[0]), **settings).plan_memory()
    beside = make_worker(checkpoint, ScriptedDevice(free=100 * MIB, measured=[60 * MIB]), **settings).plan_memory()
    assert without.kv_bytes == pytest.approx(50 * MIB, rel=0.01)
    assert beside.kv_bytes == pytest.approx(20 * MIB, rel=0.01)
    assert (without.step_bytes, beside.step_bytes) == (0, 60 * MIB)


def test_a_pool_of_a_given_size_must_fit_beside_the_step(checkpoint: Path) -> None:
    cache = {"kv_cache_memory": "50MiB"}
    assert make_worker(checkpoint, ScriptedDevice(100 * MIB, [40 * MIB]), cache=cache).plan_memory()
    with pytest.raises(ConfigError, match=r"--kv-cache-memory 50MiB: only 0.04 GiB are free"):
        make_worker(checkpoint, ScriptedDevice(100 * MIB, [60 * MIB]), cache=cache).plan_memory()


def test_a_step_that_leaves_nothing_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=r"memory for 0 KV blocks.*--gpu-memory-utilization"):
        make_worker(checkpoint, ScriptedDevice(100 * MIB, [200 * MIB])).plan_memory()


def test_a_step_that_does_not_fit_names_the_flags(checkpoint: Path) -> None:
    worker = make_worker(checkpoint, ScriptedDevice(100 * MIB, [torch.OutOfMemoryError("tried to allocate 5 GiB")]))
    with pytest.raises(ConfigError, match=r"a step of 64 tokens and 6 sequences .*--max-num-batched-tokens or --max-"):
        worker.plan_memory()


def test_other_failures_of_the_measured_step_are_told_as_they_are(checkpoint: Path) -> None:
    worker = make_worker(checkpoint, ScriptedDevice(100 * MIB, [ValueError("not memory")]))
    with pytest.raises(ValueError, match="not memory"):
        worker.plan_memory()


def test_weights_and_pools_without_memory_name_the_flags(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 5 GiB.\nmore")

    worker = make_worker(checkpoint, TrackedDevice(), cache={"num_device_blocks": 9})
    plan = worker.plan_memory()
    with monkeypatch.context() as patched:
        patched.setattr("pagedserve.worker.worker.KVStorage", no_memory)
        with pytest.raises(ConfigError, match=r"--gpu-memory-utilization, --kv-cache-memory or --swap-space"):
            worker.allocate(plan)
    monkeypatch.setattr("pagedserve.worker.worker.load_model", no_memory)
    with pytest.raises(ConfigError, match=r"Tried to allocate 5 GiB.\): use --weights-dtype"):
        worker.load_model()


@pytest.mark.parametrize(
    ("tokens", "seqs", "length", "expected"),
    [
        (64, 6, 512, [[11, 11, 11, 11, 10, 10], [59, 1, 1, 1, 1, 1]]),
        (64, 6, 20, [[11, 11, 11, 11, 10, 10], [20, 1, 1, 1, 1, 1]]),
        (4, 9, 512, [[1, 1, 1, 1], [1, 1, 1, 1]]),
        (64, 2, 5, [[5, 5], [5, 1]]),
        (1, 1, 1, [[1], [1]]),
    ],
)
def test_worst_steps_fill_what_the_scheduler_may_send(
    tokens: int, seqs: int, length: int, expected: list[list[int]]
) -> None:
    steps = worst_steps(
        max_num_batched_tokens=tokens, max_num_seqs=seqs, max_model_len=length, block_size=4, num_groups=3
    )
    assert [step.num_scheduled for step in steps[::2]] == expected
    assert [step.released for step in steps[1::2]] == [step.seq_ids for step in steps[::2]]
    for step in steps[::2]:
        assert [len(new.block_ids) for new in step.new] == [3 * -(-n // 4) for n in step.num_scheduled]


WISHES = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, top_p=0.5, top_k=20, min_p=0.1),
    SamplingParams(temperature=1.0, logprobs=20, repetition_penalty=1.3, presence_penalty=1.0),
    SamplingParams(temperature=1.0, logprobs=20, logit_bias={3: 5.0}, min_tokens=2),
]


@pytest.mark.parametrize("seed", range(3))
def test_no_step_takes_more_than_what_was_measured(checkpoint: Path, seed: int) -> None:
    """Steps within the scheduler's limits, with any wishes, against the peak of the worst ones."""
    device = TrackedDevice()
    max_tokens, max_seqs = 48, 5
    worker = make_worker(checkpoint, device, {"max_num_seqs": max_seqs, "max_num_batched_tokens": max_tokens})
    worker.plan_memory()
    measured = worker._step_memory.step_bytes
    assert measured > max_tokens * 64 * 4 + max_seqs * 320 * 4, "at least hidden states and logits"

    rng = random.Random(seed)
    driver = Driver(checkpoint, native=native.available(), num_rows=max_seqs, num_blocks=200)
    driver.runner.graph = StepGraph(driver.runner._model)
    peaks, next_id = [], 0
    for _ in range(12):
        room = max_tokens
        while len(driver.sequences) < max_seqs and rng.random() < 0.8:
            driver.add(next_id, [(7 * i) % 320 for i in range(rng.randint(1, 60))], rng.choice(WISHES))
            next_id += 1
        scheduled = []
        for seq_id in driver.sequences:
            if count := min(driver.need(seq_id), room, rng.randint(1, 48)):
                scheduled.append((seq_id, count))
                room -= count
        if scheduled:
            peaks.append(device.measure(lambda scheduled=scheduled: driver.run(scheduled)))
        for seq_id in [i for i in driver.sequences if rng.random() < 0.2]:
            driver.release(seq_id)
    assert 0.2 * measured < max(peaks) <= measured


@pytest.mark.skipif(not native.available(), reason="the native library is not built here")
def test_captures_are_weighed_before_there_are_any(checkpoint: Path) -> None:
    device = TrackedDevice()
    worker = make_worker(checkpoint, device)
    plan = worker.plan_memory()
    spec = plan.spec
    backend = CapturableBackend(worker._attention.spec)
    for layer in worker._model.layers:
        layer.attention.backend = backend
    worker._attention = backend
    scheduler = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=64)
    measured = measure_steps(
        device,
        lambda make_graph: worker._make_runner(spec, 1, 0, make_graph)[0],
        attention=backend,
        scheduler=scheduler,
        spec=spec,
        max_model_len=512,
        is_captured=True,
    )
    logits, hidden, tables = 6 * 320 * 4, 6 * 64 * 4, 6 * 32 * 4
    assert measured.decode_bytes >= logits + hidden
    beside = measured.graph_bytes - measured.decode_bytes - len(decode_sizes(6)) * BYTES_PER_CAPTURE
    assert logits + hidden + tables < beside < logits + hidden + tables + 1000
    assert measured.total == measured.step_bytes + measured.graph_bytes
    assert StepMemory().total == 0
