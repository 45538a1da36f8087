"""Stream chunks as bytes. What is the same in every chunk of a request is encoded once: a token costs microseconds."""

from __future__ import annotations

from typing import Any

import msgspec

from pagedserve.api.protocol.common import Usage

_encode = msgspec.json.Encoder().encode


class ChunkWriter:
    """Writes the chunks of one stream: `{id, object, created, model, system_fingerprint, choices, usage?}`.

    `with_usage` puts `"usage": null` into every chunk but the last, as OpenAI does when the usage was asked for.
    """

    def __init__(self, *, response_id: str, kind: str, created: int, model: str, fingerprint: str, with_usage: bool):
        fields = {"id": response_id, "object": kind, "created": created, "model": model}
        fields["system_fingerprint"] = fingerprint
        self._head = b"data: " + _encode(fields)[:-1]
        self._open = self._head + b',"choices":[{"index":'
        self._close = b'}],"usage":null}\n\n' if with_usage else b"}]}\n\n"
        # A text chunk is these three around the index and the text.
        self._text_open = b',"text":'
        self._delta_open = b',"delta":{"content":'
        self._text_close = b',"logprobs":null,"finish_reason":null' + self._close
        self._delta_close = b'},"logprobs":null,"finish_reason":null' + self._close

    def text(self, index: int, text: str) -> bytes:
        """A chunk of /v1/completions with nothing but text."""
        return b"%b%d%b%b%b" % (self._open, index, self._text_open, _encode(text), self._text_close)

    def delta(self, index: int, content: str) -> bytes:
        """A chunk of /v1/chat/completions with nothing but text."""
        return b"%b%d%b%b%b" % (self._open, index, self._delta_open, _encode(content), self._delta_close)

    def choice(self, choice: dict[str, Any], usage: Usage | None = None) -> bytes:
        """A chunk with one choice of any fields."""
        close = self._close if usage is None else b'],"usage":' + _encode(usage) + b"}\n\n"
        if usage is None:
            return self._head + b',"choices":[' + _encode(choice)[:-1] + close
        return self._head + b',"choices":[' + _encode(choice) + close

    def usage(self, usage: Usage) -> bytes:
        """The last chunk, which has no choices."""
        return self._head + b',"choices":[],"usage":' + _encode(usage) + b"}\n\n"
