"""GLM 4.5 and later: `<tool_call>f`, then `<arg_key>key</arg_key><arg_value>value</arg_value>` each, `</tool_call>`."""

from __future__ import annotations

from typing import ClassVar

from pagedserve.api.text_machine import Malformed, Markers, Reading
from pagedserve.api.tool_grammar import CallGrammar, LarkWriter, ToolChoices
from pagedserve.api.tool_parsers.base import NAME
from pagedserve.api.tool_parsers.typed_arguments import TaggedArgumentsParser, tagged_parameters

_END_OF_KEY = Markers("</arg_key>")
_END_OF_VALUE = Markers("</arg_value>")


class Glm45Parser(TaggedArgumentsParser):
    """The name stands right behind the tag."""

    MARKERS: ClassVar[Markers] = Markers("<tool_call>")
    SPECIAL: ClassVar[tuple[str, ...]] = (
        *("<tool_call>", "</tool_call>"),
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    )

    def read_calls(self, marker: str) -> Reading[None]:
        yield from self.skip_space()
        parts: list[str] = []
        yield from self.copy_while(NAME, parts.append)
        name = "".join(parts)
        yield from self.skip_space()
        tag = yield from self.expect("<arg_key>", "</tool_call>")
        self.begin_call(name)
        keys: set[str] = set()
        while tag == "<arg_key>":
            key = yield from self.name_until(_END_OF_KEY)
            if key in keys:
                raise Malformed
            yield from self.skip_space()
            yield from self.expect("<arg_value>")
            yield from self.add_parameter(name, key, _END_OF_VALUE, is_first=not keys)
            keys.add(key)
            yield from self.skip_space()
            tag = yield from self.expect("<arg_key>", "</tool_call>")
        self.close_arguments(is_empty=not keys)

    @classmethod
    def grammar(cls, lark: LarkWriter, calls: ToolChoices) -> CallGrammar:
        expressions = []
        for name, schema in calls.tools.items():
            opening, closing = f"{name}\n", "</tool_call>"
            parameters = tagged_parameters(lark, schema, "<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n")
            expressions.append(f"{lark.text(opening)} {parameters} {lark.text(closing)}")
        return CallGrammar(lark.one_of(*expressions), begin="<tool_call>", separator="\n")
