"""Packed linear weights, at every instruction set that runs here: exact weights, products within a proven bound,
the same bits for a row in every batch and on every number of threads.

Outputs are poisoned with NaN: what is left unwritten by mistake shows.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from torch.testing import assert_close

from pagedserve.kernels import cpu, native, ops, reference
from pagedserve.kernels.native import PackedMatrix
from tests.helpers.gguf_rows import SCALE_OFFSETS, dequantized, random_rows

FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
QUANTISING = ("int8", "int4", "int4_sym")
# One quant type for each format that only files fill.
FILE_ONLY = {"int8_g16": "Q6_K", "int8_min": "Q5_K", "int4_f32": "Q4_K"}
FORMATS = (*FLOATS, *QUANTISING, *FILE_ONLY)
SHAPES = [(1, 32), (16, 64), (37, 96), (100, 512), (192, 576)]
ODD_SHAPES = [(1, 1), (19, 37), (70, 101)]  # float formats only
NIBBLES = ("int4", "int4_sym", "int4_f32")


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def packed(fmt: str, out_features: int, in_features: int) -> PackedMatrix:
    matrix = PackedMatrix(fmt, out_features, in_features)
    if fmt in FILE_ONLY:
        kind = FILE_ONLY[fmt]
        matrix.pack_ggml(0, random_rows(kind, out_features, in_features), int(GGMLQuantizationType[kind]))
    else:
        matrix.pack(0, randn(out_features, in_features) * 0.1)
    return matrix


def shapes(fmt: str) -> list[tuple[int, int]]:
    if fmt in FLOATS:
        return [*SHAPES, *ODD_SHAPES]
    return [(n, k if fmt not in FILE_ONLY else (k + 255) // 256 * 256) for n, k in SHAPES]


def all_rows(matrix: PackedMatrix) -> torch.Tensor:
    return cpu.linear_rows(matrix, torch.arange(matrix.out_features), None)


def multiply(matrix: PackedMatrix, x: torch.Tensor, **kwargs: torch.Tensor | None) -> torch.Tensor:
    out = torch.full((x.shape[0], matrix.out_features), torch.nan)
    return cpu.linear(x, matrix, kwargs.get("bias"), kwargs.get("residual"), out)


@pytest.mark.parametrize("quant_type", SCALE_OFFSETS)
def test_rows_of_gguf_types_are_exact(isa: str, quant_type: str) -> None:
    rows = random_rows(quant_type, 37, 512)
    number = int(GGMLQuantizationType[quant_type])
    fmt = native.linear_format_of_ggml_type(number)
    assert fmt is not None
    matrix = PackedMatrix(fmt, 50, 512)
    matrix.pack_ggml(5, rows, number)  # across the borders of panels
    wanted = np.zeros((50, 512), dtype=np.float32)
    wanted[5:42] = dequantized(quant_type, rows)
    assert np.array_equal(all_rows(matrix).numpy()[5:42].view(np.uint32), wanted[5:42].view(np.uint32))


@pytest.mark.parametrize("source", FLOATS.values(), ids=str)
@pytest.mark.parametrize("fmt", FLOATS)
def test_float_formats_round_once(isa: str, fmt: str, source: torch.dtype) -> None:
    weight = randn(37, 51).to(source)
    weight[3, 4:9] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 1e-7]).to(source)
    matrix = PackedMatrix(fmt, 37, 51)
    matrix.pack(0, weight)
    assert_close(all_rows(matrix), weight.to(FLOATS[fmt]).float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("fmt", "levels"), [("int8", 254), ("int4", 15), ("int4_sym", 16)])
def test_quantised_weights_are_within_half_a_step_of_the_grid(isa: str, fmt: str, levels: int) -> None:
    weight = randn(33, 256)
    weight[7] = 0.25  # a constant group
    weight[8] = 0
    matrix = PackedMatrix(fmt, 33, 256)
    matrix.pack(0, weight)
    groups, found = weight.unflatten(1, (-1, 32)), all_rows(matrix).unflatten(1, (-1, 32))
    span = groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)
    limit = groups.abs().amax(-1, keepdim=True)
    if fmt == "int4":  # the least squares grid may cut off the ends; its mean error cannot exceed the plain grid's
        plain = span / levels
        error = (found - groups).square().mean(-1, keepdim=True).sqrt()
        assert (error <= plain / 2 + limit * 2**-11).all()
    else:
        step = 2 * limit / levels
        clipped = step if fmt == "int4_sym" else step / 2  # 7 of -8 .. 7 is one step short of the other end
        assert ((found - groups).abs() <= clipped + limit * 2**-10).all()
    assert_close(found[8], groups[8], rtol=0, atol=0)
    assert_close(found[7], groups[7], rtol=1e-3 if fmt != "int4_sym" else 0.13, atol=0)


@pytest.mark.parametrize("fmt", FORMATS)
def test_products(isa: str, num_threads: int, fmt: str) -> None:
    for out_features, in_features in shapes(fmt):
        matrix = packed(fmt, out_features, in_features)
        weight = all_rows(matrix).double()
        x = randn(23, in_features)
        x[5] = 0
        x[6, : in_features // 2] *= 1e-38  # a whole group below the smallest scale counts as zero
        if isa == "amx" and fmt in NIBBLES:  # rounds rows and columns as a whole; see exact_product
            integers, scales, weight = exact_integers(matrix, x)
            seen = integers.double() * scales[:, None].double()
        else:
            seen = (x if fmt in FLOATS else reference.round_activations(x, 4 if fmt in NIBBLES else 8)).double()
        bias, residual = randn(out_features, seed=1), randn(23, out_features, seed=2)
        for kwargs in ({}, {"bias": bias}, {"residual": residual}, {"bias": bias, "residual": residual}):
            wanted = reference.linear(seen, weight, *_as_double(kwargs), None)
            size = seen.abs() @ weight.abs().T + 1
            # Rounding of a chain of additions: far below its worst case, depth * 2^-24.
            assert ((multiply(matrix, x, **kwargs) - wanted).abs() <= size * 1e-6).all(), (out_features, in_features)


def exact_integers(matrix: PackedMatrix, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `amx` sees beside 4-bit weights: x as integers [rows, k] with a scale a row, weights [out, k] as doubles."""
    _, integers, scales, weight, steps = _exact_operands(matrix, x)
    return integers, scales, weight.double() * steps[:, None].double()


def exact_product(matrix: PackedMatrix, x: torch.Tensor) -> torch.Tensor:
    """`amx` beside 4-bit weights, bit by bit: exact sums of integers, rounded at the end."""
    is_finite, integers, scales, weight, steps = _exact_operands(matrix, x)
    sums = integers @ weight.T
    rounded = ((sums >> 16).float().double() * 65536 + (sums & 0xFFFF)).float()
    return (rounded * steps * scales[:, None]).masked_fill(~is_finite, torch.nan)


def _exact_operands(matrix: PackedMatrix, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    limit = x.abs().amax(1)
    largest, some = torch.tensor(32512.0), limit > 1e-33
    steps_of_x = (x * torch.where(some, largest / limit, 0.0)[:, None]).round()
    high = ((steps_of_x + 128) / 256).floor()
    integers = torch.nan_to_num(256 * high + (steps_of_x - 256 * high).clamp(min=-127)).long()
    scales = torch.where(some, limit / largest, 0.0)

    codes, scale, offset = _nibbles(matrix)
    bound = scale.abs().amax(1).double() * (8 if offset is None else 15)
    bound = (bound if offset is None else bound + offset.abs().amax(1).double()).float()
    largest, some = torch.tensor(32000.0), bound > 1e-33
    inverse = torch.where(some, largest / bound, 0.0)[:, None]
    scale = (scale * inverse).round().long()
    offset = -8 * scale if offset is None else (offset * inverse).round().long()
    weight = (scale[..., None] * codes + offset[..., None]).flatten(1)
    is_finite = x.isfinite().all(1)[:, None] & bound.isfinite()[None, :]
    return is_finite, integers, scales, weight, torch.where(some, bound / largest, 0.0)


def _nibbles(matrix: PackedMatrix) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Codes [out, groups, 32], scales and mins [out, groups] of the packed bytes (csrc/cpu/linear_format.h)."""
    num_rows, num_groups = matrix.out_features, matrix.in_features // 32
    panels = matrix.data.numpy().view(np.uint8).reshape((num_rows + 15) // 16, -1)
    packed_codes = panels[:, : num_groups * 256].reshape(-1, num_groups, 4, 16, 4)
    codes = np.stack([packed_codes & 15, packed_codes >> 4], axis=-2).transpose(0, 3, 1, 2, 4, 5)
    dtype = np.dtype(np.float32 if matrix.format == "int4_f32" else np.float16)
    count = 1 if matrix.format == "int4_sym" else 2
    size = num_groups * count * 16 * dtype.itemsize
    blocks = np.ascontiguousarray(panels[:, num_groups * 256 :][:, :size]).view(dtype)
    scales = blocks.reshape(-1, num_groups, count, 16).transpose(2, 0, 3, 1).reshape(count, -1, num_groups)
    scales = torch.from_numpy(scales[:, :num_rows].astype(np.float32))
    codes = torch.from_numpy(codes.reshape(-1, num_groups, 32)[:num_rows].astype(np.int64))
    return codes, scales[0], scales[1] if count == 2 else None


@pytest.fixture
def amx() -> Iterator[None]:
    if not (native.available() and "amx" in native.available_isas()):
        pytest.skip("needs a CPU with AMX")
    native.select_isa("amx")
    yield
    native.select_isa(None)


@pytest.mark.parametrize("fmt", NIBBLES)
def test_amx_multiplies_nibbles_as_exact_integers(amx: None, num_threads: int, fmt: str) -> None:
    for out_features, in_features in ((37, 32), (100, 96), (50, 576), (64, 1536)):
        if fmt in FILE_ONLY:
            in_features = (in_features + 255) // 256 * 256
        matrix, x = packed(fmt, out_features, in_features), randn(70, in_features)
        x[3] *= 1e-35
        x[4] = 0
        x[5, 7] = 1e4  # one number far above the others of its row
        x[6, 1], x[7, in_features - 1] = torch.nan, -torch.inf
        wanted = exact_product(matrix, x)
        assert wanted[[0, 5]].isfinite().all() and not wanted[[6, 7]].isfinite().any()
        for rows in (1, 2, 3, 4, 5, 8, 16, 17, 32, 33, 70):
            for first in {0, 70 - rows}:
                part = slice(first, first + rows)
                assert_close(multiply(matrix, x[part]), wanted[part], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("fmt", ["int4", "int4_sym"])
def test_amx_sees_each_column_for_itself(amx: None, fmt: str) -> None:
    weight = randn(40, 96)
    weight[3] = 0
    weight[4] *= 1e-3  # has steps of its own
    weight[5, :32] *= 1e-2  # a group far below the others of its column
    matrix = PackedMatrix(fmt, 40, 96)
    matrix.pack(0, weight)
    spoiled = PackedMatrix(fmt, 40, 96)
    spoiled.pack(0, weight)
    first_scale = spoiled.data.numpy().view(np.uint8)[3 * 256 :].view(np.uint16)  # of the first panel
    first_scale[7], first_scale[8] = 0x7C00, 0x7E00  # inf and NaN in two columns
    x = randn(20, 96)
    exact = x.double() @ all_rows(matrix).double().T
    for rows in (1, 20):
        found, bad = multiply(matrix, x[:rows]), multiply(spoiled, x[:rows])
        assert torch.equal(found, exact_product(matrix, x[:rows]))
        assert not found[:, 3].any()
        error = (found - exact[:rows]).norm(dim=0) / exact[:rows].norm(dim=0).clamp(min=1e-30)
        assert (error[[0, 4, 5]] < 1e-3).all()
        assert bad[:, [7, 8]].isnan().all()
        others = [column for column in range(40) if column not in (7, 8)]
        assert torch.equal(bad[:, others], found[:, others])


def _as_double(kwargs: dict[str, torch.Tensor]) -> list[torch.Tensor | None]:
    return [kwargs[name].double() if name in kwargs else None for name in ("bias", "residual")]


@pytest.mark.parametrize("fmt", ["int8", "int4", *FILE_ONLY])
def test_rounding_activations_costs_next_to_nothing(isa: str, fmt: str) -> None:
    """The bounds the documentation states, on normally distributed activations: 0.005 % of the norm of the product, and
    0.05 % beside 4-bit weights."""
    matrix = packed(fmt, 256, 1536)
    x = randn(20, 1536)
    exact = x.double() @ all_rows(matrix).double().T
    error = (multiply(matrix, x) - exact).norm() / exact.norm()
    assert error < (5e-4 if fmt.startswith("int4") else 5e-5)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_row_gets_the_same_bits_in_any_batch(isa: str, num_threads: int, fmt: str) -> None:
    matrix = packed(fmt, 150, 256)
    x, bias, residual = randn(203, 256), randn(150, seed=1), randn(203, 150, seed=2)
    together = multiply(matrix, x, bias=bias, residual=residual)
    for size in (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 22, 25, 97, 200):
        for first in (0, 203 - size):
            part = slice(first, first + size)
            assert torch.equal(multiply(matrix, x[part], bias=bias, residual=residual[part]), together[part])


@pytest.mark.parametrize("fmt", FORMATS)
def test_any_number_of_threads_gives_the_same_bits(isa: str, fmt: str) -> None:
    matrix = packed(fmt, 2100, 256)
    x = randn(9, 256)
    before = native.num_threads()
    try:
        native.set_num_threads(1)
        wanted = multiply(matrix, x)
        for count in (2, 5):
            native.set_num_threads(count)
            assert torch.equal(multiply(matrix, x), wanted)
            assert torch.equal(multiply(matrix, x[:1]), wanted[:1])
    finally:
        native.set_num_threads(before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("fmt", FORMATS)
def test_nan_and_inf_spoil_their_own_row_and_no_other(isa: str, fmt: str, bad: float) -> None:
    matrix = packed(fmt, 40, 256)
    x = randn(30, 256)
    clean = multiply(matrix, x)
    x[4, 0] = x[9, 255] = bad
    y = multiply(matrix, x)
    assert not y[[4, 9]].isfinite().any()
    others = [row for row in range(30) if row not in (4, 9)]
    assert torch.equal(y[others], clean[others])


def test_instruction_sets_with_fused_multiply_add_agree_bit_for_bit() -> None:
    """But for `amx` beside 4-bit weights, where it has an arithmetic of its own."""
    fused = ("avx2", "avx512", "amx")
    fused = tuple(name for name in fused if native.available() and name in native.available_isas())
    if len(fused) < 2:
        pytest.skip("needs AVX2 and AVX-512 on one machine")
    x = randn(29, 512)
    try:
        for fmt in FORMATS:
            results = []
            for name in fused:
                native.select_isa(name)
                matrix = packed(fmt, 100, 512)
                results.append((matrix.data, multiply(matrix, x)))
            for name, other in zip(fused[1:], results[1:], strict=True):
                assert torch.equal(results[0][0], other[0]), f"{fmt}: packed bytes"
                if name == "amx" and fmt in NIBBLES:
                    assert (other[1] - results[0][1]).norm() < 1e-3 * other[1].norm(), f"{fmt}: products"
                else:
                    assert torch.equal(results[0][1], other[1]), f"{fmt}: products"
    finally:
        native.select_isa(None)


@pytest.mark.parametrize("fmt", ["bfloat16", "int8"])
def test_strided_rows_slices_of_outputs_and_in_place_residuals(isa: str, fmt: str) -> None:
    matrix = packed(fmt, 37, 64)
    wide, target = randn(9, 100), torch.zeros(9, 60)
    x = wide[:, 10:74]
    wanted = multiply(matrix, x.contiguous())
    cpu.linear(x, matrix, None, None, target[:, 20:57])
    assert torch.equal(target[:, 20:57], wanted)
    assert not target[:, :20].any() and not target[:, 57:].any()
    residual = randn(9, 37, seed=3)
    sum_of_both = multiply(matrix, x, residual=residual)
    cpu.linear(x, matrix, None, residual, residual)
    assert torch.equal(residual, sum_of_both)


def test_no_rows(isa: str) -> None:
    assert multiply(packed("int4", 32, 64), randn(0, 64)).shape == (0, 32)


def test_ops_takes_dense_weights_too() -> None:
    x, weight = randn(3, 8), randn(5, 8)
    assert_close(ops.linear(x, weight, residual=torch.ones(3, 5)), x @ weight.T + 1)
    assert torch.equal(ops.linear_rows(weight, torch.tensor([4, 0])), weight[[4, 0]])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: PackedMatrix("int4", 8, 48), "multiple of 32"),
        (lambda: PackedMatrix("float32", 0, 48), "0 x 48"),
        (lambda: PackedMatrix("int4", 8, 32).pack(7, randn(2, 32)), "rows 7 to 9"),
        (lambda: PackedMatrix("int4_f32", 8, 32).pack(0, randn(2, 32)), "GGUF rows only"),
        (lambda: PackedMatrix("int4", 8, 32).pack_ggml(0, np.zeros((1, 34), np.uint8), 8), "does not go into"),
        (lambda: PackedMatrix("int8", 8, 64).pack_ggml(0, np.zeros((1, 34), np.uint8), 8), "do not hold 64"),
        (lambda: all_rows_of(PackedMatrix("int8", 8, 64), [0, 8]), "row_ids"),
        (lambda: multiply(PackedMatrix("int8", 8, 64), randn(2, 32)), "last dimension"),
    ],
)
def test_refusals(call, message: str) -> None:
    if not native.available():
        pytest.skip("the native library is not built in this environment")
    with pytest.raises(ValueError, match=message):
        call()


def all_rows_of(matrix: PackedMatrix, ids: list[int]) -> torch.Tensor:
    return cpu.linear_rows(matrix, torch.tensor(ids), None)
