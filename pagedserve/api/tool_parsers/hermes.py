"""Hermes, Qwen 2.5, Qwen 3: `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`."""

from __future__ import annotations

from typing import ClassVar

from pagedserve.api.text_machine import Markers, Reading
from pagedserve.api.tool_grammar import ForcedCalls
from pagedserve.api.tool_parsers.base import ToolParser
from pagedserve.sampling_params import StructuredOutput


class HermesParser(ToolParser):
    """One object between two tags, any number of times."""

    MARKERS: ClassVar[Markers] = Markers("<tool_call>")
    SPECIAL: ClassVar[tuple[str, ...]] = ("<tool_call>", "</tool_call>")

    def read_calls(self, marker: str) -> Reading[None]:
        yield from self.skip_space()
        yield from self.json_calls()
        yield from self.closing("</tool_call>")

    @classmethod
    def forced(cls, calls: ForcedCalls) -> StructuredOutput:
        return calls.tags('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>", separator="\n")
