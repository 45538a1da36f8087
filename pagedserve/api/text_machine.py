"""Parsers of a text that comes in pieces, written as if the text were there.

A `TextMachine` is a generator that reads with the primitives below and yields wherever it needs text that has not come.
Each primitive decides by characters alone, never by where a piece ended, so whatever is built from them gives the same
result for any split of the text (`tests/api/test_text_machine.py` holds them to it), in time linear in the text: what
was read is dropped, and at most the beginning of one marker is held back.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
# What a primitive is: `yield from` it; it yields nothing, and returns T once the text has come.
Reading = Generator[None, None, T]
Sink = Callable[[str], object]

_SPACE = re.compile(r"\s+")
_NUMBER_CHARS = re.compile(r"[-+0-9.eE]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_STRING_CHARS = re.compile(r'[^"\\\x00-\x1f]+')
_ESCAPES = '"\\/bfnrt'
_HEX = frozenset("0123456789abcdefABCDEF")
_CONTROLS = {"\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


class EndOfText(Exception):
    """The text is over where more was needed."""


class Malformed(Exception):
    """The text is not what it would have to be. What was read of it is recorded; the rest is still unread."""


class Markers:
    """Texts to look for. None may be part of another: which one is meant would depend on what has come yet."""

    def __init__(self, *texts: str):
        for text in texts:
            if any(text in other for other in texts if other is not text):
                raise ValueError(f"{text!r} is part of another marker")
        self.texts = texts
        self._pattern = re.compile("|".join(map(re.escape, texts)))
        self._first = re.compile("|".join(re.escape(char) for char in sorted({text[0] for text in texts})))
        self._beginnings = frozenset(text[:end] for text in texts for end in range(1, len(text)))
        self._longest = max(map(len, texts)) - 1

    def find(self, text: str, start: int) -> re.Match[str] | None:
        """The first marker at or after `start`."""
        return self._pattern.search(text, start)

    def num_held(self, text: str, start: int) -> int:
        """Length of the end of `text` that may be the beginning of a marker."""
        first = self._first.search(text, max(start, len(text) - self._longest))
        if first is None:
            return 0
        for length in range(len(text) - first.start(), 0, -1):
            if text[-length:] in self._beginnings:
                return length
        return 0


class TextMachine(ABC):
    """Base of all parsers: `feed` pieces, then `finish`. Subclasses write `run`."""

    def __init__(self) -> None:
        self._buffer = ""
        self._position = 0
        self._is_final = False
        # Texts read since `record`, for a reading that may turn out malformed.
        self._recorded: list[str] | None = None
        self._running: Reading[None] | None = None

    @abstractmethod
    def run(self) -> Reading[None]:
        """Read the whole text; EndOfText may escape."""

    def _resume(self, text: str, *, is_final: bool = False) -> None:
        if self._running is None:
            self._running = self.run()
        self._buffer = self._buffer[self._position :] + text if self._position < len(self._buffer) else text
        self._position = 0
        self._is_final = is_final
        try:
            next(self._running)
        except (StopIteration, EndOfText):
            self._running = _ended()

    # -- primitives ---------------------------------------------------------------------------------------------------

    def peek(self) -> Reading[str]:
        """The next character, unread. EndOfText where there is none."""
        while self._position == len(self._buffer):
            if self._is_final:
                raise EndOfText
            yield
        return self._buffer[self._position]

    def copy_until(self, markers: Markers, sink: Sink) -> Reading[str]:
        """Read up to and including a marker, which is returned; what stands before it goes to `sink` as it comes."""
        while True:
            match = markers.find(self._buffer, self._position)
            if match is not None:
                self._copy(match.start(), sink)
                self._read(match.end())
                return match[0]
            held = 0 if self._is_final else markers.num_held(self._buffer, self._position)
            self._copy(len(self._buffer) - held, sink)
            if self._is_final:
                raise EndOfText
            yield

    def copy_rest(self, sink: Sink) -> Reading[None]:
        """Everything that still comes."""
        while True:
            self._copy(len(self._buffer), sink)
            if self._is_final:
                raise EndOfText
            yield

    def copy_while(self, pattern: re.Pattern[str], sink: Sink) -> Reading[None]:
        """Read characters as long as they match `pattern`, a repeated class of characters. The end of text is fine."""
        while True:
            match = pattern.match(self._buffer, self._position)
            if match is not None:
                self._copy(match.end(), sink)
            if self._position < len(self._buffer) or self._is_final:
                return
            yield

    def skip_space(self) -> Reading[None]:
        """Read white space, if any."""
        yield from self.copy_while(_SPACE, _drop)

    def found(self, *literals: str) -> Reading[str | None]:
        """Read whichever literal stands here and return it; None, with nothing read, where none does.

        None may be the beginning of another.
        """
        while True:
            candidates = False
            for literal in literals:
                if self._buffer.startswith(literal, self._position):
                    self._read(self._position + len(literal))
                    return literal
                candidates = candidates or literal.startswith(self._buffer[self._position :])
            if not candidates or self._is_final:
                return None
            yield

    def expect(self, *literals: str) -> Reading[str]:
        """As `found`; Malformed where none of the literals stands here, EndOfText where the text ends before it."""
        literal = yield from self.found(*literals)
        if literal is None:
            if self._is_final and any(text.startswith(self._buffer[self._position :]) for text in literals):
                raise EndOfText
            raise Malformed
        return literal

    # -- JSON ---------------------------------------------------------------------------------------------------------

    def copy_json(self, sink: Sink) -> Reading[None]:
        """Copy one JSON value (RFC 8259) as it comes; Malformed at the first character that cannot belong to it.

        One liberty: a control character within a string, which JSON forbids and models write, is copied escaped.
        """
        closers: list[str] = []
        wants_value, may_close = True, False
        while True:
            yield from self.copy_while(_SPACE, sink)
            char = yield from self.peek()
            if may_close and char == closers[-1]:
                sink((yield from self.expect(char)))
                closers.pop()
                wants_value = may_close = False
            elif not wants_value:
                sink((yield from self.expect(",")))
                wants_value, may_close = True, False
                if closers[-1] == "}":
                    yield from self._copy_key(sink)
                continue
            elif char in "{[":
                sink((yield from self.expect(char)))
                closers.append("}" if char == "{" else "]")
                wants_value = char == "["
                may_close = True
                if char == "{":
                    yield from self.copy_while(_SPACE, sink)
                    if (yield from self.peek()) != "}":
                        yield from self._copy_key(sink)
                        wants_value, may_close = True, False
                continue
            else:
                yield from self._copy_scalar(char, sink)
                wants_value = False
            if not closers:
                return
            may_close = True

    def _copy_key(self, sink: Sink) -> Reading[None]:
        yield from self.copy_while(_SPACE, sink)
        yield from self.copy_json_string(sink)
        yield from self.copy_while(_SPACE, sink)
        sink((yield from self.expect(":")))

    def _copy_scalar(self, char: str, sink: Sink) -> Reading[None]:
        if char == '"':
            yield from self.copy_json_string(sink)
        elif char in "tfn":
            sink((yield from self.expect("true", "false", "null")))
        else:
            number: list[str] = []
            yield from self.copy_while(_NUMBER_CHARS, number.append)
            text = "".join(number)
            if not _NUMBER.fullmatch(text):
                raise Malformed
            sink(text)

    def copy_json_string(self, sink: Sink) -> Reading[None]:
        """Copy one JSON string, quotes included."""
        sink((yield from self.expect('"')))
        while True:
            yield from self.copy_while(_STRING_CHARS, sink)
            char = yield from self.peek()
            self._read(self._position + 1)
            if char == '"':
                sink(char)
                return
            if char != "\\":
                sink(_CONTROLS.get(char) or f"\\u{ord(char):04x}")
                continue
            escape = yield from self.peek()
            if escape == "u":
                self._read(self._position + 1)
                digits = ""
                while len(digits) < 4:
                    if (yield from self.peek()) not in _HEX:
                        raise Malformed
                    digits += self._buffer[self._position]
                    self._read(self._position + 1)
                sink(f"\\u{digits}")
            elif escape in _ESCAPES:
                self._read(self._position + 1)
                sink(f"\\{escape}")
            else:
                raise Malformed

    # -- what was read ------------------------------------------------------------------------------------------------

    def _record(self, *already: str) -> None:
        """Remember what is read from here on; `already` was read before."""
        self._recorded = list(already)

    def _forget(self) -> str:
        """The recorded text, which is no longer recorded."""
        text = "".join(self._recorded or ())
        self._recorded = None
        return text

    def _copy(self, end: int, sink: Sink) -> None:
        if end > self._position:
            sink(self._read(end))

    def _read(self, end: int) -> str:
        text = self._buffer[self._position : end]
        self._position = end
        if self._recorded is not None:
            self._recorded.append(text)
        return text


def _drop(text: str) -> None:
    """A sink for what nobody needs."""


def _ended() -> Reading[None]:
    while True:
        yield
