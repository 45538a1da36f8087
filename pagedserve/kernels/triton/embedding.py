"""Rows of a table by their ids."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagedserve.kernels.triton.arithmetic import narrow
from pagedserve.kernels.triton.variants import Launch, Variant, type_name

_BLOCK = 1024


@triton.jit(do_not_specialize=["num_table_rows"])
def embedding_kernel(
    out, table, row_ids, num_table_rows, out_stride, table_stride, DIM: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row_id = tl.load(row_ids + row)
    # An id that is not there costs its own row, which becomes NaN, and neither the process nor a neighbour.
    known = tl.where((row_id >= 0) & (row_id < num_table_rows), DIM, 0)
    found = tl.load(table + row_id * table_stride + columns, mask=columns < known, other=float("nan"))
    tl.store(out + row * out_stride + columns, narrow(found.to(tl.float32), out.dtype.element_ty), mask=columns < DIM)


def embedding(
    table: torch.Tensor,  # [num_rows, dim], rows contiguous, fp32, bf16 or fp16
    row_ids: torch.Tensor,  # int64 [num_tokens]
    out: torch.Tensor,  # [num_tokens, dim], fp32, bf16 or fp16
) -> Launch:
    num_tokens, dim = out.shape
    block = min(_BLOCK, triton.next_power_of_2(dim))
    return Launch(
        kernel=embedding_kernel,
        grid=(num_tokens, triton.cdiv(dim, block)),
        arguments={
            "out": out,
            "table": table,
            "row_ids": row_ids,
            "num_table_rows": table.shape[0],
            "out_stride": out.stride(0),
            "table_stride": table.stride(0),
        },
        constexprs={"DIM": dim, "BLOCK": block},
        num_warps=max(1, block // 256),
    )


def variants() -> list[Variant]:
    found = []
    for table_dtype, dtype in ((torch.bfloat16,) * 2, (torch.float16,) * 2, (torch.float32, torch.bfloat16)):
        for dim in (576, 4096):
            table = torch.empty(48, dim, dtype=table_dtype, device="meta")
            row_ids = torch.empty(48, dtype=torch.int64, device="meta")
            launch = embedding(table, row_ids, torch.empty_like(table, dtype=dtype))
            name = f"embedding-{type_name(table_dtype)}-{type_name(dtype)}-{dim}"
            found.append(launch.variant(name, representative=(table_dtype, dim) == (torch.bfloat16, 4096)))
    return found
