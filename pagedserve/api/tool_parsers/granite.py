"""Granite 3: `<|tool_call|>[{"name": "f", "arguments": {...}}, ...]` (3.1 writes `<tool_call>`); 4 writes as Hermes.

Phi 4 mini writes as Granite 3, with a closing tag.
"""

from __future__ import annotations

from typing import ClassVar

from pagedserve.api.text_machine import Markers, Reading
from pagedserve.api.tool_grammar import ForcedCalls
from pagedserve.api.tool_parsers.base import ToolParser
from pagedserve.sampling_params import StructuredOutput


class GraniteParser(ToolParser):
    """A list of objects behind a tag, or an object between two."""

    MARKERS: ClassVar[Markers] = Markers("<|tool_call|>", "<tool_call>")
    SPECIAL: ClassVar[tuple[str, ...]] = ("<|tool_call|>", "<tool_call>", "</tool_call>")

    def read_calls(self, marker: str) -> Reading[None]:
        yield from self.skip_space()
        yield from self.json_calls()
        yield from self.closing("</tool_call>", "<|/tool_call|>")

    @classmethod
    def forced(cls, calls: ForcedCalls) -> StructuredOutput:
        begin = '{"name": "NAME", "arguments": '
        if "</tool_call>" in calls.template:
            return calls.tags(f"<tool_call>\n{begin}", "}\n</tool_call>", separator="\n")
        tag = "<|tool_call|>" if "<|tool_call|>" in calls.template else "<tool_call>"
        return calls.tags(begin, "}", separator=", ", prefix=f"{tag}[", suffix="]")
