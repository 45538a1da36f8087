"""Prompts that want a vector: computed like all others, and gone when they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pagedserve.pooling_params import PoolingParams
from pagedserve.sequence import Request
from tests.helpers.factories import make_request, make_scheduler
from tests.helpers.fake_executor import Driver, FakeExecutor

LAST, MEAN = PoolingParams(), PoolingParams(pooling_type="mean")


def drive(num_blocks: int = 64, num_host_blocks: int = 0, **options: Any) -> Driver:
    scheduler = make_scheduler(num_blocks, num_host_blocks, **options)
    return Driver(scheduler, FakeExecutor(num_blocks=num_blocks, num_host_blocks=num_host_blocks))


def pooling(prompt: int | list[int], params: PoolingParams) -> Request:
    request = make_request(prompt, max_tokens=0, pooling=params)
    return replace(request, read_prefix_cache=not params.needs_all_tokens)


def expected(driver: Driver, request: Request) -> bytes:
    return str(driver.executor.chain(request.prompt_token_ids)).encode()


@pytest.mark.parametrize("budget", [1, 7, 64])
def test_vectors_come_beside_generation_whatever_the_chunks(budget: int) -> None:
    driver = drive(max_num_batched_tokens=budget)
    requests = [pooling(9, LAST), make_request(6, max_tokens=5), pooling(13, MEAN), pooling(1, MEAN)]
    driver.add(*requests)
    results = driver.run()
    for i in (0, 2, 3):
        found = results[requests[i].request_id]
        assert found.pooled == expected(driver, requests[i])
        assert (found.token_ids, found.finish_reasons, found.finished.error) == ({0: []}, {0: "stop"}, None)
    assert results[requests[1].request_id].token_ids[0] == driver.executor.model.generate(requests[1])
    driver.assert_idle()


def test_a_cached_prefix_serves_the_last_token_and_not_the_mean() -> None:
    driver = drive()
    prompt = list(range(3000, 3021))
    driver.add(make_request(prompt, max_tokens=1))
    driver.run()
    for params, num_cached in ((LAST, 20), (MEAN, 0), (LAST, 20)):
        request = pooling(prompt, params)
        driver.add(request)
        found = driver.run()[request.request_id]
        assert found.finished.num_cached_tokens == num_cached
        assert found.pooled == expected(driver, request)


@pytest.mark.parametrize("mode", ["swap", "recompute", "auto"])
def test_preempted_prompts_are_pooled_from_their_first_token_again(mode: str) -> None:
    """Sums of hidden states live in the worker's row, so blocks that come back from the host would not be enough."""
    driver = drive(8, 16, max_num_batched_tokens=8, preemption_mode=mode)
    decoding = [make_request(6, max_tokens=14) for _ in range(2)]
    vectors = [pooling(22, MEAN), pooling(24, LAST)]
    driver.add(decoding[0], vectors[0], decoding[1], vectors[1])
    results = driver.run()
    assert any(results[r.request_id].finished.num_preemptions for r in vectors)
    for request in vectors:
        assert results[request.request_id].pooled == expected(driver, request)
    for request in decoding:
        assert results[request.request_id].token_ids[0] == driver.executor.model.generate(request)
    driver.assert_idle()


def test_an_aborted_one_leaves_nothing() -> None:
    driver = drive(max_num_batched_tokens=4)
    request = pooling(30, MEAN)
    driver.add(request)
    driver.step()
    driver.take(driver.scheduler.abort([request.request_id]))
    driver.run()
    assert driver.results[request.request_id].pooled is None
    driver.assert_idle()
