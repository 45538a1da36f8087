"""`POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response

from pagedserve.api.call import json_response, read_body, warning_headers
from pagedserve.api.generation import tokenize
from pagedserve.api.openapi import documented
from pagedserve.api.protocol.tokenize import (
    ApplyTemplateResponse,
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from pagedserve.api.state import ApiState
from pagedserve.api.token_texts import TokenTexts
from pagedserve.errors import RequestError

router = APIRouter(tags=["tokens"])


@router.post("/tokenize", **documented(TokenizeRequest, TokenizeResponse))
async def tokenize_text(request: Request) -> Response:
    """The token ids that a text, or a conversation, becomes."""
    state: ApiState = request.app.state.api
    body, ignored = await read_body(state, request, TokenizeRequest)
    body.check()
    state.served_name(body.model)
    engine = state.ready_engine()
    if body.messages is None:
        text = body.prompt or ""
        add_special_tokens = body.add_special_tokens is not False
    else:
        text = await asyncio.to_thread(engine.chat_template.render, body.messages, **body.template_options())
        add_special_tokens = bool(body.add_special_tokens)
    param = "prompt" if body.messages is None else "messages"
    ids = await tokenize(engine, text, add_special_tokens=add_special_tokens, param=param)
    response = TokenizeResponse(len(ids), engine.max_model_len, ids)
    if body.return_token_strs:
        texts = TokenTexts(engine.tokenizer)
        response.token_strs = [texts.text(token_id) for token_id in ids]
    return json_response(response, warning_headers(state, ignored))


@router.post("/apply_template", **documented(TokenizeRequest, ApplyTemplateResponse))
async def apply_template(request: Request) -> Response:
    """The prompt that a conversation becomes, as text."""
    state: ApiState = request.app.state.api
    body, ignored = await read_body(state, request, TokenizeRequest)
    if body.messages is None:
        raise RequestError("messages is required", param="messages")
    body.check()
    state.served_name(body.model)
    template = state.ready_engine().chat_template
    text = await asyncio.to_thread(template.render, body.messages, **body.template_options())
    return json_response(ApplyTemplateResponse(text), warning_headers(state, ignored))


@router.post("/detokenize", **documented(DetokenizeRequest, DetokenizeResponse))
async def detokenize_ids(request: Request) -> Response:
    """The text of token ids, special tokens included."""
    state: ApiState = request.app.state.api
    body, ignored = await read_body(state, request, DetokenizeRequest)
    state.served_name(body.model)
    tokenizer = state.ready_engine().tokenizer
    wrong = [token_id for token_id in body.tokens if not 0 <= token_id < tokenizer.vocab_size]
    if wrong:
        raise RequestError(f"tokens holds {wrong[0]}; ids go from 0 to {tokenizer.vocab_size - 1}", param="tokens")
    text = await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special_tokens=False)
    return json_response(DetokenizeResponse(text), warning_headers(state, ignored))
