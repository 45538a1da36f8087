"""`/v1/requests`, `/abort_requests` and `/load`: what is under way, and what became of it."""

from __future__ import annotations

import msgspec
from pydantic import BaseModel, ConfigDict, Field

MAX_ABORTED = 1000


class RequestRecord(msgspec.Struct, kw_only=True):
    """One request. `status`: queued, running, finished or failed. Times count from its arrival, in seconds.

    `queued_seconds` and `num_preemptions` are known at the end.
    """

    id: str
    route: str
    model: str
    status: str
    created: float
    queued_seconds: float | None
    first_token_seconds: float | None
    finished_seconds: float | None
    num_prompts: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    num_preemptions: int
    num_wasted_tokens: int
    object: str = "request"


class RequestList(msgspec.Struct):
    """Recent requests, newest first."""

    data: list[RequestRecord]
    has_more: bool
    object: str = "list"


class AbortRequest(BaseModel):
    """Requests to end."""

    model_config = ConfigDict(strict=True, extra="ignore")

    request_ids: list[str] = Field(min_length=1, max_length=MAX_ABORTED, description="ids as in X-Request-Id")


class AbortResponse(msgspec.Struct):
    """Ids that were under way and are not any more."""

    aborted: list[str]


class Load(msgspec.Struct):
    """How busy the server is. `server_load`: requests that are being answered."""

    server_load: int
    num_running: int
    num_waiting: int
    num_swapped: int
    kv_cache_usage: float
