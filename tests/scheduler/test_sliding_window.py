"""Layers that see a window: what they leave behind is free, and answers are what they are without any of it."""

from __future__ import annotations

import pytest

from pagedserve.sampling_params import BeamParams
from tests.helpers.factories import make_request
from tests.scheduler.running import answers, assert_right, make_driver

WINDOWS = [(10,), (None, 10), (6, None, 13)]


@pytest.mark.parametrize("budget", [1, 5, 64])
@pytest.mark.parametrize("window", [1, 2, 4, 5, 9])
def test_a_long_generation_holds_a_window_of_blocks(window: int, budget: int) -> None:  # C085
    driver = make_driver(64, windows=(window,), max_num_batched_tokens=budget)
    request = make_request(13, max_tokens=100)
    driver.add(request)
    held = []
    while driver.scheduler.has_work():
        driver.step()
        held.append(round(driver.scheduler.stats().kv_cache_usage * 64))
    assert_right(driver, request)
    # A window of tokens reaches over the cut blocks at its ends; between steps the next token has no block yet.
    most = (window - 3) // 4 + 2 if window > 1 else 0
    assert max(held[-80:]) == max(most, 1)
    driver.assert_idle()


def test_groups_that_see_everything_keep_everything() -> None:
    driver = make_driver(64, windows=(None, 5))
    request = make_request(13, max_tokens=40)
    driver.add(request)
    for _ in range(30):
        driver.step()
    table = driver.scheduler._cache._tables[0]
    num_computed = driver.scheduler._groups.running[0].live[0].num_computed_tokens
    assert table.num_passed == [0, (num_computed - 4) // 4]
    driver.run()
    assert_right(driver, request)


def test_a_prompt_longer_than_the_pool_runs_where_a_window_is_all_that_is_kept() -> None:
    driver = make_driver(8, windows=(9,), max_num_batched_tokens=8)
    request = make_request(200, max_tokens=50)
    driver.add(request)
    driver.run()
    assert_right(driver, request)
    assert driver.scheduler.stats().num_preemptions == 0
    driver.assert_idle()


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_a_prefix_is_found_by_its_last_window(windows: tuple[int | None, ...]) -> None:  # C085
    driver = make_driver(128, windows=windows)
    prompt = list(range(40))
    for expected in (0, 39):
        request = make_request(prompt, max_tokens=9)
        driver.add(request)
        result = driver.run()[request.request_id]
        assert_right(driver, request)
        assert result.finished.num_cached_tokens == expected
    longer = make_request([*prompt, 7, 8, 9], max_tokens=3)
    driver.add(longer)
    assert driver.run()[longer.request_id].finished.num_cached_tokens == 40
    assert_right(driver, longer)


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_the_beginning_of_a_block_is_shared_in_every_group(windows: tuple[int | None, ...]) -> None:
    driver = make_driver(128, windows=windows)
    history: list[int] = []
    for turn in range(4):
        request = make_request([*history, *range(100 * turn, 100 * turn + 11)], max_tokens=7)
        driver.add(request)
        result = driver.run()[request.request_id]
        assert_right(driver, request)
        assert result.finished.num_cached_tokens == max(len(history) - 1, 0)
        history = request.prompt_token_ids + result.token_ids[0]
    assert driver.scheduler.stats().num_copied_blocks == 0
    other = make_request([*history[:-3], 99, 98, 97], max_tokens=7)
    driver.add(other)
    assert driver.run()[other.request_id].finished.num_cached_tokens == len(history) - 3
    assert_right(driver, other)
    assert driver.scheduler.stats().num_copied_blocks == len(windows)


def test_a_prefix_whose_beginning_is_gone_still_serves_a_window() -> None:
    driver = make_driver(12, windows=(6,), max_num_batched_tokens=8)
    first = make_request(list(range(40)), max_tokens=1)
    driver.add(first)
    driver.run()
    assert driver.scheduler._cache.device.num_blocks == 12, "fewer than the prompt's 10 and a stranger's 5"
    stranger = make_request(list(range(100, 120)), max_tokens=1)
    driver.add(stranger)
    driver.run()
    cache = driver.scheduler._cache
    again = make_request([*range(40), 50], max_tokens=5)
    driver.add(again)
    result = driver.run()[again.request_id]
    assert_right(driver, again)
    assert result.finished.num_cached_tokens == 40
    cache.check()


@pytest.mark.parametrize("mode", ["swap", "recompute", "auto"])
@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_preempted_answers_are_those_of_a_roomy_pool(windows: tuple[int | None, ...], mode: str) -> None:  # C085
    blocks = 14 * len(windows)
    driver = make_driver(blocks, blocks, windows=windows, max_num_batched_tokens=16, preemption_mode=mode)
    requests = [
        make_request([*range(i % 3 + 5), *range(100 * i, 100 * i + i % 7)], n=1 + i % 3, temperature=1.0, max_tokens=25)
        for i in range(16)
    ]
    beams = make_request([1, 2, 3, 4, 5], beam=BeamParams(width=3), n=3, max_tokens=12)
    driver.add(*requests, beams)
    results = driver.run()
    assert_right(driver, *requests)
    assert driver.scheduler.stats().num_preemptions > 0
    driver.assert_idle()
    alone = make_driver(256, windows=windows)
    twin = make_request([1, 2, 3, 4, 5], beam=BeamParams(width=3), n=3, max_tokens=12)
    alone.add(twin)
    assert answers(results[beams.request_id]) == answers(alone.run()[twin.request_id])


def test_a_sample_whose_sibling_has_gone_on_is_computed_by_itself() -> None:
    # Alone in a pool that holds one of them at a time: the others come back when the first is far ahead.
    driver = make_driver(5, windows=(8,), max_num_batched_tokens=4, enable_prefix_caching=False)
    request = make_request(6, n=3, temperature=1.0, max_tokens=40)
    driver.add(request)
    driver.run()
    assert_right(driver, request)
    assert driver.scheduler.stats().num_preemptions > 0
    driver.assert_idle()
