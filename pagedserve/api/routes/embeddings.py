"""`POST /v1/embeddings`."""

from __future__ import annotations

import asyncio
import base64

import msgspec
from fastapi import APIRouter, Request, Response

from pagedserve.api.call import json_response
from pagedserve.api.generation import until_gone
from pagedserve.api.openapi import documented
from pagedserve.api.pooling import PoolingCall, embed, open_pooling
from pagedserve.api.protocol.embeddings import Embedding, EmbeddingRequest, EmbeddingResponse
from pagedserve.pooling_params import floats

router = APIRouter(tags=["pooling"])
VECTORS_A_TURN = 16


@router.post("/v1/embeddings", **documented(EmbeddingRequest, EmbeddingResponse))
async def create_embeddings(request: Request) -> Response:
    """A vector for each text: the model's hidden states, pooled (last token or mean) and scaled to length 1."""
    call = await open_pooling(request, EmbeddingRequest)
    return json_response(await until_gone(call.state, call.http, _answer(call)), call.headers)


async def _answer(call: PoolingCall[EmbeddingRequest]) -> EmbeddingResponse:
    engine, body = call.state.ready_engine(), call.body
    params = body.pooling_params(engine.default_pooling)
    found = await embed(engine, [("input", text) for text in body.input], params, call)
    as_text = body.encoding_format == "base64"
    data = []
    for index, vector in enumerate(found.vectors):
        # Millions of numbers are written as text here: each vector at once, and others get their turn in between.
        written = (
            base64.b64encode(vector).decode("ascii") if as_text else msgspec.Raw(msgspec.json.encode(floats(vector)))
        )
        data.append(Embedding("embedding", index, written))  # type: ignore[arg-type]
        if index % VECTORS_A_TURN == VECTORS_A_TURN - 1:
            await asyncio.sleep(0)
    return EmbeddingResponse("list", data, call.model_name, found.usage)
