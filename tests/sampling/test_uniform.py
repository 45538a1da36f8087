from __future__ import annotations

import numpy as np
import pytest

from pagedserve.sampling.uniform import outputs, stream_of, uniforms


def test_outputs_are_splitmix64() -> None:
    # The first outputs that the reference implementation (Vigna, splitmix64.c) gives for state 1234567.
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    streams = np.full(5, 1234567, dtype=np.uint64)
    assert outputs(streams, np.arange(5)).tolist() == expected


def test_numbers_lie_in_the_unit_interval_and_are_even() -> None:
    positions = np.arange(4000)
    for seed in (0, 1, 2**63 - 1):
        values = uniforms(np.full(4000, stream_of(seed, 0), dtype=np.uint64), positions)
        assert values.min() >= 0.0 and values.max() < 1.0
        counts = np.histogram(values, bins=20, range=(0.0, 1.0))[0]
        # chi-square with 19 degrees of freedom: 43.8 has probability 0.001
        assert ((counts - 200) ** 2 / 200).sum() < 43.8


def test_first_numbers_of_neighbouring_seeds_and_choices_are_unrelated() -> None:
    by_seed = uniforms(
        np.array([stream_of(s, 0) for s in range(2000)], dtype=np.uint64), np.zeros(2000, dtype=np.int64)
    )
    by_choice = uniforms(
        np.array([stream_of(7, c) for c in range(2000)], dtype=np.uint64), np.zeros(2000, dtype=np.int64)
    )
    for values in (by_seed, by_choice):
        counts = np.histogram(values, bins=20, range=(0.0, 1.0))[0]
        assert ((counts - 100) ** 2 / 100).sum() < 43.8
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.08
    assert len({stream_of(s, c) for s in range(100) for c in range(100)}) == 10_000


@pytest.mark.parametrize("seed", [-1, -(2**63), 0, 2**63 - 1])
def test_every_seed_that_a_client_may_send_gives_a_stream(seed: int) -> None:
    assert 0 <= stream_of(seed, 0) < 2**64
    assert stream_of(seed, 0) == stream_of(seed, 0) != stream_of(seed, 1)
