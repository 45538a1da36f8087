"""Messages over an inherited socket pair: framed, typed, never pickled.

A frame is `length (4 bytes, little endian) | kind (1 byte) | MessagePack`. The kind indexes the tuple of message types
of that direction, and the body is decoded straight into that dataclass: a field of the wrong type is refused here.
The core's side blocks (it has a thread for reading); the API's side belongs to an event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any, cast

import msgspec

from pagedserve.errors import PagedServeError

_HEADER = struct.Struct("<IB")
MAX_FRAME_BYTES = 1 << 30
# Room for some hundred steps' outputs, so that a busy event loop does not hold up the core.
_SOCKET_BUFFER_BYTES = 4 << 20


class ChannelClosedError(PagedServeError):
    """The other side is gone."""


class ChannelFormatError(PagedServeError):
    """A frame that this direction does not know, or a body that does not fit its type."""


class Codec:
    """Messages to frames and back, for one pair of directions."""

    def __init__(self, *, sends: tuple[type, ...], receives: tuple[type, ...]):
        self._kinds = {message_type: kind for kind, message_type in enumerate(sends)}
        self._encoder = msgspec.msgpack.Encoder()
        self._decoders: list[msgspec.msgpack.Decoder[Any]] = [
            msgspec.msgpack.Decoder(message_type) for message_type in receives
        ]

    def encode(self, message: object) -> bytearray:
        """One whole frame."""
        frame = bytearray(_HEADER.size)
        self._encoder.encode_into(message, frame, _HEADER.size)
        length = len(frame) - _HEADER.size
        if length > MAX_FRAME_BYTES:
            raise ChannelFormatError(f"a message of {length} bytes is larger than a frame may be ({MAX_FRAME_BYTES})")
        _HEADER.pack_into(frame, 0, length, self._kinds[type(message)])
        return frame

    def decode(self, kind: int, body: memoryview | bytes) -> Any:
        """The message in a frame's body."""
        if kind >= len(self._decoders):
            raise ChannelFormatError(f"unknown kind of message: {kind}")
        try:
            return self._decoders[kind].decode(body)
        except (msgspec.MsgspecError, PagedServeError) as error:
            raise ChannelFormatError(f"a message does not fit its type: {error}") from error


class FrameReader:
    """Bytes in pieces of any size in, whole frames out."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> Iterator[tuple[int, bytes]]:
        """Add bytes and give every frame that is complete as (kind, body)."""
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= _HEADER.size:
                length, kind = _HEADER.unpack_from(self._buffer, start)
                if length > MAX_FRAME_BYTES:
                    raise ChannelFormatError(f"a frame of {length} bytes")
                end = start + _HEADER.size + length
                if len(self._buffer) < end:
                    break
                body = bytes(memoryview(self._buffer)[start + _HEADER.size : end])
                start = end
                yield kind, body
        finally:
            del self._buffer[:start]


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a new channel."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in ends:
        # The kernel grants what its own limit allows.
        with contextlib.suppress(OSError):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
    return ends


class BlockingChannel:
    """The side without an event loop. One thread may send while another receives."""

    def __init__(self, sock: socket.socket, codec: Codec):
        sock.setblocking(True)
        self._socket = sock
        self._codec = codec
        self._reader = FrameReader()
        self._frames: list[tuple[int, bytes]] = []

    def send(self, message: object) -> None:
        """Send all of it, waiting for room; ChannelClosedError where nobody listens any more."""
        try:
            self._socket.sendall(self._codec.encode(message))
        except OSError as error:
            raise ChannelClosedError("the other side of the channel is gone") from error

    def receive(self) -> Any:
        """The next message, waiting for it; ChannelClosedError at the end of the stream."""
        while not self._frames:
            try:
                data = self._socket.recv(1 << 18)
            except OSError as error:
                raise ChannelClosedError("the other side of the channel is gone") from error
            if not data:
                raise ChannelClosedError("the other side of the channel is gone")
            self._frames = list(self._reader.feed(data))
            self._frames.reverse()
        return self._codec.decode(*self._frames.pop())

    def close(self) -> None:
        """Close this end; a thread that waits in `receive` is woken."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


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
