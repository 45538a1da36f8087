"""One endpoint family a file; `ROUTERS` is the list that `build_app` includes."""

from __future__ import annotations

from pagedserve.api.routes import chat, completions, docs, health, metrics, models, tokenize

ROUTERS = (
    completions.router,
    chat.router,
    models.router,
    tokenize.router,
    health.router,
    metrics.router,
    docs.router,
)
