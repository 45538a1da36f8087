"""Blocks that match a prompt in part (C082): shared, copied before they are written, or written on in place."""

from __future__ import annotations

from pagedserve.kv_cache.manager import KVCacheManager
from tests.kv_cache.tables import blocks_of, compute, make_manager, open_sequence


def finished(manager: KVCacheManager, token_ids: list[int], **options: object) -> list[int]:
    """Compute a sequence and end it; returns the blocks it had."""
    sequence = open_sequence(manager, token_ids, **options)
    compute(manager, sequence)
    blocks = blocks_of(manager, sequence)[0]
    manager.close(sequence)
    manager.check()
    return blocks


def taken(manager: KVCacheManager, token_ids: list[int], **options: object) -> int:
    """Tokens that a new prompt finds; it is computed and ended."""
    sequence = open_sequence(manager, token_ids, **options)
    num_tokens = manager.take_prefix(sequence)
    manager.check()
    compute(manager, sequence)
    manager.take_block_ops()
    manager.commit(manager.take_writes())
    manager.close(sequence)
    manager.check()
    return num_tokens


def test_a_prompt_that_differs_within_a_block_copies_it_and_leaves_it_to_others() -> None:
    manager = make_manager()
    old = finished(manager, list(range(12)))
    sequence = open_sequence(manager, [*range(6), 90, 91, 92])
    assert manager.take_prefix(sequence) == 6
    compute(manager, sequence)
    new = blocks_of(manager, sequence)[0]
    assert manager.take_block_ops()[0].copy == [(old[1], new[1])] and new[0] == old[0]
    manager.commit(manager.take_writes())
    assert taken(manager, [*range(12), 1]) == 12
    assert taken(manager, [*range(6), 90, 91, 5]) == 8


def test_the_tail_of_a_finished_sequence_is_written_on_in_place() -> None:
    manager = make_manager()
    old = finished(manager, list(range(6)))
    sequence = open_sequence(manager, list(range(9)))
    assert manager.take_prefix(sequence) == 6
    compute(manager, sequence)
    assert blocks_of(manager, sequence)[0][:2] == old and not manager.take_block_ops()[0]


def test_a_tail_that_goes_on_otherwise_is_copied() -> None:
    manager = make_manager()
    old = finished(manager, list(range(7)))
    sequence = open_sequence(manager, [*range(6), 90])
    assert manager.take_prefix(sequence) == 6
    compute(manager, sequence)
    assert manager.take_block_ops()[0].copy == [(old[1], blocks_of(manager, sequence)[0][1])]
    manager.commit(manager.take_writes())
    assert taken(manager, [*range(7), 1]) == 7


def test_the_end_of_a_prompt_is_found_while_its_sequence_runs() -> None:
    manager = make_manager()
    running = open_sequence(manager, list(range(6)))
    compute(manager, running, 5)
    assert manager.take_prefix(open_sequence(manager, list(range(8)))) == 4
    compute(manager, running)
    other = open_sequence(manager, list(range(8)))
    assert manager.take_prefix(other) == 6
    compute(manager, other)
    running.token_ids.append(99)
    manager.take_block_ops()
    manager.commit(manager.take_writes())
    compute(manager, running)
    assert not manager.take_block_ops()[0], "only the newcomer copies"
    assert blocks_of(manager, running)[0][1] != blocks_of(manager, other)[0][1]


def test_what_is_copied_is_not_given_away_before_the_step() -> None:
    manager = make_manager(4)
    old = finished(manager, list(range(8)))
    sequence = open_sequence(manager, [*range(6), 90])
    assert manager.take_prefix(sequence) == 6
    compute(manager, sequence)
    intruder = open_sequence(manager, list(range(50, 58)))
    assert manager.write(intruder, 8) is None, "the copy's source is held"
    assert manager.write(intruder, 4) is not None and old[1] not in blocks_of(manager, intruder)[0]
    manager.take_block_ops()
    assert manager.write(intruder, 8) == [old[1]]


def test_nothing_is_copied_where_only_the_source_is_free() -> None:
    manager = make_manager(3)
    finished(manager, list(range(12)))
    sequence = open_sequence(manager, [*range(10), 90])
    assert manager.take_prefix(sequence) == 8
    compute(manager, sequence)


def test_a_copy_that_was_never_made_leaves_the_source_to_be_overwritten() -> None:
    manager = make_manager(2)
    finished(manager, list(range(6)))
    sequence = open_sequence(manager, [*range(5), 90])
    assert manager.take_prefix(sequence) == 4, "the second block is needed whole"
    manager.close(sequence)
    manager = make_manager(3)
    old = finished(manager, list(range(8)))
    sequence = open_sequence(manager, [*range(5), 90])
    assert manager.take_prefix(sequence) == 5
    manager.take_block_ops()  # the step went by without it
    compute(manager, sequence)
    assert blocks_of(manager, sequence)[0] == old and not manager.take_block_ops()[0]
    manager.close(sequence)
    assert taken(manager, [*range(8), 1]) == 4


def test_tails_of_other_salts_are_not_found() -> None:  # C080
    manager = make_manager(64)
    for salt in (None, "x"):
        finished(manager, list(range(7)), cache_salt=salt)
    copies = {salt: taken(manager, [*range(7), 1], cache_salt=salt) for salt in (None, "x", "y")}
    assert copies == {None: 7, "x": 7, "y": 0}


def test_a_failed_step_leaves_no_tail() -> None:
    manager = make_manager()
    failed = open_sequence(manager, list(range(3)))
    manager.write(failed, 3)
    manager.take_block_ops()
    manager.close(failed)  # its tokens never counted as computed
    assert taken(manager, list(range(8))) == 0
    assert finished(manager, list(range(50, 53))) and taken(manager, list(range(50, 58))) == 3


def test_reset_hides_tails_too() -> None:
    manager = make_manager()
    finished(manager, list(range(6)))
    running = open_sequence(manager, list(range(50, 56)))
    compute(manager, running)
    manager.reset_prefix_cache()
    manager.close(running)
    assert taken(manager, list(range(8))) == 0 and taken(manager, list(range(50, 58))) == 0


def test_a_tail_that_moved_to_the_host_is_not_found() -> None:
    manager = make_manager(8, 8)
    sequence = open_sequence(manager, list(range(6)))
    compute(manager, sequence)
    assert manager.swap_out([sequence])
    assert manager.take_prefix(open_sequence(manager, list(range(8)))) == 0
    manager.close(sequence)
    assert manager.take_prefix(open_sequence(manager, list(range(8)))) == 0


def test_a_shared_full_block_is_not_found_once_its_last_holder_wrote_into_it() -> None:
    manager = make_manager()
    source, other = open_sequence(manager, list(range(8))), open_sequence(manager, [*range(6), 90, 91, 92])
    compute(manager, source)
    manager.attach(source, other, 6)
    manager.close(source)
    compute(manager, other)
    assert taken(manager, [*range(8), 1]) == 6
