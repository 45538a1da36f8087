"""Steps that are decided while the one before them is under way."""

from __future__ import annotations

from typing import Any

import pytest

from pagedserve.sampling_params import BeamParams
from pagedserve.sequence import IDLE_PRIORITY
from tests.helpers.factories import Clock, make_request
from tests.helpers.fake_executor import Driver
from tests.scheduler.running import assert_right, make_driver


def tokens_computed(driver: Driver) -> int:
    return sum(output.num_tokens for output in driver.steps)


@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_batched_tokens": 8}, {"max_num_seqs": 3}, {"windows": (6,)}, {"enable_prefix_caching": False}],
)
def test_answers_are_those_of_steps_in_turn(options: dict[str, Any]) -> None:
    requests = [make_request(5 + 3 * i, max_tokens=4 + 5 * i) for i in range(5)]
    requests.append(make_request(7, n=3, temperature=1.0, max_tokens=9))
    driver = make_driver(128, looks_ahead=True, **options)
    driver.add(*requests)
    driver.run()
    assert_right(driver, *requests)
    driver.assert_idle()
    assert driver.num_looked_ahead > len(driver.steps) / 2


def test_who_is_sure_to_end_is_not_computed_once_more() -> None:
    driver = make_driver(looks_ahead=True)
    requests = [make_request(6, max_tokens=n) for n in (0, 1, 2, 5)]
    driver.add(*requests)
    driver.run()
    assert tokens_computed(driver) == sum(6 + max(r.sampling_params.max_tokens - 1, 0) for r in requests)
    driver.assert_idle()


def test_a_stop_token_costs_one_token_that_nobody_hears_of() -> None:
    driver = make_driver(looks_ahead=True)
    request = make_request(6, max_tokens=30)
    token_ids = driver.executor.model.generate(request)
    place = next(i for i in range(3, 30) if token_ids[i] not in token_ids[:i])
    request = make_request(request.prompt_token_ids, max_tokens=30, stop_token_ids=(token_ids[place],))
    driver.add(request)
    driver.run()
    assert driver.results[request.request_id].token_ids[0] == token_ids[: place + 1]
    assert tokens_computed(driver) == 6 + place + 1
    driver.assert_idle()


def test_blocks_are_free_although_a_step_under_way_still_writes_into_them() -> None:
    driver = make_driver(4, looks_ahead=True)
    ends = make_request(6, max_tokens=30)
    first = driver.executor.model.generate(ends)[0]
    ends = make_request(ends.prompt_token_ids, max_tokens=30, stop_token_ids=(first,))
    waits = make_request(11, max_tokens=4)
    driver.add(ends, waits)
    driver.step()
    assert driver.results[ends.request_id].finished is not None and driver.under_way
    assert driver.scheduler.stats().kv_cache_usage == 0.0
    driver.run()
    assert_right(driver, waits)
    assert driver.results[waits.request_id].finished.num_preemptions == 0
    driver.assert_idle()


def test_beams_keep_everybody_waiting_for_results() -> None:
    driver = make_driver(looks_ahead=True)
    beams = make_request(5, beam=BeamParams(width=2), n=2, max_tokens=6)
    driver.add(beams, make_request(5, max_tokens=20))
    while driver.results[beams.request_id].finished is None:
        driver.step()
        assert driver.results[beams.request_id].finished is not None or not driver.under_way
    driver.run()
    assert driver.num_looked_ahead > 5


def test_nobody_gives_way_in_a_step_ahead() -> None:
    driver = make_driver(9, looks_ahead=True, preemption_mode="recompute")
    requests = [make_request(8, max_tokens=20) for _ in range(3)]
    driver.add(*requests)
    preemptions = 0
    while driver.scheduler.has_work() or driver.under_way:
        if not driver.under_way:
            driver.launch(driver.scheduler.schedule())
        preemptions = driver.scheduler.stats().num_preemptions
        if (ahead := driver.scheduler.schedule_ahead()) is not None:
            driver.num_looked_ahead += 1
            driver.launch(ahead)
        assert driver.scheduler.stats().num_preemptions == preemptions
        driver.record()
    assert preemptions > 0 and driver.num_looked_ahead > 0
    assert_right(driver, *requests)
    driver.assert_idle()


def test_swapped_groups_do_not_return_before_their_blocks_have_arrived() -> None:
    driver = make_driver(9, 9, looks_ahead=True, preemption_mode="swap")
    requests = [make_request(8, max_tokens=20) for _ in range(3)]
    driver.add(*requests)
    while driver.scheduler.has_work() or driver.under_way:
        if not driver.under_way:
            driver.launch(driver.scheduler.schedule())
        swaps_out = bool(driver.under_way[-1][0].block_ops.swap_out)
        if (ahead := driver.scheduler.schedule_ahead()) is not None:
            assert not swaps_out
            driver.launch(ahead)
        driver.record()
    assert driver.scheduler.stats().num_swapped_out_blocks > 0
    assert_right(driver, *requests)
    driver.assert_idle()


def test_idle_requests_give_way_at_once() -> None:
    driver = make_driver(looks_ahead=True, max_num_seqs=2)
    idle = [make_request(5, max_tokens=40, priority=IDLE_PRIORITY) for _ in range(2)]
    driver.add(*idle)
    for _ in range(3):
        driver.step()
    urgent = make_request(5, max_tokens=3)
    driver.add(urgent)
    for _ in range(6):
        driver.step()
    assert driver.results[urgent.request_id].finished is not None
    driver.run()
    assert_right(driver, urgent, *idle)


@pytest.mark.parametrize("how", ["abort", "stop", "deadline"])
def test_what_ends_while_a_step_is_under_way_frees_all_it_holds(how: str) -> None:
    clock = Clock()
    driver = make_driver(looks_ahead=True, clock=clock)
    goes = make_request(6, max_tokens=30, n=2, temperature=1.0, deadline=clock() + 5)
    stays = make_request(6, max_tokens=12)
    driver.add(goes, stays)
    for _ in range(3):
        driver.step()
    assert driver.under_way
    if how == "abort":
        driver.take(driver.scheduler.abort([goes.request_id]))
    elif how == "stop":
        for choice_index in range(2):
            driver.take(driver.scheduler.stop_sequence(goes.request_id, choice_index))
    else:
        clock.now += 6
        driver.step()
    driver.scheduler.check()
    assert driver.results[goes.request_id].finished is not None
    driver.run()
    assert_right(driver, stays)
    driver.assert_idle()


@pytest.mark.parametrize("is_computed", [True, False], ids=["after computing", "before"])
def test_a_failed_step_leaves_the_newcomers_of_the_next_alone(is_computed: bool) -> None:
    driver = make_driver(looks_ahead=True)
    victims = [make_request(6, max_tokens=20) for _ in range(2)]
    driver.add(*victims)
    driver.step()
    failing, _ = driver.under_way[0]
    if not is_computed:
        driver.record()
        driver.launch(driver.scheduler.schedule(), fails=True)
        failing, _ = driver.under_way[0]
    newcomer = make_request(victims[0].prompt_token_ids, max_tokens=7)
    driver.add(newcomer)
    ahead = driver.scheduler.schedule_ahead()
    assert ahead is not None and len(ahead.seq_ids) == 3
    driver.launch(ahead)
    driver.under_way[0] = (failing, None)
    driver.record()
    assert [driver.results[v.request_id].finished.error for v in victims] == ["failed"] * 2
    driver.run()
    assert_right(driver, newcomer)
    driver.assert_idle()


def test_an_error_of_one_row_costs_nobody_else() -> None:
    driver = make_driver(looks_ahead=True)
    bad, good = make_request(6, max_tokens=20), make_request(6, max_tokens=9)
    driver.add(bad, good)
    driver.step()
    driver.executor.broken.add(driver.steps[0].seq_ids[0])
    driver.run()
    assert driver.results[bad.request_id].finish_reasons == {0: "error"}
    assert_right(driver, good)
    driver.assert_idle()
