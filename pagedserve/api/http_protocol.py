"""uvicorn's HTTP/1.1 protocol, made to ignore offers to upgrade, as RFC 9110 section 7.8 allows.

Java's HTTP client offers h2c with its first request. httptools then takes the body for bytes of the new protocol, and
the request would be answered as if it had none.
"""

from __future__ import annotations

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_UPGRADE_HEADERS = (b"upgrade", b"connection", b"http2-settings")


class NoUpgradeProtocol(HttpToolsProtocol):
    """Serves a request that offers an upgrade as if it did not."""

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
                message = "Invalid HTTP request received."
                self.logger.warning(message)
                self.send_400_response(message)
            except httptools.HttpParserUpgrade as upgrade:
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                continue
            return

    def _head_without_upgrade(self) -> bytes:
        lines = [b"%b %b HTTP/1.1" % (self.scope["method"].encode("ascii"), self.url)]
        lines += [b"%b: %b" % header for header in self.headers if header[0] not in _UPGRADE_HEADERS]
        return b"\r\n".join([*lines, b"", b""])
