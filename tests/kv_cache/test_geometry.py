"""Geometry against counting: which blocks a window leaves behind, and how many a sequence ever holds."""

from __future__ import annotations

import sys

import pytest

from pagedserve.kv_cache.geometry import Geometry

BLOCK = 4


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 13])
def test_a_block_has_passed_when_no_token_to_come_sees_it(window: int) -> None:
    geometry = Geometry(block_size=BLOCK, windows=(window,))
    for position in range(60):
        visible = range(max(position - window + 1, 0), position + 1)
        assert geometry.num_passed(0, position) == visible[0] // BLOCK


@pytest.mark.parametrize("step", [1, 2, 3, 4, 9, 30])
@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 13])
def test_the_most_blocks_of_a_lane_are_those_of_the_worst_step(window: int, step: int) -> None:
    geometry = Geometry(block_size=BLOCK, windows=(window,), max_step_tokens=step)
    held = [-(-(start + step) // BLOCK) - geometry.num_passed(0, start) for start in range(100)]
    assert max(held) == geometry.most_blocks(0)


def test_groups_add_up() -> None:
    geometry = Geometry(block_size=BLOCK, windows=(None, 5), max_step_tokens=4)
    assert geometry.most_blocks(0) == sys.maxsize and geometry.most_blocks(1) == 3
    assert [geometry.num_blocks_of(n) for n in (1, 4, 5, 12, 13, 100)] == [2, 2, 4, 6, 7, 28]
    assert geometry.num_blocks_of(100, 40) == 15 + 3
    assert (geometry.num_groups, geometry.widest, geometry.has_windows) == (2, 0, True)


@pytest.mark.parametrize("windows", [(None,), (5,), (None, 5), (9, None, 3)])
def test_the_longest_sequence_is_the_last_that_fits(windows: tuple[int | None, ...]) -> None:
    geometry = Geometry(block_size=BLOCK, windows=windows, max_step_tokens=6)
    for num_blocks in range(1, 30):
        longest = geometry.longest(num_blocks)
        if longest == sys.maxsize:
            assert None not in windows
            continue
        assert geometry.num_blocks_of(longest) <= num_blocks < geometry.num_blocks_of(longest + 1)


def test_beams_share_the_full_blocks_of_the_prompt() -> None:
    geometry = Geometry(block_size=BLOCK)
    assert geometry.num_beam_blocks(10, 14, 3) == 2 + 3 * 2
    assert Geometry(block_size=BLOCK, windows=(None, 5), max_step_tokens=4).num_beam_blocks(10, 14, 3) == 4 + 3 * 4
