"""gpt-oss: `<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>`.

Reads what `reasoning_parsers.harmony` leaves of an answer: the text of the final channel, and messages to functions.
"""

from __future__ import annotations

import re
from typing import ClassVar

from pagedserve.api.text_machine import Malformed, Markers, Reading
from pagedserve.api.tool_grammar import CallGrammar, LarkWriter, ToolChoices
from pagedserve.api.tool_parsers.base import MarkedParser

RECIPIENT = re.compile(r"\bto=functions\.([A-Za-z0-9_.-]+)")
_MESSAGE = Markers("<|message|>")


class HarmonyParser(MarkedParser):
    """One message a call."""

    MARKERS: ClassVar[Markers] = Markers("<|channel|>")
    CAN_CONSTRAIN: ClassVar[bool] = False
    SPECIAL: ClassVar[tuple[str, ...]] = (
        *("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"),
        *("<|end|>", "<|call|>", "<|return|>"),
    )

    def read_calls(self, marker: str) -> Reading[None]:
        header = yield from self.name_until(_MESSAGE)
        recipient = RECIPIENT.search(header)
        if recipient is None:
            raise Malformed
        yield from self.skip_space()
        if (yield from self.peek()) != "{":
            raise Malformed
        self.begin_call(recipient[1])
        yield from self.copy_json(self.add_arguments)
        self.end_call()
        yield from self.closing("<|call|>", "<|end|>")

    @classmethod
    def grammar(cls, lark: LarkWriter, calls: ToolChoices) -> CallGrammar:
        # A call ends the model's turn, so there is never a second one.
        begin = "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>"
        return CallGrammar(lark.json_call(begin, "", calls.tools), max_calls=1)
