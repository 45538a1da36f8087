"""One answer of the Responses API: items of thoughts, text and calls, and the events that say how they grow."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec

from pagedserve.api import sse
from pagedserve.api.call import GenerationCall
from pagedserve.api.errors import ErrorReply
from pagedserve.api.parsed_events import (
    Content,
    Event,
    Reasoning,
    ToolCallAbort,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from pagedserve.api.protocol.chat import ChatCompletionRequest, TokenLogprob
from pagedserve.api.protocol.responses import (
    FunctionCall,
    IncompleteDetails,
    Item,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Response,
    ResponseInputTokensDetails,
    ResponseOutputTokensDetails,
    ResponseUsage,
)
from pagedserve.api.responses_input import NAMES
from pagedserve.api.token_texts import TokenTexts
from pagedserve.api.turn import Turn
from pagedserve.outputs import CompletionOutput

_encode = msgspec.json.Encoder().encode

Document = dict[str, Any]


class ResponseAnswer:
    """Fills `response` as the turn goes on."""

    def __init__(self, call: GenerationCall[ChatCompletionRequest], response: Response):
        self.response = response
        self._turn = Turn(call, NAMES)
        self._texts = TokenTexts(call.state.ready_engine().tokenizer)
        self._items: list[Item] = response.output
        self._is_streamed = bool(call.body.stream)
        self._num_events = 0
        # Of tokens whose text is still to come.
        self._logprobs: list[TokenLogprob] = []

    @property
    def framing(self) -> sse.Framing:
        """How the stream of this answer says that nothing comes, or that it failed."""
        return sse.Framing(sse.KEEP_ALIVE, self._error, b"")

    async def whole(self) -> Response:
        """The response once everything is there."""
        async with aclosing(self._turn.events()) as stream:
            async for events, choice in stream:
                self._take_logprobs(choice)
                for event in events:
                    self._take(event)
        self._end()
        return self.response

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The response as events, numbered from 0."""
        has_begun = False
        async with aclosing(self._turn.events()) as stream:
            async for events, choice in stream:
                if not has_begun:
                    has_begun = True
                    yield self._event("response.created", response=self.response)
                    yield self._event("response.in_progress", response=self.response)
                self._take_logprobs(choice)
                for event in events:
                    for document in self._take(event):
                        yield self._write(document)
        for document in self._end():
            yield self._write(document)
        yield self._event(f"response.{self.response.status}", response=self.response)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _event(self, kind: str, **fields: Any) -> bytes:
        return self._write({"type": kind, **fields})

    def _write(self, document: Document) -> bytes:
        document["sequence_number"] = self._num_events
        self._num_events += 1
        return sse.named_event(document["type"], _encode(document))

    def _error(self, reply: ErrorReply) -> bytes:
        # OpenAI's event is flat; its package raises where there is an `error` besides, and else passes over it.
        fields = reply.openai()
        return self._write({**fields, "type": "error", "error": fields})

    def _take_logprobs(self, choice: CompletionOutput) -> None:
        if choice.delta_logprobs:
            self._logprobs += self._texts.chat(choice.delta_logprobs).content

    def _take(self, event: Event) -> list[Document]:
        """Add an event to the items; returns what a stream says of it."""
        item = self._items[-1] if self._items else None
        match event:
            case Content(text) if text:
                opened: list[Document] = []
                if not isinstance(item, OutputMessage):
                    item = OutputMessage(_id("msg"), [])
                    opened = [*self._open(item), *self._open_part(item, OutputText())]
                part, logprobs = item.content[0], self._logprobs
                self._logprobs = []
                part.text += text
                part.logprobs += logprobs
                return [*opened, self._delta("output_text.delta", text, content_index=0, logprobs=logprobs)]
            case Reasoning(text) if text:
                opened = []
                if not isinstance(item, ReasoningItem):
                    item = ReasoningItem(_id("rs"), [])
                    opened = [*self._open(item), *self._open_part(item, ReasoningText())]
                item.content[0].text += text
                self._logprobs = []
                return [*opened, self._delta("reasoning_text.delta", text, content_index=0)]
            case ToolCallBegin(_, call_id, name):
                return self._open(FunctionCall(_id("fc"), call_id, name))
            case ToolCallArguments(_, text) if isinstance(item, FunctionCall):
                item.arguments += text
                return [self._delta("function_call_arguments.delta", text)]
            case ToolCallEnd() if isinstance(item, FunctionCall):
                return self._close("completed")
            case ToolCallAbort() if isinstance(item, FunctionCall):
                # Its text follows. In a stream the item was seen already, and stays what it is.
                documents = self._close("incomplete")
                if not self._is_streamed:
                    self._items.pop()
                return documents
        return []

    def _delta(self, kind: str, delta: str, **fields: Any) -> Document:
        return {"type": f"response.{kind}", **self._place(), **fields, "delta": delta}

    def _place(self) -> Document:
        return {"item_id": self._items[-1].id, "output_index": len(self._items) - 1}

    def _open(self, item: Item) -> list[Document]:
        documents = self._close("completed")
        self._items.append(item)
        added = {"type": "response.output_item.added", "output_index": len(self._items) - 1, "item": item}
        # Now: the item grows.
        return [*documents, msgspec.to_builtins(added)]

    def _open_part(self, item: OutputMessage | ReasoningItem, part: OutputText | ReasoningText) -> list[Document]:
        item.content.append(part)  # type: ignore[arg-type]
        return [msgspec.to_builtins({"type": "response.content_part.added", **self._part(part)})]

    def _part(self, part: OutputText | ReasoningText) -> Document:
        return {**self._place(), "content_index": 0, "part": part}

    def _close(self, status: str) -> list[Document]:
        """The end of the last item, if it is not at its end already."""
        if not self._items or self._items[-1].status != "in_progress":
            return []
        item = self._items[-1]
        item.status = status
        documents: list[Document]
        if isinstance(item, FunctionCall):
            done = {"type": "response.function_call_arguments.done", **self._place()}
            documents = [{**done, "name": item.name, "arguments": item.arguments}]
        else:
            part = item.content[0]
            kind = "output_text" if isinstance(part, OutputText) else "reasoning_text"
            done = {"type": f"response.{kind}.done", **self._place(), "content_index": 0, "text": part.text}
            if isinstance(part, OutputText):
                done["logprobs"] = part.logprobs
            documents = [done, {"type": "response.content_part.done", **self._part(part)}]
        end = {"type": "response.output_item.done", "output_index": len(self._items) - 1, "item": item}
        return [*documents, end]

    def _end(self) -> list[Document]:
        is_cut = self._turn.finish_reason == "length"
        documents = self._close("incomplete" if is_cut else "completed")
        response, usage = self.response, self._turn.usage
        response.status = "incomplete" if is_cut else "completed"
        response.completed_at = int(time.time())
        if is_cut:
            response.incomplete_details = IncompleteDetails("max_output_tokens")
        response.usage = ResponseUsage(
            usage.prompt_tokens,
            ResponseInputTokensDetails(usage.prompt_tokens_details.cached_tokens),
            usage.completion_tokens,
            ResponseOutputTokensDetails(usage.completion_tokens_details.reasoning_tokens),
            usage.total_tokens,
        )
        return documents


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
