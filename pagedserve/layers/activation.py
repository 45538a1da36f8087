"""Activations by their Hugging Face names."""

from __future__ import annotations

from collections.abc import Callable, Container
from functools import partial

import torch

from pagedserve.errors import ModelLoadError
from pagedserve.kernels import ops

# `hidden_act` of config.json -> the op's name. transformers spells the tanh form of GELU in several ways.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu_erf",
    "gelu_python": "gelu_erf",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
}
_GATED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": ops.silu_mul,
    "gelu_erf": ops.gelu_mul,
    "gelu_tanh": partial(ops.gelu_mul, approximate="tanh"),
}


def gated_activation_kind(name: str) -> str:
    """The op's name of a gated activation; ModelLoadError lists what is known."""
    return _op(name, _GATED)


def gated_activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """act(x[:, :dim]) * x[:, dim:]: [num_tokens, 2 * dim] -> [num_tokens, dim]; ModelLoadError lists what is known."""
    return _GATED[_op(name, _GATED)]


def activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """act(x), written over x: [num_tokens, dim]; ModelLoadError lists what is known."""
    kind = _op(name, set(ACTIVATIONS.values()))

    def apply(x: torch.Tensor) -> torch.Tensor:
        return ops.activation(kind, x, out=x)

    return apply


def _op(name: str, kinds: Container[str]) -> str:
    known = [spelled for spelled, kind in ACTIVATIONS.items() if kind in kinds]
    if name not in known:
        raise ModelLoadError(f"hidden_act {name!r} is not supported; known: {', '.join(known)}")
    return ACTIVATIONS[name]
