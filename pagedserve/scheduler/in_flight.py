"""Steps that were decided and whose results are not known yet: at most two, and results come in their order.

A worker computes steps one after the other. So blocks may change hands while a step that writes into them is still
under way: whoever gets them writes later. What is only on its way must not be taken for computed, though: a step that
fails leaves nothing to be found.
"""

from __future__ import annotations

from collections import deque

from pagedserve.kv_cache.manager import Writes
from pagedserve.sequence import NO_DRAFTS, Sequence
from pagedserve.step import SchedulerOutput


class InFlight:
    """The steps under way, oldest first, and the blocks that each of them completes."""

    def __init__(self) -> None:
        self._steps: deque[tuple[SchedulerOutput, Writes]] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def last(self) -> SchedulerOutput:
        """The step decided last."""
        return self._steps[-1][0]

    def begin(self, output: SchedulerOutput, writes: Writes) -> None:
        """A step was decided."""
        self._steps.append((output, writes))

    def end(self, output: SchedulerOutput) -> Writes:
        """The oldest step is done: what it wrote."""
        assert output in self, "results come in the order of their steps"
        return self._steps.popleft()[1]

    def __contains__(self, output: SchedulerOutput) -> bool:
        """Whether it is the step whose results come next."""
        return bool(self._steps) and self._steps[0][0] is output

    def rewind(self, sequence: Sequence) -> None:
        """Take back all that is on its way for a sequence that gives its blocks away."""
        sequence.draft_token_ids = NO_DRAFTS
        for output, _ in self._steps:
            place = _place(sequence.seq_id, output)
            if place is not None:
                sequence.num_computed_tokens = output.num_computed[place]
                return


def _place(seq_id: int, output: SchedulerOutput) -> int | None:
    """Where in the step's columns the sequence is computed, be it as a part of its parent."""
    for child, parent in output.shared_logits:
        if child == seq_id:
            seq_id = parent
    return output.seq_ids.index(seq_id) if seq_id in output.seq_ids else None
