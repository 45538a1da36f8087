"""Grammars of tool calls: whatever they let through, the format's own parser reads as calls with valid arguments."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from pagedserve.api.parsed_output import ParsedMessage
from pagedserve.api.tool_grammar import LarkWriter, ToolChoices
from pagedserve.api.tool_parsers import TOOL_PARSERS
from pagedserve.api.tool_parsers.base import ToolParser
from tests.helpers.tokenizers import byte_level_backend
from tests.helpers.tool_formats import FORMATS

PARAMETERS = {
    "type": "object",
    "properties": {
        "a": {"type": "string"},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "e": {"enum": ["x", "y z"]},
        "l": {"type": "array", "items": {"$ref": "#/$defs/flag"}, "maxItems": 2},
    },
    "required": ["a", "l"],
    "additionalProperties": False,
    "$defs": {"flag": {"type": "boolean"}},
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
NESTED = {
    "type": "object",
    "properties": {
        "m": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "o": {"type": "object", "properties": {"k": {"type": "number"}}, "required": ["k"]},
    },
    "required": ["o"],
    "additionalProperties": False,
}
TOOLS = {"f": PARAMETERS, "g": NOTHING, "get_weather": NESTED}
# Letters that end what is under way are drawn more often, so that random texts come to an end.
ENDINGS = frozenset('"}]</>`\n,')


@cache
def vocabulary(special: tuple[str, ...]) -> tuple[Tokenizer, LLTokenizer, dict[str, int]]:
    backend = byte_level_backend()
    backend.add_special_tokens(list(special))
    return backend, LLTokenizer(backend.to_str()), {marker: backend.token_to_id(marker) for marker in special}


def parser_of(name: str) -> type[ToolParser]:
    return TOOL_PARSERS.resolve(name if name in TOOL_PARSERS else FORMATS[name].parser)


def random_text(grammar: str, special: tuple[str, ...], seed: int) -> str | None:
    """A text of the grammar, token by token; None where it finds no end."""
    backend, table, _ = vocabulary(special)
    matcher, rng, ids = LLMatcher(table, grammar), random.Random(seed), []
    assert not matcher.is_error(), matcher.get_error()
    while not matcher.is_stopped() and len(ids) < 300:
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")[: table.vocab_size])
        endings = [i for i in allowed if (backend.id_to_token(int(i)) or "").replace("Ċ", "\n") in ENDINGS]
        drawn = int(rng.choice(endings if endings and rng.random() < 0.6 else list(allowed)))
        if drawn == table.eos_token:
            break
        matcher.consume_token(drawn)
        ids.append(drawn)
    return backend.decode(ids, skip_special_tokens=False) if matcher.is_accepting() else None


def accepts(grammar: str, text: str, special: tuple[str, ...] = ()) -> bool:
    backend, table, _ = vocabulary(special)
    matcher = LLMatcher(table, grammar)
    assert not matcher.is_error(), matcher.get_error()
    ids = backend.encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def forced(name: str, special: tuple[str, ...], max_calls: int | None) -> str:
    lark = LarkWriter(vocabulary(special)[2])
    grammar = parser_of(name).grammar(lark, ToolChoices(TOOLS, FORMATS[name].signs))
    output = lark.forced(replace(grammar, max_calls=grammar.max_calls or max_calls))
    assert output.kind == "grammar"
    return output.value


@pytest.mark.parametrize("markers", ["text", "special tokens"])
@pytest.mark.parametrize("name", FORMATS)
def test_what_a_grammar_lets_through_is_calls_with_valid_arguments(name: str, markers: str) -> None:
    parser_class = parser_of(name)
    special = parser_class.SPECIAL if markers == "special tokens" else ()
    num_texts = 0
    for seed in range(6):
        grammar = forced(name, special, max_calls=1 if seed % 2 else None)
        text = random_text(grammar, special, seed)
        if text is None:
            continue
        num_texts += 1
        parser, message = parser_class(TOOLS), ParsedMessage()
        for event in parser.feed(text) + parser.finish():
            message.add(event)
        assert message.tool_calls, text
        assert message.content == "", text
        for call in message.tool_calls:
            jsonschema.validate(json.loads(call.arguments), TOOLS[call.name])
        assert len(message.tool_calls) == 1 or not seed % 2
    assert num_texts, "no text came to an end"


@pytest.mark.parametrize("name", FORMATS)
def test_calls_as_the_model_writes_them_are_possible(name: str) -> None:
    """In the order of the schema; optional parameters left out or not."""
    grammar = forced(name, (), max_calls=None)
    write = FORMATS[name].write
    full = [("f", {"a": "x", "n": 5, "e": "y z", "l": [True]}), ("g", {}), ("get_weather", {"o": {"k": 1}})]
    calls = full[:1] if name == "openai" else full
    text = write(calls)
    if name in ("pythonic", "gemma3"):
        text = text.replace("'", '"').replace("True", "true")  # a grammar's values are JSON
    if name in ("functiongemma", "gemma4"):
        text = text.replace("{k:1}", '{"k":1}')
    if name == "openai":
        text = text.removesuffix("<|call|>")
    assert accepts(grammar, text), text
    assert accepts(grammar, text.replace("5", "7"))
    assert not accepts(grammar, text.replace("5", "500"))
    assert not accepts(grammar, "Hello. " + text)
    assert not accepts(grammar, text + " Done.")
    if name != "openai":
        assert not accepts(forced(name, (), max_calls=1), text)


STRICT = [name for name in FORMATS if parser_of(name).CAN_CONSTRAIN]


@pytest.mark.parametrize("markers", ["text", "special tokens"])
@pytest.mark.parametrize("name", STRICT)
def test_strict_calls_amid_text(name: str, markers: str) -> None:
    """Text is free, also thoughts that mention the marker; from a call's marker on only calls that fit are possible."""
    parser_class = parser_of(name)
    special = parser_class.SPECIAL if markers == "special tokens" else ()
    lark = LarkWriter(vocabulary(special)[2])
    grammar = parser_class.grammar(lark, ToolChoices(TOOLS, FORMATS[name].signs))
    marker = next(m for m in parser_class.MARKERS.texts if (grammar.before or grammar.begin).startswith(m))
    output = lark.amid_text(grammar, marker, ("<think>", "</think>")).value

    def possible(text: str) -> bool:
        return accepts(output, text, special)

    call = FORMATS[name].write([("g", {})])
    assert possible("")
    assert possible("Hello <b> {there}\n")
    assert possible(f"Let me see. {call}")
    assert possible(call)
    assert possible(f"{call}\n{call}" if not grammar.before else call)
    assert not possible(f"Hello {marker} there")
    assert not possible(FORMATS[name].write([("unknown", {})]))
    assert not possible(FORMATS[name].write([("g", {"x": 1})]))
    if not special:
        assert possible(f"<think>a {marker} b</think>Well, {call}")
    if marker in special:
        assert not possible(f"<think>a {marker} b")
