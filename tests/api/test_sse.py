"""Streams: framing, errors before and after the beginning, comments, clients that leave."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time

import httpx
import pytest

from pagedserve.api import sse
from pagedserve.errors import RequestAbortedError
from tests.api.conftest import Front, FrontFactory
from tests.helpers.streams import check_error, check_stream

USAGE = {"include_usage": True}


def wait_idle(front: Front, seconds: float = 60.0) -> None:
    """The engine has nobody to answer any more."""
    deadline = time.monotonic() + seconds
    while front.engine.live or len(front.state.in_flight):
        assert time.monotonic() < deadline, front.engine.live
        time.sleep(0.01)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("text", ["hello", "žluťoučký 🦜 👩‍👩‍👧‍👦", "x", 'quote " and \\ and \u2028 \x01'])
def test_streams_add_up_to_the_whole_answer(front: Front, text: str, n: int) -> None:  # C044, C046
    body = {"n": n, "max_tokens": 200}
    whole = front.complete(prompt=f"say {text}", **body).json()
    stream = check_stream(
        front.complete(prompt=f"say {text}", stream=True, stream_options=USAGE, **body).content,
        chat=False,
        num_choices=n,
    )
    assert [stream.choices[i].text for i in range(n)] == [choice["text"] for choice in whole["choices"]]
    assert stream.usage == whole["usage"]
    messages = [{"role": "user", "content": f"say {text}"}]
    whole = front.chat(messages=messages, **body).json()
    stream = check_stream(
        front.chat(messages=messages, stream=True, stream_options=USAGE, **body).content, chat=True, num_choices=n
    )
    assert [stream.choices[i].text for i in range(n)] == [c["message"]["content"] for c in whole["choices"]]
    assert stream.usage == whole["usage"]
    assert {choice.finish_reason for choice in stream.choices.values()} == {"stop"}


def test_lists_of_prompts_keep_their_numbers(front: Front) -> None:  # C045
    prompts = ["say one", "say two two", "say 3"]
    whole = front.complete(prompt=prompts, n=2, echo=True).json()
    assert [choice["index"] for choice in whole["choices"]] == list(range(6))
    answers = [f"{prompts[i // 2]}{prompts[i // 2][4:]}" for i in range(6)]
    assert [choice["text"] for choice in whole["choices"]] == answers
    raw = front.complete(prompt=prompts, n=2, echo=True, stream=True, stream_options=USAGE).content
    stream = check_stream(raw, chat=False, num_choices=6)
    assert [stream.choices[i].text for i in range(6)] == answers
    assert stream.usage == whole["usage"]
    lone = [front.complete(prompt=prompt, n=2).json()["usage"] for prompt in prompts]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert whole["usage"][name] == sum(usage[name] for usage in lone)


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
def test_no_usage_unless_asked_for(front: Front, options: dict[str, object] | None) -> None:  # C043
    stream = check_stream(front.chat(stream=True, stream_options=options).content, chat=True)
    assert not any("usage" in chunk for chunk in stream.chunks)


def test_usage_on_every_chunk(front: Front) -> None:  # C043
    options = {"include_usage": True, "continuous_usage_stats": True}
    for response, chat in (
        (front.complete(stream=True, stream_options=options), False),
        (front.chat(stream=True, stream_options=options), True),
    ):
        stream = check_stream(response.content, chat=chat)
        counts = [chunk["usage"]["completion_tokens"] for chunk in stream.chunks]
        assert counts == sorted(counts)
        assert counts[-1] == stream.usage["completion_tokens"] == 6
        assert all(chunk["usage"]["prompt_tokens"] == stream.usage["prompt_tokens"] for chunk in stream.chunks)


def test_usage_is_null_on_the_other_chunks(front: Front) -> None:  # C043
    stream = check_stream(front.complete(stream=True, stream_options=USAGE).content, chat=False)
    assert [chunk["usage"] for chunk in stream.chunks[:-1]] == [None] * (len(stream.chunks) - 1)


def test_headers_of_a_stream(front: Front) -> None:
    response = front.complete(stream=True)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert "content-length" not in response.headers


ERRORS = [
    ("RequestError", 400),
    ("ContextLengthError", 400),
    ("QueueFullError", 429),
    ("DeadlineExceededError", 408),
    ("RequestAbortedError", 503),
    ("EngineDeadError", 503),
    ("EngineStepError", 500),
    ("Exception", 500),
]


@pytest.mark.parametrize(("kind", "status"), ERRORS)
@pytest.mark.parametrize("prompts", [1, 2])
def test_errors_before_the_first_token_have_their_status(front: Front, kind: str, status: int, prompts: int) -> None:
    # C096
    for is_stream in (False, True):
        prompt = f"fail {kind} 0" if prompts == 1 else ["say hi", f"fail {kind} 0"]
        if prompts == 2 and is_stream:
            continue  # the first prompt's answer may have begun the stream
        response = front.complete(prompt=prompt, stream=is_stream)
        error = check_error(response, status)
        assert "secret" not in error["message"]
        if status in (429, 503):
            assert int(response.headers["retry-after"]) > 0
    wait_idle(front)


@pytest.mark.parametrize(("kind", "status"), ERRORS)
def test_errors_after_it_are_an_event(front: Front, kind: str, status: int) -> None:  # C047
    check_error(front.complete(prompt=f"fail {kind} 3"), status)
    for is_chat in (False, True):
        command = f"fail {kind} 3"
        if is_chat:
            response = front.chat(messages=[{"role": "user", "content": command}], stream=True)
        else:
            response = front.complete(prompt=command, stream=True)
        assert response.status_code == 200
        stream = check_stream(response.content, chat=is_chat)
        assert stream.error is not None
        assert "secret" not in stream.error["message"]
        assert stream.choices[0].text == "He"
        assert stream.choices[0].finish_reason is None
    wait_idle(front)


def test_one_failing_prompt_fails_the_list_and_ends_the_others(front: Front) -> None:
    check_error(front.complete(prompt=["hang 1", "fail RequestError 1", "hang 0"]), 400)
    wait_idle(front)


def test_comments_keep_a_silent_stream_alive(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_SECONDS", 0.1)
    for command, text in (("hang 2", "H"), ("hang 0", "")):
        with front.client.stream("POST", "/v1/completions", json={"prompt": command, "stream": True}) as response:
            assert response.status_code == 200
            seen = b""
            for piece in response.iter_bytes():
                seen += piece
                if seen.count(b": keep-alive\n\n") == 3:
                    break
        assert (b'"text":"H"' in seen) == bool(text)
    wait_idle(front)


def test_a_late_error_after_comments_is_an_event(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_SECONDS", 0.05)
    with front.client.stream("POST", "/v1/completions", json={"prompt": "hang 0", "stream": True}) as response:
        pieces = response.iter_bytes()
        assert next(pieces) == b": keep-alive\n\n"
        front.client.get("/health")
        loop_call(front, lambda: front.state.in_flight.abort(RequestAbortedError("the server is shutting down")))
        rest = b"".join(pieces)
    stream = check_stream(b": keep-alive\n\n" + rest, chat=False)
    assert stream.error is not None
    assert "shutting down" in stream.error["message"]


def loop_call(front: Front, function) -> None:  # type: ignore[no-untyped-def]
    """Run something in the server's event loop."""
    done = asyncio.run_coroutine_threadsafe(_call(function), front.engine.loop)
    done.result(timeout=5)


async def _call(function) -> None:  # type: ignore[no-untyped-def]
    function()


@pytest.mark.parametrize("command", ["hang 0", "hang 3"])
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("prompts", [1, 3])
def test_the_request_ends_when_the_client_leaves(front: Front, command: str, is_stream: bool, prompts: int) -> None:
    body = {"prompt": [command] * prompts, "stream": is_stream, "n": 2}
    for _ in range(5):
        with (
            pytest.raises(httpx.ReadTimeout),
            front.client.stream("POST", "/v1/completions", json=body, timeout=httpx.Timeout(5, read=0.1)) as response,
        ):
            response.read()
        wait_idle(front)


def test_a_client_that_only_sends_half_a_body(front: Front) -> None:
    url = httpx.URL(front.base_url)
    with socket.create_connection((url.host, url.port)) as raw:
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
        )
        raw.sendall(head.encode())
    time.sleep(0.05)
    wait_idle(front)
    assert front.complete().status_code == 200


def test_shutdown_ends_what_runs_with_an_error(make_front: FrontFactory) -> None:
    front = make_front()
    with front.client.stream("POST", "/v1/completions", json={"prompt": "hang 2", "stream": True}) as response:
        pieces = response.iter_bytes()
        first = next(pieces)
        loop_call(front, lambda: front.state.in_flight.abort(RequestAbortedError("the server is shutting down")))
        stream = check_stream(first + b"".join(pieces), chat=False)
    assert stream.error is not None
    assert stream.error["code"] == "aborted"
    wait_idle(front)


def test_a_thousand_streams_at_once(front: Front) -> None:  # C102
    url = httpx.URL(front.base_url)

    async def one(i: int) -> None:
        reader, writer = await asyncio.open_connection(url.host, url.port)
        body = json.dumps({"prompt": f"say number {i}", "stream": i % 2 == 0, "max_tokens": 64}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        writer.write(f"{head}\r\nConnection: close\r\n\r\n".encode() + body)
        status, _, answer = (await reader.read()).partition(b"\r\n")
        writer.close()
        assert status == b"HTTP/1.1 200 OK"
        texts = re.findall(rb'"text":"([^"]*)"', answer)
        assert b"".join(texts).decode() == f"number {i}"
        assert (b"data: [DONE]" in answer) == (i % 2 == 0)

    async def everybody() -> None:
        await asyncio.gather(*(one(i) for i in range(1000)))

    asyncio.run(everybody())
    wait_idle(front)
