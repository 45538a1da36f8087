"""Anthropic's requests as requests of /v1/chat/completions."""

from __future__ import annotations

import json
from typing import Any

from pagedserve.api.protocol.messages import MIN_THINKING_TOKENS, CountTokensRequest, MessagesRequest
from pagedserve.errors import RequestError

# chat's name of a field -> Anthropic's
NAMES = {"stop": "stop_sequences", "response_format": "output_config.format", "prompt": "messages"}
_MODES = {"auto": "auto", "any": "required", "none": "none"}


def chat_fields(body: CountTokensRequest) -> tuple[dict[str, Any], list[str]]:
    """Fields of a chat request, and the names of what has no effect. RequestError names what cannot be read."""
    messages: list[dict[str, Any]] = []
    if body.system is not None:
        messages.append({"role": "system", "content": _text(body.system, "system")})
    for i, message in enumerate(body.messages):
        messages += _messages(message, f"messages.{i}")
    fields: dict[str, Any] = {"model": body.model, "messages": messages, "n": 1}
    if messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls"):
        fields["continue_final_message"] = True
    ignored: list[str] = []
    _add_tools(fields, body)
    _add_thinking(fields, body)
    _add_output(fields, body)
    if isinstance(body, MessagesRequest):
        for name in ("max_tokens", "stream", "temperature", "top_p", "top_k", "seed", "timeout", "priority"):
            fields[name] = getattr(body, name)
        fields["stop"] = body.stop_sequences
        fields["cache_salt"] = body.cache_salt
        if body.service_tier not in (None, "auto", "standard_only"):
            ignored.append("service_tier")
    return fields, ignored


def _messages(message: dict[str, Any], where: str) -> list[dict[str, Any]]:
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise RequestError(f"{where}.role must be user or assistant", param=f"{where}.role")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise RequestError(f"{where}.content must be a string or a list of blocks", param=f"{where}.content")
    blocks = [_block(block, f"{where}.content.{j}") for j, block in enumerate(content)]
    if role == "assistant":
        return [_assistant(blocks, where)]
    results = [_tool_result(block, f"{where}.content") for block in blocks if block["type"] == "tool_result"]
    texts = [block for block in blocks if block["type"] != "tool_result"]
    if any(block["type"] != "text" for block in texts):
        raise RequestError(f"{where}: a user's turn holds text and tool_result blocks", param=f"{where}.content")
    if texts:
        results.append({"role": role, "content": _text(texts, f"{where}.content")})
    return results


def _block(block: object, where: str) -> dict[str, Any]:
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(block, dict) or not isinstance(kind, str):
        raise RequestError(f"{where} must be a block with a type", param=where)
    if kind in ("image", "document", "search_result"):
        raise RequestError(f"{where}: {kind} blocks are not supported; this server reads text only", param=where)
    if kind not in ("text", "tool_use", "tool_result", "thinking", "redacted_thinking"):
        raise RequestError(f"{where}: blocks of type {kind[:50]!a} are not supported", param=where)
    return block


def _assistant(blocks: list[dict[str, Any]], where: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls = []
    for block in blocks:
        kind = block["type"]
        if kind == "text":
            message["content"] += _string(block, "text", where)
        elif kind == "thinking":
            message["reasoning_content"] = message.get("reasoning_content", "") + _string(block, "thinking", where)
        elif kind == "tool_use":
            arguments = block.get("input")
            if not isinstance(arguments, dict):
                raise RequestError(f"{where}: tool_use needs an input object", param=f"{where}.content")
            function = {"name": _string(block, "name", where), "arguments": json.dumps(arguments, ensure_ascii=False)}
            calls.append({"id": _string(block, "id", where), "type": "function", "function": function})
        elif kind == "tool_result":
            raise RequestError(f"{where}: tool_result belongs into a user's turn", param=f"{where}.content")
    if calls:
        message["tool_calls"] = calls
    return message


def _tool_result(block: dict[str, Any], where: str) -> dict[str, Any]:
    content = block.get("content")
    text = "" if content is None else _text(content, where)
    return {"role": "tool", "tool_call_id": _string(block, "tool_use_id", where), "content": text}


def _text(content: object, where: str) -> str:
    """A string, or the text of a list of text blocks."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a string or a list of text blocks", param=where)
    texts = []
    for i, block in enumerate(content):
        if _block(block, f"{where}.{i}")["type"] != "text":
            raise RequestError(f"{where}.{i} must be a text block", param=f"{where}.{i}")
        texts.append(_string(block, "text", f"{where}.{i}"))
    return "\n".join(texts)


def _string(block: dict[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{where}: {name} must be a string", param=where)
    return value


def _add_tools(fields: dict[str, Any], body: CountTokensRequest) -> None:
    choice = body.tool_choice or {}
    kind = choice.get("type", "auto")
    if kind == "tool":
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    elif isinstance(kind, str) and kind in _MODES:
        fields["tool_choice"] = _MODES[kind] if body.tool_choice else None
    else:
        raise RequestError("tool_choice.type must be auto, any, tool or none", param="tool_choice")
    if choice.get("disable_parallel_tool_use"):
        fields["parallel_tool_calls"] = False
    if body.tools is None:
        return
    tools = []
    for i, tool in enumerate(body.tools):
        if tool.get("type", "custom") != "custom":
            raise RequestError(
                f"tools.{i}: tools of type {str(tool['type'])[:50]!a} run elsewhere and are not supported",
                param=f"tools.{i}.type",
            )
        function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
        function |= {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
        tools.append({"type": "function", "function": function})
    fields["tools"] = tools


def _add_thinking(fields: dict[str, Any], body: CountTokensRequest) -> None:
    variables = dict(body.chat_template_kwargs or {})
    if body.thinking is not None:
        kind, budget = body.thinking.get("type"), body.thinking.get("budget_tokens")
        if kind not in ("enabled", "disabled", "adaptive"):
            raise RequestError("thinking.type must be enabled, disabled or adaptive", param="thinking")
        if kind == "enabled":
            if type(budget) is not int or budget < MIN_THINKING_TOKENS:
                raise RequestError(
                    f"thinking.budget_tokens must be at least {MIN_THINKING_TOKENS}", param="thinking.budget_tokens"
                )
            if isinstance(body, MessagesRequest) and budget >= body.max_tokens:
                raise RequestError(
                    "thinking.budget_tokens must be less than max_tokens", param="thinking.budget_tokens"
                )
        if kind != "adaptive":
            variables.setdefault("enable_thinking", kind == "enabled")
    if variables:
        fields["chat_template_kwargs"] = variables


def _add_output(fields: dict[str, Any], body: CountTokensRequest) -> None:
    config = body.output_config or {}
    fields["reasoning_effort"] = config.get("effort")
    wanted = config.get("format")
    if wanted is None:
        return
    if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
        raise RequestError("output_config.format.type must be json_schema", param="output_config.format")
    schema = {"name": "output", "schema": wanted.get("schema"), "strict": True}
    fields["response_format"] = {"type": "json_schema", "json_schema": schema}
