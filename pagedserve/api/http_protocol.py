"""uvicorn's HTTP/1.1 protocol with three changes.

It ignores offers to upgrade, as RFC 9110 section 7.8 allows: Java's HTTP client offers h2c with its first request, and
httptools then takes the body for bytes of the new protocol. It answers what is no HTTP in the shape of all our errors.
And it bounds the head of a request, in bytes and in seconds.
"""

from __future__ import annotations

import asyncio

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pagedserve.api.errors import ErrorReply

# As nginx and Node.js have it, or more.
MAX_HEAD_BYTES = 64 << 10
HEAD_SECONDS = 60.0

_UPGRADE_HEADERS = (b"upgrade", b"connection", b"http2-settings")
_REASONS = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large"}
_HEAD = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"


class NoUpgradeProtocol(HttpToolsProtocol):
    """Serves a request that offers an upgrade as if it did not."""

    _num_head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connects, and has to say what it wants in time."""
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._on_slow_head)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._stop_timer()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        self._num_head_bytes = 0
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._on_slow_head)

    def on_headers_complete(self) -> None:
        """The head of a request is there."""
        self._stop_timer()
        super().on_headers_complete()

    def _should_upgrade(self) -> bool:
        # Keeps the base class from answering before `data_received` has started over.
        return self._get_upgrade() is not None

    def data_received(self, data: bytes) -> None:
        """Bytes from the client."""
        self._unset_keepalive_if_required()
        while data:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserError:
                self._refuse(400, "this is not a request of HTTP/1.1")
            except httptools.HttpParserUpgrade as upgrade:
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                continue
            if self._head_timer is not None:
                self._num_head_bytes += len(data)
                if self._num_head_bytes > MAX_HEAD_BYTES:
                    self._refuse(431, f"the request's head exceeds the limit of {MAX_HEAD_BYTES} bytes")
            return

    def _on_slow_head(self) -> None:
        self._head_timer = None
        if not self._num_head_bytes:
            self.transport.close()
            return
        self._refuse(408, f"the request's head did not come within {HEAD_SECONDS:.0f} s")

    def _refuse(self, status: int, message: str) -> None:
        """Answer for good and close, unless an answer is being written, which this would end up in."""
        self._stop_timer()
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            body = ErrorReply(status, message).body()
            self.transport.write(_HEAD % (status, _REASONS[status], len(body)) + body)
        self.transport.close()

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_without_upgrade(self) -> bytes:
        lines = [b"%b %b HTTP/1.1" % (self.scope["method"].encode("ascii"), self.url)]
        lines += [b"%b: %b" % header for header in self.headers if header[0] not in _UPGRADE_HEADERS]
        return b"\r\n".join([*lines, b"", b""])
