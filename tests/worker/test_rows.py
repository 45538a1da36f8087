from __future__ import annotations

import numpy as np
import pytest

from pagedserve.sampling_params import SamplingParams
from pagedserve.step import NewSequence, SchedulerOutput
from pagedserve.worker.rows import Rows

BLOCK = 4


def new(seq_id: int, token_ids: list[int], block_ids: list[int], **fields: object) -> NewSequence:
    return NewSequence(
        seq_id=seq_id,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        num_computed_tokens=0,
        block_ids=block_ids,
        sampling_params=fields.pop("params", SamplingParams()),
        seed=fields.pop("seed", 1),
        choice_index=0,
    )


def apply(rows: Rows, **fields: object) -> None:
    rows.apply(SchedulerOutput(step_id=0, **fields))


def tokens(rows: Rows, seq_id: int) -> list[int]:
    row = rows.row_of(seq_id)
    return rows.token_ids[row, : rows.num_tokens[row]].tolist()


def test_a_fork_is_a_copy_that_goes_its_own_way() -> None:
    rows = Rows(4, BLOCK)
    apply(rows, new=[new(0, [1, 2, 3], [10, 11])])
    apply(rows, forks=[(0, 1, 5)], appended=[(0, 7), (1, 8)], replaced_blocks=[(1, 1, 12, 0)])
    assert tokens(rows, 0) == [1, 2, 3, 7] and tokens(rows, 1) == [1, 2, 3, 8]
    assert rows.block_tables.of(rows.row_of(0)) == [10, 11]
    assert rows.block_tables.of(rows.row_of(1)) == [10, 12]
    assert rows.state_of(1).choice_index == 5
    assert rows.state_of(1).stream != rows.state_of(0).stream


def test_tables_of_several_layer_groups_go_their_own_ways() -> None:
    rows = Rows(4, BLOCK, num_groups=2)
    apply(rows, new=[new(0, [1, 2, 3], [10, 11, 20, 21])])
    apply(rows, forks=[(0, 1, 5)], replaced_blocks=[(1, 1, 12, 0), (1, 1, 22, 1)])
    apply(rows, seq_ids=[0, 1], new_block_ids=[[13, 23], []], num_scheduled=[1, 1], num_computed=[0, 0])
    assert rows.block_tables.of(rows.row_of(0)) == [10, 11, 13, 20, 21, 23]
    assert rows.block_tables.of(rows.row_of(1)) == [10, 12, 20, 22]


def test_order_of_a_step_forks_then_released_then_new() -> None:
    """The parent leaves in the step in which its child is born, and a newcomer gets its row."""
    rows = Rows(2, BLOCK)
    apply(rows, new=[new(0, [1, 2], [10])])
    apply(rows, forks=[(0, 1, 1)], released=[0], new=[new(0, [9], [20])])
    assert tokens(rows, 1) == [1, 2] and tokens(rows, 0) == [9]
    assert rows.block_tables.of(rows.row_of(1)) == [10]
    assert rows.block_tables.of(rows.row_of(0)) == [20]
    assert len(rows.states) == 2


def test_everything_grows() -> None:
    rows = Rows(1, BLOCK, num_tokens=4)
    apply(rows, new=[new(0, list(range(3)), [1])])
    for i in range(1, 40):
        apply(rows, new=[new(i, list(range(50 * i)), list(range(i)))])
    for step in range(100):
        rows.append(rows.rows_of([0, 39]), np.array([step, 1000 + step]))
    assert tokens(rows, 0) == [0, 1, 2, *range(100)]
    assert tokens(rows, 39) == [*range(50 * 39), *range(1000, 1100)]
    assert tokens(rows, 20) == list(range(1000))
    for i in range(1, 40):
        assert rows.block_tables.of(rows.row_of(i)) == list(range(i))
    assert len({rows.row_of(i) for i in range(40)}) == 40


def test_blocks_appended_one_by_one_beyond_the_first_capacity() -> None:
    rows = Rows(2, BLOCK, num_tokens=8)
    apply(rows, new=[new(0, [1], []), new(1, [2], [])])
    for block in range(30):
        apply(
            rows,
            seq_ids=[0, 1],
            num_scheduled=[1, 1],
            num_computed=[0, 0],
            new_block_ids=[[block], [100 + block, 200 + block]],
        )
    assert rows.block_tables.of(rows.row_of(0)) == list(range(30))
    assert rows.block_tables.of(rows.row_of(1)) == [x for b in range(30) for x in (100 + b, 200 + b)]


def test_generation_changes_when_rows_change_hands_and_only_then() -> None:
    rows = Rows(2, BLOCK)
    apply(rows, new=[new(0, [1], [0])])
    before = rows.generation
    apply(rows, seq_ids=[0], num_scheduled=[1], num_computed=[0], new_block_ids=[[3]])
    rows.append(rows.rows_of([0]), np.array([4]))
    assert rows.generation == before
    apply(rows, released=[0], new=[new(0, [1], [0])])
    assert rows.generation > before


def test_a_release_of_a_row_that_never_came_into_being_is_no_mistake() -> None:
    rows = Rows(1, BLOCK)
    apply(rows, released=[7], new=[new(0, [1], [0])])
    apply(rows, released=[0, 7], new=[new(1, [2], [1])])
    assert len(rows) == 1


def test_prompt_logprobs_are_remembered_until_the_row_is_released() -> None:
    rows = Rows(2, BLOCK)
    apply(rows, new=[new(0, [1], [0], params=SamplingParams(prompt_logprobs=0)), new(1, [1], [1])])
    assert rows.with_prompt_logprobs == {0}
    apply(rows, released=[0])
    assert rows.with_prompt_logprobs == set()


def test_replacing_a_block_that_is_not_there_is_refused() -> None:
    rows = Rows(2, BLOCK)
    apply(rows, new=[new(0, [1], [0])])
    with pytest.raises(IndexError):
        apply(rows, replaced_blocks=[(0, 1, 5, 0)])
