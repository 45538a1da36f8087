"""The fields that ask for structured output: what reaches the engine, and what is refused before it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pagedserve.sampling_params import StructuredOutput
from tests.api.conftest import Front, FrontFactory
from tests.helpers.streams import check_error
from tests.helpers.tool_formats import template_with

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}, "required": ["b"]}
TAG = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}
WRAPPED = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
CLOSED = {**SCHEMA, "additionalProperties": False}

ASKED: list[tuple[dict[str, Any], StructuredOutput | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, StructuredOutput.json_object()),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, StructuredOutput.json_schema(SCHEMA)),
    ({"response_format": WRAPPED}, StructuredOutput.json_schema(SCHEMA)),
    ({"response_format": {"type": "structural_tag", **TAG}}, StructuredOutput.structural_tag(TAG)),
    ({"structured_outputs": {}}, None),
    ({"structured_outputs": {"json": SCHEMA}}, StructuredOutput.json_schema(SCHEMA)),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, StructuredOutput.json_schema(json.dumps(SCHEMA))),
    ({"structured_outputs": {"json_object": True}}, StructuredOutput.json_object()),
    ({"structured_outputs": {"regex": "a+"}}, StructuredOutput.regex("a+")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, StructuredOutput.choice(["a", "b"])),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, StructuredOutput.grammar('start: "a"')),
    ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, StructuredOutput.structural_tag(json.dumps(TAG))),
    (
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        StructuredOutput.json_schema(SCHEMA, whitespace=""),
    ),
    (
        {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?", "disable_additional_properties": True}},
        StructuredOutput.json_schema(CLOSED, whitespace=" ?"),
    ),
    ({"guided_json": SCHEMA, "guided_decoding_backend": "outlines"}, StructuredOutput.json_schema(SCHEMA)),
    ({"guided_json": SCHEMA, "guided_whitespace_pattern": ""}, StructuredOutput.json_schema(SCHEMA, whitespace="")),
    ({"guided_regex": "a+"}, StructuredOutput.regex("a+")),
    ({"guided_choice": ["a"]}, StructuredOutput.choice(["a"])),
    ({"guided_grammar": 'root ::= "a"'}, StructuredOutput.grammar('root ::= "a"')),
]


@pytest.mark.parametrize(("fields", "wanted"), ASKED)
def test_what_the_engine_is_asked_for(front: Front, fields: dict[str, Any], wanted: StructuredOutput | None) -> None:
    for response in (front.chat(**fields), front.complete(**fields)):
        assert response.status_code == 200, response.text
        assert "x-pagedserve-warning" not in response.headers
        assert front.engine.seen[-1]["params"].structured_output == wanted


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "json_schema"),
        ({"response_format": {}}, "response_format", "type"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "object"),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, "response_format", "'schema'"),
        ({"response_format": {"type": "json_schema", "json_schema": SCHEMA}}, "response_format", "'properties'"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, "response_format", "required"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": "string"}}},
            "response_format",
            "not JSON",
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}}, "response_format", "schema"),
        ({"response_format": "json"}, "response_format", "dictionary"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs", "json and regex"),
        ({"structured_outputs": {"disable_any_whitespace": True}}, "structured_outputs", "none of them"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs.xml", "xml"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", "empty"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice.0", "string"),
        ({"structured_outputs": {"grammar": ""}}, "structured_outputs", "empty"),
        ({"guided_json": "{"}, "guided_json", "not JSON"),
        ({"guided_regex": ""}, "guided_regex", "empty"),
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex", "contradict"),
        ({"response_format": WRAPPED, "structured_outputs": {"regex": "a"}}, "structured_outputs", "contradict"),
    ],
)
def test_what_contradicts_itself_is_refused(
    front: Front, fields: dict[str, Any], param: str, word: str
) -> None:  # C055
    for response in (front.chat(**fields), front.complete(**fields)):
        error = check_error(response, 400, param=param)
        assert word in error["message"]
    assert front.chat().status_code == 200


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


def asked(front: Front, **fields: Any) -> StructuredOutput:
    response = front.chat(response_format=WRAPPED, **fields)
    assert response.status_code == 200, response.text
    output = front.engine.seen[-1]["params"].structured_output
    assert isinstance(output, StructuredOutput)
    assert (output.kind, output.value) == ("json_schema", StructuredOutput.json_schema(SCHEMA).value)
    return output


def test_the_schema_is_for_what_is_said_after_thoughts(make_front: FrontFactory) -> None:
    opening = "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
    front = make_front(template=template_with("", opening))
    assert asked(front).after_text == "</think>"
    output = asked(front, chat_template_kwargs={"enable_thinking": False})
    assert (output.after_text, output.thoughts) == (None, None)
    # Where the model begins its thoughts itself, it may also do without.
    front = make_front(template=template_with("<think>"))
    output = asked(front)
    assert (output.after_text, output.thoughts) == (None, ("<think>", "</think>"))
    front = make_front(template=template_with("<|channel|>analysis"))
    assert asked(front).after_text == "<|channel|>final<|message|>"


def test_tools_that_may_be_called_stay_possible(make_front: FrontFactory) -> None:
    front = make_front(template=template_with("<tool_call>"))
    output = asked(front, tools=TOOLS)
    assert output.alternative is not None
    assert output.alternative.startswith("start:") and "<tool_call>" in output.alternative
    assert asked(front, tools=TOOLS, tool_choice="none").alternative is None
    # A call without a marker looks like the answer.
    front = make_front(template=template_with("<|python_tag|>"), tool_call_parser="llama3_json")
    error = check_error(front.chat(response_format=WRAPPED, tools=TOOLS), 400, param="response_format")
    assert "tools" in error["message"]
