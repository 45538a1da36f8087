"""Calls that must come, and thoughts that must end, on a live engine whose random model would never do either."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from tests.helpers.byte_tokenizer import EOS_ID, IM_END_ID
from tests.helpers.checkpoints import tiny_llama
from tests.helpers.server import ServerProcess, server_process
from tests.helpers.streams import check_stream
from tests.helpers.tool_formats import template_with

PARAMETERS = {
    "type": "object",
    "properties": {
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["days", "unit"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"forecast": PARAMETERS, "ping": NOTHING}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]
NAMED = {"type": "function", "function": {"name": "forecast"}}
USER = [{"role": "user", "content": "hi"}]
FIXED: dict[str, Any] = {"model": "m", "messages": USER, "max_tokens": 250, "temperature": 1, "tools": TOOLS}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A random model whose template opens the thoughts, unless it is told not to."""
    folder = tmp_path_factory.mktemp("forced")
    model = tiny_llama(folder / "model", max_position_embeddings=2048)
    template = template_with("<tool_call>", "{% if enable_thinking %}<think>\n{% endif %}")
    flags = (
        "--served-model-name",
        "m",
        "--chat-template",
        template,
        "--dtype",
        "float32",
        "--num-device-blocks",
        "600",
    )
    with server_process(model, *flags, log=folder / "log") as process:
        yield process


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def check_calls(calls: Any) -> None:
    assert calls
    assert len({call.id for call in calls}) == len(calls)
    for call in calls:
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


@pytest.mark.parametrize(("tool_choice", "reason"), [("required", "tool_calls"), (NAMED, "stop")], ids=str)
def test_forced_calls_are_valid(client: openai.OpenAI, tool_choice: Any, reason: str) -> None:  # C050
    fixed = {**FIXED, "tool_choice": tool_choice, "parallel_tool_calls": False, "n": 2, "seed": 5}
    answer = client.chat.completions.create(**fixed)
    assert [choice.finish_reason for choice in answer.choices] == [reason, reason]
    for choice in answer.choices:
        check_calls(choice.message.tool_calls)
        assert len(choice.message.tool_calls) == 1
        assert choice.message.content is None
        if tool_choice == NAMED:
            assert choice.message.tool_calls[0].function.name == "forecast"
    with client.chat.completions.stream(**fixed) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion()
    for one, other in zip(streamed.choices, answer.choices, strict=True):
        assert one.finish_reason == other.finish_reason
        assert [c.function.arguments for c in one.message.tool_calls] == [
            c.function.arguments for c in other.message.tool_calls
        ]


def test_several_calls_may_be_required(client: openai.OpenAI) -> None:
    """A model that would rather not stop calls until its tokens are used up; the call that they cut is text."""
    bias = {str(EOS_ID): -100, str(IM_END_ID): -100}
    fixed = {**FIXED, "tool_choice": "required", "seed": 1, "logit_bias": bias}
    choice = client.chat.completions.create(**fixed).choices[0]
    check_calls(choice.message.tool_calls)
    assert len(choice.message.tool_calls) > 1
    assert choice.finish_reason == "length"
    assert (choice.message.content or "<tool_call>").lstrip().startswith("<tool_call>")


def test_a_schema_that_cannot_be_enforced_is_a_400(client: openai.OpenAI) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)y"}}, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}]
    for choice in ("required", "auto"):
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(**{**FIXED, "tools": tools, "tool_choice": choice})
    # Without strict nobody asked for more than text.
    tools[0]["function"]["strict"] = False
    client.chat.completions.create(**{**FIXED, "tools": tools, "max_tokens": 5})


def test_strict_calls_leave_text_free(client: openai.OpenAI) -> None:
    tools = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    choice = client.chat.completions.create(**{**FIXED, "tools": tools, "max_tokens": 30, "seed": 1}).choices[0]
    assert choice.message.content


# `</think>` in this vocabulary: < / th in k >
MARKER_TOKENS = 6
THINKING = {"chat_template_kwargs": {"enable_thinking": True}}


@pytest.mark.parametrize("budget", [0, 7])
def test_thoughts_end_when_their_tokens_are_used_up(server: ServerProcess, client: openai.OpenAI, budget: int) -> None:
    body = {**FIXED, "tools": None, "max_tokens": 40, "seed": 2, **THINKING, "thinking_token_budget": budget}
    raw = client.with_options(timeout=60)._client.post("chat/completions", json={**body, "stream": True}).content
    stream = check_stream(raw, chat=True)
    answer = client._client.post("chat/completions", json=body).json()
    choice = answer["choices"][0]
    details = answer["usage"]["completion_tokens_details"]
    assert details["reasoning_tokens"] == budget + MARKER_TOKENS
    assert (choice["message"].get("reasoning") is None) == (budget == 0)
    assert choice["message"]["content"] == stream.choices[0].text
    assert choice["message"]["content"]
    unlimited = client._client.post("chat/completions", json={**body, "thinking_token_budget": None}).json()
    assert unlimited["choices"][0]["message"]["content"] is None, "this model never ends its thoughts"


def test_a_call_is_forced_behind_limited_thoughts(client: openai.OpenAI) -> None:
    extra = {**THINKING, "thinking_token_budget": 9}
    answer = client.chat.completions.create(**FIXED, tool_choice=NAMED, seed=3, extra_body=extra)
    check_calls(answer.choices[0].message.tool_calls)
    assert answer.choices[0].message.reasoning_content
    assert answer.usage.completion_tokens_details.reasoning_tokens == 9 + MARKER_TOKENS


def test_a_budget_is_no_matter_where_nothing_is_thought(client: openai.OpenAI) -> None:
    """Greedy tokens are the same with and without: the answer does not begin as thoughts do."""
    fixed = {**FIXED, "tools": openai.NOT_GIVEN, "temperature": 0, "max_tokens": 20}
    plain = client.chat.completions.create(**fixed)
    limited = client.chat.completions.create(**fixed, extra_body={"thinking_token_budget": 3})
    assert limited.choices[0].message.content == plain.choices[0].message.content
    assert limited.choices[0].finish_reason == plain.choices[0].finish_reason


def test_a_budget_beside_strict_tools(client: openai.OpenAI) -> None:
    tools = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    fixed = {**FIXED, "tools": tools, "max_tokens": 40}
    answer = client.chat.completions.create(**fixed, extra_body={**THINKING, "thinking_token_budget": 4})
    assert answer.usage.completion_tokens_details.reasoning_tokens == 4 + MARKER_TOKENS
    with pytest.raises(openai.BadRequestError, match="strict"):
        client.chat.completions.create(**fixed, extra_body={"thinking_token_budget": 4})


@pytest.mark.parametrize("tool_choice", ["auto", "required"])
def test_scores_of_tokens_that_are_no_text_yet_come_with_the_next_chunk(
    client: openai.OpenAI, tool_choice: str
) -> None:
    """C026: every token has its scores once, in a stream as in a whole answer, whatever its text becomes."""
    fixed = {**FIXED, "tool_choice": tool_choice, "max_tokens": 60, "seed": 4, "logprobs": True, "top_logprobs": 1}
    body = {**fixed, "return_token_ids": True}
    choice = client._client.post("chat/completions", json=body).json()["choices"][0]
    raw = client._client.post("chat/completions", json={**body, "stream": True}).content
    stream = check_stream(raw, chat=True)
    assert stream.choices[0].logprobs == choice["logprobs"]["content"]
    assert stream.choices[0].token_ids == choice["token_ids"]
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
