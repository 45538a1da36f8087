"""DeepSeek V3 and R1, and the shorter form of V3.1.

V3 writes a call as `function`, a separator, the name, and a fenced block of JSON; V3.1 as the name, a separator, JSON.
"""

from __future__ import annotations

from typing import ClassVar

from pagedserve.api.text_machine import Markers, Reading
from pagedserve.api.tool_grammar import CallGrammar, LarkWriter, ToolChoices
from pagedserve.api.tool_parsers.base import MarkedParser

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
_SEPARATOR = Markers(SEPARATOR)
_END_OF_LINE = Markers("\n")


class DeepSeekV3Parser(MarkedParser):
    """Reads both forms."""

    MARKERS: ClassVar[Markers] = Markers(CALLS_BEGIN)
    SPECIAL: ClassVar[tuple[str, ...]] = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR)

    def read_calls(self, marker: str) -> Reading[None]:
        yield from self.skip_space()
        yield from self.expect(CALL_BEGIN)
        while True:
            yield from self._read_call()
            yield from self.space()
            if (yield from self.expect(CALL_BEGIN, CALLS_END)) == CALLS_END:
                self._record()
                return

    def _read_call(self) -> Reading[None]:
        name = yield from self.name_until(_SEPARATOR)
        yield from self.skip_space()
        is_fenced = (yield from self.peek()) != "{"
        if is_fenced:
            # What stood before the separator was the kind of tool.
            name = yield from self.name_until(_END_OF_LINE)
            yield from self.skip_space()
            yield from self.expect("```json")
            yield from self.skip_space()
        self.begin_call(name)
        yield from self.copy_json(self.add_arguments)
        self.end_call()
        yield from self.skip_space()
        if is_fenced:
            yield from self.expect("```")
            yield from self.skip_space()
        yield from self.expect(CALL_END)
        self._record()

    @classmethod
    def grammar(cls, lark: LarkWriter, calls: ToolChoices) -> CallGrammar:
        call = lark.json_call(f"function{SEPARATOR}NAME\n```json\n", f"\n```{CALL_END}", calls.tools)
        return CallGrammar(call, begin=CALL_BEGIN, separator="\n", before=CALLS_BEGIN, after=CALLS_END)


class DeepSeekV31Parser(DeepSeekV3Parser):
    """Forces calls in the shorter form."""

    @classmethod
    def grammar(cls, lark: LarkWriter, calls: ToolChoices) -> CallGrammar:
        call = lark.json_call(f"NAME{SEPARATOR}", CALL_END, calls.tools)
        return CallGrammar(call, begin=CALL_BEGIN, before=CALLS_BEGIN, after=CALLS_END)
