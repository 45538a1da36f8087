"""Parsed answers as /v1/chat/completions shows them: whole messages, and the deltas of a stream."""

from __future__ import annotations

from typing import Any

from pagedserve.api.parsed_events import Content, Event, Reasoning, ToolCallArguments, ToolCallBegin
from pagedserve.api.parsed_output import ParsedMessage
from pagedserve.api.protocol.chat import CalledFunction, ChatMessage, MessageToolCall


def message_of(parsed: ParsedMessage, echoed: str = "") -> ChatMessage:
    """The answer's message; `echoed` stands before its text. Without text beside calls or thoughts content is null."""
    content: str | None = echoed + parsed.content
    if not content and (parsed.tool_calls or parsed.reasoning):
        content = None
    message = ChatMessage("assistant", content)
    if parsed.reasoning:
        message.reasoning = message.reasoning_content = parsed.reasoning
    if parsed.tool_calls:
        message.tool_calls = [
            MessageToolCall(call.call_id, "function", CalledFunction(call.name, call.arguments))
            for call in parsed.tool_calls
        ]
    return message


def delta_of(event: Event) -> dict[str, Any] | None:
    """The delta of one event; None where a stream says nothing of it.

    A call's id, type and name come once, with its first delta. Thoughts stand under both names in the field.
    """
    if isinstance(event, Content):
        return {"content": event.text}
    if isinstance(event, Reasoning):
        return {"reasoning": event.text, "reasoning_content": event.text}
    if isinstance(event, ToolCallArguments):
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
    if isinstance(event, ToolCallBegin):
        call = {"index": event.index, "id": event.call_id, "type": "function"}
        return {"tool_calls": [{**call, "function": {"name": event.name, "arguments": ""}}]}
    return None
