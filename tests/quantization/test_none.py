"""Dense weights: torch's product over what the file holds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from pagedserve.errors import ConfigError
from pagedserve.quantization.none import DenseMethod
from tests.helpers.gguf_rows import dequantized, random_rows


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_products_and_rows() -> None:
    parts = [randn(5, 24), randn(3, 24)]
    weight = DenseMethod().from_dense(parts)
    x = randn(4, 24)
    assert (weight.out_features, weight.in_features, weight.nbytes) == (8, 24, 8 * 24 * 4)
    assert_close(weight.matmul(x), x @ torch.cat(parts).T)
    assert torch.equal(weight.rows(torch.tensor([7, 0])), torch.stack([parts[1][2], parts[0][0]]))
    assert torch.equal(weight.dequantize(), torch.cat(parts))
    assert weight.matmul(x.bfloat16()).dtype is torch.bfloat16
    assert not weight.is_batch_invariant


def test_mixed_gguf_types_are_dequantised() -> None:
    first, second = random_rows("Q4_1", 6, 256), random_rows("Q6_K", 4, 256)
    weight = DenseMethod().from_gguf(["Q4_1", "Q6_K"], [first, second], 256)
    wanted = np.concatenate([dequantized("Q4_1", first), dequantized("Q6_K", second)])
    assert np.array_equal(weight.dequantize().numpy(), wanted)


def test_one_type_name_serves_all_parts() -> None:
    parts = [random_rows("Q8_0", 6, 64), random_rows("Q8_0", 4, 64, seed=1)]
    weight = DenseMethod().from_gguf("Q8_0", parts, 64)
    assert np.array_equal(weight.dequantize().numpy(), dequantized("Q8_0", np.concatenate(parts)))


def test_weights_have_the_dtype_of_the_activations_after_the_rounding_asked_for() -> None:
    dense = randn(4, 8)
    kept = DenseMethod("auto", None, torch.float16).from_dense(dense)
    assert torch.equal(kept.dequantize(), dense.half().float())
    rounded = DenseMethod("bfloat16", None, torch.float32).from_dense(dense)
    assert rounded.nbytes == 4 * 8 * 4
    assert torch.equal(rounded.dequantize(), dense.bfloat16().float())


def test_integers_are_refused() -> None:
    with pytest.raises(ConfigError, match="int8"):
        DenseMethod("int8")
