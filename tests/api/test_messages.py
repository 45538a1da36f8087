"""`/v1/messages` through the official `anthropic` package, and what only raw bytes show."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from tests.api.conftest import Front, FrontFactory
from tests.helpers.server import ServerProcess
from tests.helpers.streams import strict_json
from tests.helpers.tool_formats import hermes, template_with

SAY = [{"role": "user", "content": "say hello there"}]


def client_of(front: Any, key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=front.base_url, api_key=key, max_retries=0, timeout=30)


@pytest.fixture(scope="module")
def client(front: Front) -> Iterator[anthropic.Anthropic]:
    with client_of(front) as client:
        yield client


def ask(front: Front, path: str = "/v1/messages", **body: object) -> httpx.Response:
    return front.client.post(path, json={"model": "fake", "max_tokens": 50, "messages": SAY, **body})


def check_error(response: httpx.Response, status: int, kind: str, text: str = "") -> None:
    assert response.status_code == status, response.text
    body = strict_json(response.content)
    assert set(body) == {"type", "error"}
    assert body["type"] == "error"
    assert set(body["error"]) == {"type", "message"}
    assert body["error"]["type"] == kind
    assert text in body["error"]["message"]


def prompt_of(front: Front) -> str:
    """What the engine was given last."""
    prompt = front.engine.seen[-1]["prompt"]
    return prompt if isinstance(prompt, str) else front.engine.tokenizer.decode(prompt, skip_special_tokens=False)


def events_of(raw: bytes) -> list[dict[str, Any]]:
    """The events of a stream: each has a name, which is its type."""
    events = []
    for part in raw.removesuffix(b"\n\n").split(b"\n\n"):
        name, _, data = part.partition(b"\n")
        event = strict_json(data.removeprefix(b"data: "))
        assert name == b"event: " + event["type"].encode()
        events.append(event)
    return events


def test_an_answer(client: anthropic.Anthropic) -> None:
    message = client.messages.create(model="fake", max_tokens=50, messages=SAY)
    assert (message.type, message.role, message.model) == ("message", "assistant", "fake")
    assert message.id.startswith("msg_")
    (block,) = message.content
    assert (block.type, block.text) == ("text", "hello there")
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.output_tokens == len("hello there")
    assert message.usage.input_tokens > 10


def test_the_stream_adds_up(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(model="fake", max_tokens=50, messages=SAY)
    with client.messages.stream(model="fake", max_tokens=50, messages=SAY) as stream:
        assert "".join(stream.text_stream) == "hello there"
        final = stream.get_final_message()
    assert final.content[0].text == whole.content[0].text
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert final.usage.input_tokens == whole.usage.input_tokens


def test_the_order_of_events(front: Front) -> None:  # C119
    response = ask(front, stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = events_of(response.content)
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert set(kinds[3:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    start = events[0]["message"]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert start["usage"]["input_tokens"] > 10
    assert events[2]["content_block"] == {"type": "text", "text": ""}
    assert {event["index"] for event in events if "index" in event} == {0}
    assert events[-2]["usage"]["output_tokens"] == len("hello there")


def test_why_it_stopped(client: anthropic.Anthropic) -> None:  # C118
    message = client.messages.create(model="fake", max_tokens=3, messages=SAY)
    assert (message.stop_reason, message.content[0].text) == ("max_tokens", "hel")


def test_a_stop_sequence_is_named(tiny: ServerProcess) -> None:  # C118
    fixed: dict[str, Any] = {"model": "tiny", "max_tokens": 40, "messages": SAY, "extra_body": {"temperature": 0}}
    with client_of(tiny) as client:
        first = client.messages.create(**fixed)
        assert first.stop_reason == "max_tokens"
        text = first.content[0].text
        stop = next(char for char in text[10:] if char.isascii() and char.isprintable())
        fixed["stop_sequences"] = ["\ue000", stop]
        message = client.messages.create(**fixed)
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
        assert message.content[0].text == text[: text.index(stop)]
        with client.messages.stream(**fixed) as stream:
            final = stream.get_final_message()
        assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", stop)
        assert final.content[0].text == message.content[0].text
        # What was cached is counted apart.
        usage = final.usage
        assert usage.cache_read_input_tokens > 0
        assert usage.input_tokens + usage.cache_read_input_tokens == (
            first.usage.input_tokens + first.usage.cache_read_input_tokens
        )


def test_system_blocks_and_turns_reach_the_template(front: Front) -> None:
    ask(
        front,
        system=[{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind.", "cache_control": {}}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "three"}]},
            {"role": "user", "content": "four"},
        ],
    )
    prompt = prompt_of(front)
    places = [prompt.index(text) for text in ("Be brief.\nBe kind.", "one\ntwo", "three", "four")]
    assert places == sorted(places)


def test_a_last_turn_of_the_assistant_is_gone_on_with(front: Front) -> None:
    ask(front, messages=[*SAY, {"role": "assistant", "content": "well, hel"}])
    assert prompt_of(front).endswith("well, hel")


def test_counted_tokens_are_those_of_the_answer(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model="fake", messages=SAY, system="Be brief.")
    message = client.messages.create(model="fake", max_tokens=5, messages=SAY, system="Be brief.")
    assert counted.input_tokens == message.usage.input_tokens


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"max_tokens": None}, "max_tokens is required"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "text only"),
        ({"messages": [{"role": "user", "content": [{"type": "server_tool_use"}]}]}, "server_tool_use"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f"}]}]}, "input"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        ({"system": 5}, "system"),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences must not hold an empty string"),
        ({"stop_sequences": ["x"] * 100}, "stop_sequences"),
        ({"tool_choice": {"type": "sometimes"}}, "tool_choice"),
        ({"tool_choice": {"type": ["auto"]}}, "tool_choice"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "less than max_tokens"),
        ({"thinking": {"type": "maybe"}}, "thinking"),
        ({"output_config": {"format": {"type": "poem"}}}, "output_config.format"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        ({"max_tokens": 100_000}, "context is 512"),
        ({"priority": 1}, "priority"),
    ],
    ids=str,
)
def test_mistakes_are_named_in_anthropics_shape(front: Front, body: dict[str, object], text: str) -> None:  # C106
    for stream in (False, True):
        check_error(ask(front, stream=stream, **body), 400, "invalid_request_error", text)


def test_errors_of_other_kinds(front: Front, make_front: FrontFactory, client: anthropic.Anthropic) -> None:  # C096
    check_error(ask(front, model="nope"), 404, "not_found_error", "nope")
    check_error(front.client.get("/v1/messages/nope"), 404, "not_found_error")
    check_error(front.client.get("/v1/messages"), 405, "invalid_request_error")
    check_error(front.client.post("/v1/messages", content=b"x"), 415, "invalid_request_error")
    small = make_front(max_body_size="100")
    check_error(ask(small, system="x" * 200), 413, "request_too_large")
    for command, status, kind in (
        ("fail QueueFullError 0", 429, "rate_limit_error"),
        ("fail EngineDeadError 0", 503, "overloaded_error"),
        ("fail EngineStepError 0", 500, "api_error"),
        ("fail Exception 0", 500, "api_error"),
        ("fail DeadlineExceededError 0", 408, "timeout_error"),
    ):
        check_error(ask(front, messages=[{"role": "user", "content": command}]), status, kind)
    with pytest.raises(anthropic.RateLimitError) as caught:
        client.messages.create(
            model="fake", max_tokens=5, messages=[{"role": "user", "content": "fail QueueFullError 0"}]
        )
    assert caught.value.body["error"]["type"] == "rate_limit_error"
    assert caught.value.response.headers["retry-after"] == "3"


def test_an_error_within_a_stream(front: Front, client: anthropic.Anthropic) -> None:  # C047
    messages = [{"role": "user", "content": "fail EngineStepError 3"}]
    events = events_of(ask(front, messages=messages, stream=True).content)
    assert events[-1]["type"] == "error"
    assert events[-1]["error"]["type"] == "api_error"
    with (
        pytest.raises(anthropic.APIStatusError),
        client.messages.stream(model="fake", max_tokens=50, messages=messages) as stream,  # type: ignore[arg-type]
    ):
        stream.get_final_message()


def test_keys(make_front: FrontFactory) -> None:  # C105
    front = make_front(api_key=("secret",))
    with client_of(front, "secret") as client:
        assert client.messages.create(model="fake", max_tokens=5, messages=SAY).content
    with client_of(front, "wrong") as client, pytest.raises(anthropic.AuthenticationError):
        client.messages.create(model="fake", max_tokens=5, messages=SAY)
    check_error(ask(front), 401, "authentication_error")


def test_fields_without_effect_are_named(front: Front, make_front: FrontFactory) -> None:
    response = ask(front, foo=1, metadata={"user_id": "me"}, service_tier="standard_only")
    assert response.status_code == 200
    assert response.headers["x-pagedserve-warning"].endswith(": foo")
    check_error(ask(make_front(strict=True), foo=1), 400, "invalid_request_error", "foo")


def test_a_client_that_leaves_ends_its_request(front: Front) -> None:
    body = {"model": "fake", "max_tokens": 50, "messages": [{"role": "user", "content": "hang 2"}], "stream": True}
    with front.client.stream("POST", "/v1/messages", json=body) as response:
        pieces = response.iter_raw()  # an iterator that nobody holds closes its response
        next(pieces)
        assert front.engine.live
    deadline = time.monotonic() + 60
    while front.engine.live and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not front.engine.live


TOOLS = [
    {
        "name": "f",
        "description": "does it",
        "input_schema": {"type": "object", "properties": {"a": {"type": "string"}}},
    },
    {"name": "g", "input_schema": {"type": "object"}},
]
CALLS = [("f", {"a": 'x"y\\n{}é汉🦜'}), ("g", {"n": [1, {"c": None}]})]


@pytest.fixture(scope="module")
def calling(make_front: FrontFactory) -> Front:
    front = make_front(template=template_with("<tool_call> <think>"))
    front.engine.script = f"<think>hm, é</think>Let me.\n{hermes(CALLS)}"
    return front


def blocks_of(message: Any) -> list[Any]:
    return [
        block.thinking
        if block.type == "thinking"
        else block.text
        if block.type == "text"
        else (block.name, block.input)
        for block in message.content
    ]


@pytest.mark.parametrize("stride", [1, 3, 1000])
def test_thoughts_text_and_calls_are_blocks(calling: Front, stride: int) -> None:  # C118, C119
    calling.engine.stride = stride
    fixed: dict[str, Any] = {"model": "fake", "max_tokens": 400, "messages": SAY, "tools": TOOLS}
    with client_of(calling) as client:
        message = client.messages.create(**fixed)
        with client.messages.stream(**fixed) as stream:
            final = stream.get_final_message()
    for answer in (message, final):
        assert blocks_of(answer) == ["hm, é", "Let me.", *CALLS]
        assert answer.stop_reason == "tool_use"
        assert len({block.id for block in answer.content if block.type == "tool_use"}) == 2
    assert message.usage.output_tokens == final.usage.output_tokens
    events = events_of(ask(calling, max_tokens=400, tools=TOOLS, stream=True).content)
    joined: dict[int, str] = {}
    for event in events:
        if event.get("delta", {}).get("type") == "input_json_delta":
            joined[event["index"]] = joined.get(event["index"], "") + event["delta"]["partial_json"]
    assert {index: json.loads(text) for index, text in joined.items()} == {2: CALLS[0][1], 3: CALLS[1][1]}
    borders = [(e["type"], e["index"]) for e in events if e["type"] in ("content_block_start", "content_block_stop")]
    assert borders == [(f"content_block_{what}", i) for i in range(4) for what in ("start", "stop")]


def test_turns_with_tools_reach_the_template(calling: Front) -> None:  # C053
    call = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": "b"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "it rains"}]}
    thoughts = {"type": "thinking", "thinking": "because", "signature": ""}
    messages = [
        *SAY,
        {"role": "assistant", "content": [thoughts, {"type": "text", "text": "Wait."}, call]},
        {"role": "user", "content": [result, {"type": "text", "text": "and now?"}]},
    ]
    assert ask(calling, messages=messages, tools=TOOLS, max_tokens=400).status_code == 200
    prompt = prompt_of(calling)
    places = [prompt.index(text) for text in ("does it", "because", "Wait.", '[f({"a": "b"})]', "it rains", "and now?")]
    assert places == sorted(places)


def test_one_call_or_none(calling: Front) -> None:
    calling.engine.stride = 1
    fixed = {"tools": TOOLS, "max_tokens": 400}
    one = ask(calling, tool_choice={"type": "auto", "disable_parallel_tool_use": True}, **fixed).json()
    assert [block["type"] for block in one["content"]] == ["thinking", "text", "tool_use"]
    none = ask(calling, tool_choice={"type": "none"}, **fixed).json()
    assert [block["type"] for block in none["content"]] == ["thinking", "text"]
    assert none["stop_reason"] == "end_turn"
    check_error(
        ask(calling, tool_choice={"type": "tool", "name": "nope"}, **fixed), 400, "invalid_request_error", "nope"
    )


def test_a_call_that_is_cut_short(calling: Front) -> None:
    length = len(calling.engine.script.split('{"n"')[0].encode()) + 5
    whole = ask(calling, tools=TOOLS, max_tokens=length).json()
    assert whole["stop_reason"] == "max_tokens"
    assert [block.get("name") for block in whole["content"] if block["type"] == "tool_use"] == ["f"]
    with (
        client_of(calling) as client,
        client.messages.stream(model="fake", max_tokens=length, messages=SAY, tools=TOOLS) as stream,
    ):
        assert stream.get_final_message().stop_reason == "max_tokens"


def test_thoughts_have_a_budget(calling: Front) -> None:
    fixed: dict[str, Any] = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 1500}
    response = ask(calling, **fixed)
    assert "x-pagedserve-warning" not in response.headers
    assert calling.engine.seen[-1]["params"].structured_output.max_free_tokens == 1024
    ask(calling, max_tokens=400)
    assert calling.engine.seen[-1]["params"].structured_output is None


def test_an_answer_of_a_schema(front: Front) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    output = {"format": {"type": "json_schema", "schema": schema}}
    assert ask(front, output_config=output).status_code == 200
    assert json.loads(front.engine.seen[-1]["params"].structured_output.value) == schema
    wrong = {"format": {"type": "json_schema", "schema": 5}}
    check_error(ask(front, output_config=wrong), 400, "invalid_request_error", "output_config.format")
