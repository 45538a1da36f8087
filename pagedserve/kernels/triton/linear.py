"""Products with matrices of 8- and 4-bit codes, which stay packed: with few rows a product is the reading of them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagedserve.kernels.grouped import GROUP, GroupedMatrix
from pagedserve.kernels.triton.arithmetic import dot, narrow
from pagedserve.kernels.triton.variants import Launch, Variant, type_name

# With more rows than this the matrix is dequantised once, and the product is the library's.
MAX_ROWS = 64
_COLUMNS = 1024  # of a row that a program dequantises


@triton.jit(do_not_specialize=["num_rows"])
def grouped_linear_kernel(
    out,  # [num_rows, OUT]
    x,  # [num_rows, IN]
    codes, scales, offsets,  # a GroupedMatrix [OUT, IN]
    bias,  # [OUT] or None
    residual,  # [num_rows, OUT] or None
    num_rows, out_stride, x_stride, residual_stride,
    OUT: tl.constexpr, IN: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(OUT / COLUMNS), ceil(num_rows / ROWS)). DEPTH: codes of 8 bits, or bytes of two of 4 bits, at once."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_column, is_row = columns < OUT, rows < num_rows
    depth = tl.arange(0, DEPTH)
    PER_ROW: tl.constexpr = IN if offsets is None else IN // 2  # bytes
    PER_GROUP: tl.constexpr = GROUP if offsets is None else GROUP // 2
    x_rows = x + (rows.to(tl.int64) * x_stride)[:, None]
    code_rows = codes + (columns.to(tl.int64) * PER_ROW)[None, :]
    scale_rows = (columns.to(tl.int64) * (IN // GROUP))[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, PER_ROW, DEPTH):
        places = start + depth
        is_inside = places < PER_ROW
        mask = is_inside[:, None] & is_column[None, :]
        code = tl.load(code_rows + places[:, None], mask=mask, other=0)
        groups = scale_rows + (places // PER_GROUP)[:, None]
        scale = tl.load(scales + groups, mask=mask, other=0.0).to(tl.float32)
        x_mask = is_row[:, None] & is_inside[None, :]
        if offsets is None:
            weight = narrow(code.to(tl.float32) * scale, x.dtype.element_ty)
            part = tl.load(x_rows + places[None, :], mask=x_mask, other=0.0)
            total = dot(part, weight, total, x.dtype.element_ty)
        else:
            offset = tl.load(offsets + groups, mask=mask, other=0.0).to(tl.float32)
            lower = narrow((code & 15).to(tl.float32) * scale + offset, x.dtype.element_ty)
            upper = narrow((code >> 4).to(tl.float32) * scale + offset, x.dtype.element_ty)
            first = places // PER_GROUP * GROUP + places % PER_GROUP
            part = tl.load(x_rows + first[None, :], mask=x_mask, other=0.0)
            total = dot(part, lower, total, x.dtype.element_ty)
            part = tl.load(x_rows + (first + GROUP // 2)[None, :], mask=x_mask, other=0.0)
            total = dot(part, upper, total, x.dtype.element_ty)
    if bias is not None:
        total += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    mask = is_row[:, None] & is_column[None, :]
    if residual is not None:
        before = residual + (rows.to(tl.int64) * residual_stride)[:, None] + columns[None, :]
        total += tl.load(before, mask=mask, other=0.0).to(tl.float32)
    to = out + (rows.to(tl.int64) * out_stride)[:, None] + columns[None, :]
    tl.store(to, narrow(total, out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_matrix_rows"])
def dequantize_kernel(
    out,  # [num_rows, IN]
    codes, scales, offsets,  # a GroupedMatrix [num_matrix_rows, IN]
    row_ids,  # int64 [num_rows]; None: all in order
    num_matrix_rows, out_stride,
    IN: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (num_rows, ceil(IN / BLOCK))."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = row
    if row_ids is not None:
        source = tl.load(row_ids + row)
    # As in embeddings: an id that is not there costs its own row.
    known = tl.where((source >= 0) & (source < num_matrix_rows), IN, 0)
    scale = tl.load(scales + source * (IN // GROUP) + places // GROUP, mask=places < known, other=float("nan"))
    if offsets is None:
        code = tl.load(codes + source * IN + places, mask=places < known, other=0)
        values = code.to(tl.float32) * scale.to(tl.float32)
    else:
        HALF: tl.constexpr = GROUP // 2
        place = source * (IN // 2) + places // GROUP * HALF + places % HALF
        code = tl.load(codes + place, mask=places < known, other=0)
        code = (code >> ((places % GROUP) // HALF * 4).to(tl.uint8)) & 15
        offset = tl.load(offsets + source * (IN // GROUP) + places // GROUP, mask=places < known, other=0.0)
        values = code.to(tl.float32) * scale.to(tl.float32) + offset.to(tl.float32)
    tl.store(out + row * out_stride + places, narrow(values, out.dtype.element_ty), mask=places < IN)


def grouped_linear(
    out: torch.Tensor,  # [num_rows, out_features], filled; may be the residual
    x: torch.Tensor,  # [num_rows, in_features]
    weight: GroupedMatrix,
    bias: torch.Tensor | None,  # [out_features]
    residual: torch.Tensor | None,  # [num_rows, out_features]
) -> Launch:
    num_rows = x.shape[0]
    out_features, in_features = weight.shape
    rows = min(64, max(16, triton.next_power_of_2(max(1, num_rows))))
    # Narrow tiles where wide ones would leave multiprocessors idle.
    columns = 64 if out_features >= 64 * 256 else 32
    return Launch(
        kernel=grouped_linear_kernel,
        grid=(triton.cdiv(out_features, columns), triton.cdiv(num_rows, rows)),
        arguments={
            "out": out,
            "x": x,
            "codes": weight.codes,
            "scales": weight.scales,
            "offsets": weight.offsets,
            "bias": bias,
            "residual": residual,
            "num_rows": num_rows,
            "out_stride": out.stride(0),
            "x_stride": x.stride(0),
            "residual_stride": 0 if residual is None else residual.stride(0),
        },
        constexprs={
            "OUT": out_features,
            "IN": in_features,
            "GROUP": GROUP,
            "ROWS": rows,
            "COLUMNS": columns,
            "DEPTH": 128 if weight.bits == 8 else 64,
        },
        num_warps=4 if rows <= 32 else 8,
        num_stages=4,
    )


def dequantize(out: torch.Tensor, weight: GroupedMatrix, row_ids: torch.Tensor | None) -> Launch:
    """Fills out [num_rows, in_features] with the rows named, or with all."""
    in_features = weight.shape[1]
    block = min(_COLUMNS, triton.next_power_of_2(in_features))
    return Launch(
        kernel=dequantize_kernel,
        grid=(out.shape[0], triton.cdiv(in_features, block)),
        arguments={
            "out": out,
            "codes": weight.codes,
            "scales": weight.scales,
            "offsets": weight.offsets,
            "row_ids": row_ids,
            "num_matrix_rows": weight.shape[0],
            "out_stride": out.stride(0),
        },
        constexprs={"IN": in_features, "GROUP": GROUP, "BLOCK": block},
    )


def variants() -> list[Variant]:
    found = []
    for bits in (8, 4):
        for dtype, num_rows, out_features, in_features in (
            (torch.bfloat16, 1, 4096, 4096),
            (torch.bfloat16, 64, 28672, 4096),
            (torch.float16, 1, 4096, 14336),
        ):
            x = torch.empty(num_rows, in_features, dtype=dtype, device="meta")
            out = torch.empty(num_rows, out_features, dtype=dtype, device="meta")
            scales = torch.empty(out_features, in_features // GROUP, dtype=torch.float16, device="meta")
            codes = torch.empty(
                out_features, in_features * bits // 8, dtype=torch.int8 if bits == 8 else torch.uint8, device="meta"
            )
            weight = GroupedMatrix(codes, scales, None if bits == 8 else scales)
            name = f"w{bits}-{type_name(dtype)}-{num_rows}x{out_features}x{in_features}"
            launch = grouped_linear(out, x, weight, None, None)
            found.append(launch.variant(f"linear_{name}", representative=dtype is torch.bfloat16 and num_rows == 1))
            if num_rows == 64:
                whole = torch.empty(out_features, in_features, dtype=dtype, device="meta")
                found.append(dequantize(whole, weight, None).variant(f"dequantize_{name}"))
                row_ids = torch.empty(num_rows, dtype=torch.int64, device="meta")
                found.append(dequantize(whole[:num_rows], weight, row_ids).variant(f"rows_{name}"))
    return found
