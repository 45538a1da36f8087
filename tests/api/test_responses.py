"""`/v1/responses` through the official `openai` package, and the events of its stream one by one."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from pagedserve.api.protocol.responses import Response
from pagedserve.api.responses_store import ResponseStore, Stored
from pagedserve.errors import NotFoundError
from tests.api.conftest import Front, FrontFactory
from tests.api.test_messages import prompt_of
from tests.helpers.server import ServerProcess
from tests.helpers.streams import check_error, strict_json
from tests.helpers.tool_formats import hermes, template_with

URL = "/v1/responses"
TOOLS = [
    {
        "type": "function",
        "name": "f",
        "description": "does it",
        "parameters": {"type": "object", "properties": {"a": {}}},
    },
    {"type": "function", "name": "g", "parameters": {"type": "object"}},
]
CALLS = [("f", {"a": 'x"y\\n{}é汉🦜'}), ("g", {"n": [1, {"c": None}]})]


def client_of(front: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{front.base_url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def client(front: Front) -> Iterator[openai.OpenAI]:
    with client_of(front) as client:
        yield client


@pytest.fixture(scope="module")
def calling(make_front: FrontFactory) -> Front:
    front = make_front(template=template_with("<tool_call> <think>"))
    front.engine.script = f"<think>hm, é</think>Let me.\n{hermes(CALLS)}"
    return front


def ask(front: Front, **body: object) -> httpx.Response:
    return front.client.post(URL, json={"input": "say hello there", **body})


def events_of(raw: bytes) -> list[dict[str, Any]]:
    """The events of a stream, checked: named by their type, numbered from 0."""
    events = []
    for part in raw.removesuffix(b"\n\n").split(b"\n\n"):
        name, _, data = part.partition(b"\n")
        event = strict_json(data.removeprefix(b"data: "))
        assert name == b"event: " + event["type"].encode()
        assert event["sequence_number"] == len(events)
        events.append(event)
    return events


def essence(items: list[Any]) -> list[Any]:
    """Items without their ids."""
    plain = [item if isinstance(item, dict) else item.model_dump() for item in items]
    kinds = {
        "message": lambda item: item["content"][0]["text"],
        "reasoning": lambda item: item["content"][0]["text"],
        "function_call": lambda item: (item["name"], json.loads(item["arguments"])),
    }
    return [kinds[item["type"]](item) for item in plain]


def test_an_answer(client: openai.OpenAI) -> None:  # C117
    response = client.responses.create(model="fake", input="say hello there", metadata={"a": "b"}, temperature=0.5)
    assert response.output_text == "hello there"
    assert (response.object, response.status, response.error) == ("response", "completed", None)
    assert response.id.startswith("resp_")
    assert response.created_at <= response.completed_at
    assert (response.metadata, response.temperature, response.tool_choice) == ({"a": "b"}, 0.5, "auto")
    (item,) = response.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    assert item.content[0].annotations == []
    usage = response.usage
    assert usage.output_tokens == len("hello there")
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (0, 0)


def test_what_is_cut_is_incomplete(client: openai.OpenAI) -> None:  # C117
    response = client.responses.create(model="fake", input="say hello there", max_output_tokens=3)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (response.output_text, response.output[0].status) == ("hel", "incomplete")


def test_the_order_of_events(front: Front) -> None:  # C116
    events = events_of(ask(front, stream=True).content)
    kinds = [event["type"].removeprefix("response.") for event in events]
    num_deltas = kinds.count("output_text.delta")
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * num_deltas,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert events[0]["response"]["status"] == events[1]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == []
    text = "".join(event["delta"] for event in events if event["type"].endswith("text.delta"))
    assert text == "hello there" == events[-4]["text"] == events[-3]["part"]["text"]
    final = events[-1]["response"]
    assert final["output"] == [events[-2]["item"]]
    assert {event["item_id"] for event in events if "item_id" in event} == {final["output"][0]["id"]}
    assert {event["output_index"] for event in events if "output_index" in event} == {0}
    assert final["usage"]["output_tokens"] == num_deltas
    cut = events_of(ask(front, stream=True, max_output_tokens=3).content)[-1]
    assert (cut["type"], cut["response"]["status"]) == ("response.incomplete", "incomplete")


@pytest.mark.parametrize("stride", [1, 3, 1000])
def test_thoughts_text_and_calls_are_items(calling: Front, stride: int) -> None:  # C116
    calling.engine.stride = stride
    fixed: dict[str, Any] = {"model": "fake", "input": "hi", "tools": TOOLS, "max_output_tokens": 400}
    with client_of(calling) as client:
        whole = client.responses.create(**fixed)
        with client.responses.stream(**fixed) as stream:
            seen = list(stream)
            final = stream.get_final_response()
    for response in (whole, final):
        assert essence(response.output) == ["hm, é", "Let me.", *CALLS]
        assert [item.status for item in response.output] == ["completed"] * 4
        assert response.status == "completed"
        assert response.usage.output_tokens_details.reasoning_tokens > 0
    arguments: dict[int, str] = {}
    for event in seen:
        if event.type == "response.function_call_arguments.delta":
            arguments[event.output_index] = arguments.get(event.output_index, "") + event.delta
        if event.type == "response.function_call_arguments.done":
            assert event.arguments == arguments[event.output_index]
    assert {index: json.loads(text) for index, text in arguments.items()} == {2: CALLS[0][1], 3: CALLS[1][1]}
    raw = events_of(calling.client.post(URL, json={**fixed, "stream": True}).content)
    borders = [(e["type"], e["output_index"]) for e in raw if "output_item" in e["type"]]
    assert borders == [(f"response.output_item.{what}", i) for i in range(4) for what in ("added", "done")]


def test_a_conversation_goes_on(calling: Front) -> None:  # C117, C053
    calling.engine.stride = 1
    fixed: dict[str, Any] = {"model": "fake", "tools": TOOLS, "max_output_tokens": 400}
    with client_of(calling) as client:
        first = client.responses.create(**fixed, input="first question", instructions="Be brief.")
        assert prompt_of(calling).count("Be brief.") == 1
        results = [
            {"type": "function_call_output", "call_id": item.call_id, "output": f"result of {item.name}"}
            for item in first.output
            if item.type == "function_call"
        ]
        second = client.responses.create(
            **fixed, input=[*results, {"role": "user", "content": "and now?"}], previous_response_id=first.id
        )
        prompt = prompt_of(calling)
        told = ["first question", "hm, é", "Let me.", "[f(", "[g(", "result of f", "result of g", "and now?"]
        assert [prompt.index(text) for text in told] == sorted(prompt.index(text) for text in told)
        assert "Be brief." not in prompt
        assert second.previous_response_id == first.id
        # The same, by hand.
        items = [{"role": "user", "content": "first question"}, *[item.model_dump() for item in first.output], *results]
        client.responses.create(**fixed, input=[*items, {"role": "user", "content": "and now?"}])
        assert prompt_of(calling) == prompt
        listed = client.responses.input_items.list(second.id, order="asc")
        assert [item.type for item in listed] == [
            "message",
            "reasoning",
            "message",
            *["function_call"] * 2,
            *["function_call_output"] * 2,
            "message",
        ]
        # The first may go; what stands on it does not fall.
        client.responses.delete(first.id)
        third = client.responses.create(**fixed, input="third", previous_response_id=second.id)
        assert "first question" in prompt_of(calling)
        with pytest.raises(openai.NotFoundError):
            client.responses.create(**fixed, input="x", previous_response_id=first.id)
        assert client.responses.retrieve(third.id).output_text == third.output_text


def test_what_is_stored(client: openai.OpenAI) -> None:
    kept = client.responses.create(model="fake", input="say a")
    assert client.responses.retrieve(kept.id).output_text == "a"
    with client.responses.stream(model="fake", input="say b") as stream:
        streamed = stream.get_final_response()
    assert client.responses.retrieve(streamed.id).output_text == "b"
    dropped = client.responses.create(model="fake", input="say c", store=False)
    for response_id in (dropped.id, "resp_nope"):
        for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
            with pytest.raises(openai.NotFoundError):
                call(response_id)
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(kept.id)
    client.responses.delete(kept.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(kept.id)


def test_pages_of_input_items(client: openai.OpenAI) -> None:
    response = client.responses.create(model="fake", input=[{"role": "user", "content": f"say {i}"} for i in range(5)])
    texts = [item.content[0].text for item in client.responses.input_items.list(response.id, limit=2)]
    assert texts == [f"say {i}" for i in (4, 3, 2, 1, 0)]
    page = client.responses.input_items.list(response.id, limit=2, order="asc")
    assert page.has_more
    assert [item.content[0].text for item in page.data] == ["say 0", "say 1"]


def wait(client: openai.OpenAI, response_id: str, *statuses: str) -> Any:
    deadline = time.monotonic() + 60
    while (response := client.responses.retrieve(response_id)).status not in statuses and time.monotonic() < deadline:
        time.sleep(0.01)
    assert response.status in statuses
    return response


def test_in_the_background(front: Front, client: openai.OpenAI) -> None:
    started = client.responses.create(model="fake", input="say slow", background=True)
    assert started.status == "queued"
    assert wait(client, started.id, "completed").output_text == "slow"
    failing = client.responses.create(model="fake", input="fail EngineStepError 1", background=True)
    assert wait(client, failing.id, "failed").error.message == "EngineStepError on purpose"
    hanging = client.responses.create(model="fake", input="hang 2", background=True)
    wait(client, hanging.id, "in_progress")
    with pytest.raises(openai.BadRequestError, match="not finished"):
        client.responses.create(model="fake", input="x", previous_response_id=hanging.id)
    assert client.responses.cancel(hanging.id).status == "cancelled"
    assert client.responses.retrieve(hanging.id).status == "cancelled"
    gone = client.responses.create(model="fake", input="hang 2", background=True)
    client.responses.delete(gone.id)
    deadline = time.monotonic() + 60
    while front.engine.live and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not front.engine.live
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(gone.id)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input.0.role"),
        ({"input": [{"role": "user"}]}, "input.0.content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}]},
            "input.0.content.0",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input.0.content.0"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input.0.call_id"),
        ({"input": [{"type": "function_call", "call_id": "x", "name": "f"}]}, "input.0.arguments"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 100_000}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "poem"}}}, "text.format"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"background": True, "stream": True}, "background"),
        ({"background": True, "store": False}, "store"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"metadata": {"a": "x" * 600}}, "metadata"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        ({"priority": 3}, "priority"),
    ],
    ids=str,
)
def test_mistakes_are_named(front: Front, body: dict[str, object], param: str) -> None:  # C106, C117
    check_error(ask(front, **body), 400, param=param)


def test_errors(front: Front, client: openai.OpenAI) -> None:  # C096
    check_error(ask(front, model="nope"), 404, param="model")
    check_error(ask(front, previous_response_id="resp_nope"), 404, param="previous_response_id")
    check_error(ask(front, input="fail QueueFullError 0", stream=True), 429)
    with pytest.raises(openai.InternalServerError):
        client.responses.create(model="fake", input="fail Exception 0")
    assert (
        ask(front, foo=1, user="me", reasoning={"summary": "auto"})
        .headers["x-pagedserve-warning"]
        .endswith(": reasoning.summary, foo")
    )


def test_an_error_within_a_stream(front: Front, client: openai.OpenAI) -> None:  # C047
    last = events_of(ask(front, input="fail EngineStepError 3", stream=True).content)[-1]
    assert (last["type"], last["code"], last["message"]) == (
        "error",
        "engine_step_failed",
        "EngineStepError on purpose",
    )
    with pytest.raises(openai.APIError, match="on purpose"):
        list(client.responses.create(model="fake", input="fail EngineStepError 3", stream=True))


def test_counted_tokens_are_those_of_the_answer(front: Front) -> None:
    counted = front.client.post(f"{URL}/input_tokens", json={"input": "say hello there"}).json()
    assert counted == {"object": "response.input_tokens", "input_tokens": ask(front).json()["usage"]["input_tokens"]}


def test_logprobs(tiny: ServerProcess) -> None:
    fixed: dict[str, Any] = {"model": "tiny", "input": "hi", "max_output_tokens": 6, "temperature": 0}
    fixed |= {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "extra_body": {"ignore_eos": True}}
    with client_of(tiny) as client:
        part = client.responses.create(**fixed).output[0].content[0]
        assert len(part.logprobs) == 6
        assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)
        streamed = [
            entry
            for event in client.responses.create(**fixed, stream=True)
            if event.type == "response.output_text.delta"
            for entry in event.logprobs
        ]
    assert [entry.token for entry in streamed] == [entry.token for entry in part.logprobs]
    assert [entry.logprob for entry in streamed] == pytest.approx([entry.logprob for entry in part.logprobs], abs=1e-4)


def stored(name: str, text: str, earlier: list[dict[str, Any]] | None = None) -> Stored:
    items = [*(earlier or []), {"id": "i", "type": "message", "content": text}]
    return Stored(Response(name, 0, "m"), items, 1)


def test_the_oldest_are_forgotten() -> None:
    store = ResponseStore(max_responses=3, max_bytes=10**6)
    for name in "abc":
        store.put(stored(name, "x"))
    store.get("a")
    store.put(stored("d", "x"))
    with pytest.raises(NotFoundError):
        store.get("b")
    assert [name in store for name in "acd"] == [True] * 3
    store = ResponseStore(max_responses=100, max_bytes=10_000)
    for i in range(20):
        store.put(stored(f"{i}", "x" * 3000))
    assert len(store) < 4
    assert "19" in store
    # Earlier turns are shared, and do not count again.
    history: list[dict[str, Any]] = []
    store = ResponseStore(max_responses=100, max_bytes=50_000)
    for i in range(20):
        latest = stored(f"{i}", "x" * 500, history)
        history = latest.history()
        store.put(latest)
    assert len(store) == 20


def test_an_answer_of_a_schema(front: Front, client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    text = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}
    response = client.responses.create(model="fake", input="say 1", text=text)
    assert json.loads(front.engine.seen[-1]["params"].structured_output.value) == schema
    assert response.text.format.type == "json_schema"
    check_error(
        ask(front, text={"format": {"type": "json_schema", "name": "n", "schema": 5}}), 400, param="text.format"
    )
