"""One uniform number per drawn token, as a pure function of (seed, choice, position).

SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014) is a counter that is mixed, so the
k-th number of a stream costs the same as the first. No generator state exists: recomputing a sequence after preemption
repeats its draws, and batch mates have nothing to disturb.
"""

from __future__ import annotations

import numpy as np

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15
_CHOICE_GAMMA = 0xD1B54A32D192ED03
_FACTOR_1 = 0xBF58476D1CE4E5B9
_FACTOR_2 = 0x94D049BB133111EB


def stream_of(seed: int, choice_index: int) -> int:
    """The SplitMix64 state from which choice `choice_index` of a request draws; it does not depend on n."""
    return _mix((_mix(seed & _MASK) + (choice_index + 1) * _CHOICE_GAMMA) & _MASK)


def uniforms(streams: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Numbers in [0, 1) with 53 random bits, float64 [num_rows].

    `streams` is uint64 [num_rows]; `positions` int64 [num_rows] counts the tokens drawn before in each stream.
    """
    return (outputs(streams, positions) >> np.uint64(11)) * 2.0**-53


def outputs(streams: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Output number `positions` (0 is the first) of the SplitMix64 generators in state `streams`: uint64 [num_rows]."""
    z = streams + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(_GAMMA)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_FACTOR_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_FACTOR_2)
    return z ^ (z >> np.uint64(31))


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * _FACTOR_1) & _MASK
    z = ((z ^ (z >> 27)) * _FACTOR_2) & _MASK
    return z ^ (z >> 31)
