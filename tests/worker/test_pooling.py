"""Vectors against transformers' hidden states."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModel

from pagedserve import LLM, SamplingParams
from pagedserve.errors import ModelLoadError, RequestError
from pagedserve.pooling_params import PoolingParams
from tests.helpers.checkpoints import llama_config, random_tensors, tiny_llama, write_checkpoint

PROMPT = [(37 * i * i + 11 * i + 5) % 320 for i in range(60)]
PROMPTS = [PROMPT[:1], PROMPT[:45], PROMPT[5:22], PROMPT[:16], PROMPT]
LAST, MEAN = PoolingParams(), PoolingParams(pooling_type="mean")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"), seed=3)


@torch.inference_mode()
def expected(folder: Path, params: PoolingParams) -> list[torch.Tensor]:
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    vectors = []
    for prompt in PROMPTS:
        states = model(input_ids=torch.tensor([prompt])).last_hidden_state[0].double()
        vector = (states.mean(0) if params.needs_all_tokens else states[-1])[: params.dimensions]
        vectors.append((vector / vector.norm() if params.normalize else vector).float())
    return vectors


@pytest.mark.parametrize(
    "params",
    [
        LAST,
        MEAN,
        PoolingParams(dimensions=8),
        PoolingParams(pooling_type="mean", normalize=False),
        PoolingParams(normalize=False, dimensions=3),
    ],
    ids=str,
)
def test_vectors_are_those_of_transformers(folder: Path, params: PoolingParams) -> None:
    with LLM(str(folder), max_num_batched_tokens=32, kv_cache_dtype="float32") as llm:
        found = llm.embed(PROMPTS, params, use_tqdm=False)
    for vector, wanted in zip(found, expected(folder, params), strict=True):
        torch.testing.assert_close(torch.tensor(vector), wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("params", [LAST, MEAN], ids=["last", "mean"])
def test_a_vector_has_the_same_bits_alone_and_in_a_batch_and_in_any_chunks(folder: Path, params: PoolingParams) -> None:
    with LLM(str(folder)) as llm:
        alone = [llm.embed(prompt, params, use_tqdm=False)[0] for prompt in PROMPTS]
        assert llm.embed(PROMPTS, params, use_tqdm=False) == alone  # cached prefixes too
    for settings in ({"max_num_batched_tokens": 7}, {"num_device_blocks": 5, "max_num_batched_tokens": 16}):
        with LLM(str(folder), enable_prefix_caching=False, **settings) as llm:
            assert llm.embed(PROMPTS, params, use_tqdm=False) == alone, settings


def test_vectors_beside_generation(folder: Path) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    vector = SamplingParams(max_tokens=0, pooling=MEAN)
    with LLM(str(folder), max_num_batched_tokens=24) as llm:
        alone = llm.generate(PROMPTS, greedy, use_tqdm=False)
        vectors = llm.generate(PROMPTS, vector, use_tqdm=False)
        mixed = llm.generate(PROMPTS + PROMPTS, [greedy] * 5 + [vector] * 5, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in mixed[:5]] == [o.outputs[0].token_ids for o in alone]
    assert [o.pooled for o in mixed[5:]] == [o.pooled for o in vectors]
    assert all(o.pooled is None for o in alone) and all(o.outputs[0].token_ids == [] for o in vectors)


def test_a_prompt_may_fill_the_whole_context(folder: Path) -> None:
    with LLM(str(folder), max_model_len=32) as llm:
        assert len(llm.embed(PROMPT[:32], use_tqdm=False)[0]) == 64
        with pytest.raises(RequestError, match="context is 32 tokens"):
            llm.embed([PROMPT[:5], PROMPT[:33]], use_tqdm=False)


@pytest.mark.parametrize("impl", ["native", "transformers"])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_checkpoint_without_a_head_serves_embeddings_and_says_that_it_generates_nothing(
    folder: Path, tmp_path: Path, impl: str, prefix: str
) -> None:
    config = llama_config(architectures=["LlamaModel"])
    tensors = random_tensors(config, seed=3)
    del tensors["lm_head.weight"]
    body = {prefix + name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    write_checkpoint(tmp_path, config, body)
    with LLM(str(tmp_path), model_impl=impl, kv_cache_dtype="float32") as llm:
        found = llm.embed(PROMPTS, use_tqdm=False)
        with pytest.raises(RequestError, match="no output head"):
            llm.generate("hello", use_tqdm=False)
    for vector, wanted in zip(found, expected(folder, LAST), strict=True):
        torch.testing.assert_close(torch.tensor(vector), wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("field", [{"is_causal": False}, {"use_bidirectional_attention": True}])
def test_a_model_that_looks_ahead_is_refused(tmp_path: Path, field: dict[str, bool]) -> None:
    with pytest.raises(ModelLoadError, match="only causal decoders are served"):
        LLM(str(tiny_llama(tmp_path, **field)))


def test_hidden_states_that_are_no_numbers_are_an_error_of_their_request(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    broken = tiny_llama(tmp_path, seed=3)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.embed_tokens.weight"][7] = torch.nan
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    vector = SamplingParams(max_tokens=0, pooling=LAST)
    with LLM(str(broken)) as llm:
        good, bad = llm.generate([[5, 6], [5, 7]], vector, use_tqdm=False)
    assert good.pooled is not None and good.error is None
    assert bad.pooled is None and "not finite" in (bad.error or "")
