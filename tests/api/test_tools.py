"""Tool calls in /v1/chat/completions: what is accepted, what is answered, streamed and not, by the official client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.api.conftest import Front, FrontFactory
from tests.helpers.streams import check_error, check_stream, strict_json
from tests.helpers.tool_formats import FORMATS, hermes, template_with

PARAMETERS = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "f", "description": "does it", "parameters": PARAMETERS}}
OTHER = {"type": "function", "function": {"name": "g"}}
TOOLS = [TOOL, OTHER]
USER = [{"role": "user", "content": "hi"}]
# C048: quotes, braces, escapes, and characters of several bytes.
TRICKY = {"a": 'x"y\\n{}', "b": [1, {"c": None}], "é": "汉🦜"}
NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.fixture(scope="module")
def hermes_front(make_front: FrontFactory) -> Front:
    return make_front(template=template_with("<tool_call>"))


@pytest.fixture
def scripted(hermes_front: Front) -> Iterator[Front]:
    yield hermes_front
    hermes_front.engine.script, hermes_front.engine.stride = None, 1


def whole(front: Front, **body: Any) -> dict[str, Any]:
    response = front.chat(**{"max_tokens": 400, "tools": TOOLS, **body})
    assert response.status_code == 200, response.text
    return strict_json(response.content)["choices"][0]


def streamed(front: Front, **body: Any) -> dict[str, Any]:
    """The choice that a client adds up from a stream, checked: ids and names once, first, indices in order."""
    raw = front.chat(**{"max_tokens": 400, "tools": TOOLS, **body}, stream=True).content
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    reason = None
    for chunk in check_stream(raw, chat=True).chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            assert delta.get("reasoning") == delta.get("reasoning_content")
            message["reasoning"] += delta.get("reasoning") or ""
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    assert call["type"] == "function"
                    assert call["index"] == len(message["tool_calls"])
                    assert call["function"]["arguments"] == ""
                    message["tool_calls"].append({"id": call["id"], "type": "function", "function": call["function"]})
                else:
                    assert set(call) == {"index", "function"}
                    assert set(call["function"]) == {"arguments"}
                    message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            reason = choice["finish_reason"] or reason
    return {"message": message, "finish_reason": reason}


def essence(choice: dict[str, Any]) -> tuple[Any, ...]:
    """What of a choice is the same in both modes: all but ids."""
    message = choice["message"]
    calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or []]
    return message["content"] or "", message.get("reasoning") or "", calls, choice["finish_reason"]


@pytest.mark.parametrize("stride", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    "text",
    [
        hermes([("f", TRICKY)]),
        '<tool_call>{"arguments": {"a": "x"}, "name": "f"}</tool_call>',
        hermes([("g", {})]),
        f"Let me see. {hermes([('f', TRICKY), ('g', {}), ('f', {'a': '2'})])}",
    ],
)
def test_streams_add_up_to_the_whole_answer(scripted: Front, text: str, stride: int) -> None:
    """C048, C049: arguments are exactly the model's JSON, calls have their own index and id."""
    scripted.engine.script, scripted.engine.stride = text, stride
    answer, stream = whole(scripted), streamed(scripted)
    assert essence(answer) == essence(stream)
    assert answer["finish_reason"] == "tool_calls"
    assert answer["message"]["content"] == ("Let me see." if text.startswith("Let") else None)
    calls = answer["message"]["tool_calls"]
    ids = [call["id"] for call in calls]
    assert len(set(ids)) == len(ids)
    arguments = json.loads(calls[0]["function"]["arguments"])
    assert arguments in (TRICKY, {"a": "x"}, {})
    assert [call["function"]["name"] for call in calls] in (["f"], ["g"], ["f", "g", "f"])


@pytest.mark.parametrize("name", FORMATS)
def test_the_format_is_found_in_the_template(make_front: FrontFactory, name: str) -> None:
    form = FORMATS[name]
    front = make_front(template=template_with(form.signs))
    front.engine.script = form.write([("f", {"a": "x", "b": [1, "y"]}), ("g", {"n": 5})])
    tools = [{"type": "function", "function": {"name": n, "parameters": {"type": "object"}}} for n in "fg"]
    answer = whole(front, tools=tools)
    assert essence(answer) == essence(streamed(front, tools=tools))
    calls = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in answer["message"]["tool_calls"]]
    assert calls == [("f", {"a": "x", "b": [1, "y"]}), ("g", {"n": 5})]
    assert answer["message"]["content"] is None


@pytest.mark.parametrize("stride", [1, 1000])
def test_only_the_first_call_where_one_was_asked_for(scripted: Front, stride: int) -> None:
    """C049: and what the model goes on to say is not waited for."""
    scripted.engine.script, scripted.engine.stride = hermes([("f", {"a": "1"}), ("f", {"a": "2"})]) + " more", stride
    for choice in (whole(scripted, parallel_tool_calls=False), streamed(scripted, parallel_tool_calls=False)):
        assert essence(choice) == ("", "", [("f", '{"a": "1"}')], "tool_calls")
    assert len(whole(scripted)["message"]["tool_calls"]) == 2
    usage = scripted.chat(tools=TOOLS, parallel_tool_calls=False, max_tokens=400).json()["usage"]
    if stride == 1:
        assert usage["completion_tokens"] < len(scripted.engine.script) - 40


CALL = hermes([("f", {"a": "1"})])


@pytest.mark.parametrize(
    ("choice", "text", "reason", "num_calls"),
    [
        ("auto", CALL, "tool_calls", 1),
        (None, CALL, "tool_calls", 1),
        ("auto", "Just text.", "stop", 0),
        ("required", CALL, "tool_calls", 1),
        (NAMED, CALL, "stop", 1),
        ("none", CALL, "stop", 0),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}, CALL, "tool_calls", 1),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [OTHER]}}, CALL, "stop", 0),
    ],
    ids=str,
)
def test_finish_reasons(scripted: Front, choice: object, text: str, reason: str, num_calls: int) -> None:
    """C050, C051. A named function is no choice of the model's, so OpenAI says "stop"."""
    scripted.engine.script = text
    body = {} if choice is None else {"tool_choice": choice}
    answer, stream = whole(scripted, **body), streamed(scripted, **body)
    assert essence(answer) == essence(stream)
    assert answer["finish_reason"] == reason
    assert len(answer["message"].get("tool_calls") or []) == num_calls
    assert num_calls or answer["message"]["content"] == text


def test_none_needs_no_tools_and_shows_none(scripted: Front) -> None:  # C051
    for tools in ({}, {"tools": []}, {"tools": None}):
        assert scripted.chat(tool_choice="none", **tools).status_code == 200
    assert scripted.chat(tools=[]).status_code == 200
    assert "tool_calls" not in whole(scripted, tool_choice="none")["message"]
    assert "does it" not in scripted.engine.tokenizer.decode(scripted.engine.seen[-1]["prompt"])
    whole(scripted)
    assert "does it" in scripted.engine.tokenizer.decode(scripted.engine.seen[-1]["prompt"])


def function(**fields: object) -> list[dict[str, object]]:
    return [{"type": "function", "function": {"name": "f", **fields}}]


def nested(depth: int) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": nested(depth - 1)}} if depth else {"type": "string"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": 5}, "tools"),
        ({"tools": "x"}, "tools"),
        ({"tools": [5]}, "tools"),
        ({"tools": [{}]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools"),
        ({"tools": function(name="")}, "tools"),
        ({"tools": function(name="x" * 65)}, "tools"),
        ({"tools": function(name="a b")}, "tools"),
        ({"tools": function(name=None)}, "tools"),
        ({"tools": function(name=7)}, "tools"),
        ({"tools": function(parameters="x")}, "tools"),
        ({"tools": function(parameters={"type": "array"})}, "tools"),
        ({"tools": function(parameters={"type": "object", "properties": []})}, "tools"),
        ({"tools": function(parameters=nested(40))}, "tools"),
        ({"tools": function(description=5)}, "tools"),
        ({"tools": function(strict="yes")}, "tools"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [{**OTHER, "function": {"name": f"f{i}"}} for i in range(513)]}, "tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nope"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": 7}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": 3}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "21"}]}, "messages"),
        ({"messages": [{"role": "tool", "tool_call_id": 5, "content": "21"}]}, "messages"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_broken_requests_are_named(scripted: Front, body: dict[str, Any], param: str) -> None:
    """C052."""
    for stream in (False, True):
        check_error(scripted.chat(**body, stream=stream), 400, param=param)


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object"}, {"properties": {}}, nested(20)], ids=str)
def test_functions_without_arguments(scripted: Front, parameters: object) -> None:  # C052
    scripted.engine.script = hermes([("f", {})])
    answer = whole(scripted, tools=function(parameters=parameters))
    assert answer["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "f", "arguments": {oops}</tool_call>',
        '<tool_call>{"name":"f"',
        '<tool_call>{"name": "nope", "arguments": {}}</tool_call>',
        '<tool_call><tool_call>{"name": "f", "arguments": [1]}</tool_call></tool_call>',
    ],
)
def test_malformed_calls_are_content(scripted: Front, text: str) -> None:
    """C054: nothing is lost, and nobody is told to run a call that is none."""
    scripted.engine.script = text
    assert essence(whole(scripted)) == (text, "", [], "stop")
    stream = streamed(scripted)
    assert stream["message"]["content"] == text
    assert stream["finish_reason"] == "stop"


def test_a_call_that_the_limit_cuts_is_content(scripted: Front) -> None:  # C054
    scripted.engine.script = hermes([("f", {"a": "1"}), ("f", {"a": "a long story"})])
    for choice in (whole(scripted, max_tokens=110), streamed(scripted, max_tokens=110)):
        assert choice["finish_reason"] == "length"
        assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": "1"}'}
        assert scripted.engine.script[:110].endswith(choice["message"]["content"])


def test_models_that_never_see_tools_are_not_asked_to_call_them(front: Front) -> None:
    for choice in ("auto", "required", NAMED):
        check_error(front.chat(tools=TOOLS, tool_choice=choice), 400, param="tools")
    assert front.chat(tools=TOOLS, tool_choice="none").status_code == 200


def test_parsers_can_be_chosen_and_turned_off(make_front: FrontFactory) -> None:
    template = template_with("<tool_call> <think>")
    front = make_front(template=template, tool_call_parser="none", reasoning_parser="none")
    front.engine.script = f"<think>hm</think>{CALL}"
    assert whole(front)["message"] == {"role": "assistant", "content": front.engine.script}
    check_error(front.chat(tools=TOOLS, tool_choice="required"), 400, param="tool_choice")
    front = make_front(template=template, tool_call_parser="llama3_json")
    front.engine.script = '<think>hm</think>{"name": "f", "parameters": {"a": "1"}}'
    assert essence(whole(front)) == ("", "hm", [("f", '{"a": "1"}')], "tool_calls")


def test_tools_and_history_reach_the_template(scripted: Front) -> None:
    """C053: /tokenize shows what a chat with the same fields would read."""
    history = [
        *USER,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", **NAMED, "function": {"name": "f", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "21"}]},
    ]
    ids = scripted.client.post("/tokenize", json={"messages": history, "tools": TOOLS}).json()["tokens"]
    text = scripted.engine.tokenizer.decode(ids, skip_special_tokens=False)
    assert '[f({"a": 1})]' in text
    assert "21<|im_end|>" in text
    assert json.dumps(TOOLS) in text
    whole(scripted, messages=history)
    assert scripted.engine.seen[-1]["prompt"] == ids


def test_the_official_client_adds_up_streams(scripted: Front) -> None:
    """C048, C049: openai-python's own accumulation, and its parsed tools."""
    scripted.engine.script = f"Let me see. {hermes([('f', TRICKY), ('g', {}), ('f', {'a': '2'})])}"
    with openai.OpenAI(base_url=f"{scripted.base_url}/v1", api_key="none", max_retries=0) as client:
        fixed = {"model": "fake", "messages": USER, "tools": TOOLS, "max_tokens": 400}
        answer = client.chat.completions.create(**fixed).choices[0]
        with client.chat.completions.stream(**fixed) as stream:
            names = [e.name for e in stream if e.type == "tool_calls.function.arguments.done"]
            final = stream.get_final_completion().choices[0]
    assert names == ["f", "g", "f"]
    assert final.finish_reason == answer.finish_reason == "tool_calls"
    assert final.message.content == answer.message.content == "Let me see."
    for one, other in zip(final.message.tool_calls, answer.message.tool_calls, strict=True):
        assert one.function.name == other.function.name
        assert one.function.arguments == other.function.arguments
    assert json.loads(answer.message.tool_calls[0].function.arguments) == TRICKY


THOUGHTS = "<think>\nhm, é🦜\n</think>\n\n"


@pytest.mark.parametrize("stride", [1, 3, 1000])
def test_thoughts_text_and_calls(make_front: FrontFactory, stride: int) -> None:
    front = make_front(template=template_with("<tool_call> <think>"))
    front.engine.stride = stride
    front.engine.script = f"{THOUGHTS}Let me see.\n{CALL}"
    answer = whole(front)
    assert (
        essence(answer) == ("Let me see.", "hm, é🦜", [("f", '{"a": "1"}')], "tool_calls") == essence(streamed(front))
    )
    assert answer["message"]["reasoning_content"] == answer["message"]["reasoning"]
    usage = front.chat(tools=TOOLS, max_tokens=400).json()["usage"]
    # One token a byte: from the first tag to the last.
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len(THOUGHTS.strip().encode())
    raw = front.chat(tools=TOOLS, max_tokens=400, stream=True, stream_options={"include_usage": True}).content
    assert check_stream(raw, chat=True).usage == usage
    hidden = front.chat(max_tokens=400, include_reasoning=False).json()
    assert hidden["choices"][0]["message"] == {"role": "assistant", "content": f"Let me see.\n{CALL}"}
    assert hidden["usage"]["completion_tokens_details"] == usage["completion_tokens_details"]
    assert essence(streamed(front, include_reasoning=False))[1] == ""


def test_thoughts_that_the_template_opens(make_front: FrontFactory) -> None:
    opening = "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
    front = make_front(template=template_with("<tool_call>", opening))
    front.engine.script = "hm\n</think>\n\nYes."
    assert essence(whole(front)) == ("Yes.", "hm", [], "stop") == essence(streamed(front))
    assert whole(front, max_tokens=2)["message"]["content"] is None
    front.engine.script = "Yes, <think> is a tag."
    for off in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
        assert essence(whole(front, **off)) == (front.engine.script, "", [], "stop") == essence(streamed(front, **off))


def test_thoughts_of_history_reach_the_template(scripted: Front) -> None:
    messages = [*USER, {"role": "assistant", "content": "Yes.", "reasoning": "because"}, *USER]
    whole(scripted, messages=messages)
    assert "becauseYes." in scripted.engine.tokenizer.decode(scripted.engine.seen[-1]["prompt"])


def test_token_ids_of_a_stream_are_all_there(scripted: Front) -> None:
    """Tokens whose text is held back or read as markup come with the next chunk."""
    scripted.engine.script = f"Let me see. {CALL}"
    body = {"tools": TOOLS, "max_tokens": 400, "return_token_ids": True}
    answer = scripted.chat(**body).json()["choices"][0]
    stream = check_stream(scripted.chat(**body, stream=True).content, chat=True)
    assert stream.choices[0].token_ids == answer["token_ids"]


def test_legacy_functions_are_pointed_to_tools(scripted: Front) -> None:
    error = check_error(scripted.chat(functions=[{"name": "f"}]), 400, param="functions")
    assert "tools" in error["message"]
    error = check_error(scripted.chat(function_call={"name": "f"}), 400, param="function_call")
    assert "tool_choice" in error["message"]


def test_a_budget_needs_thoughts_that_a_marker_ends(scripted: Front, make_front: FrontFactory) -> None:
    check_error(scripted.chat(thinking_token_budget=5), 400, param="thinking_token_budget")
    check_error(scripted.chat(thinking_token_budget=-1), 400, param="thinking_token_budget")
    granite = make_front(template=template_with("Here is my thought process:"))
    check_error(granite.chat(thinking_token_budget=5), 400, param="thinking_token_budget")


LEAVES = (
    st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from(["f", "g", "function", "object", "auto", "", "é"])
)
THINGS = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
)
FUNCTIONS = st.fixed_dictionaries(
    {"name": st.sampled_from(["f", "g", "a b"]) | THINGS},
    optional={
        "parameters": THINGS | st.fixed_dictionaries({"properties": THINGS}),
        "strict": THINGS,
        "description": THINGS,
    },
)
ENTRIES = st.fixed_dictionaries({"type": st.just("function") | LEAVES, "function": FUNCTIONS | THINGS}) | THINGS
CALLED = (
    st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": LEAVES, "arguments": THINGS | st.text()})})
    | THINGS
)
ODD = st.fixed_dictionaries(
    {},
    optional={
        "tools": st.lists(ENTRIES, max_size=3) | THINGS,
        "tool_choice": st.sampled_from(["none", "auto", "required", NAMED]) | ENTRIES | THINGS,
        "parallel_tool_calls": LEAVES,
        "thinking_token_budget": LEAVES,
        "stream": st.booleans(),
        "messages": st.lists(
            st.fixed_dictionaries(
                {"role": st.sampled_from(["user", "assistant", "tool"])},
                optional={
                    "content": THINGS,
                    "tool_calls": st.lists(CALLED, max_size=2) | THINGS,
                    "tool_call_id": LEAVES,
                },
            ),
            max_size=3,
        ),
    },
)


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(body=ODD)
def test_no_request_with_tools_is_answered_with_a_5xx(scripted: Front, body: dict[str, Any]) -> None:  # C052, C096
    scripted.engine.script = "<think>x</think><tool_call>"
    response = scripted.chat(max_tokens=40, **body)
    assert response.status_code in (200, 400, 422), response.text
    if response.status_code != 200:
        check_error(response, response.status_code)
