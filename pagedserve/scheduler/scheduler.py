"""Scheduler: who computes how many tokens in the next step, and what the step's results mean.

One subtraction drives everything: a sequence needs the tokens it has minus those computed. Continuous batching, chunked
prefill, prefix hits and returns after preemption are all that same number. Running groups go first, then those that
wait, in the policy's order.
"""

from __future__ import annotations

import heapq
import math
import time
from bisect import insort
from collections.abc import Callable, Iterable
from itertools import count

from pagedserve.config import CacheConfig, SchedulerConfig
from pagedserve.errors import (
    ContextLengthError,
    DeadlineExceededError,
    EngineStepError,
    QueueFullError,
    RequestError,
)
from pagedserve.kv_cache.manager import KVCacheManager
from pagedserve.log import get_logger
from pagedserve.messages import EngineCoreOutputs, SchedulerStats
from pagedserve.scheduler.branching import Row, make_branching, nearest_sibling
from pagedserve.scheduler.group import Group
from pagedserve.scheduler.outbox import Outbox
from pagedserve.scheduler.preemption import PreemptionCosts
from pagedserve.scheduler.queue import POLICIES, GroupQueue
from pagedserve.scheduler.stopping import StopRule
from pagedserve.scheduler.worker_rows import WorkerRows
from pagedserve.sequence import FinishReason, Request, Sequence, SequenceStatus
from pagedserve.step import ModelRunnerOutput, SchedulerOutput

log = get_logger(__name__)

# Bounds of what a client is told to wait when the queue is full, in seconds.
_RETRY_AFTER = (1, 60)


class Scheduler:
    """All requests from arrival to end. Calls alternate: `schedule`, then `update` or `fail_step` with its output."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        *,
        num_device_blocks: int,
        num_host_blocks: int,
        max_model_len: int,
        bytes_per_block: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._max_num_batched_tokens = config.max_num_batched_tokens
        self._max_num_seqs = config.max_num_seqs
        self._max_queue_len = config.max_queue_len
        self._max_model_len = max_model_len
        self._policy = POLICIES.resolve(config.policy)
        self._costs = PreemptionCosts(config.preemption_mode, bytes_per_block)
        self._num_watermark_blocks = int(config.watermark * num_device_blocks)
        self._clock = clock
        self._cache = KVCacheManager(
            block_size=cache.block_size,
            num_device_blocks=num_device_blocks,
            num_host_blocks=num_host_blocks,
            enable_prefix_caching=cache.enable_prefix_caching,
        )
        self._rows = WorkerRows()
        self._outbox = Outbox()
        self._groups: dict[str, Group] = {}
        self._owners: dict[int, tuple[Sequence, Group]] = {}
        self._waiting = GroupQueue()
        self._preempted = GroupQueue()
        # By key: the last one gives way first.
        self._running: list[Group] = []
        # Running groups with parked sequences, and with children still to fork.
        self._parking: list[Group] = []
        self._unforked: list[Group] = []
        # Sequences that came in with more than one token to compute, by id, until somebody asks and they are through.
        self._filling: dict[int, Sequence] = {}
        self._deadlines: list[tuple[float, int, Group]] = []
        self._arrivals = count()
        self._seq_ids = count()
        self._num_live = 0
        self._num_seats = 0
        self._stats = SchedulerStats()
        self._last_finish: float | None = None
        self._seconds_per_finish = 1.0

    # -- requests come and go ------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Take a request in. Raises QueueFullError, or RequestError where it could never run."""
        self._refuse_impossible(request)
        if self._max_queue_len and len(self._waiting) >= self._max_queue_len:
            low, high = _RETRY_AFTER
            retry_after = min(max(math.ceil(self._seconds_per_finish), low), high)
            raise QueueFullError(
                f"{len(self._waiting)} requests are waiting already (--max-queue-len {self._max_queue_len}); "
                f"try again in {retry_after} s",
                retry_after=retry_after,
            )
        arrival = next(self._arrivals)
        params = request.sampling_params
        stop = StopRule(request, self._max_model_len)
        first = self._new_sequence(0, request.prompt_token_ids.copy(), len(request.prompt_token_ids))
        branching = make_branching(params, stop, first)
        group = Group(
            request=request,
            sequences=[first],
            key=self._policy(request, arrival),
            stop=stop,
            branching=branching,
            num_seats=params.beam.width if params.beam is not None else 1 + branching.num_children,
            live=[first],
        )
        # Of beams only the prompt is worth finding again: most of their blocks are of dead branches.
        num_findable_tokens = None if params.beam is None else len(request.prompt_token_ids)
        self._cache.open(first, request, num_findable_tokens=num_findable_tokens)
        self._owners[first.seq_id] = (first, group)
        self._groups[request.request_id] = group
        self._waiting.push(group)
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, arrival, group))

    def abort(self, request_ids: Iterable[str]) -> EngineCoreOutputs:
        """End requests in whatever phase they are, and free all they hold; unknown ids are ignored."""
        for request_id in request_ids:
            group = self._groups.get(request_id)
            if group is not None:
                self._close(group, FinishReason.ABORT)
                self._outbox.finish(group)
        return self._outbox.take()

    def stop_sequence(self, request_id: str, choice_index: int) -> EngineCoreOutputs:
        """A stop string was found in this choice: it ends, its siblings go on. Unknown and ended ones are ignored."""
        group = self._groups.get(request_id)
        if group is not None and group.branching.can_park and not group.branching.num_children:
            for sequence in group.unfinished:
                if sequence.choice_index == choice_index:
                    self._finish_sequence(sequence, group, FinishReason.STOP)
        return self._outbox.take()

    def reset_prefix_cache(self) -> bool:
        """Forget every prefix; True always, for running requests keep their blocks and hide them."""
        self._cache.reset_prefix_cache()
        return True

    # -- the decision --------------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Decide the next step. May be empty, where nothing waits or only rows are to be released."""
        stats = self._stats
        stats.num_steps += 1
        output = SchedulerOutput(step_id=stats.num_steps)
        if self._deadlines:
            self._expire()
        if self._parking:
            self._unpark()
        num_preemptions = stats.num_preemptions
        left = self._serve(output, self._running, self._max_num_batched_tokens, self._num_live)
        # Whoever gave way in this step does not come back in it, and siblings come before strangers.
        if left and num_preemptions == stats.num_preemptions and not self._parking:
            left = self._admit(output, left)
        if self._unforked:
            self._fork_children(output)
        stats.num_step_tokens += self._max_num_batched_tokens - left
        self._rows.record(output)
        output.block_ops, output.replaced_blocks = self._cache.take_block_ops()
        return output

    def _serve(self, output: SchedulerOutput, groups: list[Group], left: int, owed: int) -> int:
        """Grant tokens to the groups in order; returns what is left of the budget.

        `owed` counts the sequences among them: each is owed one token, so that a long prompt may take what is left
        beyond that, but never the token of one that decodes. The step's hottest loop.
        """
        write = self._cache.write
        seq_ids, num_scheduled = output.seq_ids, output.num_scheduled
        num_computed, new_block_ids = output.num_computed, output.new_block_ids
        may_preempt = groups is self._running
        position = 0
        while left > 0 and position < len(groups):
            group = groups[position]
            position += 1
            if len(group.live) > 1 and not self._make_room(group, position, left, owed, may_preempt):
                continue
            for sequence in group.live:
                owed -= 1
                computed = sequence.num_computed_tokens
                num_tokens = len(sequence.token_ids) + len(sequence.draft_token_ids) - computed
                if num_tokens != 1:
                    num_tokens = min(num_tokens, max(left - owed, 1))
                    if num_tokens == 0:
                        continue  # a beam whose siblings are not so far yet
                if left <= 0:
                    break
                new_blocks = write(sequence, computed + num_tokens)
                if new_blocks is None:
                    if not self._make_room(group, position, left, owed + 1, may_preempt):
                        break
                    new_blocks = write(sequence, computed + num_tokens)
                    assert new_blocks is not None, "room was made, and there is none"
                sequence.num_computed_tokens = computed + num_tokens
                left -= num_tokens
                seq_ids.append(sequence.seq_id)
                num_scheduled.append(num_tokens)
                num_computed.append(computed)
                new_block_ids.append(new_blocks)
        return left

    def _make_room(self, group: Group, position: int, left: int, owed: int, may_preempt: bool) -> bool:
        """Free the blocks that the group needs for this step, from others behind it; False where it is not served."""
        while self._cache.num_missing_blocks(group.live, _ends(group, left, owed)) > self._cache.num_free_blocks:
            if not (may_preempt and self._give_way(group, position)):
                return False
        return True

    def _give_way(self, group: Group, position: int) -> bool:
        """Free some blocks for `group`, the running list's `position`-th; False where it has lost its own.

        The latest group gives way first, never one that this step serves already. A group alone serves its sequences
        one after another; the last one, or beams, which cannot wait for each other, end as if at their length limit.
        """
        if len(self._running) > position:
            self._preempt(self._running[-1])
            return True
        if position > 1:
            self._preempt(group)
            return False
        if not group.branching.can_park:
            self._end(group, FinishReason.LENGTH)
            return False
        if len(group.live) > 1:
            self._park(group, group.live[-1])
            return True
        log.warning("%s ends at %d tokens: the KV pool is full", group.request_id, len(group.live[0].token_ids))
        self._outbox.add(group.request_id, _last_row(group.live[0], FinishReason.LENGTH))
        self._finish_sequence(group.live[0], group, FinishReason.LENGTH)
        return False

    # -- admission and return ------------------------------------------------------------------------------------------

    def _admit(self, output: SchedulerOutput, left: int) -> int:
        """Let groups in while there is room, in order; no new one passes a preempted one."""
        while left > 0 and (queue := self._next_queue()) is not None:
            group = queue.peek()
            if group is None or not self._can_enter(group):
                break
            queue.pop()
            self._enter(group)
            left = self._serve(output, [group], left, len(group.live))
            if group.parked:
                break
        return left

    def _next_queue(self) -> GroupQueue | None:
        preempted, waiting = self._preempted.peek(), self._waiting.peek()
        if preempted is not None and (waiting is None or preempted.key < waiting.key):
            return self._preempted
        return self._waiting if waiting is not None else None

    def _can_enter(self, group: Group) -> bool:
        """Whether the group's seats and blocks are free, with a reserve against giving way again soon."""
        if self._num_seats + group.num_seats > self._max_num_seqs:
            return False
        if not self._running:
            return True
        reserve = self._num_watermark_blocks + self._num_promised_blocks()
        if group.num_preemptions:
            # Every running sequence may take one more block before the next preemption: a block's worth of steps.
            reserve += self._num_live
        room = self._cache.num_free_blocks - reserve
        if group.status is SequenceStatus.SWAPPED:
            return self._cache.num_held_blocks(group.live) + group.num_seats <= room
        leader = group.live[0]
        num_leader_blocks = self._cache.num_blocks_of(len(leader.token_ids))
        room -= max(group.num_seats - 1, group.num_lost_blocks - num_leader_blocks)
        use_prefix = group.request.read_prefix_cache
        return (
            self._cache.num_blocks_to_admit(leader, use_prefix=use_prefix) <= room
            and self._cache.num_blocks_to_admit(leader, use_prefix=use_prefix, exact=True) <= room
        )

    def _num_promised_blocks(self) -> int:
        """Blocks that prompts (and recomputed outputs) under way will still take."""
        filling = [
            s for s in self._filling.values() if s.status is SequenceStatus.RUNNING and s.num_uncomputed_tokens > 1
        ]
        self._filling = {s.seq_id: s for s in filling}
        return self._cache.num_missing_blocks(filling, [s.num_tokens for s in filling])

    def _enter(self, group: Group) -> None:
        """From a queue to the running groups."""
        if group.status is SequenceStatus.SWAPPED:
            self._cache.swap_in(group.live)
        else:
            num_hits = self._take_prefix(group.live[0], group)
            if group.first_scheduled_time is None:
                group.num_cached_tokens = num_hits
                self._stats.prefix_cache_queries += len(group.request.prompt_token_ids)
                self._stats.prefix_cache_hits += num_hits
            self._waste(group, group.num_lost_tokens - num_hits)
        if group.first_scheduled_time is None:
            group.first_scheduled_time = self._clock()
        group.num_lost_tokens = group.num_lost_blocks = 0
        _set_status(group, SequenceStatus.RUNNING)
        insort(self._running, group, key=lambda g: g.key)
        self._num_seats += group.num_seats
        self._num_live += len(group.live)
        for sequence in group.live:
            self._begin_row(group, sequence)
        if group.parked:
            self._parking.append(group)
        if group.branching.num_children:
            self._unforked.append(group)

    def _begin_row(self, group: Group, sequence: Sequence) -> None:
        self._rows.add(sequence, group.request, self._cache.row_block_ids(sequence))
        self._filling[sequence.seq_id] = sequence

    def _take_prefix(self, sequence: Sequence, group: Group) -> int:
        return self._cache.take_prefix(sequence) if group.request.read_prefix_cache else 0

    def _fork_children(self, output: SchedulerOutput) -> None:
        """Prompts that this step completes get their children, which draw from the same logits."""
        for group in self._unforked:
            leader = group.live[0]
            if leader.num_uncomputed_tokens:
                continue
            # A row that is only now sent cannot be forked; its children are sent beside it.
            is_new = self._rows.is_new(leader)
            num_unsent = 0 if is_new else len(output.new_block_ids[output.seq_ids.index(leader.seq_id)])
            for choice_index in range(1, 1 + group.branching.num_children):
                child = self._new_child(group, leader, choice_index)
                self._cache.fork(leader, child, num_unsent=num_unsent)
                if is_new:
                    self._rows.add(child, group.request, self._cache.row_block_ids(child))
                else:
                    self._rows.fork(leader, child)
                output.shared_logits.append((child.seq_id, leader.seq_id))
            group.branching.num_children = 0
        self._unforked = [group for group in self._unforked if group.branching.num_children]

    # -- preemption ----------------------------------------------------------------------------------------------------

    def _preempt(self, group: Group) -> None:
        """Take all blocks of a running group, and let it wait for its return before all new ones."""
        num_blocks = self._cache.num_held_blocks(group.live)
        num_tokens = self._cache.num_held_tokens(group.live)
        self._leave(group)
        for sequence in group.live:
            self._rows.release(sequence)
        swaps = num_blocks > 0 and self._costs.prefers_swap(num_blocks, num_tokens) and self._cache.swap_out(group.live)
        if swaps:
            group.swap_step_id = self._stats.num_steps
            _set_status(group, SequenceStatus.SWAPPED)
        else:
            self._recompute_later(group, num_blocks, num_tokens)
        self._preempted.push(group)
        group.num_preemptions += 1
        self._stats.num_preemptions += 1
        log.info(
            "preempted %s: %s %d blocks (%d tokens); %d running, %d preempted",
            group.request_id,
            "swapped out" if swaps else "will recompute",
            num_blocks,
            num_tokens,
            len(self._running),
            len(self._preempted),
        )

    def _recompute_later(self, group: Group, num_blocks: int, num_tokens: int) -> None:
        """Give the blocks back. The first sequence will be computed first, the others from what they share with it."""
        for sequence in group.live:
            self._cache.release(sequence)
        leader, *others = sorted(group.live + group.parked, key=lambda s: s.seq_id)
        group.live, group.parked = [leader], others
        group.branching.restart()
        group.num_lost_tokens = num_tokens
        group.num_lost_blocks = num_blocks
        _set_status(group, SequenceStatus.WAITING)

    def _park(self, group: Group, sequence: Sequence) -> None:
        """Take the blocks of one sequence, for its siblings."""
        num_tokens = self._cache.num_held_tokens(group.live)
        group.live.remove(sequence)
        self._num_live -= 1
        self._waste(group, num_tokens - self._cache.num_held_tokens(group.live))
        self._rows.release(sequence)
        self._cache.release(sequence)
        self._filling.pop(sequence.seq_id, None)
        group.parked.insert(0, sequence)
        if group not in self._parking:
            self._parking.append(group)
        group.num_preemptions += 1
        self._stats.num_preemptions += 1
        log.info(
            "preempted choice %d of %s: it will recompute %d tokens once its siblings leave room",
            sequence.choice_index,
            group.request_id,
            len(sequence.token_ids),
        )

    def _unpark(self) -> None:
        """Parked sequences go on where there is room, from the blocks of the sibling that is nearest to them."""
        for group in self._parking.copy():
            for sequence in group.parked.copy():
                # As for a return: what runs keeps a block for each sequence, if anything runs.
                room = self._cache.num_free_blocks - self._num_promised_blocks() - self._num_live
                if room > 0:
                    self._attach(group, sequence, room)
        self._parking = [group for group in self._parking if group.parked and group.status is SequenceStatus.RUNNING]

    def _attach(self, group: Group, sequence: Sequence, room: int) -> None:
        """Bring one parked sequence back where `room` blocks are enough for it."""
        num_blocks = self._cache.num_blocks_of(len(sequence.token_ids))
        if group.live:
            source, num_shared = nearest_sibling(sequence, group.live)
            is_computed = source.num_computed_tokens >= num_shared
            if not is_computed or num_blocks - num_shared // self._cache.block_size > room:
                return
            self._cache.attach(source, sequence, num_shared)
        elif num_blocks > self._cache.device.num_blocks:
            self._outbox.add(group.request_id, _last_row(sequence, FinishReason.LENGTH))
            self._finish_sequence(sequence, group, FinishReason.LENGTH)
            return
        elif num_blocks > room:
            return
        else:
            self._take_prefix(sequence, group)
        group.parked.remove(sequence)
        group.live.append(sequence)
        self._num_live += 1
        self._begin_row(group, sequence)

    def _waste(self, group: Group, num_tokens: int) -> None:
        if num_tokens > 0:
            group.num_wasted_tokens += num_tokens
            self._stats.num_wasted_tokens += num_tokens

    # -- results -------------------------------------------------------------------------------------------------------

    def update(self, output: SchedulerOutput, result: ModelRunnerOutput) -> EngineCoreOutputs:
        """Record what the step produced; returns the rows to report, and the requests that ended."""
        self._cache.commit()
        self._costs.observe(output, result)
        if result.prompt_logprobs:
            self._tell_prompt_logprobs(output, result)
        self._take_tokens(result)
        for seq_id, message in result.errors.items():
            self._fail_sequence(seq_id, message)
        if result.candidates:
            self._take_candidates(result)
        outputs = self._outbox.take()
        outputs.stats = self.stats()
        return outputs

    def fail_step(self, output: SchedulerOutput, message: str) -> EngineCoreOutputs:
        """The step raised: the requests that it would have served end with `message`, all others live on."""
        self._cache.rollback()
        for seq_id in output.seq_ids:
            owner = self._owners.get(seq_id)
            if owner is not None:
                self._end(owner[1], FinishReason.ERROR, EngineStepError.__name__, message)
        for group in self._groups.values():
            if group.status is SequenceStatus.SWAPPED and group.swap_step_id == output.step_id:
                # Nobody knows whether these blocks have reached the host.
                self._recompute_later(
                    group, self._cache.num_held_blocks(group.live), self._cache.num_held_tokens(group.live)
                )
        outputs = self._outbox.take()
        outputs.stats = self.stats()
        return outputs

    def _take_tokens(self, result: ModelRunnerOutput) -> None:
        """Append the sampled tokens, end what ends with them, and report both as columns. The other hot loop."""
        owners = self._owners
        outputs = self._outbox.outputs
        request_ids, choice_indices, token_columns = outputs.request_ids, outputs.choice_indices, outputs.token_ids
        finish_reasons, stop_reasons = outputs.finish_reasons, outputs.stop_reasons
        cumulative_logprobs = outputs.cumulative_logprobs
        logprobs = result.logprobs
        ended: list[tuple[Sequence, Group, FinishReason]] = []
        for seq_id, sampled, logprob in zip(
            result.seq_ids, result.sampled_token_ids, result.sampled_logprobs, strict=True
        ):
            if not sampled or seq_id not in owners:
                continue
            sequence, group = owners[seq_id]
            stop = group.stop
            token_ids = sequence.token_ids
            if len(token_ids) >= stop.max_len:
                # No token was asked for, only what the prompt tells; the worker draws one all the same.
                self._end(group, FinishReason.LENGTH)
                continue
            token_ids += sampled
            total = sequence.cumulative_logprob = sequence.cumulative_logprob + logprob
            reason = stop_reason = None
            if sampled[-1] in stop.token_ids or len(token_ids) >= stop.max_len:
                reason = stop.reason(sequence)
                if reason is not None:
                    stop_reason = stop.stop_reason(sampled[-1]) if reason is FinishReason.STOP else None
                    ended.append((sequence, group, reason))
            if seq_id in logprobs:
                outputs.logprobs[len(request_ids)] = logprobs[seq_id]
            request_ids.append(group.request.request_id)
            choice_indices.append(sequence.choice_index)
            token_columns.append(sampled)
            finish_reasons.append(reason)
            stop_reasons.append(stop_reason)
            cumulative_logprobs.append(total)
        for sequence, group, reason in ended:
            self._finish_sequence(sequence, group, reason)

    def _tell_prompt_logprobs(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        starts = dict(zip(output.seq_ids, output.num_computed, strict=True))
        for seq_id, entries in result.prompt_logprobs.items():
            owner = self._owners.get(seq_id)
            if owner is None:
                continue
            group = owner[1]
            # Positions that were computed before a preemption are computed again, but told once.
            entries = entries[max(group.num_told_prompt_logprobs - starts[seq_id], 0) :]
            group.num_told_prompt_logprobs += len(entries)
            self._outbox.outputs.prompt_logprobs.setdefault(group.request_id, []).extend(entries)

    def _take_candidates(self, result: ModelRunnerOutput) -> None:
        searching: dict[str, Group] = {}
        for seq_id, candidates in result.candidates.items():
            owner = self._owners.get(seq_id)
            if owner is not None:
                sequence, group = owner
                group.branching.collect(sequence, candidates)
                searching[group.request_id] = group
        for group in searching.values():
            if group.stop.max_len <= group.sequences[0].num_prompt_tokens:
                self._end(group, FinishReason.LENGTH)
            elif group.branching.advance(_Beams(self, group)):
                for row in group.branching.rows():
                    self._outbox.add(group.request_id, row)
                self._close(group, FinishReason.STOP)
                self._outbox.finish(group)

    # -- ends ----------------------------------------------------------------------------------------------------------

    def _expire(self) -> None:
        now = self._clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            group = heapq.heappop(self._deadlines)[2]
            if self._groups.get(group.request_id) is group:
                seconds = now - group.request.arrival_time
                message = f"the request's timeout passed: it was not finished after {seconds:.1f} s"
                self._end(group, FinishReason.TIMEOUT, DeadlineExceededError.__name__, message)

    def _fail_sequence(self, seq_id: int, message: str) -> None:
        owner = self._owners.get(seq_id)
        if owner is None:
            return
        sequence, group = owner
        group.error = message
        if not group.branching.can_park:
            self._end(group, FinishReason.ERROR, EngineStepError.__name__, message)
            return
        self._outbox.add(group.request_id, _last_row(sequence, FinishReason.ERROR))
        self._finish_sequence(sequence, group, FinishReason.ERROR)

    def _end(self, group: Group, reason: FinishReason, error_kind: str | None = None, error: str | None = None) -> None:
        """All choices that have not ended end for `reason`."""
        for row in group.branching.final_rows(group.sequences, reason):
            self._outbox.add(group.request_id, row)
        self._close(group, reason)
        self._outbox.finish(group, error_kind, error)

    def _close(self, group: Group, reason: FinishReason) -> None:
        """Free all that a group holds."""
        if group.status is SequenceStatus.RUNNING:
            self._leave(group)
        self._waiting.remove(group)
        self._preempted.remove(group)
        for sequence in group.live + group.parked:
            sequence.status, sequence.finish_reason = SequenceStatus.FINISHED, reason
            self._forget(sequence)
        group.live, group.parked = [], []
        group.status = SequenceStatus.FINISHED
        del self._groups[group.request_id]
        self._measure_finish()

    def _finish_sequence(self, sequence: Sequence, group: Group, reason: FinishReason) -> None:
        """One choice ends; with the last one, its group."""
        if group.num_seats == 1:
            failed = reason is FinishReason.ERROR and all(
                s.finish_reason in (None, FinishReason.ERROR) for s in group.sequences
            )
            self._close(group, reason)
            self._outbox.finish(group, EngineStepError.__name__ if failed else None, group.error if failed else None)
            return
        sequence.status, sequence.finish_reason = SequenceStatus.FINISHED, reason
        self._forget(sequence)
        is_running = group.status is SequenceStatus.RUNNING
        group.num_seats -= 1
        self._num_seats -= is_running
        if sequence in group.parked:
            group.parked.remove(sequence)
            return
        group.live.remove(sequence)
        self._num_live -= is_running
        if not group.live and not is_running:
            # The one that was to be computed first is gone, and so are its blocks on the host.
            group.live = [group.parked.pop(0)]
            _set_status(group, SequenceStatus.WAITING)

    def _leave(self, group: Group) -> None:
        """From the running groups to somewhere else."""
        self._running.remove(group)
        self._num_live -= len(group.live)
        self._num_seats -= group.num_seats
        for groups in (self._parking, self._unforked):
            if group in groups:
                groups.remove(group)

    def _forget(self, sequence: Sequence) -> None:
        self._rows.release(sequence)
        self._cache.close(sequence)
        del self._owners[sequence.seq_id]

    def _measure_finish(self) -> None:
        now = self._clock()
        if self._last_finish is not None:
            self._seconds_per_finish += 0.1 * (now - self._last_finish - self._seconds_per_finish)
        self._last_finish = now

    # -- sequences -----------------------------------------------------------------------------------------------------

    def _new_sequence(self, choice_index: int, token_ids: list[int], num_prompt_tokens: int) -> Sequence:
        return Sequence(next(self._seq_ids), choice_index, token_ids, num_prompt_tokens)

    def _new_child(self, group: Group, parent: Sequence, choice_index: int) -> Sequence:
        """A live sibling with the parent's tokens; its table and row are the caller's to make."""
        child = self._new_sequence(choice_index, parent.token_ids.copy(), parent.num_prompt_tokens)
        child.status = SequenceStatus.RUNNING
        group.sequences.append(child)
        group.live.append(child)
        self._num_live += 1
        self._owners[child.seq_id] = (child, group)
        return child

    # -- state ---------------------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        """Whether a step would do or report something."""
        return bool(self._groups or self._outbox or self._rows.is_changed)

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self._groups)

    def stats(self) -> SchedulerStats:
        """The state now, and totals since the start."""
        stats, cache = self._stats, self._cache
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_swapped=len(self._preempted),
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

    def check(self) -> None:
        """Prove the accounts of blocks, seats and queues; AssertionError tells what is wrong."""
        self._cache.check()
        assert self._running == sorted(self._running, key=lambda g: g.key)
        assert self._num_live == sum(len(g.live) for g in self._running)
        assert self._num_seats == sum(g.num_seats for g in self._running) <= self._max_num_seqs
        places = {SequenceStatus.RUNNING: self._running, SequenceStatus.SWAPPED: self._preempted}
        num_sequences = 0
        for group in self._groups.values():
            unfinished = group.live + group.parked
            num_sequences += len(unfinished)
            assert unfinished and {s.seq_id for s in unfinished} == {s.seq_id for s in group.unfinished}
            assert all(s.status is group.status and self._owners[s.seq_id] == (s, group) for s in unfinished)
            place = places.get(group.status) or (self._preempted if group.num_preemptions else self._waiting)
            assert group in place, f"{group.request_id} is {group.status} but not where it belongs"
            assert all(s.num_computed_tokens == 0 for s in group.parked)
            assert group.live or group in self._parking
        assert num_sequences == len(self._owners) == self._cache.num_tables
        assert len(self._groups) == len(self._running) + len(self._waiting) + len(self._preempted)

    def _refuse_impossible(self, request: Request) -> None:
        params = request.sampling_params
        num_tokens = len(request.prompt_token_ids)
        pool = self._cache.device.num_blocks
        if request.request_id in self._groups:
            raise RequestError(f"a request with id {request.request_id!r} is under way", param="request_id")
        if not num_tokens:
            raise RequestError("the prompt is empty: give at least one token", param="prompt")
        if num_tokens + (params.max_tokens != 0) > self._max_model_len:
            raise ContextLengthError(
                f"the prompt has {num_tokens} tokens; the model takes {self._max_model_len}, prompt and output together"
            )
        if self._cache.num_blocks_of(num_tokens) > pool:
            raise ContextLengthError(
                f"the prompt has {num_tokens} tokens, which take {self._cache.num_blocks_of(num_tokens)} KV blocks; "
                f"the whole pool has {pool} blocks of {self._cache.block_size} tokens"
            )
        if params.num_sequences > self._max_num_seqs:
            raise RequestError(
                f"{params.num_sequences} sequences were asked for; at most {self._max_num_seqs} run at once "
                "(--max-num-seqs)",
                param="n",
            )


class _Beams:
    """What beam search may do to its group."""

    def __init__(self, scheduler: Scheduler, group: Group):
        self._scheduler = scheduler
        self._group = group

    def fork(self, parent: Sequence) -> Sequence:
        scheduler = self._scheduler
        child = scheduler._new_child(self._group, parent, parent.choice_index)
        scheduler._cache.fork(parent, child)
        scheduler._rows.fork(parent, child)
        return child

    def append(self, sequence: Sequence, token_id: int) -> None:
        sequence.token_ids.append(token_id)
        self._scheduler._rows.append(sequence, token_id)

    def drop(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.FINISHED
        self._group.live.remove(sequence)
        self._group.sequences.remove(sequence)
        self._scheduler._num_live -= 1
        self._scheduler._forget(sequence)


def _ends(group: Group, left: int, owed: int) -> list[int]:
    """How far each live sequence of a group is computed after this step, by the rule of `Scheduler._serve`."""
    ends = []
    for sequence in group.live:
        owed -= 1
        num_tokens = min(sequence.num_uncomputed_tokens, max(left - owed, 1), left)
        left -= num_tokens
        ends.append(sequence.num_computed_tokens + num_tokens)
    return ends


def _last_row(sequence: Sequence, reason: FinishReason) -> Row:
    return Row(sequence.choice_index, [], reason, None, sequence.cumulative_logprob)


def _set_status(group: Group, status: SequenceStatus) -> None:
    group.status = status
    for sequence in group.live + group.parked:
        sequence.status = status
