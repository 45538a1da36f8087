"""What each token adds to the text, as bytes.

A `tokenizers` decoder is a chain of small steps over the tokens of a whole sequence. For the chains that causal models
use, all but a trim at the very start works on each token alone, so a token has fixed bytes, the text is their
concatenation read as UTF-8, and decoding can go on where it stopped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer as Backend

from pagedserve.errors import ModelLoadError

_MAX_ID = 2**32 - 1
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
KNOWN_STEPS = ("ByteLevel", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace")


def byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2), and the byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHAR = byte_alphabet()


class TokenBytes:
    """Bytes of each token id, computed when first asked for.

    `separator` stands between tokens (only where the tokenizer has no decoder at all); `strip_char` is dropped up to
    `strip_len` times at the very start of a text. Raises ModelLoadError for a decoder with other steps.
    """

    def __init__(self, backend: Backend):
        self._backend = backend
        self._cache: dict[int, bytes] = {}
        self._first_cache: dict[int, bytes] = {}
        self.separator = b""
        self.strip_char = ""
        self.strip_len = 0
        self._has_first_token_rule = False
        self._steps = self._analyse()

    def of(self, token_id: int) -> bytes:
        """Bytes of the token anywhere but at the start of a text; empty for an id without a token."""
        found = self._cache.get(token_id)
        if found is None:
            found = self._cache[token_id] = self._compute(token_id, first=False)
        return found

    def of_first(self, token_id: int) -> bytes:
        """Bytes of the token where it is the first of a text."""
        if not self._has_first_token_rule:
            return self.of(token_id)
        found = self._first_cache.get(token_id)
        if found is None:
            found = self._first_cache[token_id] = self._compute(token_id, first=True)
        return found

    def join(self, token_ids: Iterable[int]) -> bytes:
        """Bytes of a whole sequence, before the trim at the start."""
        iterator = iter(token_ids)
        first = next(iterator, None)
        if first is None:
            return b""
        return self.separator.join([self.of_first(first), *map(self.of, iterator)])

    def strip(self, text: str) -> str:
        """The text without what the decoder trims at its start."""
        for _ in range(self.strip_len):
            if not text.startswith(self.strip_char):
                break
            text = text[1:]
        return text

    def _analyse(self) -> list[dict[str, Any]]:
        if self._backend.decoder is None:
            self.separator = b" "
            return []
        steps = _flatten(json.loads(self._backend.decoder.__getstate__()))
        per_token: list[dict[str, Any]] = []
        fused = False
        for step in steps:
            kind = step["type"]
            if kind not in KNOWN_STEPS or (kind == "Replace" and "String" not in step["pattern"]):
                raise ModelLoadError(
                    f"the tokenizer's decoder has a step {kind} that is not supported; known: {', '.join(KNOWN_STEPS)}"
                )
            if kind == "Fuse":
                fused = True
            elif kind == "Strip" and fused:
                if step["stop"]:
                    raise ModelLoadError("the tokenizer's decoder trims the end of the text, which cannot be streamed")
                self.strip_char, self.strip_len = step["content"], step["start"]
            else:
                per_token.append(step)
        self._has_first_token_rule = any(s["type"] == "Metaspace" for s in per_token)
        return per_token

    def _compute(self, token_id: int, *, first: bool) -> bytes:
        token = self._backend.id_to_token(token_id) if 0 <= token_id <= _MAX_ID else None
        if token is None:
            return b""
        for step in self._steps:
            kind = step["type"]
            if kind == "Replace":
                token = token.replace(step["pattern"]["String"], step["content"])
            elif kind == "Metaspace":
                drop = first and step["prepend_scheme"] != "never"
                token = token.replace(step["replacement"], "" if drop else " ")
            elif kind == "Strip":
                token = _strip(token, step["content"], step["start"], step["stop"])
            elif kind == "ByteFallback" and (match := _BYTE_TOKEN.fullmatch(token)):
                return bytes([int(match[1], 16)])
            elif kind == "ByteLevel" and all(char in _BYTE_OF_CHAR for char in token):
                # A token with any other character (an added token) stands for itself.
                return bytes(_BYTE_OF_CHAR[char] for char in token)
        return token.encode("utf-8")


def _flatten(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for inner in decoder["decoders"] for step in _flatten(inner)]


def _strip(text: str, char: str, start: int, stop: int) -> str:
    begin, end = 0, len(text)
    while begin < min(start, end) and text[begin] == char:
        begin += 1
    while end > max(begin, len(text) - stop) and text[end - 1] == char:
        end -= 1
    return text[begin:end]
