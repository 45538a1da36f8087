"""Circles in outputs: found at the token that closes them, whatever the pieces they come in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedserve.engine.repetition import RepetitionDetector
from pagedserve.sampling_params import RepetitionDetection


def expected(ids: list[int], rule: RepetitionDetection) -> int | None:
    """By definition: the shortest beginning that ends in min_count copies of a pattern."""
    for end in range(1, len(ids) + 1):
        for size in range(rule.min_pattern_size, rule.max_pattern_size + 1):
            tail = ids[max(end - size * rule.min_count, 0) : end]
            if len(tail) == size * rule.min_count and tail == tail[:size] * rule.min_count:
                return end
    return None


@given(
    st.lists(st.integers(0, 2), max_size=60),
    st.integers(1, 6),
    st.integers(1, 6),
    st.integers(2, 4),
    st.lists(st.integers(1, 7)),
)
def test_circles_are_found_as_defined(ids: list[int], low: int, high: int, count: int, cuts: list[int]) -> None:
    low, high = sorted((low, high))
    rule = RepetitionDetection(max_pattern_size=high, min_pattern_size=low, min_count=count)
    detector = RepetitionDetector(rule)
    found, start = None, 0
    for size in [*cuts, len(ids)]:
        piece = ids[start : start + size]
        place = detector.feed(piece)
        if place is not None:
            found = start + place
            break
        start += len(piece)
    assert found == expected(ids, rule)


def test_long_outputs_are_followed() -> None:
    detector = RepetitionDetector(RepetitionDetection(max_pattern_size=3, min_count=5))
    assert detector.feed(range(10_000)) is None
    assert detector.feed([1, 2, 3] * 5) == 15


@pytest.mark.parametrize("piece", [1, 4])
def test_the_last_copy_closes_it(piece: int) -> None:
    detector = RepetitionDetector(RepetitionDetection(max_pattern_size=2, min_pattern_size=2, min_count=3))
    ids = [7, 1, 2, 1, 2, 1, 2, 9]
    places = [detector.feed(ids[i : i + piece]) for i in range(0, len(ids), piece)]
    assert places == ([None] * 6 + [1, None] if piece == 1 else [None, 3])
