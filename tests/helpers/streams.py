"""Checks of raw server-sent events: framing, strict JSON, and what holds for the chunks of every stream."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, NoReturn

import httpx

FINISH_REASONS = {"stop", "length", "tool_calls", "content_filter"}


@dataclass
class StreamedChoice:
    """What a client that adds up the chunks of one choice has in the end."""

    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[Any] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_chunks: int = 0


@dataclass
class Stream:
    """One stream that was checked; `error` is the error event that ended it, if any."""

    choices: dict[int, StreamedChoice]
    chunks: list[dict[str, Any]]
    usage: dict[str, Any] | None
    error: dict[str, Any] | None
    comments: int


def strict_json(raw: bytes | str) -> Any:
    """JSON as RFC 8259 has it: no NaN, no Infinity."""

    def refuse(name: str) -> NoReturn:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(raw, parse_constant=refuse)


def check_error(response: httpx.Response, status: int, *, param: str | None = None) -> dict[str, Any]:
    """The error body of a response that must have this status (and name this field); shape checked."""
    assert response.status_code == status, f"{response.status_code}: {response.text[:500]}"
    assert response.headers["content-type"] == "application/json"
    return check_error_body(response.content, param=param)


def check_error_body(raw: bytes, *, param: str | None = None) -> dict[str, Any]:
    """An error body: OpenAI's shape, small, and silent about the server's insides."""
    assert len(raw) < 64 * 1024
    body = strict_json(raw)
    if body.pop("type", None) == "error":
        # Anthropic's shape has less.
        body["error"] |= {"param": None, "code": None}
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    assert error["param"] is None or isinstance(error["param"], str)
    for leak in ("Traceback", "site-packages", "pagedserve/", "pydantic"):
        assert leak not in error["message"]
    if param is not None:
        assert error["param"] == param or str(error["param"]).startswith(f"{param}."), error
    return error


def check_stream(raw: bytes, *, chat: bool, num_choices: int | None = None) -> Stream:
    """The whole body of a stream, checked: every event a JSON object, ids constant, one end a choice, [DONE] last."""
    raw.decode("utf-8")
    assert raw.endswith(b"\n\n")
    events = raw[: -len(b"\n\n")].split(b"\n\n")
    comments = sum(event.startswith(b":") for event in events)
    events = [event for event in events if not event.startswith(b":")]
    assert all(event.startswith(b"data: ") and b"\n" not in event for event in events)
    assert events[-1] == b"data: [DONE]"
    documents = [strict_json(event[len(b"data: ") :]) for event in events[:-1]]
    assert all(isinstance(document, dict) for document in documents)
    error = None
    if documents and "error" in documents[-1]:
        error = documents.pop()["error"]
        assert set(error) == {"message", "type", "param", "code"}
    stream = Stream({}, documents, None, error, comments)
    kind = "chat.completion.chunk" if chat else "text_completion"
    for chunk in documents:
        assert chunk["object"] == kind
        assert {k: chunk[k] for k in ("id", "created", "model")} == {
            k: documents[0][k] for k in ("id", "created", "model")
        }
        if not chunk["choices"]:
            assert chunk is documents[-1], "the usage chunk is the last"
            stream.usage = chunk["usage"]
        for choice in chunk["choices"]:
            _merge(stream.choices.setdefault(choice["index"], StreamedChoice()), choice, chat=chat)
    if error is None:
        assert all(choice.finish_reason in FINISH_REASONS for choice in stream.choices.values())
        if num_choices is not None:
            assert sorted(stream.choices) == list(range(num_choices))
    return stream


def _merge(merged: StreamedChoice, choice: dict[str, Any], *, chat: bool) -> None:
    assert merged.finish_reason is None, "a chunk after the choice's end"
    if chat:
        delta = choice["delta"]
        assert ("role" in delta) == (merged.num_chunks == 0), "the role comes first, and once"
        assert delta.get("role", "assistant") == "assistant"
        text = delta.get("content", "") or ""
    else:
        text = choice["text"]
    assert isinstance(text, str)
    merged.num_chunks += 1
    merged.text += text
    merged.token_ids += choice.get("token_ids", [])
    logprobs = choice["logprobs"]
    if logprobs is not None:
        merged.logprobs += logprobs["content"] if chat else list(zip(*_columns(logprobs), strict=True))
    merged.finish_reason = choice["finish_reason"]
    merged.stop_reason = choice.get("stop_reason")


def _columns(logprobs: dict[str, list[Any]]) -> list[list[Any]]:
    return [logprobs[name] for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs")]
