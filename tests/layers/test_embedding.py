"""Every form of an embedding looks up the same rows."""

from __future__ import annotations

import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from pagedserve.layers.embedding import DenseEmbedding, Embedding, PackedEmbedding, SharedEmbedding
from tests.helpers.dense_weights import DenseWeight
from tests.helpers.gguf_files import random_blocks

TOKEN_IDS = torch.tensor([3, 0, 16, 3])


@pytest.mark.parametrize("file_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense(file_dtype: torch.dtype, dtype: torch.dtype) -> None:
    weight = torch.randn(17, 32).to(file_dtype)
    embedding = DenseEmbedding(weight, dtype)
    assert torch.equal(embedding(TOKEN_IDS), weight[TOKEN_IDS].to(dtype))
    assert embedding.nbytes == weight.nbytes


@pytest.mark.parametrize("quant", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"])
def test_packed(quant: str) -> None:
    rows = random_blocks(quant, 17, 512)
    embedding = PackedEmbedding(quant, rows, torch.float32)
    whole = torch.from_numpy(dequantize(rows, GGMLQuantizationType[quant]))
    assert torch.equal(embedding(TOKEN_IDS), whole[TOKEN_IDS])
    assert embedding.nbytes == rows.nbytes < whole.nbytes / 2


def test_shared_with_the_head() -> None:
    weight = torch.randn(17, 32)
    embedding = SharedEmbedding(DenseWeight(weight), torch.bfloat16)
    assert torch.equal(embedding(TOKEN_IDS), weight[TOKEN_IDS].bfloat16())


@pytest.mark.parametrize("kind", ["dense", "packed", "shared"])
def test_what_is_looked_up_may_be_written_to(kind: str) -> None:
    """The residual stream starts as the embedding and grows in place: the matrix must not."""
    rows, weight = random_blocks("Q8_0", 17, 32), torch.randn(17, 32)
    embedding: Embedding = {
        "dense": DenseEmbedding(weight, torch.float32),
        "packed": PackedEmbedding("Q8_0", rows, torch.float32),
        "shared": SharedEmbedding(DenseWeight(weight), torch.float32),
    }[kind]
    before = embedding(TOKEN_IDS).clone()
    for token_ids in (TOKEN_IDS, torch.arange(17)):
        looked_up = embedding(token_ids)
        looked_up += 1.0
    assert torch.equal(embedding(TOKEN_IDS), before)
