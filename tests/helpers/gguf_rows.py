"""Random but sane rows of every quant type of GGUF files that is packed, as uint8 [num_rows, row_bytes]."""

from __future__ import annotations

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

# Quant type -> where in a block its fp16 scales lie; all other bytes may be anything.
SCALE_OFFSETS = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "IQ4_NL": [0],
    "IQ4_XS": [0],
    "MXFP4": [],
}


def random_rows(quant_type: str, num_rows: int, in_features: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    block_len, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[quant_type]]
    blocks = rng.integers(0, 256, (num_rows, in_features // block_len, block_bytes), dtype=np.uint8)
    for offset in SCALE_OFFSETS[quant_type]:
        scales = (rng.standard_normal(blocks.shape[:2]) * 0.01).astype(np.float16)
        blocks[:, :, offset : offset + 2] = scales[..., None].view(np.uint8)
    if quant_type == "MXFP4":  # the exponent: near 1, and the two that make subnormal scales
        blocks[:, :, 0] = rng.integers(110, 130, blocks.shape[:2])
        blocks[0, 0, 0], blocks[-1, 0, 0] = 0, 1
    return blocks.reshape(num_rows, -1)


def dequantized(quant_type: str, rows: np.ndarray) -> np.ndarray:
    """float32 [num_rows, in_features], by the gguf package."""
    return dequantize(rows, GGMLQuantizationType[quant_type])
