"""What the scripted model recites: one passage after the other, each found by the length of the prompt."""

from __future__ import annotations

from collections.abc import Sequence

from tests.helpers.byte_tokenizer import BOS_ID, EOS_ID, FIRST_BYTE_ID, IM_START_ID, byte_ids

# Ids of two-letter tokens, see tests.helpers.byte_tokenizer: a stop string can begin and end inside them.
TH, IN = FIRST_BYTE_ID + 256, FIRST_BYTE_ID + 258


def _bytes(raw: bytes) -> list[int]:
    return [FIRST_BYTE_ID + byte for byte in raw]


PASSAGES: dict[str, list[int]] = {
    "first": byte_ids("\nrest"),
    "thing": [TH, *byte_ids("e "), TH, IN, *byte_ids("g "), TH, *byte_ids("e")],
    "special": [*byte_ids("hello world"), IM_START_ID, *byte_ids("more")],
    # From here on the passages can also be asked for by a chat, whose template alone has some forty tokens.
    "characters": byte_ids("a🦜é汉👩‍👩‍👧‍👦🇺🇳 z"),
    "parrot": byte_ids("ok🦜"),
    "broken": _bytes(b"A\xffB\xc0\x80C\xed\xa0\x80D\x80\x80\x80\x80E"),
    "total": byte_ids("Total: 42\nResult: x"),
    "foo": byte_ids("foo END barbaz"),
    "held": byte_ids("end with STO"),
    "twice": byte_ids("a;bcdef;g"),
}
TEXTS = {name: bytes(t - FIRST_BYTE_ID for t in ids if FIRST_BYTE_ID <= t < TH) for name, ids in PASSAGES.items()}

SCRIPT: list[int] = []
_STARTS: dict[str, int] = {}
for _name, _ids in PASSAGES.items():
    if _name == "characters":
        SCRIPT += [EOS_ID] * (60 - len(SCRIPT))
    _STARTS[_name] = len(SCRIPT)
    SCRIPT += [*_ids, EOS_ID]


def prompt_of(name: str) -> list[int]:
    """Token ids of a prompt that is answered with this passage."""
    return [BOS_ID, *byte_ids("x" * _STARTS[name])]


def chat_of(name: str, overhead: int) -> list[dict[str, str]]:
    """Messages that are answered with this passage; `overhead` is the number of tokens of an empty message's prompt."""
    return [{"role": "user", "content": "x" * (_STARTS[name] + 1 - overhead)}]


def ids_of(name: str) -> Sequence[int]:
    """The passage's token ids, without the EOS that ends it."""
    return PASSAGES[name]
