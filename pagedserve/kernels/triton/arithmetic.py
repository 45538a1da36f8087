"""Arithmetic that has to come out the same on a GPU and under Triton's interpreter.

The interpreter keeps bf16 as uint16 and computes on those bits, truncates where a GPU rounds, and knows no libdevice.
So kernels load narrow floats, make them fp32 at once, and use these for the rest.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagedserve import envs

# Triton decides when it decorates a kernel; so does this, once, in the same process.
INTERPRETED = tl.constexpr(envs.triton_interpreted())


@triton.jit
def dot(a, b, acc, DTYPE: tl.constexpr):
    """acc + a @ b in fp32, the operands brought to DTYPE first. Products of fp32 are as exact as fp32 (no TF32)."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    elif DTYPE == tl.float32:
        return tl.dot(a.to(DTYPE), b.to(DTYPE), acc, input_precision="tf32x3")
    else:
        return tl.dot(a.to(DTYPE), b.to(DTYPE), acc)


@triton.jit
def narrow(x, DTYPE: tl.constexpr):
    """fp32 x in DTYPE, rounded to nearest, ties to even."""
    if INTERPRETED and DTYPE == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        rounded = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
        return tl.where(x == x, rounded, x).to(tl.bfloat16)
    else:
        return x.to(DTYPE)


@triton.jit
def tanh(x):
    """tanh of fp32 x by exp; saturates, never overflows."""
    grown = tl.exp(-2.0 * tl.abs(x))
    magnitude = (1.0 - grown) / (1.0 + grown)
    # Near zero the difference has few digits left; the series has all.
    y = x * x
    series = x * (1.0 - y * (0.33333333 - y * (0.13333334 - y * (0.053968254 - y * 0.021869488))))
    return tl.where(y < 0.0625, series, tl.where(x < 0, -magnitude, magnitude))


@triton.jit
def round_half_even(x):
    """fp32 x, |x| < 2^22, as the nearest integer, ties to even (1.5 * 2^23 leaves no bits for a fraction)."""
    return (x + 12582912.0) - 12582912.0
