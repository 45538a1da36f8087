"""Every error that leaves the server: one place that gives it its status, its body and its headers.

The body is OpenAI's: `{"error": {"message", "type", "param", "code"}}`
(https://platform.openai.com/docs/guides/error-codes), on the routes of Anthropic's API `{"type": "error", "error":
{"type", "message"}}` (https://docs.anthropic.com/en/api/errors). What is not raised on purpose is logged and answered
with a bare 500: no trace, path or class name reaches a client.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match

from pagedserve.errors import (
    DeadlineExceededError,
    EngineDeadError,
    EngineStepError,
    QueueFullError,
    RequestAbortedError,
    RequestError,
)
from pagedserve.log import get_logger

logger = get_logger(__name__)

# An error body repeats what the client sent only so far.
MAX_MESSAGE_LEN = 2000
RETRY_AFTER_SECONDS = 2

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
# Of Anthropic's API; other 4xx are an invalid_request_error, other 5xx an api_error.
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
ANTHROPIC_PATH = "/v1/messages"
_CODES = {
    401: "invalid_api_key",
    404: "not_found",
    405: "method_not_allowed",
    408: "timeout",
    413: "request_too_large",
    415: "unsupported_media_type",
    429: "queue_full",
    500: "internal_error",
    503: "service_unavailable",
}


class AuthenticationError(RequestError):
    """No key, or a wrong one: HTTP 401."""

    status_code = 401


class BodyTooLargeError(RequestError):
    """The body exceeds --max-body-size: HTTP 413."""

    status_code = 413


class MediaTypeError(RequestError):
    """The body is not declared as JSON, or is compressed: HTTP 415."""

    status_code = 415


class AbortedByClientError(RequestAbortedError):
    """Somebody asked for this request's end: 499, for SDKs would try a 503 again."""


class ClientGoneError(RequestAbortedError):
    """Nobody is left to answer; 499 in the log and the metrics, as nginx has it."""


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """An error as the client sees it."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: tuple[tuple[str, str], ...] = ()

    def body(self, path: str = "") -> bytes:
        """The JSON document, in the shape that clients of the route `path` read."""
        shape = self.anthropic() if path.startswith(ANTHROPIC_PATH) else {"error": self.openai()}
        return msgspec.json.encode(shape)

    def anthropic(self) -> dict[str, Any]:
        """The error as Anthropic's API has it."""
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self._shown()}}

    def openai(self) -> dict[str, Any]:
        """The error as OpenAI's API has it."""
        return {
            "message": self._shown(),
            "type": _TYPES.get(self.status, "invalid_request_error"),
            "param": None if self.param is None else _encodable(self.param[:200]),
            "code": self.code or _CODES.get(self.status),
        }

    def response(self, path: str = "") -> Response:
        """The answer of the route `path`."""
        return Response(self.body(path), self.status, dict(self.headers), media_type="application/json")

    def _shown(self) -> str:
        message = self.message if len(self.message) <= MAX_MESSAGE_LEN else self.message[:MAX_MESSAGE_LEN] + "..."
        return _encodable(message)


def reply_to(error: BaseException) -> ErrorReply:
    """What to tell the client about `error`; an unexpected one is logged here with its trace."""
    if isinstance(error, AuthenticationError):
        return ErrorReply(401, error.message, None, error.code, (("WWW-Authenticate", "Bearer"),))
    if isinstance(error, RequestError):
        return ErrorReply(error.status_code, error.message, error.param, error.code)
    if isinstance(error, QueueFullError):
        return ErrorReply(429, str(error), headers=(("Retry-After", str(error.retry_after)),))
    if isinstance(error, DeadlineExceededError):
        return ErrorReply(408, str(error) or "the request's deadline passed")
    if isinstance(error, ClientGoneError | AbortedByClientError):
        return ErrorReply(499, str(error), code="aborted")
    if isinstance(error, RequestAbortedError):
        return ErrorReply(503, str(error) or "the request was aborted", code="aborted", headers=_retry_soon())
    if isinstance(error, EngineDeadError):
        return ErrorReply(503, str(error) or "the engine is not running", headers=_retry_soon())
    if isinstance(error, EngineStepError):
        return ErrorReply(500, str(error) or "a step of the engine failed for this request", code="engine_step_failed")
    if isinstance(error, HTTPException):
        headers = tuple((error.headers or {}).items())
        return ErrorReply(error.status_code, str(error.detail), headers=headers)
    logger.error("unexpected error while answering a request", exc_info=error)
    return ErrorReply(500, "internal error; the server's log has the details")


def install(app: FastAPI) -> None:
    """Answer every exception of the routes through `reply_to`."""

    async def answer(request: Request, error: Exception) -> Response:
        path = request.url.path
        if isinstance(error, HTTPException) and error.status_code == 404:
            return ErrorReply(404, f"there is no route {request.method} {path}").response(path)
        if isinstance(error, HTTPException) and error.status_code == 405:
            return _method_not_allowed(request, error)
        return reply_to(error).response(path)

    for kind in (
        RequestError,
        QueueFullError,
        DeadlineExceededError,
        RequestAbortedError,
        EngineDeadError,
        EngineStepError,
        HTTPException,
    ):
        app.add_exception_handler(kind, answer)


def _method_not_allowed(request: Request, error: HTTPException) -> Response:
    # Starlette's own header has the methods of one route, and a path may have several.
    routes = [route for route in request.app.state.routes if route.matches(request.scope)[0] is not Match.NONE]
    methods = set((error.headers or {}).get("Allow", "").split(", ")).union(*(route.methods for route in routes))
    if "GET" in methods:
        methods.add("HEAD")
    allow = ", ".join(sorted(filter(None, methods)))
    message = f"{request.url.path} does not answer {request.method}; it answers {allow}"
    return ErrorReply(405, message, headers=(("Allow", allow),)).response(request.url.path)


def _retry_soon() -> tuple[tuple[str, str], ...]:
    return (("Retry-After", str(RETRY_AFTER_SECONDS)),)


def _encodable(text: str) -> str:
    """Lone surrogates, which no UTF-8 reply can hold, become question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")
