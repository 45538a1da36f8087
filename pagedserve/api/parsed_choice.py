"""One choice of an answer whose text is taken apart: what to show of it, when it is over, and why."""

from __future__ import annotations

from pagedserve.api.parsed_events import Event, Reasoning, ToolCallEnd
from pagedserve.api.parsed_output import OutputParser, ParsedMessage
from pagedserve.api.protocol.tools import ToolUse
from pagedserve.outputs import CompletionOutput


class ParsedChoice:
    """Follows one choice. `message` is what was said so far, `output` the engine's output it was taken from."""

    def __init__(self, parser: OutputParser, tools: ToolUse, *, shows_reasoning: bool = True):
        self._parser = parser
        self._tools = tools
        self._shows_reasoning = shows_reasoning
        self.message = ParsedMessage()
        self.output: CompletionOutput | None = None
        self.finish_reason: str | None = None

    @property
    def is_over(self) -> bool:
        """True once nothing more of this choice is wanted."""
        return self.finish_reason is not None

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of thoughts so far, also where they are not shown."""
        return self._parser.num_reasoning_tokens

    def take(self, choice: CompletionOutput) -> list[Event]:
        """The events of the choice's new deltas, as far as they are to be shown."""
        if self.is_over:
            return []
        self.output = choice
        shown: list[Event] = []
        for event in self._parser.feed(choice):
            if isinstance(event, Reasoning) and not self._shows_reasoning:
                continue
            self.message.add(event)
            shown.append(event)
            if isinstance(event, ToolCallEnd) and not self._tools.is_parallel:
                # One call was asked for: what the model goes on to say is not wanted.
                self.finish_reason = self._reason("stop")
                return shown
        if choice.finish_reason is not None:
            self.finish_reason = self._reason(choice.finish_reason)
        return shown

    def _reason(self, reason: str) -> str:
        """OpenAI's: an answer that ends with a call the model chose ends for that call; a named call is no choice."""
        if reason == "stop" and self.message.tool_calls and self._tools.mode != "named":
            return "tool_calls"
        return reason
