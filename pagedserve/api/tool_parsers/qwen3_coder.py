"""Qwen 3 Coder: `<tool_call><function=f><parameter=key>value</parameter>...</function></tool_call>`, on lines."""

from __future__ import annotations

from typing import ClassVar

from pagedserve.api.text_machine import Malformed, Markers, Reading
from pagedserve.api.tool_grammar import CallGrammar, LarkWriter, ToolChoices
from pagedserve.api.tool_parsers.typed_arguments import TaggedArgumentsParser, tagged_parameters

_END_OF_TAG = Markers(">")
_END_OF_VALUE = Markers("</parameter>")


class Qwen3CoderParser(TaggedArgumentsParser):
    """The outer tag may be missing, as the model forgets it now and then."""

    MARKERS: ClassVar[Markers] = Markers("<tool_call>", "<function=")
    PADDING: ClassVar[str] = "\n"
    SPECIAL: ClassVar[tuple[str, ...]] = ("<tool_call>", "</tool_call>")

    def read_calls(self, marker: str) -> Reading[None]:
        if marker == "<tool_call>":
            yield from self.skip_space()
            yield from self.expect("<function=")
        name = yield from self.name_until(_END_OF_TAG)
        self.begin_call(name)
        keys: set[str] = set()
        while True:
            yield from self.skip_space()
            if (yield from self.expect("<parameter=", "</function>")) == "</function>":
                break
            key = yield from self.name_until(_END_OF_TAG)
            if key in keys:
                raise Malformed
            yield from self.add_parameter(name, key, _END_OF_VALUE, is_first=not keys)
            keys.add(key)
        self.close_arguments(is_empty=not keys)
        yield from self.closing("</tool_call>")

    @classmethod
    def grammar(cls, lark: LarkWriter, calls: ToolChoices) -> CallGrammar:
        expressions = []
        for name, schema in calls.tools.items():
            opening, closing = f"\n<function={name}>\n", "</function>\n</tool_call>"
            parameters = tagged_parameters(lark, schema, "<parameter=KEY>\n", "\n</parameter>\n")
            expressions.append(f"{lark.text(opening)} {parameters} {lark.text(closing)}")
        return CallGrammar(lark.one_of(*expressions), begin="<tool_call>", separator="\n")
