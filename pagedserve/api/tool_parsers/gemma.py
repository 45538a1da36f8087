"""Gemma: a fenced block of Python calls (Gemma 3), and the tagged form of FunctionGemma and Gemma 4.

```tool_code
f(a=1)
```
<start_function_call>call:f{a:1,b:<escape>text<escape>}<end_function_call>
<|tool_call>call:f{a:1,b:<|"|>text<|"|>}<tool_call|>
"""

from __future__ import annotations

import json
import re
from typing import ClassVar

from pagedserve.api.text_machine import Malformed, Markers, Reading
from pagedserve.api.tool_grammar import CallGrammar, LarkWriter, ToolChoices, properties_of
from pagedserve.api.tool_parsers.base import NAME, MarkedParser
from pagedserve.api.tool_parsers.pythonic import PythonicParser, python_calls
from pagedserve.api.tool_parsers.typed_arguments import is_text, text_choices

_KEY = re.compile(r"[^\s:,{}\[\]<>\"]+")
_MAX_DEPTH = 64


class ToolCodeParser(PythonicParser, MarkedParser):
    """Gemma 3: calls in a fenced block, one a line or in a list, maybe within print()."""

    MARKERS: ClassVar[Markers] = Markers("```tool_code")
    SPECIAL: ClassVar[tuple[str, ...]] = ()
    CAN_CONSTRAIN: ClassVar[bool] = True

    def run(self) -> Reading[None]:
        yield from MarkedParser.run(self)

    def read_calls(self, marker: str) -> Reading[None]:
        yield from self.skip_space()
        is_list = (yield from self.found("[")) is not None
        while True:
            yield from self.skip_space()
            is_printed = (yield from self.found("print(")) is not None
            yield from self.python_call()
            if is_printed:
                yield from self.expect(")")
                self._record()
            yield from self.skip_space()
            if is_list:
                if (yield from self.expect(",", "]")) == ",":
                    continue
                yield from self.skip_space()
            if (yield from self.found("```")) is not None:
                self._record()
                return
            if is_list:
                raise Malformed

    @classmethod
    def grammar(cls, lark: LarkWriter, calls: ToolChoices) -> CallGrammar:
        return CallGrammar(python_calls(lark, calls.tools), before="```tool_code\n", separator="\n", after="\n```")


class FunctionGemmaParser(MarkedParser):
    """Keys are bare, strings stand between two equal tags, everything else is as in JSON."""

    MARKERS: ClassVar[Markers] = Markers("<start_function_call>")
    END: ClassVar[str] = "<end_function_call>"
    QUOTE: ClassVar[str] = "<escape>"
    SPECIAL: ClassVar[tuple[str, ...]] = ("<start_function_call>", "<end_function_call>", "<escape>")

    def __init__(self, *args: object, **kwargs: object):
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._end_of_text = Markers(self.QUOTE)

    def read_calls(self, marker: str) -> Reading[None]:
        yield from self.skip_space()
        yield from self.expect("call:")
        parts: list[str] = []
        yield from self.copy_while(NAME, parts.append)
        if (yield from self.peek()) != "{":
            raise Malformed
        self.begin_call("".join(parts))
        yield from self._object(0)
        self.end_call()
        yield from self.closing(self.END)

    @classmethod
    def grammar(cls, lark: LarkWriter, calls: ToolChoices) -> CallGrammar:
        expressions = []
        for name, schema in calls.tools.items():
            members = []
            for key, value_schema, is_required in properties_of(schema):
                if not is_text(value_schema):
                    value = lark.json(value_schema, schema)
                elif (choices := text_choices(value_schema)) is not None:
                    value = lark.one_of(*(lark.text(cls.QUOTE + choice + cls.QUOTE) for choice in choices))
                else:
                    value = f"{lark.text(cls.QUOTE)} {lark.free_text(cls.QUOTE)}"
                members.append((f"{lark.text(key + ':')} {value}", is_required))
            opening = lark.text(f"call:{name}{{")
            expressions.append(f"{opening} {lark.members(members, ',')} {lark.text('}' + cls.END)}")
        return CallGrammar(lark.one_of(*expressions), begin=cls.MARKERS.texts[0])

    def _value(self, depth: int) -> Reading[None]:
        if depth > _MAX_DEPTH:
            raise Malformed
        char = yield from self.peek()
        if char == "{":
            yield from self._object(depth)
        elif char == "[":
            yield from self._list(depth)
        elif char == self.QUOTE[0]:
            yield from self.expect(self.QUOTE)
            self.add_arguments('"')
            yield from self.copy_until(
                self._end_of_text, lambda text: self.add_arguments(json.dumps(text, ensure_ascii=False)[1:-1])
            )
            self.add_arguments('"')
        else:
            yield from self.copy_json(self.add_arguments)

    def _object(self, depth: int) -> Reading[None]:
        self.add_arguments((yield from self.expect("{")))
        yield from self.skip_space()
        if (yield from self.found("}")) is not None:
            self.add_arguments("}")
            return
        while True:
            yield from self.skip_space()
            yield from self._key()
            yield from self.skip_space()
            self.add_arguments((yield from self.expect(":")))
            yield from self.skip_space()
            yield from self._value(depth + 1)
            yield from self.skip_space()
            end = yield from self.expect(",", "}")
            self.add_arguments(end)
            if end == "}":
                return

    def _key(self) -> Reading[None]:
        char = yield from self.peek()
        if char == '"':
            yield from self.copy_json_string(self.add_arguments)
            return
        if char == self.QUOTE[0]:
            yield from self._value(0)
            return
        parts: list[str] = []
        yield from self.copy_while(_KEY, parts.append)
        if not parts:
            raise Malformed
        self.add_arguments(json.dumps("".join(parts), ensure_ascii=False))

    def _list(self, depth: int) -> Reading[None]:
        self.add_arguments((yield from self.expect("[")))
        yield from self.skip_space()
        if (yield from self.found("]")) is not None:
            self.add_arguments("]")
            return
        while True:
            yield from self.skip_space()
            yield from self._value(depth + 1)
            yield from self.skip_space()
            end = yield from self.expect(",", "]")
            self.add_arguments(end)
            if end == "]":
                return


class Gemma4Parser(FunctionGemmaParser):
    """The same with other tags."""

    MARKERS: ClassVar[Markers] = Markers("<|tool_call>")
    END: ClassVar[str] = "<tool_call|>"
    QUOTE: ClassVar[str] = '<|"|>'
    SPECIAL: ClassVar[tuple[str, ...]] = ("<|tool_call>", "<tool_call|>", '<|"|>')
