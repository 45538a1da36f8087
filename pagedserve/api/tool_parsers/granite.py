"""Granite 3: `<|tool_call|>[{"name": "f", "arguments": {...}}, ...]` (3.1 writes `<tool_call>`); 4 writes as Hermes.

Phi 4 mini writes as Granite 3, with a closing tag.
"""

from __future__ import annotations

from typing import ClassVar

from pagedserve.api.text_machine import Markers, Reading
from pagedserve.api.tool_grammar import CallGrammar, LarkWriter, ToolChoices
from pagedserve.api.tool_parsers.base import MarkedParser
from pagedserve.api.tool_parsers.hermes import HermesParser


class GraniteParser(MarkedParser):
    """A list of objects behind a tag, or an object between two."""

    MARKERS: ClassVar[Markers] = Markers("<|tool_call|>", "<tool_call>")
    SPECIAL: ClassVar[tuple[str, ...]] = ("<|tool_call|>", "<tool_call>", "</tool_call>")

    def read_calls(self, marker: str) -> Reading[None]:
        yield from self.skip_space()
        yield from self.json_calls()
        yield from self.closing("</tool_call>", "<|/tool_call|>")

    @classmethod
    def grammar(cls, lark: LarkWriter, calls: ToolChoices) -> CallGrammar:
        if "</tool_call>" in calls.template:
            return HermesParser.grammar(lark, calls)
        call = lark.json_call('{"name": "NAME", "arguments": ', "}", calls.tools)
        tag = "<|tool_call|>" if "<|tool_call|>" in calls.template else "<tool_call>"
        return CallGrammar(call, before=f"{tag}[", separator=", ", after="]")
