"""An answer's text taken apart as it comes: thoughts, text, tool calls. What every endpoint that shows them builds on.

    formats = OutputFormats.choose("auto", "auto", template, tokenizer)                      # once a server
    params = params.with_(shown_special_ids=formats.shown_special_ids)                       # once a request
    parser = OutputParser(formats, params, prompt=text_of_the_prompt, tools={name: schema})  # once a choice
    for event in parser.feed(choice):  # each CompletionOutput with its deltas
        ...                            # Content, Reasoning, ToolCallBegin, ...

Joined, the events are the same however the text was divided into deltas.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from pagedserve.api.parsed_events import (
    Content,
    Event,
    Reasoning,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from pagedserve.api.reasoning_parsers import REASONING_PARSERS
from pagedserve.api.reasoning_parsers.base import ReasoningParser
from pagedserve.api.tool_grammar import LarkWriter, ToolChoices
from pagedserve.api.tool_parsers import TOOL_PARSERS
from pagedserve.api.tool_parsers.base import MarkedParser, ToolParser
from pagedserve.engine.tokenizer import Tokenizer
from pagedserve.outputs import CompletionOutput
from pagedserve.sampling_params import SamplingParams, StructuredOutput

AUTO, NONE = "auto", "none"

# What in a chat template tells the format of calls; the first that all occur decides.
_TOOL_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("openai", ("<|channel|>", "<|call|>")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    ("glm45", ("<arg_key>",)),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("functiongemma", ("<start_function_call>",)),
    ("gemma4", ("<|tool_call>",)),
    ("granite", ("<|tool_call|>",)),
    ("granite", ("<|start_of_role|>",)),
    ("gemma3", ("```tool_code",)),
    ("hermes", ("<tool_call>",)),
    ("llama3_json", ("<|python_start|>", '"parameters"')),
    ("pythonic", ("<|python_start|>",)),
    ("pythonic", ("[func_name1(params_name1=params_value1",)),
    ("llama3_json", ("<|python_tag|>",)),
    ("llama3_json", ('"parameters"', "<|eot_id|>")),
)
_REASONING_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("openai_gptoss", ("<|channel|>analysis",)),
    ("gemma4", ("<|channel>thought",)),
    ("mistral", ("[THINK]",)),
    ("granite", ("Here is my thought process:",)),
    ("glm45", ("<think>", "<arg_key>")),
    ("qwen3", ("<think>",)),
    ("deepseek_r1", ("</think>",)),
)


@dataclass(frozen=True, slots=True)
class OutputFormats:
    """How the served model writes tool calls and thoughts. A name is None where it writes none, or nobody knows how."""

    tool_name: str | None
    tool_parser: type[ToolParser] | None
    reasoning_name: str | None
    reasoning_parser: type[ReasoningParser] | None
    template: str
    # Markers that are special tokens, which are shown to the parsers and to nobody else.
    special: Mapping[str, int]
    tokenizer: Tokenizer

    @classmethod
    def choose(cls, tool_parser: str, reasoning_parser: str, template: str, tokenizer: Tokenizer) -> Self:
        """By name; "auto" looks at the chat template, "none" is none. ConfigError for a name that is unknown.

        A template that shows tools in a format of its own is read as `hermes`, the most common one.
        """
        tool_name = _chosen(tool_parser, _TOOL_SIGNS, template)
        if tool_name is None and tool_parser == AUTO and "tools" in template:
            tool_name = "hermes"
        reasoning_name = _chosen(reasoning_parser, _REASONING_SIGNS, template)
        tool_class = None if tool_name is None else TOOL_PARSERS.resolve(tool_name)
        reasoning_class = None if reasoning_name is None else REASONING_PARSERS.resolve(reasoning_name)
        markers = (*(tool_class.SPECIAL if tool_class else ()), *(reasoning_class.SPECIAL if reasoning_class else ()))
        ids = {marker: tokenizer.token_to_id(marker) for marker in markers}
        special = {marker: i for marker, i in ids.items() if i is not None and tokenizer.is_special(i)}
        return cls(tool_name, tool_class, reasoning_name, reasoning_class, template, special, tokenizer)

    @property
    def shown_special_ids(self) -> tuple[int, ...]:
        """Special tokens that must show in the text (`SamplingParams.shown_special_ids`), for the parsers read them."""
        return tuple(self.special.values())

    def forced_calls(self, tools: Mapping[str, Mapping[str, Any]], max_calls: int | None) -> StructuredOutput:
        """The grammar of an answer that calls some of `tools` and says nothing else."""
        assert self.tool_parser is not None
        lark = LarkWriter(self.special)
        grammar = self.tool_parser.grammar(lark, ToolChoices(tools, self.template))
        return lark.forced(replace(grammar, max_calls=grammar.max_calls or max_calls))

    def strict_calls(self, tools: Mapping[str, Mapping[str, Any]]) -> StructuredOutput | None:
        """The grammar of an answer that may call `tools`, with arguments that fit; None where calls have no marker."""
        parser = self.tool_parser
        if parser is None or not parser.CAN_CONSTRAIN or not issubclass(parser, MarkedParser):
            return None
        lark = LarkWriter(self.special)
        grammar = parser.grammar(lark, ToolChoices(tools, self.template))
        opening = grammar.before or grammar.begin
        marker = next(text for text in parser.MARKERS.texts if opening.startswith(text))
        thoughts = None if self.reasoning_parser is None else self.reasoning_parser.markers()
        return lark.amid_text(grammar, marker, thoughts)


def check_names(tool_parser: str, reasoning_parser: str) -> None:
    """Raise ConfigError for a parser that does not exist."""
    for name, registry in ((tool_parser, TOOL_PARSERS), (reasoning_parser, REASONING_PARSERS)):
        if name not in (AUTO, NONE):
            registry.resolve(name)


def _chosen(name: str, signs: tuple[tuple[str, tuple[str, ...]], ...], template: str) -> str | None:
    if name == NONE:
        return None
    if name != AUTO:
        return name
    return next((name for name, texts in signs if all(text in template for text in texts)), None)


class OutputParser:
    """The text of one choice, taken apart.

    `prompt` is the text that the answer goes on from, `continued` the part of it that belongs to the answer: they may
    have begun the thoughts. Without `tools` calls are text.
    """

    def __init__(
        self,
        formats: OutputFormats,
        params: SamplingParams,
        *,
        prompt: str,
        continued: str = "",
        tools: Mapping[str, Mapping[str, Any]] | None = None,
    ):
        reasoning, calls = formats.reasoning_parser, formats.tool_parser
        self._reasoning = None if reasoning is None else reasoning(is_open=reasoning.opens(prompt, continued))
        self._tools = calls(tools) if calls is not None and tools else None
        self._counter = None if self._reasoning is None else _ReasoningCounter(formats, params)

    def feed(self, choice: CompletionOutput) -> list[Event]:
        """The events that a choice's next deltas bring; with its `finish_reason` set, also the last ones."""
        is_over = choice.finish_reason is not None
        reasoning = self._reasoning
        if reasoning is None:
            events = self._rest(choice.delta_text)
        else:
            events = self._divided(reasoning.feed(choice.delta_text))
            if is_over:
                events += self._divided(reasoning.finish())
            assert self._counter is not None
            self._counter.take(choice.delta_token_ids, reasoning, is_over or reasoning.is_done)
            if reasoning.is_done:
                self._reasoning = None
        if is_over and self._tools is not None:
            events += self._tools.finish()
        return events

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of thoughts so far, markers included."""
        return 0 if self._counter is None else self._counter.count

    def _divided(self, pieces: list[tuple[bool, str]]) -> list[Event]:
        events: list[Event] = []
        for is_reasoning, text in pieces:
            if is_reasoning:
                events.append(Reasoning(text))
            else:
                events += self._rest(text)
        return events

    def _rest(self, text: str) -> list[Event]:
        if self._tools is not None:
            return self._tools.feed(text)
        return [Content(text)] if text else []


class _ReasoningCounter:
    """Counts tokens that begin within the spans of a reasoning parser."""

    def __init__(self, formats: OutputFormats, params: SamplingParams):
        self._table = formats.tokenizer.token_bytes
        special = formats.tokenizer.special_ids if params.skip_special_tokens else frozenset()
        self._hidden = special.difference(params.shown_special_ids)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # Tokens whose text the parser has not decided on yet.
        self._waiting: deque[int] = deque()
        self._start = 0
        self._span = 0
        self.count = 0

    def take(self, token_ids: list[int], parser: ReasoningParser, is_over: bool) -> None:
        """The next tokens, whose text the parser has been given."""
        self._waiting += token_ids
        while self._waiting and (self._start < parser.num_chars or is_over):
            while self._span < len(parser.spans) and 0 <= parser.spans[self._span][1] <= self._start:
                self._span += 1
            self.count += self._span < len(parser.spans) and parser.spans[self._span][0] <= self._start
            token_id = self._waiting.popleft()
            if token_id not in self._hidden:
                self._start += len(self._decoder.decode(self._table.of(token_id)))


@dataclass(slots=True)
class ToolCall:
    """One call that is complete."""

    call_id: str
    name: str
    arguments: str


class ParsedMessage:
    """An answer from its events. Calls that were aborted are not in it; their text is in `content`."""

    __slots__ = ("_arguments", "_begun", "_content", "_reasoning", "tool_calls")

    def __init__(self) -> None:
        self.tool_calls: list[ToolCall] = []
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._arguments: list[str] = []
        self._begun: ToolCallBegin | None = None

    @property
    def content(self) -> str:
        """The text."""
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        """The thoughts."""
        return "".join(self._reasoning)

    def add(self, event: Event) -> None:
        """The next event."""
        if isinstance(event, Content):
            self._content.append(event.text)
        elif isinstance(event, Reasoning):
            self._reasoning.append(event.text)
        elif isinstance(event, ToolCallArguments):
            self._arguments.append(event.text)
        elif isinstance(event, ToolCallBegin):
            self._begun = event
            self._arguments = []
        elif isinstance(event, ToolCallEnd):
            assert self._begun is not None
            self.tool_calls.append(ToolCall(self._begun.call_id, self._begun.name, "".join(self._arguments)))
