"""What every route that generates does first and last: read, check, name, and answer one request."""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from pagedserve import __version__
from pagedserve.api import sse
from pagedserve.api.body import read_json, unknown_fields, validated
from pagedserve.api.chunks import ChunkWriter
from pagedserve.api.generation import UsageCounter, until_gone
from pagedserve.api.protocol.common import HARMLESS_FIELDS, GenerationRequest, is_safe_id, refuse_unsupported
from pagedserve.api.request_log import Entry
from pagedserve.api.state import ApiState
from pagedserve.errors import RequestError
from pagedserve.sequence import IDLE_PRIORITY

WARNING_HEADER = "X-Pagedserve-Warning"
MAX_WARNING_LEN = 500
TIMEOUT_HEADER = "X-Request-Timeout"
MAX_TIMEOUT = 1e9
IDLE_TIMEOUT = 30 * 86_400.0
# Tiers that are what one gets anyway.
_SERVICE_TIERS = ("auto", "default")

Body = TypeVar("Body", bound=BaseModel)


def json_response(value: Any, headers: dict[str, str] | None = None) -> Response:
    """Anything that msgspec can encode."""
    return Response(msgspec.json.encode(value), headers=headers, media_type="application/json")


async def read_body(state: ApiState, request: Request, model: type[Body]) -> tuple[Body, list[str]]:
    """The checked body, and the names of fields that have no effect. Raises RequestError (all of them in --strict)."""
    body = await read_json(request, state.max_body_bytes)
    refuse_unsupported(body, model.model_fields)
    parsed = await validated(request, model, body)
    ignored = [name for name in unknown_fields(model, body) if name not in HARMLESS_FIELDS]
    return parsed, ignored


def warning_headers(state: ApiState, ignored: list[str]) -> dict[str, str]:
    """Headers that name fields without effect; RequestError in --strict."""
    if not ignored:
        return {}
    if state.config.strict:
        raise RequestError(
            f"unknown field {ignored[0]!a}; this server refuses fields that it does not know (--strict)",
            param=ignored[0],
            code="unknown_parameter",
        )
    state.log_unknown_fields(ignored)
    names = ", ".join(name if is_safe_id(name) else ascii(name) for name in ignored)
    return {WARNING_HEADER: f"unknown fields have no effect: {names}"[:MAX_WARNING_LEN]}


def _timeout_of(request: Request) -> float | None:
    """What the header X-Request-Timeout says, in seconds; a proxy may set it where bodies are not its own."""
    value = request.headers.get(TIMEOUT_HEADER)
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < MAX_TIMEOUT:
        raise RequestError(f"the header {TIMEOUT_HEADER} must be a number of seconds above 0", param=TIMEOUT_HEADER)
    return seconds


def make_idle(request: Request, body: Any) -> None:
    """A line of a batch goes behind everybody else, and only its batch's end limits how long it may wait."""
    if getattr(request.state, "is_idle", False):
        body.priority = IDLE_PRIORITY
        if "timeout" in type(body).model_fields:
            body.timeout = body.timeout or IDLE_TIMEOUT


@dataclass(slots=True)
class GenerationCall(Generic[Body]):
    """One request for generated text, as its route needs it."""

    state: ApiState
    http: Request
    body: Body
    model_name: str
    headers: dict[str, str]
    request_id: str
    response_id: str
    usage: UsageCounter
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def fingerprint(self) -> str:
        """What the answer depends on besides the request: the version of the server and the model."""
        basis = f"{__version__}|{self.state.model_names[0]}"
        return f"fp_{hashlib.sha256(basis.encode('utf-8', 'replace')).hexdigest()[:10]}"

    def writer(self, kind: str, *, with_usage: bool) -> ChunkWriter:
        """A writer of this call's chunks."""
        return ChunkWriter(
            response_id=self.response_id,
            kind=kind,
            created=self.created,
            model=self.model_name,
            fingerprint=self.fingerprint,
            with_usage=with_usage,
        )

    async def answer(self, work: Coroutine[Any, Any, Any]) -> Response:
        """The result of `work` as JSON; the work is cancelled when the client leaves."""
        return json_response(await until_gone(self.state, self.http, work), self.headers)

    async def stream(self, events: AsyncGenerator[bytes, None], framing: sse.Framing = sse.CHUNKS) -> Response:
        """`events` as server-sent events."""
        return await sse.respond(self.state, self.http, events, self.headers, framing)


async def open_call(request: Request, model: type[Body], prefix: str) -> GenerationCall[Body]:
    """Read and check a request for generated text.

    The id of the answer is `prefix` and the client's `request_id`, its X-Request-Id, or a random one.
    """
    body, ignored = await read_body(request.app.state.api, request, model)
    return call_for(request, body, ignored, prefix)


def call_for(request: Request, body: Body, ignored: list[str], prefix: str) -> GenerationCall[Body]:
    """As `open_call`, for a body that was read already; `ignored` are its fields without effect."""
    state: ApiState = request.app.state.api
    assert isinstance(body, GenerationRequest)
    body.check()
    ignored += getattr(body, "unknown_message_keys", list)()
    if body.service_tier is not None and body.service_tier not in _SERVICE_TIERS:
        ignored.append("service_tier")
    if body.priority and not state.priorities_count:
        raise RequestError("priority has a meaning only with --scheduling-policy priority", param="priority")
    if body.timeout is None:
        body.timeout = _timeout_of(request)
    make_idle(request, body)
    request_id = body.request_id or request.state.client_request_id or uuid.uuid4().hex
    model_name = state.served_name(body.model)
    headers = warning_headers(state, ignored)
    entry = Entry(request_id, request.url.path, model_name, getattr(body, "num_prompts", 1))
    state.requests.add(entry)
    request.state.request_id = request_id
    return GenerationCall(
        state=state,
        http=request,
        body=body,
        model_name=model_name,
        headers=headers,
        request_id=request_id,
        response_id=f"{prefix}{request_id}",
        usage=entry.usage,
    )
