"""KVCacheManager: tables grow by what tokens need, share, copy before writing, move to the host and back."""

from __future__ import annotations

import pytest

from pagedserve.sequence import Sequence
from tests.helpers.factories import make_request
from tests.kv_cache.tables import BLOCK, blocks_of, compute, fork, make_manager, open_sequence, seq_ids, used

# -- growth ------------------------------------------------------------------------------------------------------------


def test_a_block_is_taken_when_a_token_needs_it_and_not_before() -> None:
    manager = make_manager()
    sequence = open_sequence(manager, list(range(10)))
    taken = [len(compute(manager, sequence, 1)) for _ in range(10)]
    assert taken == [1, 0, 0, 0, 1, 0, 0, 0, 1, 0]


def test_write_changes_nothing_where_blocks_are_lacking() -> None:
    manager = make_manager(2)
    sequence = open_sequence(manager, list(range(12)))
    assert manager.write(sequence, 12) is None
    assert used(manager) == 0
    assert len(compute(manager, sequence, 8)) == 2


def test_only_blocks_that_the_row_does_not_know_are_reported() -> None:
    manager = make_manager()
    sequence = open_sequence(manager, list(range(9)))
    first = compute(manager, sequence, 4)
    known = manager.row_block_ids(sequence)
    assert known == first
    assert manager.row_block_ids(sequence) + compute(manager, sequence, 5) == manager.row_block_ids(sequence)


def test_close_gives_everything_back() -> None:
    manager = make_manager()
    sequence = open_sequence(manager, list(range(10)))
    compute(manager, sequence)
    manager.close(sequence)
    manager.check()
    assert used(manager) == 0 and manager.num_tables == 0


# -- sharing and copy-on-write (C079) ----------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt_len", [7, 8, 9])
@pytest.mark.parametrize("num_children", [1, 2, 4])
def test_forks_share_all_blocks_and_copy_only_a_partial_last_one(prompt_len: int, num_children: int) -> None:  # C079
    manager = make_manager()
    parent = open_sequence(manager, list(range(prompt_len)))
    compute(manager, parent)
    children = [fork(manager, parent) for _ in range(num_children)]
    assert used(manager) == manager.num_blocks_of(prompt_len)
    family = [parent, *children]
    for i, sequence in enumerate(family):
        sequence.token_ids.append(100 + i)
    missing = manager.num_missing_blocks(family, [prompt_len + 1] * len(family))
    before = used(manager)
    for sequence in family:
        compute(manager, sequence)
    assert used(manager) - before == missing
    copies = manager.take_block_ops()[0].copy
    # A full last block is never copied; of a partial one the last writer keeps the original.
    assert len(copies) == (0 if prompt_len % BLOCK == 0 else num_children)
    tables = blocks_of(manager, *family)
    full = prompt_len // BLOCK
    assert all(table[:full] == tables[0][:full] for table in tables)
    assert len({tuple(table[full:]) for table in tables}) == len(family)
    for sequence in family:
        manager.close(sequence)
        manager.check()
    assert used(manager) == 0


def test_the_last_owner_writes_in_place() -> None:
    manager = make_manager()
    parent = open_sequence(manager, list(range(6)))
    compute(manager, parent)
    child = fork(manager, parent)
    manager.close(parent)
    child.token_ids.append(9)
    compute(manager, child)
    assert not manager.take_block_ops()[0]


def test_a_copy_is_told_to_the_row_that_knew_the_shared_block() -> None:
    manager = make_manager()
    parent = open_sequence(manager, list(range(6)))
    compute(manager, parent)
    child = fork(manager, parent)
    known = blocks_of(manager, parent)[0]
    child.token_ids.append(9)
    assert compute(manager, child) == []
    ops, replaced = manager.take_block_ops()
    assert ops.copy == [(known[1], replaced[0][2])]
    assert replaced == [(child.seq_id, 1, blocks_of(manager, child)[0][1], 0)]


def test_a_row_forked_before_a_step_lacks_that_steps_blocks() -> None:
    manager = make_manager()
    parent = open_sequence(manager, list(range(6)))
    compute(manager, parent, 4)
    new = compute(manager, parent, 2)
    child = Sequence(next(seq_ids), 1, list(parent.token_ids), 6)
    manager.fork(parent, child, num_unsent=len(new))
    child.token_ids.append(9)
    own = compute(manager, child)
    ops, replaced = manager.take_block_ops()
    assert ops.copy == [(new[0], own[0])] and replaced == []


def test_attach_shares_what_a_sibling_has_computed() -> None:
    manager = make_manager()
    source = open_sequence(manager, list(range(10)))
    other = open_sequence(manager, [*range(7), 99])
    compute(manager, source)
    manager.attach(source, other, 7)
    assert other.num_computed_tokens == 7 and used(manager) == 3
    compute(manager, other)
    a, b = blocks_of(manager, source, other)
    assert a[0] == b[0] and a[1] != b[1]
    assert manager.take_block_ops()[0].copy == [(a[1], b[1])]


# -- prefix cache (C080, C081, C082) -----------------------------------------------------------------------------------


def test_a_prefix_is_found_after_its_step_and_not_before() -> None:
    manager = make_manager()
    prompt = list(range(9))
    first, second = open_sequence(manager, prompt), open_sequence(manager, prompt)
    assert manager.write(first, 9) is not None
    first.num_computed_tokens = 9
    assert manager.take_prefix(second) == 0
    manager.commit(manager.take_writes())
    assert manager.take_prefix(second) == 8
    manager.check()


def test_a_failed_step_leaves_nothing_to_be_found() -> None:
    manager = make_manager()
    first, second = open_sequence(manager, list(range(9))), open_sequence(manager, list(range(9)))
    manager.write(first, 9)
    manager.take_writes()
    manager.close(first)
    manager.commit(manager.take_writes())
    assert manager.take_prefix(second) == 0


@pytest.mark.parametrize(("prompt_len", "cached"), [(1, 0), (3, 2), (4, 3), (5, 4), (7, 6), (8, 7), (9, 8), (16, 15)])
def test_the_last_token_is_always_computed(prompt_len: int, cached: int) -> None:
    manager = make_manager()
    prompt = list(range(prompt_len))
    first = open_sequence(manager, prompt)
    compute(manager, first)
    manager.close(first)
    again = open_sequence(manager, prompt)
    assert manager.take_prefix(again) == cached
    assert again.num_computed_tokens == cached


def test_output_is_found_as_a_prefix_too() -> None:
    manager = make_manager()
    first = open_sequence(manager, list(range(6)))
    compute(manager, first)
    for token_id in (70, 71, 72):
        first.token_ids.append(token_id)
        compute(manager, first)
    follow_up = open_sequence(manager, [*first.token_ids, 5])
    assert manager.take_prefix(follow_up) == 8


def test_adapter_and_salt_keep_prefixes_apart() -> None:  # C080
    manager = make_manager(64)
    keys = [{}, {"cache_salt": "x"}, {"cache_salt": "y"}, {"adapter": "x"}, {"adapter": "x", "cache_salt": "x"}]
    for options in keys:
        sequence = open_sequence(manager, list(range(9)), **options)
        assert manager.take_prefix(sequence) == 0
        compute(manager, sequence)
    for options in keys:
        assert manager.take_prefix(open_sequence(manager, list(range(9)), **options)) == 8


def test_the_end_of_a_chain_is_evicted_before_its_beginning() -> None:
    manager = make_manager(4)
    prompt = list(range(17))
    first = open_sequence(manager, prompt[:16])
    compute(manager, first)
    manager.close(first)
    intruder = open_sequence(manager, [50, 51, 52, 53, 54])
    compute(manager, intruder)
    manager.close(intruder)
    assert manager.take_prefix(open_sequence(manager, prompt)) == 8


def test_hits_are_held_from_the_look_up_on() -> None:
    manager = make_manager(4)
    first = open_sequence(manager, list(range(8)))
    compute(manager, first)
    manager.close(first)
    again = open_sequence(manager, list(range(9)))
    assert manager.take_prefix(again) == 8
    intruder = open_sequence(manager, [50, 51, 52, 53, 54, 55, 56, 57, 58])
    assert manager.write(intruder, 9) is None
    assert manager.write(intruder, 8) is not None


def test_a_hidden_part_is_not_found() -> None:
    manager = make_manager()
    sequence = Sequence(next(seq_ids), 0, list(range(9)), 9)
    manager.open(sequence, make_request(list(range(9))), num_findable_tokens=6)
    compute(manager, sequence)
    assert manager.take_prefix(open_sequence(manager, list(range(9)))) == 4


def test_without_prefix_caching_nothing_is_found() -> None:
    manager = make_manager(enable_prefix_caching=False)
    compute(manager, open_sequence(manager, list(range(9))))
    assert manager.take_prefix(open_sequence(manager, list(range(9)))) == 0


def test_reset_hides_what_runs_and_what_it_computes_later() -> None:
    manager = make_manager()
    prompt = list(range(12))
    running = open_sequence(manager, prompt)
    compute(manager, running, 8)
    manager.reset_prefix_cache()
    compute(manager, running, 4)
    fresh = open_sequence(manager, [*prompt, 1])
    assert manager.take_prefix(fresh) == 0
    compute(manager, fresh)
    # Blocks 0..2 of the new computation are found, none of the old one.
    found = open_sequence(manager, [*prompt, 2])
    assert manager.take_prefix(found) == 12
    assert blocks_of(manager, found)[0] == blocks_of(manager, fresh)[0][:3]


def test_a_waiting_prompts_estimate_follows_the_index() -> None:
    manager = make_manager()
    prompt = list(range(17))
    waiting = open_sequence(manager, prompt)
    ask = lambda **o: manager.num_blocks_to_admit(waiting, use_prefix=True, **o)  # noqa: E731
    assert ask() == 5
    first = open_sequence(manager, prompt[:8])
    compute(manager, first)
    assert ask() == 3
    manager.close(first)
    # The two blocks are free now, and taking them costs two free blocks.
    assert ask(exact=True) == 5
    assert manager.num_blocks_to_admit(waiting, use_prefix=False) == 5


# -- preemption --------------------------------------------------------------------------------------------------------


def test_release_keeps_the_table_and_what_can_be_found() -> None:
    manager = make_manager()
    sequence = open_sequence(manager, list(range(9)))
    compute(manager, sequence)
    manager.release(sequence)
    manager.check()
    assert used(manager) == 0 and sequence.num_computed_tokens == 0
    assert manager.take_prefix(sequence) == 8


def test_swap_moves_shared_blocks_once_and_keeps_them_shared() -> None:
    manager = make_manager(8, 8)
    parent = open_sequence(manager, list(range(8)))
    compute(manager, parent)
    family = [parent, fork(manager, parent), fork(manager, parent)]
    for i, sequence in enumerate(family):
        sequence.token_ids.append(i)
        compute(manager, sequence)
    device_tables = blocks_of(manager, *family)
    assert manager.swap_out(family)
    manager.check()
    assert used(manager) == 0 and manager.host.num_free == 3
    swapped = dict(manager.take_block_ops()[0].swap_out)
    assert set(swapped) == {block for table in device_tables for block in table}
    assert blocks_of(manager, *family) == [[swapped[b] for b in table] for table in device_tables]
    manager.swap_in(family)
    manager.check()
    back = dict(manager.take_block_ops()[0].swap_in)
    assert blocks_of(manager, *family) == [[back[swapped[b]] for b in table] for table in device_tables]
    assert manager.host.num_free == 8 and used(manager) == 5
    assert [s.num_computed_tokens for s in family] == [9, 9, 9]


def test_swap_out_changes_nothing_where_the_host_is_full() -> None:
    manager = make_manager(8, 2)
    sequence = open_sequence(manager, list(range(12)))
    compute(manager, sequence)
    assert not manager.swap_out([sequence])
    assert not manager.take_block_ops()[0]
    assert used(manager) == 3 and manager.host.num_free == 2


def test_swapped_blocks_are_not_found_on_the_device() -> None:
    manager = make_manager(8, 8)
    sequence = open_sequence(manager, list(range(9)))
    compute(manager, sequence)
    assert manager.swap_out([sequence])
    assert manager.take_prefix(open_sequence(manager, list(range(9)))) == 0


def test_a_prefix_that_others_hold_stays_and_is_shared_on_return() -> None:
    manager = make_manager(8, 8)
    stays, moves = open_sequence(manager, list(range(9))), open_sequence(manager, [*range(8), 70])
    compute(manager, stays)
    manager.take_prefix(moves)
    compute(manager, moves)
    assert manager.swap_out([moves])
    assert len(manager.take_block_ops()[0].swap_out) == 3
    manager.swap_in([moves])
    manager.check()
    assert len(manager.take_block_ops()[0].swap_in) == 1
    a, b = blocks_of(manager, stays, moves)
    assert a[:2] == b[:2]


def test_returned_blocks_are_found_again_after_their_step() -> None:
    manager = make_manager(8, 8)
    sequence = open_sequence(manager, list(range(9)))
    compute(manager, sequence)
    assert manager.swap_out([sequence])
    manager.swap_in([sequence])
    sequence.token_ids.append(3)
    compute(manager, sequence)
    assert manager.take_prefix(open_sequence(manager, list(range(9)))) == 8


def test_the_host_pool_is_never_larger_than_the_device_pool() -> None:
    assert make_manager(4, 100).host.num_blocks == 4


def test_held_tokens_count_shared_blocks_once() -> None:
    manager = make_manager()
    parent = open_sequence(manager, list(range(6)))
    compute(manager, parent)
    child = fork(manager, parent)
    assert manager.num_held_tokens([parent, child]) == 6 and manager.num_held_blocks([parent, child]) == 2
    child.token_ids.append(1)
    compute(manager, child)
    assert manager.num_held_tokens([parent, child]) == 6 + 3


def test_what_was_hidden_stays_hidden_in_those_who_share_it() -> None:
    manager = make_manager()
    prompt = list(range(8))
    parent, late = open_sequence(manager, prompt), open_sequence(manager, [*prompt, 5])
    compute(manager, parent)
    manager.reset_prefix_cache()
    child = fork(manager, parent)
    manager.attach(parent, late, 8)
    for sequence in (child, late):
        sequence.token_ids += [1, 2, 3, 4]
        compute(manager, sequence)
    assert manager.take_prefix(open_sequence(manager, [*prompt, 7])) == 0
