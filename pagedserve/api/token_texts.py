"""Token ids as clients see them in logprobs: text, bytes, and places in the text."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Any

from pagedserve.api.protocol.chat import ChatLogprobs, TokenLogprob, TopLogprob
from pagedserve.api.protocol.completions import CompletionLogprobs
from pagedserve.step import TokenLogprobs

if TYPE_CHECKING:
    from pagedserve.engine.tokenizer import Tokenizer

# JSON has no infinity (RFC 8259 section 6); OpenAI shows this for a token that cannot occur.
LOGPROB_FLOOR = -9999.0


def finite(logprob: float) -> float:
    """A number that JSON can hold; NaN counts as impossible."""
    return logprob if logprob > LOGPROB_FLOOR else LOGPROB_FLOOR


class TokenTexts:
    """Texts of tokens alone. `as_ids` names tokens `token_id:123` (return_tokens_as_token_ids)."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool = False):
        self._tokenizer = tokenizer
        self._as_ids = as_ids or not tokenizer.has_texts

    def text(self, token_id: int) -> str:
        """The token's text; part of a character reads `bytes:\\xf0\\x9f`, so different tokens stay different."""
        if self._as_ids:
            return f"token_id:{token_id}"
        raw = self._tokenizer.id_to_bytes(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def chat(self, entries: list[TokenLogprobs]) -> ChatLogprobs:
        """Logprobs of /v1/chat/completions."""
        return ChatLogprobs([self._chat_entry(entry) for entry in entries])

    def prompt(self, entries: list[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
        """The `prompt_logprobs` extension: per prompt token, id -> logprob, rank and text."""
        return [None if entry is None else self._prompt_entry(entry) for entry in entries]

    def top(self, entry: TokenLogprobs, num_top: int) -> dict[str, float]:
        """The likely tokens of one position, and the drawn one if it is not among them."""
        ids = [*entry.token_ids[1 : num_top + 1], entry.token_ids[0]]
        values = [*entry.logprobs[1 : num_top + 1], entry.logprobs[0]]
        return {self.text(token_id): finite(value) for token_id, value in zip(ids, values, strict=True)}

    def _chat_entry(self, entry: TokenLogprobs) -> TokenLogprob:
        first, *rest = (
            TopLogprob(self.text(token_id), finite(value), list(self._tokenizer.id_to_bytes(token_id)))
            for token_id, value in zip(entry.token_ids, entry.logprobs, strict=True)
        )
        return TokenLogprob(first.token, first.logprob, first.bytes, rest)

    def _prompt_entry(self, entry: TokenLogprobs) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for i, (token_id, value) in enumerate(zip(entry.token_ids, entry.logprobs, strict=True)):
            # The token that stands there comes first and has its own rank; the others are ranked as listed.
            rank = entry.rank if i == 0 else i
            shown = {"logprob": finite(value), "rank": rank, "decoded_token": self.text(token_id)}
            result.setdefault(str(token_id), shown)
        return result


class LogprobColumns:
    """Logprobs of /v1/completions for one choice, piece by piece: knows how far the text has come.

    `num_top` is how many likely tokens were asked for. Special tokens that do not show in the text take no room in it.
    """

    def __init__(self, texts: TokenTexts, tokenizer: Tokenizer, *, num_top: int, skip_special_tokens: bool):
        self._texts = texts
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0
        self._columns = CompletionLogprobs()

    def add_prompt(self, token_ids: list[int], entries: list[TokenLogprobs | None], text: str) -> None:
        """The prompt's tokens. `text` is what the client is shown of it: not BOS, nor a space that was put before."""
        for token_id, entry in zip(token_ids, entries, strict=True):
            raw = self._begin(token_id, entry)
            token = self._decoder.decode(raw)
            if text.startswith(token, self._offset):
                self._offset += len(token)
            elif not self._tokenizer.is_special(token_id):
                self._offset += len(token) - token.startswith(" ")
        self._offset = len(text)

    def add(self, token_ids: list[int], entries: list[TokenLogprobs]) -> None:
        """The next tokens of the output."""
        for token_id, entry in zip(token_ids, entries, strict=True):
            is_hidden = self._skip_special_tokens and self._tokenizer.is_special(token_id)
            raw = self._begin(token_id, entry, is_hidden=is_hidden)
            if not is_hidden:
                self._offset += len(self._decoder.decode(raw))

    def take(self) -> CompletionLogprobs:
        """What was added since the last call."""
        columns, self._columns = self._columns, CompletionLogprobs()
        return columns

    def _begin(self, token_id: int, entry: TokenLogprobs | None, *, is_hidden: bool = False) -> bytes:
        """One row, with the place where the token begins; returns its bytes. A prompt's first token has no `entry`."""
        raw = self._tokenizer.id_to_bytes(token_id)
        # Bytes that this token does not continue are a character of their own by now: U+FFFD.
        if raw and not is_hidden and not 0x80 <= raw[0] <= 0xBF:
            self._offset += len(self._decoder.decode(b"", final=True))
        self._columns.tokens.append(self._texts.text(token_id))
        self._columns.text_offset.append(self._offset)
        self._columns.token_logprobs.append(None if entry is None else finite(entry.logprobs[0]))
        self._columns.top_logprobs.append(None if entry is None else self._texts.top(entry, self._num_top))
        return raw
