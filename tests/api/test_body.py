"""Bodies that are no JSON object, or no good one: a 400-class answer that names what is wrong."""

from __future__ import annotations

import json
import socket
import time

import httpx
import pytest

from pagedserve.api import body
from pagedserve.engine.chat_template import ChatTemplate
from tests.api.conftest import Front, FrontFactory
from tests.helpers.streams import check_error

JSON = {"Content-Type": "application/json"}


def post(front: Front, raw: bytes, headers: dict[str, str] | None = None) -> httpx.Response:
    return front.client.post("/v1/completions", content=raw, headers=JSON if headers is None else headers)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"1",
        b'"x"',
        b"\xff\xfe",
        b'{"prompt": "\xc3"}',
        '{"prompt": "a"}'.encode("utf-16"),
        b'{"prompt": "a",}',
        b'{"prompt": "a"} {}',
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda raw: repr(raw[:20]),
)
def test_what_is_no_json_object_is_a_400(front: Front, raw: bytes) -> None:  # C097
    check_error(post(front, raw), 400)


def test_a_byte_order_mark_and_spaces_are_harmless(front: Front) -> None:
    assert post(front, b'\xef\xbb\xbf  {"prompt": "a"}' + b" " * 1000).status_code == 200


def test_a_key_that_occurs_twice_is_named(front: Front) -> None:  # C097
    check_error(post(front, b'{"prompt": "a", "prompt": "b"}'), 400, param="prompt")
    check_error(post(front, b'{"prompt": "a", "logit_bias": {"5": 1, "5": 2}}'), 400, param="5")


@pytest.mark.parametrize(
    ("media_type", "status"),
    [
        ("application/json", 200),
        ("APPLICATION/JSON", 200),
        ("application/json; charset=utf-8", 200),
        ('application/json;charset="UTF-8"', 200),
        ("application/json; charset=latin-1", 415),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
    ],
)
def test_media_types(front: Front, media_type: str, status: int) -> None:  # C097
    response = post(front, b'{"prompt": "a"}', {"Content-Type": media_type})
    if status == 200:
        assert response.status_code == 200
    else:
        check_error(response, status)


def test_a_body_without_a_type_or_compressed_is_a_415(front: Front) -> None:
    check_error(post(front, b'{"prompt": "a"}', {}), 415)
    check_error(post(front, b"\x1f\x8b", {**JSON, "Content-Encoding": "gzip"}), 415)


def test_bodies_above_the_limit_are_a_413(make_front: FrontFactory) -> None:  # C097
    front = make_front(max_body_size="10KiB")
    check_error(post(front, b" " * 10_241), 413)
    with httpx.Client() as client:

        def chunks():
            yield b" " * 6000
            yield b" " * 6000

        response = client.post(f"{front.base_url}/v1/completions", content=chunks(), headers=JSON)
    check_error(response, 413)
    assert post(front, b'{"prompt": "a"}').status_code == 200


def test_a_body_that_does_not_come_is_a_408(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "PART_SECONDS", 0.2)

    def chunks():
        yield b'{"prompt":'
        time.sleep(0.5)
        yield b'"a"}'

    check_error(httpx.post(f"{front.base_url}/v1/completions", content=chunks(), headers=JSON), 408)


NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "timeout")


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e400", '"nan"', "-3", "true", "[]"])
def test_no_number_that_is_none(front: Front, name: str, value: str) -> None:  # C030
    check_error(post(front, f'{{"prompt": "a", "{name}": {value}}}'.encode()), 400, param=name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", "7"),
        ("max_tokens", True),
        ("max_tokens", []),
        ("max_tokens", 2**31),
        ("max_tokens", 10**30),
        ("n", 0),
        ("n", 10**6),
        ("best_of", 10**6),
        ("top_k", -2),
        ("top_k", 0.5),
        ("top_k", "5"),
        ("top_p", 0),
        ("top_p", 1.1),
        ("min_p", 1.1),
        ("min_p", -0.1),
        ("temperature", -1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0),
        ("seed", 2**63),
        ("seed", "1"),
        ("logprobs", -1),
        ("min_tokens", 17),
        ("stop", ""),
        ("stop", [""]),
        ("stop", [None]),
        ("stop", 5),
        ("stop", ["x"] * 100_000),
        ("stop", "x" * 100_000),
        ("stop_token_ids", [-5]),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", 3),
        ("allowed_token_ids", []),
        ("bad_words", [" "]),
        ("bad_words", ["x"] * 100_000),
        ("logit_bias", {str(i): 1 for i in range(5000)}),
        ("logit_bias", {"abc": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"1.5": 1}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", []),
        ("repetition_detection", {"min_count": 2}),
        ("repetition_detection", {"max_pattern_size": -1}),
        ("repetition_detection", {"max_pattern_size": 10**6}),
        ("repetition_detection", {"max_pattern_size": 4, "min_pattern_size": 5}),
        ("repetition_detection", {"max_pattern_size": 4, "min_count": 1}),
        ("repetition_detection", {"max_pattern_size": 4, "foo": 1}),
        ("truncate_prompt_tokens", -5),
        ("truncate_prompt_tokens", 0),
        ("truncation_side", "left"),
        ("request_id", "a b"),
        ("request_id", "x" * 200),
        ("request_id", ""),
        ("cache_salt", ""),
        ("cache_salt", "x" * 200),
        ("priority", 1),
        ("beam_width", 4),
        ("length_penalty", 0.5),
        ("early_stopping", True),
        ("stream_options", {"include_usage": True}),
        ("stream", "yes"),
        ("echo", 1),
        ("model", 5),
    ],
    ids=lambda value: str(value)[:20],
)
def test_fields_out_of_range_are_named(front: Front, name: str, value: object) -> None:
    # C010, C017, C030, C031, C043, C107
    started = time.monotonic()
    check_error(front.complete(**{name: value}), 400, param=name)
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    "prompt",
    [[], [[]], [[1], []], ["a", 1], [1, "a"], [1.5], [True], [None], {}, 5, True, [[1, "a"]], [["a"]], ["x"] * 100_000],
    ids=lambda value: str(value)[:20],
)
def test_prompts_of_no_known_form(front: Front, prompt: object) -> None:  # C070, C071, C107
    check_error(front.complete(prompt=prompt), 400, param="prompt")


def test_a_missing_prompt_is_named(front: Front) -> None:  # C070
    check_error(front.client.post("/v1/completions", json={}), 400, param="prompt")
    check_error(front.client.post("/v1/completions", json={"prompt": None}), 400, param="prompt")
    check_error(front.client.post("/v1/chat/completions", json={"prompt": "a"}), 400, param="messages")


@pytest.mark.parametrize("messages", [[], None, {}, "hi", [None], [[]], [{"role": "user"}], [{"content": "x"}], 5])
def test_messages_of_no_known_form(front: Front, messages: object) -> None:  # C068
    error = check_error(front.chat(messages=messages), 400)
    assert error["param"].startswith("messages")


@pytest.mark.parametrize(
    "message",
    [
        {"role": "wizard", "content": "x"},
        {"role": "user", "content": 5},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]},
        {"role": "user", "content": [{"type": "poem", "text": "x"}]},
        {"role": "user", "content": [{"type": "text"}]},
        {"role": "user", "content": [""]},
    ],
    ids=str,
)
def test_messages_that_cannot_be_read(front: Front, message: dict[str, object]) -> None:  # C066, C068
    check_error(front.chat(messages=[message]), 400, param="messages")


@pytest.mark.parametrize("kind", ["image_url", "input_image", "audio_url", "video_url", "file"])
def test_nothing_is_fetched_for_a_client(front: Front, kind: str) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.setblocking(False)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/x"
        for address in (url, {"url": url}, "file:///etc/passwd"):
            part = {"type": kind, kind: address, "url": url}
            check_error(front.chat(messages=[{"role": "user", "content": [part]}]), 400, param="messages")
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_too_many_messages_are_a_400(front: Front) -> None:  # C107
    error = check_error(front.chat(messages=[{"role": "user", "content": "x"}] * 100_000), 400, param="messages")
    assert "10000" in error["message"]


@pytest.mark.parametrize("escape", ["\\ud83d", "\\ude00\\ud83d", "\\uDABC x"])
def test_half_a_surrogate_pair_is_a_400_wherever_it_stands(front: Front, escape: str) -> None:  # C069
    for name in ("prompt", "model", "user", "request_id", "cache_salt", "unknown"):
        check_error(
            post(
                front,
                f'{{"prompt": "a", "{name}": "{escape}"}}'.replace('"prompt": "a", "prompt"', '"prompt"').encode(),
            ),
            400,
            param=name,
        )
    for name in ("stop", "bad_words"):
        check_error(post(front, f'{{"prompt": "a", "{name}": ["{escape}"]}}'.encode()), 400, param=name)
    body = f'{{"messages": [{{"role": "user", "content": [{{"type": "text", "text": "{escape}"}}]}}], "stream": true}}'
    check_error(front.client.post("/v1/chat/completions", content=body, headers=JSON), 400, param="messages")


def test_nul_and_byte_order_marks_are_text(front: Front) -> None:  # C069
    raw = json.dumps({"prompt": "\u0000\ufeff\U0001f600"})
    assert post(front, raw.encode()).status_code == 200


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("suffix", "x"),
        *[(name, "a") for name in ("grammar", "ebnf", "regex", "json_schema")],
        ("functions", [{"name": "f"}]),
        ("audio", {"voice": "x"}),
        ("modalities", ["text", "audio"]),
        ("prediction", {"type": "content", "content": "x"}),
        ("store", True),
        ("web_search_options", {}),
        ("chat_template", "{{ 1 }}"),
        ("prompt_embeds", "x"),
        ("logprob_token_ids", [1]),
    ],
)
def test_what_is_not_built_is_refused_not_ignored(front: Front, name: str, value: object) -> None:  # C106
    error = check_error(front.chat(**{name: value}), 400, param=name)
    assert error["code"] == "unsupported_parameter"


@pytest.mark.parametrize(("name", "value"), [("tools", [{"type": "function"}]), ("tool_choice", "required")])
def test_completions_have_no_tools(front: Front, name: str, value: object) -> None:
    error = check_error(front.complete(**{name: value}), 400, param=name)
    assert error["code"] == "unsupported_parameter"


def test_fields_that_ask_for_nothing_are_accepted(front: Front) -> None:  # C098
    response = front.chat(
        user="me",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        parallel_tool_calls=True,
        response_format={"type": "text"},
        tools=[],
        tool_choice="none",
        modalities=["text"],
        logit_bias=None,
        foo=None,
        stream_options=None,
    )
    assert response.status_code == 200
    assert "x-pagedserve-warning" not in response.headers


def test_unknown_fields_are_named_in_a_header(front: Front) -> None:  # C098
    response = front.complete(foo=1, temprature=0.5, **{"bär\r\nx: y": 1})
    assert response.status_code == 200
    warning = response.headers["x-pagedserve-warning"]
    assert "foo, temprature" in warning
    assert "\\xe4" in warning
    response = front.chat(messages=[{"role": "user", "content": "x", "mood": "good"}], stream=True)
    assert "messages.0.mood" in response.headers["x-pagedserve-warning"]
    assert "service_tier" in front.chat(service_tier="flex").headers["x-pagedserve-warning"]


def test_strict_refuses_unknown_fields(make_front: FrontFactory) -> None:
    front = make_front(strict=True)
    check_error(front.complete(temprature=0.5), 400, param="temprature")
    check_error(front.client.post("/tokenize", json={"prompt": "a", "foo": 1}), 400, param="foo")
    assert front.complete(temperature=0.5, user="me").status_code == 200


@pytest.mark.parametrize(
    "kwargs", [{"chat_template": "{{ 1 }}"}, {"messages": []}, {"tools": []}, {"tokenize": True}, "x", [1]], ids=str
)
def test_template_variables_that_are_reserved(front: Front, kwargs: object) -> None:  # C106
    check_error(front.chat(chat_template_kwargs=kwargs), 400, param="chat_template_kwargs")
    body = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": kwargs}
    check_error(front.client.post("/tokenize", json=body), 400, param="chat_template_kwargs")


def test_variables_that_the_template_does_not_read_are_named(front: Front) -> None:
    response = front.chat(reasoning_effort="high", chat_template_kwargs={"mood": "bright"})
    assert response.status_code == 200
    assert response.headers["x-pagedserve-warning"].endswith(": chat_template_kwargs.mood, reasoning_effort")


def test_variables_that_the_template_reads_are_not(make_front: FrontFactory) -> None:
    front = make_front()
    front.engine.chat_template = ChatTemplate(
        {"default": "{{ reasoning_effort }}{{ enable_thinking }}{% for m in messages %}{{ m.content }}{% endfor %}"}
    )
    for effort in ("high", "none"):
        response = front.chat(reasoning_effort=effort, chat_template_kwargs={"enable_thinking": True})
        assert response.status_code == 200 and "x-pagedserve-warning" not in response.headers
