"""Llama 3.1 to 4: the answer is `{"name": "f", "parameters": {...}}`, several of them separated by `;`."""

from __future__ import annotations

from typing import ClassVar

from pagedserve.api.text_machine import Reading
from pagedserve.api.tool_grammar import CallGrammar, LarkWriter, ToolChoices
from pagedserve.api.tool_parsers.base import ToolParser

_TAGS = ("<|python_tag|>", "<|python_start|>")


class Llama3JsonParser(ToolParser):
    """Calls stand at the very beginning; an answer that begins otherwise is text to its end."""

    SPECIAL: ClassVar[tuple[str, ...]] = (*_TAGS, "<|python_end|>")

    def run(self) -> Reading[None]:
        yield from self.space()
        going_on = yield from self.attempt(self._first_calls())
        while going_on:
            yield from self.closing("<|python_end|>")
            going_on = yield from self.attempt(self._next_calls())
        yield from self.copy_rest(self.content)

    def _first_calls(self) -> Reading[None]:
        yield from self.found(*_TAGS)
        yield from self.skip_space()
        yield from self.json_calls()

    def _next_calls(self) -> Reading[None]:
        if (yield from self.found(";", *_TAGS)) is not None:
            yield from self.skip_space()
        yield from self.json_calls()

    @classmethod
    def grammar(cls, lark: LarkWriter, calls: ToolChoices) -> CallGrammar:
        return CallGrammar(lark.json_call('{"name": "NAME", "parameters": ', "}", calls.tools), separator="; ")
