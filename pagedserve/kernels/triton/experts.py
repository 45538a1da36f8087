"""`ops.experts`: tokens sorted by expert on the device, and two products over groups of rows of one expert.

A grid has as many programs as the worst division of rows among experts could need; each finds its expert from where the
experts' rows begin, and those left over end at once. So nothing waits to learn how many tokens an expert has.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagedserve.kernels.triton.arithmetic import dot, narrow
from pagedserve.kernels.triton.elementwise import activate
from pagedserve.kernels.triton.variants import Launch, Variant, type_name

_COMBINED = 1024  # numbers of a token that a program adds up
_ROWS = 16384  # rows of chosen experts worked on at a time: bounds memory


@triton.jit
def _group(starts, NUM_EXPERTS: tl.constexpr, E_BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """The expert of this program's rows, the first of them, and where the expert's rows end."""
    experts = tl.arange(0, E_BLOCK)
    begin = tl.load(starts + experts, mask=experts < NUM_EXPERTS, other=0)
    end = tl.load(starts + experts + 1, mask=experts < NUM_EXPERTS, other=0)
    num_groups = (end - begin + ROWS - 1) // ROWS
    groups_end = tl.cumsum(num_groups, 0)
    program = tl.program_id(0)
    expert = tl.sum((groups_end <= program).to(tl.int32), 0)
    is_mine = experts == expert
    before = tl.sum(tl.where(is_mine, groups_end - num_groups, 0), 0)
    first = tl.sum(tl.where(is_mine, begin, 0), 0) + (program - before) * ROWS
    # Beyond the last group no expert is found, and the rows end before they begin.
    return expert.to(tl.int64), first, tl.sum(tl.where(is_mine, end, 0), 0)


@triton.jit
def gate_up_kernel(
    hidden,  # [num_rows, SIZE], rows in the order of their experts
    x,  # [num_tokens, HIDDEN]
    gate_up,  # [NUM_EXPERTS, 2 * SIZE, HIDDEN]
    order,  # int64 [num_rows]: token * TOP_K + rank of each row
    starts,  # int32 [NUM_EXPERTS + 1]
    x_stride,
    HIDDEN: tl.constexpr, SIZE: tl.constexpr, NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, KIND: tl.constexpr,
    E_BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    expert, first, end = _group(starts, NUM_EXPERTS, E_BLOCK, ROWS)
    if first >= end:
        return
    rows = first + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    tokens = tl.load(order + rows, mask=rows < end, other=0) // TOP_K
    x_pointers = x + (tokens * x_stride)[:, None] + depth[None, :]
    gates = gate_up + expert * (2 * SIZE * HIDDEN) + (columns * HIDDEN)[None, :] + depth[:, None]
    gate = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, HIDDEN, DEPTH):
        inside = start + depth < HIDDEN
        part = tl.load(x_pointers + start, mask=(rows < end)[:, None] & inside[None, :], other=0.0)
        mask = (columns < SIZE)[None, :] & inside[:, None]
        gate = dot(part, tl.load(gates + start, mask=mask, other=0.0), gate, x.dtype.element_ty)
        up = dot(part, tl.load(gates + SIZE * HIDDEN + start, mask=mask, other=0.0), up, x.dtype.element_ty)
    mask = (rows < end)[:, None] & (columns < SIZE)[None, :]
    to = hidden + (rows.to(tl.int64) * SIZE)[:, None] + columns[None, :]
    tl.store(to, narrow(activate(gate, KIND) * up, hidden.dtype.element_ty), mask=mask)


@triton.jit
def down_kernel(
    found,  # fp32 [num_rows, HIDDEN], in the order of tokens
    hidden,  # [num_rows, SIZE], in the order of experts
    down,  # [NUM_EXPERTS, HIDDEN, SIZE]
    order, starts,
    HIDDEN: tl.constexpr, SIZE: tl.constexpr, NUM_EXPERTS: tl.constexpr,
    E_BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    expert, first, end = _group(starts, NUM_EXPERTS, E_BLOCK, ROWS)
    if first >= end:
        return
    rows = first + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    parts = hidden + (rows.to(tl.int64) * SIZE)[:, None] + depth[None, :]
    weights = down + expert * (HIDDEN * SIZE) + (columns * SIZE)[None, :] + depth[:, None]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, SIZE, DEPTH):
        inside = start + depth < SIZE
        part = tl.load(parts + start, mask=(rows < end)[:, None] & inside[None, :], other=0.0)
        weight = tl.load(weights + start, mask=(columns < HIDDEN)[None, :] & inside[:, None], other=0.0)
        total = dot(part, weight, total, hidden.dtype.element_ty)
    places = tl.load(order + rows, mask=rows < end, other=0)
    mask = (rows < end)[:, None] & (columns < HIDDEN)[None, :]
    tl.store(found + (places * HIDDEN)[:, None] + columns[None, :], total, mask=mask)


@triton.jit
def combine_kernel(
    out, found, weights, out_stride, HIDDEN: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for rank in range(TOP_K):
        part = tl.load(found + (token * TOP_K + rank) * HIDDEN + columns, mask=columns < HIDDEN, other=0.0)
        total += tl.load(weights + token * TOP_K + rank) * part
    tl.store(out + token * out_stride + columns, narrow(total, out.dtype.element_ty), mask=columns < HIDDEN)


def _tile(num_rows: int, num_experts: int, depth: int) -> tuple[dict[str, int], dict[str, int]]:
    """Tile and warps for so many rows: as tall as an expert's rows are on average."""
    rows = min(128, max(16, triton.next_power_of_2(triton.cdiv(num_rows, num_experts))))
    tile = {
        "E_BLOCK": triton.next_power_of_2(num_experts),
        "ROWS": rows,
        "COLUMNS": 64,
        "DEPTH": min(64, max(16, triton.next_power_of_2(depth))),
    }
    return tile, {"num_warps": 8 if rows == 128 else 4, "num_stages": 3}


def launches(
    out: torch.Tensor,  # [num_tokens, hidden], filled
    x: torch.Tensor,  # [num_tokens, hidden], rows contiguous
    weights: torch.Tensor,  # fp32 [num_tokens, top_k]
    order: torch.Tensor,  # int64 [num_tokens * top_k]: token * top_k + rank, sorted by expert
    starts: torch.Tensor,  # int32 [num_experts + 1]: where each expert's rows begin in `order`
    gate_up: torch.Tensor,  # [num_experts, 2 * size, hidden]
    down: torch.Tensor,  # [num_experts, hidden, size]
    kind: str,
) -> tuple[Launch, ...]:
    num_experts, hidden_size, size = down.shape
    num_tokens, top_k = weights.shape
    num_rows = num_tokens * top_k
    hidden = torch.empty(num_rows, size, dtype=x.dtype, device=x.device)
    found = torch.empty(num_rows, hidden_size, dtype=torch.float32, device=x.device)
    shape = {"HIDDEN": hidden_size, "SIZE": size, "NUM_EXPERTS": num_experts}
    up_tile, up_options = _tile(num_rows, num_experts, hidden_size)
    down_tile, down_options = _tile(num_rows, num_experts, size)
    num_groups = min(num_rows, triton.cdiv(num_rows, up_tile["ROWS"]) + num_experts)
    return (
        Launch(
            kernel=gate_up_kernel,
            grid=(num_groups, triton.cdiv(size, up_tile["COLUMNS"])),
            arguments={
                "hidden": hidden,
                "x": x,
                "gate_up": gate_up,
                "order": order,
                "starts": starts,
                "x_stride": x.stride(0),
            },
            constexprs={**shape, "TOP_K": top_k, "KIND": kind, **up_tile},
            **up_options,
        ),
        Launch(
            kernel=down_kernel,
            grid=(num_groups, triton.cdiv(hidden_size, down_tile["COLUMNS"])),
            arguments={"found": found, "hidden": hidden, "down": down, "order": order, "starts": starts},
            constexprs={**shape, **down_tile},
            **down_options,
        ),
        Launch(
            kernel=combine_kernel,
            grid=(num_tokens, triton.cdiv(hidden_size, _COMBINED)),
            arguments={"out": out, "found": found, "weights": weights, "out_stride": out.stride(0)},
            constexprs={"HIDDEN": hidden_size, "TOP_K": top_k, "BLOCK": _COMBINED},
        ),
    )


def experts(
    out: torch.Tensor,  # [num_tokens, hidden], filled
    x: torch.Tensor,  # [num_tokens, hidden], rows contiguous
    weights: torch.Tensor,  # fp32 [num_tokens, top_k], contiguous
    chosen: torch.Tensor,  # int64 [num_tokens, top_k]
    gate_up: torch.Tensor,  # [num_experts, 2 * size, hidden], contiguous
    down: torch.Tensor,  # [num_experts, hidden, size], contiguous
    kind: str,
) -> None:
    numbers = torch.arange(down.shape[0] + 1, device=x.device)
    for part in range(0, len(x), max(1, _ROWS // chosen.shape[1])):
        tokens = slice(part, part + max(1, _ROWS // chosen.shape[1]))
        by_expert, order = chosen[tokens].flatten().sort(stable=True)
        starts = torch.searchsorted(by_expert, numbers).int()
        for launch in launches(out[tokens], x[tokens], weights[tokens], order, starts, gate_up, down, kind):
            launch.run()


def variants() -> list[Variant]:
    found = []
    mixtral, qwen3 = (4096, 14336, 8, 2), (2048, 768, 128, 8)  # hidden, expert size, experts, of a token
    for dtype, num_tokens, (hidden_size, size, num_experts, top_k) in (
        (torch.bfloat16, 16, mixtral),
        (torch.bfloat16, 16, qwen3),
        (torch.bfloat16, 4096, qwen3),
        (torch.float16, 16, qwen3),
    ):
        x = torch.empty(num_tokens, hidden_size, dtype=dtype, device="meta")
        weights = torch.empty(num_tokens, top_k, device="meta")
        order = torch.empty(num_tokens * top_k, dtype=torch.int64, device="meta")
        starts = torch.empty(num_experts + 1, dtype=torch.int32, device="meta")
        gate_up = torch.empty(num_experts, 2 * size, hidden_size, dtype=dtype, device="meta")
        down = torch.empty(num_experts, hidden_size, size, dtype=dtype, device="meta")
        parts = launches(x, x, weights, order, starts, gate_up, down, "silu")
        for launch, part in zip(parts, ("gate_up", "down", "combine"), strict=True):
            name = f"experts_{part}-{type_name(dtype)}-{num_experts}x{size}-{num_tokens}"
            found.append(launch.variant(name, representative=num_tokens == 4096 and part == "gate_up"))
    return found
