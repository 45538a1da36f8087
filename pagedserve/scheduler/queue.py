"""The order of groups, and a queue that keeps it."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from pagedserve.registry import Registry
from pagedserve.scheduler.group import Group
from pagedserve.sequence import IDLE_PRIORITY, Request

# A policy makes a group's key from its request and the number of its arrival; smaller keys go first.
Policy = Callable[[Request, int], tuple[float, ...]]

POLICIES: Registry[Policy] = Registry(
    "scheduling policy",
    {
        "fcfs": "pagedserve.scheduler.queue:first_come",
        "priority": "pagedserve.scheduler.queue:lowest_priority_value",
    },
)


# A second of waiting weighs as much as this share of a step in `priority`: nobody waits for ever behind a flow of
# requests that are more urgent. Because everybody ages alike, a key never changes.
SECONDS_PER_PRIORITY = 30.0


def first_come(request: Request, arrival: int) -> tuple[float, ...]:
    """First come, first served; idle requests last."""
    return (request.priority >= IDLE_PRIORITY, arrival)


def lowest_priority_value(request: Request, arrival: int) -> tuple[float, ...]:
    """Lower `priority` first, each step worth 30 s of waiting; idle requests last."""
    urgency = request.priority * SECONDS_PER_PRIORITY + request.arrival_time
    return (request.priority >= IDLE_PRIORITY, urgency, arrival)


class GroupQueue:
    """Groups by key. A removed group's entry stays in the heap until it comes up."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, ...], Group]] = []
        self._members: set[Group] = set()
        # Groups in it that are not idle.
        self.num_urgent = 0

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, group: Group) -> bool:
        return group in self._members

    def push(self, group: Group) -> None:
        """Enter a group at its key's place."""
        self._members.add(group)
        self.num_urgent += not group.is_idle
        heapq.heappush(self._heap, (group.key, group))

    def remove(self, group: Group) -> None:
        """Leave the queue from any place; nothing happens where the group is not in it."""
        if group in self._members:
            self._members.remove(group)
            self.num_urgent -= not group.is_idle

    def peek(self) -> Group | None:
        """The group whose turn it is."""
        while self._heap and self._heap[0][1] not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Group:
        """Take out the group whose turn it is; IndexError if there is none."""
        group = self.peek()
        if group is None:
            raise IndexError("no group is waiting")
        heapq.heappop(self._heap)
        self.remove(group)
        return group
