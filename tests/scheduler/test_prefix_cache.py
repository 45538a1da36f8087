"""The prefix cache as requests meet it."""

from __future__ import annotations

import pytest

from pagedserve.kv_cache import prefix_cache, prefix_hash
from pagedserve.sampling_params import BeamParams
from tests.helpers.factories import make_request
from tests.helpers.fake_executor import Driver
from tests.scheduler.running import assert_right, make_driver


def cached_tokens(driver: Driver, prompt: list[int], **options: object) -> int:
    """Run one request to its end, see that it is right, and tell how much of it was cached."""
    request = make_request(prompt, **{"max_tokens": 6, **options})
    driver.add(request)
    driver.run()
    assert_right(driver, request)
    return driver.results[request.request_id].finished.num_cached_tokens


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
def test_a_wholly_cached_prompt_still_computes_its_last_token(length: int) -> None:  # C082
    driver = make_driver(block_size=16)
    prompt = list(range(length))
    cached = [cached_tokens(driver, prompt) for _ in range(3)]
    assert cached == [0, length - 1, length - 1]
    twins = [make_request(prompt, max_tokens=6) for _ in range(2)]
    driver.add(*twins)
    driver.run()
    assert_right(driver, *twins)
    driver.assert_idle()


def test_a_prompt_that_continues_an_answer_finds_prompt_and_answer() -> None:  # C082
    driver = make_driver(block_size=16)
    first = make_request(list(range(20)), max_tokens=32)
    driver.add(first)
    answer = driver.run()[first.request_id].token_ids[0]
    assert cached_tokens(driver, first.prompt_token_ids + answer) == 51


def test_a_conversation_finds_all_that_it_had_computed() -> None:  # C082
    driver = make_driver(block_size=16, num_blocks=12)
    history: list[int] = []
    for turn in range(4):
        request = make_request([*history, *range(100 * turn, 100 * turn + 11)], max_tokens=9)
        driver.add(request)
        result = driver.run()[request.request_id]
        assert_right(driver, request)
        # All but the last token of the last answer: that one was drawn, not computed.
        assert result.finished.num_cached_tokens == max(len(history) - 1, 0)
        history = request.prompt_token_ids + result.token_ids[0]
    assert driver.scheduler.stats().num_copied_blocks == 0


@pytest.mark.parametrize("budget", [3, 64])
@pytest.mark.parametrize("num_blocks", [6, 64])
def test_prompts_that_differ_within_a_block_copy_what_they_share(num_blocks: int, budget: int) -> None:  # C081
    driver = make_driver(num_blocks, max_num_batched_tokens=budget)
    assert cached_tokens(driver, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 0
    assert cached_tokens(driver, [1, 2, 3, 4, 5, 6, 70, 80, 90]) == 6
    assert driver.scheduler.stats().num_copied_blocks == 1
    twins = [make_request([1, 2, 3, 4, 5, 6, 7, i], max_tokens=6) for i in range(20, 24)]
    driver.add(*twins)
    driver.run()
    assert_right(driver, *twins)
    driver.assert_idle()


def test_answers_stay_right_when_copies_and_preemptions_meet() -> None:
    driver = make_driver(14, 14, max_num_batched_tokens=16, preemption_mode="auto")
    requests = [
        make_request([*range(i % 3 + 5), *range(100 * i, 100 * i + i % 5)], n=1 + i % 3, temperature=1.0, max_tokens=14)
        for i in range(24)
    ]
    driver.add(*requests)
    driver.run()
    assert_right(driver, *requests)
    stats = driver.scheduler.stats()
    assert stats.num_preemptions > 0 and stats.prefix_cache_hits > 0
    driver.assert_idle()


def test_other_salts_and_adapters_share_nothing() -> None:  # C080
    driver = make_driver(256)
    prompt = list(range(64))
    keys = [{}, {"cache_salt": "x"}, {"cache_salt": "y"}, {"adapter": "x"}, {"adapter": "y"}]
    assert [cached_tokens(driver, prompt, **key) for key in keys] == [0] * 5
    assert [cached_tokens(driver, prompt, **key) for key in keys] == [63] * 5


def test_a_block_is_not_found_after_another_beginning() -> None:  # C081
    driver = make_driver()
    assert cached_tokens(driver, [1, 1, 1, 1, 5, 6, 7, 8, 9]) == 0
    assert cached_tokens(driver, [2, 2, 2, 2, 5, 6, 7, 8, 9]) == 0
    assert cached_tokens(driver, [10, 50, 0, 0, 1]) == 0
    assert cached_tokens(driver, [11, 19, 0, 0, 1]) == 0


def test_a_broken_hash_would_be_noticed_by_these_tests(monkeypatch: pytest.MonkeyPatch) -> None:  # C081
    # SHA-256 alone stands between a collision and a wrong answer: the fake worker sees it when it is taken away.
    def same_for_all(digests: list[bytes], num_blocks: int, *rest: object) -> None:
        digests += [bytes([i]) for i in range(len(digests), num_blocks)]

    monkeypatch.setattr(prefix_cache, "extend_digests", same_for_all)
    driver = make_driver()
    cached_tokens(driver, [1, 1, 1, 1, 5])
    with pytest.raises(AssertionError, match="finds other content"):
        cached_tokens(driver, [2, 2, 2, 2, 5])


def test_requests_that_need_every_position_do_not_look() -> None:
    driver = make_driver()
    prompt = list(range(13))
    cached_tokens(driver, prompt)
    assert cached_tokens(driver, prompt, read_prefix_cache=False, prompt_logprobs=0) == 0
    told = next(r for r in driver.results.values() if r.prompt_logprobs).prompt_logprobs
    assert len(told) == 12


def test_reset_forgets_and_running_requests_go_on() -> None:
    driver = make_driver()
    prompt = list(range(13))
    cached_tokens(driver, prompt)
    running = make_request(prompt, max_tokens=20)
    driver.add(running)
    driver.step()
    assert driver.scheduler.reset_prefix_cache()
    driver.run()
    assert_right(driver, running)
    assert cached_tokens(driver, prompt) == 0
    assert cached_tokens(driver, prompt) == 12


def test_a_common_system_prompt_is_stored_once() -> None:
    driver = make_driver(200)
    system = list(range(100))
    requests = [make_request([*system, 1000 + i, 7], max_tokens=8) for i in range(16)]
    driver.add(requests[0])
    driver.step()
    driver.add(*requests[1:])
    driver.step()
    # 25 blocks of the system prompt, and one for each request's own tokens.
    assert round(driver.scheduler.stats().kv_cache_usage * 200) == 25 + 16
    driver.run()
    assert_right(driver, *requests)
    assert driver.scheduler.stats().prefix_cache_hits == 15 * 100


def test_samples_and_beams_read_and_leave_prefixes() -> None:
    driver = make_driver()
    prompt = list(range(13))
    assert cached_tokens(driver, prompt, n=3, temperature=1.0) == 0
    assert cached_tokens(driver, prompt) == 12
    other = list(range(50, 63))
    for expected in (0, 12):
        request = make_request(other, beam=BeamParams(width=3), n=3, max_tokens=8)
        driver.add(request)
        assert driver.run()[request.request_id].finished.num_cached_tokens == expected


def test_the_reported_number_is_that_of_the_first_admission() -> None:
    driver = make_driver(12, preemption_mode="recompute")
    requests = [make_request(8, max_tokens=24) for _ in range(4)]
    driver.add(*requests)
    results = driver.run()
    assert driver.scheduler.stats().num_preemptions > 0
    assert [results[r.request_id].finished.num_cached_tokens for r in requests] == [0] * 4
    assert_right(driver, *requests)


def test_a_prompt_is_hashed_once_however_long_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def counting(digests: list[bytes], num_blocks: int, *rest: object) -> None:
        hashed.append(max(num_blocks - len(digests), 0))
        prefix_hash.extend_digests(digests, num_blocks, *rest)

    monkeypatch.setattr(prefix_cache, "extend_digests", counting)
    driver = make_driver(40, max_num_batched_tokens=64)
    blocker, waits = make_request(20, max_tokens=30), make_request(140, max_tokens=2)
    driver.add(blocker, waits)
    driver.run()
    assert_right(driver, blocker, waits)
    num_blocks = sum((len(r.prompt_token_ids) + r.sampling_params.max_tokens - 1) // 4 for r in (blocker, waits))
    assert sum(hashed) == num_blocks
