"""The waiting queue keeps its policy's order whatever leaves it early."""

from __future__ import annotations

import pytest

from pagedserve.errors import ConfigError
from pagedserve.scheduler.branching import Branching
from pagedserve.scheduler.group import Group
from pagedserve.scheduler.queue import POLICIES, SECONDS_PER_PRIORITY, GroupQueue
from pagedserve.scheduler.stopping import StopRule
from pagedserve.sequence import IDLE_PRIORITY
from tests.helpers.factories import make_request


def make_group(policy: str, arrival: int, priority: int = 0, seconds: float = 0.0) -> Group:
    request = make_request(3, priority=priority, arrival_time=seconds)
    return Group(
        request=request,
        sequences=[],
        key=POLICIES.resolve(policy)(request, arrival),
        stop=StopRule(request, 100),
        branching=Branching(request.sampling_params),
        num_seats=1,
    )


def drained(queue: GroupQueue) -> list[Group]:
    return [queue.pop() for _ in range(len(queue))]


def test_fcfs_ignores_priorities() -> None:
    groups = [make_group("fcfs", i, priority=-i) for i in range(4)]
    queue = GroupQueue()
    for i in (2, 0, 3, 1):
        queue.push(groups[i])
    assert drained(queue) == groups


def test_priority_orders_classes_and_arrival_within_them() -> None:
    groups = [make_group("priority", i, priority=p) for i, p in enumerate((1, 0, 1, 0))]
    queue = GroupQueue()
    for group in groups:
        queue.push(group)
    assert drained(queue) == [groups[i] for i in (1, 3, 0, 2)]


def test_waiting_makes_up_for_a_lower_class() -> None:
    step = SECONDS_PER_PRIORITY
    # (priority, arrival): the third came when the first had waited for longer than two classes are worth.
    asked = [(2, 0.0), (1, 0.9 * step), (0, 2.1 * step), (0, 1.9 * step)]
    groups = [make_group("priority", i, p, seconds) for i, (p, seconds) in enumerate(asked)]
    queue = GroupQueue()
    for group in groups:
        queue.push(group)
    assert drained(queue) == [groups[i] for i in (1, 3, 0, 2)]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_idle_requests_are_behind_all_others(policy: str) -> None:
    groups = [make_group(policy, i, p, 1e6 * i) for i, p in enumerate((IDLE_PRIORITY, 2**31 - 1, 0))]
    assert groups[0].is_idle and not groups[1].is_idle
    queue = GroupQueue()
    for group in groups:
        queue.push(group)
    assert (len(queue), queue.num_urgent) == (3, 2)
    assert drained(queue)[-1] is groups[0]
    assert queue.num_urgent == 0


def test_removed_groups_do_not_come_up() -> None:
    groups = [make_group("fcfs", i) for i in range(3)]
    queue = GroupQueue()
    for group in groups:
        queue.push(group)
    queue.remove(groups[0])
    queue.remove(groups[0])
    assert len(queue) == queue.num_urgent == 2 and groups[0] not in queue and queue.peek() is groups[1]
    assert drained(queue) == groups[1:]
    assert queue.peek() is None
    with pytest.raises(IndexError):
        queue.pop()


def test_an_unknown_policy_is_named_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="known: fcfs, priority"):
        POLICIES.resolve("shortest")
