"""What each kind of structured output admits, over a vocabulary of single bytes and a few special tokens."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from pagedserve.engine.grammars import MAX_NESTING, to_lark
from pagedserve.errors import RequestError
from pagedserve.sampling_params import StructuredOutput

SPECIAL = {"<call>": 256, "</call>": 257, "<think>": 258, "</think>": 259}
END = 260


class Bytes:
    bos_token_id = None
    eos_token_id = END
    tokens = [*(bytes([i]) for i in range(256)), *(text.encode() for text in SPECIAL), b"<end>"]  # noqa: RUF012
    special_token_ids = [*SPECIAL.values(), END]  # noqa: RUF012

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


TOKENIZER = LLTokenizer(TokenizerWrapper(Bytes()), eos_token=[END])
PERSON = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "é"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def ids_of(text: str) -> list[int]:
    """Special tokens where their text stands, bytes elsewhere."""
    pieces = re.split("|".join(map(re.escape, SPECIAL)), text)
    markers = re.findall("|".join(map(re.escape, SPECIAL)), text)
    ids = list(pieces[0].encode())
    for marker, piece in zip(markers, pieces[1:], strict=True):
        ids += [SPECIAL[marker], *piece.encode()]
    return ids


def admits(output: StructuredOutput, text: str) -> bool:
    """Whether the whole text is admitted."""
    matcher = LLMatcher(TOKENIZER, to_lark(output, SPECIAL), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = ids_of(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("output", "texts", "others"),
    [
        (StructuredOutput.json_object(), ["{}", '{"a": [1, {"b": null}]}'], ["[]", "{} ", "x", '{"a"}']),
        (StructuredOutput.json_schema(PERSON), ['{"a":1,"b":"x"}', '{\n  "a": -7,\n  "b": "é"\n}'], ['{"a":1}', "{}"]),
        (StructuredOutput.json_schema(True), ["1", "null", '"x"'], ["", "nul"]),
        (StructuredOutput.regex(r"\d{3}-[äö]+"), ["123-ä", "000-öä"], ["123-", "12-ä", "123-ä "]),
        (StructuredOutput.regex(r"^a/b\nc$"), ["a/b\nc"], ["a/b c"]),
        (StructuredOutput.regex("[🌑-🌘]{3}"), ["🌑🌒🌘"], ["🌑🌒", "🌑🌒x"]),
        (
            StructuredOutput.choice(["🦊", 'a"b', "a\\b", "x\ny", "x"]),
            ["🦊", 'a"b', "a\\b", "x\ny", "x"],
            ["", "a", "y"],
        ),
        (StructuredOutput.grammar('start: "a" b+\nb: /[0-9]/ ","'), ["a1,", "a1,2,"], ["a", "a1"]),
        (StructuredOutput.grammar('root ::= "a" b+\nb ::= [0-9] ","'), ["a1,", "a1,2,"], ["a", "a1"]),
        (StructuredOutput.choice(["x"], prefix="<call>[", suffix="]</call>"), ["<call>[x]</call>"], ["x", "[x]"]),
        (StructuredOutput.grammar('start: "x"', prefix="(", suffix=")"), ["(x)"], ["x"]),
        (
            StructuredOutput.choice(["x"], thoughts=("<think>", "</think>")),
            ["x", "<think>hm</think>\n\nx"],
            ["<think>x"],
        ),
        (StructuredOutput.choice(["x"], thoughts=("((", "))")), ["x", "((hm)) x"], ["(x", "((x"]),
        (StructuredOutput.choice(["x"], alternative='start: r0\nr0: "<c>" /[a-z]+/'), ["x", "<c>abc"], ["c", "x<c>a"]),
    ],
)
def test_what_is_admitted(output: StructuredOutput, texts: list[str], others: list[str]) -> None:  # C059
    for text in texts:
        assert admits(output, text), text
    for text in others:
        assert not admits(output, text), text


def test_forced_tags() -> None:
    tags = [{"begin": f'<call>{{"name": "{f}", "args": ', "schema": PERSON, "end": "}</call>"} for f in "fg"]
    call = '<call>{"name": "f", "args": {"a":1,"b":"x"}}</call>'
    some = StructuredOutput.tags(tags, separator="\n", max=2)
    assert admits(some, call)
    assert admits(some, call + "\n" + call.replace('"f"', '"g"'))
    assert not admits(some, call + call)
    assert not admits(some, "\n".join([call] * 3))
    assert not admits(some, call.replace('"f"', '"h"'))
    assert admits(StructuredOutput.tags(tags), call * 5)
    assert not admits(StructuredOutput.tags(tags, max=1), call * 2)


@pytest.mark.parametrize(("begin", "end"), [("<f=", "</f>"), ("<call>", "</call>")])
def test_structural_tags_bind_what_follows_a_trigger(begin: str, end: str) -> None:
    structures = [
        {"begin": begin + "a>", "schema": {"type": "integer"}, "end": end},
        {"begin": begin + "b>", "schema": {"type": "boolean"}, "end": end},
    ]
    output = StructuredOutput.structural_tag({"structures": structures, "triggers": [begin]})
    assert admits(output, f"so {begin}a>12{end} and {begin}b>true{end}.")
    assert admits(output, "no tag at all")
    assert not admits(output, f"so {begin}a>x")
    assert not admits(output, f"so {begin}c>1{end}")
    assert not admits(output, f"so {begin}a>true{end}")


@pytest.mark.parametrize(
    "output",
    [
        StructuredOutput.json_schema(PERSON),
        StructuredOutput.json_object(),
        StructuredOutput.grammar("start: %json " + json.dumps(PERSON)),
        StructuredOutput.json_schema({**PERSON, "x-guidance": {"whitespace_pattern": "[ \\n]*", "lenient": True}}),
        StructuredOutput.tags([{"begin": "", "schema": PERSON, "end": ""}]),
    ],
    ids=lambda output: output.kind,
)
def test_white_space_between_json_tokens_is_bounded(output: StructuredOutput) -> None:  # C056
    text = '{"a":1,"b":"x"}'
    assert admits(output, text)
    assert admits(output, text.replace(",", ", ").replace(":", ": "))
    assert admits(output, text.replace(",", ",\n" + " " * 16))
    for gap in ("  ", "\n\n", "\t\t", "\n" + " " * 17, "\n \n"):
        assert not admits(output, text.replace(",", "," + gap)), gap
    assert not admits(output, "\n" + text)


def test_white_space_as_the_client_wants_it() -> None:
    none = StructuredOutput.json_schema(PERSON, whitespace="")
    assert admits(none, '{"a":1,"b":"x"}')
    assert not admits(none, '{"a": 1,"b":"x"}')
    tabs = StructuredOutput.json_schema(PERSON, whitespace="\\t?")
    assert admits(tabs, '{"a":\t1,\t"b":"x"}')
    assert not admits(tabs, '{"a": 1,"b":"x"}')


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (StructuredOutput.json_schema("{"), "not JSON"),
        (StructuredOutput.json_schema("[" * 100_000), "deeper than 64"),
        (StructuredOutput.json_schema(deep(MAX_NESTING + 1)), "deeper than 64"),
        (StructuredOutput.json_schema('"string"'), "an object, not str"),
        (StructuredOutput.json_schema("[]"), "an object, not list"),
        (StructuredOutput.json_schema(False), "allows nothing"),
        (StructuredOutput.json_schema({"name": "n", "schema": {}}), "no JSON schema"),
        (StructuredOutput.choice([""]), "not empty"),
        (StructuredOutput(kind="choice", value='["a", 1]'), "list of strings"),
        (StructuredOutput.grammar("root ::= (("), "GBNF"),
        (StructuredOutput.grammar('root ::= "a"' + " " * 40_000), "at most"),
        (StructuredOutput.structural_tag({"structures": []}), "triggers"),
        (StructuredOutput.structural_tag({"structures": [{"begin": "<a"}], "triggers": ["<b"]}), "begins with"),
        (StructuredOutput.structural_tag({"structures": [{"begin": "<a"}, {"begin": "b"}], "triggers": ["<"]}), "'b'"),
        (StructuredOutput.structural_tag({"structures": [{"begin": "a", "x": 1}], "triggers": ["a"]}), "'x'"),
        (StructuredOutput.tags([{"begin": "a", "schema": 5}]), "an object, not int"),
        (StructuredOutput.tags([{"begin": "a"}], max=0), "max"),
    ],
)
def test_what_cannot_be_a_grammar_is_refused_with_the_reason(output: StructuredOutput, reason: str) -> None:  # C055
    with pytest.raises(RequestError, match=re.escape(reason)) as raised:
        to_lark(output, {})
    assert raised.value.param == "structured_output"


def test_a_schema_may_be_as_deep_as_the_limit() -> None:
    assert admits(StructuredOutput.json_schema(deep(MAX_NESTING - 2)), "[]")
