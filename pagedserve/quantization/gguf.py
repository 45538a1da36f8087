"""The quant types of GGUF files, by the names the `gguf` package gives them."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from pagedserve.errors import ModelLoadError

FLOAT_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@cache
def type_number(quant_type: str) -> int:
    """GGML's number of a type. Raises ModelLoadError for a name that the gguf package does not know."""
    # Imported late: it takes a while, and only files of its kind need it.
    from gguf.constants import GGMLQuantizationType

    if quant_type not in GGMLQuantizationType.__members__:
        raise ModelLoadError(f"unknown GGUF tensor type {quant_type}; the installed gguf package may be too old")
    return int(GGMLQuantizationType[quant_type])


def check_rows(quant_type: str, rows: np.ndarray, in_features: int) -> None:
    """ModelLoadError unless rows, uint8 [out_features, row_bytes], hold `in_features` numbers each."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    block_len, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(type_number(quant_type))]
    if rows.dtype != np.uint8 or rows.ndim != 2:
        raise ModelLoadError(f"GGUF rows must be uint8 [rows, bytes], they are {rows.dtype} {rows.shape}")
    if in_features % block_len or rows.shape[1] != in_features // block_len * block_bytes:
        raise ModelLoadError(
            f"a row of {rows.shape[1]} bytes does not hold {in_features} numbers of type {quant_type} "
            f"({block_len} in {block_bytes} bytes)"
        )


def row_length(quant_type: str, rows: np.ndarray) -> int:
    """How many numbers a row of uint8 [num_rows, row_bytes] holds."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    block_len, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(type_number(quant_type))]
    return rows.shape[1] // block_bytes * block_len


def row_bytes(quant_type: str, row_length: int) -> int:
    """Bytes of a row of so many numbers."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    block_len, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(type_number(quant_type))]
    return row_length // block_len * block_bytes


def as_dense(quant_type: str, rows: np.ndarray) -> torch.Tensor | None:
    """Rows of a float type as a tensor [out_features, in_features]; None for other types."""
    dtype = FLOAT_TYPES.get(quant_type)
    return None if dtype is None else _tensor(np.ascontiguousarray(rows)).view(dtype)


def dequantize(quant_type: str, rows: np.ndarray) -> torch.Tensor:
    """Rows as float32 [out_features, in_features]. Raises ModelLoadError for a type that gguf cannot read."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize as gguf_dequantize

    dense = as_dense(quant_type, rows)
    if dense is not None:
        return dense.float()
    try:
        values = gguf_dequantize(rows, GGMLQuantizationType(type_number(quant_type)))
    except NotImplementedError as error:
        raise ModelLoadError(f"GGUF tensor type {quant_type} cannot be dequantised") from error
    return _tensor(np.ascontiguousarray(values, dtype=np.float32))


def _tensor(array: np.ndarray) -> torch.Tensor:
    # A mapped file is read-only, which torch cannot express.
    return torch.from_numpy(array if array.flags.writeable else array.copy())
