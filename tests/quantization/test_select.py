"""Which method serves a run."""

from __future__ import annotations

import pytest
import torch

from pagedserve import quantization
from pagedserve.errors import ConfigError
from pagedserve.kernels import native
from pagedserve.quantization.grouped import GroupedMethod
from pagedserve.quantization.none import DenseMethod
from pagedserve.quantization.packed import PackedMethod

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_cpus_pack_where_the_native_library_is() -> None:
    if not native.available():
        pytest.skip("the native library is not built here")
    for weights_dtype in ("auto", "float32", "bfloat16", "int8", "int4"):
        assert isinstance(quantization.select(weights_dtype, CPU), PackedMethod)


def test_without_it_weights_are_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available", lambda: False)
    assert isinstance(quantization.select("auto", CPU), DenseMethod)
    with pytest.raises(ConfigError, match="--weights-dtype int4 needs a GPU or the native CPU kernels"):
        quantization.select("int4", CPU)


def test_gpus_hold_groups_or_dense_weights() -> None:
    for weights_dtype in ("auto", "int8", "int4"):
        assert isinstance(quantization.select(weights_dtype, CUDA, torch.bfloat16), GroupedMethod)
    assert isinstance(quantization.select("bfloat16", CUDA, torch.bfloat16), DenseMethod)


def test_every_method_of_the_registry_imports() -> None:
    for name in quantization.METHODS:
        assert quantization.METHODS.resolve(name).name == name
