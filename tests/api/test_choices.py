"""Choices and chances: several answers at once, seeds among neighbours, words that may not come, errors midway."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.api.conftest import Front
from tests.helpers.byte_tokenizer import FIRST_BYTE_ID
from tests.helpers.server import ServerProcess
from tests.helpers.streams import check_error, check_stream, strict_json

TH = FIRST_BYTE_ID + 256
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def client(tiny: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=tiny.base_url, timeout=60) as client:
        yield client


def whole(client: httpx.Client, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = strict_json(response.content)
    return answer


def test_three_answers_of_a_chat_in_one_stream(client: httpx.Client) -> None:
    """C044: each index has one role, one finish and its own text; usage adds up the choices, the prompt counts once."""
    body = {"messages": USER, "n": 3, "seed": 11, "temperature": 1, "max_tokens": 15}
    answer = whole(client, "/v1/chat/completions", **body, return_token_ids=True)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    raw = client.post("/v1/chat/completions", json={**body, **options}).content
    stream = check_stream(raw, chat=True, num_choices=3)
    for choice in answer["choices"]:
        streamed = stream.choices[choice["index"]]
        assert (streamed.text, streamed.finish_reason) == (choice["message"]["content"], choice["finish_reason"])
    assert stream.usage is not None
    lone = whole(client, "/v1/chat/completions", messages=USER, max_tokens=1)["usage"]
    assert stream.usage["completion_tokens"] == sum(len(choice["token_ids"]) for choice in answer["choices"])
    assert stream.usage["prompt_tokens"] == answer["usage"]["prompt_tokens"] == lone["prompt_tokens"]


def test_discarded_candidates_are_paid_for(client: httpx.Client) -> None:
    """C039: the usage of best_of counts what was computed, as OpenAI's does."""
    fixed = {"prompt": "a", "seed": 1, "temperature": 1, "max_tokens": 10, "ignore_eos": True}
    assert whole(client, **fixed, n=1, best_of=4)["usage"]["completion_tokens"] == 40


def test_a_seed_gives_its_text_among_any_neighbours(client: httpx.Client, tiny: ServerProcess) -> None:
    """C037: alone, twice at once, and among unseeded and otherwise seeded requests in any order."""
    seeded = {"prompt": "The thing is", "seed": 42, "temperature": 1.3, "max_tokens": 20, "ignore_eos": True}
    alone = whole(client, **seeded)["choices"][0]["text"]

    async def among(num_neighbours: int) -> list[str]:
        strangers = [
            {**seeded, "seed": None if i % 2 else i, "top_k": i % 4 or -1, "prompt": "x" * (1 + 7 * i % 90)}
            for i in range(num_neighbours)
        ]
        half = num_neighbours // 2
        bodies = [*strangers[:half], seeded, *strangers[half:], seeded]
        async with httpx.AsyncClient(base_url=tiny.base_url, timeout=60) as crowd:
            answers = await asyncio.gather(*(crowd.post("/v1/completions", json=body) for body in bodies))
        return [answers[place].json()["choices"][0]["text"] for place in (half, -1)]

    for num_neighbours in (0, 1, 7, 30, 30):
        assert asyncio.run(among(num_neighbours)) == [alone, alone]


def test_random_bytes_break_no_stream(client: httpx.Client, tiny: ServerProcess) -> None:
    """C003: hundreds of answers that are hardly ever text; a stream says what the whole answer says."""

    path = "/v1/completions"

    async def one(crowd: httpx.AsyncClient, seed: int) -> None:
        body = {
            "prompt": "?",
            "temperature": 5,
            "seed": seed,
            "n": 10,
            "max_tokens": 24,
            "stop": ["\ufffd\ufffd\ufffdz"],
        }
        texts = [choice["text"] for choice in strict_json((await crowd.post(path, json=body)).content)["choices"]]
        stream = check_stream((await crowd.post(path, json={**body, "stream": True})).content, chat=False)
        assert [stream.choices[i].text for i in range(10)] == texts

    async def everybody() -> None:
        async with httpx.AsyncClient(base_url=tiny.base_url, timeout=60) as crowd:
            await asyncio.gather(*(one(crowd, seed) for seed in range(25)))

    asyncio.run(everybody())


def test_words_that_may_not_come(client: httpx.Client) -> None:
    """C034: as the tokenizer writes them, bare and after a space; their beginnings and other phrases stay possible.

    `th` is one token of the vocabulary, the others are one token a letter. That a model spells `th` with two tokens,
    as no tokenizer would, is not ruled out (nor is it elsewhere in the field), so `h` may not come here.
    """
    letters = {char: FIRST_BYTE_ID + ord(char) for char in " tqz"}
    fixed = {"prompt": "x", "temperature": 100, "n": 25, "max_tokens": 40, "seed": 1, "ignore_eos": True}
    allowed = [TH, *letters.values()]
    free = [c["text"] for c in whole(client, **fixed, allowed_token_ids=allowed)["choices"]]
    for word in ("th", " th", "qz", "q z"):
        assert any(word in text for text in free), "this model cannot tell"
    body = {**fixed, "allowed_token_ids": allowed, "bad_words": ["th", "qz", "q z"]}
    texts = [choice["text"] for choice in whole(client, **body)["choices"]]
    assert not [text for text in texts for word in ("th", "qz", "q z") if word in text]
    for word in ("t", "tt", " t", "zq", "q ", " z", "q t", "qq"):
        assert any(word in text for text in texts), word
    check_error(client.post("/v1/completions", json={"prompt": "a", "bad_words": [""]}), 400, param="bad_words")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
        ("/v1/chat/completions", {"top_logprobs": 2}, "top_logprobs"),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ("/v1/completions", {"logprobs": -2}, "logprobs"),
        ("/v1/completions", {"prompt_logprobs": -1}, "prompt_logprobs"),
        ("/v1/completions", {"prompt_logprobs": 10**6, "echo": True}, "prompt_logprobs"),
        ("/v1/completions", {"logit_bias": {"5": "x"}}, "logit_bias"),
        ("/v1/completions", {"logit_bias": {"5": None}}, "logit_bias"),
        ("/v1/completions", {"max_tokens": 10**9}, "max_tokens"),
        ("/v1/chat/completions", {"max_completion_tokens": 10**30}, "max_completion_tokens"),
        ("/v1/chat/completions", {"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs"),
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True])
def test_fields_out_of_range_are_named(
    client: httpx.Client, path: str, body: dict[str, Any], param: str, stream: bool
) -> None:
    """C020, C027, C032, C016 and C017 (huge numbers), C106: before any event of a stream."""
    full = {"prompt": "a"} if path == "/v1/completions" else {"messages": USER}
    check_error(client.post(path, json={**full, **body, "stream": stream}), 400, param=param)


def test_logit_bias_of_nothing_is_nothing(client: httpx.Client) -> None:
    """C032: {} and null are the same as no field."""
    fixed = {"prompt": "a", "temperature": 0, "max_tokens": 8}
    expected = whole(client, **fixed)["choices"]
    assert all(whole(client, **fixed, logit_bias=bias)["choices"] == expected for bias in ({}, None))


def test_the_official_client_raises_an_error_that_comes_midway(front: Front) -> None:
    """C047: the neighbour's stream, begun before and ended after, is whole."""
    texts: list[str] = []
    has_begun = threading.Event()
    long_text = "word " * 30

    def neighbour() -> None:
        with openai.OpenAI(base_url=f"{front.base_url}/v1", api_key="none", max_retries=0) as other:
            for chunk in other.completions.create(model="fake", prompt=f"say {long_text}", stream=True, max_tokens=200):
                texts.append("".join(choice.text for choice in chunk.choices))
                has_begun.set()

    thread = threading.Thread(target=neighbour)
    thread.start()
    assert has_begun.wait(60)
    with openai.OpenAI(base_url=f"{front.base_url}/v1", api_key="none", max_retries=0) as client:
        stream = client.completions.create(model="fake", prompt="fail EngineStepError 3", stream=True)
        with pytest.raises(openai.APIError) as caught:
            for _ in stream:
                pass
    assert "EngineStepError" in caught.value.message
    assert caught.value.body is not None
    thread.join(60)
    assert "".join(texts).strip() == long_text.strip()
