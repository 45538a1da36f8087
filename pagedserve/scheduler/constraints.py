"""Sequences that may not say everything: which of a step's rows get a mask of possible tokens, and what ends with it.

A Constraint belongs to one sequence and follows its tokens; a child gets a copy. It knows nothing of blocks or steps,
so preemption, chunks and recomputation do not concern it: what was said stays said.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, Self

from pagedserve.errors import RequestError
from pagedserve.log import get_logger
from pagedserve.scheduler.group import Group
from pagedserve.scheduler.groups import Groups
from pagedserve.scheduler.stopping import StopRule
from pagedserve.sequence import FinishReason, Request, Sequence
from pagedserve.step import SamplingInput, SchedulerOutput

log = get_logger(__name__)


class Constraint(Protocol):
    """What one sequence may say next."""

    # Why the sequence cannot go on (a limit was reached); None while all is well.
    error: str | None

    @property
    def is_complete(self) -> bool:
        """True where nothing can follow."""

    def follow(self, token_ids: list[int], num_prompt_tokens: int) -> None:
        """Take in the output tokens that are new since the last call; end tokens are not among them."""

    def fork(self) -> Self:
        """A copy for a child that has the same tokens."""


# Constraints to their masks, one after the other: rows of int32 words, bit i of a row being token i.
FillMasks = Callable[[list[Constraint]], bytes | bytearray]


class _Everything:
    """Every token is worth a look."""

    def __contains__(self, token_id: object) -> bool:
        return True


class ConstrainedStop(StopRule):
    """The end of a constrained sequence: where its grammar is complete, or an end token that its mask let through."""

    __slots__ = ("_end_token_ids",)

    def __init__(self, request: Request, max_model_len: int):
        super().__init__(request, max_model_len)
        # Whether a text may end here is the mask's business, that of ignore_eos and min_tokens included.
        self._end_token_ids = frozenset(request.eos_token_ids) | frozenset(request.sampling_params.stop_token_ids)
        self._eos_token_ids = frozenset(request.eos_token_ids)
        self.token_ids = _Everything()  # type: ignore[assignment]

    def stops(self, token_id: int, length: int) -> bool:
        return token_id in self._end_token_ids

    def stop_reason(self, token_id: int) -> int | None:
        return token_id if token_id in self._end_token_ids - self._eos_token_ids else None

    def reason(self, sequence: Sequence) -> FinishReason | None:
        length = len(sequence.token_ids)
        constraint = sequence.constraint
        if self.stops(sequence.token_ids[-1], length):
            return FinishReason.STOP
        constraint.follow(sequence.token_ids, sequence.num_prompt_tokens)
        if constraint.is_complete:
            return FinishReason.STOP
        return FinishReason.LENGTH if length >= self.max_len else None


class Constraints:
    """The constrained groups of a scheduler."""

    def __init__(self, groups: Groups, fill_masks: FillMasks | None):
        self._groups = groups
        self._fill_masks = fill_masks
        self._by_id: dict[str, Group] = {}

    def __bool__(self) -> bool:
        return bool(self._by_id)

    def begin(self, group: Group, constraint: Constraint) -> None:
        """The group's grammar is ready."""
        group.live[0].constraint = constraint
        self._by_id[group.request_id] = group

    def write_masks(self, output: SchedulerOutput, sampling: SamplingInput) -> None:
        """Masks of the constrained rows that this step samples, once their tokens so far are known."""
        scheduled = set(output.seq_ids)
        scheduled.update(child for child, _ in output.shared_logits)
        rows: list[Sequence] = []
        for group in self._alive():
            for sequence in group.live:
                if sequence.seq_id in scheduled and not sequence.num_uncomputed_tokens:
                    # Beams are given their tokens elsewhere; the others have followed theirs already.
                    sequence.constraint.follow(sequence.token_ids, sequence.num_prompt_tokens)
                    rows.append(sequence)
        if rows:
            self._fill(sampling, rows)

    def _fill(self, sampling: SamplingInput, rows: list[Sequence]) -> None:
        assert self._fill_masks is not None, "a constrained request needs somebody who makes masks"
        constraints = [sequence.constraint for sequence in rows]
        try:
            sampling.token_masks = self._fill_masks(constraints)
            sampling.masked_seq_ids = [sequence.seq_id for sequence in rows]
        except Exception:
            log.exception("masks could not be made; the requests that need them end")
            for constraint in constraints:
                constraint.error = "the grammar could not be followed; the server's log has the details"

    def end_failed(self) -> None:
        """Groups with a sequence that cannot go on end with its reason."""
        for group in self._alive() if self._by_id else ():
            error = next((s.constraint.error for s in group.live + group.parked if s.constraint.error), None)
            if error is not None:
                self._groups.end(group, FinishReason.ERROR, RequestError.__name__, error)

    def _alive(self) -> list[Group]:
        by_id = self._groups.by_id
        self._by_id = {name: group for name, group in self._by_id.items() if by_id.get(name) is group}
        return list(self._by_id.values())
