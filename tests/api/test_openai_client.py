"""The official `openai` package against a live server: what it parses, what it raises."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.helpers.server import ServerProcess

MESSAGES = [{"role": "user", "content": "Say something."}]


@pytest.fixture(scope="module")
def client(tiny: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tiny.base_url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    model = client.models.retrieve("tiny")
    assert model.object == "model"
    assert model.created > 0
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("nope")
    assert "nope" in caught.value.message


def test_completion_and_its_stream(client: openai.OpenAI) -> None:
    fixed = {"model": "tiny", "prompt": "Once", "max_tokens": 12, "temperature": 0, "extra_body": {"ignore_eos": True}}
    whole = client.completions.create(**fixed)
    assert whole.object == "text_completion"
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 12
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 12
    chunks = list(client.completions.create(**fixed, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.text for chunk in chunks for c in chunk.choices) == whole.choices[0].text
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 12
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_chat_and_its_stream(client: openai.OpenAI) -> None:
    fixed = {"model": "tiny", "messages": MESSAGES, "max_completion_tokens": 12, "seed": 3}
    whole = client.chat.completions.create(**fixed)
    assert whole.object == "chat.completion"
    assert whole.choices[0].message.role == "assistant"
    chunks = list(client.chat.completions.create(**fixed, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_chat_through_the_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="tiny", messages=MESSAGES, max_tokens=8, seed=1) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.current_completion_snapshot
    assert final.choices[0].message.content == text


def test_n_choices(client: openai.OpenAI) -> None:
    fixed = {"model": "tiny", "messages": MESSAGES, "max_tokens": 12, "seed": 1234, "temperature": 1.5, "n": 4}
    whole = client.chat.completions.create(**fixed)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    texts = [choice.message.content for choice in whole.choices]
    assert len(set(texts)) >= 3
    streamed = dict.fromkeys(range(4), "")
    for chunk in client.chat.completions.create(**fixed, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert list(streamed.values()) == texts


def test_logprobs_of_chat(client: openai.OpenAI) -> None:  # C020, C026
    fixed = {"model": "tiny", "messages": MESSAGES, "max_tokens": 5, "temperature": 0, "logprobs": True}
    for k in (0, 1, 5, 20):
        choice = client.chat.completions.create(**fixed, top_logprobs=k).choices[0]
        assert len(choice.logprobs.content) == 5
        for entry in choice.logprobs.content:
            assert len(entry.top_logprobs) == k
            values = [top.logprob for top in entry.top_logprobs]
            assert values == sorted(values, reverse=True)
            assert bytes(entry.bytes).decode("utf-8", "replace") == entry.token or entry.token.startswith("bytes:")
            if k:
                assert entry.logprob == values[0]  # greedy
    streamed = [
        entry
        for chunk in client.chat.completions.create(**fixed, top_logprobs=2, stream=True)
        for choice in chunk.choices
        if choice.logprobs
        for entry in choice.logprobs.content
    ]
    whole = client.chat.completions.create(**fixed, top_logprobs=2).choices[0].logprobs.content
    assert [e.token for e in streamed] == [e.token for e in whole]
    assert [e.logprob for e in streamed] == pytest.approx([e.logprob for e in whole], abs=1e-4)


def test_logprobs_of_completions(client: openai.OpenAI) -> None:
    fixed = {"model": "tiny", "prompt": "Once", "max_tokens": 4, "temperature": 0}
    logprobs = client.completions.create(**fixed, logprobs=0).choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == 4
    assert all(len(top) == 1 for top in logprobs.top_logprobs)
    choice = client.completions.create(**fixed, logprobs=3).choices[0]
    assert all(len(top) == 3 for top in choice.logprobs.top_logprobs)  # greedy: the drawn one is among them


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        ({"temperature": -1}, openai.BadRequestError, 400),
        ({"model": "nope"}, openai.NotFoundError, 404),
        ({"max_tokens": 100_000}, openai.BadRequestError, 400),
        ({"messages": []}, openai.BadRequestError, 400),
        ({"logprobs": True, "top_logprobs": 21}, openai.BadRequestError, 400),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, openai.BadRequestError, 400),
        ({"extra_body": {"timeout": 1e-9}}, openai.APIStatusError, 408),
    ],
    ids=str,
)
def test_errors_are_the_right_exceptions(
    client: openai.OpenAI, body: dict[str, object], kind: type[openai.APIStatusError], status: int
) -> None:  # C096
    body = {"model": "tiny", "messages": MESSAGES, **body}
    for stream in (False, True):
        with pytest.raises(kind) as caught:
            client.chat.completions.create(**body, stream=stream)
        assert caught.value.status_code == status
        assert isinstance(caught.value.body, dict)
        assert caught.value.body["message"]
        assert caught.value.request_id


def test_context_length(client: openai.OpenAI) -> None:  # C016
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=MESSAGES, max_completion_tokens=512)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "max_completion_tokens"
    assert "512" in caught.value.message
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt=["short", "long " * 600, "short"])
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "prompt"


def test_raw_response_headers(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model="tiny", messages=MESSAGES, max_tokens=1, extra_headers={"X-Request-Id": "mine-1"}, extra_body={"foo": 1}
    )
    assert raw.request_id == "mine-1"
    assert "foo" in raw.headers["x-pagedserve-warning"]
    assert raw.parse().id == "chatcmpl-mine-1"


async def test_async_client(tiny: ServerProcess) -> None:
    async with openai.AsyncOpenAI(base_url=f"{tiny.base_url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=4, seed=1, stream=True
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[-1].choices[0].finish_reason is not None


def test_the_server_is_well_afterwards(client: openai.OpenAI, tiny: ServerProcess) -> None:
    assert httpx.get(f"{tiny.base_url}/health").status_code == 200
