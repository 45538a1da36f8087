"""What sampling and logprobs are made of: rows of logits in tiles, and thresholds found without a sort.

A threshold is searched on the bits of floats: as integers in the order of the floats they can be halved exactly, so the
threshold that is found is a value of the row, and tokens tied with it stay together.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagedserve.kernels.reference_sampling import LARGEST

TILE = 2048  # tokens that a program of the first pass reads
GROUP = 32  # tokens of which the first pass keeps the largest, where a row asks for its k largest
GROUPS = TILE // GROUP  # of a tile
CAPACITY = 4096  # candidates that a row keeps; with more, the row itself is searched
STEP = 1024  # tokens looked at at once in a search

_LARGEST = tl.constexpr(LARGEST)
SMALLEST_KEY = tl.constexpr(-2139095040)  # of the smallest finite float; that of -inf is one less
_NO_KEY = tl.constexpr(-2147483648)


@triton.jit
def usable(x):
    """NaN counts as -inf, +inf as a huge number."""
    x = tl.where(x == x, x, float("-inf"))
    return tl.where(x == float("inf"), _LARGEST, x)


@triton.jit
def ordered(x):
    """int32 in the order of fp32 x (no NaN); both zeros are one."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def load_scaled(source, places, size, temperature):
    """Logits at `places` below size, usable and divided by the temperature; -inf beyond."""
    return tl.div_rn(usable(tl.load(source + places, mask=places < size, other=float("-inf"))), temperature)


@triton.jit
def group_bound(groups, num_groups, k, GROUPS_BLOCK: tl.constexpr):
    """A key that at least k tokens reach, from the largest of each group: near the k-th largest token's, not above."""
    places = tl.arange(0, GROUPS_BLOCK)
    keys = ordered(tl.load(groups + places, mask=places < num_groups, other=float("-inf")))
    keys = tl.where(places < num_groups, keys, _NO_KEY)
    bound = tl.where(tl.sum((keys >= 0).to(tl.int32), 0) >= k, 0, _NO_KEY)
    # The upper 16 bits; the others would only save a few candidates.
    for i in range(15):
        probe = bound + (1 << (30 - i))
        bound = tl.where(tl.sum((keys >= probe).to(tl.int32), 0) >= k, probe, bound)
    return bound


@triton.jit
def collect(
    candidates, candidate_ids, source, size, tile_maxima, num_tiles, temperature, bound,
    TILE: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Tokens whose key reaches `bound`, in order of id. Returns how many there are, or some number above CAPACITY where
    they are too many. Tiles whose largest stays below are not read."""
    found = 0
    for tile in range(0, num_tiles):
        best = tl.load(tile_maxima + tile)
        if (ordered(best) >= bound) & (found <= CAPACITY):
            places = tile * TILE + tl.arange(0, TILE)
            scaled = load_scaled(source, places, size, temperature)
            keys = ordered(scaled)
            kept = ((keys >= bound) & (places < size)).to(tl.int32)
            to = found + tl.cumsum(kept, 0) - kept
            is_stored = (kept != 0) & (to < CAPACITY)
            tl.store(candidates + to, scaled, mask=is_stored)
            tl.store(candidate_ids + to, places, mask=is_stored)
            found += tl.sum(kept, 0)
    tl.debug_barrier()  # what was stored is read by other threads
    return found


@triton.jit
def measure(source, size, temperature, best, bound, BY_MASS: tl.constexpr, STEP: tl.constexpr):
    """How many numbers of a source reach a key, or the sum of exp(number - best) over them, in fp64."""
    total = tl.zeros([STEP], tl.float64)
    for first in range(0, size, STEP):
        scaled = load_scaled(source, first + tl.arange(0, STEP), size, temperature)
        amount = (tl.exp(scaled - best) if BY_MASS else tl.full([STEP], 1.0, tl.float32)).to(tl.float64)
        total += tl.where(ordered(scaled) >= bound, amount, 0.0)
    return tl.sum(total, 0)


@triton.jit
def largest_threshold(
    source, size, temperature, best, low, high, need, BY_MASS: tl.constexpr, STEP: tl.constexpr
):  # fmt: skip
    """The largest key of low .. high such that what reaches it (see `measure`) is at least `need`; low if none is.

    Each pass over the source tries three keys and leaves a quarter of the range.
    """
    low, high = low.to(tl.int64), high.to(tl.int64)
    while low < high:
        span = high - low
        first_key = low + (span + 3) // 4
        second_key = low + (span + 1) // 2
        third_key = low + (3 * span + 3) // 4
        first = tl.zeros([STEP], tl.float64)
        second = tl.zeros([STEP], tl.float64)
        third = tl.zeros([STEP], tl.float64)
        for start in range(0, size, STEP):
            scaled = load_scaled(source, start + tl.arange(0, STEP), size, temperature)
            keys = ordered(scaled)
            amount = (tl.exp(scaled - best) if BY_MASS else tl.full([STEP], 1.0, tl.float32)).to(tl.float64)
            first += tl.where(keys >= first_key, amount, 0.0)
            second += tl.where(keys >= second_key, amount, 0.0)
            third += tl.where(keys >= third_key, amount, 0.0)
        reaches_first = tl.sum(first, 0) >= need
        reaches_second = tl.sum(second, 0) >= need
        reaches_third = tl.sum(third, 0) >= need
        high = tl.where(
            reaches_third, high, tl.where(reaches_second, third_key, tl.where(reaches_first, second_key, first_key)) - 1
        )
        low = tl.where(
            reaches_third, third_key, tl.where(reaches_second, second_key, tl.where(reaches_first, first_key, low))
        )
    return low.to(tl.int32)


@triton.jit
def pick(masses, before, target, places):
    """The first place whose cumulated mass, after `before`, passes `target`: (it, or 2^31 - 1; the last place with
    any mass, or -1). Only places with mass are found."""
    passed = (before + tl.cumsum(masses, 0) > target) & (masses > 0)
    return tl.min(tl.where(passed, places, 2147483647), 0), tl.max(tl.where(masses > 0, places, -1), 0)


@triton.jit
def draw(source, size, temperature, best, bound, uniform, STEP: tl.constexpr):
    """Inverse CDF at `uniform` of exp(number - best) over the numbers of a source whose key reaches `bound`."""
    target = uniform * measure(source, size, temperature, best, bound, True, STEP)
    before = tl.full([], 0.0, tl.float64)
    found = 2147483647
    last = -1
    for start in range(0, size, STEP):
        places = start + tl.arange(0, STEP)
        scaled = load_scaled(source, places, size, temperature)
        masses = tl.where(ordered(scaled) >= bound, tl.exp(scaled - best), 0.0).to(tl.float64)
        here, last_here = pick(masses, before, target, places)
        found = tl.minimum(found, here)
        last = tl.maximum(last, last_here)
        before += tl.sum(masses, 0)
    # Rounding may leave the last sum below the target.
    return tl.minimum(found, last)
