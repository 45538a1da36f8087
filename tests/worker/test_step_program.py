"""A step as one native call: the bits of the ops one by one, for any model, batch, chunk, pool and thread count."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from pagedserve.kernels import native
from pagedserve.worker.step_inputs import StepInputs
from pagedserve.worker.step_program import StepProgramGraph
from tests.helpers.checkpoints import llama_config, llama_shapes, random_tensors, write_checkpoint
from tests.helpers.gguf_files import write_llama_gguf
from tests.worker.driver import Driver

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not built here")

PROMPTS = [[(31 * i * i + 7 * i + p) % 320 for i in range(length)] for p, length in ((3, 23), (50, 1), (9, 40))]


class Compared:
    """A graph whose every step is computed again op by op: the second time over, keys and values are the same."""

    def __init__(self, graph: StepProgramGraph) -> None:
        self._graph = graph
        self.shapes: list[tuple[int, int]] = []

    def __call__(self, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        results = self._graph(inputs)
        assert self._graph.op_names, "the step was not captured"
        for found, wanted in zip(results, self._graph.run_eagerly(inputs), strict=True):
            assert found.shape == wanted.shape and torch.equal(found.view(torch.int32), wanted.view(torch.int32))
        self.shapes.append(inputs.counts)
        return results


def compared_driver(checkpoint: Path, **options) -> tuple[Driver, Compared]:
    driver = Driver(checkpoint, native=True, **options)
    driver.runner.graph = Compared(driver.runner.graph)
    return driver, driver.runner.graph


def mixed_steps(driver: Driver) -> None:
    """Prompts in chunks, decoding beside them, a step in which nobody is sampled."""
    for i, prompt in enumerate(PROMPTS):
        driver.add(i, prompt)
    driver.run([(0, 5), (1, 1), (2, 40)])
    driver.run([(0, 10)])
    driver.run([(0, 8), (1, 1), (2, 1)])
    driver.run([(0, 1), (1, 1), (2, 1)])


def tensors_of(config: dict) -> dict[str, np.ndarray]:
    tensors = random_tensors(config)
    rng = np.random.default_rng(1)
    for name, shape in llama_shapes(config).items():
        if name.endswith(".bias"):
            tensors[name] = rng.normal(0, 0.3, shape).astype(np.float32)
    return tensors


def plain(folder: Path, **changes) -> Path:
    config = llama_config(**changes)
    return write_checkpoint(folder, config, tensors_of(config), tokenizer=False)


def bfloat16(folder: Path) -> Path:
    return write_checkpoint(folder, llama_config(), random_tensors(llama_config()), dtype="bfloat16", tokenizer=False)


def windowed(folder: Path) -> Path:
    return plain(folder, architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=7)


def gguf(folder: Path, quant: str) -> Path:
    config = llama_config(hidden_size=64, intermediate_size=128)
    folder.mkdir(exist_ok=True)
    return write_llama_gguf(folder / "model.gguf", config, random_tensors(config), quant=quant)


def mixed_formats(folder: Path) -> Path:
    """Query and key in 4 bits, value in 16, gate and up in 4 and 8: fused projections are several products."""
    config = llama_config(hidden_size=64, intermediate_size=128)
    kinds = {"v_proj": "F16", "gate_proj": "Q4_0", "q_proj": "Q4_0", "k_proj": "Q4_0"}

    def kind_of(name: str) -> str:
        return kinds.get(name.split(".")[-2], "Q8_0")

    folder.mkdir(exist_ok=True)
    return write_llama_gguf(folder / "model.gguf", config, random_tensors(config), quant=kind_of)


MODELS: dict[str, Callable[[Path], Path]] = {
    "plain": plain,
    "tied": lambda folder: plain(folder, tie_word_embeddings=True),
    "biases": lambda folder: plain(folder, attention_bias=True, mlp_bias=True),
    "bfloat16": bfloat16,
    "windowed": windowed,
    "gguf Q8_0": lambda folder: gguf(folder, "Q8_0"),
    "gguf F16": lambda folder: gguf(folder, "F16"),
    "gguf, fused matrices of several formats": mixed_formats,
}


@pytest.mark.parametrize("name", MODELS)
def test_a_captured_step_has_the_bits_of_its_ops(tmp_path: Path, name: str) -> None:
    driver, graph = compared_driver(MODELS[name](tmp_path / "model"))
    mixed_steps(driver)
    assert graph.shapes == [(46, 2), (10, 0), (10, 3), (3, 3)]


def test_parts_of_other_formats_are_products_of_their_own(tmp_path: Path) -> None:
    driver = Driver(mixed_formats(tmp_path), native=True)
    layers = driver.runner._model.layers
    assert [part.format for part in layers[0].attention.qkv_proj.weight.parts] == ["int4_sym", "float16"]
    mixed_steps(driver)
    assert driver.runner.graph.op_names.count("ps_linear") == 6 * len(layers) + 1


@pytest.mark.parametrize("isa_name", ["scalar", None])
def test_threads_and_instruction_sets_may_change_under_a_program(tmp_path: Path, isa_name: str | None) -> None:
    driver, _ = compared_driver(plain(tmp_path))
    before = native.num_threads()
    try:
        mixed_steps(driver)
        native.select_isa(isa_name)
        for count in (1, 3):
            native.set_num_threads(count)
            driver.run([(0, 1), (1, 1), (2, 1)])
    finally:
        native.set_num_threads(before)
        native.select_isa(None)


def test_a_new_pool_gets_a_new_program(tmp_path: Path) -> None:
    driver, _ = compared_driver(plain(tmp_path))
    for i, prompt in enumerate(PROMPTS):
        driver.add(i, prompt)
    driver.run([(0, 23), (1, 1)])
    driver.storage.device_pool = driver.storage.device_pool.clone()
    driver.run([(0, 1), (1, 1), (2, 40)])


def test_results_are_those_of_transformers_when_the_batch_grows_and_shrinks(tmp_path: Path) -> None:
    """The results' memory is used again by every step: nobody may keep what the next one overwrites."""
    checkpoint = plain(tmp_path)
    alone = []
    for i, prompt in enumerate(PROMPTS):
        driver = Driver(checkpoint)
        driver.add(i, prompt)
        alone += driver.generate([i], 8)
    driver, _ = compared_driver(checkpoint)
    for i, prompt in enumerate(PROMPTS):
        driver.add(i, prompt)
    assert driver.generate([0, 1, 2], 8, chunk=3) == alone


def test_a_model_that_computes_in_torch_runs_op_by_op_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def silu_mul(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    checkpoint = plain(tmp_path)
    driver, wanted = Driver(checkpoint, native=True), Driver(checkpoint)
    for layer in driver.runner._model.layers:
        layer.mlp.activation = silu_mul
    with caplog.at_level(logging.INFO, logger="pagedserve"):
        for d in (driver, wanted):
            d.add(0, PROMPTS[0])
        assert driver.generate([0], 6) == wanted.generate([0], 6)
    lines = [r.getMessage() for r in caplog.records if "op by op" in r.getMessage()]
    assert len([line for line in lines if "aten.silu" in line]) == 1 and driver.runner.graph.op_names == []


def test_a_program_that_gives_other_numbers_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A tensor made behind torch's back looks like a weight: what it held while recording is not what it will hold."""
    checkpoint = plain(tmp_path)
    driver, wanted = Driver(checkpoint, native=True), Driver(checkpoint)
    embed = driver.runner._model.embed_tokens
    kept = np.zeros((64, 64), np.float32)

    def through_numpy(token_ids: torch.Tensor) -> torch.Tensor:
        kept[: len(token_ids)] = embed._weight.float().numpy()[token_ids.numpy()]
        return torch.from_numpy(kept)[: len(token_ids)]

    driver.runner._model.embed_tokens = through_numpy
    driver.storage.device_pool.zero_()  # NaNs, with which the driver fills it, would make all programs equal
    with caplog.at_level(logging.WARNING, logger="pagedserve"):
        for d in (driver, wanted):
            d.add(0, PROMPTS[0])
        assert driver.generate([0], 6) == wanted.generate([0], 6)
    assert "other numbers" in caplog.text and driver.runner.graph.op_names == []
