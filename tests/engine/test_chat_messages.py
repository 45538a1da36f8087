"""Messages as clients send them: what becomes of them, and what is refused (C053, C066, C068)."""

from __future__ import annotations

import json

import pytest

from pagedserve.errors import RequestError
from tests.helpers.byte_tokenizer import CHATML
from tests.helpers.chat_templates import (
    CALL,
    PARTS,
    PARTS_ONLY,
    TOOL,
    TOOLS,
    template,
    transformers_render,
)

TWO_PARTS = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]


@pytest.mark.parametrize("absent", [{"content": None}, {"content": ""}, {"content": []}, {}])
def test_c053_tool_history(absent):
    question = {"role": "user", "content": "1+?"}
    for result in ("21", [{"type": "text", "text": "21"}]):
        messages = [
            question,
            {"role": "assistant", "tool_calls": [CALL], **absent},
            {"role": "tool", "tool_call_id": "c1", "content": result},
        ]
        parsed = {**CALL, "function": {"name": "add", "arguments": {"a": 1, "b": "é"}}}
        normalized = [
            question,
            {"role": "assistant", "content": "", "tool_calls": [parsed]},
            {"role": "tool", "tool_call_id": "c1", "content": "21"},
        ]
        text = template(TOOLS).render(messages, tools=[TOOL])
        assert text == transformers_render(TOOLS, normalized, tools=[TOOL])
        assert '[add({"a": 1, "b": "é"})]' in text and "<result>21</result>" in text


def test_c053_empty_tool_calls_are_none():
    source = "{{ messages[0].tool_calls is defined }} {{ messages[0].content }}"
    for calls in ([], None):
        message = {"role": "assistant", "content": "x", "tool_calls": calls}
        assert template(source).render([message]) == "False x"


@pytest.mark.parametrize("arguments", ["{broken", "[1]", '"text"', "1", 5, "[" * 100_000])
def test_c053_invalid_arguments(arguments):
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    with pytest.raises(RequestError, match=r"messages\[0\]\.tool_calls\[0\]\.function\.arguments"):
        template(TOOLS).render([{"role": "assistant", "tool_calls": [call]}])


@pytest.mark.parametrize("arguments", ["", " ", None, "{}", {}])
def test_c053_no_arguments(arguments):
    call = {"function": {"name": "f", "arguments": arguments}}
    assert "[f({})]" in template(TOOLS).render([{"role": "assistant", "tool_calls": [call]}])


def test_messages_of_the_caller_stay_as_they_are():
    messages = [
        {"role": "developer", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
    ]
    before = json.dumps(messages)
    template(TOOLS).render(messages)
    template(PARTS).render([{"role": "assistant", "content": [{"type": "text", "text": "go"}]}])
    assert json.dumps(messages) == before


@pytest.mark.parametrize("role", ["user", "system", "assistant", "tool"])
def test_c066_parts(role):
    messages = [{"role": role, "content": TWO_PARTS, "tool_call_id": "c1"}]
    assert "A\nB" in template("{{ messages[0].content }}").render(messages)
    assert template(PARTS).render(messages) == f"<{role}>A|B|" == transformers_render(PARTS, messages)
    assert template(PARTS_ONLY).render(messages) == "<A><B>" == transformers_render(PARTS_ONLY, messages)


def test_c066_text_for_a_template_that_only_knows_parts():
    assert template(PARTS_ONLY).render([{"role": "user", "content": "text"}]) == "<text>"
    assert template(PARTS_ONLY).render([{"role": "user", "content": []}]) == ""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}], "reads text only"),
        ([*TWO_PARTS, {"type": "input_image", "image_url": "file:///etc/passwd"}], r"content\[2\].*reads text only"),
        ([{"type": "hologram", "text": "x"}], "'hologram'; known: text"),
        ([{"type": "text"}], "has no text"),
        ([{"type": "text", "text": 5}], "has no text"),
        ([{"text": "x"}], "type is missing"),
        ([{"type": ["text"], "text": "x"}], "known: text"),
        ([""], "must be an object"),
        ([None], "must be an object"),
        (5, "must be text or a list"),
        ({"type": "text"}, "must be text or a list"),
        (True, "must be text or a list"),
    ],
)
def test_c066_bad_parts(content, message):
    with pytest.raises(RequestError, match=message) as caught:
        template(CHATML).render([{"role": "user", "content": content}])
    assert caught.value.param == "messages" and "messages[0].content" in str(caught.value)


def test_c066_other_names_of_text_parts():
    parts = [
        {"type": "input_text", "text": "A"},
        {"type": "output_text", "text": "B"},
        {"type": "refusal", "refusal": "C"},
    ]
    assert template("{{ messages[0].content }}").render([{"role": "user", "content": parts}]) == "A\nB\nC"


@pytest.mark.parametrize(
    "messages",
    [
        *([], None, {}, "hi", [None], [[]], ["hi"], 5),
        *([{"role": "user"}], [{"content": "x"}], [{"role": "wizard", "content": "x"}], [{"role": 5, "content": "x"}]),
        *([{"role": ["user"], "content": "x"}], [{"role": "user", "content": None}], [{"role": "assistant"}]),
        *([{"role": "assistant", "tool_calls": "x"}], [{"role": "assistant", "tool_calls": [5]}]),
        [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}],
    ],
)
def test_c068_odd_messages(messages):
    with pytest.raises(RequestError) as caught:
        template(CHATML).render(messages)
    assert caught.value.param == "messages" and caught.value.status_code == 400
    assert len(str(caught.value)) < 300


def test_c068_developer_role():
    message = [{"role": "developer", "content": "x"}]
    assert template("{{ messages[0].role }}").render(message) == "system"
    assert template("{# developer #}{{ messages[0].role }}").render(message) == "developer"


def test_c068_many_messages():
    messages = [{"role": "user", "content": f"message {i}"} for i in range(2000)]
    assert template(CHATML).render(messages) == transformers_render(CHATML, messages)


def test_earlier_reasoning_is_under_every_name():
    source = "{{ messages[0].reasoning_content }}/{{ messages[0].thinking }}"
    for name in ("reasoning_content", "reasoning", "thinking"):
        messages = [{"role": "assistant", "content": "x", name: "hm"}]
        assert template(source).render(messages) == "hm/hm" == transformers_render(source, messages)


@pytest.mark.parametrize(
    ("expression", "shown"),
    [
        ("{{ '<' + c.function.arguments + '>' }}", '<{"a": "é"}>'),
        ("{{ '<' ~ c['function']['arguments'] ~ '>' }}", '<{"a": "é"}>'),
        ("<{{ c.function.arguments | tojson }}>", '<{"a": "é"}>'),
        ("<{% for k, v in c.function.arguments.items() %}{{ k + '=' + v }}{% endfor %}>", "<a=é>"),
        (
            "<{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}>",
            '<{"a": "é"}>',
        ),
        ("{{ '<' + c.function.arguments + '>' if c.function.arguments is string else 'mapping' }}", "mapping"),
        ("<{{ c.function | tojson }}>", '<{"name": "f", "arguments": {"a": "é"}}>'),
    ],
)
@pytest.mark.parametrize("arguments", ['{"a": "é"}', {"a": "é"}], ids=["text", "mapping"])
def test_c053_arguments_are_what_the_template_works_with(expression, shown, arguments):
    """DeepSeek's templates join arguments with text, which only text can be; others iterate over them."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    source = "{% for c in messages[0].tool_calls %}" + expression + "{% endfor %}"
    assert template(source).render([{"role": "assistant", "tool_calls": [call]}]) == shown
