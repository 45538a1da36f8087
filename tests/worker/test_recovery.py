"""A step without memory runs again in parts: everybody's answer is that of a roomy device, or its own failure."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagedserve.errors import DeviceLostError, EngineDeadError
from pagedserve.pooling_params import PoolingParams
from pagedserve.sampling_params import SamplingParams
from pagedserve.step import ModelRunnerOutput, SamplingInput, SchedulerOutput
from pagedserve.worker.device import is_out_of_memory
from pagedserve.worker.recovery import NO_MEMORY, GuardedRunner, Piece, halves
from pagedserve.worker.step_inputs import StepGraph
from tests.helpers.checkpoints import tiny_llama
from tests.helpers.scarce_model import SAYS, CountingDevice, ScarceModel, ScarceSampler
from tests.worker.driver import GREEDY, Driver

PARAMS = [
    GREEDY,
    SamplingParams(temperature=1.0, seed=3, logprobs=2),
    SamplingParams(temperature=0.0, repetition_penalty=1.5, prompt_logprobs=1),
    SamplingParams(temperature=0.8, top_p=0.9, presence_penalty=0.5, seed=4),
]
PROMPTS = [[(31 * i * i + 7 * i + 11 * p) % 300 for i in range(length)] for p, length in enumerate((9, 1, 23, 14))]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"))


def make(checkpoint: Path, **scarcity: int) -> tuple[Driver, ScarceModel, CountingDevice]:
    """A driver whose steps are guarded, over a model that is as scarce as is said."""
    driver = Driver(checkpoint)
    model, device = ScarceModel(driver.runner._model, **scarcity), CountingDevice()
    driver.runner._model = model
    driver.runner.graph = StepGraph(model)
    driver.runner = GuardedRunner(driver.runner, driver.rows, device)
    return driver, model, device


def inner(driver: Driver):
    return driver.runner._runner


def run_all(driver: Driver, num_tokens: int = 6, chunk: int = 1000) -> list[ModelRunnerOutput]:
    """Everybody's prompt at once, then decodes together."""
    for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        driver.add(i, prompt, params)
    results = []
    while pending := [i for i in driver.sequences if len(driver.output(i)) < num_tokens]:
        results.append(driver.run([(i, min(chunk, driver.need(i))) for i in pending]))
    return results


def told(results: list[ModelRunnerOutput]) -> dict[str, dict]:
    """What became of each sequence over all steps, whatever the order within a step."""
    facts: dict[str, dict] = {"tokens": {}, "logprobs": {}, "prompt": {}, "scores": {}}
    for result in results:
        assert not result.errors
        for seq_id, tokens, score in zip(
            result.seq_ids, result.sampled_token_ids, result.sampled_logprobs, strict=True
        ):
            facts["tokens"].setdefault(seq_id, []).extend(tokens)
            facts["scores"].setdefault(seq_id, []).append(pytest.approx(score, abs=1e-4))
        for name, column in (("logprobs", result.logprobs), ("prompt", result.prompt_logprobs)):
            for seq_id, entries in column.items():
                facts[name].setdefault(seq_id, []).extend((e.token_ids, e.rank) for e in entries)
    return facts


@pytest.mark.parametrize("chunk", [1000, 5])
@pytest.mark.parametrize(
    "scarcity",
    [{"max_tokens": 12}, {"max_tokens": 3}, {"max_tokens": 1}, {"max_rows": 2}, {"max_rows": 1}, {"sampler": 1}],
    ids=str,
)
def test_answers_are_those_of_a_roomy_device(checkpoint: Path, scarcity: dict[str, int], chunk: int) -> None:
    roomy, model, _ = make(checkpoint)
    wanted = told(run_all(roomy, chunk=chunk))
    assert model.num_failures == 0
    scarce, model, device = make(checkpoint, **{k: v for k, v in scarcity.items() if k != "sampler"})
    if "sampler" in scarcity:
        inner(scarce)._sampler = ScarceSampler(inner(scarce)._sampler, scarcity["sampler"])
    found = told(run_all(scarce, chunk=chunk))
    assert device.num_released > 0
    assert found == wanted


def test_what_does_not_fit_alone_fails_and_nobody_else(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    roomy, _, _ = make(checkpoint)
    wanted = told(run_all(roomy))["tokens"]
    driver, _, _ = make(checkpoint, poison=307)
    PROMPT = [5, 6, 7, 307, 8, 9]
    driver.add(9, PROMPT)
    for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        driver.add(i, prompt, params)
    with caplog.at_level(logging.WARNING, logger="pagedserve"):
        result = driver.run([(i, driver.need(i)) for i in driver.sequences])
    assert result.errors == {9: NO_MEMORY}
    assert sorted(result.seq_ids) == [0, 1, 2, 3]
    assert "--max-num-batched-tokens" in caplog.text and "without 1 of them" in caplog.text
    driver.release(9)
    results = [result]
    while pending := [i for i in driver.sequences if len(driver.output(i)) < 6]:
        results.append(driver.run([(i, driver.need(i)) for i in pending]))
    result.errors.clear()
    assert told(results)["tokens"] == wanted


def test_children_that_share_a_failed_parents_logits_fail_with_it(checkpoint: Path) -> None:
    driver, model, _ = make(checkpoint, max_rows=0)
    driver.add(0, PROMPTS[0])
    driver.fork(0, 1, 1, shares_logits=True)
    assert driver.run([(0, 9)]).errors == {0: NO_MEMORY, 1: NO_MEMORY}
    driver.release(0)
    driver.release(1)
    model.max_rows = 10
    driver.add(2, PROMPTS[3])
    assert len(driver.generate([2], 3)[0]) == 3


def test_children_that_share_logits_in_parts_draw_what_they_would_have_drawn(checkpoint: Path) -> None:
    answers = []
    for scarcity in ({}, {"max_tokens": 4}):
        driver, _, _ = make(checkpoint, **scarcity)
        driver.add(5, PROMPTS[3])
        driver.add(0, PROMPTS[0], SamplingParams(temperature=1.0, n=3), seed=7)
        for child in (1, 2):
            driver.fork(0, child, child, shares_logits=True)
        result = driver.run([(5, 14), (0, 9)])
        answers.append(dict(zip(result.seq_ids, result.sampled_token_ids, strict=True)))
    assert answers[0] == answers[1] and len(answers[0]) == 4


def test_masks_follow_their_sequences_into_parts(checkpoint: Path) -> None:
    """Each sequence may only draw one token of its own."""
    driver, _, _ = make(checkpoint, max_rows=1)
    for i, prompt in enumerate(PROMPTS):
        driver.add(i, prompt)
    output, words = driver._pending, -(-320 // 32)
    masks = bytearray()
    for i in (0, 2, 3):
        mask = [0] * words
        mask[i] = 1 << i
        masks += b"".join(word.to_bytes(4, "little") for word in mask)
    for i in driver.sequences:
        s = driver.sequences[i]
        s.block_ids = [driver.free.pop() for _ in range(6)]
        output.seq_ids.append(i)
        output.num_scheduled.append(len(s.token_ids))
        output.num_computed.append(0)
        output.new_block_ids.append(s.block_ids)
    step = driver.runner.submit(output)
    driver.runner.sample(step, SamplingInput(step_id=1, masked_seq_ids=[0, 2, 3], token_masks=masks))
    result = driver.runner.result(step)
    drawn = dict(zip(result.seq_ids, result.sampled_token_ids, strict=True))
    assert {i: drawn[i] for i in (0, 2, 3)} == {i: [33 * i] for i in (0, 2, 3)}


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_vectors_are_pooled_over_parts(checkpoint: Path, pooling: str) -> None:
    vectors = []
    for scarcity in ({}, {"max_tokens": 5}):
        driver, _, _ = make(checkpoint, **scarcity)
        driver.add(0, PROMPTS[2], SamplingParams(max_tokens=0, pooling=PoolingParams(pooling_type=pooling)))
        driver.add(1, PROMPTS[0])
        result = driver.run([(0, 23), (1, 9)])
        assert not result.errors
        vectors.append(torch.frombuffer(bytearray(result.pooled[0]), dtype=torch.float32))
    torch.testing.assert_close(*vectors, rtol=0, atol=1e-5)


def test_block_moves_that_fail_cost_the_step_and_are_not_repeated(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, _, _ = make(checkpoint)
    driver.add(0, PROMPTS[0])
    driver.run([(0, 9)])

    def no_memory(*arguments: object) -> None:
        raise torch.OutOfMemoryError(SAYS)

    monkeypatch.setattr("pagedserve.worker.kv_storage.ops.swap_blocks", no_memory)
    driver.swap_out(0, [0, 1, 2])
    with pytest.raises(RuntimeError, match="blocks could not be moved"):
        driver.run([])


def test_other_errors_are_not_taken_for_a_lack_of_memory(checkpoint: Path) -> None:
    driver, model, device = make(checkpoint, max_tokens=3)
    model.error = ValueError
    driver.add(0, PROMPTS[0])
    with pytest.raises(ValueError, match="CUDA out of memory"):
        driver.run([(0, 9)])
    assert device.num_released == 0


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_a_lost_device_ends_the_core(checkpoint: Path, error: type[Exception]) -> None:
    driver, model, device = make(checkpoint, max_tokens=3)
    model.error, device.lost = error, "CUDA error: an illegal memory access was encountered"
    driver.add(0, PROMPTS[0])
    with pytest.raises(DeviceLostError, match="the device is lost: CUDA error: an illegal memory access") as raised:
        driver.run([(0, 9)])
    assert isinstance(raised.value, EngineDeadError)


def test_captured_steps_give_their_memory_back_before_a_request_fails(checkpoint: Path) -> None:
    driver, model, _ = make(checkpoint, max_rows=0)

    class Captures(StepGraph):
        def drop(self) -> None:
            model.max_rows = 1  # that was all that was missing

    inner(driver).graph = Captures(model)
    driver.add(0, PROMPTS[0])
    result = driver.run([(0, 9)])
    assert not result.errors and result.seq_ids == [0]


@given(counts=st.lists(st.integers(1, 40), min_size=1, max_size=12))
def test_halves_hold_every_token_once_in_order(counts: list[int]) -> None:
    parts = [[Piece(i, 0, count) for i, count in enumerate(counts)]]
    while any(len(halves(part)) > 1 for part in parts):
        parts = [half for part in parts for half in halves(part)]
        tokens = [(p.place, p.start + i) for part in parts for p in part for i in range(p.count)]
        assert tokens == [(i, j) for i, count in enumerate(counts) for j in range(count)]
        assert all(len({p.place for p in part}) == len(part) for part in parts)
    assert all(sum(p.count for p in part) == 1 for part in parts)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError(SAYS), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: ..."), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("CUDA error: out of memory"), False),
    ],
    ids=str,
)
def test_what_counts_as_a_lack_of_memory(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_torchs_own_allocator_is_understood() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**46, dtype=torch.uint8)
    assert is_out_of_memory(raised.value)


@pytest.mark.parametrize("seed", range(4))
def test_random_scarcity_changes_no_answer(checkpoint: Path, seed: int) -> None:
    """The device has more or less room from step to step."""
    wanted = told(run_all(make(checkpoint)[0]))
    rng = random.Random(seed)
    driver, model, _ = make(checkpoint)
    submit: Callable[[SchedulerOutput], object] = driver.runner.submit

    def shaken(output: SchedulerOutput) -> object:
        model.max_tokens, model.max_rows = rng.randint(1, 50), rng.randint(1, 5)
        return submit(output)

    driver.runner.submit = shaken
    assert told(run_all(driver, chunk=rng.randint(1, 30))) == wanted
