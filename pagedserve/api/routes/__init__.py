"""One endpoint family a file; `ROUTERS` is the list that `build_app` includes."""

from __future__ import annotations

from pagedserve.api.routes import (
    batches,
    chat,
    completions,
    docs,
    embeddings,
    files,
    generate,
    health,
    messages,
    metrics,
    models,
    page,
    requests,
    rerank,
    responses,
    tokenize,
)

ROUTERS = (
    completions.router,
    chat.router,
    embeddings.router,
    rerank.router,
    messages.router,
    responses.router,
    generate.router,
    models.router,
    tokenize.router,
    files.router,
    batches.router,
    requests.router,
    health.router,
    metrics.router,
    docs.router,
    page.router,
)
