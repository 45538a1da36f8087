"""API keys: every route needs one but `/health`, `/ready` and the page's own files, new routes included."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from pagedserve.api.errors import AuthenticationError, reply_to

# A browser asks for a page without a key; what the page then asks for needs one.
OPEN_PATHS = frozenset({"/health", "/ready", "/", "/page.css", "/page.js"})


class ApiKeyMiddleware:
    """ASGI middleware that answers 401 to requests without a known key.

    The key comes as `Authorization: Bearer KEY` (the scheme in any case, RFC 9110 section 11.1) or as `x-api-key: KEY`.
    Digests of equal length are compared, each against every key, so time tells nothing about a key. A CORS preflight
    carries no key (Fetch standard) and reveals nothing, so OPTIONS passes.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str]):
        self._app = app
        self._digests = [hashlib.sha256(key.encode("utf-8")).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] in OPEN_PATHS or scope.get("method") == "OPTIONS":
            await self._app(scope, receive, send)
            return
        key = _key_of(scope)
        if key is not None and self._is_known(key):
            await self._app(scope, receive, send)
            return
        message = "no API key was sent; use the header Authorization: Bearer KEY" if key is None else "wrong API key"
        await reply_to(AuthenticationError(message)).response(scope["path"])(scope, receive, send)

    def _is_known(self, key: bytes) -> bool:
        digest = hashlib.sha256(key).digest()
        # A list, not a generator: `any` must not stop at the first match.
        return any([hmac.compare_digest(digest, known) for known in self._digests])


def _key_of(scope: Scope) -> bytes | None:
    headers: dict[bytes, bytes] = dict(scope["headers"])
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer" and key.strip():
        return key.strip()
    return headers.get(b"x-api-key") or None
