"""GGUF types: what their names mean, and rows that do not fit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagedserve.errors import ModelLoadError
from pagedserve.quantization import gguf
from tests.helpers.gguf_rows import SCALE_OFFSETS, dequantized, random_rows


@pytest.mark.parametrize("quant_type", SCALE_OFFSETS)
def test_dequantize_agrees_with_the_gguf_package(quant_type: str) -> None:
    rows = random_rows(quant_type, 3, 256)
    gguf.check_rows(quant_type, rows, 256)
    assert np.array_equal(gguf.dequantize(quant_type, rows).numpy(), dequantized(quant_type, rows))


def test_read_only_floats_are_copied() -> None:
    rows = torch.arange(8.0).view(2, 4).view(torch.uint8).numpy().copy()
    rows.flags.writeable = False
    dense = gguf.as_dense("F32", rows)
    assert dense is not None and torch.equal(dense, torch.arange(8.0).view(2, 4))
    assert gguf.as_dense("Q4_0", rows) is None


def test_unknown_types_and_wrong_sizes() -> None:
    with pytest.raises(ModelLoadError, match="Q4_9"):
        gguf.type_number("Q4_9")
    with pytest.raises(ModelLoadError, match="20 bytes does not hold 64"):
        gguf.check_rows("Q4_1", np.zeros((2, 20), np.uint8), 64)
    with pytest.raises(ModelLoadError, match="33 numbers"):
        gguf.check_rows("Q4_1", np.zeros((2, 20), np.uint8), 33)
    with pytest.raises(ModelLoadError, match="cannot be dequantised"):
        gguf.dequantize("I32", np.zeros((2, 20), np.uint8))
