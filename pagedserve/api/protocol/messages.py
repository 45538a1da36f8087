"""`/v1/messages`: Anthropic's Messages API (https://docs.anthropic.com/en/api/messages), its request and its answer."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from pagedserve.api.protocol.chat import MAX_MESSAGES
from pagedserve.errors import RequestError

MIN_THINKING_TOKENS = 1024
# Fields of Anthropic's that change nothing in an answer.
_HARMLESS = {"metadata", "cache_control", "inference_geo", "speed", "user_profile_id", "workspace_id", "diagnostics"}
_UNSUPPORTED = ("container", "mcp_servers", "context_management")


class CountTokensRequest(BaseModel):
    """A conversation whose prompt is to be measured."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
    HARMLESS: ClassVar[frozenset[str]] = frozenset(_HARMLESS)

    model: str
    messages: list[dict[str, Any]] = Field(
        description="turns of user and assistant; a last one of the assistant's goes on"
    )
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = Field(None, description="auto, any, tool or none")
    thinking: dict[str, Any] | None = Field(None, description="enabled, adaptive or disabled")
    output_config: dict[str, Any] | None = Field(None, description="effort; format: a JSON schema")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="variables for the chat template")

    def check(self) -> None:
        """Raise RequestError for what cannot be read."""
        if not self.messages:
            raise RequestError("messages must hold at least one message", param="messages")
        if len(self.messages) > MAX_MESSAGES:
            raise RequestError(f"messages may hold at most {MAX_MESSAGES} messages", param="messages")


class MessagesRequest(CountTokensRequest):
    """Answer a conversation."""

    max_tokens: int = Field(ge=1)
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    service_tier: str | None = None
    seed: int | None = None
    timeout: float | None = Field(None, gt=0, description="seconds after which the request fails with 408")
    priority: int | None = Field(None, ge=-(2**31), le=2**31 - 1, description="lower runs first (priority policy)")
    cache_salt: str | None = None


def refuse(body: dict[str, Any]) -> None:
    """RequestError for fields that ask for what is not built."""
    for name in _UNSUPPORTED:
        if body.get(name):
            raise RequestError(f"{name} is not supported", param=name)


class TextBlock(msgspec.Struct, tag="text", tag_field="type"):
    text: str


class ThinkingBlock(msgspec.Struct, tag="thinking", tag_field="type"):
    thinking: str
    # Others sign thoughts so that they can be trusted when they come back; ours are read as they are.
    signature: str = ""


class ToolUseBlock(msgspec.Struct, tag="tool_use", tag_field="type"):
    id: str
    name: str
    input: dict[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessagesUsage(msgspec.Struct):
    """Tokens; `input_tokens` are those that were not found in the prefix cache."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0


class Message(msgspec.Struct):
    """The answer. `stop_reason`: end_turn, max_tokens, stop_sequence or tool_use."""

    id: str
    content: list[Block]
    model: str
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessagesUsage
    type: str = "message"
    role: str = "assistant"


class TokenCount(msgspec.Struct):
    """Tokens of the prompt that a request would have."""

    input_tokens: int
