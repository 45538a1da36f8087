"""How one prompt becomes several sequences: parallel sampling and beam search.

A Branching belongs to one group. The scheduler asks it four things: how many children to fork when the prompt is
computed, what to do with candidates, whether siblings may be served one after another, and the rows of the end.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from pagedserve.sampling_params import BeamParams, SamplingParams
from pagedserve.scheduler.stopping import StopRule
from pagedserve.sequence import FinishReason, Sequence
from pagedserve.step import TokenLogprobs


class Row(NamedTuple):
    """What is reported of one choice."""

    choice_index: int
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    cumulative_logprob: float = 0.0
    logprobs: list[TokenLogprobs] | None = None


class Beams(Protocol):
    """What beam search can do to the sequences of its group; the scheduler does it."""

    def fork(self, parent: Sequence) -> Sequence:
        """A child with the parent's tokens and blocks."""

    def append(self, sequence: Sequence, token_id: int) -> None:
        """The sequence goes on with this token."""

    def drop(self, sequence: Sequence) -> None:
        """The beam is dead; its blocks are free."""


class Branching:
    """One sequence, and what the other kinds have in common."""

    # Sequences to fork when the prompt is computed; they draw their first tokens from the same logits.
    num_children = 0
    # Whether a sequence may wait while its siblings go on.
    can_park = True
    # Whether tokens are chosen here, from candidates: nothing can be computed before their step's results are known.
    searches = False

    def __init__(self, params: SamplingParams):
        self._num_choices = params.num_sequences

    def collect(self, sequence: Sequence, candidates: list[tuple[int, float]]) -> None:
        """Candidates of one sequence, best first."""
        raise ValueError(f"sequence {sequence.seq_id} asked for a token, not for candidates")

    def advance(self, beams: Beams) -> bool:
        """Act on what was collected; True where the search is over."""
        return False

    def restart(self) -> None:
        """The group's sequences will be computed again."""

    def final_rows(self, sequences: list[Sequence], reason: FinishReason) -> list[Row]:
        """The rows of the choices that have none yet, where the group ends for `reason`."""
        done = {s.choice_index for s in sequences if s.is_finished}
        totals = {s.choice_index: s.cumulative_logprob for s in sequences}
        return [
            Row(index, [], reason, None, totals.get(index, 0.0))
            for index in range(self._num_choices)
            if index not in done
        ]


class ParallelSampling(Branching):
    """`num_sequences` samples of one prompt, which is computed and stored once."""

    def __init__(self, params: SamplingParams):
        super().__init__(params)
        self.num_children = params.num_sequences - 1


class Hypothesis(NamedTuple):
    """A finished beam; `score` is its log-probability divided by its length to the power of the penalty."""

    score: float
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | None
    logprobs: list[TokenLogprobs] | None


class _Continuation(NamedTuple):
    total: float
    parent: Sequence
    token_id: int
    place: int  # among the parent's candidates


class BeamSearch(Branching):
    """The beams of one group, best first; the same search as transformers' `_beam_search`, for one prompt.

    A step takes the best `width` continuations of all beams that do not stop. Those that stop are finished only if they
    are among the best `width` of all. The search ends at the length limit, with `width` finished beams
    (`early_stopping` True), or when no live beam can be expected to beat the worst of them.
    """

    can_park = False
    searches = True

    def __init__(self, params: SamplingParams, beam: BeamParams, stop: StopRule, first: Sequence):
        super().__init__(params)
        self._num_choices = params.n
        self._beam = beam
        self._stop = stop
        self._num_prompt_tokens = first.num_prompt_tokens
        self._beams = [first]
        self._candidates: dict[int, list[tuple[int, float]]] = {}
        self._finished: list[Hypothesis] = []
        self._num_logprobs = params.logprobs
        self._logprobs: dict[int, list[TokenLogprobs]] = {first.seq_id: []}

    def collect(self, sequence: Sequence, candidates: list[tuple[int, float]]) -> None:
        self._candidates[sequence.seq_id] = candidates

    def restart(self) -> None:
        self._candidates.clear()

    def advance(self, beams: Beams) -> bool:
        if len(self._candidates) < len(self._beams):
            return False
        length = len(self._beams[0].token_ids) + 1
        running = self._sort_out(length)
        self._finished.sort(key=lambda hypothesis: -hypothesis.score)
        del self._finished[self._beam.width :]
        if self._is_over(running, length):
            return True
        self._move_on(running, beams)
        return False

    def final_rows(self, sequences: list[Sequence], reason: FinishReason) -> list[Row]:
        if reason is not FinishReason.LENGTH:
            return [Row(index, [], reason) for index in range(self._num_choices)]
        # Out of memory or not asked for any token: the live beams are as good as they will get.
        for sequence in self._beams:
            score = self._score(sequence.cumulative_logprob, len(sequence.token_ids))
            logprobs = self._logprobs_of(sequence)
            self._finished.append(Hypothesis(score, sequence.output_token_ids, reason, None, logprobs))
        self._finished.sort(key=lambda hypothesis: -hypothesis.score)
        rows = self.rows()
        return rows + [Row(index, [], reason) for index in range(len(rows), self._num_choices)]

    def rows(self) -> list[Row]:
        """The best finished beams, as choices."""
        return [
            Row(index, h.token_ids, h.finish_reason, h.stop_reason, h.score, h.logprobs)
            for index, h in enumerate(self._finished[: self._num_choices])
        ]

    def _sort_out(self, length: int) -> list[_Continuation]:
        """Finish the continuations that stop, and return the best ones that go on, best first."""
        continuations = [
            _Continuation(beam.cumulative_logprob + logprob, beam, token_id, place)
            for beam in self._beams
            for place, (token_id, logprob) in enumerate(self._candidates[beam.seq_id])
        ]
        continuations.sort(key=lambda c: -c.total)
        running: list[_Continuation] = []
        for rank, continuation in enumerate(continuations):
            is_stop = self._stop.stops(continuation.token_id, length)
            if not is_stop and length < self._stop.max_len:
                running.append(continuation)
            elif rank < self._beam.width:
                self._finish(continuation, length, is_stop)
            if rank + 1 >= self._beam.width and len(running) == self._beam.width:
                break
        return running

    def _finish(self, continuation: _Continuation, length: int, is_stop: bool) -> None:
        parent = continuation.parent
        logprobs = self._logprobs_of(parent)
        if logprobs is not None:
            logprobs = [*logprobs, self._entry(continuation)]
        self._finished.append(
            Hypothesis(
                self._score(continuation.total, length),
                [*parent.output_token_ids, continuation.token_id],
                FinishReason.STOP if is_stop else FinishReason.LENGTH,
                self._stop.stop_reason(continuation.token_id) if is_stop else None,
                logprobs,
            )
        )

    def _is_over(self, running: list[_Continuation], length: int) -> bool:
        if not running:
            return True
        if len(self._finished) < self._beam.width:
            return False
        if self._beam.early_stopping is True:
            return True
        if self._beam.early_stopping == "never" and self._beam.length_penalty > 0.0:
            length = self._stop.max_len  # where the sum of logprobs is divided by the most
        return self._score(running[0].total, length) <= self._finished[-1].score

    def _move_on(self, running: list[_Continuation], beams: Beams) -> None:
        """Each beam's best continuation stays in its place, further ones are forks, beams without any die."""
        survivors: list[Sequence] = []
        entries = [self._entry(c) if self._num_logprobs is not None else None for c in running]
        kept: set[int] = set()
        for continuation in running:
            parent = continuation.parent
            if parent.seq_id not in kept:
                kept.add(parent.seq_id)
                survivors.append(parent)
                continue
            child = beams.fork(parent)
            self._logprobs[child.seq_id] = self._logprobs[parent.seq_id].copy()
            survivors.append(child)
        for beam in self._beams:
            if beam.seq_id not in kept:
                beams.drop(beam)
                del self._logprobs[beam.seq_id]
        for sequence, continuation, entry in zip(survivors, running, entries, strict=True):
            beams.append(sequence, continuation.token_id)
            sequence.cumulative_logprob = continuation.total
            if entry is not None:
                self._logprobs[sequence.seq_id].append(entry)
        self._beams = survivors
        self._candidates.clear()

    def _score(self, total: float, length: int) -> float:
        num_generated = length - self._num_prompt_tokens
        return total / num_generated**self._beam.length_penalty if num_generated else total

    def _logprobs_of(self, sequence: Sequence) -> list[TokenLogprobs] | None:
        return None if self._num_logprobs is None else self._logprobs[sequence.seq_id]

    def _entry(self, continuation: _Continuation) -> TokenLogprobs:
        """The chosen token, then the best ones, as far as the candidates go."""
        candidates = self._candidates[continuation.parent.seq_id]
        entries = [candidates[continuation.place], *candidates[: self._num_logprobs or 0]]
        return TokenLogprobs(
            token_ids=[token_id for token_id, _ in entries],
            logprobs=[logprob for _, logprob in entries],
            rank=continuation.place + 1,
        )


def make_branching(params: SamplingParams, stop: StopRule, first: Sequence) -> Branching:
    """The Branching of a request whose only sequence so far is `first`."""
    if params.beam is not None:
        return BeamSearch(params, params.beam, stop, first)
    # Without a token to draw there is nothing in which samples could differ.
    if params.num_sequences > 1 and stop.max_len > first.num_prompt_tokens:
        return ParallelSampling(params)
    return Branching(params)


def nearest_sibling(sequence: Sequence, siblings: list[Sequence]) -> tuple[Sequence, int]:
    """The sibling with which `sequence` shares the most tokens, and how many (never its last: that one has to be
    computed for its logits). Computed blocks of siblings are how recomputation keeps what was shared shared."""
    limit = len(sequence.token_ids) - 1
    best, best_len = siblings[0], -1
    for sibling in siblings:
        shared = min(_common_len(sequence, sibling), limit)
        if (shared, sibling.num_computed_tokens) > (best_len, best.num_computed_tokens if best_len >= 0 else 0):
            best, best_len = sibling, shared
    return best, best_len


def _common_len(a: Sequence, b: Sequence) -> int:
    length = a.num_prompt_tokens
    end = min(len(a.token_ids), len(b.token_ids))
    ids_a, ids_b = a.token_ids, b.token_ids
    while length < end and ids_a[length] == ids_b[length]:
        length += 1
    return length
