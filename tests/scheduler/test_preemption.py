"""Preemption: who gives way, what comes back, and that no answer changes."""

from __future__ import annotations

import logging

import pytest

from pagedserve.sampling_params import BeamParams
from pagedserve.scheduler.preemption import PreemptionCosts
from pagedserve.sequence import IDLE_PRIORITY
from pagedserve.step import BlockOps, ModelRunnerOutput, SchedulerOutput
from tests.helpers.factories import make_request
from tests.scheduler.running import answers, assert_right, make_driver

MODES = ("recompute", "swap", "auto")


@pytest.mark.parametrize("mode", MODES)
def test_answers_are_those_of_a_large_pool(mode: str) -> None:  # C073
    driver = make_driver(12, 12, block_size=16, preemption_mode=mode)
    requests = [make_request(10 + i, max_tokens=60, logprobs=1, stop_token_ids=(3,), min_tokens=20) for i in range(6)]
    driver.add(*requests)
    results = driver.run()
    assert driver.scheduler.stats().num_preemptions > 0
    assert_right(driver, *requests)
    for request in requests:
        result = results[request.request_id]
        assert [e.token_ids[0] for e in result.logprobs[0]] == result.token_ids[0]
    driver.assert_idle()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("options", [{}, {"n": 2, "temperature": 1.0}], ids=["one", "n"])
@pytest.mark.parametrize("shares_prefix", [False, True])
def test_prompts_that_fit_alone_but_not_together_all_finish(
    mode: str, options: dict[str, object], shares_prefix: bool
) -> None:  # C075
    driver = make_driver(20, 20, block_size=16, max_num_batched_tokens=16, preemption_mode=mode)
    prompt = list(range(9 * 16))
    requests = [make_request(prompt if shares_prefix else 9 * 16, max_tokens=40, **options) for _ in range(4)]
    driver.add(*requests)
    driver.run()
    assert_right(driver, *requests)
    assert driver.finish_order == [r.request_id for r in requests]
    driver.assert_idle()


@pytest.mark.parametrize("num_host_blocks", [0, 4, 64])
@pytest.mark.parametrize(
    "options",
    [{"n": 4, "temperature": 1.0}, {"beam": BeamParams(width=4), "n": 4}],
    ids=["n", "beam"],
)
def test_swap_falls_back_to_recomputation_where_the_host_is_full(
    num_host_blocks: int, options: dict[str, object]
) -> None:  # C077
    def run(num_blocks: int, num_host_blocks: int) -> tuple[list[object], object]:
        driver = make_driver(num_blocks, num_host_blocks, preemption_mode="swap")
        requests = [make_request([i * 100 + t for t in range(13)], max_tokens=16, seed=i, **options) for i in range(4)]
        driver.add(*requests)
        results = driver.run()
        driver.assert_idle()
        return [answers(results[r.request_id]) for r in requests], driver.scheduler.stats()

    got, stats = run(40, num_host_blocks)
    expected, calm = run(400, 0)
    assert got == expected
    assert calm.num_preemptions == 0 and stats.num_preemptions > 0
    assert stats.num_swapped_in_blocks <= stats.num_swapped_out_blocks
    if num_host_blocks == 64:
        assert stats.num_swapped_out_blocks > 0 and stats.num_wasted_tokens == 0
    if num_host_blocks == 0:
        assert stats.num_swapped_out_blocks == 0 and stats.num_wasted_tokens > 0


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("num_blocks", [12, 24, 64])
def test_more_samples_than_the_pool_holds_are_served_piece_by_piece(mode: str, num_blocks: int) -> None:  # C076
    driver = make_driver(num_blocks, num_blocks, preemption_mode=mode)
    request = make_request(10, n=16, temperature=1.0, max_tokens=20)
    neighbour = make_request(6, max_tokens=12)
    driver.add(request, neighbour)
    driver.run()
    assert_right(driver, request, neighbour)
    driver.assert_idle()


def test_a_request_alone_that_fills_the_pool_ends_with_length() -> None:  # C074
    driver = make_driver(16, block_size=16)
    request = make_request(200, max_tokens=200)
    behind = make_request(20, max_tokens=5)
    driver.add(request, behind)
    result = driver.run()[request.request_id]
    # 256 tokens have their keys and values in the pool; one more was drawn from them.
    assert len(result.token_ids[0]) == 256 + 1 - 200
    assert result.token_ids[0] == driver.executor.model.generate(request, num_tokens=57)
    assert result.finish_reasons == {0: "length"} and result.finished.error is None
    assert_right(driver, behind)
    driver.assert_idle()


def test_beams_alone_that_fill_the_pool_end_with_the_best_so_far() -> None:
    driver = make_driver(6)
    request = make_request(10, max_tokens=200, beam=BeamParams(width=3), n=2)
    driver.add(request)
    result = driver.run()[request.request_id]
    assert result.finish_reasons == {0: "length", 1: "length"}
    assert result.scores[0] >= result.scores[1]
    assert 0 < len(result.token_ids[0]) < 15
    driver.assert_idle()


def test_the_latest_group_gives_way_whole() -> None:
    driver = make_driver(13, preemption_mode="recompute")
    first, second, third = (make_request(8, n=2, temperature=1.0, max_tokens=20) for _ in range(3))
    driver.add(first, second, third)
    while not driver.scheduler.stats().num_preemptions:
        driver.step()
    waiting = driver.scheduler._groups.preempted.peek()
    assert waiting.request_id == third.request_id
    assert len(driver.executor.rows) == 4
    driver.run()
    assert_right(driver, first, second, third)


def test_no_new_request_is_admitted_while_a_preempted_one_waits() -> None:
    driver = make_driver(12, preemption_mode="recompute")
    old = [make_request(8, max_tokens=24) for _ in range(4)]
    driver.add(*old)
    while not driver.scheduler.stats().num_swapped:
        driver.step()
    new = make_request(2, max_tokens=1)
    driver.add(new)
    while driver.scheduler.stats().num_swapped:
        assert not driver.results[new.request_id].token_ids
        driver.step()
    driver.run()
    assert_right(driver, new, *old)


def test_swapped_groups_do_not_starve_under_a_flow_of_short_requests() -> None:  # C078
    driver = make_driver(30, 30, preemption_mode="swap", max_num_batched_tokens=32)
    long = [make_request(16, n=2, temperature=1.0, max_tokens=50) for _ in range(3)]
    driver.add(*long)
    while not driver.scheduler.stats().num_swapped_out_blocks:
        driver.step()
    short = [make_request(5, max_tokens=4) for _ in range(200)]
    backlog = list(short)
    while backlog or driver.scheduler.has_work():
        while backlog and driver.scheduler.num_unfinished < 8 + len(long):
            driver.add(backlog.pop())
        driver.step()
    assert_right(driver, *long, *short)
    last = max(driver.finish_order.index(r.request_id) for r in long)
    assert last < 60
    driver.assert_idle()


def test_a_preempted_request_returns_before_younger_ones_of_its_class() -> None:  # C086
    driver = make_driver(14, preemption_mode="recompute", policy="priority")
    low = [make_request(8, max_tokens=20, priority=1) for _ in range(4)]
    driver.add(*low)
    while not driver.scheduler.stats().num_swapped:
        driver.step()
    preempted = driver.scheduler._groups.preempted.peek().request_id
    younger, urgent = make_request(8, max_tokens=4, priority=1), make_request(8, max_tokens=4, priority=0)
    driver.add(younger, urgent)
    driver.run()
    assert_right(driver, younger, urgent, *low)
    order = driver.finish_order
    assert order.index(urgent.request_id) < order.index(younger.request_id)
    first_step = {}
    for number, output in enumerate(driver.steps):
        for place, new in enumerate(output.new):
            first_step.setdefault(tuple(new.token_ids[:8]), []).append((number, place))
    place = {r.request_id: first_step[tuple(r.prompt_token_ids)] for r in [*low, younger]}
    assert place[preempted][1] < place[younger.request_id][0]


def test_an_idle_request_that_holds_nothing_costs_no_empty_step() -> None:
    # Its samples run one after another, and between two of them it holds no block that could be given.
    driver = make_driver(4, block_size=1)
    idle = make_request([1, 0], max_tokens=18, priority=IDLE_PRIORITY, n=3, temperature=1.0)
    driver.add(idle)
    [group] = driver.scheduler._groups.by_id.values()
    while group.live or not group.parked:
        driver.step()
    other = make_request(2, max_tokens=2)
    driver.add(other)
    output = driver.step()
    assert other.request_id == driver.scheduler._groups.running[0].request_id and output.num_tokens == 2
    driver.run()
    assert_right(driver, other)
    driver.assert_idle()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_idle_requests_give_way_to_whoever_comes(mode: str, policy: str) -> None:
    driver = make_driver(64, 64, preemption_mode=mode, policy=policy, max_num_seqs=2)
    idle = [make_request(8, max_tokens=30, priority=IDLE_PRIORITY) for _ in range(3)]
    driver.add(*idle)
    for _ in range(6):
        driver.step()
    others = [make_request(8, max_tokens=4) for _ in range(5)]
    driver.add(*others)
    # One step to take the seats of the idle ones, all at once, and never a seat for them while others wait.
    driver.step()
    driver.step()
    assert driver.scheduler.stats().num_running == 2
    assert not any(group.is_idle for group in driver.scheduler._groups.running)
    driver.run()
    assert_right(driver, *idle, *others)
    order = driver.finish_order
    assert {r.request_id for r in others} == set(order[:5])
    assert driver.scheduler.stats().num_preemptions == 2
    driver.assert_idle()


def test_recomputation_keeps_what_was_shared_shared_without_the_prefix_cache() -> None:
    driver = make_driver(20, preemption_mode="recompute", enable_prefix_caching=False)
    first = make_request(24, max_tokens=40)
    second = make_request(24, n=4, temperature=1.0, max_tokens=20)
    driver.add(first, second)
    driver.run()
    assert_right(driver, first, second)
    stats = driver.scheduler.stats()
    assert stats.num_preemptions > 0
    # Whenever the four samples run, their prompt is stored once: six full blocks, and three a sample at most.
    assert max(sum(o.num_scheduled) for o in driver.steps[1:]) <= 24 + 21 + 3


@pytest.mark.parametrize("mode", MODES)
def test_waste_is_bounded_and_counted(mode: str) -> None:
    driver = make_driver(48, 48, preemption_mode=mode, enable_prefix_caching=False)
    requests = [make_request(12, max_tokens=40) for _ in range(24)]
    driver.add(*requests)
    results = driver.run()
    assert_right(driver, *requests)
    stats = driver.scheduler.stats()
    useful = sum(len(r.prompt_token_ids) + 40 - 1 for r in requests)
    computed = sum(o.num_tokens for o in driver.steps)
    assert computed - useful == stats.num_wasted_tokens
    assert stats.num_wasted_tokens == sum(r.finished.num_wasted_tokens for r in results.values())
    assert stats.num_preemptions == sum(r.finished.num_preemptions for r in results.values())
    assert stats.num_wasted_tokens < 0.5 * useful


def test_each_preemption_is_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    driver = make_driver(12, preemption_mode="recompute")
    driver.add(*(make_request(8, max_tokens=24) for _ in range(4)))
    with caplog.at_level(logging.INFO, logger="pagedserve"):
        driver.run()
    lines = [r.getMessage() for r in caplog.records if "preempted" in r.getMessage()]
    assert len(lines) == driver.scheduler.stats().num_preemptions
    assert all("will recompute" in line for line in lines)


def test_a_swap_in_a_failed_step_is_recomputed() -> None:
    driver = make_driver(12, 12, preemption_mode="swap")
    requests = [make_request(8, max_tokens=24) for _ in range(4)]
    driver.add(*requests)
    while True:
        output = driver.scheduler.schedule()
        if output.block_ops.swap_out:
            break
        driver.take(driver.scheduler.update(output, driver.executor.execute(output)))
    driver.executor._apply_rows(output)  # and not the copies
    driver.take(driver.scheduler.fail_step(output, "failed"))
    driver.scheduler.check()
    results = driver.run()
    survivors = [r for r in requests if results[r.request_id].finished.error is None]
    assert survivors
    assert_right(driver, *survivors)
    driver.assert_idle()


# -- costs -------------------------------------------------------------------------------------------------------------


def observed(num_tokens: int, num_seqs: int, seconds: float) -> tuple[SchedulerOutput, ModelRunnerOutput]:
    output = SchedulerOutput(
        step_id=1, seq_ids=list(range(num_seqs)), num_scheduled=[num_tokens // num_seqs] * num_seqs
    )
    return output, ModelRunnerOutput(step_id=1, forward_seconds=seconds)


def test_auto_follows_what_was_measured() -> None:
    costs = PreemptionCosts("auto", bytes_per_block=1 << 20)
    for _ in range(50):
        costs.observe(*observed(512, 1, 512 * 1e-3))
    swap = SchedulerOutput(step_id=1, block_ops=BlockOps(swap_out=[(0, 0)] * 10))
    for _ in range(50):
        costs.observe(swap, ModelRunnerOutput(step_id=1, swap_seconds=10 * 1e-4))
    # 10 blocks out and back take 2 ms; as many as 2 tokens.
    assert costs.prefers_swap(10, 3)
    assert not costs.prefers_swap(10, 1)


def test_a_copy_is_tried_once_before_it_is_thought_too_dear() -> None:
    costs = PreemptionCosts("auto", bytes_per_block=20 << 20)
    for _ in range(50):
        costs.observe(*observed(512, 1, 512 * 2e-4))
    assert costs.prefers_swap(10, 160)
    swap = SchedulerOutput(step_id=1, block_ops=BlockOps(swap_out=[(0, 0)] * 10))
    costs.observe(swap, ModelRunnerOutput(step_id=1, swap_seconds=10 * 5e-3))
    assert not costs.prefers_swap(10, 160)


def test_decoding_steps_say_nothing_about_recomputation() -> None:
    costs = PreemptionCosts("auto", bytes_per_block=1)
    before = costs.seconds_per_token
    costs.observe(*observed(64, 64, 5.0))
    costs.observe(*observed(8, 8, 5.0))
    assert costs.seconds_per_token == before
    costs.observe(*observed(64, 2, 5.0))
    assert costs.seconds_per_token > before


@pytest.mark.parametrize(("mode", "swaps"), [("swap", True), ("recompute", False)])
def test_a_fixed_mode_does_not_calculate(mode: str, swaps: bool) -> None:
    costs = PreemptionCosts(mode, bytes_per_block=1)
    assert costs.prefers_swap(1, 10**6) is swaps and costs.prefers_swap(10**6, 1) is swaps
