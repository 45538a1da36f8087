"""`GET /metrics`."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from pagedserve.api.openapi import documented_text
from pagedserve.api.state import ApiState

router = APIRouter(tags=["operations"])


@router.get("/metrics", **documented_text("text/plain"))
async def metrics(request: Request) -> Response:
    """Prometheus metrics in their text format."""
    state: ApiState = request.app.state.api
    page, content_type = state.metrics.render()
    return Response(page, headers={"Content-Type": content_type})
