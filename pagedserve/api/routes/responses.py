"""`/v1/responses`: create, stream, read, cancel and delete."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi import Response as HttpResponse

from pagedserve.api.body import read_json, unknown_fields, validated
from pagedserve.api.call import GenerationCall, call_for, json_response, warning_headers
from pagedserve.api.errors import reply_to
from pagedserve.api.generation import tokenize
from pagedserve.api.openapi import documented
from pagedserve.api.protocol.chat import ChatCompletionRequest
from pagedserve.api.protocol.responses import (
    CountInputRequest,
    InputTokens,
    ItemList,
    Response,
    ResponseDeleted,
    ResponseError,
    ResponsesRequest,
    refuse,
)
from pagedserve.api.responses_answer import ResponseAnswer
from pagedserve.api.responses_input import NAMES, chat_fields, normalized
from pagedserve.api.responses_store import Stored
from pagedserve.api.routes.files import page_size
from pagedserve.api.state import ApiState
from pagedserve.api.turn import as_chat, renamed
from pagedserve.errors import RequestError

router = APIRouter(tags=["generation"])

DEFAULT_PAGE = 20
MAX_PAGE = 100

Body = TypeVar("Body", bound=CountInputRequest)


@router.post("/v1/responses", **documented(ResponsesRequest, Response, stream=True))
async def create_response(request: Request) -> HttpResponse:
    """Answer a conversation, and remember both."""
    body, chat, ignored, items, num_own = await _read(request, ResponsesRequest)
    try:
        call = call_for(request, chat, ignored, "resp_")
    except RequestError as error:
        raise renamed(error, NAMES) from error
    # Never the client's own id: whoever guesses it could read what is stored under it.
    call.response_id = f"resp_{uuid.uuid4().hex}"
    answer = ResponseAnswer(call, _response(call, body))
    stored = Stored(answer.response, items, num_own)
    if body.background:
        return _start(call, answer, stored)
    if body.stream:
        return await call.stream(_stored(call.state, answer, stored, body), answer.framing)
    return await call.answer(_whole(call.state, answer, stored, body))


@router.post("/v1/responses/input_tokens", **documented(CountInputRequest, InputTokens))
async def count_input_tokens(request: Request) -> HttpResponse:
    """Tokens of the prompt that a conversation becomes."""
    state: ApiState = request.app.state.api
    body, chat, ignored, _, _ = await _read(request, CountInputRequest)
    chat.check()
    state.served_name(body.model)
    engine = state.ready_engine()
    text = await asyncio.to_thread(engine.chat_template.render, chat.messages, **chat.template_options())
    ids = await tokenize(engine, text, add_special_tokens=False, param="input")
    return json_response(InputTokens(len(ids)), warning_headers(state, ignored))


@router.get("/v1/responses/{response_id}", **documented(None, Response))
async def retrieve_response(request: Request, response_id: str, stream: str | None = None) -> HttpResponse:
    """A stored response."""
    if stream not in (None, "false"):
        raise RequestError("a stored response is not streamed again", param="stream")
    state: ApiState = request.app.state.api
    return json_response(state.responses.get(response_id).response)


@router.delete("/v1/responses/{response_id}", **documented(None, ResponseDeleted))
async def delete_response(request: Request, response_id: str) -> HttpResponse:
    """Forget a response."""
    state: ApiState = request.app.state.api
    state.responses.delete(response_id)
    return json_response(ResponseDeleted(response_id))


@router.post("/v1/responses/{response_id}/cancel", **documented(None, Response))
async def cancel_response(request: Request, response_id: str) -> HttpResponse:
    """End a response in the background."""
    state: ApiState = request.app.state.api
    stored = state.responses.get(response_id)
    if not stored.response.background:
        raise RequestError("only a response in the background can be cancelled", param="response_id")
    if stored.task is not None:
        stored.task.cancel()
        await asyncio.gather(stored.task, return_exceptions=True)
    return json_response(stored.response)


@router.get("/v1/responses/{response_id}/input_items", **documented(None, ItemList))
async def list_input_items(
    request: Request, response_id: str, after: str | None = None, limit: str | None = None, order: str | None = None
) -> HttpResponse:
    """What a response answers: its input, and the turns before it. Newest first, unless order is asc."""
    state: ApiState = request.app.state.api
    items = state.responses.get(response_id).input_items
    count = page_size(limit, default=DEFAULT_PAGE, most=MAX_PAGE)
    if order not in (None, "asc", "desc"):
        raise RequestError("order must be asc or desc", param="order")
    items = items if order == "asc" else items[::-1]
    if after is not None:
        place = next((i for i, item in enumerate(items) if item["id"] == after), None)
        if place is None:
            raise RequestError(f"after: there is no {after[:100]!a}", param="after")
        items = items[place + 1 :]
    page = items[:count]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return json_response(ItemList(page, first, last, len(items) > count))


async def _read(
    request: Request, model: type[Body]
) -> tuple[Body, ChatCompletionRequest, list[str], list[dict[str, Any]], int]:
    """The body, what it means as a chat request, fields without effect, all input items, and how many are its own."""
    state: ApiState = request.app.state.api
    raw = await read_json(request, state.max_body_bytes)
    refuse(raw)
    body = await validated(request, model, raw)
    body.check()
    own = normalized(body.input)
    items = own
    if body.previous_response_id is not None:
        previous = state.responses.get(body.previous_response_id, "previous_response_id")
        if previous.task is not None:
            raise RequestError("the previous response is not finished", param="previous_response_id")
        items = [*previous.history(), *own]
    fields, ignored = chat_fields(body, items)
    ignored += [name for name in unknown_fields(model, raw) if name not in body.HARMLESS]
    return body, as_chat(fields, NAMES), ignored, items, len(own)


def _response(call: GenerationCall[ChatCompletionRequest], body: ResponsesRequest) -> Response:
    response = Response(call.response_id, call.created, call.model_name)
    names = ("instructions", "previous_response_id", "max_output_tokens", "temperature", "top_p", "top_logprobs")
    names += ("tools", "tool_choice", "parallel_tool_calls", "reasoning", "background", "store", "metadata")
    for name in names:
        value = getattr(body, name)
        if value is not None:
            setattr(response, name, value)
    response.text = {"format": {"type": "text"}, **(body.text or {})}
    return response


async def _whole(state: ApiState, answer: ResponseAnswer, stored: Stored, body: ResponsesRequest) -> Response:
    response = await answer.whole()
    if body.store is not False:
        state.responses.put(stored)
    return response


async def _stored(
    state: ApiState, answer: ResponseAnswer, stored: Stored, body: ResponsesRequest
) -> AsyncGenerator[bytes, None]:
    async for event in answer.events():
        # Before its last event reaches the client, who may come back at once.
        if body.store is not False and answer.response.completed_at is not None:
            state.responses.put(stored)
        yield event


def _start(call: GenerationCall[ChatCompletionRequest], answer: ResponseAnswer, stored: Stored) -> HttpResponse:
    """Answer in the background; the response as it is now."""
    state, response = call.state, answer.response
    response.status = "queued"

    async def work() -> None:
        task = asyncio.current_task()
        assert task is not None
        with state.in_flight.track(task, call.http) as running:
            try:
                response.status = "in_progress"
                await answer.whole()
            except asyncio.CancelledError:
                response.status = "failed" if running.error else "cancelled"
                if running.error is not None:
                    response.error = ResponseError("server_error", str(running.error))
            except Exception as error:
                response.status = "failed"
                response.error = ResponseError("server_error", reply_to(error).message)
            finally:
                stored.task = None
                if response.id in state.responses:
                    state.responses.put(stored)

    reply = json_response(response, call.headers)
    stored.task = asyncio.create_task(work(), name=response.id)
    state.responses.put(stored)
    return reply
