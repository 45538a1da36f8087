"""Parsers of tool calls: every format, any division of the text, texts that only look like calls."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedserve.api.parsed_events import Content, ToolCallAbort, ToolCallArguments, ToolCallBegin, ToolCallEnd
from pagedserve.api.parsed_output import ParsedMessage
from pagedserve.api.tool_parsers import TOOL_PARSERS
from tests.api.test_text_machine import CUTS, cut
from tests.helpers.tool_formats import FORMATS, SCRAPS, Format

ANY = {"type": "object", "properties": {name: {} for name in "abcn"}}
TYPED = {
    "type": "object",
    "properties": {
        "a": {"type": "string"},
        "b": {"type": "array"},
        "c": {"type": ["object", "null"]},
        "n": {"type": "number"},
    },
}
TOOLS = {"f": TYPED, "g": ANY, "get_weather": TYPED}
# A text that is a value of a free parameter may read as something else there, so strings are declared.
STRINGS = st.one_of(
    st.sampled_from(["", "x", 'x"y\\n{}', "汉🦜", "it's", "a\nb", "5", "null", "</tool_call>", "}]", ")", "<escape"]),
    st.text(alphabet="ab \"'\\{}[](),:<>é🦜\n1", max_size=12),
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.sampled_from([0.5, -1e-3]) | STRINGS,
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.sampled_from("xyz"), children, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "a": STRINGS,
        "b": st.lists(VALUES, max_size=3),
        "c": st.none() | st.dictionaries(st.sampled_from("xyz"), VALUES, max_size=3),
        "n": st.integers(-9, 9) | st.just(0.25),
    },
)
CALLS = st.lists(st.tuples(st.sampled_from(["f", "get_weather"]), ARGUMENTS), min_size=1, max_size=3)


def parsed(name: str, pieces: Sequence[str]) -> tuple[ParsedMessage, list[Any]]:
    """The message of a text in pieces, and its events without ids, neighbouring texts joined."""
    parser = TOOL_PARSERS.resolve(name)(TOOLS)
    message, events = ParsedMessage(), []
    for event in [e for piece in pieces for e in parser.feed(piece)] + parser.finish():
        message.add(event)
        shown = event
        if isinstance(event, ToolCallBegin):
            assert event.call_id
            shown = ToolCallBegin(event.index, "", event.name)
        if events and type(shown) is type(events[-1]) and isinstance(shown, Content | ToolCallArguments):
            events[-1] = type(shown)(
                *([shown.index] if isinstance(shown, ToolCallArguments) else []), events[-1].text + shown.text
            )
        else:
            events.append(shown)
    return message, events


def calls_of(message: ParsedMessage) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in message.tool_calls]


def expressible(form: Format, calls: list[tuple[str, dict[str, Any]]]) -> bool:
    """False for strings that the format's own markup would end."""
    return form.free_strings or not any(
        mark in json.dumps(calls, ensure_ascii=False) for mark in ("<escape", "</", '<|"')
    )


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=25)
@given(
    calls=CALLS,
    before=st.sampled_from(["", "Let me see. ", "é🦜\n\n"]),
    after=st.sampled_from(["", "\n", " Done."]),
    places=CUTS,
)
def test_any_division_gives_the_calls_that_were_written(
    name: str, calls: list[tuple[str, dict[str, Any]]], before: str, after: str, places: list[int]
) -> None:
    """C048, C049."""
    form = FORMATS[name]
    if form.leads:
        before = ""
    if not expressible(form, calls):
        return
    text = before + form.write(calls) + after
    whole, events = parsed(form.parser, [text])
    assert calls_of(whole) == calls
    assert whole.content == before.rstrip() + (after if after.strip() else "")
    for pieces in (list(text), cut(text, places)):
        message, same = parsed(form.parser, pieces)
        assert same == events
        assert calls_of(message) == calls
    begun = [event for event in events if isinstance(event, ToolCallBegin)]
    assert [event.index for event in begun] == list(range(len(calls)))


@pytest.mark.parametrize("name", TOOL_PARSERS)
@settings(max_examples=25)
@given(scraps=st.lists(st.sampled_from(SCRAPS), max_size=12), places=CUTS)
def test_any_division_of_any_text_gives_the_same(name: str, scraps: list[str], places: list[int]) -> None:
    """C054: and a text without a complete call is content to the last character."""
    text = "".join(scraps)
    whole, events = parsed(name, [text])
    assert parsed(name, list(text))[1] == parsed(name, cut(text, places))[1] == events
    for call in whole.tool_calls:
        assert isinstance(json.loads(call.arguments), dict)
    if not whole.tool_calls:
        assert whole.content == text
    # What was begun has an end, of one kind or the other.
    begun = [event.index for event in events if isinstance(event, ToolCallBegin)]
    ended = [event.index for event in events if isinstance(event, ToolCallEnd | ToolCallAbort)]
    assert begun == ended == list(range(len(begun)))


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ('<tool_call>{"name": "f", "arguments": {oops}</tool_call>', None),
        ('<tool_call>{"name":"f"', None),
        ('<tool_call>{"name": "f", "arguments": {"a": "x', None),
        ('<tool_call>{"name": "unknown", "arguments": {}}</tool_call>', None),
        ('<tool_call><tool_call>{"name": "f", "arguments": [1]}</tool_call></tool_call>', None),
        ('<tool_call>{"name": "f", "arguments": {}, "mood": 1}</tool_call>', None),
        ('<tool_call>{"name": 5, "arguments": {}}</tool_call>', None),
        ("<tool_call>{}</tool_call>", None),
        ("<tool_call>[]</tool_call>", None),
        ("a </tool_call> b", None),
        ("a <tool_cal", None),
        (" \n ", None),
    ],
)
def test_malformed_calls_come_back_as_text(text: str, content: str | None) -> None:  # C054
    message, _ = parsed("hermes", [text])
    assert message.tool_calls == []
    assert message.content == (text if content is None else content)
    assert parsed("hermes", list(text))[0].content == message.content


@pytest.mark.parametrize("end", ["", "\n", "\n</tool", "\n</tool_call>"])
def test_a_complete_call_that_is_cut_at_its_end_is_a_call(end: str) -> None:
    message, _ = parsed("hermes", ['<tool_call>{"name": "f", "arguments": {}}' + end])
    assert calls_of(message) == [("f", {})]
    assert message.content == ""


def test_a_broken_call_does_not_hide_the_next() -> None:  # C054
    good = FORMATS["hermes"].write([("f", {"a": "1"})])
    message, _ = parsed("hermes", ['<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call> ' + good])
    assert calls_of(message) == [("f", {"a": "1"})]
    assert message.content == '<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"arguments": {"a": "x"}, "name": "f"}', {"a": "x"}),
        ('{"name": "f"}', {}),
        ('{"name": "f", "arguments": null}', {}),
        ('{"name": "f", "arguments": "{\\"a\\": \\"x\\"}"}', {"a": "x"}),
        ('{"name": "f", "arguments": ""}', {}),
        ('{"id": "1", "type": "function", "name": "f", "parameters": {"a": "x\ty"}}', {"a": "x\ty"}),
    ],
)
def test_spellings_of_one_json_call(text: str, arguments: dict[str, Any]) -> None:  # C048
    for pieces in ([f"<tool_call>{text}</tool_call>"], list(f"<tool_call>{text}")):
        assert calls_of(parsed("hermes", pieces)[0]) == [("f", arguments)]


def test_arguments_come_while_they_are_written() -> None:
    parser = TOOL_PARSERS.resolve("hermes")(TOOLS)
    assert [type(e) for e in parser.feed('<tool_call>{"name": "f", "arguments": {"a": "Lo')] == [
        ToolCallBegin,
        ToolCallArguments,
    ]
    assert parser.feed("ng text") == [ToolCallArguments(0, "ng text")]
    parser = TOOL_PARSERS.resolve("qwen3_coder")(TOOLS)
    parser.feed("<tool_call>\n<function=f>\n<parameter=a>\n")
    assert parser.feed('print("x")') == [ToolCallArguments(0, 'print(\\"x\\")')]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "integer"}, "5", 5),
        ({"type": "number"}, "5", 5),
        ({"type": "boolean"}, "True", True),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "5", "5"),
        ({"anyOf": [{"type": "string"}, {"type": "number"}]}, "5", 5),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"type": "array"}, "['a', 1]", ["a", 1]),
        ({"type": "object"}, '{"a": [1]}', {"a": [1]}),
        ({"type": "integer"}, "many", "many"),
        ({}, "many", "many"),
        ({}, "[1]", [1]),
        ({}, "NaN", "NaN"),
    ],
)
@pytest.mark.parametrize("name", ["qwen3_coder", "glm45"])
def test_plain_values_are_read_by_their_schema(name: str, schema: dict[str, Any], text: str, value: object) -> None:
    tools = {"f": {"type": "object", "properties": {"a": schema}}}
    parser, message = TOOL_PARSERS.resolve(name)(tools), ParsedMessage()
    for event in parser.feed(FORMATS[name].write([("f", {"a": text})])) + parser.finish():
        message.add(event)
    assert calls_of(message) == [("f", {"a": value})]


def test_calls_amid_text_are_text_where_calls_must_lead() -> None:
    for name in ("llama3_json", "pythonic"):
        text = "Look: " + FORMATS[name].write([("f", {})])
        message, _ = parsed(name, [text])
        assert (message.content, message.tool_calls) == (text, [])


def test_gemma_prints_and_lists() -> None:
    for text in ("```tool_code\nprint(f(a='x'))\n```", "```tool_code\n[f(a='x')]\n```", "```tool_code\nf(a='x')"):
        assert calls_of(parsed("gemma3", [text])[0]) == [("f", {"a": "x"})]


def test_mistral_ids_are_what_its_templates_take() -> None:
    parser = TOOL_PARSERS.resolve("mistral")(TOOLS)
    events = parser.feed(FORMATS["mistral"].write([("f", {}), ("g", {})]))
    ids = [event.call_id for event in events if isinstance(event, ToolCallBegin)]
    assert len(set(ids)) == 2
    assert all(len(i) == 9 and i.isalnum() for i in ids)


@pytest.mark.parametrize("name", TOOL_PARSERS)
@pytest.mark.parametrize("scrap", ["<tool_call>", '{"name":', "[[[[", "[f(a=", "<function=f><parameter=a>", "<escape>"])
def test_work_grows_with_the_text_and_not_faster(name: str, scrap: str) -> None:
    """C111: counted in function calls of the interpreter, which no other process disturbs."""

    def work(length: int, step: int) -> int:
        text = (scrap * length)[:length]
        count = 0

        def tick(*_: object) -> None:
            nonlocal count
            count += 1

        parser = TOOL_PARSERS.resolve(name)(TOOLS)
        sys.setprofile(tick)
        try:
            for start in range(0, length, step):
                parser.feed(text[start : start + step])
            parser.finish()
        finally:
            sys.setprofile(None)
        return count

    for step in (1, 10_000):
        assert work(4000, step) < 2.5 * work(2000, step) + 100
