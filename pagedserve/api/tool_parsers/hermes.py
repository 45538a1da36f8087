"""Hermes, Qwen 2.5, Qwen 3: `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`."""

from __future__ import annotations

from typing import ClassVar

from pagedserve.api.text_machine import Markers, Reading
from pagedserve.api.tool_grammar import CallGrammar, LarkWriter, ToolChoices
from pagedserve.api.tool_parsers.base import MarkedParser


class HermesParser(MarkedParser):
    """One object between two tags, any number of times."""

    MARKERS: ClassVar[Markers] = Markers("<tool_call>")
    SPECIAL: ClassVar[tuple[str, ...]] = ("<tool_call>", "</tool_call>")

    def read_calls(self, marker: str) -> Reading[None]:
        yield from self.skip_space()
        yield from self.json_calls()
        yield from self.closing("</tool_call>")

    @classmethod
    def grammar(cls, lark: LarkWriter, calls: ToolChoices) -> CallGrammar:
        call = lark.json_call('\n{"name": "NAME", "arguments": ', "}\n</tool_call>", calls.tools)
        return CallGrammar(call, begin="<tool_call>", separator="\n")
