"""Formats of linear weights: which there are, and which one a run uses."""

from __future__ import annotations

import torch

from pagedserve import envs
from pagedserve.errors import ConfigError
from pagedserve.kernels import native
from pagedserve.quantization.method import QuantMethod
from pagedserve.registry import Registry

METHODS: Registry[type[QuantMethod]] = Registry(
    "quantization method",
    {
        "none": "pagedserve.quantization.none:DenseMethod",
        "grouped": "pagedserve.quantization.grouped:GroupedMethod",
        "packed": "pagedserve.quantization.packed:PackedMethod",
    },
)

_QUANTISING = ("int8", "int4")


def select(weights_dtype: str, device: torch.device, dtype: torch.dtype | None = None) -> QuantMethod:
    """The method for `--weights-dtype` on a device.

    CPUs with the native library hold packed weights: as in the file for "auto", else converted while loading. GPUs hold
    8- and 4-bit groups, of a file or on request, and dense tensors. Elsewhere weights are dense, dequantised where the
    file holds integers.

    Args:
        weights_dtype: auto, float32, bfloat16, float16, int8 or int4.
        dtype: of the activations; dense weights are cast to it (default: they keep their own).

    Raises:
        ConfigError: the format is unknown, or needs kernels that are not there.
    """
    if device.type == "cpu" and native.available():
        return METHODS.resolve("packed")(weights_dtype)
    is_gpu = device.type == "cuda" or envs.triton_interpreted()
    if is_gpu and weights_dtype in ("auto", *_QUANTISING):
        return METHODS.resolve("grouped")(weights_dtype, device, dtype)
    if weights_dtype in _QUANTISING:
        raise ConfigError(
            f"--weights-dtype {weights_dtype} needs a GPU or the native CPU kernels; on {device.type} as it is "
            "here use auto, float32 or bfloat16"
        )
    return METHODS.resolve("none")(weights_dtype, device, dtype)
