"""Group: a SequenceGroup with what the scheduler knows of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pagedserve.scheduler.stopping import StopRule
from pagedserve.sequence import IDLE_PRIORITY, Sequence, SequenceGroup, SequenceStatus

if TYPE_CHECKING:
    from pagedserve.scheduler.branching import Branching


@dataclass(slots=True, eq=False, kw_only=True)
class Group(SequenceGroup):
    """One request in the scheduler.

    `live` sequences are served in every step and hold blocks; `parked` ones wait for blocks, or for a sibling to
    compute the prefix that they share. `num_seats` are the sequences it counts for against --max-num-seqs: those that
    are unfinished or still to be forked. `key` orders groups: the smaller is served first, the largest gives way first.
    """

    key: tuple[float, ...]
    stop: StopRule
    branching: Branching
    num_seats: int
    status: SequenceStatus = SequenceStatus.WAITING
    live: list[Sequence] = field(default_factory=list)
    parked: list[Sequence] = field(default_factory=list)
    # What recomputation has to make up for: tokens and blocks held when the group was preempted.
    num_lost_tokens: int = 0
    num_lost_blocks: int = 0
    # The step in which the blocks last went to the host, or came back.
    swap_step_id: int = -1
    # Prompt positions whose logprobs have gone out; recomputation computes them again.
    num_told_prompt_logprobs: int = 0
    error: str | None = None

    @property
    def is_idle(self) -> bool:
        """Whether it runs only in what others leave."""
        return self.request.priority >= IDLE_PRIORITY
