"""Small GGUF files, written with the `gguf` package: what the converter of llama.cpp would make of a Llama."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import quantize
from tokenizers import Tokenizer

from tests.helpers.tokenizers import Piece

_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# Types that the gguf package can write; of the others it can only read.
QUANTIZABLE = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


def gguf_name(hf_name: str) -> str:
    """`model.layers.0.self_attn.q_proj.weight` -> `blk.0.attn_q.weight`."""
    stem, _, suffix = hf_name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{suffix}"
    _, _, layer, inner = stem.split(".", 3)
    return f"blk.{layer}.{_BLOCK[inner]}.{suffix}"


def interleave(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """The converter's order of q and k rows: the two rotary halves of each head alternate."""
    half = weights.shape[0] // num_heads // 2
    return weights.reshape(num_heads, 2, half, -1).swapaxes(1, 2).reshape(weights.shape)


def random_blocks(quant: str, num_rows: int, num_columns: int, seed: int = 0) -> np.ndarray:
    """Valid random bytes of any type, uint8 [num_rows, bytes_per_row], with scales small enough to stay finite."""
    kind = GGMLQuantizationType[quant]
    block_len, block_bytes = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    if quant in QUANTIZABLE:
        return quantize(rng.normal(0, 0.5, (num_rows, num_columns)).astype(np.float32), kind).view(np.uint8)
    blocks = rng.integers(0, 256, (num_rows * num_columns // block_len, block_bytes), dtype=np.uint8)
    scales = rng.uniform(0.001, 0.01, (len(blocks), 2)).astype(np.float16).view(np.uint8)
    if quant == "Q6_K":
        blocks[:, -2:] = scales[:, :2]
    else:
        blocks[:, :4] = scales
    return blocks.reshape(num_rows, -1)


def write_llama_gguf(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    *,
    quant: str | Callable[[str], str] = "F32",
    rope_freqs: np.ndarray | None = None,
    alignment: int | None = None,
    tokenizer: Callable[[GGUFWriter], None] | None = None,
    metadata: Callable[[GGUFWriter], None] | None = None,
) -> Path:
    """Write fp32 tensors (Hugging Face names and layout) as a GGUF `llama`; matrices are stored as `quant` says."""
    writer = GGUFWriter(path, "llama")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    num_heads = config["num_attention_heads"]
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(num_kv_heads)
    writer.add_rope_dimension_count(head_dim)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    if tokenizer is not None:
        tokenizer(writer)
    if metadata is not None:
        metadata(writer)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs.astype(np.float32))
    for name, value in tensors.items():
        value = value.astype(np.float32)
        if ".q_proj." in name:
            value = interleave(value, num_heads)
        elif ".k_proj." in name:
            value = interleave(value, num_kv_heads)
        matrix_kind = quant if isinstance(quant, str) else quant(name)
        kind = GGMLQuantizationType[matrix_kind if value.ndim == 2 else "F32"]
        if kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
            stored = value.astype(np.float16) if kind == GGMLQuantizationType.F16 else value
            writer.add_tensor(gguf_name(name), stored)
        else:
            writer.add_tensor(gguf_name(name), quantize(value, kind), raw_dtype=kind)
    _finish(writer)
    return path


def byte_level_vocabulary(
    backend: Tokenizer, *, pre: str = "gpt-2", add_bos: bool | None = None, chat_template: str | None = None
) -> Callable[[GGUFWriter], None]:
    """Writes the vocabulary of a byte-level BPE tokenizer; its added tokens are control or user-defined ones."""

    def write(writer: GGUFWriter) -> None:
        content = json.loads(backend.to_str())
        added = {token["id"]: token for token in content["added_tokens"]}
        tokens = [backend.id_to_token(i) for i in range(backend.get_vocab_size())]
        kinds = [1 if i not in added else 3 if added[i]["special"] else 4 for i in range(len(tokens))]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types(kinds)
        writer.add_token_merges([" ".join(pair) for pair in content["model"]["merges"]])
        writer.add_bos_token_id(backend.token_to_id("<s>"))
        writer.add_eos_token_id(backend.token_to_id("</s>"))
        _flags(writer, add_bos, chat_template)

    return write


def spm_vocabulary(
    pieces: Sequence[Piece],
    *,
    add_bos: bool | None = None,
    space_prefix: bool | None = None,
    chat_template: str | None = None,
) -> Callable[[GGUFWriter], None]:
    """Writes a SentencePiece vocabulary: pieces, scores, types."""

    def write(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list([piece.text for piece in pieces])
        writer.add_token_scores([piece.score for piece in pieces])
        writer.add_token_types([piece.kind for piece in pieces])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        if space_prefix is not None:
            writer.add_add_space_prefix(space_prefix)
        _flags(writer, add_bos, chat_template)

    return write


def _flags(writer: GGUFWriter, add_bos: bool | None, chat_template: str | None) -> None:
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    if chat_template is not None:
        writer.add_chat_template(chat_template)


def _finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
