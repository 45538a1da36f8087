"""Scheduler: who computes how many tokens in the next step, and what the step's results mean.

One subtraction drives everything: a sequence needs the tokens it has minus those computed. Continuous batching, chunked
prefill, prefix hits and returns after preemption are all that same number. Running groups go first, then those that
wait, in the policy's order.

A step may be decided while the one before it is still under way (`schedule_ahead`): the token that a sequence is about
to get counts as one that it has, whatever it is. What hangs on tokens, or on memory that the step under way may free,
waits for it: nobody gives way in such a step.
"""

from __future__ import annotations

import heapq
import math
import time
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
from pagedserve.messages import EngineCoreOutputs, SchedulerStats
from pagedserve.scheduler.branching import make_branching
from pagedserve.scheduler.constraints import ConstrainedStop, Constraint, Constraints, FillMasks
from pagedserve.scheduler.group import Group
from pagedserve.scheduler.groups import Groups
from pagedserve.scheduler.preemption import Preemption, PreemptionCosts
from pagedserve.scheduler.queue import POLICIES, GroupQueue
from pagedserve.scheduler.results import Results
from pagedserve.scheduler.stopping import StopRule
from pagedserve.sequence import PLACEHOLDER, FinishReason, Request, SequenceStatus
from pagedserve.step import ModelRunnerOutput, SamplingInput, SchedulerOutput

# Bounds of what a client is told to wait when the queue is full, in seconds.
_RETRY_AFTER = (1, 60)


class Scheduler:
    """All requests from arrival to end.

    Calls alternate: `schedule`, `sampling_input` where the step computes something, then `update` or `fail_step` with
    the step's output. With `schedule_ahead` a second step is decided before the first one's `update`.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        *,
        num_device_blocks: int,
        num_host_blocks: int,
        max_model_len: int,
        bytes_per_block: int = 0,
        windows: tuple[int | None, ...] = (None,),
        num_resident_blocks: int | None = None,
        fill_masks: FillMasks | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._max_num_batched_tokens = config.max_num_batched_tokens
        self._max_num_seqs = config.max_num_seqs
        self._max_queue_len = config.max_queue_len
        self._max_model_len = max_model_len
        self._policy = POLICIES.resolve(config.policy)
        self._num_watermark_blocks = int(config.watermark * num_device_blocks)
        self._clock = clock
        self._cache = KVCacheManager(
            block_size=cache.block_size,
            num_device_blocks=num_device_blocks,
            num_host_blocks=num_host_blocks,
            enable_prefix_caching=cache.enable_prefix_caching,
            windows=windows,
            max_step_tokens=config.max_num_batched_tokens,
            num_resident_blocks=num_resident_blocks,
            clock=clock,
        )
        self._groups = Groups(self._cache, clock)
        self._preemption = Preemption(self._groups, PreemptionCosts(config.preemption_mode, bytes_per_block))
        self._results = Results(self._groups)
        self._constraints = Constraints(self._groups, fill_masks)
        self._deadlines: list[tuple[float, int, Group]] = []
        self._arrivals = count()

    # -- requests come and go ------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Take a request in; one that asks for structured output waits for `constrain`, at its place in the order.

        Raises QueueFullError, or RequestError where it could never run.
        """
        self._refuse_impossible(request)
        num_waiting = len(self._groups.waiting) + len(self._groups.blocked)
        if self._max_queue_len and num_waiting >= self._max_queue_len:
            low, high = _RETRY_AFTER
            retry_after = min(max(math.ceil(self._groups.seconds_per_finish), low), high)
            raise QueueFullError(
                f"{num_waiting} requests are waiting already (--max-queue-len {self._max_queue_len}); "
                f"try again in {retry_after} s",
                retry_after=retry_after,
            )
        arrival = next(self._arrivals)
        params = request.sampling_params
        is_constrained = params.structured_output is not None
        stop = (ConstrainedStop if is_constrained else StopRule)(request, self._max_model_len)
        first = self._groups.new_sequence(0, request.prompt_token_ids.copy(), len(request.prompt_token_ids))
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
        self._groups.owners[first.seq_id] = (first, group)
        self._groups.by_id[request.request_id] = group
        if is_constrained:
            self._groups.blocked[request.request_id] = group
        else:
            self._groups.waiting.push(group)
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, arrival, group))

    def constrain(self, request_id: str, constraint: Constraint) -> None:
        """The grammar of a waiting request is ready; nothing happens where the request is gone."""
        group = self._groups.blocked.pop(request_id, None)
        if group is not None:
            self._constraints.begin(group, constraint)
            self._groups.waiting.push(group)

    def withdraw(self, request_id: str) -> bool:
        """Forget a request that waits for a grammar, without a word; False where it is gone."""
        group = self._groups.blocked.get(request_id)
        if group is not None:
            self._groups.close(group, FinishReason.ERROR)
        return group is not None

    def abort(self, request_ids: Iterable[str]) -> EngineCoreOutputs:
        """End requests in whatever phase they are, and free all they hold; unknown ids are ignored."""
        for request_id in request_ids:
            group = self._groups.by_id.get(request_id)
            if group is not None:
                self._groups.close(group, FinishReason.ABORT)
                self._groups.outbox.finish(group)
        return self._groups.outbox.take()

    def stop_sequence(self, request_id: str, choice_index: int) -> EngineCoreOutputs:
        """A stop string was found in this choice: it ends, its siblings go on. Unknown and ended ones are ignored."""
        group = self._groups.by_id.get(request_id)
        if group is not None and group.branching.can_park and not group.branching.num_children:
            for sequence in group.unfinished:
                if sequence.choice_index == choice_index:
                    self._groups.finish_sequence(sequence, group, FinishReason.STOP)
        return self._groups.outbox.take()

    def reset_prefix_cache(self) -> bool:
        """Forget every prefix; True always, for running requests keep their blocks and hide them."""
        self._cache.reset_prefix_cache()
        return True

    # -- the decision --------------------------------------------------------------------------------------------------

    def schedule_ahead(self) -> SchedulerOutput | None:
        """Decide the step after the one under way; None where it has to wait for that one's results.

        It waits for beams, which choose among candidates; where somebody might have to give way, or waits for others
        to do so; and for blocks on their way to the host, of which nobody knows whether they will arrive.
        """
        groups = self._groups
        under_way = groups.in_flight
        if len(under_way) != 1 or groups.num_searching or groups.parking or under_way.last.block_ops.swap_out:
            return None
        if groups.running and groups.running[-1].is_idle and groups.waiting.num_urgent + groups.preempted.num_urgent:
            return None
        num_tokens, num_blocks = self._expect_tokens()
        if num_blocks > self._cache.num_free_blocks or not (num_tokens or self._can_admit()):
            return None
        return self.schedule()

    def schedule(self) -> SchedulerOutput:
        """Decide the next step. May be empty, where nothing waits or only rows are to be released."""
        stats = self._groups.stats
        stats.num_steps += 1
        output = SchedulerOutput(step_id=stats.num_steps)
        if self._deadlines:
            self._expire()
        gave_way = self._make_idle_yield()
        if self._groups.parking:
            self._preemption.unpark()
        num_preemptions = stats.num_preemptions
        left = self._serve(output, self._groups.running, self._max_num_batched_tokens, self._groups.num_live)
        # Whoever gave way in this step does not come back in it, and siblings come before strangers.
        if left and not gave_way and num_preemptions == stats.num_preemptions and not self._groups.parking:
            left = self._admit(output, left)
        if self._groups.unforked:
            self._fork_children(output)
        stats.num_step_tokens += self._max_num_batched_tokens - left
        self._groups.rows.record(output)
        output.block_ops, output.replaced_blocks = self._cache.take_block_ops()
        self._groups.in_flight.begin(output, self._cache.take_writes())
        return output

    def sampling_input(self, output: SchedulerOutput) -> SamplingInput:
        """What the step needs when it draws; to be asked for once all steps before it have been recorded."""
        sampling = SamplingInput(step_id=output.step_id)
        if self._constraints:
            self._constraints.write_masks(output, sampling)
        return sampling

    def _expect_tokens(self) -> tuple[int, int]:
        """Sequences that the step under way samples go on with what they get, unless they are sure to end with it.

        Returns how many tokens running sequences have to compute then, and at most how many blocks that takes.
        """
        block_size = self._cache.block_size
        num_tokens = num_blocks = 0
        for group in self._groups.running:
            max_len = group.stop.max_len
            may_copy = len(group.live) > 1
            for sequence in group.live:
                length = len(sequence.token_ids)
                missing = length - sequence.num_computed_tokens
                if missing:
                    num_tokens += missing
                    num_blocks += min(missing, self._max_num_batched_tokens) // block_size + 2
                elif length + 1 < max_len:
                    sequence.draft_token_ids = PLACEHOLDER
                    num_tokens += 1
                    num_blocks += may_copy or length % block_size == 0
        return num_tokens, num_blocks * self._cache.num_groups

    def _can_admit(self) -> bool:
        queue = self._next_queue()
        head = None if queue is None else queue.peek()
        return head is not None and self._can_enter(head)

    def _serve(self, output: SchedulerOutput, groups: list[Group], left: int, owed: int) -> int:
        """Grant tokens to the groups in order; returns what is left of the budget.

        `owed` counts the sequences among them: each is owed one token, so that a long prompt may take what is left
        beyond that, but never the token of one that decodes. The step's hottest loop.
        """
        write = self._cache.write
        seq_ids, num_scheduled = output.seq_ids, output.num_scheduled
        num_computed, new_block_ids = output.num_computed, output.new_block_ids
        may_preempt = groups is self._groups.running and not self._groups.in_flight
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
                        continue  # a beam whose siblings are not so far yet, or a sequence that is about to end
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
            if not (may_preempt and self._preemption.give_way(group, position)):
                return False
        return True

    def _make_idle_yield(self) -> bool:
        """Idle groups give way to those that wait and are not idle, until all have a seat and the first its blocks.

        Whoever waits enters in the next step if this is True, and in this one where those that gave way held nothing
        (all their sequences being parked).
        """
        groups = self._groups
        gave_way = False
        while groups.running and groups.running[-1].is_idle:
            num_urgent = groups.waiting.num_urgent + groups.preempted.num_urgent
            queue = self._next_queue()
            if not num_urgent or queue is None or (head := queue.peek()) is None:
                break
            has_seats = num_urgent <= self._max_num_seqs - groups.num_seats
            if has_seats and not groups.parking and self._can_enter(head):
                break
            gave_way |= bool(groups.running[-1].live)
            self._preemption.preempt(groups.running[-1])
        return gave_way

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
        preempted, waiting = self._groups.preempted.peek(), self._groups.waiting.peek()
        if preempted is not None and (waiting is None or preempted.key < waiting.key):
            return self._groups.preempted
        return self._groups.waiting if waiting is not None else None

    def _can_enter(self, group: Group) -> bool:
        """Whether the group's seats and blocks are free, with a reserve against giving way again soon."""
        if self._groups.num_seats + group.num_seats > self._max_num_seqs:
            return False
        if not self._groups.running:
            return True
        reserve = self._num_watermark_blocks
        if group.num_preemptions:
            # Every running sequence may take one more block before the next preemption: a block's worth of steps.
            reserve = max(reserve, self._groups.num_live * self._cache.num_groups)
        reserve += self._groups.num_promised_blocks()
        room = self._cache.num_free_blocks - reserve
        if group.status is SequenceStatus.SWAPPED:
            return self._cache.num_held_blocks(group.live) + group.num_seats * self._cache.num_groups <= room
        leader = group.live[0]
        num_leader_blocks = self._cache.num_blocks_of(len(leader.token_ids))
        room -= max((group.num_seats - 1) * self._cache.num_groups, group.num_lost_blocks - num_leader_blocks)
        use_prefix = group.request.read_prefix_cache
        return (
            self._cache.num_blocks_to_admit(leader, use_prefix=use_prefix) <= room
            and self._cache.num_blocks_to_admit(leader, use_prefix=use_prefix, exact=True) <= room
        )

    def _enter(self, group: Group) -> None:
        """From a queue to the running groups."""
        if group.status is SequenceStatus.SWAPPED:
            self._cache.swap_in(group.live)
            group.swap_step_id = self._groups.stats.num_steps
        else:
            num_hits = self._groups.take_prefix(group, group.live[0])
            if group.first_scheduled_time is None:
                group.num_cached_tokens = num_hits
                if group.request.read_prefix_cache:
                    self._groups.stats.prefix_cache_queries += len(group.request.prompt_token_ids)
                    self._groups.stats.prefix_cache_hits += num_hits
            self._groups.waste(group, group.num_lost_tokens - num_hits)
        if group.first_scheduled_time is None:
            group.first_scheduled_time = self._clock()
        group.num_lost_tokens = group.num_lost_blocks = 0
        self._groups.enter(group)

    def _fork_children(self, output: SchedulerOutput) -> None:
        """Prompts that this step completes get their children, which draw from the same logits."""
        for group in self._groups.unforked:
            leader = group.live[0]
            if leader.num_uncomputed_tokens:
                continue
            # A row that is only now sent cannot be forked; its children are sent beside it.
            is_new = self._groups.rows.is_new(leader)
            sent = [] if is_new else output.new_block_ids[output.seq_ids.index(leader.seq_id)]
            num_unsent = len(sent) // self._cache.num_groups
            for choice_index in range(1, 1 + group.branching.num_children):
                child = self._groups.new_child(group, leader, choice_index)
                self._cache.fork(leader, child, num_unsent=num_unsent)
                if is_new:
                    self._groups.rows.add(child, group.request, self._cache.row_block_ids(child))
                else:
                    self._groups.rows.fork(leader, child)
                output.shared_logits.append((child.seq_id, leader.seq_id))
            group.branching.num_children = 0
        self._groups.unforked = [group for group in self._groups.unforked if group.branching.num_children]

    def _expire(self) -> None:
        now = self._clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            group = heapq.heappop(self._deadlines)[2]
            if self._groups.by_id.get(group.request_id) is group:
                seconds = now - group.request.arrival_time
                message = f"the request's timeout passed: it was not finished after {seconds:.1f} s"
                self._groups.end(group, FinishReason.TIMEOUT, DeadlineExceededError.__name__, message)

    # -- results -------------------------------------------------------------------------------------------------------

    def update(self, output: SchedulerOutput, result: ModelRunnerOutput) -> EngineCoreOutputs:
        """Record what the step produced; returns the rows to report, and the requests that ended."""
        self._cache.commit(self._groups.in_flight.end(output))
        self._preemption.costs.observe(output, result)
        self._constraints.end_failed()
        self._results.record(output, result)
        self._constraints.end_failed()
        return self._report()

    def fail_step(self, output: SchedulerOutput, message: str) -> EngineCoreOutputs:
        """The step raised: the requests that it would have served end with `message`, all others live on."""
        for seq_id in output.seq_ids:
            owner = self._groups.owners.get(seq_id)
            if owner is not None:
                self._groups.end(owner[1], FinishReason.ERROR, EngineStepError.__name__, message)
        for group in [g for g in self._groups.by_id.values() if g.swap_step_id == output.step_id]:
            # Nobody knows whether their blocks have reached the other side.
            if group.status is SequenceStatus.RUNNING:
                self._groups.end(group, FinishReason.ERROR, EngineStepError.__name__, message)
            else:
                self._preemption.recompute_later(
                    group, self._cache.num_held_blocks(group.live), self._cache.num_held_tokens(group.live)
                )
        if output in self._groups.in_flight:  # not where it failed while its results were recorded
            self._groups.in_flight.end(output)
        return self._report()

    def _report(self) -> EngineCoreOutputs:
        outputs = self._groups.outbox.take()
        outputs.stats = self.stats()
        return outputs

    # -- state ---------------------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        """Whether a step would do or report something."""
        return bool(self._groups.by_id or self._groups.outbox or self._groups.rows.is_changed)

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self._groups.by_id)

    def stats(self) -> SchedulerStats:
        """The state now, and totals since the start."""
        return self._groups.snapshot()

    def check(self) -> None:
        """Prove the accounts of blocks, seats and queues; AssertionError tells what is wrong."""
        self._groups.check(self._max_num_seqs)

    def _refuse_impossible(self, request: Request) -> None:
        params = request.sampling_params
        num_tokens = len(request.prompt_token_ids)
        pool = self._cache.device.num_blocks
        if request.request_id in self._groups.by_id:
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


def _ends(group: Group, left: int, owed: int) -> list[int]:
    """How far each live sequence of a group is computed after this step, by the rule of `Scheduler._serve`."""
    ends = []
    for sequence in group.live:
        owed -= 1
        num_tokens = min(sequence.num_uncomputed_tokens, max(left - owed, 1), left)
        left -= num_tokens
        ends.append(sequence.num_computed_tokens + num_tokens)
    return ends
