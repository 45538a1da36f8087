"""`GET /v1/requests`, `/v1/requests/{id}`, `/load`, and `POST /abort_requests`."""

from __future__ import annotations

from itertools import islice

from fastapi import APIRouter, Request, Response

from pagedserve.api.call import json_response, read_body, warning_headers
from pagedserve.api.errors import AbortedByClientError
from pagedserve.api.openapi import documented
from pagedserve.api.protocol.requests import AbortRequest, AbortResponse, Load, RequestList, RequestRecord
from pagedserve.api.routes.files import page_size
from pagedserve.api.state import ApiState
from pagedserve.errors import NotFoundError

router = APIRouter(tags=["operations"])

DEFAULT_PAGE = 20
MAX_PAGE = 1000


@router.get("/v1/requests", **documented(None, RequestList))
async def list_requests(request: Request, limit: str | None = None) -> Response:
    """Recent requests for generated text, newest first."""
    state: ApiState = request.app.state.api
    count = page_size(limit, default=DEFAULT_PAGE, most=MAX_PAGE)
    live = state.in_flight.request_ids()
    page = [entry.record(is_live=entry.request_id in live) for entry in islice(state.requests, count)]
    return json_response(RequestList(page, len(state.requests) > count))


@router.get("/v1/requests/{request_id}", **documented(None, RequestRecord))
async def retrieve_request(request: Request, request_id: str) -> Response:
    """When a recent request was queued, gave its first token and ended, and what it cost."""
    state: ApiState = request.app.state.api
    entry = state.requests.get(request_id)
    if entry is None:
        raise NotFoundError(
            f"there is no recent request {request_id[:100]!a}; the id is that of the header X-Request-Id",
            param="request_id",
        )
    return json_response(entry.record(is_live=request_id in state.in_flight.request_ids()))


@router.post("/abort_requests", **documented(AbortRequest, AbortResponse))
async def abort_requests(request: Request) -> Response:
    """End requests that are under way; their clients are answered 499, which SDKs do not try again."""
    state: ApiState = request.app.state.api
    body, ignored = await read_body(state, request, AbortRequest)
    aborted = [
        name
        for name in dict.fromkeys(body.request_ids)
        if state.in_flight.abort(AbortedByClientError(f"request {name} was aborted by POST /abort_requests"), name)
    ]
    return json_response(AbortResponse(aborted), warning_headers(state, ignored))


@router.get("/load", **documented(None, Load))
async def load(request: Request) -> Response:
    """How busy the server is, for balancers."""
    state: ApiState = request.app.state.api
    stats = state.ready_engine().stats
    return json_response(
        Load(len(state.in_flight), stats.num_running, stats.num_waiting, stats.num_swapped, stats.kv_cache_usage)
    )
