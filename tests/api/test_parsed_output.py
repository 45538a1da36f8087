"""Answers taken apart on their way from tokens: formats by template, markers that are special tokens, counts."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedserve.api.parsed_choice import ParsedChoice
from pagedserve.api.parsed_output import OutputFormats, OutputParser, check_names
from pagedserve.api.protocol.tools import ToolUse
from pagedserve.engine.detokenizer import TextStream
from pagedserve.engine.tokenizer import Tokenizer
from pagedserve.errors import ConfigError
from pagedserve.outputs import CompletionOutput
from pagedserve.sampling_params import SamplingParams
from tests.api.test_text_machine import CUTS
from tests.helpers.tokenizers import byte_level_backend
from tests.helpers.tool_formats import FORMATS, template_with

TOOLS = {"f": {"type": "object"}}
SPECIAL = ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "<secret>")


@cache
def tokenizer() -> Tokenizer:
    backend = byte_level_backend()
    backend.add_special_tokens(list(SPECIAL))
    return Tokenizer(backend)


def choose(template: str, tool_parser: str = "auto", reasoning_parser: str = "auto") -> OutputFormats:
    return OutputFormats.choose(tool_parser, reasoning_parser, template, tokenizer())


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_told_by_their_signs(name: str) -> None:
    expected = name if name == "deepseek_v31" else FORMATS[name].parser
    assert choose(template_with(FORMATS[name].signs)).tool_name == expected


@pytest.mark.parametrize(
    ("signs", "name"),
    [
        ("<think> </think>", "qwen3"),
        ("<think> <arg_key>", "glm45"),
        ("split('</think>')", "deepseek_r1"),
        ("[THINK]", "mistral"),
        ("Here is my thought process:", "granite"),
        ("<|channel|>analysis", "openai_gptoss"),
        ("<|channel>thought", "gemma4"),
        ("", None),
    ],
)
def test_reasoning_is_told_by_its_signs(signs: str, name: str | None) -> None:
    assert choose(template_with(signs)).reasoning_name == name


def test_other_formats() -> None:
    assert choose(template_with("")).tool_name == "hermes", "what most models write that say nothing else"
    assert choose("{{ messages }}").tool_name is None
    formats = choose(template_with("<tool_call> <think>"), "none", "none")
    assert (formats.tool_name, formats.reasoning_name) == (None, None)
    assert choose("{{ messages }}", "mistral", "granite").reasoning_name == "granite"
    for names, word in ((("nope", "auto"), "tool-call parser 'nope'"), (("auto", "nope"), "reasoning parser 'nope'")):
        with pytest.raises(ConfigError, match=f"unknown {word}; known: .*mistral"):
            check_names(*names)
    check_names("auto", "none")


def ids_of(text: str) -> list[int]:
    """Tokens of a text in which special tokens stand as text."""
    return tokenizer().encode(text, add_special_tokens=False)


def parsed(ids: list[int], lengths: list[int], **fields: object) -> ParsedChoice:
    """An answer of these tokens that comes in pieces of these lengths (one token each where they run out)."""
    formats = choose(template_with("[TOOL_CALLS] [ARGS] [THINK]"))
    params = SamplingParams(shown_special_ids=formats.shown_special_ids, **fields)  # type: ignore[arg-type]
    stream = TextStream(tokenizer(), params)
    use = ToolUse("auto", schemas=TOOLS)
    choice = ParsedChoice(OutputParser(formats, params, prompt="", tools=TOOLS), use)
    start, text = 0, ""
    while start < len(ids):
        end = min(start + (lengths.pop() % 5 + 1 if lengths else 1), len(ids))
        delta = stream.append(ids[start:end]).text
        is_last = end == len(ids)
        if is_last:
            delta += stream.finish().text
        text += delta
        choice.take(
            CompletionOutput(
                index=0,
                text=text,
                token_ids=ids[:end],
                delta_text=delta,
                delta_token_ids=ids[start:end],
                finish_reason="stop" if is_last else None,
            )
        )
        start = end
    return choice


@settings(max_examples=50)
@given(lengths=CUTS, skips=st.booleans())
def test_markers_that_are_special_tokens_are_read_and_not_shown(lengths: list[int], skips: bool) -> None:
    """Others stay hidden, unless the client wants to see them; tokens of thoughts are counted exactly."""
    thoughts = ids_of("[THINK]hm é🦜<secret>[/THINK]")
    ids = [*thoughts, *ids_of('So<secret>.[TOOL_CALLS]f[ARGS]{"a": "é"}')]
    choice = parsed(ids, list(lengths), skip_special_tokens=skips)
    secret = "" if skips else "<secret>"
    assert choice.message.reasoning == "hm é🦜" + secret
    assert choice.message.content == f"So{secret}."
    assert [(call.name, call.arguments) for call in choice.message.tool_calls] == [("f", '{"a": "é"}')]
    assert choice.finish_reason == "tool_calls"
    assert choice.num_reasoning_tokens == len(thoughts)


@settings(max_examples=25)
@given(lengths=CUTS)
def test_bytes_that_are_no_text_do_not_shift_the_count(lengths: list[int]) -> None:
    broken = [4 + 0xFF, 4 + 0xC3, 4 + 0x28, 4 + 0xF0]
    thoughts = [*ids_of("[THINK]a"), *broken, *ids_of("[/THINK]")]
    choice = parsed([*thoughts, *broken, *ids_of("text")], list(lengths))
    assert choice.num_reasoning_tokens == len(thoughts)
    assert choice.message.content.endswith("text")
