"""Loading: every way in which a checkpoint can be right, and every way in which it can be broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pagedserve import quantization
from pagedserve.errors import ModelLoadError
from pagedserve.gguf_file import GGUFFile
from pagedserve.models import ARCHITECTURES, model_class
from tests.helpers.checkpoints import llama_config, llama_shapes, random_tensors, tiny_llama, write_checkpoint
from tests.helpers.dense_weights import DenseMethod
from tests.helpers.gguf_files import gguf_name, random_blocks, write_llama_gguf
from tests.helpers.paged_model import CPU, PagedModel

PROMPT = [(37 * i * i + 11 * i + 5) % 320 for i in range(25)]


def logits_of(path: Path, **options: Any) -> torch.Tensor:
    return PagedModel(path, **options).logits(PROMPT, chunk=9)


@torch.inference_mode()
def reference_logits(folder: Path, token_ids: list[int] = PROMPT) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return model(torch.tensor([token_ids])).logits[0]


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


# ---- safetensors --------------------------------------------------------------------------------------------


def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    whole = logits_of(tiny_llama(tmp_path / "whole", tokenizer=False))
    assert torch.equal(logits_of(tiny_llama(tmp_path / "shards", tokenizer=False, num_shards=3)), whole)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", ["Llama", "Mistral"])
def test_what_transformers_saves_is_what_we_load(tmp_path: Path, architecture: str, tied: bool) -> None:
    config_class = getattr(transformers, f"{architecture}Config")
    config = config_class(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "linear", "rope_theta": 5e4, "factor": 2.0},
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{architecture}ForCausalLM")(config).bfloat16()
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    same(logits_of(tmp_path, quant=quantization.select("auto", CPU)), reference_logits(tmp_path))


@pytest.mark.parametrize("has_head", [False, True])
def test_a_tied_model_uses_a_head_of_its_own_where_the_file_has_one(tmp_path: Path, has_head: bool) -> None:  # C087
    tensors = random_tensors(llama_config())
    if not has_head:
        del tensors["lm_head.weight"]
    folder = write_checkpoint(tmp_path, llama_config(tie_word_embeddings=True), tensors, tokenizer=False)
    same(logits_of(folder), reference_logits(folder))


def test_a_tied_head_that_repeats_the_embedding_costs_nothing(tmp_path: Path) -> None:
    tensors = random_tensors(llama_config(tie_word_embeddings=True))
    config = llama_config(tie_word_embeddings=True)
    without = PagedModel(write_checkpoint(tmp_path / "a", config, tensors, tokenizer=False))
    repeated = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].copy()}
    with_head = PagedModel(write_checkpoint(tmp_path / "b", config, repeated, tokenizer=False))
    assert with_head.model.weights_bytes == without.model.weights_bytes


def test_rotary_buffers_of_old_exporters_are_ignored(tmp_path: Path) -> None:
    tensors = random_tensors(llama_config())
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    folder = write_checkpoint(tmp_path, llama_config(), tensors, tokenizer=False)
    same(logits_of(folder), reference_logits(folder))


def test_an_untied_head_that_is_missing_is_named(tmp_path: Path) -> None:  # C087
    tensors = random_tensors(llama_config())
    del tensors["lm_head.weight"]
    folder = write_checkpoint(tmp_path, llama_config(), tensors, tokenizer=False)
    with pytest.raises(ModelLoadError, match=r"lm_head\.weight \[320, 64\] is missing"):
        PagedModel(folder)


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", "model.embed_tokens.weight"]
)
def test_a_missing_tensor_is_named(tmp_path: Path, name: str, num_shards: int) -> None:  # C088
    tensors = random_tensors(llama_config())
    del tensors[name]
    folder = write_checkpoint(tmp_path, llama_config(), tensors, tokenizer=False, num_shards=num_shards)
    with pytest.raises(ModelLoadError, match=name.replace(".", r"\.") + r".* is missing in .*safetensors"):
        PagedModel(folder)


def test_a_missing_bias_is_named(tmp_path: Path) -> None:
    folder = write_checkpoint(
        tmp_path, llama_config(attention_bias=True), random_tensors(llama_config()), tokenizer=False
    )
    with pytest.raises(ModelLoadError, match=r"layers\.0\.self_attn\.q_proj\.bias \[64\] is missing"):
        PagedModel(folder)


@pytest.mark.parametrize("count", [1, 20])
def test_tensors_that_nobody_asked_for_are_named(tmp_path: Path, count: int) -> None:
    tensors = random_tensors(llama_config())
    tensors.update({f"model.layers.0.extra_{i}.weight": np.ones((2, 2), np.float32) for i in range(count)})
    folder = write_checkpoint(tmp_path, llama_config(), tensors, tokenizer=False)
    more = " and 12 more" if count > 1 else ""
    with pytest.raises(ModelLoadError, match=rf"does not have: .*model\.layers\.0\.extra_0\.weight.*{more}$"):
        PagedModel(folder)


def test_biases_that_the_config_does_not_know_are_not_dropped(tmp_path: Path) -> None:
    tensors = random_tensors(llama_config(attention_bias=True))
    folder = write_checkpoint(tmp_path, llama_config(), tensors, tokenizer=False)
    with pytest.raises(ModelLoadError, match=r"q_proj\.bias"):
        PagedModel(folder)


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.k_proj.weight", "model.layers.0.input_layernorm.weight"])
def test_a_wrong_shape_is_named(tmp_path: Path, name: str) -> None:
    tensors = random_tensors(llama_config())
    tensors[name] = tensors[name][:-1]
    folder = write_checkpoint(tmp_path, llama_config(), tensors, tokenizer=False)
    with pytest.raises(ModelLoadError, match=name.replace(".", r"\.") + r".* has shape \[.*\], the config asks for"):
        PagedModel(folder)


def test_a_transposed_square_matrix_of_the_wrong_rank_is_named(tmp_path: Path) -> None:
    tensors = random_tensors(llama_config())
    tensors["model.norm.weight"] = tensors["model.norm.weight"][None]
    folder = write_checkpoint(tmp_path, llama_config(), tensors, tokenizer=False)
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight .* has shape \[1, 64\], the config asks for \[64\]"):
        PagedModel(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, 0.999])
def test_a_shard_that_is_cut_short_is_named(tmp_path: Path, keep: float) -> None:  # C088
    folder = tiny_llama(tmp_path, tokenizer=False, num_shards=3)
    shard = folder / "model-00002-of-00003.safetensors"
    data = shard.read_bytes()
    shard.write_bytes(data[: keep if isinstance(keep, int) else int(len(data) * keep)])
    with pytest.raises(ModelLoadError, match=r"model-00002-of-00003\.safetensors cannot be read"):
        PagedModel(folder)


def test_a_shard_that_is_gone_is_named(tmp_path: Path) -> None:  # C088
    folder = tiny_llama(tmp_path, tokenizer=False, num_shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"model-00002-of-00003\.safetensors"):
        PagedModel(folder)


def test_a_tensor_in_two_shards_is_named(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path, tokenizer=False, num_shards=2)
    first, second = sorted(folder.glob("*.safetensors"))
    tensors = load_file(first)
    name = next(iter(load_file(second)))
    save_file({**tensors, name: torch.zeros(1)}, first)
    with pytest.raises(ModelLoadError, match=f"tensor {name} is in both"):
        PagedModel(folder)


def test_float64_files_are_read(tmp_path: Path) -> None:
    wide = logits_of(
        tiny_llama(tmp_path / "64", tokenizer=False, dtype="float64"), quant=quantization.select("auto", CPU)
    )
    same(wide, reference_logits(tiny_llama(tmp_path / "32", tokenizer=False)))


def test_integer_codes_are_refused(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path, tokenizer=False)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**tensors, name: tensors[name].to(torch.int8)}, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"up_proj\.weight has type torch\.int8"):
        PagedModel(folder)


# ---- architectures ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [["GPT5ForCausalLM"], [], None, "LlamaForCausalLM"])
def test_an_unknown_architecture_is_named_with_those_that_are_known(tmp_path: Path, names: Any) -> None:
    folder = tiny_llama(tmp_path, tokenizer=False, architectures=names)
    with pytest.raises(ModelLoadError, match=r"(GPT5ForCausalLM|no architecture).*known: LlamaForCausalLM"):
        PagedModel(folder)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_of_the_table_imports(name: str) -> None:
    found = model_class({"architectures": [name]})
    assert callable(found) and callable(found.config_class.from_hf)


# ---- GGUF ---------------------------------------------------------------------------------------------------


def gguf_and_truth(tmp_path: Path, quant: str, **changes: Any) -> tuple[Path, Path]:
    """A GGUF file, and a folder with the same weights dequantised to fp32, for transformers."""
    config = llama_config(**changes)
    tensors = random_tensors(config)
    path = write_llama_gguf(tmp_path / f"{quant}.gguf", config, tensors, quant=quant)
    kind = GGMLQuantizationType[quant]
    rounded = {
        name: dequantize(quantize(value, kind), kind).astype(np.float32) if value.ndim == 2 else value
        for name, value in tensors.items()
    }
    return path, write_checkpoint(tmp_path / "folder", config, rounded, tokenizer=False)


@pytest.mark.parametrize("quant", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("tied", [False, True])
def test_gguf_equals_transformers_on_the_dequantised_weights(tmp_path: Path, quant: str, tied: bool) -> None:  # C091
    path, folder = gguf_and_truth(tmp_path, quant, tie_word_embeddings=tied)
    same(logits_of(path), reference_logits(folder))


def test_gguf_with_a_vocabulary_of_517_and_a_head_dim_of_its_own(tmp_path: Path) -> None:
    path, folder = gguf_and_truth(tmp_path, "Q8_0", vocab_size=517, head_dim=32)
    same(logits_of(path), reference_logits(folder))


def test_gguf_rope_factors_are_applied(tmp_path: Path) -> None:
    """The converter writes Llama 3's rule as one divisor a frequency (C091)."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 32
    config = llama_config(rope_scaling=scaling)
    tensors = random_tensors(config)
    folder = write_checkpoint(tmp_path / "folder", config, tensors, tokenizer=False)
    plain = 1.0 / 10000.0 ** (np.arange(0, 16, 2) / 16)
    inv_freq = AutoModelForCausalLM.from_pretrained(folder).model.rotary_emb.inv_freq.numpy()
    path = write_llama_gguf(tmp_path / "model.gguf", config, tensors, rope_freqs=plain / inv_freq)
    same(logits_of(path), reference_logits(folder))


@pytest.mark.parametrize("quants", [("Q4_K", "Q4_K"), ("Q4_K", "Q6_K"), ("Q5_K", "Q6_K"), ("Q8_0", "F16")])
def test_gguf_with_types_that_differ_within_a_layer(tmp_path: Path, quants: tuple[str, str]) -> None:
    """As Q4_K_M and its like do: value and down projections, and the head, get more bits than the rest."""
    config = llama_config(hidden_size=256, intermediate_size=512, vocab_size=64)
    truth = {}
    path = tmp_path / "model.gguf"

    def store(writer: GGUFWriter) -> None:
        for seed, (name, shape) in enumerate(llama_shapes(config).items()):
            if len(shape) == 1:
                # Random blocks have large values: small norms keep attention from saturating.
                value = np.full(shape, 0.02, np.float32)
                writer.add_tensor(gguf_name(name), value)
            else:
                quant = quants[1] if any(part in name for part in ("v_proj", "down_proj", "lm_head")) else quants[0]
                kind = GGMLQuantizationType[quant]
                rows = random_blocks(quant, *shape, seed)
                typed = rows.view(np.float16) if quant == "F16" else rows
                writer.add_tensor(gguf_name(name), typed, raw_dtype=kind)
                value = dequantize(typed, kind).astype(np.float32)
            truth[name] = value

    write_llama_gguf(path, config, {}, metadata=store)
    file = GGUFFile(path)
    for name in truth:
        if (rows := file.row_permutation(name)) is not None:
            truth[name] = truth[name][rows]
    folder = write_checkpoint(tmp_path / "folder", config, truth, tokenizer=False)
    expected = reference_logits(folder, [token_id % 64 for token_id in PROMPT])
    found = PagedModel(path).logits([token_id % 64 for token_id in PROMPT], chunk=9)
    torch.testing.assert_close(found / expected.std(), expected / expected.std(), atol=1e-4, rtol=1e-4)


def test_gguf_without_a_tensor_is_refused(tmp_path: Path) -> None:
    tensors = random_tensors(llama_config())
    del tensors["model.layers.1.mlp.down_proj.weight"]
    path = write_llama_gguf(tmp_path / "model.gguf", llama_config(), tensors)
    with pytest.raises(ModelLoadError, match=r"layers\.1\.mlp\.down_proj\.weight .* is missing in .*model\.gguf"):
        PagedModel(path)


def test_gguf_with_more_layers_than_it_says_is_refused(tmp_path: Path) -> None:
    tensors = random_tensors(llama_config(num_hidden_layers=3))
    path = write_llama_gguf(tmp_path / "model.gguf", llama_config(), tensors)
    with pytest.raises(ModelLoadError, match=r"model\.layers\.2\."):
        PagedModel(path)


def test_gguf_with_a_wrong_shape_is_refused(tmp_path: Path) -> None:
    tensors = random_tensors(llama_config())
    tensors["model.layers.1.mlp.down_proj.weight"] = np.zeros((64, 32), np.float32)
    path = write_llama_gguf(tmp_path / "model.gguf", llama_config(), tensors)
    with pytest.raises(
        ModelLoadError, match=r"down_proj\.weight .* has shape \[64, 32\], the config asks for \[64, 96\]"
    ):
        PagedModel(path)


# ---- random weights -----------------------------------------------------------------------------------------


def test_dummy_weights_need_no_files_and_depend_on_the_seed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(llama_config(attention_bias=True)))
    first = logits_of(tmp_path, dummy_seed=1)
    assert torch.isfinite(first).all()
    assert torch.equal(first, logits_of(tmp_path, dummy_seed=1))
    assert not torch.equal(first, logits_of(tmp_path, dummy_seed=2))


def test_dummy_weights_have_the_type_that_the_config_names(tmp_path: Path) -> None:
    sizes = {}
    for dtype in ("float32", "bfloat16"):
        (tmp_path / "config.json").write_text(json.dumps(llama_config(torch_dtype=dtype)))
        quant = quantization.select("auto", CPU)
        sizes[dtype] = PagedModel(tmp_path, dummy_seed=0, quant=quant, max_model_len=16).model.weights_bytes
    assert sizes["bfloat16"] < 0.6 * sizes["float32"]


# ---- memory -------------------------------------------------------------------------------------------------


def test_weights_bytes_counts_every_layer(tmp_path: Path) -> None:
    tensors = random_tensors(llama_config(attention_bias=True))
    folder = write_checkpoint(tmp_path, llama_config(attention_bias=True), tensors, tokenizer=False)
    model = PagedModel(folder, quant=DenseMethod(), max_model_len=512).model
    rotary = 512 * 16 * 4
    assert model.weights_bytes == sum(value.nbytes for value in tensors.values()) + rotary
