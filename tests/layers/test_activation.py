"""Activations by name against transformers'."""

from __future__ import annotations

import pytest
import torch
from transformers.activations import ACT2FN

from pagedserve.errors import ModelLoadError
from pagedserve.layers.activation import ACTIVATIONS, activation, gated_activation

GATED = [name for name, kind in ACTIVATIONS.items() if kind != "relu"]


@pytest.mark.parametrize("name", GATED)
def test_equals_transformers(name: str) -> None:
    x = torch.randn(7, 2 * 33, generator=torch.Generator().manual_seed(0)) * 3
    expected = ACT2FN[name](x[:, :33]) * x[:, 33:]
    torch.testing.assert_close(gated_activation(name)(x), expected, atol=1e-5, rtol=1e-5)


def test_an_unknown_name_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ModelLoadError, match="'swiglu' is not supported; known: silu, swish, gelu"):
        gated_activation("swiglu")


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_plain_ones_equal_transformers_in_place(name: str) -> None:
    x = torch.randn(7, 33, generator=torch.Generator().manual_seed(0)) * 3
    expected = ACT2FN[name](x)
    assert activation(name)(x) is x
    torch.testing.assert_close(x, expected, atol=1e-5, rtol=1e-5)


def test_a_gate_without_a_kernel_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="'relu' is not supported"):
        gated_activation("relu")
