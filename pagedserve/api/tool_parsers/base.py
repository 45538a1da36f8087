"""What parsers of tool calls share: content around calls, arguments piece by piece, calls that turn out broken."""

from __future__ import annotations

import json
import re
import uuid
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from pagedserve.api.parsed_events import (
    Content,
    Event,
    ToolCallAbort,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from pagedserve.api.text_machine import EndOfText, Malformed, Markers, Reading, TextMachine
from pagedserve.api.tool_grammar import CallGrammar, LarkWriter, ToolChoices

NAME = re.compile(r"[A-Za-z0-9_.-]+")
_SPACE = re.compile(r"\s+")


class ToolParser(TextMachine):
    """Text in, `Content` and `ToolCall...` events out. One object parses one answer.

    A subclass reads calls with `begin_call`, `add_arguments` and `end_call`. What it raises `Malformed` for becomes
    content again, as does a call that the text ends within, and one of a function that nobody offered. White space next
    to calls is no content unless text follows it.
    """

    # Markers that may be special tokens, which would not show in the text.
    SPECIAL: ClassVar[tuple[str, ...]] = ()
    # True where the marker begins nothing but calls, wherever it stands: then what follows it can be constrained.
    CAN_CONSTRAIN: ClassVar[bool] = False

    def __init__(self, tools: Mapping[str, Mapping[str, Any]]):
        """`tools` maps names to the JSON schemas of their arguments."""
        super().__init__()
        self.tools = tools
        self._events: list[Event] = []
        self._space = ""
        self._num_calls = 0
        self._is_open = False
        self._follows_call = False

    def feed(self, text: str) -> list[Event]:
        """Events that the text completes."""
        self._resume(text)
        return self._taken()

    def finish(self) -> list[Event]:
        """The last events: the text is over."""
        self._resume("", is_final=True)
        if self._space and not self._follows_call:
            self._events.append(Content(self._space))
        return self._taken()

    def new_call_id(self) -> str:
        """An id for a call, unique everywhere."""
        return f"chatcmpl-tool-{uuid.uuid4().hex}"

    @classmethod
    @abstractmethod
    def grammar(cls, lark: LarkWriter, calls: ToolChoices) -> CallGrammar:
        """One call in Lark, and what stands around it."""

    # -- what subclasses use ------------------------------------------------------------------------------------------

    def attempt(self, reading: Reading[None], *already: str) -> Reading[bool]:
        """Run a reading of calls; False where it breaks off. `already` was read of it before."""
        self._record(*already)
        try:
            yield from reading
        except (Malformed, EndOfText):
            self._undo()
            return False
        self._forget()
        return True

    def content(self, text: str) -> None:
        """Text that belongs to no call."""
        stripped = text.rstrip()
        if stripped:
            self._events.append(Content(self._space + stripped))
            self._space = text[len(stripped) :]
            self._follows_call = False
        else:
            self._space += text

    def begin_call(self, name: str) -> None:
        """A call begins; Malformed where there is no such function."""
        if name not in self.tools:
            raise Malformed
        self._events.append(ToolCallBegin(self._num_calls, self.new_call_id(), name))
        self._is_open = True

    def add_arguments(self, text: str) -> None:
        """The next piece of the arguments of the call that has begun."""
        self._events.append(ToolCallArguments(self._num_calls, text))

    def end_call(self) -> None:
        """The call is complete: it stands, whatever follows."""
        self._events.append(ToolCallEnd(self._num_calls))
        self._is_open = False
        self._follows_call = True
        self._num_calls += 1
        self._space = ""
        self._record()

    def space(self) -> Reading[None]:
        """White space between calls or after the last, which is kept in case that text follows."""
        yield from self.copy_while(_SPACE, self._keep_space)

    def closing(self, *literals: str) -> Reading[None]:
        """What may close a call that is complete, white space before it included."""
        space: list[str] = []
        yield from self.copy_while(_SPACE, space.append)
        if (yield from self.found(*literals)) is not None:
            return
        rest = self._buffer[self._position :]
        if self._is_final and rest and any(literal.startswith(rest) for literal in literals):
            self._read(len(self._buffer))  # the text was cut within it
            self._record()
            return
        self._keep_space("".join(space))

    def _keep_space(self, text: str) -> None:
        self._space += text
        # It is accounted for: should a call behind it turn out malformed, it is not part of it.
        if self._recorded is not None and not self._is_open:
            self._recorded.clear()

    def name_until(self, markers: Markers) -> Reading[str]:
        """A function's name, up to a marker, which is read too."""
        parts: list[str] = []
        yield from self.copy_until(markers, parts.append)
        return "".join(parts).strip()

    # -- calls written as JSON ----------------------------------------------------------------------------------------

    def json_calls(self) -> Reading[None]:
        """One object `{"name": ..., "arguments": {...}}`, or a list of them."""
        if (yield from self.found("[")) is None:
            yield from self.json_call()
            return
        yield from self.skip_space()
        if (yield from self.found("]")) is not None:
            raise Malformed  # nothing is called
        while True:
            yield from self.json_call()
            yield from self.skip_space()
            if (yield from self.expect(",", "]")) == "]":
                self._record()
                return
            yield from self.skip_space()

    def json_call(
        self,
        *,
        name_keys: tuple[str, ...] = ("name",),
        argument_keys: tuple[str, ...] = ("arguments", "parameters"),
        other_keys: tuple[str, ...] = ("id", "type"),
    ) -> Reading[None]:
        """One call as a JSON object, its keys in any order; keys that mean nothing here are Malformed."""
        yield from self.expect("{")
        name = held = None
        is_first = True
        while True:
            yield from self.skip_space()
            if is_first and (yield from self.found("}")) is not None:
                raise Malformed
            is_first = False
            key = yield from self._json_text()
            yield from self.skip_space()
            yield from self.expect(":")
            yield from self.skip_space()
            if key in name_keys and name is None:
                name = yield from self._json_text()
                if held is not None:
                    self.begin_call(name)
                    self.add_arguments(held)
            elif key in argument_keys and held is None:
                held = yield from self._json_arguments(name)
            elif key in other_keys:
                yield from self.copy_json(_drop)
            else:
                raise Malformed
            yield from self.skip_space()
            if (yield from self.expect(",", "}")) == "}":
                break
        if name is None:
            raise Malformed
        if held is None:
            self.begin_call(name)
            self.add_arguments("{}")
        self.end_call()

    def _json_arguments(self, name: str | None) -> Reading[str]:
        """The arguments: passed on at once where the name is known; returned as far as they were not."""
        char = yield from self.peek()
        if char == "{":
            if name is not None:
                self.begin_call(name)
                yield from self.copy_json(self.add_arguments)
                return ""
            parts: list[str] = []
            yield from self.copy_json(parts.append)
            text = "".join(parts)
        elif char == "n":
            yield from self.expect("null")
            text = "{}"
        else:
            # Some models encode them twice.
            text = (yield from self._json_text()).strip() or "{}"
            if not _is_object(text):
                raise Malformed
        if name is not None:
            self.begin_call(name)
            self.add_arguments(text)
            return ""
        return text

    def _json_text(self) -> Reading[str]:
        parts: list[str] = []
        yield from self.copy_json_string(parts.append)
        text: str = json.loads("".join(parts))
        return text

    # -- inside -------------------------------------------------------------------------------------------------------

    def _undo(self) -> None:
        """What was recorded is no call: it becomes content."""
        raw = self._forget()
        if self._is_open:
            self._events.append(ToolCallAbort(self._num_calls))
            self._num_calls += 1
            self._is_open = False
        if raw:
            self.content(raw)

    def _taken(self) -> list[Event]:
        events = self._events
        if not events:
            return []
        self._events = []
        return events if len(events) == 1 else list(_joined(events))


class MarkedParser(ToolParser):
    """Calls anywhere in a text, each begun by a marker; a subclass reads what follows one."""

    # What begins calls; none of them stands within another.
    MARKERS: ClassVar[Markers]
    CAN_CONSTRAIN: ClassVar[bool] = True

    def run(self) -> Reading[None]:
        while True:
            marker = yield from self.copy_until(self.MARKERS, self.content)
            yield from self.attempt(self.read_calls(marker), marker)

    @abstractmethod
    def read_calls(self, marker: str) -> Reading[None]:
        """Read what `marker` began: one call or several."""


def _joined(events: list[Event]) -> Iterable[Event]:
    """Neighbouring texts of the same kind as one."""
    last: Event | None = None
    for event in events:
        if isinstance(event, Content | ToolCallArguments) and type(event) is type(last):
            last.text += event.text  # type: ignore[union-attr]
            continue
        if last is not None:
            yield last
        last = event
    if last is not None:
        yield last


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _drop(text: str) -> None:
    """A sink for what nobody needs."""
