from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pagedserve import model_files
from pagedserve.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig
from pagedserve.errors import ConfigError
from pagedserve.executor import EXECUTORS, Executor
from pagedserve.executor.inline import InlineExecutor
from pagedserve.sampling_params import SamplingParams
from pagedserve.step import NewSequence, SamplingInput, SchedulerOutput
from tests.helpers.checkpoints import tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("executor") / "tiny")


def make(folder: Path) -> InlineExecutor:
    return InlineExecutor(
        model=ModelConfig(model=str(folder), num_threads=1),
        cache=CacheConfig(num_device_blocks=10),
        scheduler=SchedulerConfig(),
        files=model_files.resolve(str(folder)),
        vocab_limit=320,
    )


@pytest.fixture
def executor(folder: Path) -> Iterator[InlineExecutor]:
    executor = make(folder)
    executor.load(lambda phase: None)
    executor.allocate(executor.plan_memory())
    yield executor
    executor.shutdown()


def first_step(prompt: list[int], num_blocks: int = 1) -> SchedulerOutput:
    sequence = NewSequence(
        seq_id=0,
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        num_computed_tokens=0,
        block_ids=list(range(num_blocks)),
        sampling_params=SamplingParams(temperature=0.0),
        seed=0,
        choice_index=0,
    )
    return SchedulerOutput(
        step_id=7,
        new=[sequence],
        seq_ids=[0],
        num_scheduled=[len(prompt)],
        num_computed=[0],
        new_block_ids=[[]],
    )


def test_every_name_of_the_registry_is_an_executor() -> None:
    assert set(EXECUTORS) == set(ParallelConfig.__dataclass_fields__["executor"].metadata["choices"])
    assert all(issubclass(EXECUTORS.resolve(name), Executor) for name in EXECUTORS)
    with pytest.raises(ConfigError, match="inline"):
        EXECUTORS.resolve("carrier pigeon")


def test_start_tells_its_phases_and_finds_what_fits(folder: Path) -> None:
    executor, phases = make(folder), []
    executor.load(phases.append)
    assert "loading weights" in phases
    assert executor.max_model_len == 512
    plan = executor.plan_memory()
    assert plan.num_device_blocks == 10
    assert plan.kv_bytes == 10 * plan.spec.bytes_per_block
    executor.shutdown()
    executor.shutdown()


def test_a_step_comes_back_with_its_tokens(executor: InlineExecutor) -> None:
    pending = executor.submit(first_step([5, 6, 7]))
    pending.sample(SamplingInput(step_id=7))
    result = pending.result()
    assert result.step_id == 7
    assert result.seq_ids == [0]
    assert len(result.sampled_token_ids[0]) == 1
    assert 0 <= result.sampled_token_ids[0][0] < 320


def test_a_step_that_fails_raises_when_its_result_is_asked_for(executor: InlineExecutor) -> None:
    broken = first_step([5, 6, 7])
    broken.seq_ids = [99]
    pending = executor.submit(broken)
    pending.sample(SamplingInput(step_id=7))
    with pytest.raises(Exception, match="99"):
        pending.result()
