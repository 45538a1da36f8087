"""Mistral: `[TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]`, since version 11 `[TOOL_CALLS]f[ARGS]{...}` each."""

from __future__ import annotations

import secrets
import string
from typing import ClassVar

from pagedserve.api.text_machine import Malformed, Markers, Reading
from pagedserve.api.tool_grammar import CallGrammar, LarkWriter, ToolChoices
from pagedserve.api.tool_parsers.base import NAME, MarkedParser

_ID_CHARS = string.ascii_letters + string.digits


class MistralParser(MarkedParser):
    """Both forms; `[CALL_ID]` of the newer one is read over, for ids are given here."""

    MARKERS: ClassVar[Markers] = Markers("[TOOL_CALLS]")
    SPECIAL: ClassVar[tuple[str, ...]] = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")

    def new_call_id(self) -> str:
        """Mistral's templates take ids of nine letters and digits only."""
        return "".join(secrets.choice(_ID_CHARS) for _ in range(9))

    def read_calls(self, marker: str) -> Reading[None]:
        yield from self.skip_space()
        if (yield from self.peek()) in "[{":
            yield from self.json_calls()
            return
        parts: list[str] = []
        yield from self.copy_while(NAME, parts.append)
        if not parts:
            raise Malformed
        yield from self.skip_space()
        while (section := (yield from self.found("[CALL_ID]", "[ARGS]"))) is not None:
            if section == "[ARGS]":
                yield from self.skip_space()
                break
            yield from self.copy_while(NAME, lambda _: None)
        if (yield from self.peek()) != "{":
            raise Malformed
        self.begin_call("".join(parts))
        yield from self.copy_json(self.add_arguments)
        self.end_call()

    @classmethod
    def grammar(cls, lark: LarkWriter, calls: ToolChoices) -> CallGrammar:
        if "[ARGS]" in calls.template:
            return CallGrammar(lark.json_call("NAME[ARGS]", "", calls.tools), begin="[TOOL_CALLS]")
        call = lark.json_call('{"name": "NAME", "arguments": ', "}", calls.tools)
        space = " " if "[TOOL_CALLS] [" in calls.template else ""
        return CallGrammar(call, before=f"[TOOL_CALLS]{space}[", separator=", ", after="]")
