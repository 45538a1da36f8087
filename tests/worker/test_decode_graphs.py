"""Decode steps captured by size: the bits of steps computed op by op, whatever batches come one after another."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedserve.attention.cpu import CpuBackend
from pagedserve.kernels import native
from pagedserve.worker.decode_graphs import USES_BEFORE_CAPTURE, DecodeGraphs, DecodeShape, Sizes, decode_sizes
from pagedserve.worker.graphs import graph_maker
from pagedserve.worker.step_inputs import StepGraph, StepInputs
from pagedserve.worker.step_program import StepProgramGraph
from tests.helpers.checkpoints import llama_config, random_tensors, write_checkpoint
from tests.helpers.recorder import RELEASED, CapturableBackend, RecordingDevice
from tests.worker.driver import BLOCK_SIZE, Driver

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not built here")

MAX_ROWS = 11
MAX_LEN = 60
SHAPE = DecodeShape(max_num_rows=MAX_ROWS, max_model_len=MAX_LEN, block_size=BLOCK_SIZE, activation_bytes=777)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    return write_checkpoint(folder, llama_config(), random_tensors(llama_config()), tokenizer=False)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Compared:
    """A graph whose every step is computed again op by op, over the pool as it was: results and pool must agree."""

    def __init__(self, graph: DecodeGraphs) -> None:
        self.graph = graph
        self.kinds: list[tuple[int, bool]] = []
        self.capture_next = graph.capture_next

    def __call__(self, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        pool = inputs.context.kv_cache
        before, num_replays = pool.clone(), self.graph.num_replays
        results = [result.clone() for result in self.graph(inputs)]
        after = pool.clone()
        pool.copy_(before)
        wanted = self.graph.run_eagerly(inputs)
        for found, expected in zip((*results, after), (*wanted, pool), strict=True):
            assert found.shape == expected.shape
            assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
        self.kinds.append((inputs.counts[0], self.graph.num_replays > num_replays))
        return tuple(results)


def make_driver(checkpoint: Path, device: RecordingDevice | None = None, **options) -> tuple[Driver, Compared]:
    device = device or RecordingDevice()
    driver = Driver(checkpoint, native=True, num_rows=MAX_ROWS, num_blocks=200, backend=CapturableBackend, **options)
    runner = driver.runner
    runner.graph = Compared(DecodeGraphs(runner._model, runner._attention, device, SHAPE))
    return driver, runner.graph


def prompt(seq_id: int, length: int) -> list[int]:
    return [(31 * i * i + 7 * i + 13 * seq_id) % 320 for i in range(length)]


def add(driver: Driver, seq_id: int, length: int) -> None:
    driver.add(seq_id, prompt(seq_id, length))
    driver.run([(seq_id, length)])


def decode(driver: Driver, seq_ids: list[int]) -> None:
    driver.run([(seq_id, 1) for seq_id in seq_ids])


def capture_all(driver: Driver) -> None:
    while driver.runner.capture_next():
        pass


def test_the_first_time_a_size_runs_op_by_op_and_after_a_quiet_moment_it_is_replayed(checkpoint: Path) -> None:
    driver, graph = make_driver(checkpoint)
    for i in range(3):
        add(driver, i, 5 + i)
    decode(driver, [0, 1, 2])
    capture_all(driver)
    assert graph.graph.captured == (4,)
    decode(driver, [0, 1, 2])
    decode(driver, [2, 0])  # another size: not yet
    assert graph.kinds[-3:] == [(3, False), (3, True), (2, False)]


def test_without_a_quiet_moment_a_size_is_captured_when_it_was_used_often(checkpoint: Path) -> None:
    driver, graph = make_driver(checkpoint)
    add(driver, 0, 9)
    for _ in range(USES_BEFORE_CAPTURE + 3):
        decode(driver, [0])
    assert [replayed for _, replayed in graph.kinds[1:]] == [False] * (USES_BEFORE_CAPTURE - 1) + [True] * 4


def test_prompts_and_mixed_steps_run_op_by_op(checkpoint: Path) -> None:
    driver, graph = make_driver(checkpoint)
    add(driver, 0, 9)
    decode(driver, [0])
    capture_all(driver)
    driver.add(1, prompt(1, 12))
    driver.run([(0, 1), (1, 1)])  # the beginning of a prompt looks like a decode, but is not sampled
    driver.run([(0, 1), (1, 11)])
    decode(driver, [0])
    assert [replayed for _, replayed in graph.kinds] == [False] * 4 + [True]


def test_capturing_computes_nothing_and_touches_no_block(checkpoint: Path) -> None:
    driver, graph = make_driver(checkpoint)
    for i in range(5):
        add(driver, i, 6)
    decode(driver, [0, 1, 2, 3, 4])
    capture_all(driver)
    decode(driver, [0, 1, 2, 3, 4])  # the captured inputs hold these rows now
    decode(driver, [1, 2])
    driver.release(0)
    add(driver, 5, 8)  # in the blocks of the first
    before = driver.storage.device_pool.clone()
    capture_all(driver)
    assert graph.graph.captured == (2, 8)
    assert torch.equal(before.view(torch.int32), driver.storage.device_pool.view(torch.int32))


def test_a_pool_that_moved_leaves_no_capture_behind(checkpoint: Path) -> None:
    driver, graph = make_driver(checkpoint)
    add(driver, 0, 9)
    decode(driver, [0])
    capture_all(driver)
    decode(driver, [0])
    driver.storage.device_pool = driver.storage.device_pool.clone()
    decode(driver, [0])
    assert graph.graph.captured == () and [replayed for _, replayed in graph.kinds] == [False, False, True, False]
    capture_all(driver)
    decode(driver, [0])
    assert graph.kinds[-1] == (1, True)


def test_sizes_without_memory_run_op_by_op_and_the_others_are_replayed(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    device = RecordingDevice(num_captures=1)
    driver, graph = make_driver(checkpoint, device)
    for i in range(6):
        add(driver, i, 6)
    with caplog.at_level(logging.INFO, logger="pagedserve"):
        for rows in ([0], [0, 1, 2, 3, 4, 5]):
            decode(driver, rows)
        capture_all(driver)
        for _ in range(2 * USES_BEFORE_CAPTURE):
            decode(driver, [0])
        decode(driver, [0, 1, 2, 3, 4, 5])
    assert graph.graph.captured == (8,), "the largest first"
    assert graph.kinds[-1] == (6, True)
    assert len([r for r in caplog.records if "no memory" in r.getMessage()]) == 1


def test_what_cannot_be_captured_is_said_once(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    driver, graph = make_driver(checkpoint)
    activation = driver.runner._model.layers[0].mlp.activation

    def looks(x: torch.Tensor) -> torch.Tensor:
        x.sum().item()
        return activation(x)

    driver.runner._model.layers[0].mlp.activation = looks
    add(driver, 0, 9)
    with caplog.at_level(logging.INFO, logger="pagedserve"):
        for _ in range(3 * USES_BEFORE_CAPTURE):
            decode(driver, [0])
        capture_all(driver)
    lines = [r.getMessage() for r in caplog.records if "op by op" in r.getMessage()]
    assert len(lines) == 1 and "_local_scalar_dense" in lines[0]
    assert graph.graph.captured == ()


def test_memory_is_reserved_once_and_given_back_with_the_captures(checkpoint: Path) -> None:
    device = RecordingDevice()
    driver, graph = make_driver(checkpoint, device)
    device.reserved.clear()
    for i in range(3):
        add(driver, i, 6)
    decode(driver, [0])
    decode(driver, [0, 1])
    capture_all(driver)
    assert device.num_captured == 2 and device.reserved[-1] == SHAPE.activation_bytes
    before = len(device.reserved)
    graph.graph.drop()
    assert graph.graph.captured == () and device.reserved[before:] == [RELEASED]
    decode(driver, [0])
    capture_all(driver)
    assert graph.graph.captured == (1,) and device.reserved[before:] == [RELEASED, SHAPE.activation_bytes]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_any_order_of_batches_has_the_bits_of_its_ops(checkpoint: Path, seed: int) -> None:
    """Sequences come, decode in random company, leave, and leave their blocks to others; captures happen in between."""
    rng = random.Random(seed)
    driver, _ = make_driver(checkpoint)
    next_id = 0
    for _ in range(40):
        alive = [i for i, s in driver.sequences.items() if len(s.token_ids) < MAX_LEN]
        for i in [i for i in driver.sequences if i not in alive]:
            driver.release(i)
        move = rng.random()
        if len(driver.sequences) < MAX_ROWS and (move < 0.35 or not alive):
            add(driver, next_id, rng.randint(1, 30))
            next_id += 1
        elif move < 0.45:
            driver.release(rng.choice(alive))
        elif move < 0.55:
            capture_all(driver)
        else:
            decode(driver, rng.sample(alive, rng.randint(1, len(alive))))


def test_triton_kernels_are_captured_and_replayed(tmp_path: Path) -> None:
    """The whole model on Triton kernels, under the interpreter, which is a setting of a process."""
    pytest.importorskip("triton", reason="Triton is not installed")
    config = llama_config(num_hidden_layers=1)
    checkpoint = write_checkpoint(tmp_path / "llama", config, random_tensors(config), tokenizer=False)
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.interpreted_graphs", str(checkpoint)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0 and "checked 2" in done.stdout, done.stderr


def test_the_sizes_that_are_captured() -> None:
    assert decode_sizes(1) == (1,)
    assert decode_sizes(11) == (1, 2, 4, 8, 11)
    assert decode_sizes(32) == (1, 2, 4, 8, 16, 24, 32)
    assert decode_sizes(10_000)[-1] == 512
    sizes = Sizes(20)
    assert [sizes.of(n) for n in (1, 3, 5, 9, 17, 20, 21)] == [1, 4, 8, 16, 20, 20, None]


def test_who_captures(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    spec = make_driver(checkpoint)[0].runner._attention.spec
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert graph_maker(CpuBackend(spec), cpu, SHAPE, enforce_eager=False) is StepProgramGraph
    assert type(graph_maker(CpuBackend(spec), cpu, SHAPE, enforce_eager=True)(None, None)) is StepGraph
    with caplog.at_level(logging.INFO, logger="pagedserve"):
        assert type(graph_maker(CpuBackend(spec), cuda, SHAPE, enforce_eager=False)(None, None)) is StepGraph
    assert "attention by cpu cannot be captured" in caplog.text
