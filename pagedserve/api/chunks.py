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
        self._head = b"data: " + _encode(fields)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if with_usage else b"]}\n\n"
        # A chunk with nothing but text is these pieces around the index and the text.
        self._open = self._head + b'{"index":'
        self._close = b'"logprobs":null,"finish_reason":null}' + self._tail

    def text(self, index: int, text: str) -> bytes:
        """A chunk of /v1/completions with nothing but text."""
        return b'%b%d,"text":%b,%b' % (self._open, index, _encode(text), self._close)

    def delta(self, index: int, content: str) -> bytes:
        """A chunk of /v1/chat/completions with nothing but text."""
        return b'%b%d,"delta":{"content":%b},%b' % (self._open, index, _encode(content), self._close)

    def choice(self, choice: dict[str, Any], usage: Usage | None = None) -> bytes:
        """A chunk with one choice of any fields."""
        return self._head + _encode(choice) + (self._tail if usage is None else _usage_tail(usage))

    def usage(self, usage: Usage) -> bytes:
        """The last chunk, which has no choices."""
        return self._head + _usage_tail(usage)


def _usage_tail(usage: Usage) -> bytes:
    return b'],"usage":' + _encode(usage) + b"}\n\n"
