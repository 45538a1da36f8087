"""Request, Sequence, SequenceGroup: what is to be computed.

A Request is what the user asked and never changes. A Sequence is one stream of tokens. A SequenceGroup holds all
sequences of one Request: it is admitted, preempted and swapped as one, and never leaves the control plane.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from pagedserve.sampling_params import SamplingParams

# Of requests that run when nobody else wants the engine (batches); clients cannot ask for it.
IDLE_PRIORITY = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to continue.

    Times are seconds of CLOCK_MONOTONIC, which processes of one machine share. `seed` is always set (the input
    processor draws one where the client gave none), so recomputation after preemption repeats the same draws.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    seed: int
    eos_token_ids: tuple[int, ...] = ()
    arrival_time: float = 0.0
    deadline: float | None = None
    priority: int = 0
    adapter: str | None = None
    cache_salt: str | None = None
    # False for requests that need every prompt position computed (prompt logprobs).
    read_prefix_cache: bool = True


class SequenceStatus(enum.Enum):
    """Where a sequence is; all sequences of a group that are not finished share one of the first three."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    SWAPPED = enum.auto()
    FINISHED = enum.auto()


# Values of Sequence.draft_token_ids that sequences share and nobody changes.
NO_DRAFTS: list[int] = []
PLACEHOLDER: list[int] = [-1]


class FinishReason(enum.StrEnum):
    """Why a sequence ended, in the words of the API."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    TIMEOUT = "timeout"


@dataclass(slots=True, eq=False)
class Sequence:
    """One stream of tokens; `0 <= num_computed_tokens <= num_tokens`."""

    seq_id: int
    choice_index: int
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int = 0
    # To be computed behind them without being sure: drafts to verify, or a token that a step under way draws, of which
    # the device alone knows what it is.
    draft_token_ids: list[int] = field(default_factory=list)
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float = 0.0
    # What it may say next (a `scheduler.constraints.Constraint`), where its request asks for structured output.
    constraint: Any = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + len(self.draft_token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """The one subtraction that replaces phases: what a step may be asked to compute."""
        return len(self.token_ids) + len(self.draft_token_ids) - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """All sequences of one Request, finished ones included."""

    request: Request
    sequences: list[Sequence]
    # Statistics of the group's life, reported with its last output.
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_wasted_tokens: int = 0
    first_scheduled_time: float | None = None

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def sampling_params(self) -> SamplingParams:
        return self.request.sampling_params

    @property
    def unfinished(self) -> list[Sequence]:
        return [s for s in self.sequences if not s.is_finished]

    @property
    def is_finished(self) -> bool:
        return all(s.is_finished for s in self.sequences)
