"""Whatever a client sends is never answered with a 5xx, or with a body of the wrong shape: hypothesis looks for one."""

from __future__ import annotations

import json
from typing import Any

import httpx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagedserve.api.protocol.batches import BatchRequest
from pagedserve.api.protocol.chat import ChatCompletionRequest
from pagedserve.api.protocol.common import UNSUPPORTED_FIELDS
from pagedserve.api.protocol.completions import CompletionRequest
from pagedserve.api.protocol.generate import GenerateRequest
from pagedserve.api.protocol.messages import CountTokensRequest, MessagesRequest
from pagedserve.api.protocol.requests import AbortRequest
from pagedserve.api.protocol.responses import CountInputRequest, ResponsesRequest
from pagedserve.api.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from tests.api.conftest import Front
from tests.helpers.server import ServerProcess
from tests.helpers.streams import check_error_body, check_stream, strict_json

MODELS = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/responses/input_tokens": CountInputRequest,
    "/inference/v1/generate": GenerateRequest,
    "/abort_requests": AbortRequest,
    "/v1/batches": BatchRequest,
    "/apply_template": TokenizeRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
SAMPLING = sorted(CompletionRequest.model_fields)
texts = st.text(max_size=10)
numbers = st.one_of(
    st.integers(-3, 40),
    st.floats(-3, 3),
    st.sampled_from([0, 1, -1, 2**31, 2**63, 10**30, 1e300, float("nan"), float("inf"), True, False]),
)
leaves = st.one_of(st.none(), texts, numbers, st.sampled_from(["auto", "never", "left", "say hi", "fake"]))
values = st.recursive(
    leaves,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=8,
)
KINDS = ["message", "function_call", "function_call_output", "reasoning"]
PARTS = ["text", "input_text", "output_text", "refusal", "thinking", "redacted_thinking", "tool_use", "tool_result"]
# Parts of all protocols: what one of them has is what the others must refuse.
parts = st.fixed_dictionaries(
    {"type": st.one_of(st.sampled_from(PARTS), values)},
    optional={name: st.one_of(texts, values) for name in ("text", "thinking", "refusal", "id", "name", "tool_use_id")}
    | {"input": st.one_of(st.just({}), values), "content": st.one_of(texts, values)},
)
messages = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "role": st.one_of(st.sampled_from(["system", "user", "assistant", "tool", "developer"]), values),
            "content": st.one_of(texts, st.lists(parts, max_size=3), values),
            "type": st.one_of(st.sampled_from(KINDS), values),
            "call_id": st.one_of(texts, values),
            "arguments": st.one_of(st.just("{}"), values),
            "output": st.one_of(texts, st.lists(parts, max_size=2), values),
            "tool_calls": values,
            "name": values,
            "reasoning_content": values,
        },
    ),
    max_size=4,
)


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A route, and a body of its fields with values that are often, but not always, of the right kind."""
    path = draw(st.sampled_from(sorted(MODELS)))
    names = sorted([*MODELS[path].model_fields, *UNSUPPORTED_FIELDS, "unknown"])
    body = draw(st.dictionaries(st.sampled_from(names), values, max_size=5))
    if draw(st.booleans()):
        body["prompt"] = draw(st.one_of(texts, st.lists(texts), st.lists(st.integers(-2, 330), max_size=5)))
        body["messages"] = draw(messages)
        body["input"] = draw(st.one_of(texts, messages))
        body["token_ids"] = draw(st.lists(st.integers(-2, 330), max_size=5))
        body["sampling_params"] = draw(st.dictionaries(st.sampled_from(SAMPLING), values, max_size=3))
        body["request_ids"] = draw(st.lists(texts, max_size=3))
        body["max_tokens"] = draw(st.integers(1, 20))
        body["tokens"] = draw(st.lists(st.integers(-2, 330), max_size=5))
    model = draw(st.sampled_from([None, "fake", ...]))
    if model is not ...:
        body["model"] = model
    return path, body


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(requests())
def test_no_body_is_answered_with_a_5xx(front: Front, request_: tuple[str, dict[str, Any]]) -> None:  # C096
    path, body = request_
    raw = json.dumps(body).encode()
    response = front.client.post(path, content=raw, headers={"Content-Type": "application/json"})
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        check_error_body(response.content)
    elif response.headers["content-type"].startswith("text/event-stream"):
        if path in ("/v1/completions", "/v1/chat/completions"):
            check_stream(response.content, chat="chat" in path)
    else:
        assert isinstance(strict_json(response.content), dict)


sampling = st.fixed_dictionaries(
    {"seed": st.integers(0, 50), "max_tokens": st.integers(1, 24)},
    optional={
        "temperature": st.sampled_from([0, 0.5, 1.5]),
        "top_k": st.sampled_from([-1, 1, 5]),
        "top_p": st.sampled_from([0.3, 1]),
        "n": st.integers(1, 4),
        "stop": st.lists(st.sampled_from(["e", "th", "\n", "é", "in"]), max_size=2),
        "stop_token_ids": st.lists(st.integers(0, 319), max_size=2),
        "ignore_eos": st.booleans(),
        "min_tokens": st.sampled_from([0, 1]),
        "include_stop_str_in_output": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "logprobs": st.sampled_from([0, 3]),
        "echo": st.booleans(),
        "repetition_penalty": st.sampled_from([0.5, 1.5]),
        "logit_bias": st.dictionaries(st.integers(0, 319).map(str), st.sampled_from([-100, 5]), max_size=3),
        "prompt": st.one_of(st.text(max_size=20), st.lists(st.text(max_size=9), min_size=1, max_size=3)),
    },
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(sampling)
def test_a_stream_adds_up_to_the_whole_answer(tiny: ServerProcess, body: dict[str, Any]) -> None:
    body = {"prompt": "The thing", "return_token_ids": True, **body}
    with httpx.Client(base_url=tiny.base_url, timeout=60) as client:
        response = client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        whole = strict_json(response.content)
        options = {"stream": True, "stream_options": {"include_usage": True}}
        stream = check_stream(client.post("/v1/completions", json={**body, **options}).content, chat=False)
    assert stream.error is None
    assert sorted(stream.choices) == [choice["index"] for choice in whole["choices"]]
    for choice in whole["choices"]:
        streamed = stream.choices[choice["index"]]
        assert streamed.text == choice["text"]
        assert streamed.token_ids == choice["token_ids"]
        assert streamed.finish_reason == choice["finish_reason"]
        assert streamed.stop_reason == choice.get("stop_reason")
        if choice["logprobs"]:
            assert [row[0] for row in streamed.logprobs] == choice["logprobs"]["tokens"]
            assert [row[2] for row in streamed.logprobs] == choice["logprobs"]["text_offset"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert stream.usage[name] == whole["usage"][name]


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.sampled_from(sorted(MODELS)), st.binary(max_size=60), st.text(max_size=30))
def test_no_bytes_are_answered_with_a_5xx(front: Front, path: str, raw: bytes, media_type: str) -> None:
    headers = {"Content-Type": media_type.encode("utf-8").replace(b"\r", b"").replace(b"\n", b"").replace(b"\0", b"")}
    headers = (
        {"Content-Type": headers["Content-Type"].strip()}
        if raw and raw[0] % 2
        else {"Content-Type": b"application/json"}
    )
    if not all(32 <= byte != 127 for byte in headers["Content-Type"]):
        headers = {}
    response = front.client.post(path, content=raw, headers=headers)
    assert 400 <= response.status_code < 500
    check_error_body(response.content)
