"""Whatever a client sends is never answered with a 5xx, or with a body of the wrong shape: hypothesis looks for one."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagedserve.api.protocol.chat import ChatCompletionRequest
from pagedserve.api.protocol.common import UNSUPPORTED_FIELDS
from pagedserve.api.protocol.completions import CompletionRequest
from pagedserve.api.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from tests.api.conftest import Front
from tests.helpers.streams import check_error_body, check_stream, strict_json

MODELS = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatCompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
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
messages = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "role": st.one_of(st.sampled_from(["system", "user", "assistant", "tool", "developer"]), values),
            "content": st.one_of(
                texts, st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": texts})), values
            ),
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
        body["tokens"] = draw(st.lists(st.integers(-2, 330), max_size=5))
    if draw(st.booleans()):
        body.pop("model", None)
    return path, body


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requests())
def test_no_body_is_answered_with_a_5xx(front: Front, request_: tuple[str, dict[str, Any]]) -> None:
    path, body = request_
    raw = json.dumps(body).encode()
    response = front.client.post(path, content=raw, headers={"Content-Type": "application/json"})
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        check_error_body(response.content)
    elif response.headers["content-type"].startswith("text/event-stream"):
        check_stream(response.content, chat="chat" in path)
    else:
        assert isinstance(strict_json(response.content), dict)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
