"""Angles against transformers, at the positions where scaling rules change; lengths; settings that are wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig as HFLlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.stablelm.modeling_stablelm import apply_rotary_pos_emb

from pagedserve.errors import ModelLoadError
from pagedserve.kernels import ops
from pagedserve.layers.rotary import RopeConfig

HEAD_DIM, ORIGINAL_LEN = 64, 128

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# name -> (fields of config.json, derived length)
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "default": ({"max_position_embeddings": 512}, 512),
    "theta": ({"max_position_embeddings": 512, "rope_theta": 1e6}, 512),
    "linear": ({"max_position_embeddings": 128, "rope_scaling": {"type": "linear", "factor": 4.0}}, 512),
    "linear, new spelling": (
        {"max_position_embeddings": 128, "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e4}},
        512,
    ),
    "llama3": (
        {
            "max_position_embeddings": 1024,
            "rope_scaling": {"rope_type": "llama3", "original_max_position_embeddings": ORIGINAL_LEN, **LLAMA3},
        },
        1024,
    ),
    "llama3 without original length": (
        {"max_position_embeddings": 1024, "rope_scaling": {"type": "llama3", **LLAMA3}},
        1024,
    ),
    "yarn": (
        {
            "max_position_embeddings": 512,
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL_LEN},
        },
        512,
    ),
    "yarn whose file states the original length": (
        {"max_position_embeddings": 128, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        512,
    ),
    "yarn, attention factor and betas": (
        {
            "max_position_embeddings": 512,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": ORIGINAL_LEN,
                "attention_factor": 1.3,
                "beta_fast": 20,
                "beta_slow": 3,
            },
        },
        512,
    ),
    "yarn, mscale, no truncation": (
        {
            "max_position_embeddings": 512,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e5,
                "factor": 4.0,
                "original_max_position_embeddings": ORIGINAL_LEN,
                "mscale": 1.2,
                "mscale_all_dim": 0.5,
                "truncate": False,
            },
        },
        512,
    ),
    "longrope, one list": (
        {
            "max_position_embeddings": 512,
            "rope_scaling": {
                "rope_type": "longrope",
                "short_factor": [1.0 + 0.1 * i for i in range(HEAD_DIM // 2)],
                "long_factor": [1.0 + 0.1 * i for i in range(HEAD_DIM // 2)],
                "original_max_position_embeddings": ORIGINAL_LEN,
            },
        },
        512,
    ),
}


def rope_of(fields: dict[str, Any], head_dim: int = HEAD_DIM) -> RopeConfig:
    return RopeConfig.from_hf(fields, head_dim=head_dim, max_position_embeddings=fields["max_position_embeddings"])


@pytest.mark.parametrize("name", CASES)
def test_angles_equal_transformers_and_the_length_is_derived(name: str) -> None:  # C090
    fields, max_model_len = CASES[name]
    rope = rope_of(fields)
    assert rope.max_model_len == max_model_len
    reference = LlamaRotaryEmbedding(HFLlamaConfig(hidden_size=4 * HEAD_DIM, num_attention_heads=4, **fields))
    positions = torch.tensor([0, 1, ORIGINAL_LEN - 1, ORIGINAL_LEN, ORIGINAL_LEN + 1, max_model_len - 1])
    cos, sin = reference(torch.zeros(1), positions[None])
    found = rope.cos_sin(max_model_len)[positions]
    half = HEAD_DIM // 2
    torch.testing.assert_close(found[:, :half], cos[0, :, :half], atol=2e-6, rtol=0)
    torch.testing.assert_close(found[:, half:], sin[0, :, :half], atol=2e-6, rtol=0)


def test_null_means_absent() -> None:
    settings = {"rope_type": None, "rope_theta": None, "partial_rotary_factor": None}
    rope = rope_of({"max_position_embeddings": 64, "rope_theta": 1e6, "rope_scaling": settings})
    assert (rope.kind, rope.theta, rope.rotary_dim) == ("default", 1e6, HEAD_DIM)


def test_dynamic_angles_are_those_of_the_step_at_which_a_position_was_last() -> None:
    fields = {"max_position_embeddings": ORIGINAL_LEN, "rope_scaling": {"type": "dynamic", "factor": 4.0}}
    rope = rope_of(fields)
    assert rope.max_model_len == 512
    reference = LlamaRotaryEmbedding(HFLlamaConfig(hidden_size=4 * HEAD_DIM, num_attention_heads=4, **fields))
    table = rope.cos_sin(512)
    for position in (0, ORIGINAL_LEN - 1, ORIGINAL_LEN, ORIGINAL_LEN + 1, 300, 511):
        cos, sin = reference(torch.zeros(1), torch.tensor([[position]]))
        expected = torch.cat((cos[0, 0, : HEAD_DIM // 2], sin[0, 0, : HEAD_DIM // 2]))
        torch.testing.assert_close(table[position], expected, atol=2e-5, rtol=0)
    # A row depends on its own position only, not on how far the table goes.
    torch.testing.assert_close(rope.cos_sin(200), table[:200], atol=0, rtol=0)


def test_a_part_of_the_head_is_rotated() -> None:
    rope = rope_of({"max_position_embeddings": 64, "partial_rotary_factor": 0.25})
    assert rope.rotary_dim == 16
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(5, 4, HEAD_DIM, generator=generator)
    key = torch.randn(5, 2, HEAD_DIM, generator=generator)
    positions = torch.tensor([0, 3, 17, 40, 63])
    table = rope.cos_sin(64)[positions]
    cos, sin = table[:, :8].repeat(1, 2), table[:, 8:].repeat(1, 2)
    rotated = [
        torch.cat((part, heads[..., 16:]), dim=-1)
        for part, heads in zip(
            apply_rotary_pos_emb(query[None, ..., :16], key[None, ..., :16], cos[None], sin[None], unsqueeze_dim=2),
            (query[None], key[None]),
            strict=True,
        )
    ]
    ops.rotary_embedding(positions, query, key, rope.cos_sin(64))
    torch.testing.assert_close(query, rotated[0][0])
    torch.testing.assert_close(key, rotated[1][0])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_scaling": {"type": "spiral", "factor": 2.0}}, "'spiral'.*known: default, linear"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": "two"}}, "factor is 'two'"),
        ({"rope_scaling": {"type": "dynamic", "factor": float("nan")}}, "factor is nan"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}},
            "high_freq_factor 4.0 must be greater",
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ between layers"),
        ({"rope_theta": -1.0}, "rope_theta is -1.0"),
        ({"partial_rotary_factor": 0.33}, "rotary embedding of 21 of 64"),
        ({"partial_rotary_factor": 2.0}, "rotary embedding of 128 of 64"),
        ({"original_max_position_embeddings": "8k"}, "original_max_position_embeddings is '8k'"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 3, "long_factor": [1.0] * 3}},
            "list of 32 numbers",
        ),
    ],
)
def test_wrong_settings_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        rope_of({"max_position_embeddings": 128, **fields}).cos_sin(16)


def test_longrope_takes_the_list_of_the_length_that_is_served() -> None:
    scaling = {"rope_type": "longrope", "short_factor": [1.0] * 32, "long_factor": [4.0] * 32, "attention_factor": 1.0}
    fields = {"max_position_embeddings": 512, "original_max_position_embeddings": 128, "rope_scaling": scaling}
    rope = rope_of(fields, head_dim=64)
    assert rope.max_model_len == 512
    plain = rope_of({"max_position_embeddings": 512}, head_dim=64).cos_sin(512)
    torch.testing.assert_close(rope.cos_sin(128), plain[:128])
    # Positions count a quarter: in every row, also in those of short texts.
    torch.testing.assert_close(rope.cos_sin(129)[::4], plain[:33], atol=1e-5, rtol=1e-5)
