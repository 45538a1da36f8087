"""RMSNorm and LayerNorm of rows, with the residual add that precedes them in one pass over memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagedserve.kernels.triton.arithmetic import narrow
from pagedserve.kernels.triton.variants import Launch, Variant, type_name

_TILE = 2048  # numbers that one program works on, where a row is shorter


@triton.jit
def _row_offsets(rows, NUM_INNER: tl.constexpr, outer_stride, inner_stride):
    """Where rows begin; row r is head r % NUM_INNER of token r // NUM_INNER. int64: a step's tensors pass 2^31."""
    return (rows // NUM_INNER).to(tl.int64) * outer_stride + rows % NUM_INNER * inner_stride


@triton.jit
def _load_sum(x, residual, columns, offsets, mask, residual_stride, rows):
    """Rows of x as fp32; with a residual, residual += x, and the sum as it was rounded."""
    values = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    if residual is not None:
        pointers = residual + (rows.to(tl.int64) * residual_stride)[:, None] + columns[None, :]
        total = narrow(values + tl.load(pointers, mask=mask, other=0.0).to(tl.float32), residual.dtype.element_ty)
        tl.store(pointers, total, mask=mask)
        values = total.to(tl.float32)
    return values


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    out, x, residual, weight, num_rows, out_outer, out_inner, x_outer, x_inner, residual_stride, eps,
    DIM: tl.constexpr, NUM_INNER: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (columns < DIM)[None, :]
    offsets = _row_offsets(rows, NUM_INNER, x_outer, x_inner)[:, None] + columns[None, :]
    values = _load_sum(x, residual, columns, offsets, mask, residual_stride, rows)
    scale = 1.0 / tl.sqrt_rn(tl.sum(values * values, 1) / DIM + eps)
    gain = tl.load(weight + columns, mask=columns < DIM, other=0.0).to(tl.float32)
    normed = values * scale[:, None] * gain[None, :]
    to = _row_offsets(rows, NUM_INNER, out_outer, out_inner)[:, None] + columns[None, :]
    tl.store(out + to, narrow(normed, out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def layer_norm_kernel(
    out, x, residual, weight, bias, num_rows, out_stride, x_stride, residual_stride, eps,
    DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (columns < DIM)[None, :]
    offsets = (rows.to(tl.int64) * x_stride)[:, None] + columns[None, :]
    values = _load_sum(x, residual, columns, offsets, mask, residual_stride, rows)
    # Two passes over registers: the mean of squares less the square of the mean would lose rows far from zero.
    centred = tl.where(mask, values - (tl.sum(values, 1) / DIM)[:, None], 0.0)
    scale = 1.0 / tl.sqrt_rn(tl.sum(centred * centred, 1) / DIM + eps)
    gain = tl.load(weight + columns, mask=columns < DIM, other=0.0).to(tl.float32)
    normed = centred * scale[:, None] * gain[None, :]
    if bias is not None:
        normed += tl.load(bias + columns, mask=columns < DIM, other=0.0).to(tl.float32)[None, :]
    to = (rows.to(tl.int64) * out_stride)[:, None] + columns[None, :]
    tl.store(out + to, narrow(normed, out.dtype.element_ty), mask=mask)


def _tile(dim: int) -> tuple[dict[str, int], int]:
    """The tile of one program for rows of `dim` numbers, and its warps."""
    block = triton.next_power_of_2(dim)
    rows = max(1, min(16, _TILE // block))
    return {"DIM": dim, "ROWS": rows, "BLOCK": block}, min(16, max(1, rows * block // 512))


def rms_norm(
    x: torch.Tensor,  # [num_tokens, dim] or [num_tokens, num_heads, dim]; rows contiguous
    weight: torch.Tensor,  # [dim]
    eps: float,
    residual: torch.Tensor | None,  # [num_tokens, dim]
    out: torch.Tensor,  # like x
) -> Launch:
    num_inner = x.shape[1] if x.dim() == 3 else 1
    num_rows = x.shape[0] * num_inner
    tile, num_warps = _tile(x.shape[-1])
    return Launch(
        kernel=rms_norm_kernel,
        grid=(triton.cdiv(num_rows, tile["ROWS"]),),
        arguments={
            "out": out,
            "x": x,
            "residual": residual,
            "weight": weight,
            "num_rows": num_rows,
            "out_outer": out.stride(0),
            "out_inner": out.stride(1) if num_inner > 1 else 0,
            "x_outer": x.stride(0),
            "x_inner": x.stride(1) if num_inner > 1 else 0,
            "residual_stride": 0 if residual is None else residual.stride(0),
            "eps": eps,
        },
        constexprs={"NUM_INNER": num_inner, **tile},
        num_warps=num_warps,
    )


def layer_norm(
    x: torch.Tensor,  # [num_tokens, dim], rows contiguous
    weight: torch.Tensor,  # [dim]
    bias: torch.Tensor | None,  # [dim]
    eps: float,
    residual: torch.Tensor | None,  # [num_tokens, dim]
    out: torch.Tensor,  # like x
) -> Launch:
    num_rows, dim = x.shape
    tile, num_warps = _tile(dim)
    return Launch(
        kernel=layer_norm_kernel,
        grid=(triton.cdiv(num_rows, tile["ROWS"]),),
        arguments={
            "out": out,
            "x": x,
            "residual": residual,
            "weight": weight,
            "bias": bias,
            "num_rows": num_rows,
            "out_stride": out.stride(0),
            "x_stride": x.stride(0),
            "residual_stride": 0 if residual is None else residual.stride(0),
            "eps": eps,
        },
        constexprs=tile,
        num_warps=num_warps,
    )


def variants() -> list[Variant]:
    found = []
    for dtype in (torch.bfloat16, torch.float16):
        name, general = type_name(dtype), dtype is torch.bfloat16
        for dim in (576, 2048, 4096, 8192) if general else (4096,):
            x = torch.empty(48, dim, dtype=dtype, device="meta")
            for residual in (None, x):
                found.append(
                    rms_norm(x, x[0], 1e-5, residual, x).variant(
                        f"rms_norm-{name}-{dim}" + ("" if residual is None else "-residual"),
                        representative=general and dim == 4096 and residual is not None,
                    )
                )
        for num_heads, dim in ((8, 128), (32, 128), (8, 256)) if general else ((8, 128),):
            x = torch.empty(48, num_heads, dim, dtype=dtype, device="meta")
            launch = rms_norm(x, x[0, 0], 1e-6, None, x)
            found.append(
                launch.variant(f"rms_norm-{name}-{num_heads}x{dim}", representative=general and num_heads == 32)
            )
        for dim in (768, 5120) if general else (5120,):
            x = torch.empty(48, dim, dtype=dtype, device="meta")
            launch = layer_norm(x, x[0], x[0], 1e-5, x, x)
            found.append(launch.variant(f"layer_norm-{name}-{dim}", representative=general and dim == 5120))
    return found
