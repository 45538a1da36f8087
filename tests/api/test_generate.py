"""`/inference/v1/generate`: ids in, ids out, the same as /v1/completions gives."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.api.conftest import Front
from tests.api.scripts import prompt_of
from tests.helpers.server import ServerProcess
from tests.helpers.streams import check_error, check_stream, strict_json

URL = "/inference/v1/generate"
IDS = [0, 20, 30, 40]


@pytest.fixture(scope="module")
def client(tiny: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=tiny.base_url, timeout=60) as client:
        yield client


def test_ids_are_those_of_a_completion(client: httpx.Client) -> None:
    params = {"max_tokens": 8, "n": 2, "seed": 5, "logprobs": 2, "ignore_eos": True}
    expected = client.post("/v1/completions", json={"prompt": IDS, "return_token_ids": True, **params}).json()
    body = {"token_ids": IDS, "sampling_params": params, "request_id": "mine", "model": "tiny"}
    whole = strict_json(client.post(URL, json=body).content)
    assert (whole["request_id"], whole["model"]) == ("mine", "tiny")
    assert [c["token_ids"] for c in whole["choices"]] == [c["token_ids"] for c in expected["choices"]]
    assert [c["finish_reason"] for c in whole["choices"]] == ["length"] * 2
    assert all(len(c["logprobs"]["content"]) == 8 for c in whole["choices"])
    assert whole["choices"][0]["logprobs"]["content"][0]["token"].startswith("token_id:")
    for name in ("prompt_tokens", "completion_tokens"):
        assert whole["usage"][name] == expected["usage"][name]
    raw = client.post(URL, json={**body, "stream": True, "stream_options": {"include_usage": True}}).content
    events = raw.removesuffix(b"\n\n").split(b"\n\n")
    assert events[-1] == b"data: [DONE]"
    chunks = [strict_json(event.removeprefix(b"data: ")) for event in events[:-1]]
    ids: dict[int, list[int]] = {0: [], 1: []}
    reasons = []
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        ids[choice["index"]] += choice["token_ids"]
        reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert list(ids.values()) == [c["token_ids"] for c in whole["choices"]]
    assert reasons == ["length"] * 2
    assert chunks[-1]["usage"]["completion_tokens"] == 16


def test_prompts_are_scored(client: httpx.Client) -> None:
    body = {"token_ids": IDS, "sampling_params": {"max_tokens": 1, "prompt_logprobs": 1}}
    scores = client.post(URL, json=body).json()["prompt_logprobs"]
    assert scores[0] is None
    assert len(scores) == len(IDS)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "token_ids"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": ["a"]}, "token_ids"),
        ({"token_ids": [1], "sampling_params": {"temperature": -1}}, "temperature"),
        ({"token_ids": [1], "sampling_params": {"n": "x"}}, "sampling_params.n"),
        ({"token_ids": [1], "sampling_params": {"prompt": "x"}}, "sampling_params.prompt"),
        ({"token_ids": [1], "sampling_params": {"stream": True}}, "sampling_params.stream"),
        ({"token_ids": [1], "sampling_params": {"prompt_embeds": "x"}}, "sampling_params.prompt_embeds"),
        ({"token_ids": [10**6]}, "prompt"),
        ({"token_ids": [1], "stream_options": {"include_usage": True}}, "stream_options"),
    ],
    ids=str,
)
def test_mistakes_are_named(front: Front, body: dict[str, object], param: str) -> None:
    check_error(front.client.post(URL, json=body), 400, param=param)


def test_fields_without_effect_are_named(front: Front) -> None:
    response = front.client.post(URL, json={"token_ids": [5], "foo": 1, "sampling_params": {"bar": 1, "user": "me"}})
    assert response.headers["x-pagedserve-warning"].endswith(": foo, sampling_params.bar")


def test_a_template_is_shown(front: Front) -> None:
    messages = [{"role": "user", "content": "say x"}]
    prompt = front.client.post("/apply_template", json={"messages": messages}).json()["prompt"]
    front.chat(messages=messages)
    assert front.engine.tokenizer.encode(prompt, add_special_tokens=False) == front.engine.seen[-1]["prompt"]
    check_error(front.client.post("/apply_template", json={"prompt": "x"}), 400, param="messages")
    check_error(front.client.post("/apply_template", json={"messages": [{"role": "x"}]}), 400, param="messages")


def test_an_output_in_a_circle_ends(scripted: ServerProcess) -> None:
    # After the end of its script the model says one token for ever.
    fixed = {"prompt": prompt_of("twice"), "max_tokens": 100, "temperature": 0, "ignore_eos": True}
    fixed |= {"return_token_ids": True, "skip_special_tokens": False}
    rule = {"max_pattern_size": 4, "min_count": 6}
    with httpx.Client(base_url=scripted.base_url, timeout=60) as client:
        free = client.post("/v1/completions", json=fixed).json()["choices"][0]
        assert len(free["token_ids"]) == 100
        choice = client.post("/v1/completions", json={**fixed, "repetition_detection": rule}).json()["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "repetition_detected")
        ids = choice["token_ids"]
        assert ids == free["token_ids"][: len(ids)]
        assert ids[-6:] == [ids[-1]] * 6 and ids[-7] != ids[-1]
        assert free["text"].startswith(choice["text"])
        body = {**fixed, "repetition_detection": rule, "stream": True}
        stream = check_stream(client.post("/v1/completions", json=body).content, chat=False)
        assert (stream.choices[0].text, stream.choices[0].token_ids) == (choice["text"], ids)
        assert stream.choices[0].stop_reason == "repetition_detected"
        never = {**fixed, "repetition_detection": {"max_pattern_size": 0}}
        assert client.post("/v1/completions", json=never).json()["choices"][0]["token_ids"] == free["token_ids"]


def test_a_timeout_may_stand_in_a_header(front: Front) -> None:
    def ask(value: str, **body: object) -> httpx.Response:
        return front.client.post("/v1/completions", json={"prompt": "a", **body}, headers={"X-Request-Timeout": value})

    assert ask("2.5").status_code == 200
    assert front.engine.seen[-1]["timeout"] == 2.5
    ask("2.5", timeout=7)
    assert front.engine.seen[-1]["timeout"] == 7
    for wrong in ("0", "-1", "nan", "inf", "soon", ""):
        check_error(ask(wrong), 400, param="X-Request-Timeout")
