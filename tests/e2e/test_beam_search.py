"""Beam search of the whole engine (real model, paged blocks, forks, copies) against transformers' (C040)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig, LlamaForCausalLM

from pagedserve import LLM, SamplingParams
from pagedserve.sampling_params import BeamParams
from tests.helpers.byte_tokenizer import EOS_ID, IM_END_ID
from tests.helpers.checkpoints import tiny_llama
from tests.helpers.demo_model import demo_model, demo_reference

NUM_TOKENS = 12
ENDS = [EOS_ID, IM_END_ID]
PROMPTS = [[5, 6, 7], [(7 * i) % 300 + 5 for i in range(40)], [11] * 16]
SETTINGS = list(itertools.product([2, 4], [0.0, 1.0, 2.0], [False, True, "never"]))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("beam") / "tiny", seed=1)


@pytest.fixture(scope="module")
def reference(model: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), num_device_blocks=200, num_threads=1, kv_cache_dtype="float32") as llm:
        yield llm


def params(width: int, length_penalty: float, early_stopping: bool | str) -> SamplingParams:
    beam = BeamParams(width=width, length_penalty=length_penalty, early_stopping=early_stopping)
    return SamplingParams(n=width, beam=beam, max_tokens=NUM_TOKENS, temperature=0.0)


@torch.inference_mode()
def expected_beams(reference: LlamaForCausalLM, prompt: list[int], asked: SamplingParams) -> list[list[int]]:
    """Output ids of each beam, best first, up to and with the EOS that ends it."""
    assert asked.beam is not None
    generated = reference.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        generation_config=GenerationConfig(
            num_beams=asked.beam.width,
            num_return_sequences=asked.beam.width,
            do_sample=False,
            max_new_tokens=NUM_TOKENS,
            length_penalty=asked.beam.length_penalty,
            early_stopping=asked.beam.early_stopping,
            eos_token_id=ENDS,
            pad_token_id=EOS_ID,
        ),
    )
    beams = []
    for row in generated.tolist():
        output = row[len(prompt) :]
        ends = [i for i, token in enumerate(output) if token in ENDS]
        beams.append(output[: ends[0] + 1] if ends else output)
    return beams


@pytest.mark.parametrize(("width", "length_penalty", "early_stopping"), SETTINGS)
def test_beams_are_those_of_transformers(
    llm: LLM, reference: LlamaForCausalLM, width: int, length_penalty: float, early_stopping: bool | str
) -> None:  # C040
    asked = params(width, length_penalty, early_stopping)
    outputs = llm.generate(PROMPTS, asked, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert [choice.token_ids for choice in output.outputs] == expected_beams(reference, prompt, asked)
        for choice in output.outputs:
            assert choice.finish_reason == ("stop" if choice.token_ids[-1] in ENDS else "length")
    llm.engine.client.core.scheduler.check()


@pytest.mark.parametrize("settings", [{}, {"num_device_blocks": 20, "preemption_mode": "swap", "watermark": 0.0}])
def test_eight_searches_at_once_give_what_each_gives_alone(
    model: Path, reference: LlamaForCausalLM, settings: dict[str, object]
) -> None:  # C040
    prompts = [[(i * 7 + t * 3) % 300 + 5 for t in range(3 + 5 * i)] for i in range(8)]
    asked = [params(2 + i % 3, 1.0, False) for i in range(8)]
    exact = {"num_device_blocks": 200, "num_threads": 1, "kv_cache_dtype": "float32"}
    with LLM(str(model), **{**exact, **settings}) as llm:
        outputs = llm.generate(prompts, asked, use_tqdm=False)
        if settings:
            assert llm.engine.client.core.scheduler.stats().num_preemptions > 0
    for prompt, wish, output in zip(prompts, asked, outputs, strict=True):
        assert [choice.token_ids for choice in output.outputs] == expected_beams(reference, prompt, wish)


def test_beams_of_the_demo_model() -> None:
    """Trained weights, where scores lie close together: ids and score of each beam."""
    asked = SamplingParams(n=4, beam=BeamParams(width=4), max_tokens=10, temperature=0.0)
    with LLM(
        model=str(demo_model()), weights_dtype="float32", kv_cache_dtype="float32", kv_cache_memory="256MiB"
    ) as llm:
        [output] = llm.generate("The capital of France is", asked, use_tqdm=False)
    prompt = output.prompt_token_ids
    with torch.inference_mode():
        generated = demo_reference().generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            generation_config=GenerationConfig(
                num_beams=4,
                num_return_sequences=4,
                do_sample=False,
                max_new_tokens=10,
                eos_token_id=None,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_scores=True,
            ),
        )
    expected = [row[len(prompt) :] for row in generated.sequences.tolist()]
    assert [choice.token_ids for choice in output.outputs] == expected
    scores = [choice.cumulative_logprob for choice in output.outputs]
    assert scores == pytest.approx(generated.sequences_scores.tolist(), abs=1e-3)
