"""What parsers of reasoning share: a text divided into thoughts and the rest."""

from __future__ import annotations

import re
from typing import ClassVar

from pagedserve.api.text_machine import EndOfText, Markers, Reading, TextMachine

_SPACE = re.compile(r"\s+")


class ReasoningParser(TextMachine):
    """Text in, (is reasoning, text) pieces out. One object parses one answer.

    `is_open`: the prompt ends within the thoughts already. White space around thoughts belongs to neither part.
    `spans` says where in the text, in characters, thoughts and their closing markers stand (-1: no end yet);
    `num_chars` is how much of it was read.
    """

    # Markers that may be special tokens, which would not show in the text.
    SPECIAL: ClassVar[tuple[str, ...]] = ()
    # What ends the thoughts; "" where no single text does.
    CLOSE: ClassVar[str] = ""
    # What stands before the text that the client asked for, where that is more than the end of thoughts.
    ANSWER: ClassVar[str] = ""

    def __init__(self, *, is_open: bool = False):
        super().__init__()
        self.is_open = is_open
        self.spans: list[list[int]] = []
        self.num_chars = 0
        # True once no thoughts can come any more: the rest of the text need not come through here.
        self.is_done = False
        self._pieces: list[tuple[bool, str]] = []
        self._space = ""

    @classmethod
    def opens(cls, prompt: str, continued: str = "") -> bool:
        """Whether a prompt ends within the thoughts. `continued` is what it holds of the answer to go on with."""
        return False

    @classmethod
    def markers(cls) -> tuple[str, str] | None:
        """What begins and what ends thoughts; None where it is not one text each."""
        return None

    def feed(self, text: str) -> list[tuple[bool, str]]:
        """The pieces that the text brings."""
        self._resume(text)
        return self._taken()

    def finish(self) -> list[tuple[bool, str]]:
        """The last pieces: the text is over."""
        self._resume("", is_final=True)
        return self._taken()

    # -- what subclasses use ------------------------------------------------------------------------------------------

    def begin(self, *, before: int = 0) -> None:
        """Thoughts begin here, or began with a marker so many characters before."""
        # Thoughts that come in several parts are paragraphs.
        self._space = "\n\n" if self.spans else ""
        self.spans.append([self.num_chars - before, -1])

    def end(self) -> None:
        """They end here."""
        self.spans[-1][1] = self.num_chars
        self._space = ""

    def thoughts(self, markers: Markers) -> Reading[str]:
        """Thoughts up to a marker, which is returned."""
        yield from self.skip_space()
        marker = yield from self.copy_until(markers, self._think)
        return marker

    def rest(self, text: str) -> None:
        """Text that is no thought."""
        self._pieces.append((False, text))

    # -- inside -------------------------------------------------------------------------------------------------------

    def _think(self, text: str) -> None:
        stripped = text.rstrip()
        if stripped:
            self._pieces.append((True, self._space + stripped))
            self._space = text[len(stripped) :]
        else:
            self._space += text

    def _read(self, end: int) -> str:
        text = super()._read(end)
        self.num_chars += len(text)
        return text

    def _taken(self) -> list[tuple[bool, str]]:
        pieces, self._pieces = self._pieces, []
        return pieces


class DelimitedReasoning(ReasoningParser):
    """Thoughts between two markers at the beginning of the answer; later ones are text.

    A model that explains what "<think>" means must not lose its answer, so only the first words count.
    """

    OPEN: ClassVar[tuple[str, ...]]
    END: ClassVar[Markers]

    @classmethod
    def opens(cls, prompt: str, continued: str = "") -> bool:
        if continued:
            opened = max(map(continued.rfind, cls.OPEN))
            return opened > max(map(continued.rfind, cls.END.texts))
        return prompt.rstrip().endswith(cls.OPEN)

    @classmethod
    def markers(cls) -> tuple[str, str] | None:
        return (cls.OPEN[0], cls.CLOSE) if cls.CLOSE else None

    def run(self) -> Reading[None]:
        space: list[str] = []
        if self.is_open:
            self.begin()
            yield from self.skip_space()
            yield from self.found(*self.OPEN)  # some models write it once more
        else:
            yield from self.copy_while(_SPACE, space.append)
            opening = yield from self.found(*self.OPEN)
            if opening is None:
                for text in space:
                    self.rest(text)
                self.is_done = True
                yield from self.copy_rest(self.rest)
                return
            self.begin(before=len(opening))
        try:
            yield from self.thoughts(self.END)
        except EndOfText:
            self.end()
            raise
        self.end()
        yield from self.skip_space()
        self.is_done = True
        yield from self.copy_rest(self.rest)
