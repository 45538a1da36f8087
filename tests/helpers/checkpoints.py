"""Small Llama checkpoints written to a folder: random ones, and two whose output is known beforehand.

Everything is written with numpy and safetensors, without transformers, so that a test that only needs a served model
pays nothing for importing it. Ids: see `tests.helpers.byte_tokenizer`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from tests.helpers.byte_tokenizer import BOS_ID, EOS_ID, IM_END_ID, VOCAB_SIZE, write_tokenizer

Tensors = dict[str, np.ndarray]


def llama_config(**changes: Any) -> dict[str, Any]:
    """config.json of F-TINY: 2 layers, hidden 64, 4 heads, 2 KV heads, fp32; `changes` replace or add fields."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "torch_dtype": "float32",
    }
    config.update(changes)
    return config


def llama_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor that a Llama of this config consists of, under its Hugging Face name."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    num_heads = config["num_attention_heads"]
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    head_dim = config.get("head_dim") or hidden // num_heads
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        linears = {
            "self_attn.q_proj": (num_heads * head_dim, hidden, config["attention_bias"]),
            "self_attn.k_proj": (num_kv_heads * head_dim, hidden, config["attention_bias"]),
            "self_attn.v_proj": (num_kv_heads * head_dim, hidden, config["attention_bias"]),
            "self_attn.o_proj": (hidden, num_heads * head_dim, config["attention_bias"]),
            "mlp.gate_proj": (inner, hidden, config["mlp_bias"]),
            "mlp.up_proj": (inner, hidden, config["mlp_bias"]),
            "mlp.down_proj": (hidden, inner, config["mlp_bias"]),
        }
        for name, (rows, columns, has_bias) in linears.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        shapes[f"{prefix}input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def random_tensors(config: Mapping[str, Any], seed: int = 0) -> Tensors:
    """Random fp32 weights, large enough that attention is not uniform and the best token leads clearly."""
    rng = np.random.default_rng(seed)
    tensors: Tensors = {}
    for name, shape in llama_shapes(config).items():
        if name.endswith("norm.weight"):
            value = rng.uniform(0.5, 1.5, shape)
        elif name.endswith(".bias"):
            value = rng.normal(0.0, 0.5, shape)
        elif name in ("model.embed_tokens.weight", "lm_head.weight"):
            value = rng.normal(0.0, 1.0, shape)
        else:
            value = rng.normal(0.0, 1.5 / np.sqrt(shape[1]), shape)
        tensors[name] = value.astype(np.float32)
    return tensors


def write_checkpoint(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    *,
    dtype: str = "float32",
    num_shards: int = 1,
    tokenizer: bool = True,
) -> Path:
    """Writes config.json, generation_config.json, safetensors (sharded with an index if asked) and a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": dtype}))
    ends = {"bos_token_id": BOS_ID, "eos_token_id": [EOS_ID, IM_END_ID]}
    (folder / "generation_config.json").write_text(json.dumps(ends))
    typed = {name: torch.from_numpy(value).to(getattr(torch, dtype)).contiguous() for name, value in tensors.items()}
    if num_shards == 1:
        save_file(typed, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        weight_map = {}
        for shard in range(num_shards):
            file_name = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
            part = {name: typed[name] for name in list(typed)[shard::num_shards]}
            save_file(part, folder / file_name, metadata={"format": "pt"})
            weight_map.update(dict.fromkeys(part, file_name))
        index = {"metadata": {"total_size": sum(t.nbytes for t in typed.values())}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if tokenizer:
        write_tokenizer(folder)
    return folder


def tiny_llama(
    folder: Path,
    *,
    seed: int = 0,
    dtype: str = "float32",
    num_shards: int = 1,
    tokenizer: bool = True,
    **changes: Any,
) -> Path:
    """F-TINY: a random Llama whose output depends on all of its context. `changes` are config fields."""
    config = llama_config(**changes)
    tensors = random_tensors(config, seed)
    return write_checkpoint(folder, config, tensors, dtype=dtype, num_shards=num_shards, tokenizer=tokenizer)


def bigram_llama(folder: Path, successors: Sequence[int], *, tokenizer: bool = True, **changes: Any) -> Path:
    """F-BIGRAM: after token i comes `successors[i]`, whatever stands before it.

    The embedding is the identity, every block adds zero, and the head maps i to its successor. Logits of the successor
    are sqrt(vocab) * 2, all others 0.
    """
    vocab = len(successors)
    config = llama_config(
        vocab_size=vocab,
        hidden_size=vocab,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        **changes,
    )
    tensors = _zero_tensors(config)
    tensors["model.embed_tokens.weight"] = np.eye(vocab, dtype=np.float32)
    tensors["lm_head.weight"][np.asarray(successors), np.arange(vocab)] = 2.0
    return write_checkpoint(folder, config, tensors, tokenizer=tokenizer)


def scripted_llama(
    folder: Path, script: Sequence[int], *, vocab_size: int = VOCAB_SIZE, tokenizer: bool = True, **changes: Any
) -> Path:
    """F-SCRIPT for a Llama: after position p comes `script[p]`, if BOS stands at position 0 and nowhere else.

    A prompt of L tokens (BOS among them) is therefore answered with script[L - 1], script[L], ... Longest script: 512;
    after its end the last token repeats.

    How: all keys are zero, so attention is the mean of the values; only BOS has one, so the mean is 1 / (p + 1), a
    number that tells the position. The MLP turns it into a one-hot of the position: for each border between two
    neighbouring positions the difference of two SiLUs makes a step. The head maps the one-hot to the script.
    """
    num_positions = len(script)
    if not 1 <= num_positions <= 512:
        raise ValueError("a script has 1 to 512 tokens")
    constant, is_bos, mean, first = 0, 1, 2, 3  # what the columns of the hidden state are for
    hidden = num_positions + first
    size = 100.0  # of the constant column, which keeps the norms almost the same at every position
    config = llama_config(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=max(2 * (num_positions - 1), 2),
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=1024,
        **changes,
    )
    tensors = _zero_tensors(config)
    tensors["model.embed_tokens.weight"][:, constant] = size
    tensors["model.embed_tokens.weight"][BOS_ID, is_bos] = 1.0
    layer = "model.layers.0."
    tensors[layer + "self_attn.v_proj.weight"][0, is_bos] = 1.0
    tensors[layer + "self_attn.o_proj.weight"][mean, 0] = 1.0

    # What the MLP reads at position p, in float64, so that the borders lie in the middle.
    eps = config["rms_norm_eps"]
    bos_value = 1.0 / np.sqrt((size**2 + 1.0) / hidden + eps)
    attended = bos_value / np.arange(1, num_positions + 1)
    bos_part = np.where(np.arange(num_positions) == 0, 1.0, 0.0)
    rms = np.sqrt((size**2 + attended**2 + bos_part**2) / hidden + eps)
    seen, ones = attended / rms, size / rms

    gate, up, down = (tensors[f"{layer}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    up[:, constant] = 1.0
    steepness = 40.0  # pre-activation distance between neighbours; SiLU is a hinge beyond about 15
    down[first, :] = 0.0
    for border in range(num_positions - 1):  # step is 1 at positions <= border
        slope = 2 * steepness / (seen[border] - seen[border + 1])
        middle = (seen[border] + seen[border + 1]) / 2
        for unit, shift in ((2 * border, steepness / 4), (2 * border + 1, -steepness / 4)):
            gate[unit, mean] = slope
            gate[unit, constant] = (shift - slope * middle) / ones[border]
            weight = (1.0 if shift > 0 else -1.0) * size / (steepness / 2) / ones[border]
            down[first + border, unit] += weight
            down[first + border + 1, unit] -= weight
    # The last one-hot column is 1 - step: the constant column gives the 1.
    head = tensors["lm_head.weight"]
    scale = 20.0 * np.sqrt(2.0 / hidden)
    for position, token in enumerate(script):
        head[token, first + position] = scale
    head[script[-1], constant] = scale
    return write_checkpoint(folder, config, tensors, tokenizer=tokenizer)


def _zero_tensors(config: Mapping[str, Any]) -> Tensors:
    shapes = llama_shapes(config)
    fills = {name: 1.0 if name.endswith("norm.weight") else 0.0 for name in shapes}
    return {name: np.full(shape, fills[name], np.float32) for name, shape in shapes.items()}
