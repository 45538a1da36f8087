"""Packed weights as layers see them: stacked parts, lossless GGUF types, quantising while loading."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize
from torch.testing import assert_close

from pagedserve.errors import ConfigError, ModelLoadError
from pagedserve.kernels import native
from pagedserve.quantization.packed import PackedMethod, PackedWeight, StackedWeight
from tests.helpers.gguf_rows import SCALE_OFFSETS, dequantized, random_rows

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not built here")


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def formats(weight: PackedWeight | StackedWeight) -> list[str]:
    return [part.format for part in (weight.parts if isinstance(weight, StackedWeight) else [weight])]


def floats_as_rows(weight: torch.Tensor) -> np.ndarray:
    return weight.contiguous().view(torch.uint8).numpy()


@pytest.mark.parametrize("quant_type", SCALE_OFFSETS)
def test_gguf_types_are_kept_without_loss(quant_type: str) -> None:
    rows = random_rows(quant_type, 24, 256)
    rows.flags.writeable = False  # as in a mapped file
    weight = PackedMethod().from_gguf(quant_type, rows, 256)
    assert np.array_equal(weight.dequantize().numpy(), dequantized(quant_type, rows))
    assert weight.is_batch_invariant
    assert weight.nbytes < 24 * 256 * 2


@pytest.mark.parametrize("kind", ["Q2_K", "IQ3_XXS", "TQ2_0"])
def test_types_without_a_packed_form_become_float32(kind: str) -> None:
    dense = randn(8, 256).numpy()
    if kind == "TQ2_0":
        rows = quantize(dense, GGMLQuantizationType[kind])
    else:
        size = {"Q2_K": 84, "IQ3_XXS": 98}[kind]
        rows = np.random.default_rng(0).integers(0, 60, (8, size), dtype=np.uint8)
    weight = PackedMethod().from_gguf(kind, rows, 256)
    assert formats(weight) == ["float32"]
    assert np.array_equal(weight.dequantize().numpy(), dequantized(kind, rows))


@pytest.mark.parametrize(("kind", "dtype"), [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)])
def test_float_types_of_gguf_files(kind: str, dtype: torch.dtype) -> None:
    dense = randn(20, 48).to(dtype)
    weight = PackedMethod().from_gguf(kind, floats_as_rows(dense), 48)
    assert torch.equal(weight.dequantize(), dense.float())


@pytest.mark.parametrize("sizes", [(32, 16, 16), (9, 3, 3)])
def test_parts_are_stacked_in_order(sizes: tuple[int, ...]) -> None:
    parts = [randn(size, 64, seed=size + i).bfloat16() for i, size in enumerate(sizes)]
    weight = PackedMethod().from_dense(parts)
    assert formats(weight) == ["bfloat16"]
    assert torch.equal(weight.dequantize(), torch.cat(parts).float())


def test_parts_of_different_gguf_types_each_keep_their_own() -> None:
    kinds = ["Q4_K", "Q4_K", "Q6_K", "Q3_K", "F16"]
    half = randn(5, 256).half()
    parts = [random_rows(kind, 7, 256, seed=i) for i, kind in enumerate(kinds[:4])] + [floats_as_rows(half)]
    weight = PackedMethod().from_gguf(kinds, parts, 256)
    assert formats(weight) == ["int4_f32", "int8_g16", "float16"]
    exact = [torch.from_numpy(dequantized(kind, part)) for kind, part in zip(kinds[:4], parts[:4], strict=True)]
    exact.append(half.float())
    assert torch.equal(weight.dequantize(), torch.cat(exact))
    ids = torch.tensor([30, 0, 32, 13, 14, 0])
    assert torch.equal(weight.rows(ids), torch.cat(exact)[ids])

    x = randn(6, 256)
    wanted = torch.cat([PackedMethod().from_gguf(k, p, 256).matmul(x) for k, p in zip(kinds, parts, strict=True)], 1)
    assert torch.equal(weight.matmul(x), wanted)
    assert weight.is_batch_invariant and torch.equal(weight.matmul(x[2:3]), wanted[2:3])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_products_come_in_the_dtype_of_the_activations(dtype: torch.dtype) -> None:
    dense = randn(40, 96)
    weight = PackedMethod().from_dense(dense)
    x = randn(7, 96).to(dtype)
    y = weight.matmul(x)
    assert y.dtype is dtype
    assert_close(y, (x.float() @ dense.T).to(dtype))
    assert_close(weight.matmul(randn(96, 7).to(dtype).T), (randn(96, 7).to(dtype).T.float() @ dense.T).to(dtype))


@pytest.mark.parametrize(
    ("asked", "kind", "kept"),
    [
        ("int4", "Q4_1", "int4"),
        ("int4", "Q4_K", "int4_f32"),
        ("int4", "Q8_0", "int4"),
        ("int4", "Q6_K", "int4"),
        ("int8", "Q4_0", "int4_sym"),
        ("int8", "Q6_K", "int8_g16"),
        ("int8", "F16", "int8"),
        ("bfloat16", "Q8_0", "bfloat16"),
        ("float32", "Q4_K", "float32"),
        ("auto", "Q5_0", "int8"),
    ],
)
def test_quantising_never_adds_bits(asked: str, kind: str, kept: str) -> None:
    if kind == "F16":
        dense = randn(16, 256).half()
        rows, exact = floats_as_rows(dense), dense.float().numpy()
    else:
        rows = random_rows(kind, 16, 256)
        exact = dequantized(kind, rows)
    weight = PackedMethod(asked).from_gguf(kind, rows, 256)
    assert formats(weight) == [kept]
    error = np.linalg.norm(weight.dequantize().numpy() - exact) / np.linalg.norm(exact)
    assert error < {"int4": 0.12, "int8": 0.01, "bfloat16": 0.005}.get(asked, 1e-9)


@pytest.mark.parametrize(("asked", "limit"), [("int8", 0.006), ("int4", 0.08)])
def test_error_of_quantising_while_loading(asked: str, limit: float) -> None:
    """The bound the documentation states for normally distributed weights."""
    dense = randn(64, 1024) * 0.02
    weight = PackedMethod(asked).from_dense(dense)
    assert (weight.dequantize() - dense).norm() / dense.norm() < limit


def test_the_head_keeps_eight_bits() -> None:
    dense = randn(16, 64)
    assert formats(PackedMethod("int4").for_head().from_dense(dense)) == ["int8"]
    for other in ("auto", "bfloat16", "int8"):
        method = PackedMethod(other)
        assert method.for_head() is method


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="multiple of 32"):
        PackedMethod("int4").from_dense(randn(4, 40))
    with pytest.raises(ConfigError, match="int3"):
        PackedMethod("int3")
    with pytest.raises(ModelLoadError, match="Q9_9"):
        PackedMethod().from_gguf("Q9_9", np.zeros((1, 18), np.uint8), 32)
    with pytest.raises(ModelLoadError, match="18 bytes does not hold 64"):
        PackedMethod().from_gguf("Q4_0", np.zeros((1, 18), np.uint8), 64)
    with pytest.raises(ModelLoadError, match="uint8"):
        PackedMethod().from_gguf("Q4_0", np.zeros((1, 18), np.int16), 32)
