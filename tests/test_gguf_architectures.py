"""What GGUF metadata says, in Hugging Face words (C087, C090, C091)."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGUFWriter

from pagedserve.errors import ModelLoadError
from pagedserve.gguf_file import GGUFFile
from tests.helpers.checkpoints import llama_config, random_tensors
from tests.helpers.gguf_files import byte_level_vocabulary, write_llama_gguf
from tests.helpers.tokenizers import byte_level_backend


@pytest.fixture(scope="module")
def config():
    return {**llama_config(head_dim=16), "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def tensors(config):
    return random_tensors(config)


def small_file(tmp_path, config, tensors, **options):
    return write_llama_gguf(tmp_path / "tiny.gguf", config, tensors, **options)


def test_config_says_what_the_original_said(tmp_path, config, tensors):
    made = GGUFFile(
        small_file(tmp_path, config, tensors, tokenizer=byte_level_vocabulary(byte_level_backend()))
    ).config()
    for key in config:
        if key != "torch_dtype":
            assert made[key] == config[key], key
    assert made["rope_scaling"] is None
    assert made["head_dim"] == 16


def test_tied_head_and_odd_vocabulary(tmp_path):  # C087
    config = llama_config(tie_word_embeddings=True, vocab_size=517)
    file = GGUFFile(small_file(tmp_path, config, random_tensors(config)))
    assert file.config()["tie_word_embeddings"] is True
    assert file.config()["vocab_size"] == 517
    assert "lm_head.weight" not in file.tensor_names()


def test_rope_freqs_become_factors_not_a_weight(tmp_path, config, tensors):
    factors = np.linspace(1.0, 8.0, 8).astype(np.float32)
    file = GGUFFile(small_file(tmp_path, config, tensors, rope_freqs=factors))
    assert sorted(file.tensor_names()) == sorted(tensors)
    scaling = file.config()["rope_scaling"]
    assert scaling["rope_type"] == "longrope"
    np.testing.assert_array_equal(np.float32(scaling["short_factor"]), factors)
    assert scaling["long_factor"] == scaling["short_factor"]
    for bad in (0.0, -1.0, np.inf, np.nan):
        factors[3] = bad
        with pytest.raises(ModelLoadError, match="rope_freqs"):
            GGUFFile(small_file(tmp_path, config, tensors, rope_freqs=factors)).config()


def test_rope_freqs_mean_to_transformers_what_they_mean_to_llama_cpp(tmp_path, config, tensors):
    """llama.cpp turns pair i by position * base ** (-2i / head_dim) / factor[i]."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    factors = np.linspace(1.0, 8.0, 8).astype(np.float32)
    made = GGUFFile(small_file(tmp_path, config, tensors, rope_freqs=factors)).config()
    rotary = LlamaRotaryEmbedding(LlamaConfig(**made))
    plain = made["rope_theta"] ** (-np.arange(0, 16, 2) / 16)
    np.testing.assert_allclose(rotary.inv_freq.numpy(), plain / factors, rtol=1e-6)
    assert rotary.attention_scaling == 1.0


def scaled(kind, factor, original=None):
    def write(writer):
        from gguf.constants import RopeScalingType

        writer.add_rope_scaling_type(RopeScalingType(kind))
        writer.add_rope_scaling_factor(factor)
        if original:
            writer.add_rope_scaling_orig_ctx_len(original)

    return write


def test_rope_scaling_keys(tmp_path, config, tensors):
    linear = GGUFFile(small_file(tmp_path, config, tensors, metadata=scaled("linear", 2.5))).config()
    assert linear["rope_scaling"] == {"rope_type": "linear", "factor": 2.5}
    yarn = GGUFFile(small_file(tmp_path, config, tensors, metadata=scaled("yarn", 4.0, 128))).config()
    assert yarn["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    none = GGUFFile(small_file(tmp_path, config, tensors, metadata=scaled("none", 1.0))).config()
    assert none["rope_scaling"] is None
    file = GGUFFile(small_file(tmp_path, config, tensors, metadata=scaled("longrope", 4.0)))
    with pytest.raises(ModelLoadError, match="longrope"):
        file.config()


def test_ends_of_a_turn(tmp_path, config, tensors):
    """The main EOS first, then control tokens that end a turn by their text."""
    file = GGUFFile(small_file(tmp_path, config, tensors, tokenizer=byte_level_vocabulary(byte_level_backend())))
    backend = byte_level_backend()
    assert file.generation_config() == {
        "bos_token_id": backend.token_to_id("<s>"),
        "eos_token_id": [backend.token_to_id("</s>"), backend.token_to_id("<|im_end|>")],
    }


def test_unknown_architecture_and_parts_are_named(tmp_path, config, tensors):
    path = tmp_path / "x.gguf"
    writer = GGUFWriter(path, "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match=r"'mamba' is not supported; known: llama"):
        GGUFFile(path).config()

    split = small_file(tmp_path, config, tensors, metadata=lambda w: w.add_uint16("split.count", 3))
    with pytest.raises(ModelLoadError, match="one of 3 parts"):
        GGUFFile(split).config()


def test_missing_keys_are_named(tmp_path, config, tensors):
    path = small_file(tmp_path, config, tensors)
    data = path.read_bytes().replace(b"llama.block_count", b"llama.block_xount")
    path.write_bytes(data)
    with pytest.raises(ModelLoadError, match=r"llama\.block_count is missing"):
        GGUFFile(path).config()


def test_a_strange_tensor_is_named(tmp_path, config, tensors):
    path = small_file(tmp_path, config, tensors)
    path.write_bytes(path.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_ux.weight"))
    with pytest.raises(ModelLoadError, match=r"blk\.1\.ffn_ux\.weight is not part of"):
        GGUFFile(path).tensor_names()


def test_sampling_defaults(tmp_path, config, tensors):
    def write(writer):
        writer.add_float32("general.sampling.temp", 0.6)
        writer.add_int32("general.sampling.top_k", 20)
        writer.add_float32("general.sampling.penalty_repeat", 1.05)

    made = GGUFFile(small_file(tmp_path, config, tensors, metadata=write)).generation_config()
    assert made == {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05}
