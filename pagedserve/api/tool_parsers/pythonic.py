"""Llama 3.2 and 4: the answer is a list of calls as Python writes them, `[f(a=1, b="x"), g()]`."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import ClassVar

from pagedserve.api.text_machine import Malformed, Markers, Reading
from pagedserve.api.tool_grammar import CallGrammar, LarkWriter, Schema, ToolChoices, properties_of
from pagedserve.api.tool_parsers.base import NAME, ToolParser

_START, _END = "<|python_start|>", "<|python_end|>"
_PARAMETER = re.compile(r"[A-Za-z0-9_]+")
_STRING_ENDS = {quote: Markers(quote, "\\") for quote in "'\""}
# What a value that is no string or bracket consists of, such as -1.5e3 or None.
_WORD = re.compile(r"[A-Za-z0-9_.+-]+")
_CLOSERS = {"(": ")", "[": "]", "{": "}"}
_MAX_DEPTH = 100


class PythonicParser(ToolParser):
    """Calls stand at the very beginning. Arguments come out value by value, as JSON."""

    SPECIAL: ClassVar[tuple[str, ...]] = (_START, _END)

    def run(self) -> Reading[None]:
        yield from self.space()
        if (yield from self.attempt(self._read_list())):
            yield from self.closing(_END)
        yield from self.copy_rest(self.content)

    @classmethod
    def grammar(cls, lark: LarkWriter, calls: ToolChoices) -> CallGrammar:
        return CallGrammar(python_calls(lark, calls.tools), before="[", separator=", ", after="]")

    def _read_list(self) -> Reading[None]:
        yield from self.found(_START)
        yield from self.skip_space()
        yield from self.expect("[")
        while True:
            yield from self.skip_space()
            yield from self.python_call()
            yield from self.skip_space()
            if (yield from self.expect(",", "]")) == "]":
                self._record()
                return

    def python_call(self) -> Reading[None]:
        """`name(key=value, ...)`."""
        name: list[str] = []
        yield from self.copy_while(NAME, name.append)
        if not name:
            raise Malformed
        yield from self.expect("(")
        self.begin_call("".join(name))
        opening = "{"
        yield from self.skip_space()
        while (yield from self.found(")")) is None:
            key: list[str] = []
            yield from self.copy_while(_PARAMETER, key.append)
            if not key:
                raise Malformed
            yield from self.skip_space()
            yield from self.expect("=")
            value = _json_of((yield from self._literal()))
            self.add_arguments(f"{opening}{json.dumps(''.join(key))}: {value}")
            opening = ", "
            yield from self.skip_space()
            if (yield from self.expect(",", ")")) == ")":
                break
            yield from self.skip_space()
        self.add_arguments("{}" if opening == "{" else "}")
        self.end_call()

    def _literal(self) -> Reading[str]:
        """The text of one value: up to the comma or bracket outside of it."""
        parts: list[str] = []
        closers: list[str] = []
        while True:
            yield from self.skip_space()
            char = yield from self.peek()
            if not closers and char in ",)":
                return "".join(parts)
            if char in "'\"":
                yield from self._string(parts)
            elif char in _CLOSERS:
                parts.append((yield from self.expect(char)))
                closers.append(_CLOSERS[char])
                if len(closers) > _MAX_DEPTH:
                    raise Malformed
            elif closers and char == closers[-1]:
                parts.append((yield from self.expect(char)))
                closers.pop()
            elif char in ",:":
                parts.append((yield from self.expect(char)))
            else:
                word: list[str] = []
                yield from self.copy_while(_WORD, word.append)
                if not word:
                    raise Malformed
                # A space keeps two words apart, which Python then refuses.
                parts += [*word, " "]

    def _string(self, parts: list[str]) -> Reading[None]:
        quote = yield from self.expect("'", '"')
        parts.append(quote)
        ends = _STRING_ENDS[quote]
        while (end := (yield from self.copy_until(ends, lambda text: parts.append(_one_line(text))))) == "\\":
            # Whatever is escaped cannot end the string.
            parts.append(end + _one_line((yield from self.peek())))
            self._read(self._position + 1)
        parts.append(quote)


def python_calls(lark: LarkWriter, tools: Mapping[str, Schema]) -> str:
    """A rule for any one call, arguments in the order of the schema."""
    calls = []
    for name, schema in tools.items():
        members = [
            (f"{lark.text(key + '=')} {lark.json(value_schema, schema)}", is_required)
            for key, value_schema, is_required in properties_of(schema)
            if _PARAMETER.fullmatch(key)
        ]
        calls.append(f'{lark.text(name + "(")} {lark.members(members, ", ")} ")"')
    return lark.one_of(*calls)


def _one_line(text: str) -> str:
    return text.replace("\n", "\\n").replace("\r", "\\r").replace("\0", "\\0")


def _json_of(literal: str) -> str:
    """A Python literal, or what JSON calls true, false and null, as JSON."""
    try:
        return json.dumps(ast.literal_eval(literal.strip()), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        pass
    try:
        return json.dumps(json.loads(literal), ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise Malformed from error
