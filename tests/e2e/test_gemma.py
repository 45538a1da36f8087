"""Gemma 3 270M as people get it, a GGUF in 4 to 8 bits: its text is transformers', its ids are SentencePiece's.

Slow: the file has 253 MB, its vocabulary 262,144 tokens. Run with `python -m pytest -m slow tests/e2e/test_gemma.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2

from pagedserve import LLM, SamplingParams, catalog
from pagedserve.errors import ModelNotFoundError
from pagedserve.gguf_file import GGUFFile

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROMPTS = [
    "The capital of France is",
    "Water boils at a temperature of",
    "Once upon a time, in a small village,",
    "def fibonacci(n):\n",
    "1, 2, 3, 4, 5,",
    "Die Hauptstadt von Deutschland ist",
]
TEXTS = [
    *PROMPTS,
    "    return x\n\n\n\t\tif y:  # tabs   and runs of spaces    ",
    "<b>bold</b> <table><tr> naïve café 北京 👩‍👩‍👧 ﬁ ½ 12345 3.14",
    "日本語のテキスト、テスト。 https://example.com/a?b=c&d=e\r\n" + " " * 41 + "wide",
    "\x00\x01\x7f",
]
NUM_TOKENS = 24
NORMAL, UNKNOWN, USER_DEFINED = 1, 2, 4


@pytest.fixture(scope="module")
def path() -> Path:
    try:
        return catalog.fetch("gemma3-270m")
    except ModelNotFoundError as error:
        pytest.skip(f"Gemma 3 270M cannot be fetched: {error}")


@pytest.fixture(scope="module")
def exact(path: Path) -> Iterator[LLM]:
    with LLM(
        model=str(path), weights_dtype="float32", kv_cache_dtype="float32", kv_cache_memory="128MiB", max_model_len=1024
    ) as llm:
        yield llm


@pytest.fixture(scope="module")
def oracle(path: Path) -> Any:
    """transformers' own reading of the file: its config, names and dequantisation are not ours."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    weights = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    missing = model.load_state_dict(weights, strict=False)
    assert (missing.missing_keys, missing.unexpected_keys) == (["lm_head.weight"], [])  # it is the embedding
    return model.eval()


@torch.inference_mode()
def choices(oracle: Any, prompt_ids: list[int], output_ids: list[int]) -> list[int]:
    """What transformers takes greedily after the prompt and after each output token, in one forward."""
    logits = oracle(torch.tensor([prompt_ids + output_ids]), use_cache=False).logits[0]
    return logits.argmax(-1)[len(prompt_ids) - 1 : -1].tolist()


def test_greedy_text_equals_transformers(exact: LLM, oracle: Any) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    outputs = exact.generate(PROMPTS, params, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids, found = exact.get_tokenizer().encode(prompt), output.outputs[0].token_ids
        assert ids[0] == 2, "Gemma begins with <bos>"
        assert found == choices(oracle, ids, found), prompt


def test_past_the_window_of_its_local_layers(exact: LLM, oracle: Any) -> None:
    """700 tokens, where local layers see 512."""
    text = " ".join(f"Line {i}: the number {i * i % 97} follows {i}." for i in range(60))
    ids = exact.get_tokenizer().encode(text)[:700]
    assert len(ids) == 700
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    (output,) = exact.generate([ids], params, use_tqdm=False)
    assert output.outputs[0].token_ids == choices(oracle, ids, output.outputs[0].token_ids)


def test_ids_are_those_of_sentencepiece(exact: LLM, path: Path) -> None:
    """The real algorithm over the file's pieces. GGUF writes the spaces of user-defined pieces as spaces."""
    metadata = GGUFFile(path).metadata
    model = sentencepiece_model_pb2.ModelProto()
    columns = (metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type"))
    for token, score, kind in zip(*columns, strict=True):
        kind = UNKNOWN if token == "<unk>" else kind
        text = token.replace(" ", "▁") if kind == USER_DEFINED else token
        model.pieces.add(piece=text, score=score, type=kind)
    spec = model.trainer_spec
    spec.model_type, spec.byte_fallback = spec.BPE, True
    spec.unk_id, spec.bos_id, spec.eos_id, spec.pad_id = 3, 2, 1, 0
    normalizer = model.normalizer_spec
    normalizer.name, normalizer.escape_whitespaces = "identity", True
    normalizer.add_dummy_prefix = normalizer.remove_extra_whitespaces = False
    reference = SentencePieceProcessor(model_proto=model.SerializeToString())
    tokenizer = exact.get_tokenizer()
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == [2, *reference.encode(text)], text
        assert tokenizer.decode(ids[1:]) == text


def test_sensible_as_it_is_served(path: Path) -> None:
    """The settings people run: weights as the file has them."""
    with LLM(model=str(path), kv_cache_memory="128MiB", max_model_len=1024) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=12)
        outputs = llm.generate([PROMPTS[1], PROMPTS[4]], params, use_tqdm=False)
        assert llm.get_tokenizer().encode("<end_of_turn>", add_special_tokens=False) == [106]
    assert "100 degrees" in outputs[0].outputs[0].text
    assert outputs[1].outputs[0].text.startswith(" 6, 7, 8, 9")
