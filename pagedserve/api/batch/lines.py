"""Lines of a batch: read from the input, answered by the routes, written to the output."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message

from pagedserve.api.errors import reply_to
from pagedserve.api.protocol.batches import BatchError, LineError, LineOutput, LineResponse
from pagedserve.errors import RequestError

MAX_LINES = 50_000
MAX_LINE_BYTES = 32 << 20
MAX_CUSTOM_ID_LEN = 512
# A file of another kind is wrong in every line; the first errors say so.
MAX_ERRORS = 100


class Line(msgspec.Struct):
    """One request. The body stays as it was sent: its route reads it."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class _Peek(msgspec.Struct):
    model: str | None = None
    stream: bool | None = None
    background: bool | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """Status, body and Retry-After of one request."""

    status: int
    body: bytes
    retry_after: float | None = None


def read_lines(path: Path, *, skip: Collection[int] = ()) -> Iterator[tuple[int, bytes]]:
    """(number from 1, raw line) of every line that is not blank and not in `skip`; too long a line comes as b""."""
    with path.open("rb") as file:
        number = 0
        while raw := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(raw) > MAX_LINE_BYTES:
                while raw and not raw.endswith(b"\n"):
                    raw = file.readline(MAX_LINE_BYTES)
                raw = b'""'
            if number == 1:
                raw = raw.removeprefix(b"\xef\xbb\xbf")
            if number not in skip and raw.strip():
                yield number, raw


def parse(raw: bytes, urls: Collection[str]) -> Line:
    """A line that can be run: RequestError says what is wrong (code, message, param)."""
    try:
        line = msgspec.json.decode(raw, type=Line)
        peek = msgspec.json.decode(line.body, type=_Peek)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the line is not a request: {error}", code="invalid_json_line") from error
    if not line.custom_id or len(line.custom_id) > MAX_CUSTOM_ID_LEN:
        raise RequestError(
            f"custom_id must have 1 to {MAX_CUSTOM_ID_LEN} characters", param="custom_id", code="invalid_custom_id"
        )
    if line.method.upper() != "POST":
        raise RequestError("method must be POST", param="method", code="invalid_method")
    if line.url not in urls:
        raise RequestError(f"url must be {' or '.join(sorted(urls))}", param="url", code="invalid_url")
    for name in ("stream", "background"):
        if getattr(peek, name):
            raise RequestError(f"{name} has no meaning in a batch", param=name, code="invalid_request")
    return line


def model_of(line: Line) -> str | None:
    """The model that a line names."""
    return msgspec.json.decode(line.body, type=_Peek).model


@dataclass(slots=True)
class Checked:
    """What a look through a whole input file finds."""

    num_lines: int
    model: str | None
    errors: list[BatchError]


def check_file(path: Path, urls: Collection[str]) -> Checked:
    """Look at every line; blocks for as long as the file is large."""
    checked = Checked(0, None, [])
    seen: set[str] = set()
    for number, raw in read_lines(path):
        checked.num_lines += 1
        try:
            line = parse(raw, urls)
            if line.custom_id in seen:
                raise RequestError("custom_id occurs twice", param="custom_id", code="duplicate_custom_id")
            seen.add(line.custom_id)
            model = model_of(line)
            if len(seen) == 1:
                checked.model = model
            elif model != checked.model:
                raise RequestError(
                    f"all lines must name one model; the first names {checked.model!a}, this one {model!a}",
                    param="model",
                    code="mismatched_model",
                )
        except RequestError as error:
            checked.errors.append(BatchError(error.code or "invalid_request", error.message, number, error.param))
        if checked.num_lines > MAX_LINES:
            checked.errors.insert(0, BatchError("too_many_lines", f"a batch may have at most {MAX_LINES} lines"))
        if len(checked.errors) >= MAX_ERRORS or checked.num_lines > MAX_LINES:
            break
    if not checked.num_lines:
        checked.errors.append(BatchError("empty_file", "the file has no lines"))
    return checked


async def ask(app: ASGIApp, url: str, body: bytes, request_id: str) -> Answer:
    """POST `body` to one of `app`'s routes, as an idle request: it runs when nobody else wants the engine."""
    received: list[bytes] = []
    start: Message = {}
    pending = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if pending:
            return pending.pop()
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def send(message: Message) -> None:
        nonlocal start
        if message["type"] == "http.response.start":
            start = message
        else:
            received.append(message.get("body", b""))

    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": url,
        "raw_path": url.encode("ascii"),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))],
        "client": None,
        "server": None,
        "state": {"client_request_id": request_id, "is_idle": True},
    }
    try:
        await app(scope, receive, send)
    except Exception as error:
        reply = reply_to(error)
        return Answer(reply.status, reply.body())
    retry_after = None
    for name, value in start.get("headers", ()):
        if name == b"retry-after":
            with suppress(ValueError):
                retry_after = float(value)
    return Answer(start.get("status", 500), b"".join(received), retry_after)


def output_line(custom_id: str, request_id: str, answer: Answer) -> bytes:
    """The JSON line of an answer."""
    response = LineResponse(answer.status, request_id, msgspec.Raw(answer.body or b"null"))
    return msgspec.json.encode(LineOutput(_line_id(), custom_id, response))


def error_line(custom_id: str, code: str, message: str) -> bytes:
    """The JSON line of a request that was not answered."""
    return msgspec.json.encode(LineOutput(_line_id(), custom_id, None, LineError(code, message)))


def _line_id() -> str:
    return f"batch_req_{uuid.uuid4().hex}"
