"""Layouts of the KV cache: block sizes, head sizes and types change where numbers lie, not what is said."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from pagedserve import LLM, SamplingParams
from tests.helpers.checkpoints import tiny_llama

LENGTHS = (1, 2, 17, 40, 64, 71, 99, 100, 5)
NUM_TOKENS = 5
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


def prompts_of(lengths: tuple[int, ...], seed: int) -> list[list[int]]:
    return [[4 + (37 * i * i + 11 * i + seed * length) % 316 for i in range(length)] for length in lengths]


@torch.inference_mode()
def greedy(folder: Path, prompts: list[list[int]]) -> tuple[list[list[int]], list[float]]:
    """transformers' greedy tokens in fp32, and the smallest lead of a best token over the second, a prompt each."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    answers, margins = [], []
    for prompt in prompts:
        ids, lead = list(prompt), float("inf")
        for _ in range(NUM_TOKENS):
            best = model(torch.tensor([ids])).logits[0, -1].topk(2)
            lead = min(lead, float(best.values[0] - best.values[1]))
            ids.append(int(best.indices[0]))
        answers.append(ids[len(prompt) :])
        margins.append(lead)
    return answers, margins


def answers_of(folder: Path, prompts: list[list[int]], **settings: Any) -> list[list[int]]:
    """Prompts alone, two together, and all together; each must be answered alike."""
    exact = {"kv_cache_memory": "8MiB", "num_threads": 1, "kv_cache_dtype": "float32"}
    with LLM(str(folder), **{**exact, **settings}) as llm:
        together = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
        for count in (1, 2):
            few = llm.generate(prompts[:count], GREEDY, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in few] == together[:count]
    return together


@pytest.mark.parametrize("head_dim", [16, 64, 80])
def test_any_block_size_serves_any_head_size(tmp_path: Path, head_dim: int) -> None:
    """C084: 1 to 128 tokens a block (others are refused, see test_config), batches of 1, 2 and 9."""
    folder = tiny_llama(tmp_path, tokenizer=True, head_dim=head_dim, seed=2)
    prompts = prompts_of(LENGTHS, 3)
    expected, margins = greedy(folder, prompts)
    assert min(margins) > 1e-3, "this model cannot tell; take another seed"
    for block_size in (1, 2, 4, 8, 16, 32, 128):
        assert answers_of(folder, prompts, block_size=block_size) == expected, block_size


def test_keys_and_values_are_converted_not_reread(tmp_path: Path) -> None:
    """C093: every type of activations with every type of KV cache says what fp32 says, where that leads clearly."""
    folder = tiny_llama(tmp_path, seed=4)
    prompts = prompts_of((24, 25, 26, 27, 28, 29, 30, 31, 33, 34, 35, 36, 37, 38, 39, 40), 5)
    expected, margins = greedy(folder, prompts)
    clear = [i for i, margin in enumerate(margins) if margin > 0.5]
    assert len(clear) >= 2, "no prompt leads clearly enough; take another seed"
    prompts, expected = [prompts[i] for i in clear], [expected[i] for i in clear]
    for dtype, kv_cache_dtype in itertools.product(
        ("float32", "bfloat16", "float16"), ("auto", "float32", "bfloat16", "float16")
    ):
        found = answers_of(folder, prompts, dtype=dtype, kv_cache_dtype=kv_cache_dtype)
        assert found == expected, (dtype, kv_cache_dtype)
