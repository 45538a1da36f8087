"""Tokens to text as they come, exactly: the pieces put together are the text of the whole sequence.

`IncrementalDetokenizer` turns tokens into text, `StopChecker` finds stop strings in it and holds back what may become
one, `TextStream` joins both and says which token completed a stop. All run in time linear in the output.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from pagedserve.engine.tokenizer import Tokenizer
from pagedserve.sampling_params import SamplingParams

_MAX_CHAR_BYTES = 4


class IncrementalDetokenizer:
    """The text of an output, token by token.

    Bytes of a character that is not complete yet are held (at most 3); bytes that can never be part of one become
    U+FFFD at once. With `prompt_token_ids` the output continues the prompt: a leading space is kept where the prompt
    has text before it, and the first output tokens may complete a character that the prompt began.
    `offsets[i]` is where in the output's text (in characters) token i begins.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        prompt_token_ids: Sequence[int] = (),
    ):
        table = tokenizer.token_bytes
        self._table = table
        self._hidden = tokenizer.special_ids if params.skip_special_tokens else frozenset()
        if params.shown_special_ids:
            self._hidden = self._hidden.difference(params.shown_special_ids)
        self._added = tokenizer.added_ids
        self._tight = bool(table.separator) and not params.spaces_between_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = 0
        self._at_start = True  # no visible token yet: the next one is the first of the text
        self._last_id = -1
        self._to_strip = table.strip_len
        self._prompt_bytes = b""
        self.offsets: list[int] = []
        self._continue_prompt(prompt_token_ids)

    def append(self, token_ids: Sequence[int]) -> str:
        """Text that the tokens add; empty while a character is incomplete."""
        return "".join(map(self._append_one, token_ids))

    def finish(self) -> str:
        """The end: an incomplete character becomes U+FFFD (nothing, if all its bytes are the prompt's)."""
        if self._prompt_bytes:
            self._prompt_bytes = b""
            self._decoder.reset()
        return self._trim(self._decoder.decode(b"", final=True))

    def _append_one(self, token_id: int) -> str:
        self.offsets.append(self._num_chars)
        if token_id in self._hidden:
            return ""
        piece = self._piece(token_id)
        if self._prompt_bytes and piece:
            # Only if the output completes the prompt's last character is that character part of the output.
            if not 0x80 <= piece[0] <= 0xBF:
                self._decoder.reset()
            self._prompt_bytes = b""
        text = self._decoder.decode(piece)
        return self._trim(text) if self._to_strip else self._count(text)

    def _piece(self, token_id: int) -> bytes:
        table = self._table
        if self._at_start:
            self._at_start = False
            piece = table.of_first(token_id)
        elif not table.separator or (self._tight and token_id in self._added and self._last_id in self._added):
            piece = table.of(token_id)
        else:
            piece = table.separator + table.of(token_id)
        self._last_id = token_id
        return piece

    def _trim(self, text: str) -> str:
        while self._to_strip and text:
            if text[0] != self._table.strip_char:
                self._to_strip = 0
                break
            self._to_strip -= 1
            text = text[1:]
        return self._count(text)

    def _count(self, text: str) -> str:
        self._num_chars += len(text)
        return text

    def _continue_prompt(self, prompt_token_ids: Sequence[int]) -> None:
        """Take over the state that decoding the prompt would leave. Only its last visible tokens are read."""
        enough = _MAX_CHAR_BYTES * (self._to_strip + 1)
        visible: list[int] = []
        tail = b""
        for token_id in reversed(prompt_token_ids):
            if token_id in self._hidden:
                continue
            visible.append(token_id)
            tail = self._table.of(token_id) + tail
            if len(tail) > enough:
                self._to_strip = 0
                break
        else:
            self._to_strip = self._left_to_strip(self._table.join(reversed(visible)).decode("utf-8", "replace"))
        if visible:
            self._at_start = False
            self._last_id = visible[0]
        self._decoder.decode(tail)
        self._prompt_bytes = self._decoder.getstate()[0]

    def _left_to_strip(self, text: str) -> int:
        """What remains of the trim at the start after a text that may be shorter than it."""
        start = text[: self._to_strip]
        return self._to_strip - len(start) if start == self._table.strip_char * len(start) else 0


@lru_cache(maxsize=1024)
def _failure_table(pattern: str) -> tuple[int, ...]:
    """Knuth, Morris, Pratt 1977: for each prefix, the length of its longest proper suffix that is a prefix."""
    table = [0] * (len(pattern) + 1)
    matched = 0
    for i in range(1, len(pattern)):
        while matched and pattern[i] != pattern[matched]:
            matched = table[matched]
        if pattern[i] == pattern[matched]:
            matched += 1
        table[i + 1] = matched
    return tuple(table)


class StopChecker:
    """Finds the first stop string in a text that comes in pieces.

    Text is held back only while it is the beginning of a stop string, hence at most one character less than the
    longest. The stop that is complete first wins; of those that end at the same character, the longest. A stop that is
    complete before `min_tokens` tokens is ordinary text.
    """

    def __init__(self, params: SamplingParams):
        self.matched: str | None = None
        self._patterns = [(stop, _failure_table(stop)) for stop in sorted(set(params.stop), key=len, reverse=True)]
        self._progress = [0] * len(self._patterns)
        self._first_chars = frozenset(stop[0] for stop, _ in self._patterns)
        self._include = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._held = ""

    def append(self, text: str, num_tokens: int) -> str:
        """Text that may be delivered now; `num_tokens` counts the output's tokens including those of `text`.

        Once a stop string is found, `matched` is set, the text is cut there, and nothing more comes out.
        """
        if self.matched is not None:
            return ""
        if not self._held and self._first_chars.isdisjoint(text):
            return text
        may_stop = num_tokens >= self._min_tokens
        buffer = self._held + text
        for position in range(len(self._held), len(buffer)):
            stop = self._advance(buffer[position])
            if stop is not None and may_stop:
                self.matched = stop
                self._held = ""
                end = position + 1
                return buffer[: end if self._include else end - len(stop)]
        num_held = max(self._progress, default=0)
        self._held = buffer[len(buffer) - num_held :]
        return buffer[: len(buffer) - num_held]

    def finish(self) -> str:
        """What was held back: the output ended before it became a stop string."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str | None:
        """Feed one character to each pattern; the longest stop string that it completes, if any."""
        found = None
        progress = self._progress
        for i, (stop, failure) in enumerate(self._patterns):
            matched = progress[i]
            while matched and stop[matched] != char:
                matched = failure[matched]
            if stop[matched] == char:
                matched += 1
            if matched == len(stop):
                found = found or stop
                matched = failure[matched]
            progress[i] = matched
        return found


@dataclass(frozen=True, slots=True)
class TextUpdate:
    """What new tokens brought: text to deliver, and, where a stop string was found, which and by which token.

    `num_tokens` of the appended tokens belong to the output (all of them without a stop).
    """

    text: str
    num_tokens: int
    stop: str | None


class TextStream:
    """The deliverable text of one choice: tokens in, text out, with stop strings found on the way.

    `text_offsets[i]` is where token i begins in the output's text, for logprobs.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: Sequence[int] = ()):
        self._detokenizer = IncrementalDetokenizer(tokenizer, params, prompt_token_ids)
        self._checker = StopChecker(params) if params.stop else None
        self._num_tokens = 0

    @property
    def text_offsets(self) -> list[int]:
        """One entry for each token so far."""
        return self._detokenizer.offsets

    def append(self, token_ids: Sequence[int]) -> TextUpdate:
        """Add tokens, in order."""
        if self._checker is None:
            self._num_tokens += len(token_ids)
            return TextUpdate(self._detokenizer.append(token_ids), len(token_ids), None)
        released = []
        for i, token_id in enumerate(token_ids):
            self._num_tokens += 1
            released.append(self._checker.append(self._detokenizer.append((token_id,)), self._num_tokens))
            if self._checker.matched is not None:
                return TextUpdate("".join(released), i + 1, self._checker.matched)
        return TextUpdate("".join(released), len(token_ids), None)

    def finish(self) -> TextUpdate:
        """The output ended for another reason: everything held back. Harmless after a stop (empty)."""
        if self._checker is None:
            return TextUpdate(self._detokenizer.finish(), 0, None)
        if self._checker.matched is not None:
            return TextUpdate("", 0, None)
        text = self._checker.append(self._detokenizer.finish(), self._num_tokens)
        return TextUpdate(text + self._checker.finish(), 0, self._checker.matched)
