"""`ops.sample`: one token a row in two launches, by thresholds instead of a sort.

The first pass reads the logits once, a tile a program, and keeps of each tile its largest logit and the mass of its
softmax. The second works on a row at a time: a row without filters chooses a tile and reads that one again; another
bounds from below what its filters could keep, gathers those tokens, and searches the thresholds among them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagedserve.kernels.triton import search
from pagedserve.kernels.triton.search import (
    SMALLEST_KEY,
    collect,
    draw,
    group_bound,
    largest_threshold,
    load_scaled,
    measure,
    ordered,
    pick,
)
from pagedserve.kernels.triton.variants import Launch, Variant


@triton.jit(do_not_specialize=["vocab_size", "num_tiles"])
def tiles_kernel(
    logits,  # fp32 [num_rows, vocab_size]
    temperature,  # fp32 [num_rows], or None: 1
    top_k,  # int64 [num_rows]: whether the row needs `groups`; None: all do
    maxima, first_ids,  # fp32, int32 [num_rows, num_tiles]: the largest scaled logit, the first id that has it
    masses,  # fp64 [num_rows, num_tiles]: sum of exp(scaled logit - the tile's largest)
    groups,  # fp32 [num_rows, num_tiles * GROUPS]: the largest of each group; None: nobody needs it
    vocab_size, num_tiles, logits_stride, GROUPS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Grid (num_rows, num_tiles)."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    within = tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    places = tile * (GROUPS * GROUP) + within
    heat = 1.0
    if temperature is not None:
        heat = tl.load(temperature + row)
        heat = tl.where(heat > 0, heat, 1.0)
    scaled = load_scaled(logits + row * logits_stride, places, vocab_size, heat)
    of_groups = tl.max(scaled, 1)
    best = tl.max(of_groups, 0)
    first = tl.min(tl.min(tl.where(scaled == best, places, 2147483647), 1), 0)
    grown = tl.where(scaled > float("-inf"), tl.exp(scaled - best), 0.0).to(tl.float64)
    to = row * num_tiles + tile
    tl.store(maxima + to, best)
    tl.store(first_ids + to, first)
    tl.store(masses + to, tl.sum(tl.sum(grown, 1), 0))
    if groups is not None:
        is_wanted = True
        if top_k is not None:
            is_wanted = tl.load(top_k + row) > 0
        if is_wanted:
            tl.store(groups + to * GROUPS + tl.arange(0, GROUPS), of_groups)


@triton.jit(do_not_specialize=["vocab_size", "num_tiles"])
def sample_kernel(
    tokens,  # int64 [num_rows]
    logits, temperature, log_min_p, top_k, top_p, uniform, maxima, first_ids, masses, groups,
    candidates, candidate_ids,  # fp32, int32 [num_rows, CAPACITY]
    vocab_size, num_tiles, logits_stride, TILES_BLOCK: tl.constexpr, TILE: tl.constexpr,
    GROUPS: tl.constexpr, GROUPS_BLOCK: tl.constexpr, CAPACITY: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Grid (num_rows,)."""
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, TILES_BLOCK)
    tile_best = tl.load(maxima + row * num_tiles + tiles, mask=tiles < num_tiles, other=float("-inf"))
    best = tl.max(tile_best, 0)
    if best == float("-inf"):
        tl.store(tokens + row, -1)
        return
    heat = tl.load(temperature + row)
    if heat <= 0:
        tile = tl.min(tl.where(tile_best == best, tiles, TILES_BLOCK), 0)
        tl.store(tokens + row, tl.load(first_ids + row * num_tiles + tile).to(tl.int64))
        return

    source = logits + row * logits_stride
    share = tl.load(uniform + row)
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    # A number below which min_p leaves nothing: -inf where there is none.
    smallest = best + tl.load(log_min_p + row)
    tile_mass = tl.load(masses + row * num_tiles + tiles, mask=tiles < num_tiles, other=0.0)
    tile_mass = tl.where(
        tile_best > float("-inf"), tile_mass * tl.exp((tile_best - best).to(tl.float64)), 0.0
    )  # fmt: skip
    total = tl.sum(tile_mass, 0)
    if (k <= 0) & (p >= 1.0) & (smallest == float("-inf")):
        target = share * total
        tile, last = pick(tile_mass, 0.0, target, tiles)
        tile = tl.minimum(tile, last)
        reached = tl.sum(tl.where(tiles < tile, tile_mass, 0.0), 0)
        height = tl.sum(tl.where(tiles == tile, tile_mass, 0.0), 0)
        within = tl.minimum(tl.maximum((target - reached) / height, 0.0), 1.0)
        places = tile * TILE + tl.arange(0, TILE)
        grown = tl.exp(load_scaled(source, places, vocab_size, heat) - best).to(tl.float64)
        token, last = pick(grown, 0.0, within * tl.sum(grown, 0), places)
        tl.store(tokens + row, tl.minimum(token, last).to(tl.int64))
        return

    bound = tl.maximum(ordered(smallest), SMALLEST_KEY)
    if k > 0:
        bound = tl.maximum(bound, group_bound(groups + row * num_tiles * GROUPS, num_tiles * GROUPS, k, GROUPS_BLOCK))
    elif smallest == float("-inf"):
        # All tokens less likely than this have together less than 1 - top_p.
        least = tl.log(((1.0 - p) * total / vocab_size).to(tl.float32)) - 0.001
        bound = tl.maximum(bound, ordered(best + least))
    mine = candidates + row * CAPACITY
    size = collect(
        mine, candidate_ids + row * CAPACITY, source, vocab_size, maxima + row * num_tiles, num_tiles, heat, bound,
        TILE, CAPACITY,
    )  # fmt: skip
    is_gathered = size <= CAPACITY
    if is_gathered:
        source = mine
        heat = 1.0
    else:
        size = vocab_size
        bound = tl.maximum(ordered(smallest), SMALLEST_KEY)
    if k > 0:
        bound = largest_threshold(source, size, heat, best, bound, ordered(best), k.to(tl.float64), False, STEP)
    if p < 1.0:
        if (k > 0) | (smallest > float("-inf")):
            total = measure(source, size, heat, best, bound, True, STEP)
        bound = largest_threshold(source, size, heat, best, bound, ordered(best), p * total, True, STEP)
    token = draw(source, size, heat, best, bound, share, STEP)
    if is_gathered:
        token = tl.load(candidate_ids + row * CAPACITY + token)
    tl.store(tokens + row, token.to(tl.int64))


class Tiles:
    """What the first pass leaves of logits [num_rows, vocab_size], as memory for it to write to."""

    def __init__(self, logits: torch.Tensor, *, with_groups: bool) -> None:
        num_rows, vocab_size = logits.shape
        self.num_tiles = triton.cdiv(vocab_size, search.TILE)
        shape, device = (num_rows, self.num_tiles), logits.device
        self.maxima = torch.empty(shape, dtype=torch.float32, device=device)
        self.first_ids = torch.empty(shape, dtype=torch.int32, device=device)
        self.masses = torch.empty(shape, dtype=torch.float64, device=device)
        self.groups = (
            torch.empty(num_rows, self.num_tiles * search.GROUPS, dtype=torch.float32, device=device)
            if with_groups
            else None
        )

    @property
    def arguments(self) -> dict[str, torch.Tensor | None]:
        return {"maxima": self.maxima, "first_ids": self.first_ids, "masses": self.masses, "groups": self.groups}

    @property
    def constexprs(self) -> dict[str, int]:
        return {
            "TILES_BLOCK": triton.next_power_of_2(self.num_tiles),
            "TILE": search.TILE,
            "GROUPS": search.GROUPS,
            "GROUPS_BLOCK": triton.next_power_of_2(self.num_tiles * search.GROUPS),
            "CAPACITY": search.CAPACITY,
            "STEP": search.STEP,
        }


def first_pass(
    logits: torch.Tensor,  # fp32 [num_rows, vocab_size]
    temperature: torch.Tensor | None,  # fp32 [num_rows]
    top_k: torch.Tensor | None,  # int64 [num_rows]
    tiles: Tiles,
) -> Launch:
    return Launch(
        kernel=tiles_kernel,
        grid=(logits.shape[0], tiles.num_tiles),
        arguments={
            "logits": logits,
            "temperature": temperature,
            "top_k": top_k,
            **tiles.arguments,
            "vocab_size": logits.shape[1],
            "num_tiles": tiles.num_tiles,
            "logits_stride": logits.stride(0),
        },
        constexprs={"GROUPS": search.GROUPS, "GROUP": search.GROUP},
        num_warps=8,
    )


def best_logits(logits: torch.Tensor) -> torch.Tensor:
    """The largest usable logit of each row, fp32 [num_rows]."""
    tiles = Tiles(logits, with_groups=False)
    first_pass(logits, None, None, tiles).run()
    return tiles.maxima.amax(dim=-1)


def sample(
    tokens: torch.Tensor,  # int64 [num_rows], filled
    logits: torch.Tensor,  # fp32 [num_rows, vocab_size]
    temperature: torch.Tensor,  # fp32 [num_rows]
    log_min_p: torch.Tensor,  # fp32 [num_rows], -inf: none
    top_k: torch.Tensor,  # int64 [num_rows]
    top_p: torch.Tensor,  # fp64 [num_rows]
    uniform: torch.Tensor,  # fp64 [num_rows]
) -> tuple[Launch, Launch]:
    num_rows, vocab_size = logits.shape
    tiles = Tiles(logits, with_groups=True)
    second = Launch(
        kernel=sample_kernel,
        grid=(num_rows,),
        arguments={
            "tokens": tokens,
            "logits": logits,
            "temperature": temperature,
            "log_min_p": log_min_p,
            "top_k": top_k,
            "top_p": top_p,
            "uniform": uniform,
            **tiles.arguments,
            "candidates": torch.empty(num_rows, search.CAPACITY, dtype=torch.float32, device=logits.device),
            "candidate_ids": torch.empty(num_rows, search.CAPACITY, dtype=torch.int32, device=logits.device),
            "vocab_size": vocab_size,
            "num_tiles": tiles.num_tiles,
            "logits_stride": logits.stride(0),
        },
        constexprs=tiles.constexprs,
        num_warps=8,
    )
    return first_pass(logits, temperature, top_k, tiles), second


def variants() -> list[Variant]:
    found = []
    for vocab_size in (32000, 128256, 256000):
        logits = torch.empty(48, vocab_size, device="meta")
        floats = torch.empty(48, device="meta")
        ints, doubles = floats.long(), floats.double()
        first, second = sample(ints, logits, floats, floats, ints, doubles, doubles)
        if vocab_size == 128256:
            found.append(first.variant("sample_tiles", representative=True))
        found.append(second.variant(f"sample-{vocab_size}", representative=vocab_size == 128256))
    return found
