"""Checkpoints under every storage format of their weights, as a run chooses them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pagedserve import quantization
from pagedserve.kernels import native
from pagedserve.quantization.none import DenseMethod
from tests.helpers.checkpoints import llama_config, random_tensors, tiny_llama, write_checkpoint
from tests.helpers.gguf_files import write_llama_gguf
from tests.helpers.paged_model import CPU, PagedModel

PROMPT = [(37 * i * i + 11 * i + 5) % 320 for i in range(25)]
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biases, odd vocabulary": {"attention_bias": True, "mlp_bias": True, "vocab_size": 517},
}
# --weights-dtype -> mean error of logits that rounding the weights may cause, as a share of their spread.
TOLERANCES = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2, "int8": 4e-2, "int4": 0.4}


def method(weights_dtype: str) -> Any:
    return quantization.select(weights_dtype, CPU, torch.float32)


@torch.inference_mode()
def reference_logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return model(torch.tensor([PROMPT])).logits[0]


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).abs().mean() / expected.std()).item()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("weights_dtype", TOLERANCES)
def test_rounded_weights_stay_close(tmp_path: Path, shape: str, weights_dtype: str) -> None:
    if weights_dtype in ("int8", "int4") and not native.available():
        pytest.skip("integer weights need the native CPU library, which is not built")
    folder = tiny_llama(tmp_path, tokenizer=False, **SHAPES[shape])
    found = PagedModel(folder, quant=method(weights_dtype)).logits(PROMPT, chunk=9)
    assert error(found, reference_logits(folder)) < TOLERANCES[weights_dtype]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_auto_keeps_float_files_exactly(tmp_path: Path, shape: str, dtype: str) -> None:
    folder = tiny_llama(tmp_path, tokenizer=False, dtype=dtype, **SHAPES[shape])
    found = PagedModel(folder, quant=method("auto")).logits(PROMPT, chunk=9)
    torch.testing.assert_close(found, reference_logits(folder), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("quant", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_auto_keeps_gguf_files_packed(tmp_path: Path, quant: str, tied: bool) -> None:
    """Weights are those of the file; integer products round their inputs to 8 bits, float ones nothing."""
    config = llama_config(tie_word_embeddings=tied)
    path = write_llama_gguf(tmp_path / "model.gguf", config, random_tensors(config), quant=quant)
    exact = PagedModel(path, quant=DenseMethod("float32"))
    packed = PagedModel(path, quant=method("auto"))
    limit = 1e-5 if quant in ("F16", "BF16") else 4e-2
    assert error(packed.logits(PROMPT, chunk=9), exact.logits(PROMPT, chunk=9)) < limit
    if native.available():
        assert packed.model.weights_bytes < exact.model.weights_bytes * 0.7


def test_a_tied_matrix_is_held_once(tmp_path: Path) -> None:
    config = llama_config(tie_word_embeddings=True)
    folder = write_checkpoint(tmp_path, config, random_tensors(config), tokenizer=False)
    tied = PagedModel(folder, quant=method("float32")).model
    config = llama_config()
    untied = PagedModel(
        write_checkpoint(tmp_path / "untied", config, random_tensors(config), tokenizer=False), quant=method("float32")
    ).model
    assert untied.weights_bytes - tied.weights_bytes >= 320 * 64 * 4


@pytest.mark.skipif(not native.available(), reason="the native CPU library is not built")
@pytest.mark.parametrize("weights_dtype", ["float32", "bfloat16", "int8"])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(tmp_path: Path, weights_dtype: str) -> None:
    folder = tiny_llama(tmp_path, tokenizer=False)
    alone = PagedModel(folder, backend="cpu", quant=method(weights_dtype)).logits(PROMPT, chunk=len(PROMPT))
    crowd = PagedModel(folder, backend="cpu", quant=method(weights_dtype))
    found = []
    for start in range(0, len(PROMPT), 5):
        neighbours = (1, PROMPT[start : start + 7]), (2, PROMPT[start : start + 1])
        logits = crowd.step([neighbours[0], (0, PROMPT[start : start + 5]), neighbours[1]])
        found.append(logits[len(neighbours[0][1]) : -1])
    assert torch.equal(torch.cat(found), alone)
