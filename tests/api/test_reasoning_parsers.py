"""Parsers of reasoning: every format, any division of the text, prompts that begin the thoughts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedserve.api.reasoning_parsers import REASONING_PARSERS
from tests.api.test_text_machine import CUTS, cut
from tests.helpers.tool_formats import SCRAPS

# name -> what begins and ends the thoughts, and what stands before and after them.
MARKS = {
    "qwen3": ("<think>", "</think>"),
    "glm45": ("\n<think>", "</think>\n"),
    "deepseek_r1": ("<think>\n", "</think>\n\n"),
    "gemma4": ("<|channel>thought\n", "<channel|>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "granite": ("Here's my thought process:", "Here is my response:\n"),
    "openai_gptoss": ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
}
TEXTS = st.text(alphabet="ab <>/[]é🦜\n", min_size=1, max_size=12).map(lambda text: f"x{text}y")
Divided = tuple[str, str, list[list[int]]]


def divided(name: str, pieces: Sequence[str], *, is_open: bool = False) -> Divided:
    """Thoughts, the rest, and the spans of a text in pieces."""
    parser = REASONING_PARSERS.resolve(name)(is_open=is_open)
    found = [pair for piece in pieces for pair in parser.feed(piece)] + parser.finish()
    thoughts = "".join(text for is_reasoning, text in found if is_reasoning)
    return thoughts, "".join(text for is_reasoning, text in found if not is_reasoning), parser.spans


@pytest.mark.parametrize("name", MARKS)
@settings(max_examples=25)
@given(thoughts=TEXTS, answer=TEXTS, is_open=st.booleans(), places=CUTS)
def test_any_division_gives_the_thoughts_that_were_written(
    name: str, thoughts: str, answer: str, is_open: bool, places: list[int]
) -> None:
    begin, end = MARKS[name]
    is_open = is_open and name != "openai_gptoss"
    text = f"{'' if is_open else begin}{thoughts}\n{end}{answer}"
    whole = divided(name, [text], is_open=is_open)
    assert whole[:2] == (thoughts, answer)
    for pieces in (list(text), cut(text, places)):
        assert divided(name, pieces, is_open=is_open) == whole
    # Where the thoughts stand: all of them, and nothing of the answer.
    [(start, stop)] = whole[2]
    assert thoughts in text[start:stop]
    assert text[stop:].endswith(answer)


@pytest.mark.parametrize("name", REASONING_PARSERS)
@settings(max_examples=40)
@given(scraps=st.lists(st.sampled_from(SCRAPS), max_size=10), is_open=st.booleans(), places=CUTS)
def test_any_division_of_any_text_gives_the_same(
    name: str, scraps: list[str], is_open: bool, places: list[int]
) -> None:
    text = "".join(scraps)
    whole = divided(name, [text], is_open=is_open)
    assert divided(name, list(text), is_open=is_open) == divided(name, cut(text, places), is_open=is_open) == whole
    if not whole[2] and name != "openai_gptoss":
        assert whole[1] == text


@pytest.mark.parametrize("name", ["qwen3", "mistral", "granite", "gemma4"])
def test_markers_amid_an_answer_are_text(name: str) -> None:
    begin, end = MARKS[name]
    text = f"Well, {begin} is a marker and {end} another."
    assert divided(name, list(text)) == ("", text, [])


@pytest.mark.parametrize(
    ("name", "prompt", "continued", "is_open"),
    [
        ("qwen3", "<|im_start|>assistant\n", "", False),
        ("qwen3", "<|im_start|>assistant\n<think>\n", "", True),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", "", False),
        ("qwen3", "what is <think> ?<|im_end|>\n<|im_start|>assistant\n", "", False),
        ("qwen3", "assistant\n<think>\nI am", "<think>\nI am", True),
        ("qwen3", "assistant\n<think>x</think>I am", "<think>x</think>I am", False),
        ("deepseek_r1", "<｜Assistant｜>", "", True),
        ("deepseek_r1", "<｜Assistant｜><think>\n", "", True),
        ("deepseek_r1", "<｜Assistant｜></think>", "", False),
        ("deepseek_r1", "<｜Assistant｜>x</think>I am", "x</think>I am", False),
        ("mistral", "[INST]x[/INST]", "", False),
        ("granite", "assistant<|end_of_role|>", "", False),
        ("openai_gptoss", "<|start|>assistant", "", False),
    ],
)
def test_prompts_that_begin_the_thoughts(name: str, prompt: str, continued: str, is_open: bool) -> None:
    assert REASONING_PARSERS.resolve(name).opens(prompt, continued) is is_open


def test_thoughts_that_never_end_are_thoughts() -> None:
    assert divided("qwen3", ["<think>hm </th"])[:2] == ("hm </th", "")
    assert divided("deepseek_r1", ["hm"], is_open=True)[:2] == ("hm", "")


def test_messages_of_gpt_oss() -> None:
    """Thoughts twice, text before a call, and a call whose header comes in the other order."""
    text = (
        "<|channel|>analysis<|message|>one <|end|><|start|>assistant<|channel|>commentary<|message|>Let me see.<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>two<|end|>"
        '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>'
    )
    call = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
    assert divided("openai_gptoss", list(text))[:2] == ("one\n\ntwo", "Let me see." + call)
    assert divided("openai_gptoss", ["plain text"])[:2] == ("", "plain text")
