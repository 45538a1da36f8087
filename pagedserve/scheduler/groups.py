"""Groups: all requests under way, where each of them is, and what ends with them.

A group waits, runs, or waits again after it was preempted. What it holds (blocks, seats, rows in the worker) is taken
and given back here, so that no way of ending a request can forget any of it.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from itertools import count

from pagedserve.errors import EngineStepError
from pagedserve.kv_cache.manager import KVCacheManager
from pagedserve.messages import SchedulerStats
from pagedserve.scheduler.branching import Row
from pagedserve.scheduler.group import Group
from pagedserve.scheduler.in_flight import InFlight
from pagedserve.scheduler.outbox import Outbox
from pagedserve.scheduler.queue import GroupQueue
from pagedserve.scheduler.worker_rows import WorkerRows
from pagedserve.sequence import FinishReason, Sequence, SequenceStatus


class Groups:
    """The state that deciding, preempting and recording work on."""

    def __init__(self, cache: KVCacheManager, clock: Callable[[], float]):
        self.cache = cache
        self.clock = clock
        self.rows = WorkerRows()
        self.outbox = Outbox()
        self.in_flight = InFlight()
        self.by_id: dict[str, Group] = {}
        self.owners: dict[int, tuple[Sequence, Group]] = {}
        self.waiting = GroupQueue()
        # Groups that cannot wait for their turn yet, because their grammar is being compiled.
        self.blocked: dict[str, Group] = {}
        self.preempted = GroupQueue()
        # By key: the last one gives way first.
        self.running: list[Group] = []
        # Running groups with parked sequences, and with children still to fork.
        self.parking: list[Group] = []
        self.unforked: list[Group] = []
        # Sequences that came in with more than one token to compute, by id, until somebody asks and they are through.
        self._filling: dict[int, Sequence] = {}
        self.num_live = 0
        self.num_seats = 0
        # Running groups whose next tokens are chosen here, from all candidates.
        self.num_searching = 0
        # Totals since the start; the rest of the fields is filled in by `snapshot`.
        self.stats = SchedulerStats()
        self.seconds_per_finish = 1.0
        self._last_finish: float | None = None
        self._seq_ids = count()

    # -- sequences -----------------------------------------------------------------------------------------------------

    def new_sequence(self, choice_index: int, token_ids: list[int], num_prompt_tokens: int) -> Sequence:
        """A sequence with an id of its own."""
        return Sequence(next(self._seq_ids), choice_index, token_ids, num_prompt_tokens)

    def new_child(self, group: Group, parent: Sequence, choice_index: int) -> Sequence:
        """A live sibling with the parent's tokens; its table and row are the caller's to make."""
        child = self.new_sequence(choice_index, parent.token_ids.copy(), parent.num_prompt_tokens)
        child.status = SequenceStatus.RUNNING
        if parent.constraint is not None:
            child.constraint = parent.constraint.fork()
        group.sequences.append(child)
        group.live.append(child)
        self.num_live += 1
        self.owners[child.seq_id] = (child, group)
        return child

    def revive(self, group: Group, sequence: Sequence) -> None:
        """A parked sequence has blocks again, and will be served."""
        group.parked.remove(sequence)
        group.live.append(sequence)
        self.num_live += 1
        self.begin_row(group, sequence)

    def park(self, group: Group, sequence: Sequence) -> None:
        """A live sequence gives its blocks back, and waits for its siblings to leave room."""
        group.live.remove(sequence)
        self.num_live -= 1
        self.rows.release(sequence)
        self.in_flight.rewind(sequence)
        self.cache.release(sequence)
        self._filling.pop(sequence.seq_id, None)
        group.parked.insert(0, sequence)
        if group not in self.parking:
            self.parking.append(group)

    def drop(self, group: Group, sequence: Sequence) -> None:
        """A live sequence dies without having been a choice, as beams do."""
        sequence.status = SequenceStatus.FINISHED
        group.live.remove(sequence)
        group.sequences.remove(sequence)
        self.num_live -= 1
        self._forget(sequence)

    def begin_row(self, group: Group, sequence: Sequence) -> None:
        """The worker will hear of the sequence, its tokens and its blocks."""
        self.rows.add(sequence, group.request, self.cache.row_block_ids(sequence))
        self._filling[sequence.seq_id] = sequence

    def take_prefix(self, group: Group, sequence: Sequence) -> int:
        """Tokens of the sequence that the prefix cache has, if it may look."""
        return self.cache.take_prefix(sequence) if group.request.read_prefix_cache else 0

    def num_promised_blocks(self) -> int:
        """Blocks that prompts (and recomputed outputs) under way will still take."""
        filling = [
            s for s in self._filling.values() if s.status is SequenceStatus.RUNNING and s.num_uncomputed_tokens > 1
        ]
        self._filling = {s.seq_id: s for s in filling}
        return self.cache.num_blocks_to_come(filling)

    def waste(self, group: Group, num_tokens: int) -> None:
        """These tokens will be computed a second time."""
        if num_tokens > 0:
            group.num_wasted_tokens += num_tokens
            self.stats.num_wasted_tokens += num_tokens

    # -- groups --------------------------------------------------------------------------------------------------------

    def enter(self, group: Group) -> None:
        """From nowhere or a queue to the running groups; what it has computed is in its tables."""
        set_status(group, SequenceStatus.RUNNING)
        insort(self.running, group, key=lambda g: g.key)
        self.num_seats += group.num_seats
        self.num_live += len(group.live)
        self.num_searching += group.branching.searches
        for sequence in group.live:
            self.begin_row(group, sequence)
        if group.parked:
            self.parking.append(group)
        if group.branching.num_children:
            self.unforked.append(group)

    def leave(self, group: Group) -> None:
        """From the running groups to somewhere else."""
        self.running.remove(group)
        self.num_live -= len(group.live)
        self.num_seats -= group.num_seats
        self.num_searching -= group.branching.searches
        for groups in (self.parking, self.unforked):
            if group in groups:
                groups.remove(group)

    # -- ends ----------------------------------------------------------------------------------------------------------

    def end(self, group: Group, reason: FinishReason, error_kind: str | None = None, error: str | None = None) -> None:
        """All choices that have not ended end for `reason`."""
        for row in group.branching.final_rows(group.sequences, reason):
            self.outbox.add(group.request_id, row)
        self.close(group, reason)
        self.outbox.finish(group, error_kind, error)

    def close(self, group: Group, reason: FinishReason) -> None:
        """Free all that a group holds."""
        if group.status is SequenceStatus.RUNNING:
            self.leave(group)
        self.waiting.remove(group)
        self.preempted.remove(group)
        self.blocked.pop(group.request_id, None)
        for sequence in group.live + group.parked:
            sequence.status, sequence.finish_reason = SequenceStatus.FINISHED, reason
            self._forget(sequence)
        group.live, group.parked = [], []
        group.status = SequenceStatus.FINISHED
        del self.by_id[group.request_id]
        self._measure_finish()

    def finish_sequence(self, sequence: Sequence, group: Group, reason: FinishReason) -> None:
        """One choice ends; with the last one, its group."""
        if group.num_seats == 1:
            failed = reason is FinishReason.ERROR and all(
                s.finish_reason in (None, FinishReason.ERROR) for s in group.sequences
            )
            self.close(group, reason)
            self.outbox.finish(group, EngineStepError.__name__ if failed else None, group.error if failed else None)
            return
        sequence.status, sequence.finish_reason = SequenceStatus.FINISHED, reason
        self._forget(sequence)
        is_running = group.status is SequenceStatus.RUNNING
        group.num_seats -= 1
        self.num_seats -= is_running
        if sequence in group.parked:
            group.parked.remove(sequence)
            return
        group.live.remove(sequence)
        self.num_live -= is_running
        if not group.live and not is_running:
            # The one that was to be computed first is gone, and so are its blocks on the host.
            group.live = [group.parked.pop(0)]
            set_status(group, SequenceStatus.WAITING)

    def end_sequence(self, sequence: Sequence, group: Group, reason: FinishReason) -> None:
        """One choice ends without a token of its own to report."""
        self.outbox.add(group.request_id, Row(sequence.choice_index, [], reason, None, sequence.cumulative_logprob))
        self.finish_sequence(sequence, group, reason)

    def _forget(self, sequence: Sequence) -> None:
        self.rows.release(sequence)
        self.in_flight.rewind(sequence)
        self.cache.close(sequence)
        del self.owners[sequence.seq_id]

    def _measure_finish(self) -> None:
        now = self.clock()
        if self._last_finish is not None:
            self.seconds_per_finish += 0.1 * (now - self._last_finish - self.seconds_per_finish)
        self._last_finish = now

    # -- state ---------------------------------------------------------------------------------------------------------

    def snapshot(self) -> SchedulerStats:
        """The state now, and totals since the start."""
        stats, cache = self.stats, self.cache
        return SchedulerStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting) + len(self.blocked),
            num_swapped=len(self.preempted),
            kv_cache_usage=cache.device.usage,
            host_cache_usage=cache.host.usage,
            num_preemptions=stats.num_preemptions,
            num_swapped_out_blocks=cache.num_swapped_out_blocks,
            num_swapped_in_blocks=cache.num_swapped_in_blocks,
            num_copied_blocks=cache.num_copied_blocks,
            num_wasted_tokens=stats.num_wasted_tokens,
            prefix_cache_queries=stats.prefix_cache_queries,
            prefix_cache_hits=stats.prefix_cache_hits,
            num_steps=stats.num_steps,
            num_step_tokens=stats.num_step_tokens,
        )

    def check(self, max_num_seqs: int) -> None:
        """Prove the accounts of blocks, seats and queues; AssertionError tells what is wrong."""
        self.cache.check()
        assert self.running == sorted(self.running, key=lambda g: g.key)
        assert self.num_live == sum(len(g.live) for g in self.running)
        assert self.num_seats == sum(g.num_seats for g in self.running) <= max_num_seqs
        places = {SequenceStatus.RUNNING: self.running, SequenceStatus.SWAPPED: self.preempted}
        assert self.num_searching == sum(g.branching.searches for g in self.running)
        num_sequences = 0
        for group in self.by_id.values():
            unfinished = group.live + group.parked
            num_sequences += len(unfinished)
            assert unfinished and {s.seq_id for s in unfinished} == {s.seq_id for s in group.unfinished}
            assert all(s.status is group.status and self.owners[s.seq_id] == (s, group) for s in unfinished)
            place = places.get(group.status) or (self.preempted if group.num_preemptions else self.waiting)
            is_there = (group in place) is not (group.request_id in self.blocked)
            assert is_there, f"{group.request_id} is {group.status} but not where it belongs"
            assert all(s.num_computed_tokens == 0 for s in group.parked)
            assert group.live or group in self.parking
            assert all(0 <= s.num_computed_tokens <= s.num_tokens for s in unfinished)
        assert num_sequences == len(self.owners) == self.cache.num_tables
        assert len(self.by_id) == len(self.running) + len(self.waiting) + len(self.blocked) + len(self.preempted)


def set_status(group: Group, status: SequenceStatus) -> None:
    """Of the group and its unfinished sequences."""
    group.status = status
    for sequence in group.live + group.parked:
        sequence.status = status
