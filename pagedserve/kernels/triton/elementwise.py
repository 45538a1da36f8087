"""Activations, gates and in-place arithmetic over rows: one program a row and a stretch of its columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagedserve.kernels.triton.arithmetic import narrow, tanh
from pagedserve.kernels.triton.variants import Launch, Variant, type_name

_BLOCK = 1024
_ROOT_HALF = tl.constexpr(0.7071067811865476)
_ROOT_TWO_OVER_PI = tl.constexpr(0.7978845608028654)


@triton.jit
def activate(x, KIND: tl.constexpr):
    """fp32 x through an activation; NaN stays NaN."""
    if KIND == "silu":
        return x / (1.0 + tl.exp(-x))
    elif KIND == "gelu_erf":
        return 0.5 * x * (1.0 + tl.erf(x * _ROOT_HALF))
    elif KIND == "gelu_tanh":
        return 0.5 * x * (1.0 + tanh((x + 0.044715 * x * x * x) * _ROOT_TWO_OVER_PI))
    else:
        tl.static_assert(KIND == "relu", "unknown activation")
        return tl.where(x < 0, 0.0, x)


@triton.jit
def gated_activation_kernel(out, x, out_stride, x_stride, DIM: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < DIM
    gate = tl.load(x + row * x_stride + columns, mask=mask).to(tl.float32)
    up = tl.load(x + row * x_stride + DIM + columns, mask=mask).to(tl.float32)
    tl.store(out + row * out_stride + columns, narrow(activate(gate, KIND) * up, out.dtype.element_ty), mask=mask)


@triton.jit
def elementwise_kernel(
    out, x, y, out_stride, x_stride, y_stride, factor, DIM: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < DIM
    value = tl.load(x + row * x_stride + columns, mask=mask).to(tl.float32)
    if KIND == "add":
        value += tl.load(y + row * y_stride + columns, mask=mask).to(tl.float32)
    elif KIND == "scale":
        value *= factor
    elif KIND == "soft_cap":
        value = factor * tanh(value / factor)
    else:
        value = activate(value, KIND)
    tl.store(out + row * out_stride + columns, narrow(value, out.dtype.element_ty), mask=mask)


def _shape(dim: int) -> tuple[int, int]:
    """Columns of one program, and its warps: 16 bytes of bf16 a thread."""
    block = min(_BLOCK, triton.next_power_of_2(dim))
    return block, max(1, block // 256)


def gated_activation(
    kind: str,
    x: torch.Tensor,  # [num_tokens, 2 * dim]
    out: torch.Tensor,  # [num_tokens, dim]
) -> Launch:
    num_rows, dim = out.shape
    block, num_warps = _shape(dim)
    return Launch(
        kernel=gated_activation_kernel,
        grid=(num_rows, triton.cdiv(dim, block)),
        arguments={"out": out, "x": x, "out_stride": out.stride(0), "x_stride": x.stride(0)},
        constexprs={"DIM": dim, "KIND": kind, "BLOCK": block},
        num_warps=num_warps,
    )


def elementwise(
    kind: str,  # "add", "scale", "soft_cap", or an activation
    x: torch.Tensor,  # [num_tokens, dim]
    out: torch.Tensor,  # [num_tokens, dim]; may be x
    *,
    y: torch.Tensor | None = None,  # [num_tokens, dim], of "add"
    factor: float = 1.0,  # of "scale" and "soft_cap"
) -> Launch:
    num_rows, dim = x.shape
    block, num_warps = _shape(dim)
    return Launch(
        kernel=elementwise_kernel,
        grid=(num_rows, triton.cdiv(dim, block)),
        arguments={
            "out": out,
            "x": x,
            "y": y,
            "out_stride": out.stride(0),
            "x_stride": x.stride(0),
            "y_stride": 0 if y is None else y.stride(0),
            "factor": float(factor),
        },
        constexprs={"DIM": dim, "KIND": kind, "BLOCK": block},
        num_warps=num_warps,
    )


def variants() -> list[Variant]:
    found = []
    for dtype in (torch.bfloat16, torch.float16):
        name, general = type_name(dtype), dtype is torch.bfloat16
        for dim in (1536, 14336) if general else (14336,):
            x = torch.empty(48, 2 * dim, dtype=dtype, device="meta")
            for kind in ("silu", "gelu_tanh", "gelu_erf"):
                launch = gated_activation(kind, x, x[:, :dim])
                found.append(
                    launch.variant(
                        f"gated_{kind}-{name}-{dim}", representative=general and dim == 14336 and kind == "silu"
                    )
                )
        for kind, dim in (("relu", 20480), ("gelu_tanh", 3072), ("gelu_erf", 20480), ("add", 4096), ("scale", 3584)):
            x = torch.empty(48, dim, dtype=dtype, device="meta")
            launch = elementwise(kind, x, x, y=x if kind == "add" else None)
            found.append(launch.variant(f"{kind}-{name}-{dim}", representative=general and kind == "add"))
    logits = torch.empty(48, 256000, device="meta")
    found.append(elementwise("soft_cap", logits, logits, factor=30.0).variant("soft_cap-fp32"))
    found.append(elementwise("scale", logits, logits, factor=0.5).variant("scale-fp32"))
    return found
