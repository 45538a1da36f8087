"""`POST /v1/chat/completions`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response

from pagedserve.api.call import GenerationCall, open_call
from pagedserve.api.generation import UsageCounter, outputs, prepared_prompt
from pagedserve.api.openapi import documented
from pagedserve.api.protocol.chat import (
    ChatChoice,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatMessage,
)
from pagedserve.api.token_texts import TokenTexts
from pagedserve.errors import RequestError
from pagedserve.outputs import CompletionOutput, RequestOutput
from pagedserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pagedserve.engine.async_llm_engine import AsyncLLMEngine

router = APIRouter(tags=["generation"])


@router.post("/v1/chat/completions", **documented(ChatCompletionRequest, ChatCompletionResponse, stream=True))
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    call = await open_call(request, ChatCompletionRequest, "chatcmpl-")
    answer = ChatAnswer(call, call.state.ready_engine())
    return await (call.stream(answer.events()) if call.body.stream else call.answer(answer.whole()))


class ChatAnswer:
    """One answer in the making."""

    def __init__(self, call: GenerationCall[ChatCompletionRequest], engine: AsyncLLMEngine):
        self._call = call
        self._body = call.body
        self._engine = engine
        self._params = self._sampling_params()
        self._texts = TokenTexts(engine.tokenizer, as_ids=bool(self._body.return_tokens_as_token_ids))
        self._usage = UsageCounter()

    def _sampling_params(self) -> SamplingParams:
        body, defaults = self._body, self._engine.default_sampling_params
        asked = body.max_tokens_asked
        return body.sampling_params(
            defaults,
            max_tokens=defaults.get("max_tokens") if asked is None else asked,
            logprobs=body.logprobs_asked,
        )

    async def _outputs(self) -> AsyncGenerator[RequestOutput, None]:
        body = self._body
        # In a thread: a template is a program that somebody else wrote.
        text = await asyncio.to_thread(self._engine.chat_template.render, body.messages, **body.template_options())
        try:
            prompt = await prepared_prompt(self._engine, text, body, add_special_tokens=bool(body.add_special_tokens))
            async with aclosing(outputs(self._engine, [prompt], self._params, body, self._call.request_id)) as stream:
                async for _, output in stream:
                    self._usage.take(0, output)
                    yield output
        except RequestError as error:
            raise body.renamed(error) from error

    def _echoed(self) -> str:
        """With echo the assistant's last message, which the answer goes on with."""
        content = self._body.messages[-1].get("content") if self._body.echo else None
        return content if isinstance(content, str) else ""

    # -- not streamed -------------------------------------------------------------------------------------------------

    async def whole(self) -> ChatCompletionResponse:
        """The answer once everything is there."""
        output: RequestOutput | None = None
        async with aclosing(self._outputs()) as stream:
            async for latest in stream:
                output = latest
        assert output is not None
        response = ChatCompletionResponse(
            self._call.response_id,
            "chat.completion",
            self._call.created,
            self._call.model_name,
            [self._choice(choice) for choice in output.outputs],
            self._call.fingerprint,
            self._usage.usage(),
        )
        if output.prompt_logprobs is not None:
            response.prompt_logprobs = self._texts.prompt(output.prompt_logprobs)
        if self._body.return_token_ids:
            response.prompt_token_ids = output.prompt_token_ids
        return response

    def _choice(self, choice: CompletionOutput) -> ChatChoice:
        return ChatChoice(
            choice.index,
            ChatMessage("assistant", self._echoed() + choice.text),
            None if choice.logprobs is None else self._texts.chat(choice.logprobs),
            choice.finish_reason,
            choice.stop_reason,
            choice.token_ids if self._body.return_token_ids else None,
        )

    # -- streamed -----------------------------------------------------------------------------------------------------

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as chunks: for each choice the role, then text, then the reason why it ended."""
        body = self._body
        writer = self._call.writer("chat.completion.chunk", with_usage=body.wants_usage_chunk)
        is_plain = not body.logprobs and not body.return_token_ids and not body.wants_usage_always
        has_begun = False
        ended: set[int] = set()
        async with aclosing(self._outputs()) as stream:
            async for output in stream:
                usage = self._usage.usage() if body.wants_usage_always else None
                if not has_begun:
                    has_begun = True
                    for index in range(self._params.n):
                        yield writer.choice(self._first_chunk(index, output), usage)
                for choice in output.outputs:
                    if choice.index in ended:
                        continue
                    if is_plain:
                        if choice.delta_text:
                            yield writer.delta(choice.index, choice.delta_text)
                    elif choice.delta_text or choice.delta_token_ids:
                        yield writer.choice(self._chunk(choice), usage)
                    if choice.finish_reason is not None:
                        ended.add(choice.index)
                        yield writer.choice(_last_chunk(choice), usage)
        if body.wants_usage_chunk:
            yield writer.usage(self._usage.usage())

    def _first_chunk(self, index: int, output: RequestOutput) -> dict[str, Any]:
        delta = {"role": "assistant", "content": self._echoed()}
        chunk: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        if self._body.return_token_ids and index == 0:
            chunk["prompt_token_ids"] = output.prompt_token_ids
        return chunk

    def _chunk(self, choice: CompletionOutput) -> dict[str, Any]:
        logprobs = None
        if choice.delta_logprobs is not None and choice.delta_token_ids:
            logprobs = self._texts.chat(choice.delta_logprobs)
        chunk: dict[str, Any] = {"index": choice.index, "delta": {"content": choice.delta_text}, "logprobs": logprobs}
        chunk["finish_reason"] = None
        if self._body.return_token_ids:
            chunk["token_ids"] = choice.delta_token_ids
        return chunk


def _last_chunk(choice: CompletionOutput) -> dict[str, Any]:
    chunk: dict[str, Any] = {"index": choice.index, "delta": {}, "logprobs": None}
    chunk["finish_reason"] = choice.finish_reason
    if choice.stop_reason is not None:
        chunk["stop_reason"] = choice.stop_reason
    return chunk
