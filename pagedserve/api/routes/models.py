"""`GET /v1/models` and `GET /v1/models/{id}`."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from pagedserve.api.call import json_response
from pagedserve.api.openapi import documented
from pagedserve.api.protocol.models import ModelCard, ModelList
from pagedserve.api.state import ApiState

router = APIRouter(tags=["models"])


@router.get("/v1/models", **documented(None, ModelList))
async def list_models(request: Request) -> Response:
    """Every name under which the model is served."""
    state: ApiState = request.app.state.api
    return json_response(ModelList("list", [_card(state, name) for name in state.model_names]))


@router.get("/v1/models/{name:path}", **documented(None, ModelCard))
async def retrieve_model(request: Request, name: str) -> Response:
    """One served name."""
    state: ApiState = request.app.state.api
    return json_response(_card(state, state.served_name(name)))


def _card(state: ApiState, name: str) -> ModelCard:
    max_model_len = state.engine.max_model_len if state.engine is not None else None
    return ModelCard(name, "model", state.created, "pagedserve", state.model_names[0], None, max_model_len)
