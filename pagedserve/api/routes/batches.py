"""`/v1/batches`: create, list, read and cancel."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response

from pagedserve.api.call import json_response, read_body, warning_headers
from pagedserve.api.openapi import documented
from pagedserve.api.protocol.batches import Batch, BatchList, BatchRequest
from pagedserve.api.routes.files import page_size
from pagedserve.api.state import ApiState

router = APIRouter(tags=["batches"])

DEFAULT_PAGE = 20
MAX_PAGE = 100


@router.post("/v1/batches", **documented(BatchRequest, Batch))
async def create_batch(request: Request) -> Response:
    """Run every line of a file when nobody else wants the engine."""
    state: ApiState = request.app.state.api
    body, ignored = await read_body(state, request, BatchRequest)
    headers = warning_headers(state, ignored)
    return json_response(await state.batches.create(body), headers)


@router.get("/v1/batches", **documented(None, BatchList))
async def list_batches(request: Request, after: str | None = None, limit: str | None = None) -> Response:
    """Batches, newest first."""
    state: ApiState = request.app.state.api
    store = await state.batches.start()
    count = page_size(limit, default=DEFAULT_PAGE, most=MAX_PAGE)
    batches = await asyncio.to_thread(store.batches, after=after, limit=count + 1)
    page = batches[:count]
    first, last = (page[0].id, page[-1].id) if page else (None, None)
    return json_response(BatchList(page, first, last, len(batches) > count))


@router.get("/v1/batches/{batch_id}", **documented(None, Batch))
async def retrieve_batch(request: Request, batch_id: str) -> Response:
    """How far a batch is."""
    state: ApiState = request.app.state.api
    store = await state.batches.start()
    return json_response(await asyncio.to_thread(store.batch, batch_id))


@router.post("/v1/batches/{batch_id}/cancel", **documented(None, Batch))
async def cancel_batch(request: Request, batch_id: str) -> Response:
    """End a batch; what is answered by then is in its output file."""
    state: ApiState = request.app.state.api
    return json_response(await state.batches.cancel(batch_id))
