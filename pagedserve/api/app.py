"""The FastAPI application: routes, errors, keys, CORS."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from pagedserve import __version__, envs
from pagedserve.api import errors, openapi
from pagedserve.api.auth import ApiKeyMiddleware
from pagedserve.api.batch.service import BatchService
from pagedserve.api.middleware import HttpMetrics, RequestMiddleware
from pagedserve.api.routes import ROUTERS
from pagedserve.api.state import ApiState

# How long a browser may remember a preflight.
_PREFLIGHT_SECONDS = 600
# Routes that the lines of a batch may ask, where there are such routes.
_BATCH_URLS = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages"}
    | {"/v1/score", "/v1/rerank"}
)


def build_app(state: ApiState) -> FastAPI:
    """The application that answers for `state`, whose engine may come later."""
    config = state.config
    middleware = [
        Middleware(RequestMiddleware, metrics=HttpMetrics(state.metrics.registry), log_requests=config.log_requests)
    ]
    if config.allowed_origins:
        # Before the keys: a browser must be able to read a 401. No credentials, so "*" stays allowed (Fetch standard).
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(config.allowed_origins),
                allow_methods=["GET", "POST", "OPTIONS"],
                allow_headers=["*"],
                expose_headers=["X-Request-Id", "X-Pagedserve-Warning", "Retry-After"],
                max_age=_PREFLIGHT_SECONDS,
            )
        )
    keys = (*config.api_key, *envs.api_keys())
    if keys:
        middleware.append(Middleware(ApiKeyMiddleware, keys=keys))
    inner = _routes(state, [])
    paths = {route.path for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)}
    state.batches = BatchService(config, state.model_names, inner, _BATCH_URLS & paths)
    return _routes(state, middleware)


def _routes(state: ApiState, middleware: list[Middleware]) -> FastAPI:
    """The routes behind `middleware`: keys and counts concern who comes from outside."""
    app = FastAPI(
        title="pagedserve",
        version=__version__,
        description="OpenAI-compatible HTTP server.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        middleware=middleware,
    )
    app.state.api = state
    app.state.routes = [route for router in ROUTERS for route in router.routes]
    for router in ROUTERS:
        app.include_router(router)
    errors.install(app)
    openapi.install(app)
    return app
