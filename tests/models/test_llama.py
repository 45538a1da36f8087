"""Llama against transformers on the same weights, through paged KV."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers import LlamaConfig as HFLlamaConfig
from transformers import MistralConfig as HFMistralConfig

from pagedserve.errors import ConfigError, ModelLoadError
from pagedserve.kernels import native
from pagedserve.models import model_class
from pagedserve.models.decoder import DecoderConfig
from pagedserve.models.hf_config import resolve_max_model_len
from tests.helpers.checkpoints import llama_config, tiny_llama
from tests.helpers.paged_model import PagedModel

PROMPT = [(37 * i * i + 11 * i + 5) % 320 for i in range(45)]

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "head_dim": {"head_dim": 32},
    "one kv head": {"num_key_value_heads": 1},
    "kv heads absent": {"num_key_value_heads": None},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "eps": {"rms_norm_eps": 0.3},
    "gelu": {"hidden_act": "gelu"},
    "gelu_new": {"hidden_act": "gelu_new"},
    "gelu_pytorch_tanh": {"hidden_act": "gelu_pytorch_tanh"},
    "theta": {"rope_theta": 1e6},
    "odd vocabulary": {"vocab_size": 517},
    "linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama3": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    "yarn, all settings": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 5000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "mscale": 0.7,
            "mscale_all_dim": 0.4,
            "truncate": False,
        }
    },
    "rope_parameters": {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None},
    "mistral with a window": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 9},
}


def reference(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


@torch.inference_mode()
def reference_logits(folder: Path, token_ids: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return reference(folder, dtype)(torch.tensor([token_ids])).logits[0].float()


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers_at_every_position_and_chunk_size(tmp_path: Path, name: str) -> None:  # C089
    folder = tiny_llama(tmp_path, tokenizer=False, **VARIANTS[name])
    expected = reference_logits(folder, PROMPT)
    for chunk in (1, 7, 16):
        found = PagedModel(folder, seed=chunk).logits(PROMPT, chunk=chunk)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(not native.available(), reason="the native CPU library is not built")
@pytest.mark.parametrize("name", ["plain", "head_dim", "one kv head", "biases", "gelu", "mistral with a window"])
def test_native_kernels_give_the_same_logits(tmp_path: Path, name: str) -> None:
    folder = tiny_llama(tmp_path, tokenizer=False, **VARIANTS[name])
    found = PagedModel(folder, backend="cpu").logits(PROMPT, chunk=16)
    torch.testing.assert_close(found, reference_logits(folder, PROMPT), atol=1e-4, rtol=1e-4)


LONG_VARIANTS: dict[str, dict[str, Any]] = {
    "linear": {"max_position_embeddings": 64, "rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    "llama3": {
        "max_position_embeddings": 192,
        "rope_scaling": {**VARIANTS["llama3"]["rope_scaling"], "original_max_position_embeddings": 64},
    },
    "yarn": {
        "max_position_embeddings": 192,
        "rope_scaling": {"type": "yarn", "factor": 3.0, "original_max_position_embeddings": 64},
    },
}


@pytest.mark.parametrize("name", LONG_VARIANTS)
def test_logits_equal_transformers_up_to_the_last_position(tmp_path: Path, name: str) -> None:  # C090
    folder = tiny_llama(tmp_path, tokenizer=False, **LONG_VARIANTS[name])
    paged = PagedModel(folder)
    assert paged.model.max_model_len == 192
    token_ids = (PROMPT * 5)[:192]
    expected = reference_logits(folder, token_ids)
    torch.testing.assert_close(paged.logits(token_ids, chunk=50), expected, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_dynamic_scaling_equals_decoding_step_by_step(tmp_path: Path) -> None:
    scaling = {"type": "dynamic", "factor": 4.0}
    folder = tiny_llama(tmp_path, tokenizer=False, max_position_embeddings=40, rope_scaling=scaling)
    output = reference(folder).generate(
        torch.tensor([PROMPT[:40]]),
        attention_mask=torch.ones(1, 40, dtype=torch.long),
        max_new_tokens=60,
        min_new_tokens=60,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    token_ids, expected = output.sequences[0].tolist(), torch.cat(output.logits)
    for chunk in (1, 33):  # the length of the context, not that of the chunk, sets the base
        found = PagedModel(folder).logits(token_ids, chunk=chunk)
        torch.testing.assert_close(found[39:-1], expected, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_rows_of_a_batch_do_not_touch_each_other(tmp_path: Path) -> None:
    """Prompts at different points and decodes share steps; each row's logits are those it gets alone."""
    folder = tiny_llama(tmp_path, tokenizer=False)
    prompts = {seq_id: PROMPT[seq_id : seq_id + 5 + 9 * seq_id] for seq_id in range(4)}
    expected = {seq_id: reference_logits(folder, prompt) for seq_id, prompt in prompts.items()}
    paged = PagedModel(folder)
    found: dict[int, list[torch.Tensor]] = {seq_id: [] for seq_id in prompts}
    taken = dict.fromkeys(prompts, 0)
    step = 0
    while any(taken[seq_id] < len(prompt) for seq_id, prompt in prompts.items()):
        rows = []
        for seq_id, prompt in prompts.items():
            count = min(1 + (step + 3 * seq_id) % 6, len(prompt) - taken[seq_id])
            if count:
                rows.append((seq_id, prompt[taken[seq_id] : taken[seq_id] + count]))
                taken[seq_id] += count
        logits = paged.step(rows)
        for seq_id, part in rows:
            found[seq_id].append(logits[: len(part)])
            logits = logits[len(part) :]
        step += 1
    for seq_id in prompts:
        torch.testing.assert_close(torch.cat(found[seq_id]), expected[seq_id], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_activations_stay_close_to_fp32(tmp_path: Path, dtype: torch.dtype) -> None:
    """Files and activations in half precision: no further from the fp32 truth than transformers in that precision."""
    name = str(dtype).removeprefix("torch.")
    folder = tiny_llama(tmp_path, tokenizer=False, dtype=name, attention_bias=True)
    truth = reference_logits(folder, PROMPT)
    theirs = (reference_logits(folder, PROMPT, dtype) - truth).abs().mean()
    logits = PagedModel(folder, dtype=dtype).logits(PROMPT, chunk=16)
    assert logits.dtype is torch.float32
    ours = (logits - truth).abs().mean()
    assert 0 < ours < 1.2 * theirs


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_files_are_computed_in_fp32(tmp_path: Path, dtype: str) -> None:
    folder = tiny_llama(tmp_path, tokenizer=False, dtype=dtype, attention_bias=True)
    found = PagedModel(folder).logits(PROMPT, chunk=16)
    torch.testing.assert_close(found, reference_logits(folder, PROMPT), atol=1e-4, rtol=1e-4)


def test_a_shorter_table_serves_the_same_numbers(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path, tokenizer=False)
    short = PagedModel(folder, max_model_len=len(PROMPT))
    assert short.model.max_model_len == len(PROMPT)
    whole = PagedModel(folder)
    assert torch.equal(short.logits(PROMPT, chunk=16), whole.logits(PROMPT, chunk=16))
    assert short.model.weights_bytes < whole.model.weights_bytes


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"hidden_size": 66}, "hidden_size 66 is not a multiple of num_attention_heads 4"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"hidden_act": "relu6"}, "hidden_act 'relu6' is not supported; known: silu"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', not true or false"),
        ({"rope_scaling": {"type": "spiral"}}, "rope_type 'spiral'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised with 'gptq'"),
        ({"quantization_config": "awq"}, "quantised with 'awq'"),
    ],
)
def test_a_wrong_config_is_named(fields: dict[str, Any], message: str) -> None:  # C089
    with pytest.raises(ModelLoadError, match=message):
        DecoderConfig.from_hf(llama_config(**fields))


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "MistralForCausalLM"])
def test_absent_fields_mean_what_they_mean_to_transformers(architecture: str) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 48, "num_hidden_layers": 1}
    config = {"architectures": [architecture], "num_attention_heads": 16, **sizes}
    theirs = {"LlamaForCausalLM": HFLlamaConfig, "MistralForCausalLM": HFMistralConfig}[architecture](**config)
    ours = model_class(config).config_class.from_hf(config)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == theirs.head_dim
    assert ours.max_model_len == theirs.max_position_embeddings
    assert ours.sliding_window == getattr(theirs, "sliding_window", None)
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.hidden_act == theirs.hidden_act
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]


def test_a_longer_length_than_the_model_reaches_is_refused() -> None:  # C090
    config = DecoderConfig.from_hf(
        llama_config(max_position_embeddings=64, rope_scaling={"type": "linear", "factor": 2.0})
    )
    assert resolve_max_model_len(config.max_model_len, None) == 128
    assert resolve_max_model_len(config.max_model_len, 100) == 100
    with pytest.raises(ConfigError, match="--max-model-len 129: this model reaches 128 tokens"):
        resolve_max_model_len(config.max_model_len, 129)
