"""The primitives of parsers: what they read never depends on how the text was divided."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedserve.api.text_machine import EndOfText, Malformed, Markers, Reading, TextMachine

PIECES = st.lists(st.text(alphabet="ab<>/ \n", max_size=6), max_size=8)


class Recorder(TextMachine):
    """Runs one reading and tells what came of it."""

    def __init__(self, *markers: str):
        super().__init__()
        self.copied = ""
        self.outcome: str | None = None
        self._markers = Markers(*markers) if markers else None

    def run(self) -> Reading[None]:
        self._record()
        try:
            if self._markers is not None:
                self.outcome = yield from self.copy_until(self._markers, self._copied)
            else:
                yield from self.copy_json(self._copied)
                self.outcome = "json"
        except EndOfText:
            self.outcome = "end"
        except Malformed:
            self.outcome = "malformed"

    def _copied(self, text: str) -> None:
        self.copied += text

    def result(self, pieces: Sequence[str]) -> tuple[str | None, str, str]:
        for piece in pieces:
            self._resume(piece)
        self._resume("", is_final=True)
        return self.outcome, self.copied, self._forget()


def cut(text: str, places: Sequence[int]) -> list[str]:
    """The text cut at these places, which may lie anywhere."""
    borders = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(borders)]


@given(PIECES)
def test_markers_are_found_where_the_whole_text_has_them(pieces: list[str]) -> None:
    markers = ("<a>", "</a>", "ab\n", "<b")
    text = "".join(pieces)
    outcome, copied, read = Recorder(*markers).result(pieces)
    best = min(((text.find(m), m) for m in markers if m in text), default=None)
    if best is None:
        assert (outcome, copied, read) == ("end", text, text)
    else:
        place, marker = best
        assert (outcome, copied, read) == (marker, text[:place], text[: place + len(marker)])


def test_no_more_than_a_marker_is_held_back() -> None:
    machine = Recorder("<tool_call>")
    machine._resume("abc <tool_ca")
    assert machine.copied == "abc "
    machine._resume("n ")
    assert machine.copied == "abc <tool_can "


def test_markers_within_markers_are_refused() -> None:
    with pytest.raises(ValueError, match="part of another"):
        Markers("</a>", "\n</a>")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=4), children, max_size=4),
    max_leaves=12,
)
CUTS = st.lists(st.integers(0, 10_000), max_size=6)


@settings(max_examples=50)
@given(JSON, st.sampled_from([None, 1]), st.booleans(), CUTS)
def test_json_is_copied_as_it_is(value: object, indent: int | None, ascii_only: bool, places: list[int]) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    # A number alone ends with the text; anything else ends itself.
    outcome, copied, read = Recorder().result([*cut(text, places), "\n" if isinstance(value, float | int) else ""])
    assert (outcome, copied) == ("json", text)
    assert read.rstrip() == text


@given(st.lists(st.sampled_from('{}[]":,\\ \n01-.eEtrufalsn\x01é'), max_size=24), CUTS)
def test_what_is_no_json_is_refused_at_the_same_character(characters: list[str], places: list[int]) -> None:
    text = "".join(characters)
    whole = Recorder().result([text])
    assert Recorder().result(cut(text, places)) == whole == Recorder().result(list(text))
    outcome, copied, read = whole
    assert text.startswith(read)
    if outcome == "json":
        json.loads(copied)
    else:
        with pytest.raises(ValueError):
            json.loads(text)


def test_control_characters_within_strings_are_escaped() -> None:
    outcome, copied, _ = Recorder().result(['{"a": "x\ny\t\x01\x0b"}'])
    assert outcome == "json"
    assert json.loads(copied) == {"a": "x\ny\t\x01\x0b"}


@pytest.mark.parametrize(
    "text", ["01", "1.", "-", ".5", "+1", "tru", "[1,]", '{"a":}', "{,}", '{"a" 1}', '"\\x"', "[1 2]"]
)
def test_common_mistakes_are_no_json(text: str) -> None:
    assert Recorder().result([text, " "])[0] in ("malformed", "end")
    assert Recorder().result([*text, " "])[0] != "json"
