from __future__ import annotations

import pytest

from pagedserve.scheduler.in_flight import InFlight
from pagedserve.sequence import PLACEHOLDER, Sequence
from pagedserve.step import SchedulerOutput


def test_results_come_in_order() -> None:
    steps, first, second = InFlight(), SchedulerOutput(step_id=1), SchedulerOutput(step_id=2)
    writes = [(Sequence(0, 0, [1], 1), 1)]
    steps.begin(first, writes)
    steps.begin(second, [])
    assert len(steps) == 2 and steps.last is second and first in steps and second not in steps
    with pytest.raises(AssertionError, match="order"):
        steps.end(second)
    assert steps.end(first) is writes
    assert steps.end(second) == [] and not len(steps)


def test_what_is_on_its_way_is_taken_back_to_before_the_oldest_step() -> None:
    steps = InFlight()
    sequence, child, other = (Sequence(i, 0, [1] * 9, 9, num_computed_tokens=9) for i in range(3))
    sequence.draft_token_ids = PLACEHOLDER
    sequence.num_computed_tokens = 10
    steps.begin(
        SchedulerOutput(step_id=1, seq_ids=[0], num_scheduled=[5], num_computed=[4], shared_logits=[(1, 0)]), []
    )
    steps.begin(SchedulerOutput(step_id=2, seq_ids=[1, 0], num_scheduled=[1, 1], num_computed=[9, 9]), [])
    for one in (sequence, child, other):
        steps.rewind(one)
    assert [one.num_computed_tokens for one in (sequence, child, other)] == [4, 4, 9]
    assert sequence.num_tokens == 9
