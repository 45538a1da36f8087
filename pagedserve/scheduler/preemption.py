"""Who gives way when blocks run out, how (swap or recompute), and how it comes back.

All blocks of a group are taken or none. Only the samples of a group that is alone give way to each other.
"""

from __future__ import annotations

from pagedserve.log import get_logger
from pagedserve.scheduler.branching import nearest_sibling
from pagedserve.scheduler.group import Group
from pagedserve.scheduler.groups import Groups, set_status
from pagedserve.sequence import FinishReason, Sequence, SequenceStatus
from pagedserve.step import ModelRunnerOutput, SchedulerOutput

log = get_logger(__name__)

# Before anything was measured: a host copy at 4 GB/s, and half a millisecond a token of a prompt.
_COPY_BYTES_PER_SECOND = 4e9
_SECONDS_PER_TOKEN = 5e-4
# Weight of the newest measurement: a few steps outweigh the guess, one odd step does not.
_SMOOTHING = 0.2
# A copy that was never measured is tried although the guess says that it costs up to this many times more.
_CURIOSITY = 4
# Steps that compute fewer tokens a sequence are decoding, whose cost a token is not that of recomputation.
_MIN_TOKENS_PER_SEQUENCE = 8


class PreemptionCosts:
    """Seconds a swapped block and a recomputed token take."""

    def __init__(self, mode: str, bytes_per_block: int):
        self._mode = mode
        self.seconds_per_block = max(bytes_per_block, 1) / _COPY_BYTES_PER_SECOND
        self.seconds_per_token = _SECONDS_PER_TOKEN
        self._has_measured_swap = False

    def observe(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Learn from a step."""
        num_blocks = len(output.block_ops.swap_out) + len(output.block_ops.swap_in)
        if num_blocks and result.swap_seconds > 0:
            measured = result.swap_seconds / num_blocks
            weight = _SMOOTHING if self._has_measured_swap else 1.0
            self.seconds_per_block += weight * (measured - self.seconds_per_block)
            self._has_measured_swap = True
        num_tokens = output.num_tokens
        if num_tokens >= _MIN_TOKENS_PER_SEQUENCE * len(output.seq_ids) > 0 and result.forward_seconds > 0:
            self.seconds_per_token += _SMOOTHING * (result.forward_seconds / num_tokens - self.seconds_per_token)

    def prefers_swap(self, num_blocks: int, num_tokens: int) -> bool:
        """Whether moving `num_blocks` out and back beats computing `num_tokens` again (always, or never, by mode)."""
        if self._mode != "auto":
            return self._mode == "swap"
        recompute_seconds = num_tokens * self.seconds_per_token
        if not self._has_measured_swap:
            recompute_seconds *= _CURIOSITY
        return 2 * num_blocks * self.seconds_per_block < recompute_seconds


class Preemption:
    """Takes blocks from groups, and gives sequences that lost theirs new ones."""

    def __init__(self, groups: Groups, costs: PreemptionCosts):
        self._groups = groups
        self.costs = costs

    def give_way(self, group: Group, position: int) -> bool:
        """Free some blocks for `group`, the running list's `position`-th; False where it has lost its own.

        The latest group gives way first, never one that this step serves already. A group alone serves its sequences
        one after another; the last one, or beams, which cannot wait for each other, end as if at their length limit.
        """
        groups = self._groups
        if len(groups.running) > position:
            self.preempt(groups.running[-1])
            return True
        if position > 1:
            self.preempt(group)
            return False
        if not group.branching.can_park:
            groups.end(group, FinishReason.LENGTH)
            return False
        if len(group.live) > 1:
            self._park(group, group.live[-1])
            return True
        log.warning("%s ends at %d tokens: the KV pool is full", group.request_id, len(group.live[0].token_ids))
        groups.end_sequence(group.live[0], group, FinishReason.LENGTH)
        return False

    def preempt(self, group: Group) -> None:
        """Take all blocks of a running group, and let it wait for its return before all new ones."""
        groups = self._groups
        num_blocks = groups.cache.num_held_blocks(group.live)
        num_tokens = groups.cache.num_held_tokens(group.live)
        groups.leave(group)
        for sequence in group.live:
            groups.rows.release(sequence)
        # What a worker pooled so far is lost with its row, so such a prompt is computed anew.
        may_swap = num_blocks > 0 and group.sampling_params.pooling is None
        swaps = may_swap and self.costs.prefers_swap(num_blocks, num_tokens) and groups.cache.swap_out(group.live)
        if swaps:
            group.swap_step_id = groups.stats.num_steps
            set_status(group, SequenceStatus.SWAPPED)
        else:
            self.recompute_later(group, num_blocks, num_tokens)
        groups.preempted.push(group)
        group.num_preemptions += 1
        groups.stats.num_preemptions += 1
        log.info(
            "preempted %s: %s %d blocks (%d tokens); %d running, %d preempted",
            group.request_id,
            "swapped out" if swaps else "will recompute",
            num_blocks,
            num_tokens,
            len(groups.running),
            len(groups.preempted),
        )

    def recompute_later(self, group: Group, num_blocks: int, num_tokens: int) -> None:
        """Give all blocks back. The first sequence will be computed first, the others from what they share with it."""
        groups = self._groups
        for sequence in group.live:
            groups.in_flight.rewind(sequence)
            groups.cache.release(sequence)
        leader, *others = sorted(group.live + group.parked, key=lambda s: s.seq_id)
        group.live, group.parked = [leader], others
        group.branching.restart()
        group.num_lost_tokens = num_tokens
        group.num_lost_blocks = num_blocks
        set_status(group, SequenceStatus.WAITING)

    def unpark(self) -> None:
        """Parked sequences go on where there is room, from the blocks of the sibling that is nearest to them."""
        groups = self._groups
        for group in groups.parking.copy():
            for sequence in group.parked.copy():
                # As for a return: what runs keeps a block for each sequence, if anything runs. Beams of which one is
                # parked do not run: they wait for it.
                num_growing = groups.num_live - (0 if group.branching.can_park else len(group.live))
                num_reserved = groups.num_promised_blocks() + num_growing * groups.cache.num_groups
                room = groups.cache.num_free_blocks - num_reserved
                if room > 0:
                    self._attach(group, sequence, room)
            is_stuck = group.parked and not group.branching.can_park and groups.running == [group]
            if is_stuck and not any(sequence.num_uncomputed_tokens for sequence in group.live):
                groups.end(group, FinishReason.LENGTH)  # nobody is left who could make room for the parked beam
        groups.parking = [g for g in groups.parking if g.parked and g.status is SequenceStatus.RUNNING]

    def _park(self, group: Group, sequence: Sequence) -> None:
        """Take the blocks of one sequence, for its siblings."""
        groups = self._groups
        num_tokens = groups.cache.num_held_tokens(group.live)
        groups.park(group, sequence)
        groups.waste(group, num_tokens - groups.cache.num_held_tokens(group.live))
        group.num_preemptions += 1
        groups.stats.num_preemptions += 1
        log.info(
            "preempted choice %d of %s: it will recompute %d tokens once its siblings leave room",
            sequence.choice_index,
            group.request_id,
            len(sequence.token_ids),
        )

    def _attach(self, group: Group, sequence: Sequence, room: int) -> None:
        """Bring one parked sequence back where `room` blocks are enough for it."""
        groups = self._groups
        cache = groups.cache
        num_tokens = len(sequence.token_ids)
        if group.live:
            source, num_shared = nearest_sibling(sequence, group.live)
            if source.num_computed_tokens < num_shared:
                return
            if cache.can_attach(source, num_shared):
                if cache.num_blocks_of(num_tokens, num_shared) <= room:
                    cache.attach(source, sequence, num_shared)
                    groups.revive(group, sequence)
                return
            # The sibling's window has left what this sequence needs: it is computed on its own.
        if cache.num_blocks_of(num_tokens) > cache.device.num_blocks:
            groups.end_sequence(sequence, group, FinishReason.LENGTH)
            return
        if cache.num_blocks_of(num_tokens) > room:
            return
        groups.take_prefix(group, sequence)
        groups.revive(group, sequence)
