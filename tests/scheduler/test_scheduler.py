"""Scheduler: one subtraction under a budget, and the lives of requests from arrival to end."""

from __future__ import annotations

import pytest

from pagedserve.errors import ContextLengthError, QueueFullError, RequestError
from pagedserve.sampling_params import BeamParams
from tests.helpers.factories import Clock, make_request
from tests.scheduler.running import assert_right, make_driver

# -- the budget --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 7, 16, 17, 64])
def test_chunked_prefill_gives_the_same_tokens_as_whole_prompts(budget: int) -> None:  # C083
    driver = make_driver(256, max_num_batched_tokens=budget)
    requests = [make_request(length, max_tokens=5) for length in (1, 3, 15, 16, 17, 33, 70)]
    driver.add(*requests)
    driver.run()
    assert_right(driver, *requests)
    driver.assert_idle()


def test_a_step_grants_what_is_uncomputed_up_to_the_budget() -> None:
    driver = make_driver(max_num_batched_tokens=10)
    driver.add(make_request(25, max_tokens=3))
    assert [driver.step().num_scheduled for _ in range(5)] == [[10], [10], [5], [1], [1]]


def test_nothing_is_reported_before_the_prompt_is_computed() -> None:  # C083
    driver = make_driver(max_num_batched_tokens=10)
    request = make_request(25, max_tokens=3)
    driver.add(request)
    driver.step()
    driver.step()
    assert not driver.results[request.request_id].token_ids


def test_every_decoding_sequence_gets_its_token_beside_a_long_prompt() -> None:  # C086
    driver = make_driver(1024, max_num_batched_tokens=64, max_model_len=4096)
    decoding = [make_request(3, max_tokens=60) for _ in range(4)]
    driver.add(*decoding)
    driver.step()
    driver.add(make_request(2000, max_tokens=2))
    for _ in range(20):
        output = driver.step()
        assert output.num_scheduled == [1, 1, 1, 1, 60]


def test_an_urgent_long_prompt_leaves_the_decoding_ones_their_token() -> None:  # C086
    # It is served before them, as a request that returns from preemption is served before younger ones.
    driver = make_driver(256, max_num_batched_tokens=8, policy="priority")
    decoding = [make_request(2, max_tokens=40, priority=1) for _ in range(3)]
    driver.add(*decoding)
    driver.step()
    driver.add(make_request(40, max_tokens=2, priority=0))
    for _ in range(8):
        assert sorted(driver.step().num_scheduled) == [1, 1, 1, 5]
    driver.run()
    assert_right(driver, *decoding)


def test_admission_is_first_come_first_served() -> None:
    driver = make_driver(max_num_batched_tokens=8)
    first, second, third = (make_request(6, max_tokens=1) for _ in range(3))
    driver.add(first, second, third)
    driver.run()
    assert driver.finish_order == [r.request_id for r in (first, second, third)]


def test_lower_priority_values_are_admitted_first_under_the_priority_policy() -> None:
    driver = make_driver(policy="priority", max_num_seqs=1)
    requests = [make_request(4, max_tokens=2, priority=p) for p in (5, 0, 5, -1)]
    driver.add(*requests)
    driver.run()
    assert driver.finish_order == [requests[i].request_id for i in (3, 1, 0, 2)]


def test_max_num_seqs_counts_sequences_that_will_exist() -> None:
    driver = make_driver(max_num_seqs=4)
    driver.add(make_request(4, n=3, temperature=1.0, max_tokens=3), make_request(4, n=2, temperature=1.0, max_tokens=3))
    while driver.scheduler.has_work():
        driver.step()
        assert len(driver.executor.rows) <= 4
    driver.assert_idle()


def test_a_sequence_wastes_less_than_one_block() -> None:
    driver = make_driver(64, block_size=16)
    driver.add(*(make_request(n, max_tokens=40) for n in (1, 15, 16, 17)))
    while driver.scheduler.num_unfinished:
        driver.step()
        for row in driver.executor.rows.values():
            # The newest token has been drawn but not computed.
            assert len(row.block_ids) == -(-(len(row.token_ids) - 1) // 16)


# -- what is refused on arrival ----------------------------------------------------------------------------------------


def test_a_prompt_larger_than_the_pool_is_refused_with_the_numbers() -> None:  # C074
    driver = make_driver(16, block_size=16)
    with pytest.raises(ContextLengthError, match=r"300 tokens, which take 19 KV blocks.*pool has 16 blocks of 16"):
        driver.add(make_request(300))
    short = make_request(10, max_tokens=5)
    driver.add(short)
    driver.run()
    assert_right(driver, short)


def test_a_prompt_without_room_for_output_is_refused() -> None:
    driver = make_driver(max_model_len=20)
    with pytest.raises(ContextLengthError, match="20 tokens; the model takes 20"):
        driver.add(make_request(20))
    driver.add(make_request(19), make_request(20, max_tokens=0))


def test_more_sequences_than_may_run_are_refused() -> None:  # C076
    driver = make_driver(max_num_seqs=4)
    for options in ({"n": 16}, {"best_of": 16}, {"beam": BeamParams(width=16)}):
        with pytest.raises(RequestError, match="16 sequences were asked for; at most 4"):
            driver.add(make_request(5, temperature=1.0, **options))


def test_an_empty_prompt_and_a_used_id_are_refused() -> None:
    driver = make_driver()
    with pytest.raises(RequestError, match="empty"):
        driver.add(make_request([]))
    driver.add(make_request(3, request_id="twice"))
    with pytest.raises(RequestError, match="twice"):
        driver.add(make_request(3, request_id="twice"))


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    driver = make_driver(max_queue_len=2, max_num_seqs=1)
    driver.add(make_request(3))
    driver.step()
    driver.add(make_request(3), make_request(3))
    with pytest.raises(QueueFullError, match="max-queue-len 2") as refused:
        driver.add(make_request(3))
    assert 1 <= refused.value.retry_after <= 60
    driver.run()
    driver.add(make_request(3))


# -- ends --------------------------------------------------------------------------------------------------------------


def test_stop_tokens_eos_and_lengths_end_a_sequence() -> None:
    driver = make_driver()
    plain = make_request(5, max_tokens=12)
    tokens = driver.executor.model.generate(plain)
    place = next(i for i in range(3, 12) if tokens[i] not in tokens[:i])
    stop = {"prompt": plain.prompt_token_ids, "max_tokens": 12}
    by_eos = make_request(**stop, eos_token_ids=(tokens[place],))
    by_token = make_request(**stop, stop_token_ids=(tokens[place],))
    ignoring = make_request(**stop, eos_token_ids=(tokens[place],), ignore_eos=True)
    patient = make_request(**stop, eos_token_ids=(tokens[place],), min_tokens=place + 1)
    driver.add(plain, by_eos, by_token, ignoring, patient)
    results = driver.run()
    ends = {}
    for request in (plain, by_eos, by_token, ignoring, patient):
        result = results[request.request_id]
        ends[request.request_id] = (len(result.token_ids[0]), result.finish_reasons[0], result.stop_reasons[0])
    assert list(ends.values()) == [
        (12, "length", None),
        (place + 1, "stop", None),
        (place + 1, "stop", tokens[place]),
        (12, "length", None),
        ends[patient.request_id],
    ]
    assert ends[patient.request_id][0] > place + 1


def test_max_model_len_ends_a_sequence_without_max_tokens() -> None:
    driver = make_driver(max_model_len=20)
    request = make_request(12, max_tokens=None)
    driver.add(request)
    result = driver.run()[request.request_id]
    assert len(result.token_ids[0]) == 8 and result.finish_reasons[0] == "length"


@pytest.mark.parametrize("options", [{}, {"n": 3, "temperature": 1.0}, {"beam": BeamParams(width=3), "n": 2}])
def test_max_tokens_zero_computes_the_prompt_and_draws_nothing(options: dict[str, object]) -> None:
    driver = make_driver()
    request = make_request(9, max_tokens=0, prompt_logprobs=1, read_prefix_cache=False, **options)
    driver.add(request)
    result = driver.run()[request.request_id]
    n = request.sampling_params.n
    assert result.token_ids == {i: [] for i in range(n)}
    assert result.finish_reasons == {i: "length" for i in range(n)}
    assert [e.token_ids for e in result.prompt_logprobs] == [[t] for t in request.prompt_token_ids[1:]]
    driver.assert_idle()


def phases() -> list[str]:
    return ["waiting", "first chunk", "decoding", "swapped", "to be recomputed"]


@pytest.mark.parametrize("phase", phases())
@pytest.mark.parametrize(
    "options",
    [{}, {"n": 3, "temperature": 1.0}, {"best_of": 3, "temperature": 1.0}, {"beam": BeamParams(width=3)}],
    ids=["one", "n", "best_of", "beam"],
)
def test_abort_frees_everything_in_every_phase(phase: str, options: dict[str, object]) -> None:  # C072
    mode = "swap" if phase == "swapped" else "recompute"
    driver = make_driver(14, 14, max_num_batched_tokens=8, preemption_mode=mode, max_num_seqs=6)
    stays = make_request(10, max_tokens=35)
    goes = make_request(12, max_tokens=40, **options)
    blocker = make_request(4, max_tokens=6, n=4, temperature=1.0)
    driver.add(*([blocker] if phase == "waiting" else []), stays, goes)
    steps = {"waiting": 1, "first chunk": 2, "decoding": 12}
    if phase in steps:
        for _ in range(steps[phase]):
            driver.step()
    else:
        while not driver.scheduler.stats().num_swapped:
            driver.step()
    driver.take(driver.scheduler.abort([goes.request_id, "unknown"]))
    driver.scheduler.check()
    assert driver.results[goes.request_id].finished is not None
    driver.run()
    assert_right(driver, stays)
    driver.assert_idle()


def test_abort_between_a_steps_decision_and_its_results() -> None:
    driver = make_driver()
    goes, stays = make_request(5, max_tokens=9), make_request(5, max_tokens=9)
    driver.add(goes, stays)
    output = driver.scheduler.schedule()
    driver.take(driver.scheduler.abort([goes.request_id]))
    driver.take(driver.scheduler.update(output, driver.executor.execute(output)))
    driver.run()
    assert_right(driver, stays)
    driver.assert_idle()


def test_a_stop_string_ends_one_choice_and_no_other() -> None:
    driver = make_driver()
    request = make_request(6, n=3, temperature=1.0, max_tokens=10)
    driver.add(request)
    for _ in range(4):
        driver.step()
    driver.take(driver.scheduler.stop_sequence(request.request_id, 1))
    driver.take(driver.scheduler.stop_sequence(request.request_id, 1))
    driver.take(driver.scheduler.stop_sequence("unknown", 0))
    result = driver.run()[request.request_id]
    lengths = [len(result.token_ids[i]) for i in range(3)]
    assert lengths == [10, 4, 10]
    driver.assert_idle()


def test_stopping_the_last_choice_ends_the_request() -> None:
    driver = make_driver()
    request = make_request(6, max_tokens=10)
    driver.add(request)
    driver.step()
    driver.take(driver.scheduler.stop_sequence(request.request_id, 0))
    assert driver.results[request.request_id].finished is not None
    driver.run()
    driver.assert_idle()


@pytest.mark.parametrize("num_steps", [0, 1, 6])
def test_a_deadline_ends_a_request_in_any_phase(num_steps: int) -> None:
    clock = Clock()
    driver = make_driver(clock=clock, max_num_batched_tokens=8)
    late = make_request(14, max_tokens=50, n=2, temperature=1.0, deadline=clock.now + 5, arrival_time=clock.now)
    calm = make_request(4, max_tokens=20)
    driver.add(late, calm)
    for _ in range(num_steps):
        driver.step()
    clock.now += 6
    result = driver.run()[late.request_id]
    assert result.finish_reasons == {0: "timeout", 1: "timeout"}
    assert result.finished.error_kind == "DeadlineExceededError" and "6.0 s" in result.finished.error
    assert_right(driver, calm)
    driver.assert_idle()


def test_a_failed_step_costs_its_own_requests_only() -> None:
    driver = make_driver(max_num_seqs=2)
    scheduled = [make_request(5, max_tokens=9) for _ in range(2)]
    waits = make_request(5, max_tokens=9)
    driver.add(*scheduled, waits)
    driver.step()
    output = driver.scheduler.schedule()
    driver.executor.execute(output)
    driver.take(driver.scheduler.fail_step(output, "the device is on fire"))
    driver.scheduler.check()
    for request in scheduled:
        result = driver.results[request.request_id]
        assert result.finish_reasons == {0: "error"}
        assert (result.finished.error_kind, result.finished.error) == ("EngineStepError", "the device is on fire")
    driver.run()
    assert_right(driver, waits)
    driver.assert_idle()


def test_blocks_of_a_failed_step_are_never_found() -> None:
    driver = make_driver()
    request = make_request(9, max_tokens=3)
    driver.add(request)
    output = driver.scheduler.schedule()
    # The worker raised before it had computed anything, but after it had read the rows.
    driver.executor._apply_rows(output)
    driver.take(driver.scheduler.fail_step(output, "failed"))
    again = make_request(request.prompt_token_ids, max_tokens=3)
    driver.add(again)
    driver.run()
    assert_right(driver, again)
    assert driver.results[again.request_id].finished.num_cached_tokens == 0


def test_unusable_logits_end_one_sequence() -> None:
    driver = make_driver()
    broken, fine = make_request(5, max_tokens=6), make_request(5, max_tokens=6)
    driver.add(broken, fine)
    driver.step()
    driver.executor.broken = {driver.steps[0].seq_ids[0]}
    driver.run()
    result = driver.results[broken.request_id]
    assert result.finish_reasons == {0: "error"}
    assert (result.finished.error_kind, result.finished.error) == ("EngineStepError", "all logits are NaN")
    assert_right(driver, fine)
    driver.assert_idle()


def test_one_unusable_choice_does_not_fail_its_siblings() -> None:
    driver = make_driver()
    request = make_request(5, n=3, temperature=1.0, max_tokens=6)
    driver.add(request)
    driver.step()
    driver.executor.broken = {max(driver.executor.rows)}
    result = driver.run()[request.request_id]
    assert sorted(result.finish_reasons.values()) == ["error", "length", "length"]
    assert result.finished.error is None


# -- what is told ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_prompt_logprobs_are_told_once_though_computed_twice(mode: str) -> None:
    driver = make_driver(16, 16, max_num_batched_tokens=6, preemption_mode=mode)
    request = make_request(14, max_tokens=2, prompt_logprobs=0, read_prefix_cache=False)
    driver.add(request)
    driver.step()
    driver.step()
    driver.scheduler._preemption.preempt(driver.scheduler._groups.running[0])
    result = driver.run()[request.request_id]
    assert_right(driver, request)
    assert [e.token_ids[0] for e in result.prompt_logprobs] == request.prompt_token_ids[1:]


def test_logprobs_stay_beside_their_rows() -> None:
    driver = make_driver()
    with_logprobs, without = make_request(4, logprobs=1, max_tokens=5), make_request(4, max_tokens=5)
    driver.add(without, with_logprobs)
    results = driver.run()
    result = results[with_logprobs.request_id]
    assert [e.token_ids[0] for e in result.logprobs[0]] == result.token_ids[0]
    assert not results[without.request_id].logprobs


def test_stats_are_totals_and_the_present_state() -> None:
    driver = make_driver(max_num_seqs=2)
    driver.add(*(make_request(8, max_tokens=4) for _ in range(3)))
    driver.step()
    stats = driver.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_swapped) == (2, 1, 0)
    assert stats.kv_cache_usage == 4 / 64
    assert (stats.num_steps, stats.num_step_tokens) == (1, 16)
    driver.run()
    stats = driver.scheduler.stats()
    assert stats.num_step_tokens == sum(o.num_tokens for o in driver.steps) == 3 * (8 + 3)
    assert stats.prefix_cache_queries == 24


def test_first_scheduled_time_is_that_of_the_first_step() -> None:
    clock = Clock()
    driver = make_driver(clock=clock)
    request = make_request(4, max_tokens=4)
    driver.add(request)
    clock.now = 107.0
    driver.step()
    clock.now = 200.0
    assert driver.run()[request.request_id].finished.first_scheduled_time == 107.0
