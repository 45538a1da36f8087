"""Architectures that run through transformers' interface, against the same ones by transformers alone."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pagedserve import LLM, SamplingParams
from pagedserve.errors import ConfigError, ModelLoadError
from pagedserve.kernels import native
from pagedserve.models import FALLBACK, model_class
from pagedserve.models.transformers_fallback import TransformersForCausalLM
from pagedserve.quantization.packed import PackedMethod
from pagedserve.registry import load
from pagedserve.sampling_params import BeamParams
from tests.helpers.checkpoints import llama_config, random_tensors, tiny_llama
from tests.helpers.gguf_files import write_llama_gguf
from tests.helpers.hf_checkpoints import GPT_SIZES, SIZES, write_random
from tests.helpers.paged_model import PagedModel

PROMPT = [(37 * i * i + 11 * i + 5) % 320 for i in range(45)]
NUM_DECODED = 32
BACKEND = "cpu" if native.available() else "reference"

MLA = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}  # fmt: skip
MOE = {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}
# What is special about each: it stands for a family.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "StableLM: part of each head is rotated": ("stablelm", SIZES),
    "Cohere: scaled logits, interleaved rotation, tied": ("cohere", SIZES),
    "Cohere 2: windows and no positions by turns": (
        "cohere2", {**SIZES, "head_dim": 16, "num_hidden_layers": 4, "sliding_window": 9}
    ),
    "OLMo 2: norms after the blocks": ("olmo2", SIZES),
    "StarCoder 2: a window in all layers": ("starcoder2", {**SIZES, "sliding_window": 11}),
    "Gemma 2: windows, soft caps, scaled embedding": (
        "gemma2", {**SIZES, "head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 16}
    ),
    "Gemma 3: two rotations": (
        "gemma3_text",
        {**SIZES, "head_dim": 16, "num_hidden_layers": 6, "sliding_window": 9, "query_pre_attn_scalar": 16},
    ),
    "GPT-2: Conv1D, learned positions": ("gpt2", GPT_SIZES),
    "GPT-2: each layer scales its scores": ("gpt2", {**GPT_SIZES, "scale_attn_by_inverse_layer_idx": True}),
    "GPT-J: parallel blocks, a bias on the head": ("gptj", {**GPT_SIZES, "rotary_dim": 8}),
    "OPT: a decoder within the body": ("opt", {**SIZES, "ffn_dim": 96, "word_embed_proj_dim": 64}),
    "StarCoder 1: one KV head": ("gpt_bigcode", GPT_SIZES),
    "Granite MoE: experts in one tensor": ("granitemoe", MOE),
    "MiniCPM 3: values shorter than keys": ("minicpm3", {**SIZES, **MLA}),
}  # fmt: skip


@torch.inference_mode()
def reference_logits(folder: Path, dtype: torch.dtype) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    return model(input_ids=torch.tensor([PROMPT])).logits[0].float()


@torch.inference_mode()
def continuation(model: Any, prompt: list[int], num_tokens: int) -> tuple[list[int], torch.Tensor]:
    """The greedy text by transformers alone, without a cache, and the logits at all its positions."""
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids, model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()


# Those that are native too, and near relatives of others.
SLOW = {"Gemma 2", "Gemma 3", "GPT-2: each", "GPT-J", "StarCoder 1"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if any(map(n.startswith, SLOW)) else []) for n in CASES]
)
def test_logits_and_greedy_tokens_equal_transformers_at_every_chunk_size(tmp_path: Path, name: str) -> None:
    model_type, config = CASES[name]
    ids, expected = continuation(write_random(tmp_path, model_type, **config), PROMPT, NUM_DECODED)
    paged = PagedModel(tmp_path, impl="transformers", backend=BACKEND)
    assert isinstance(paged.model, TransformersForCausalLM)
    for seq_id, chunk in enumerate((1, 7, 64)):  # by 1, the last 32 steps are decoding
        logits = paged.logits(ids, chunk=chunk, seq_id=seq_id)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
        assert logits[len(PROMPT) - 1 : -1].argmax(-1).tolist() == ids[len(PROMPT) :]


@pytest.mark.parametrize("name", ["Cohere 2: windows and no positions by turns", "GPT-2: Conv1D, learned positions"])
def test_rows_of_a_batch_do_not_touch_each_other(tmp_path: Path, name: str) -> None:
    model_type, config = CASES[name]
    model = write_random(tmp_path, model_type, **config)
    prompts = [PROMPT[i : i + 5 + 9 * i] for i in range(4)]
    with torch.inference_mode():
        expected = [model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0] for prompt in prompts]
    paged = PagedModel(tmp_path, impl="transformers", backend=BACKEND)
    found: list[list[torch.Tensor]] = [[] for _ in prompts]
    taken = [0] * len(prompts)
    step = 0
    while any(done < len(prompt) for done, prompt in zip(taken, prompts, strict=True)):
        rows = []
        for i, prompt in enumerate(prompts):
            if count := min(1 + (step + 3 * i) % 6, len(prompt) - taken[i]):
                rows.append((i, prompt[taken[i] : taken[i] + count]))
                taken[i] += count
        parts = paged.step(rows).split([len(tokens) for _, tokens in rows])
        for (i, _), part in zip(rows, parts, strict=True):
            found[i].append(part)
        step += 1
    for parts, logits in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.cat(parts), logits, atol=1e-4, rtol=1e-4)


# -- through the engine ------------------------------------------------------------------------------------------------

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SEEDED = SamplingParams(n=4, temperature=1.2, seed=17, max_tokens=12, ignore_eos=True)
BEAM = SamplingParams(n=3, beam=BeamParams(width=3), max_tokens=8, temperature=0.0, ignore_eos=True)
WAYS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "chunks of 7, no prefix cache": {"max_num_batched_tokens": 7, "enable_prefix_caching": False},
    "few blocks": {"num_device_blocks": 40, "block_size": 8, "swap_space": "0", "max_num_batched_tokens": 40},
}


def test_the_engine_gives_the_same_answers_in_every_way(tmp_path: Path) -> None:
    """Batched, chunked, cached, preempted: greedy ids are transformers', samples and beams those of a roomy engine.

    Layers with and without a window keep their blocks in groups of their own.
    """
    windows = {"head_dim": 16, "num_hidden_layers": 4, "sliding_window": 11, "logit_scale": 4.0}
    model = write_random(tmp_path, "cohere2", tokenizer=True, **{**SIZES, **windows})
    prompts = [PROMPT[:3], PROMPT[:20], PROMPT[:17], PROMPT[:33]]
    greedy = [continuation(model, prompt, 12)[0][len(prompt) :] for prompt in prompts]
    answers = {}
    for way, settings in WAYS.items():
        with LLM(str(tmp_path), **{"kv_cache_dtype": "float32", **settings}) as llm:
            both = llm.generate([*prompts, PROMPT[:20], PROMPT[:33]], [GREEDY] * 4 + [SEEDED, BEAM], use_tqdm=False)
            again = llm.generate(prompts[3], SEEDED, use_tqdm=False)[0]
        assert [output.outputs[0].token_ids for output in both[:4]] == greedy, way
        answers[way] = [[choice.token_ids for choice in output.outputs] for output in (*both[4:], again)]
        if way == "few blocks":
            assert llm.engine.stats.num_preemptions > 0
        if way == "roomy":
            assert again.num_cached_tokens > 0
    assert answers["chunks of 7, no prefix cache"] == answers["roomy"]
    assert answers["few blocks"] == answers["roomy"]
    assert len({tuple(ids) for ids in answers["roomy"][0]}) == 4
    with torch.inference_mode():
        beams = model.generate(
            torch.tensor([PROMPT[:33]]), attention_mask=torch.ones(1, 33), num_beams=3, num_return_sequences=3,
            min_new_tokens=8, max_new_tokens=8, do_sample=False, pad_token_id=0, length_penalty=1.0,
        )  # fmt: skip
    assert answers["roomy"][1] == beams[:, 33:].tolist()


# -- which implementation ---------------------------------------------------------------------------------------------


def test_who_computes_what(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fallback = load(FALLBACK)
    assert model_class({"architectures": ["StableLmForCausalLM"]}) is fallback
    assert model_class({"architectures": ["LlamaForCausalLM"]}) is not fallback
    assert model_class({"architectures": ["LlamaForCausalLM"]}, "transformers") is fallback
    with pytest.raises(ModelLoadError, match="StableLmForCausalLM is not native; use --model-impl auto"):
        model_class({"architectures": ["StableLmForCausalLM"]}, "native")
    write_random(tmp_path, "stablelm", **SIZES)
    with caplog.at_level(logging.INFO, logger="pagedserve"):
        PagedModel(tmp_path)
    assert [r.getMessage() for r in caplog.records if "transformers" in r.getMessage()] == [
        "StableLmForCausalLM runs through transformers' code with paged attention; native architectures are faster"
    ]


@torch.inference_mode()
def test_a_native_architecture_gives_the_same_numbers_both_ways(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path, tokenizer=False, attention_bias=True, tie_word_embeddings=True)
    ours = PagedModel(folder, impl="native").logits(PROMPT, chunk=16)
    theirs = PagedModel(folder, impl="transformers").logits(PROMPT, chunk=16)
    torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=1e-4)


# -- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not native.available(), reason="the native CPU library is not built")
def test_weights_are_held_as_asked_for(tmp_path: Path) -> None:
    write_random(tmp_path, "cohere", dtype=torch.bfloat16, **SIZES)
    exact = reference_logits(tmp_path, torch.float32)
    sizes, errors = {}, {}
    for weights_dtype in ("float32", "auto", "int8", "int4"):
        paged = PagedModel(tmp_path, impl="transformers", backend="cpu", quant=PackedMethod(weights_dtype))
        sizes[weights_dtype] = paged.model.weights_bytes
        errors[weights_dtype] = float((paged.logits(PROMPT, chunk=64) - exact).abs().mean() / exact.abs().mean())
    assert errors["float32"] < 1e-5 and errors["auto"] < 1e-5  # the file's bf16, multiplied in fp32
    assert errors["auto"] < errors["int8"] < 0.05 < errors["int4"] < 0.5
    assert sizes["float32"] > sizes["auto"] > sizes["int8"] > sizes["int4"]


@pytest.mark.skipif(not native.available(), reason="the native CPU library is not built")
def test_experts_are_held_as_asked_for(tmp_path: Path) -> None:
    """Each expert's matrices are packed on their own, though transformers has them in one tensor."""
    write_random(tmp_path, "granitemoe", dtype=torch.bfloat16, **MOE)
    exact = reference_logits(tmp_path, torch.float32)
    sizes, errors = {}, {}
    for weights_dtype in ("float32", "auto", "int8"):
        paged = PagedModel(tmp_path, impl="transformers", backend="cpu", quant=PackedMethod(weights_dtype))
        sizes[weights_dtype] = paged.model.weights_bytes
        errors[weights_dtype] = float((paged.logits(PROMPT, chunk=7) - exact).abs().mean() / exact.abs().mean())
    assert errors["auto"] < 1e-5 < errors["int8"] < 0.2  # a token may choose other experts
    assert sizes["auto"] < 0.6 * sizes["float32"]
    assert sizes["int8"] < 0.7 * sizes["auto"]


@pytest.mark.skipif(not native.available(), reason="the native CPU library is not built")
def test_experts_that_are_not_quantised_are_named(tmp_path: Path) -> None:
    """Llama 4 multiplies all of its experts at once, outside of the interface."""
    write_random(tmp_path, "llama4_text", **{**MOE, "head_dim": 16})
    with pytest.raises(ConfigError, match=r"--weights-dtype: .* is a tensor of several matrices.*auto"):
        PagedModel(tmp_path, impl="transformers", backend="cpu", quant=PackedMethod("int8"))


def test_half_precision_activations(tmp_path: Path) -> None:
    write_random(tmp_path, "stablelm", dtype=torch.bfloat16, **SIZES)
    theirs, exact = (reference_logits(tmp_path, dtype) for dtype in (torch.bfloat16, torch.float32))
    found = PagedModel(tmp_path, impl="transformers", dtype=torch.bfloat16).logits(PROMPT, chunk=16)
    assert 0 < (found - exact).abs().mean() < 1.3 * (theirs - exact).abs().mean()


def test_random_weights_for_benchmarks(tmp_path: Path) -> None:
    write_random(tmp_path, "stablelm", **SIZES)
    (tmp_path / "model.safetensors").unlink()
    first, second, other = (
        PagedModel(tmp_path, impl="transformers", dummy_seed=seed).logits(PROMPT, chunk=64) for seed in (3, 3, 4)
    )
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


# -- rotary rules that depend on the length --------------------------------------------------------------------------


@torch.inference_mode()
def test_dynamic_scaling_equals_decoding_step_by_step(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0, "partial_rotary_factor": 0.5}
    config = {**SIZES, "max_position_embeddings": 40, "rope_parameters": rope}
    model = write_random(tmp_path, "stablelm", **config)
    output = model.generate(
        torch.tensor([PROMPT[:40]]), attention_mask=torch.ones(1, 40), max_new_tokens=40, min_new_tokens=40,
        do_sample=False, output_logits=True, return_dict_in_generate=True, pad_token_id=0,
    )  # fmt: skip
    token_ids, expected = output.sequences[0].tolist(), torch.cat(output.logits)
    paged = PagedModel(tmp_path, impl="transformers")
    assert paged.model.config.max_model_len == 160
    for seq_id, chunk in enumerate((1, 33)):
        found = paged.logits(token_ids, chunk=chunk, seq_id=seq_id)
        torch.testing.assert_close(found[39:-1], expected, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_longrope_is_decided_by_the_length_that_is_served(tmp_path: Path) -> None:
    """Not by the longest sequence in the batch, as transformers does: a neighbour would change the angles."""
    rope = {
        "rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32,
        "short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [2.0 + i for i in range(8)],
    }  # fmt: skip
    config = {**SIZES, "max_position_embeddings": 128, "original_max_position_embeddings": 32, "rope_parameters": rope}
    model = write_random(tmp_path, "phi3", **config)
    short, long = (model(input_ids=torch.tensor([PROMPT[:n]])).logits[0] for n in (32, 45))
    brief = PagedModel(tmp_path, impl="transformers", max_model_len=32)
    torch.testing.assert_close(brief.logits(PROMPT[:32], chunk=7), short, atol=1e-4, rtol=1e-4)
    paged = PagedModel(tmp_path, impl="transformers")
    found = torch.cat([paged.step([(0, PROMPT[i : i + 9]), (1, PROMPT[i : i + 5])])[:9] for i in range(0, 45, 9)])
    torch.testing.assert_close(found, long, atol=1e-4, rtol=1e-4)


# -- what cannot be served ---------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "ALiBi": ("bloom", {**GPT_SIZES, "hidden_size": 64}, "BloomForCausalLM takes no position_ids"),
    "state space": ("mamba", {"hidden_size": 64, "num_hidden_layers": 2}, "MambaForCausalLM takes no position_ids"),
    "attention of its own": (
        "falcon", {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
        "FalconForCausalLM cannot be run through transformers' attention interface: it has its own",
    ),
    "convolutions between": (
        "lfm2", {**SIZES, "layer_types": ["conv", "full_attention"]}, "of 2 layers each must call attention once",
    ),
    "linear attention between": (
        "qwen3_next", {**SIZES, "head_dim": 16, "num_hidden_layers": 4}, "but there were 1 calls",
    ),
    "sinks": (
        "gpt_oss", {**SIZES, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
        "GptOssForCausalLM asks its attention for s_aux",
    ),
    "attention in chunks": (
        "llama4_text", {**SIZES, "head_dim": 16, "attention_chunk_size": 64}, "layers of type 'chunked_attention'",
    ),
    "a state beside attention": ("zaya", SIZES, "layers of type 'hybrid' are not supported"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_paged_attention_cannot_hold_is_refused_before_weights_are_read(tmp_path: Path, name: str) -> None:
    model_type, fields, message = REFUSED[name]
    config = transformers.CONFIG_MAPPING[model_type](**fields)
    config.architectures = [transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=message):
        PagedModel(tmp_path, impl="transformers", dummy_seed=0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["MyModel"], "model_type": "mine", "auto_map": {"AutoModelForCausalLM": "code.Mine"}},
         r"MyModel \(model_type 'mine'\) is neither native here nor part of transformers .*never run"),
        ({"architectures": ["LlamaForSequenceClassification"]}, r"nor a decoder .*it has LlamaForCausalLM"),
        ({"architectures": ["BertModel"], "model_type": "bert"}, "BertModel is neither native nor a decoder"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised with 'gptq'"),
        ({"hidden_size": "many"}, "config.json: transformers does not accept it"),
    ],
)  # fmt: skip
def test_a_wrong_config_is_named(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(llama_config(**fields)))
    with pytest.raises(ModelLoadError, match=message):
        PagedModel(tmp_path, impl="transformers", dummy_seed=0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_hidden_layers": 3}, r"lacks tensors: model.layers.2.*"),
        ({"num_hidden_layers": 1}, r"holds tensors that this architecture does not have: model.layers.1.*"),
        ({"vocab_size": 100}, r"holds tensors of other shapes"),
    ],
)
def test_tensors_that_do_not_fit_the_config_are_named(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    folder = tiny_llama(tmp_path, tokenizer=False)
    (folder / "config.json").write_text(json.dumps(llama_config(**fields)))
    with pytest.raises(ModelLoadError, match=message):
        PagedModel(folder, impl="transformers")


def test_gguf_files_are_left_to_native_architectures(tmp_path: Path) -> None:
    config = llama_config(tie_word_embeddings=True)
    path = write_llama_gguf(tmp_path / "model.gguf", config, random_tensors(config))
    with pytest.raises(ModelLoadError, match="read from folders with safetensors, not from GGUF"):
        PagedModel(path, impl="transformers")


def test_code_that_comes_with_a_model_is_never_run(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model", tokenizer=False, auto_map={"AutoModelForCausalLM": "evil.Evil"})
    ran = tmp_path / "ran"
    (folder / "evil.py").write_text(f"open({str(ran)!r}, 'w').write('it ran')\nclass Evil: ...\n")
    (folder / "generation_config.json").write_text("{}")
    PagedModel(folder, impl="transformers")
    assert not ran.exists()


def test_a_model_that_does_not_compute_what_it_should_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof at load: here the layers are made to forget what came before this step."""
    folder = tiny_llama(tmp_path, tokenizer=False)
    attend = TransformersForCausalLM.forward

    def forgetful(self: Any, token_ids: torch.Tensor, positions: torch.Tensor, context: Any) -> torch.Tensor:
        context.kv_cache.zero_()
        return attend(self, token_ids, positions, context)

    monkeypatch.setattr(TransformersForCausalLM, "forward", forgetful)
    with pytest.raises(ModelLoadError, match="logits through paged attention differ from transformers' own"):
        PagedModel(folder, impl="transformers")
