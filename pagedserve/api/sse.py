"""Server-sent events (WHATWG HTML section 9.2): one `data:` line an event, comments while there is nothing to say."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pagedserve.api.errors import ClientGoneError, ErrorReply, reply_to
from pagedserve.api.generation import wait_gone
from pagedserve.api.state import ApiState

# Proxies close connections that are silent for a minute; many clients for less.
KEEP_ALIVE_SECONDS = 15.0

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


@dataclass(frozen=True, slots=True)
class Framing:
    """What a stream holds besides its events: the bytes while nothing comes, how an error looks, the last bytes."""

    keep_alive: bytes
    error: Callable[[ErrorReply], bytes]
    end: bytes


def named_event(name: str, document: bytes) -> bytes:
    """One event with a name, from a JSON document."""
    return b"event: %b\ndata: %b\n\n" % (name.encode("ascii"), document)


def event(document: bytes) -> bytes:
    """One event from a JSON document, which holds no line breaks."""
    return b"data: " + document + b"\n\n"


CHUNKS = Framing(KEEP_ALIVE, lambda reply: event(reply.body()), DONE)


async def respond(
    state: ApiState,
    request: Request,
    events: AsyncGenerator[bytes, None],
    headers: Mapping[str, str],
    framing: Framing = CHUNKS,
) -> Response:
    """A stream of `events`, begun only when the first is there, so that an early error still gets its own status.

    When nothing came for KEEP_ALIVE_SECONDS the stream begins all the same: a queued request must look alive.
    Raises what `events` raises before the beginning; ClientGoneError where the client leaves before it.
    """
    first = asyncio.create_task(_first(events))
    gone = asyncio.create_task(wait_gone(request))
    with state.in_flight.track(first, request) as running:
        try:
            await asyncio.wait((first, gone), timeout=KEEP_ALIVE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if first.done():
                first.result()
            elif gone.done():
                raise ClientGoneError("the client closed the connection")
        except BaseException as error:
            gone.cancel()
            await _end(first, events)
            if isinstance(error, asyncio.CancelledError) and running.error is not None:
                raise running.error from None
            raise
    return EventStream(state, request, first, gone, events, headers, framing)


class EventStream(Response):
    """Writes events as they come; ends when the client leaves; an error becomes the last event."""

    media_type = "text/event-stream"

    def __init__(
        self,
        state: ApiState,
        request: Request,
        first: asyncio.Task[bytes],
        gone: asyncio.Task[None],
        events: AsyncGenerator[bytes, None],
        headers: Mapping[str, str],
        framing: Framing,
    ):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        # An empty Response carries a length; a stream has none.
        del self.headers["content-length"]
        self._state = state
        self._request = request
        self._first = first
        self._gone = gone
        self._events = events
        self._framing = framing
        self._num_written = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        pump = asyncio.create_task(self._pump(send))
        keep_alive = asyncio.create_task(self._keep_alive(send))
        error: Exception | None = None
        with self._state.in_flight.track(pump, self._request) as running:
            try:
                await asyncio.wait((pump, self._gone), return_when=asyncio.FIRST_COMPLETED)
                # A client that has gone and an answer that has ended look alike: then both tasks are done.
                if pump.done():
                    await pump
            except asyncio.CancelledError:
                if running.error is None:
                    raise
                error = running.error
            except Exception as failure:
                error = failure
            finally:
                for task in (self._gone, keep_alive, pump, self._first):
                    task.cancel()
                await asyncio.gather(self._gone, keep_alive, pump, self._first, return_exceptions=True)
                # Aborts in the engine what still runs.
                await self._events.aclose()
        if error is not None:
            body = self._framing.error(reply_to(error)) + self._framing.end
            await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.body", "body": await self._first, "more_body": True})
        async for chunk in self._events:
            self._num_written += 1
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": self._framing.end, "more_body": False})

    async def _keep_alive(self, send: Send) -> None:
        while True:
            num_written = self._num_written
            await asyncio.sleep(KEEP_ALIVE_SECONDS)
            if num_written == self._num_written:
                await send({"type": "http.response.body", "body": self._framing.keep_alive, "more_body": True})


async def _first(events: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(events)


async def _end(first: asyncio.Task[bytes], events: AsyncGenerator[bytes, None]) -> None:
    """Close the generator, which aborts in the engine what still runs."""
    first.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await first
    await events.aclose()
