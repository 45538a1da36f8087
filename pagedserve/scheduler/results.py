"""What a step's results mean: tokens appended, choices ended, beams moved on."""

from __future__ import annotations

from pagedserve.errors import EngineStepError
from pagedserve.scheduler.group import Group
from pagedserve.scheduler.groups import Groups
from pagedserve.sequence import NO_DRAFTS, FinishReason, Sequence
from pagedserve.step import ModelRunnerOutput, SchedulerOutput


class Results:
    """Records ModelRunnerOutputs; what is to be reported goes to the groups' outbox."""

    def __init__(self, groups: Groups):
        self._groups = groups

    def record(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """All of one step."""
        if result.prompt_logprobs:
            self._tell_prompt_logprobs(output, result)
        self._take_tokens(result)
        if result.pooled:
            self._take_vectors(result)
        for seq_id, message in result.errors.items():
            self._fail_sequence(seq_id, message)
        if result.candidates:
            self._take_candidates(result)

    def _take_tokens(self, result: ModelRunnerOutput) -> None:
        """Append the sampled tokens, end what ends with them, and report both as columns. The other hot loop."""
        owners = self._groups.owners
        outputs = self._groups.outbox.outputs
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
                self._groups.end(group, FinishReason.LENGTH)
                continue
            token_ids += sampled
            sequence.draft_token_ids = NO_DRAFTS
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
            self._groups.finish_sequence(sequence, group, reason)

    def _take_vectors(self, result: ModelRunnerOutput) -> None:
        """A prompt whose vector is there has nothing more to do."""
        for seq_id, vector in result.pooled.items():
            if (owner := self._groups.owners.get(seq_id)) is not None:
                sequence, group = owner
                self._groups.outbox.outputs.pooled[group.request_id] = vector
                self._groups.end_sequence(sequence, group, FinishReason.STOP)

    def _tell_prompt_logprobs(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        starts = dict(zip(output.seq_ids, output.num_computed, strict=True))
        for seq_id, entries in result.prompt_logprobs.items():
            owner = self._groups.owners.get(seq_id)
            if owner is None:
                continue
            group = owner[1]
            # Positions that were computed before a preemption are computed again, but told once.
            entries = entries[max(group.num_told_prompt_logprobs - starts[seq_id], 0) :]
            group.num_told_prompt_logprobs += len(entries)
            self._groups.outbox.outputs.prompt_logprobs.setdefault(group.request_id, []).extend(entries)

    def _take_candidates(self, result: ModelRunnerOutput) -> None:
        searching: dict[str, Group] = {}
        for seq_id, candidates in result.candidates.items():
            owner = self._groups.owners.get(seq_id)
            if owner is not None:
                sequence, group = owner
                group.branching.collect(sequence, candidates)
                searching[group.request_id] = group
        for group in searching.values():
            if group.stop.max_len <= group.sequences[0].num_prompt_tokens:
                self._groups.end(group, FinishReason.LENGTH)
            elif group.branching.advance(_Beams(self._groups, group)):
                for row in group.branching.rows():
                    self._groups.outbox.add(group.request_id, row)
                self._groups.close(group, FinishReason.STOP)
                self._groups.outbox.finish(group)

    def _fail_sequence(self, seq_id: int, message: str) -> None:
        owner = self._groups.owners.get(seq_id)
        if owner is None:
            return
        sequence, group = owner
        group.error = message
        if not group.branching.can_park:
            self._groups.end(group, FinishReason.ERROR, EngineStepError.__name__, message)
            return
        self._groups.end_sequence(sequence, group, FinishReason.ERROR)


class _Beams:
    """What beam search may do to its group."""

    def __init__(self, groups: Groups, group: Group):
        self._groups = groups
        self._group = group

    def fork(self, parent: Sequence) -> Sequence:
        child = self._groups.new_child(self._group, parent, parent.choice_index)
        self._groups.cache.fork(parent, child)
        self._groups.rows.fork(parent, child)
        return child

    def append(self, sequence: Sequence, token_id: int) -> None:
        sequence.token_ids.append(token_id)
        self._groups.rows.append(sequence, token_id)

    def drop(self, sequence: Sequence) -> None:
        self._groups.drop(self._group, sequence)
