"""The API's side of the channel to the core: it belongs to an event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, cast

from pagedserve.engine.channel import ChannelClosedError, ChannelFormatError, Codec, FrameReader


class AsyncChannel(asyncio.Protocol):
    """The side of an event loop: messages are handed over as they arrive, without a task switch each.

    `on_message` must not raise; `on_close` is called once, with what went wrong or None.
    """

    def __init__(self, codec: Codec, on_message: Callable[[Any], None], on_close: Callable[[Exception | None], None]):
        self._codec = codec
        self._on_message = on_message
        self._on_close = on_close
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._failure: Exception | None = None

    @classmethod
    async def open(
        cls,
        sock: socket.socket,
        codec: Codec,
        on_message: Callable[[Any], None],
        on_close: Callable[[Exception | None], None],
    ) -> AsyncChannel:
        """Take over `sock` and start to listen."""
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        _, channel = await loop.create_unix_connection(lambda: cls(codec, on_message, on_close), sock=sock)
        return channel

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, message: object) -> None:
        """Queue the message for sending; ChannelClosedError where nobody listens any more."""
        if self._transport is None or self._transport.is_closing():
            raise ChannelClosedError("the other side of the channel is gone")
        self._transport.write(bytes(self._codec.encode(message)))

    def close(self) -> None:
        """Send what is queued, then close."""
        if self._transport is not None:
            self._transport.close()

    # -- asyncio.Protocol ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            for kind, body in self._reader.feed(data):
                self._on_message(self._codec.decode(kind, body))
        except ChannelFormatError as error:
            self._failure = error
            if self._transport is not None:
                self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_close(self._failure or exc)
