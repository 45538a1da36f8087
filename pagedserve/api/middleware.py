"""Around every request: an id, HEAD for GET, a last resort for errors, counts and the log line."""

from __future__ import annotations

import time
import uuid
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagedserve.api.errors import reply_to
from pagedserve.api.protocol.common import is_safe_id
from pagedserve.log import get_logger

logger = get_logger(__name__)

_LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 600)


class HttpMetrics:
    """Families of prometheus-fastapi-instrumentator, which dashboards for other engines read."""

    def __init__(self, registry: CollectorRegistry):
        self._requests = Counter(
            "http_requests", "Requests by route and status class.", ["method", "status", "handler"], registry=registry
        )
        self._seconds = Histogram(
            "http_request_duration_seconds",
            "Time to the last byte of the answer.",
            ["method", "handler"],
            buckets=_LATENCY_BUCKETS,
            registry=registry,
        )

    def record(self, method: str, handler: str, status: int, seconds: float) -> None:
        """Count one answered request; `handler` is the route's pattern, so that labels stay few."""
        self._requests.labels(method, f"{status // 100}xx", handler).inc()
        self._seconds.labels(method, handler).observe(seconds)


class RequestMiddleware:
    """ASGI middleware, the outermost but CORS.

    Echoes `X-Request-Id` where it is harmless in headers and logs, and makes one up otherwise. An exception that no
    handler took becomes a 500 here, with the trace in the log only.
    """

    def __init__(self, app: ASGIApp, *, metrics: HttpMetrics, log_requests: bool):
        self._app = app
        self._metrics = metrics
        self._log_requests = log_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        sent_id = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"").decode("latin-1")
        client_id = sent_id if is_safe_id(sent_id) else None
        request_id = client_id or uuid.uuid4().hex
        method = scope["method"]
        # uvicorn leaves out the body of an answer to HEAD, so the route for GET may write it.
        inner: dict[str, Any] = {**scope, "method": "GET"} if method == "HEAD" else dict(scope)
        inner["state"] = {**scope.get("state", {}), "client_request_id": client_id}
        status = 0
        header = (b"x-request-id", request_id.encode("ascii"))

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), header]
            await send(message)

        try:
            await self._app(inner, receive, send_with_id)
        except Exception as error:
            # Once the answer has begun there is no other way to say so than to break it off, which uvicorn does.
            if status:
                logger.error("an answer broke off", exc_info=error)
            else:
                await reply_to(error).response(scope["path"])(scope, receive, send_with_id)
        finally:
            seconds = time.monotonic() - started
            route = inner.get("route")
            self._metrics.record(method, getattr(route, "path", "none"), status or 499, seconds)
            if self._log_requests:
                logger.info(
                    "%s %s %d %.3f s %s", method, ascii(scope["path"])[1:-1], status or 499, seconds, request_id
                )
