"""What the engine gives to its callers: one RequestOutput an update, with text."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagedserve.step import TokenLogprobs


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One choice. In a stream the `delta_*` fields hold what is new since the last output."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    # Of the whole output; None where nobody asked for logprobs or for the best of several. Of a beam: its score, which
    # is that sum divided by the length to the power of length_penalty.
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    delta_text: str = ""
    delta_token_ids: list[int] = field(default_factory=list)
    delta_logprobs: list[TokenLogprobs] | None = None


@dataclass(slots=True, kw_only=True)
class RequestMetrics:
    """The life of a request, in seconds of CLOCK_MONOTONIC."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    num_wasted_tokens: int = 0


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """The state of a request: the last one has `finished` set and every choice's `finish_reason`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    # One entry a prompt token; the first is None (nothing precedes it). None where they were not asked for.
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    # Where the request asked for pooling: its vector, as little-endian fp32.
    pooled: bytes | None = None
    num_cached_tokens: int = 0
    # Known at the end: tokens of choices that were computed and are not returned (best_of).
    num_discarded_tokens: int = 0
    metrics: RequestMetrics | None = None
    # Why the request failed, where it did (finish_reason "error" or "timeout").
    error: str | None = None
