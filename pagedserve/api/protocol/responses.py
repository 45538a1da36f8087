"""`/v1/responses`: OpenAI's Responses API (https://platform.openai.com/docs/api-reference/responses)."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, field_validator

from pagedserve.api.protocol.batches import check_metadata
from pagedserve.api.protocol.chat import ChatLogprobs, TokenLogprob
from pagedserve.errors import RequestError

__all__ = ["ChatLogprobs", "Response", "ResponsesRequest"]

MAX_ITEMS = 10_000
LOGPROBS = "message.output_text.logprobs"
# Accepted in `include`, for they name parts of answers that are never cut here, or that clients always ask for.
_INCLUDED_ANYWAY = ("reasoning.encrypted_content",)
_UNSUPPORTED = ("conversation", "prompt", "context_management", "moderation")


class CountInputRequest(BaseModel):
    """A conversation whose prompt is to be measured."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
    # Fields of OpenAI's that change nothing in an answer.
    HARMLESS: ClassVar[frozenset[str]] = frozenset(
        {"user", "safety_identifier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"}
        | {"max_tool_calls", "stream_options"}
    )

    model: str | None = Field(None, description="a served model (default: the one that is served)")
    input: str | list[dict[str, Any]] = Field(description="a text, or a list of items")
    instructions: str | None = Field(None, description="a system message, for this answer only")
    previous_response_id: str | None = Field(None, description="a stored response that this one goes on from")
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = Field(None, description="format: text, json_object or json_schema")
    reasoning: dict[str, Any] | None = Field(None, description="effort")
    truncation: str | None = Field(None, description="disabled: what does not fit is an error")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="variables for the chat template")

    def check(self) -> None:
        """Raise RequestError for what is not built or cannot be read."""
        if not self.input:
            raise RequestError("input must be a text or a list of items, and not empty", param="input")
        if len(self.input) > MAX_ITEMS and not isinstance(self.input, str):
            raise RequestError(f"input may hold at most {MAX_ITEMS} items", param="input")
        if self.truncation not in (None, "disabled"):
            raise RequestError(
                'truncation must be "disabled"; shorten the conversation to make it fit',
                param="truncation",
                code="unsupported_parameter",
            )


class ResponsesRequest(CountInputRequest):
    """Answer a conversation, and remember it for `previous_response_id`."""

    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = Field(None, description=LOGPROBS)
    store: bool | None = Field(None, description="default: true; stored in memory, the oldest are forgotten")
    background: bool | None = Field(None, description="answer at once, and fetch the response later")
    stream: bool | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    timeout: float | None = Field(None, gt=0, description="seconds after which the request fails with 408")
    priority: int | None = Field(None, ge=-(2**31), le=2**31 - 1, description="lower runs first (priority policy)")
    cache_salt: str | None = None

    _metadata = field_validator("metadata")(check_metadata)

    def check(self) -> None:
        super().check()
        for name in self.include or ():
            if name not in (LOGPROBS, *_INCLUDED_ANYWAY):
                raise RequestError(f"include: {name[:100]!a} is not supported", param="include")
        if self.top_logprobs is not None and not self.wants_logprobs:
            raise RequestError(f'top_logprobs needs include: ["{LOGPROBS}"]', param="top_logprobs")
        if self.background and self.stream:
            raise RequestError("a response in the background cannot be streamed", param="background")
        if self.background and self.store is False:
            raise RequestError("a response in the background must be stored", param="store")

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())


def refuse(body: dict[str, Any]) -> None:
    """RequestError for fields that ask for what is not built."""
    for name in _UNSUPPORTED:
        if body.get(name):
            raise RequestError(f"{name} is not supported", param=name, code="unsupported_parameter")


class OutputText(msgspec.Struct, tag="output_text", tag_field="type"):
    text: str = ""
    annotations: list[dict[str, Any]] = msgspec.field(default_factory=list)
    logprobs: list[TokenLogprob] = msgspec.field(default_factory=list)


class ReasoningText(msgspec.Struct, tag="reasoning_text", tag_field="type"):
    text: str = ""


class OutputMessage(msgspec.Struct, tag="message", tag_field="type"):
    id: str
    content: list[OutputText]
    status: str = "in_progress"
    role: str = "assistant"


class ReasoningItem(msgspec.Struct, tag="reasoning", tag_field="type"):
    id: str
    content: list[ReasoningText]
    status: str = "in_progress"
    summary: list[dict[str, Any]] = msgspec.field(default_factory=list)


class FunctionCall(msgspec.Struct, tag="function_call", tag_field="type"):
    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: str = "in_progress"


Item = OutputMessage | ReasoningItem | FunctionCall


class ResponseInputTokensDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class ResponseOutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    """Tokens of the response."""

    input_tokens: int
    input_tokens_details: ResponseInputTokensDetails
    output_tokens: int
    output_tokens_details: ResponseOutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    reason: str


class Response(msgspec.Struct):
    """The answer. `status`: queued, in_progress, completed, incomplete, failed or cancelled."""

    id: str
    created_at: int
    model: str
    status: str = "in_progress"
    output: list[Item] = msgspec.field(default_factory=list)
    object: str = "response"
    completed_at: int | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    usage: ResponseUsage | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] = msgspec.field(default_factory=list)
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    text: dict[str, Any] = msgspec.field(default_factory=lambda: {"format": {"type": "text"}})
    reasoning: dict[str, Any] | None = None
    truncation: str = "disabled"
    background: bool = False
    store: bool = True
    service_tier: str = "default"
    metadata: dict[str, str] = msgspec.field(default_factory=dict)


class InputTokens(msgspec.Struct):
    """Tokens of the prompt that a request would have."""

    input_tokens: int
    object: str = "response.input_tokens"


class ItemList(msgspec.Struct):
    """A page of items."""

    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class ResponseDeleted(msgspec.Struct):
    """The response is forgotten."""

    id: str
    object: str = "response"
    deleted: bool = True
