"""`/v1/chat/completions`: the request and its answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, field_validator

from pagedserve.api.protocol.common import GenerationRequest, Usage
from pagedserve.api.protocol.tools import ToolUse, read_tools
from pagedserve.errors import RequestError

MAX_MESSAGES = 10_000
_MESSAGE_KEYS = frozenset(
    {"role", "content", "name", "tool_calls", "tool_call_id", "function_call", "refusal"}
    | {"reasoning", "reasoning_content", "thinking"}
)


class ChatTemplateFields(BaseModel):
    """How a conversation becomes a prompt."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    messages: list[dict[str, Any]]
    # Their entries are checked by `read_tools`, and shown to the template as the client wrote them.
    tools: list[Any] | None = Field(None, description="functions that the model may call")
    tool_choice: str | dict[str, Any] | None = Field(
        None, description="none, auto (default with tools), required, a function, or allowed_tools"
    )
    add_generation_prompt: bool | None = Field(None, description="end with the start of an answer (default: true)")
    continue_final_message: bool | None = Field(None, description="go on with the last message instead of answering")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="variables for the chat template")
    reasoning_effort: str | None = Field(None, description="a variable of the chat template, where it reads it")
    add_special_tokens: bool | None = Field(None, description="default: false, for the template writes them itself")

    @field_validator("messages", mode="before")
    @classmethod
    def _check_messages(cls, value: object) -> object:
        if isinstance(value, list) and len(value) > MAX_MESSAGES:
            raise ValueError(f"messages may hold at most {MAX_MESSAGES} messages, not {len(value)}")
        return value

    def check(self) -> None:
        """Raise RequestError for fields that contradict each other."""
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt cannot both be true", param="continue_final_message"
            )

    def tool_use(self) -> ToolUse:
        """What the request says about tools, checked."""
        return read_tools(self.tools, self.tool_choice, None)

    def template_options(self) -> dict[str, Any]:
        """Keyword arguments of `ChatTemplate.render`."""
        variables = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            variables["reasoning_effort"] = self.reasoning_effort
            if self.reasoning_effort == "none":
                # What templates call it that can only think or not.
                variables.setdefault("enable_thinking", False)
        going_on = bool(self.continue_final_message)
        return {
            "add_generation_prompt": not going_on and self.add_generation_prompt is not False,
            "continue_final_message": going_on,
            "chat_template_kwargs": variables,
            "tools": self.tool_use().shown,
        }

    def unread_variables(self, reads: Callable[[str], bool]) -> list[str]:
        """Fields that are variables of the chat template, and that it does not read."""
        unread = [f"chat_template_kwargs.{name}" for name in self.chat_template_kwargs or {} if not reads(name)]
        effort = self.reasoning_effort
        if effort is not None and not (reads("reasoning_effort") or (effort == "none" and reads("enable_thinking"))):
            unread.append("reasoning_effort")
        return unread

    def unknown_message_keys(self) -> list[str]:
        """Keys of messages that nothing here knows, such as `messages.0.mood`; a template may still read them."""
        return [
            f"messages.{i}.{key}"
            for i, message in enumerate(self.messages)
            for key, value in message.items()
            if key not in _MESSAGE_KEYS and value is not None
        ]


class ChatCompletionRequest(GenerationRequest, ChatTemplateFields):
    """Answer a conversation. Null fields count as absent."""

    PARAM_NAMES: ClassVar[dict[str, str]] = {"logprobs": "top_logprobs", "prompt": "messages"}

    max_completion_tokens: int | None = Field(None, description="wins over max_tokens, its older name")
    parallel_tool_calls: bool | None = Field(None, description="false: the answer ends with its first call")
    include_reasoning: bool | None = Field(None, description="false: the model's thoughts are left out")
    thinking_token_budget: int | None = Field(
        None, ge=0, le=2**31 - 1, description="after so many tokens of thoughts their end is forced"
    )
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def check(self) -> None:
        GenerationRequest.check(self)
        ChatTemplateFields.check(self)
        self.tool_use()
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        if self.max_tokens_asked == 0:
            raise RequestError(f"{self.max_tokens_field} must be at least 1", param=self.max_tokens_field)
        if self.echo and self.messages and self.messages[-1].get("role") != "assistant":
            raise RequestError("echo repeats the assistant's last message, and the last one is not its", param="echo")

    def tool_use(self) -> ToolUse:
        return read_tools(self.tools, self.tool_choice, self.parallel_tool_calls)

    def continued_text(self) -> str:
        """With continue_final_message, the text of the message to go on with."""
        content = self.messages[-1].get("content") if self.continue_final_message and self.messages else None
        return content if isinstance(content, str) else ""

    @property
    def max_tokens_asked(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def max_tokens_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def logprobs_asked(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def renamed(self, error: RequestError) -> RequestError:
        if error.param == "max_tokens" and self.max_completion_tokens is not None:
            error.message = error.message.replace("max_tokens", "max_completion_tokens")
            error.param = "max_completion_tokens"
        if error.param == "structured_output" and self.structured_field is None:
            error.param = "tools"
        return super().renamed(error)


class TopLogprob(msgspec.Struct):
    """One likely token."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    """The token that was drawn, and the likely ones, best first."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """One entry a token of the answer."""

    content: list[TokenLogprob]


class CalledFunction(msgspec.Struct):
    """A function and its arguments, which are JSON."""

    name: str
    arguments: str


class MessageToolCall(msgspec.Struct):
    """One call of a tool."""

    id: str
    type: str
    function: CalledFunction


class ChatMessage(msgspec.Struct, omit_defaults=True):
    """The answer's message. Thoughts stand under the name of OpenAI's reference and the one of DeepSeek's."""

    role: str
    content: str | None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[MessageToolCall] | None = None


class ChatChoice(msgspec.Struct, omit_defaults=True):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletionResponse(msgspec.Struct, omit_defaults=True):
    """The answer of /v1/chat/completions."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    system_fingerprint: str | None = None
    usage: Usage | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_token_ids: list[int] | None = None
