"""Gated activations by their Hugging Face names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from pagedserve.errors import ModelLoadError
from pagedserve.kernels import ops

_GELU_TANH = partial(ops.gelu_mul, approximate="tanh")

# `hidden_act` of config.json -> activation(x[:, :dim]) * x[:, dim:]. transformers spells the tanh form in several ways.
GATED_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": ops.silu_mul,
    "swish": ops.silu_mul,
    "gelu": ops.gelu_mul,
    "gelu_python": ops.gelu_mul,
    "gelu_new": _GELU_TANH,
    "gelu_fast": _GELU_TANH,
    "gelu_pytorch_tanh": _GELU_TANH,
    "gelu_python_tanh": _GELU_TANH,
    "gelu_accurate": _GELU_TANH,
}


def gated_activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """[num_tokens, 2 * dim] -> [num_tokens, dim]; ModelLoadError lists what is known."""
    try:
        return GATED_ACTIVATIONS[name]
    except KeyError:
        raise ModelLoadError(f"hidden_act {name!r} is not supported; known: {', '.join(GATED_ACTIVATIONS)}") from None
