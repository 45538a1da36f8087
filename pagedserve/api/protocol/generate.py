"""`/inference/v1/generate`: token ids in, token ids out."""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from pagedserve.api.protocol.chat import ChatLogprobs
from pagedserve.api.protocol.common import Usage


class GenerateRequest(BaseModel):
    """Continue token ids. Nothing is tokenized, templated or turned into text."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    model: str | None = Field(None, description="a served model (default: the one that is served)")
    token_ids: list[int]
    sampling_params: dict[str, Any] | None = Field(None, description="fields of /v1/completions but prompt and stream")
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    timeout: float | None = None


class GenerateChoice(msgspec.Struct, omit_defaults=True):
    """One continuation; in a stream what is new of it."""

    index: int
    token_ids: list[int]
    finish_reason: str | None
    logprobs: ChatLogprobs | None = None
    stop_reason: int | str | None = None


class GenerateResponse(msgspec.Struct, omit_defaults=True):
    """The answer, and each chunk of its stream."""

    request_id: str
    model: str
    choices: list[GenerateChoice]
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    usage: Usage | None = None
