"""Messages over an inherited socket pair: framed, typed, never pickled.

A frame is `length (4 bytes, little endian) | kind (1 byte) | MessagePack`. The kind indexes the tuple of message types
of that direction, and the body is decoded straight into that dataclass: a field of the wrong type is refused here.
The core's side, here, blocks (it has a thread for reading); the API's side is `async_channel`, so that a core does not
import asyncio.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator
from typing import Any

import msgspec

from pagedserve.errors import PagedServeError

_HEADER = struct.Struct("<IB")
MAX_FRAME_BYTES = 1 << 30


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
