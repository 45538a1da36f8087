"""`ops.logprobs`: what is reported of a distribution, from raw logits; no log-softmax is written, nothing is sorted."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagedserve.kernels.triton import search
from pagedserve.kernels.triton.sampling import Tiles, first_pass
from pagedserve.kernels.triton.search import (
    collect,
    group_bound,
    largest_threshold,
    load_scaled,
    measure,
    ordered,
)
from pagedserve.kernels.triton.variants import Launch, Variant

_COMPARED = 8192  # pairs of tokens whose order is looked at at once


@triton.jit(do_not_specialize=["vocab_size", "num_tiles", "num_top"])
def logprobs_kernel(
    chosen, ranks,  # fp32, int64 [num_rows]
    top_values, top_ids,  # fp32, int64 [num_rows, num_top], or None
    logits, token_ids, maxima, first_ids, masses, groups, candidates, candidate_ids,
    vocab_size, num_tiles, num_top, logits_stride, TILES_BLOCK: tl.constexpr, TILE: tl.constexpr,
    GROUPS: tl.constexpr, GROUPS_BLOCK: tl.constexpr, CAPACITY: tl.constexpr, STEP: tl.constexpr,
    TOP_BLOCK: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """Grid (num_rows,)."""
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, TILES_BLOCK)
    tile_best = tl.load(maxima + row * num_tiles + tiles, mask=tiles < num_tiles, other=float("-inf"))
    tile_mass = tl.load(masses + row * num_tiles + tiles, mask=tiles < num_tiles, other=0.0)
    best = tl.max(tile_best, 0)
    grown = tl.exp((tile_best - best).to(tl.float64))
    log_total = tl.log(tl.sum(tl.where(tile_best > float("-inf"), tile_mass * grown, 0.0), 0).to(tl.float32))
    source = logits + row * logits_stride
    token = tl.load(token_ids + row)
    is_known = (token >= 0) & (token < vocab_size)
    mine = load_scaled(source, tl.where(is_known, token, vocab_size), vocab_size, 1.0)
    tl.store(chosen + row, mine - best - log_total)
    key = ordered(mine)
    likelier = 0
    for tile in range(0, num_tiles):
        if ordered(tl.load(maxima + row * num_tiles + tile)) > key:
            keys = ordered(load_scaled(source, tile * TILE + tl.arange(0, TILE), vocab_size, 1.0))
            likelier += tl.sum((keys > key).to(tl.int32), 0)
    tl.store(ranks + row, likelier.to(tl.int64) + 1)

    if top_ids is not None:
        candidates += row * CAPACITY
        candidate_ids += row * CAPACITY
        bound = group_bound(groups + row * num_tiles * GROUPS, num_tiles * GROUPS, num_top, GROUPS_BLOCK)
        size = collect(
            candidates,
            candidate_ids,
            source,
            vocab_size,
            maxima + row * num_tiles,
            num_tiles,
            1.0,
            bound,
            TILE,
            CAPACITY,
        )
        is_gathered = size <= CAPACITY
        if is_gathered:
            source = candidates
        else:
            size = vocab_size
        high = ordered(best)
        threshold = largest_threshold(source, size, 1.0, best, bound, high, num_top.to(tl.float64), False, STEP)
        top_values += row * num_top
        top_ids += row * num_top
        # Of those that tie with the last one the first ids are taken.
        num_ties = num_top - measure(source, size, 1.0, best, threshold + 1, False, STEP).to(tl.int32)
        num_taken, num_tied = 0, 0
        for start in range(0, size, STEP):
            places = start + tl.arange(0, STEP)
            scaled = load_scaled(source, places, size, 1.0)
            keys = ordered(scaled)
            ids = places
            if is_gathered:
                ids = tl.load(candidate_ids + places, mask=places < size, other=0)
            tied = ((keys == threshold) & (places < size)).to(tl.int32)
            is_early = num_tied + tl.cumsum(tied, 0) <= num_ties
            taken = (((keys > threshold) | ((tied != 0) & is_early)) & (places < size)).to(tl.int32)
            to = num_taken + tl.cumsum(taken, 0) - taken
            is_taken = (taken != 0) & (to < num_top)
            tl.store(top_values + to, scaled, mask=is_taken)
            tl.store(top_ids + to, ids.to(tl.int64), mask=is_taken)
            num_taken += tl.sum(taken, 0)
            num_tied += tl.sum(tied, 0)
        tl.debug_barrier()
        places = tl.arange(0, TOP_BLOCK)
        values = tl.load(top_values + places, mask=places < num_top, other=float("-inf"))
        ids = tl.load(top_ids + places, mask=places < num_top, other=0)
        keys = ordered(values)
        to = tl.zeros([TOP_BLOCK], tl.int32)
        for start in range(0, num_top, OTHERS):
            others = start + tl.arange(0, OTHERS)
            other_keys = ordered(tl.load(top_values + others, mask=others < num_top, other=float("-inf")))
            is_before = (other_keys[None, :] > keys[:, None]) | (
                (other_keys[None, :] == keys[:, None]) & (others[None, :] < places[:, None])
            )
            to += tl.sum((is_before & (others < num_top)[None, :]).to(tl.int32), 1)
        tl.debug_barrier()
        tl.store(top_values + to, values - best - log_total, mask=places < num_top)
        tl.store(top_ids + to, ids, mask=places < num_top)


def logprobs(
    chosen: torch.Tensor,  # fp32 [num_rows], filled
    ranks: torch.Tensor,  # int64 [num_rows], filled
    top_values: torch.Tensor | None,  # fp32 [num_rows, num_top], filled
    top_ids: torch.Tensor | None,  # int64 [num_rows, num_top], filled
    logits: torch.Tensor,  # fp32 [num_rows, vocab_size]
    token_ids: torch.Tensor,  # int64 [num_rows]
) -> tuple[Launch, Launch]:
    num_rows, vocab_size = logits.shape
    num_top = 0 if top_ids is None else top_ids.shape[1]
    top_block = max(32, triton.next_power_of_2(num_top))
    tiles = Tiles(logits, with_groups=num_top > 0)
    candidates = None if top_ids is None else logits.new_empty(num_rows, search.CAPACITY)
    second = Launch(
        kernel=logprobs_kernel,
        grid=(num_rows,),
        arguments={
            "chosen": chosen,
            "ranks": ranks,
            "top_values": top_values,
            "top_ids": top_ids,
            "logits": logits,
            "token_ids": token_ids,
            **tiles.arguments,
            "candidates": candidates,
            "candidate_ids": None if candidates is None else torch.empty_like(candidates, dtype=torch.int32),
            "vocab_size": vocab_size,
            "num_tiles": tiles.num_tiles,
            "num_top": num_top,
            "logits_stride": logits.stride(0),
        },
        constexprs={
            **tiles.constexprs,
            "TOP_BLOCK": top_block,
            "OTHERS": min(32, max(1, _COMPARED // top_block)),
        },
        num_warps=8,
    )
    return first_pass(logits, None, None, tiles), second


def variants() -> list[Variant]:
    logits = torch.empty(48, 128256, device="meta")
    floats, ids = torch.empty(48, device="meta"), torch.empty(48, dtype=torch.int64, device="meta")
    found = []
    for num_top in (0, 20, 1000):
        values = torch.empty(48, num_top, device="meta") if num_top else None
        first, second = logprobs(floats, ids, values, None if values is None else values.long(), logits, ids)
        found.append(second.variant(f"logprobs-top{num_top}", representative=num_top == 20))
        if num_top == 20:
            found.append(first.variant("logprobs_tiles"))
    return found
