"""WorkerRows: the differences that a worker is sent make sense in the order in which it applies them."""

from __future__ import annotations

from pagedserve.scheduler.worker_rows import WorkerRows
from pagedserve.sequence import Sequence
from pagedserve.step import SchedulerOutput
from tests.helpers.factories import make_request

REQUEST = make_request(3, seed=7)


def sequence(seq_id: int) -> Sequence:
    return Sequence(seq_id, 0, [1, 2, 3], 3)


def recorded(rows: WorkerRows) -> SchedulerOutput:
    output = SchedulerOutput(step_id=1)
    rows.record(output)
    return output


def known(rows: WorkerRows, *sequences: Sequence) -> None:
    for s in sequences:
        rows.add(s, REQUEST, [])
    recorded(rows)


def test_a_new_row_is_a_copy_of_the_sequence_as_it_is_now() -> None:
    rows, a = WorkerRows(), sequence(1)
    rows.add(a, REQUEST, [4])
    a.token_ids.append(9)
    (new,) = recorded(rows).new
    assert (new.seq_id, new.token_ids, new.block_ids, new.seed) == (1, [1, 2, 3], [4], 7)
    assert not recorded(rows).new


def test_a_row_is_released_once_and_only_if_it_exists() -> None:
    rows, a = WorkerRows(), sequence(1)
    rows.release(a)
    assert not rows.is_changed
    known(rows, a)
    rows.release(a)
    rows.release(a)
    assert rows.is_changed and recorded(rows).released == [1]
    assert not rows.is_changed


def test_a_row_that_was_never_sent_is_not_released_either() -> None:
    rows, a = WorkerRows(), sequence(1)
    rows.add(a, REQUEST, [])
    rows.release(a)
    output = recorded(rows)
    assert not output.new and not output.released


def test_a_return_in_the_step_of_the_release_is_both() -> None:
    rows, a = WorkerRows(), sequence(1)
    known(rows, a)
    rows.release(a)
    rows.add(a, REQUEST, [])
    output = recorded(rows)
    assert output.released == [1] and [n.seq_id for n in output.new] == [1]


def test_forks_appends_and_deaths_of_beams_are_kept() -> None:
    rows, parent, child, dead = WorkerRows(), sequence(1), sequence(2), sequence(3)
    known(rows, parent, dead)
    rows.fork(parent, child)
    rows.release(dead)
    rows.append(parent, 5)
    rows.append(child, 6)
    output = recorded(rows)
    assert output.forks == [(1, 2, 0)] and output.released == [3] and output.appended == [(1, 5), (2, 6)]


def test_a_fork_that_lost_its_row_before_the_step_is_not_told() -> None:
    rows, parent, child = WorkerRows(), sequence(1), sequence(2)
    known(rows, parent)
    rows.fork(parent, child)
    rows.append(parent, 5)
    rows.append(child, 6)
    rows.release(parent)
    rows.release(child)
    output = recorded(rows)
    assert output.forks == [] and output.released == [1] and output.appended == []
