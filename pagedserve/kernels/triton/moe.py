"""Mixture of experts: a token's best experts and their weights."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagedserve.kernels.triton.variants import Launch, Variant, type_name


@triton.jit
def route_kernel(
    weights, experts, logits, logits_stride, NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr, BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < NUM_EXPERTS
    row = tl.load(logits + token * logits_stride + columns, mask=inside, other=float("-inf")).to(tl.float32)
    grown = tl.where(inside, tl.exp(row - tl.max(row, 0)), 0.0)
    shares = grown / tl.sum(grown, 0)
    # Integers in the order of the floats; equal zeros become one, NaN comes first, what is chosen or no expert last.
    bits = tl.where(row == 0, 0.0, row).to(tl.int32, bitcast=True)
    keys = tl.where(row == row, bits ^ ((bits >> 31) & 0x7FFFFFFF), 2147483647)
    keys = tl.where(inside, keys, -2147483648)
    places = tl.arange(0, K_BLOCK)
    chosen = tl.zeros([K_BLOCK], tl.int32)
    found = tl.zeros([K_BLOCK], tl.float32)
    for rank in range(TOP_K):
        best = tl.max(keys, 0)
        expert = tl.min(tl.where(keys == best, columns, BLOCK), 0)
        share = tl.sum(tl.where(columns == expert, shares, 0.0), 0)
        chosen = tl.where(places == rank, expert, chosen)
        found = tl.where(places == rank, share, found)
        keys = tl.where(columns == expert, -2147483648, keys)
    if RENORMALIZE:
        found = found / tl.sum(found, 0)
    tl.store(weights + token * TOP_K + places, found, mask=places < TOP_K)
    tl.store(experts + token * TOP_K + places, chosen.to(tl.int64), mask=places < TOP_K)


def route(
    weights: torch.Tensor,  # float32 [num_tokens, top_k]
    experts: torch.Tensor,  # int64 [num_tokens, top_k]
    logits: torch.Tensor,  # [num_tokens, num_experts]
    renormalize: bool,
) -> Launch:
    """Fills `weights` and `experts`."""
    num_tokens, num_experts = logits.shape
    top_k = weights.shape[1]
    return Launch(
        kernel=route_kernel,
        grid=(num_tokens,),
        arguments={"weights": weights, "experts": experts, "logits": logits, "logits_stride": logits.stride(0)},
        constexprs={
            "NUM_EXPERTS": num_experts,
            "TOP_K": top_k,
            "RENORMALIZE": renormalize,
            "BLOCK": triton.next_power_of_2(num_experts),
            "K_BLOCK": triton.next_power_of_2(top_k),
        },
        num_warps=1,
    )


def variants() -> list[Variant]:
    found = []
    for dtype in (torch.bfloat16, torch.float16):
        for num_experts, top_k in ((8, 2), (64, 8), (128, 8)):
            logits = torch.empty(48, num_experts, dtype=dtype, device="meta")
            weights = torch.empty(48, top_k, device="meta")
            launch = route(weights, torch.empty_like(weights, dtype=torch.int64), logits, True)
            name = f"route-{type_name(dtype)}-{num_experts}-{top_k}"
            found.append(launch.variant(name, representative=name == "route-bf16-128-8"))
    return found
