"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's Messages API over the same engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, Request, Response

from pagedserve.api import sse
from pagedserve.api.body import read_json, unknown_fields, validated
from pagedserve.api.call import GenerationCall, call_for, json_response, warning_headers
from pagedserve.api.errors import ErrorReply
from pagedserve.api.generation import tokenize
from pagedserve.api.messages_input import NAMES, chat_fields
from pagedserve.api.openapi import documented
from pagedserve.api.parsed_events import (
    Content,
    Event,
    Reasoning,
    ToolCallAbort,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from pagedserve.api.protocol.chat import ChatCompletionRequest
from pagedserve.api.protocol.messages import (
    Block,
    CountTokensRequest,
    Message,
    MessagesRequest,
    MessagesUsage,
    TextBlock,
    ThinkingBlock,
    TokenCount,
    ToolUseBlock,
    refuse,
)
from pagedserve.api.state import ApiState
from pagedserve.api.turn import Turn, as_chat, renamed
from pagedserve.errors import RequestError

router = APIRouter(tags=["generation"])

Body = TypeVar("Body", bound=CountTokensRequest)
_encode = msgspec.json.Encoder().encode
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


def _event(document: dict[str, Any]) -> bytes:
    return sse.named_event(document["type"], _encode(document))


def _error(reply: ErrorReply) -> bytes:
    return _event(reply.anthropic())


FRAMING = sse.Framing(sse.KEEP_ALIVE, _error, b"")


@router.post("/v1/messages", **documented(MessagesRequest, Message, stream=True))
async def create_message(request: Request) -> Response:
    """Answer a conversation."""
    body, chat, ignored = await _read(request, MessagesRequest)
    _limit_thoughts(request.app.state.api, body, chat, ignored)
    try:
        call = call_for(request, chat, ignored, "msg_")
    except RequestError as error:
        raise renamed(error, NAMES) from error
    answer = MessagesAnswer(call)
    return await (call.stream(answer.events(), FRAMING) if body.stream else call.answer(answer.whole()))


@router.post("/v1/messages/count_tokens", **documented(CountTokensRequest, TokenCount))
async def count_tokens(request: Request) -> Response:
    """Tokens of the prompt that a conversation becomes."""
    state: ApiState = request.app.state.api
    body, chat, ignored = await _read(request, CountTokensRequest)
    chat.check()
    state.served_name(body.model)
    engine = state.ready_engine()
    text = await asyncio.to_thread(engine.chat_template.render, chat.messages, **chat.template_options())
    ids = await tokenize(engine, text, add_special_tokens=False, param="messages")
    return json_response(TokenCount(len(ids)), warning_headers(state, ignored))


def _limit_thoughts(state: ApiState, body: MessagesRequest, chat: ChatCompletionRequest, ignored: list[str]) -> None:
    """Hand on the budget of thoughts, where the model has thoughts; clients send one whatever the model is."""
    thinking = body.thinking or {}
    parser = state.output_formats().reasoning_parser
    if thinking.get("type") != "enabled" or parser is None:
        return
    if parser.markers() is None:
        ignored.append("thinking.budget_tokens")
    else:
        chat.thinking_token_budget = thinking["budget_tokens"]


async def _read(request: Request, model: type[Body]) -> tuple[Body, ChatCompletionRequest, list[str]]:
    """The body, what it means as a chat request, and the names of fields without effect."""
    state: ApiState = request.app.state.api
    raw = await read_json(request, state.max_body_bytes)
    refuse(raw)
    body = await validated(request, model, raw)
    body.check()
    fields, ignored = chat_fields(body)
    ignored += [name for name in unknown_fields(model, raw) if name not in body.HARMLESS]
    return body, as_chat(fields, NAMES), ignored


class MessagesAnswer:
    """One answer in the making: blocks of thoughts, text and calls, in the order in which they come."""

    def __init__(self, call: GenerationCall[ChatCompletionRequest]):
        self._call = call
        self._turn = Turn(call, NAMES)
        self._blocks: list[Block] = []
        self._arguments = ""
        self._is_streamed = bool(call.body.stream)

    # -- not streamed -------------------------------------------------------------------------------------------------

    async def whole(self) -> Message:
        """The answer once everything is there."""
        async with aclosing(self._turn.events()) as stream:
            async for events, _ in stream:
                for event in events:
                    self._take(event)
        self._close()
        return self._message(*self._stop())

    # -- streamed -----------------------------------------------------------------------------------------------------

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as events: each block starts, grows and stops before the next."""
        has_begun = False
        async with aclosing(self._turn.events()) as stream:
            async for events, _ in stream:
                if not has_begun:
                    has_begun = True
                    yield _event({"type": "message_start", "message": self._message(None, None)})
                    yield _event({"type": "ping"})
                for event in events:
                    for document in self._take(event):
                        yield _event(document)
        for document in self._close():
            yield _event(document)
        reason, sequence = self._stop()
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        yield _event({"type": "message_delta", "delta": delta, "usage": self._usage()})
        yield _event({"type": "message_stop"})

    # -- both ---------------------------------------------------------------------------------------------------------

    def _take(self, event: Event) -> list[dict[str, Any]]:
        """Add an event to the blocks; returns what a stream says of it."""
        documents: list[dict[str, Any]] = []
        block = self._blocks[-1] if self._blocks else None
        match event:
            case Content(text) if text:
                if not isinstance(block, TextBlock):
                    documents = self._open(TextBlock(""))
                self._blocks[-1].text += text  # type: ignore[union-attr]
                documents.append(self._delta({"type": "text_delta", "text": text}))
            case Reasoning(text) if text:
                if not isinstance(block, ThinkingBlock):
                    documents = self._open(ThinkingBlock(""))
                self._blocks[-1].thinking += text  # type: ignore[union-attr]
                documents.append(self._delta({"type": "thinking_delta", "thinking": text}))
            case ToolCallBegin(_, call_id, name):
                documents = self._open(ToolUseBlock(call_id, name, {}))
            case ToolCallArguments(_, text):
                self._arguments += text
                documents.append(self._delta({"type": "input_json_delta", "partial_json": text}))
            case ToolCallEnd():
                if isinstance(block, ToolUseBlock):
                    block.input = json.loads(self._arguments or "{}")
            case ToolCallAbort() if not self._is_streamed:
                # Its text follows. In a stream the block was seen already, and ends there.
                self._blocks.pop()
        return documents

    def _open(self, block: Block) -> list[dict[str, Any]]:
        documents = self._close()
        self._blocks.append(block)
        self._arguments = ""
        start = {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": block}
        # Encoded now: the block grows.
        return [*documents, msgspec.to_builtins(start)]

    def _close(self) -> list[dict[str, Any]]:
        """The end of the last block, if there is one."""
        return [{"type": "content_block_stop", "index": len(self._blocks) - 1}] if self._blocks else []

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _message(self, reason: str | None, sequence: str | None) -> Message:
        call = self._call
        content = self._blocks if reason is not None else []
        return Message(call.response_id, content, call.model_name, reason, sequence, self._usage())

    def _stop(self) -> tuple[str, str | None]:
        turn = self._turn
        if turn.finish_reason == "stop" and isinstance(turn.stop_reason, str):
            return "stop_sequence", turn.stop_reason
        return _STOP_REASONS.get(turn.finish_reason or "", "end_turn"), None

    def _usage(self) -> MessagesUsage:
        usage = self._turn.usage
        cached = usage.prompt_tokens_details.cached_tokens
        return MessagesUsage(usage.prompt_tokens - cached, usage.completion_tokens, 0, cached)
