"""Checkpoints of any architecture as GGUF files: what the converter of llama.cpp makes of them.

Tensor names come from the `gguf` package's own map; rows, norms and experts are stored as the converter stores them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter
from gguf.constants import MODEL_ARCH_NAMES, GGMLQuantizationType, RopeScalingType
from gguf.quants import quantize
from gguf.tensor_mapping import get_tensor_name_map
from safetensors.numpy import load_file

from tests.helpers.gguf_files import interleave

_INTERLEAVED = ("llama", "smollm3")  # the two rotary halves of each head alternate
_EXPERT = re.compile(r"(.*)\.(\d+)\.(block_sparse_moe|mlp)\.experts\.(\d+)\.(\w+)\.weight")


def write_gguf(path: Path, name: str, folder: Path, *, quant: str = "F32") -> Path:
    """The checkpoint in `folder` as a GGUF file of architecture `name`; matrices are stored as `quant`."""
    config = json.loads((folder / "config.json").read_text())
    writer = GGUFWriter(path, name)
    _write_metadata(writer, name, config)
    names = get_tensor_name_map(
        next(arch for arch, text in MODEL_ARCH_NAMES.items() if text == name), config["num_hidden_layers"]
    )
    for hf_name, value in _stacked(load_file(folder / "model.safetensors")):
        if name in _INTERLEAVED and "q_proj" in hf_name:
            value = interleave(value, config["num_attention_heads"])
        if name in _INTERLEAVED and "k_proj" in hf_name:
            value = interleave(value, config["num_key_value_heads"])
        if name.startswith("gemma") and hf_name.endswith("norm.weight"):
            value = value + 1
        gguf_name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, hf_name
        if value.ndim == 1 or quant == "F32" or "gate_inp" in gguf_name:
            writer.add_tensor(gguf_name, value)
        else:
            kind = GGMLQuantizationType[quant]
            writer.add_tensor(gguf_name, quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_metadata(writer: GGUFWriter, name: str, config: Mapping[str, Any]) -> None:
    num_heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    rope = config["rope_parameters"]
    everywhere = rope.get("full_attention", rope)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(everywhere["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if everywhere["rope_type"] == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(everywhere["factor"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    for cap, add in (
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
    ):
        if config.get(cap):
            add(config[cap])
    if name == "phi3":
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
        writer.add_sliding_window(config["sliding_window"] or 0)
        original = config["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
        if rope["rope_type"] == "longrope":
            stretched = config["max_position_embeddings"] / original
            writer.add_rope_scaling_attn_factors((1 + np.log(stretched) / np.log(original)) ** 0.5)
            for kind in ("long", "short"):
                writer.add_tensor(f"rope_factors_{kind}.weight", np.float32(rope[f"{kind}_factor"]))
    num_experts = config.get("num_local_experts") or config.get("num_experts")
    if num_experts:
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        if "moe_intermediate_size" in config:
            writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _stacked(tensors: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Tensors with the matrices of a layer's experts as one of three dimensions, under the converter's name for it."""
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, value in tensors.items():
        if found := _EXPERT.fullmatch(name):
            layers, layer, block, number, part = found.groups()
            inside = "feed_forward.experts" if block == "block_sparse_moe" else "mlp.experts"
            prefix = "layers" if block == "block_sparse_moe" else layers
            experts.setdefault(f"{prefix}.{layer}.{inside}.{part}.weight", {})[int(number)] = value
        else:
            yield name, value
    for name, by_number in experts.items():
        yield name, np.stack([by_number[i] for i in range(len(by_number))])
