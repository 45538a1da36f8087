"""Characters, stop strings and lengths: a scripted model says what is known, streamed and not (C001-C018)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.api.scripts import chat_of, ids_of, prompt_of
from tests.helpers.byte_tokenizer import EOS_ID, IM_START_ID
from tests.helpers.server import ServerProcess
from tests.helpers.streams import check_error, check_stream, strict_json


class Scripted:
    """Asks for a passage in all ways at once; each must give the same."""

    def __init__(self, server: ServerProcess):
        self.client = httpx.Client(base_url=server.base_url, timeout=60)
        empty = {"messages": [{"role": "user", "content": ""}], "add_special_tokens": True}
        self._overhead = self.client.post("/tokenize", json=empty).json()["count"]

    def complete(self, name: str, **body: Any) -> dict[str, Any]:
        """The choice of /v1/completions, after checking that its stream says the same."""
        body = {"prompt": prompt_of(name), "temperature": 0, "max_tokens": 100, "return_token_ids": True, **body}
        response = self.client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        whole = strict_json(response.content)
        options = {"stream": True, "stream_options": {"include_usage": True}}
        stream = check_stream(self.client.post("/v1/completions", json={**body, **options}).content, chat=False)
        choice = whole["choices"][0]
        self._compare(choice, choice["text"], stream, whole["usage"])
        choice["usage"] = whole["usage"]
        return choice

    def chat(self, name: str, **body: Any) -> dict[str, Any]:
        """The choice of /v1/chat/completions, checked like that of `complete`."""
        messages = chat_of(name, self._overhead)
        fixed = {"add_special_tokens": True, "temperature": 0, "max_tokens": 100, "return_token_ids": True}
        body = {"messages": messages, **fixed, **body}
        response = self.client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        whole = strict_json(response.content)
        options = {"stream": True, "stream_options": {"include_usage": True}}
        stream = check_stream(self.client.post("/v1/chat/completions", json={**body, **options}).content, chat=True)
        choice = whole["choices"][0]
        self._compare(choice, choice["message"]["content"], stream, whole["usage"])
        choice.update(text=choice["message"]["content"], usage=whole["usage"])
        return choice

    def _compare(self, choice: dict[str, Any], text: str, stream: Any, usage: dict[str, Any]) -> None:
        streamed = stream.choices[0]
        assert streamed.text == text
        assert streamed.finish_reason == choice["finish_reason"]
        assert streamed.stop_reason == choice.get("stop_reason")
        assert streamed.token_ids == choice["token_ids"]
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert stream.usage[name] == usage[name]
        assert usage["completion_tokens"] == len(choice["token_ids"])


@pytest.fixture(scope="module")
def asked(scripted: ServerProcess) -> Iterator[Scripted]:
    asked = Scripted(scripted)
    yield asked
    asked.client.close()


@pytest.mark.parametrize("way", ["complete", "chat"])
def test_characters_of_many_tokens_come_whole(asked: Scripted, way: str) -> None:  # C001
    choice = getattr(asked, way)("characters")
    assert choice["text"] == "a🦜é汉👩‍👩‍👧‍👦🇺🇳 z"
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("num_bytes", [1, 2, 3])
@pytest.mark.parametrize("logprobs", [None, 1])
def test_an_output_cut_within_a_character(asked: Scripted, num_bytes: int, logprobs: int | None) -> None:  # C002
    choice = asked.complete("parrot", max_tokens=2 + num_bytes, logprobs=logprobs)
    assert choice["text"] in ("ok", "ok\ufffd")
    assert choice["finish_reason"] == "length"
    assert choice["usage"]["completion_tokens"] == 2 + num_bytes


def test_bytes_that_are_no_characters(asked: Scripted) -> None:  # C003
    text = asked.complete("broken")["text"]
    assert [char for char in text if char != "\ufffd"] == list("ABCDE")
    expected = b"A\xffB\xc0\x80C\xed\xa0\x80D\x80\x80\x80\x80E".decode("utf-8", "replace")
    assert text == expected


@pytest.mark.parametrize("way", ["complete", "chat"])
@pytest.mark.parametrize(
    ("name", "stop", "text"),
    [
        ("total", ["\nResult:"], "Total: 42"),
        ("total", ["2\nR"], "Total: 4"),
        ("total", "\nResult:", "Total: 42"),
        ("total", ["nothing", "Result"], "Total: 42\n"),
        ("held", ["d w"], "en"),
    ],
)
def test_stop_strings_never_show(asked: Scripted, way: str, name: str, stop: Any, text: str) -> None:  # C006
    choice = getattr(asked, way)(name, stop=stop)
    assert choice["text"] == text
    assert choice["finish_reason"] == "stop"
    matched = (
        stop if isinstance(stop, str) else next(s for s in stop if text + s in "Total: 42\nResult: x end with STO")
    )
    assert choice["stop_reason"] == matched
    assert choice["usage"]["completion_tokens"] <= len((text + matched).encode())


@pytest.mark.parametrize(("stop", "text"), [("hin", "the t"), ("e t", "th"), ("ing t", "the th"), ("h", "t")])
def test_stop_strings_inside_tokens(asked: Scripted, stop: str, text: str) -> None:  # C006
    choice = asked.complete("thing", stop=[stop])
    assert choice["text"] == text
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(("include", "text"), [(True, "foo END"), (False, "foo ")])
def test_the_stop_string_shows_where_asked_for(asked: Scripted, include: bool, text: str) -> None:  # C007
    choice = asked.complete("foo", stop=["END"], include_stop_str_in_output=include)
    assert choice["text"] == text
    assert choice["stop_reason"] == "END"


@pytest.mark.parametrize("way", ["complete", "chat"])
def test_text_held_back_for_a_stop_is_released(asked: Scripted, way: str) -> None:  # C008
    choice = getattr(asked, way)("held", stop=["STOP!!!!!!!!"])
    assert choice["text"] == "end with STO"
    assert choice["finish_reason"] == "stop"
    cut = getattr(asked, way)("held", stop=["STOP!!!!!!!!"], max_tokens=11)
    assert cut["text"] == "end with ST"
    assert cut["finish_reason"] == "length"


def test_a_stop_in_the_first_token(asked: Scripted) -> None:  # C009
    choice = asked.complete("first", stop=["\n"], logprobs=1)
    assert choice["text"] == ""
    assert choice["finish_reason"] == "stop"
    assert choice["usage"]["completion_tokens"] >= 1
    assert len({len(column) for column in choice["logprobs"].values()}) == 1
    choice = asked.chat("characters", stop=["a"], logprobs=True)
    assert choice["message"] == {"role": "assistant", "content": ""}
    assert len(choice["logprobs"]["content"]) == choice["usage"]["completion_tokens"]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("include", [True, False])
def test_a_special_stop_token_cuts_no_text(asked: Scripted, skip: bool, include: bool) -> None:  # C011
    choice = asked.complete(
        "special", stop_token_ids=[IM_START_ID], skip_special_tokens=skip, include_stop_str_in_output=include
    )
    shown = "<|im_start|>" if include and not skip else ""
    assert choice["text"] == f"hello world{shown}"
    assert choice["stop_reason"] == IM_START_ID
    assert choice["token_ids"] == [*ids_of("special")[:11], IM_START_ID]


def test_skip_special_tokens(asked: Scripted) -> None:
    assert asked.complete("special")["text"] == "hello worldmore"
    assert asked.complete("special", skip_special_tokens=False)["text"] == "hello world<|im_start|>more"


def test_min_tokens_holds_back_stop_strings(asked: Scripted) -> None:  # C012
    assert asked.complete("twice", stop=[";"])["text"] == "a"
    choice = asked.complete("twice", stop=[";"], min_tokens=4)
    assert choice["text"] == "a;bcdef"
    choice = asked.complete("parrot", min_tokens=9, max_tokens=12)
    assert len(choice["token_ids"]) >= 9
    assert EOS_ID not in choice["token_ids"][:9]


@pytest.mark.parametrize("max_tokens", [1, 2, 17])
def test_ignore_eos_gives_exactly_max_tokens(asked: Scripted, max_tokens: int) -> None:  # C013
    choice = asked.complete("parrot", ignore_eos=True, max_tokens=max_tokens)
    assert choice["usage"]["completion_tokens"] == max_tokens
    assert choice["finish_reason"] == "length"


def test_max_tokens_zero(asked: Scripted) -> None:  # C014
    choice = asked.complete("first", max_tokens=0, echo=True, logprobs=1)
    assert choice["text"] == ""  # the prompt is BOS alone, which does not show
    assert choice["usage"]["completion_tokens"] == 0
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["token_logprobs"] == [None]
    assert asked.complete("first", max_tokens=0)["text"] == ""
    for name in ("max_tokens", "max_completion_tokens"):
        body = {"messages": [{"role": "user", "content": "x"}], name: 0}
        check_error(asked.client.post("/v1/chat/completions", json=body), 400, param=name)


def test_defaults_of_max_tokens(asked: Scripted) -> None:  # C015, C017
    assert asked.complete("characters", max_tokens=None)["usage"]["completion_tokens"] == 16
    assert asked.chat("characters", max_tokens=None)["text"] == "a🦜é汉👩‍👩‍👧‍👦🇺🇳 z"
    choice = asked.chat("characters", max_tokens=3, max_completion_tokens=5)
    assert choice["usage"]["completion_tokens"] == 5
