"""Stop strings, special tokens and logprobs of scripted answers: streamed and whole are the same to the last field."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.api.scripts import chat_of, prompt_of
from tests.helpers.server import ServerProcess
from tests.helpers.streams import check_error, check_stream, strict_json


@pytest.fixture(scope="module")
def client(scripted: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=scripted.base_url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def overhead(client: httpx.Client) -> int:
    """Tokens of the prompt that an empty message makes."""
    empty = {"messages": [{"role": "user", "content": ""}], "add_special_tokens": True}
    return int(client.post("/tokenize", json=empty).json()["count"])


def both_ways(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of the whole answer, after comparing each with its stream: text, end, ids and logprobs."""
    chat = "chat" in path
    body = {"temperature": 0, "max_tokens": 100, "return_token_ids": True, **body}
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    choices: list[dict[str, Any]] = strict_json(response.content)["choices"]
    stream = check_stream(client.post(path, json={**body, "stream": True}).content, chat=chat, num_choices=len(choices))
    for choice in choices:
        streamed = stream.choices[choice["index"]]
        choice["text"] = choice["message"]["content"] if chat else choice["text"]
        assert streamed.text == choice["text"]
        assert streamed.token_ids == choice["token_ids"]
        assert (streamed.finish_reason, streamed.stop_reason) == (choice["finish_reason"], choice.get("stop_reason"))
        logprobs = choice["logprobs"]
        if logprobs is None:
            assert streamed.logprobs == []
        elif chat:
            assert streamed.logprobs == logprobs["content"]
        else:
            names = ("tokens", "token_logprobs", "text_offset", "top_logprobs")
            assert streamed.logprobs == list(zip(*(logprobs[name] for name in names), strict=True))
    return choices


@pytest.mark.parametrize("stop", [["zzzz"], ["\nResult:"], ["2\nR"], ["T"]], ids=str)
def test_streamed_logprobs_keep_step_with_the_text(client: httpx.Client, overhead: int, stop: list[str]) -> None:
    """C026: text held back for a stop string keeps its logprobs; every counted token has an entry."""
    [choice] = both_ways(client, "/v1/completions", {"prompt": prompt_of("total"), "stop": stop, "logprobs": 2})
    assert len(choice["logprobs"]["tokens"]) == len(choice["token_ids"])
    body = {"messages": chat_of("total", overhead), "add_special_tokens": True, "logprobs": True, "top_logprobs": 2}
    [choice] = both_ways(client, "/v1/chat/completions", {**body, "stop": stop})
    content = choice["logprobs"]["content"]
    assert len(content) == len(choice["token_ids"])
    assert "".join(entry["token"] for entry in content).startswith(choice["text"])


@pytest.mark.parametrize(
    ("stop", "include", "text"),
    [
        ("t", True, "t"),
        ("t", False, ""),
        ("the t", True, "the t"),
        ("g t", True, "the thing t"),
        ("hi", True, "the thi"),
    ],
)
def test_a_stop_string_within_a_token_is_cut_there(client: httpx.Client, stop: str, include: bool, text: str) -> None:
    """C007: the passage's `th` and `in` are single tokens; what follows the stop string in one is not shown."""
    body = {"prompt": prompt_of("thing"), "stop": [stop], "include_stop_str_in_output": include}
    [choice] = both_ways(client, "/v1/completions", body)
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, "stop", stop)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("spaces", [True, False])
@pytest.mark.parametrize(
    "way", [{}, {"n": 2, "temperature": 1, "seed": 1, "top_k": 1}, {"use_beam_search": True, "n": 1, "beam_width": 2}]
)
def test_special_tokens_in_every_way_of_generating(
    client: httpx.Client, skip: bool, spaces: bool, way: dict[str, Any]
) -> None:
    """C005: greedy, sampled and beam search honour the flags alike, streamed and not."""
    body = {"prompt": prompt_of("special"), "skip_special_tokens": skip, "spaces_between_special_tokens": spaces}
    for choice in both_ways(client, "/v1/completions", {**body, **way}):
        assert choice["text"] == ("hello worldmore" if skip else "hello world<|im_start|>more")


@pytest.mark.parametrize("stop", [None, [], ["a", "b", "c", "d", "x"], ["q" * 4096]], ids=lambda s: str(s)[:20])
def test_which_stops_are_accepted(client: httpx.Client, stop: Any) -> None:
    """C010: none, and more than OpenAI's four, up to sixteen; what is refused is in test_body."""
    [choice] = both_ways(client, "/v1/completions", {"prompt": prompt_of("held"), "stop": stop})
    assert choice["text"] == ("en" if stop and "d" in stop else "end with STO")
    body = {"prompt": prompt_of("held"), "stop": ["x"] * 17}
    assert "16" in check_error(client.post("/v1/completions", json=body), 400, param="stop")["message"]


def test_an_answer_of_nothing_but_its_end(client: httpx.Client) -> None:
    """C046: the empty answer has a finish like any other, and its stream as well."""
    [choice] = both_ways(client, "/v1/completions", {"prompt": [*prompt_of("first"), 4 + ord("x")], "stop": ["r"]})
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
    [choice] = both_ways(client, "/v1/completions", {"prompt": prompt_of("first"), "max_tokens": 1})
    assert (choice["text"], choice["finish_reason"]) == ("\n", "length")
