"""Chat messages as clients send them, made into what templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pagedserve.errors import RequestError

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_MEDIA_PARTS = ("image_url", "image", "input_image", "input_audio", "audio_url", "video_url", "video", "file")
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


def normalize_messages(
    messages: Sequence[Mapping[str, Any]],
    *,
    content_format: str = "string",
    knows_developer: bool = False,
    text_arguments: bool = False,
) -> list[dict[str, Any]]:
    """A fresh list of messages for a template. Raises RequestError that names the message at fault.

    `content_format`: "string" joins text parts with a newline; "either" leaves parts as parts and text as text; "parts"
    makes parts of everything. Null content is "", empty `tool_calls` are left out, tool arguments are parsed (templates
    write them as JSON themselves; with `text_arguments` they are JSON, for templates that do not), `developer` becomes
    `system` where the template does not know it.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise RequestError("messages must be a list of messages", param="messages")
    if not messages:
        raise RequestError("messages must not be empty", param="messages")
    result = [_message(m, f"messages[{i}]", content_format, knows_developer) for i, m in enumerate(messages)]
    if text_arguments:
        for call in (call for message in result for call in message.get("tool_calls", ())):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return result


def _message(message: Any, where: str, content_format: str, knows_developer: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _error(f"{where} must be an object with role and content")
    role = message.get("role")
    if role not in ROLES:
        raise _error(f"{where}.role is {_shown(role)}; known: {', '.join(ROLES)}")
    result = {key: value for key, value in message.items() if value is not None}
    if role == "developer" and not knows_developer:
        result["role"] = "system"
    calls = message.get("tool_calls")
    result.pop("tool_calls", None)
    if calls:
        result["tool_calls"] = _tool_calls(calls, f"{where}.tool_calls")
    if role == "tool" and not isinstance(result.get("tool_call_id"), str):
        raise _error(f"{where} has no tool_call_id, which says whose result it is")
    content = message.get("content")
    if content is None:
        if role != "assistant" or not (calls or "content" in message or "function_call" in result):
            raise _error(f"{where} has no content")
        content = ""
    result["content"] = _content(content, f"{where}.content", content_format)
    reasoning = next((result[key] for key in _REASONING_FIELDS if key in result), None)
    if reasoning is not None:
        # Templates read the model's earlier thoughts under one of two names.
        result = {"thinking": reasoning, **result, "reasoning_content": reasoning}
    return result


def _content(content: Any, where: str, content_format: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content_format == "parts" else content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise _error(f"{where} must be text or a list of parts")
    texts = [_text(part, f"{where}[{i}]") for i, part in enumerate(content)]
    if content_format == "string" or (content_format == "either" and not texts):
        return "\n".join(texts)
    return [{"type": "text", "text": text} for text in texts]


def _text(part: Any, where: str) -> str:
    if not isinstance(part, Mapping):
        raise _error(f'{where} must be an object such as {{"type": "text", "text": "…"}}')
    kind = part.get("type")
    if kind in _MEDIA_PARTS:
        raise _error(f"{where} has type {kind!r}, but this model reads text only")
    if not isinstance(kind, str) or kind not in _TEXT_PARTS:
        raise _error(f"{where}.type is {_shown(kind)}; known: {', '.join(_TEXT_PARTS)}")
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise _error(f"{where} has no {_TEXT_PARTS[kind]}")
    return text


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise _error(f"{where} must be a list")
    return [_tool_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _error(f"{where} must be an object with function.name and function.arguments")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise _error(f"{where}.function.arguments is not JSON: {error}") from error
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise _error(f"{where}.function.arguments must be a JSON object")
    return {"type": "function", **call, "function": {**function, "arguments": dict(arguments)}}


def _error(message: str) -> RequestError:
    return RequestError(message, param="messages")


def _shown(value: Any) -> str:
    return "missing" if value is None else repr(value)[:40]
