"""gpt-oss (harmony): the answer is messages, each with a channel.

`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...`: the analysis channel is
thoughts; final, and commentary to nobody in particular, is text; a message to a function is handed on with its header,
for `tool_parsers.harmony` to read.
"""

from __future__ import annotations

import re
from typing import ClassVar

from pagedserve.api.reasoning_parsers.base import ReasoningParser
from pagedserve.api.text_machine import EndOfText, Markers, Reading

_RECIPIENT = re.compile(r"\bto=(\S+?)(?=<|\s|$)")
_BEGIN = Markers("<|start|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>")
_HEADER = Markers("<|message|>")
_END = Markers("<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>")


class HarmonyReasoning(ReasoningParser):
    """An answer without any channel is text."""

    ANSWER: ClassVar[str] = "<|channel|>final<|message|>"

    SPECIAL: ClassVar[tuple[str, ...]] = (*_BEGIN.texts, *_HEADER.texts, "<|constrain|>")

    def run(self) -> Reading[None]:
        while True:
            marker = yield from self.copy_until(_BEGIN, self.rest)
            while marker in ("<|start|>", "<|channel|>"):
                marker = yield from self._message(marker)

    def _message(self, marker: str) -> Reading[str]:
        """One message behind `marker`; returns the marker that ended it."""
        parts = [marker]
        try:
            yield from self.copy_until(_HEADER, parts.append)
        except EndOfText:
            # No message came of it; what was written of its header is not lost.
            self.rest("".join(parts))
            raise
        header = "".join(parts)
        recipient = _RECIPIENT.search(header)
        if recipient is not None:
            self.rest(f"<|channel|>commentary to={recipient[1]} <|constrain|>json<|message|>")
            marker = yield from self.copy_until(_END, self.rest)
            self.rest("<|call|>")
            return marker
        if "analysis" not in header:
            return (yield from self.copy_until(_END, self.rest))
        self.begin()
        try:
            marker = yield from self.thoughts(_END)
        finally:
            self.end()
        return marker
