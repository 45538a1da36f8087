"""`POST /v1/score` and `/v1/rerank`: how near texts are to each other, as the cosine of their vectors."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request, Response

from pagedserve.api.call import json_response
from pagedserve.api.generation import until_gone
from pagedserve.api.openapi import documented
from pagedserve.api.pooling import PoolingCall, embed, open_pooling
from pagedserve.api.protocol.rerank import (
    RerankedDocument,
    RerankRequest,
    RerankResponse,
    RerankResult,
    Score,
    ScoreRequest,
    ScoreResponse,
)
from pagedserve.pooling_params import PoolingParams

router = APIRouter(tags=["pooling"])


@router.post("/v1/score", **documented(ScoreRequest, ScoreResponse))
@router.post("/score", include_in_schema=False)
async def create_score(request: Request) -> Response:
    """The cosine of text_1 and each of text_2, or of each pair."""
    call = await open_pooling(request, ScoreRequest)
    return json_response(await until_gone(call.state, call.http, _score(call)), call.headers)


@router.post("/v1/rerank", **documented(RerankRequest, RerankResponse))
@router.post("/rerank", include_in_schema=False)
@router.post("/v2/rerank", include_in_schema=False)
async def create_rerank(request: Request) -> Response:
    """Documents, those nearest to the query first."""
    call = await open_pooling(request, RerankRequest)
    return json_response(await until_gone(call.state, call.http, _rerank(call)), call.headers)


async def _score(call: PoolingCall[ScoreRequest]) -> ScoreResponse:
    body = call.body
    engine = call.state.ready_engine()
    texts = [("text_1", text) for text in body.text_1] + [("text_2", text) for text in body.text_2]
    found = await embed(engine, texts, _normalized(engine.default_pooling), call)
    scores = _cosines(found.vectors[: len(body.text_1)], found.vectors[len(body.text_1) :])
    data = [Score(index, "score", score) for index, score in enumerate(scores)]
    return ScoreResponse(f"score-{call.request_id}", "list", int(time.time()), call.model_name, data, found.usage)


async def _rerank(call: PoolingCall[RerankRequest]) -> RerankResponse:
    body = call.body
    engine = call.state.ready_engine()
    texts = [("query", body.query), *(("documents", text) for text in body.documents)]
    found = await embed(engine, texts, _normalized(engine.default_pooling), call)
    scores = _cosines(found.vectors[:1], found.vectors[1:])
    best = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[: body.top_n or None]
    shown = body.return_documents is not False
    results = [
        RerankResult(index, scores[index], RerankedDocument(body.documents[index]) if shown else None) for index in best
    ]
    return RerankResponse(f"rerank-{call.request_id}", call.model_name, results, found.usage)


def _normalized(params: PoolingParams) -> PoolingParams:
    return PoolingParams(pooling_type=params.pooling_type, normalize=True)


def _cosines(first: list[bytes], second: list[bytes]) -> list[float]:
    """Of vectors of length 1: one against all, or pairs."""
    import numpy as np  # no start waits for it

    left, right = (np.frombuffer(b"".join(part), "<f4").reshape(len(part), -1) for part in (first, second))
    products = np.einsum("ij,ij->i", np.broadcast_to(left, right.shape).astype(float), right.astype(float))
    # Lengths are 1 but for the rounding to fp32.
    return np.clip(products, -1.0, 1.0).tolist()
