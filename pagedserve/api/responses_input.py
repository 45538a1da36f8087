"""Requests and items of the Responses API as requests and messages of /v1/chat/completions."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

from pagedserve.api.protocol.responses import CountInputRequest, ResponsesRequest
from pagedserve.errors import RequestError

# chat's name of a field -> that of the Responses API
NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "messages": "input",
    "prompt": "input",
    "reasoning_effort": "reasoning.effort",
}
_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "text")
_COPIED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop", "stop_token_ids")
_COPIED += ("ignore_eos", "timeout", "priority", "cache_salt", "service_tier", "stream")


def normalized(items: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Input items as they are stored and listed: each with an id and a type. RequestError names one that is unknown."""
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    result = []
    for i, item in enumerate(items):
        where = f"input.{i}"
        kind = item.get("type", "message")
        if kind == "message":
            role = item.get("role")
            if role not in _ROLES:
                raise RequestError(f"{where}.role must be one of {', '.join(_ROLES)}", param=f"{where}.role")
            content = _parts(item.get("content"), where, "output_text" if role == "assistant" else "input_text")
            item = {"id": _id(item, "msg"), "type": "message", "role": role, "content": content, "status": "completed"}
        elif kind == "function_call":
            _need(item, where, "call_id", "name", "arguments")
            item = {**item, "id": _id(item, "fc")}
        elif kind == "function_call_output":
            _need(item, where, "call_id")
            output = item.get("output")
            if not isinstance(output, str):
                output = "".join(part["text"] for part in _parts(output, f"{where}.output", "input_text"))
            item = {**item, "id": _id(item, "fco"), "output": output}
        elif kind == "reasoning":
            item = {**item, "id": _id(item, "rs")}
        else:
            raise RequestError(f"{where}: items of type {str(kind)[:50]!a} are not supported", param=f"{where}.type")
        result.append(item)
    return result


def chat_fields(body: CountInputRequest, items: Iterable[dict[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """Fields of a chat request over normalized items, and the names of what has no effect."""
    ignored: list[str] = []
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": _messages(body.instructions, items),
        "tools": _tools(body.tools),
        "tool_choice": _tool_choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "chat_template_kwargs": body.chat_template_kwargs,
        "response_format": _response_format(body.text, ignored),
        "n": 1,
    }
    reasoning = body.reasoning or {}
    fields["reasoning_effort"] = reasoning.get("effort")
    ignored += [f"reasoning.{name}" for name in reasoning if name != "effort" and reasoning[name] is not None]
    if isinstance(body, ResponsesRequest):
        fields["max_completion_tokens"] = body.max_output_tokens
        fields |= {name: getattr(body, name) for name in _COPIED}
        if body.wants_logprobs:
            fields |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    return fields, ignored


def _messages(instructions: str | None, items: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    thoughts = ""
    for item in items:
        kind = item["type"]
        if kind == "reasoning":
            thoughts += "".join(part.get("text", "") for part in item.get("content") or ())
            continue
        if kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
            continue
        if kind == "function_call":
            # Calls of one turn are one message of the assistant's.
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        else:
            text = "".join(part["text"] for part in item["content"])
            messages.append({"role": item["role"], "content": text})
        if thoughts and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = thoughts
            thoughts = ""
    return messages


def _parts(content: object, where: str, kind: str) -> list[dict[str, Any]]:
    """Content as a list of text parts of one kind."""
    if isinstance(content, str):
        return [_part(kind, content)]
    if not isinstance(content, list):
        raise RequestError(f"{where}.content must be a string or a list of parts", param=f"{where}.content")
    parts = []
    for j, part in enumerate(content):
        place = f"{where}.content.{j}"
        found = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if found == "refusal" else "text") if isinstance(part, dict) else None
        if found not in (*_TEXT_PARTS, "refusal"):
            raise RequestError(
                f"{place}: parts of type {str(found)[:50]!a} are not supported; this server reads text only",
                param=place,
            )
        if not isinstance(text, str):
            raise RequestError(f"{place}.text must be a string", param=place)
        parts.append(_part(kind, text))
    return parts


def _part(kind: str, text: str) -> dict[str, Any]:
    return {"type": kind, "text": text, **({"annotations": []} if kind == "output_text" else {})}


def _need(item: dict[str, Any], where: str, *names: str) -> None:
    for name in names:
        if not isinstance(item.get(name), str):
            raise RequestError(f"{where}.{name} must be a string", param=f"{where}.{name}")


def _id(item: dict[str, Any], prefix: str) -> str:
    given = item.get("id")
    return given if isinstance(given, str) and given else f"{prefix}_{uuid.uuid4().hex}"


def _tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    result = []
    for i, tool in enumerate(tools):
        if tool.get("type") != "function":
            raise RequestError(
                f"tools.{i}: tools of type {str(tool.get('type'))[:50]!a} are not supported; functions are",
                param=f"tools.{i}.type",
            )
        names = ("name", "description", "parameters", "strict")
        function = {name: tool[name] for name in names if tool.get(name) is not None}
        result.append({"type": "function", "function": function})
    return result


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") == "allowed_tools":
        tools = choice.get("tools")
        entries = tools if isinstance(tools, list) else []
        named = [_tool_choice(entry) if isinstance(entry, dict) else entry for entry in entries]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": named}}
    raise RequestError(
        f"tool_choice of type {str(choice.get('type'))[:50]!a} is not supported; functions are", param="tool_choice"
    )


def _response_format(text: dict[str, Any] | None, ignored: list[str]) -> dict[str, Any] | None:
    text = text or {}
    ignored += [f"text.{name}" for name in text if name != "format" and text[name] is not None]
    wanted = text.get("format")
    if wanted is None:
        return None
    if not isinstance(wanted, dict) or wanted.get("type") not in ("text", "json_object", "json_schema"):
        raise RequestError("text.format.type must be text, json_object or json_schema", param="text.format")
    if wanted["type"] != "json_schema":
        return {"type": wanted["type"]}
    names = ("name", "description", "schema", "strict")
    schema = {name: wanted[name] for name in names if wanted.get(name) is not None}
    return {"type": "json_schema", "json_schema": schema}
