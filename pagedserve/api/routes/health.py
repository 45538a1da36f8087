"""`GET /health`, `/ready`, `/version`, and `POST /reset_prefix_cache`."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from pagedserve import __version__
from pagedserve.api.call import json_response
from pagedserve.api.openapi import documented
from pagedserve.api.protocol.health import PrefixCacheReset, Status, Version
from pagedserve.api.state import ApiState
from pagedserve.errors import EngineDeadError

router = APIRouter(tags=["operations"])


@router.get("/health", **documented(None, Status))
async def health(request: Request) -> Response:
    """200 while the engine can answer; 503 with the reason before the model is loaded, when it is dead or stuck."""
    state: ApiState = request.app.state.api
    reason = state.why_unhealthy()
    if reason is not None:
        raise EngineDeadError(reason)
    return json_response(Status("ok"))


@router.get("/ready", **documented(None, Status))
async def ready(request: Request) -> Response:
    """200 while new requests are taken: as /health, and 503 also while the server shuts down."""
    state: ApiState = request.app.state.api
    reason = state.why_unhealthy() or state.why_not_ready()
    if reason is not None:
        raise EngineDeadError(reason)
    return json_response(Status("ready"))


@router.get("/version", **documented(None, Version))
async def version(request: Request) -> Response:
    """The version of this package."""
    return json_response(Version(__version__))


@router.post("/reset_prefix_cache", **documented(None, PrefixCacheReset))
async def reset_prefix_cache(request: Request) -> Response:
    """Forget cached prompt prefixes; `reset` is false where running requests still hold some."""
    state: ApiState = request.app.state.api
    return json_response(PrefixCacheReset(bool(await state.ready_engine().call("reset_prefix_cache"))))
