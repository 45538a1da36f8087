"""All that crosses between the API process and the core process.

Messages are encoded as MessagePack by `engine.channel`; the types here are the schema, so a field of the wrong type is
refused at the border and no pickle is ever read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args

from pagedserve.config import EngineConfig
from pagedserve.sequence import Request
from pagedserve.step import MemoryPlan, TokenLogprobs

# -- API -> core ------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class StartCore:
    """The first message: what to load.

    `vocab_limit` is the number of ids that the tokenizer can decode: those above are never sampled.
    """

    config: EngineConfig
    vocab_limit: int | None = None


@dataclass(slots=True, kw_only=True)
class AddRequest:
    request: Request


@dataclass(slots=True, kw_only=True)
class AbortRequests:
    """The clients are gone (or the deadline passed): free everything these requests hold."""

    request_ids: list[str]


@dataclass(slots=True, kw_only=True)
class StopSequences:
    """A stop string was found in the text of these choices: they end, their siblings go on."""

    request_ids: list[str]
    choice_indices: list[int]


@dataclass(slots=True, kw_only=True)
class Call:
    """A rare question to the core: `reset_prefix_cache`, `ping`. Answered by a CallResult."""

    call_id: int
    method: str


@dataclass(slots=True, kw_only=True)
class Shutdown:
    """Leave the loop and exit 0."""


# -- core -> API ------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class SchedulerStats:
    """State of the scheduler after a step; counters are totals since the start, so a lost message loses nothing."""

    num_running: int = 0
    num_waiting: int = 0
    num_swapped: int = 0
    kv_cache_usage: float = 0.0
    host_cache_usage: float = 0.0
    num_preemptions: int = 0
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
    num_copied_blocks: int = 0
    num_wasted_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_steps: int = 0
    num_step_tokens: int = 0


@dataclass(slots=True, kw_only=True)
class FinishedRequest:
    """Facts that only the core knows, sent once when the last choice of a request ends."""

    request_id: str
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_wasted_tokens: int = 0
    first_scheduled_time: float | None = None
    # Where the request failed: the class of `errors` to raise for it, its message, and what else that class carries.
    error_kind: str | None = None
    error: str | None = None
    error_param: str | None = None
    retry_after: int | None = None


@dataclass(slots=True, kw_only=True)
class EngineCoreOutputs:
    """What a step produced, as columns over choices (row i belongs to request_ids[i], choice_indices[i]).

    In beam search a request's rows come only at its end: `token_ids` is then the whole output of the choice.
    """

    request_ids: list[str] = field(default_factory=list)
    choice_indices: list[int] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)
    finish_reasons: list[str | None] = field(default_factory=list)
    stop_reasons: list[int | str | None] = field(default_factory=list)
    cumulative_logprobs: list[float] = field(default_factory=list)
    # Keyed by the row's position in the columns.
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    pooled: dict[str, bytes] = field(default_factory=dict)  # request_id -> its vector, little-endian fp32
    finished: list[FinishedRequest] = field(default_factory=list)
    stats: SchedulerStats | None = None


@dataclass(slots=True, kw_only=True)
class Ready:
    """The core is able to serve: model loaded, pools made."""

    plan: MemoryPlan
    max_model_len: int
    phases: dict[str, float] = field(default_factory=dict)  # start-up phase -> seconds


@dataclass(slots=True, kw_only=True)
class StartupFailed:
    """The core could not start: `kind` is the exception class of `errors`, `message` one line for the operator."""

    kind: str
    message: str


@dataclass(slots=True, kw_only=True)
class Progress:
    """A start-up phase began (loading weights, sizing the cache, ...)."""

    phase: str


@dataclass(slots=True, kw_only=True)
class CallResult:
    call_id: int
    value: bool | int | float | str | None = None
    error: str | None = None


ToCore = StartCore | AddRequest | AbortRequests | StopSequences | Call | Shutdown
FromCore = EngineCoreOutputs | Ready | StartupFailed | Progress | CallResult
TO_CORE: tuple[type, ...] = get_args(ToCore)
FROM_CORE: tuple[type, ...] = get_args(FromCore)
