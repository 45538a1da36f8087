"""`POST /v1/chat/completions`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response

from pagedserve.api.call import GenerationCall, call_for, read_body
from pagedserve.api.chat_message import delta_of, message_of
from pagedserve.api.generation import outputs, prepared_prompt
from pagedserve.api.openapi import documented
from pagedserve.api.parsed_choice import ParsedChoice
from pagedserve.api.parsed_events import Content, Event
from pagedserve.api.parsed_output import OutputFormats, OutputParser
from pagedserve.api.protocol.chat import (
    ChatChoice,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatMessage,
)
from pagedserve.api.protocol.common import Usage
from pagedserve.api.state import ApiState
from pagedserve.api.token_texts import TokenTexts
from pagedserve.errors import RequestError
from pagedserve.outputs import CompletionOutput, RequestOutput
from pagedserve.sampling_params import SamplingParams, StructuredOutput
from pagedserve.step import TokenLogprobs

if TYPE_CHECKING:
    from pagedserve.engine.async_llm_engine import AsyncLLMEngine

router = APIRouter(tags=["generation"])


@router.post("/v1/chat/completions", **documented(ChatCompletionRequest, ChatCompletionResponse, stream=True))
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    state: ApiState = request.app.state.api
    body, ignored = await read_body(state, request, ChatCompletionRequest)
    engine = state.ready_engine()
    ignored += body.unread_variables(engine.chat_template.reads)
    call = call_for(request, body, ignored, "chatcmpl-")
    answer = ChatAnswer(call, engine)
    return await (call.stream(answer.events()) if call.body.stream else call.answer(answer.whole()))


class ChatAnswer:
    """One answer in the making.

    Its text is taken apart (`ParsedChoice`) where tools may be called or the model thinks; otherwise it is passed on.
    """

    def __init__(self, call: GenerationCall[ChatCompletionRequest], engine: AsyncLLMEngine):
        self._call = call
        self._body = call.body
        self._engine = engine
        self._tools = self._body.tool_use()
        self._formats: OutputFormats = call.state.output_formats()
        self._params = self._sampling_params()
        self._texts = TokenTexts(engine.tokenizer, as_ids=bool(self._body.return_tokens_as_token_ids))
        self._usage = call.usage
        self._parsed: list[ParsedChoice] = []

    def _sampling_params(self) -> SamplingParams:
        body, defaults = self._body, self._engine.default_sampling_params
        asked = body.max_tokens_asked
        return body.sampling_params(
            defaults,
            max_tokens=defaults.get("max_tokens") if asked is None else asked,
            logprobs=body.logprobs_asked,
        )

    def usage(self) -> Usage:
        """Tokens so far."""
        return self._usage.usage()

    async def outputs(self) -> AsyncGenerator[RequestOutput, None]:
        """What the engine says."""
        body = self._body
        # In a thread: a template is a program that somebody else wrote.
        text = await asyncio.to_thread(self._engine.chat_template.render, body.messages, **body.template_options())
        params = self._prepare_parsing(text)
        try:
            prompt = await prepared_prompt(self._engine, text, body, add_special_tokens=bool(body.add_special_tokens))
            async with aclosing(outputs(self._engine, [prompt], params, body, self._call.request_id)) as stream:
                async for _, output in stream:
                    self._usage.take(0, output)
                    yield output
                    if self._parsed and all(choice.is_over for choice in self._parsed):
                        return
        except RequestError as error:
            raise body.renamed(error) from error

    def _prepare_parsing(self, prompt: str) -> SamplingParams:
        """Decide how the text is taken apart; returns the parameters with which it comes whole."""
        formats, tools, params = self._formats, self._tools, self._params
        answer = params.structured_output
        if tools.is_forced:
            params = params.with_(structured_output=self._after_thoughts(self._forced_calls(), prompt))
        elif answer is not None:
            if tools.schemas:
                answer = self._or_calls(answer)
            params = params.with_(structured_output=self._after_thoughts(answer, prompt, is_answer=True))
        elif tools.strict_names and (calls := formats.strict_calls(tools.schemas or {})) is not None:
            params = params.with_(structured_output=self._behind_open_thoughts(calls, prompt))
        if self._body.thinking_token_budget is not None:
            params = params.with_(structured_output=self._with_budget(params.structured_output, prompt))
        if formats.reasoning_parser is None and (formats.tool_parser is None or not tools.schemas):
            return params
        continued = self._body.continued_text()
        self._parsed = [
            ParsedChoice(
                OutputParser(formats, params, prompt=prompt, continued=continued, tools=tools.schemas),
                tools,
                shows_reasoning=self._body.include_reasoning is not False,
            )
            for _ in range(params.n)
        ]
        return params.with_(shown_special_ids=formats.shown_special_ids)

    def _after_thoughts(self, wanted: StructuredOutput, prompt: str, *, is_answer: bool = False) -> StructuredOutput:
        """`wanted` for what the model says once it has thought; `is_answer`: not for a call."""
        parser = self._formats.reasoning_parser
        if parser is None:
            return wanted
        if is_answer and parser.ANSWER:
            return replace(wanted, after_text=parser.ANSWER)
        markers = parser.markers()
        if parser.opens(prompt, self._body.continued_text()):
            return self._behind_open_thoughts(wanted, prompt)
        return wanted if markers is None or prompt.rstrip().endswith(markers[1]) else replace(wanted, thoughts=markers)

    def _behind_open_thoughts(self, wanted: StructuredOutput, prompt: str) -> StructuredOutput:
        """`wanted` from where thoughts end that the prompt has begun."""
        parser = self._formats.reasoning_parser
        is_open = parser is not None and parser.opens(prompt, self._body.continued_text())
        return replace(wanted, after_text=parser.CLOSE or None) if parser is not None and is_open else wanted

    def _or_calls(self, answer: StructuredOutput) -> StructuredOutput:
        """`answer`, or calls of tools that the model may make instead."""
        parser = self._formats.tool_parser
        if parser is None or not parser.CAN_CONSTRAIN:
            raise RequestError(
                f"{self._body.structured_field} and tools cannot be told apart in the way this model calls tools: "
                "send one of them, or tool_choice required or none",
                param=self._body.structured_field,
            )
        return replace(answer, alternative=self._forced_calls().value)

    def _with_budget(self, wanted: StructuredOutput | None, prompt: str) -> StructuredOutput:
        """`wanted`, with thoughts that end after so many tokens."""
        parser, budget = self._formats.reasoning_parser, self._body.thinking_token_budget
        markers = None if parser is None else parser.markers()
        if parser is None or markers is None:
            raise RequestError(
                "this model writes no thoughts, or none that one marker ends, so they cannot be limited",
                param="thinking_token_budget",
            )
        if wanted is None:
            is_open = parser.opens(prompt, self._body.continued_text())
            return StructuredOutput(
                kind="text", after_text=parser.CLOSE, opening=None if is_open else markers[0], max_free_tokens=budget
            )
        if wanted.after_text == parser.CLOSE:
            return replace(wanted, max_free_tokens=budget)
        is_answer = self._tools.is_forced or self._body.structured_field is not None
        if not is_answer:
            raise RequestError(
                "this model's template does not begin the thoughts, so they cannot be limited beside strict tools",
                param="thinking_token_budget",
            )
        # A grammar cannot count: the answer begins at once, which is within any budget.
        return replace(wanted, thoughts=None)

    def _forced_calls(self) -> StructuredOutput:
        tools = self._tools
        if self._formats.tool_parser is None:
            raise RequestError(
                "this server does not know how its model writes tool calls, so none can be required "
                "(--tool-call-parser)",
                param="tool_choice",
            )
        return self._formats.forced_calls(tools.schemas or {}, tools.max_calls)

    def _echoed(self) -> str:
        """With echo the assistant's last message, which the answer goes on with."""
        content = self._body.messages[-1].get("content") if self._body.echo else None
        return content if isinstance(content, str) else ""

    # -- not streamed -------------------------------------------------------------------------------------------------

    async def whole(self) -> ChatCompletionResponse:
        """The answer once everything is there."""
        output: RequestOutput | None = None
        async with aclosing(self.outputs()) as stream:
            async for latest in stream:
                output = latest
                if self._parsed:
                    for choice in latest.outputs:
                        self._take(choice)
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
        finish_reason = choice.finish_reason
        if self._parsed:
            parsed = self._parsed[choice.index]
            choice, finish_reason = parsed.output or choice, parsed.finish_reason
            message = message_of(parsed.message, self._echoed())
        else:
            message = ChatMessage("assistant", self._echoed() + choice.text)
        return ChatChoice(
            choice.index,
            message,
            None if choice.logprobs is None else self._texts.chat(choice.logprobs),
            finish_reason,
            choice.stop_reason,
            choice.token_ids if self._body.return_token_ids else None,
        )

    def parts(self, choice: CompletionOutput) -> tuple[list[Event], str | None]:
        """What is new in a choice, and why it ended, once it has."""
        if self._parsed:
            return self._take(choice), self._parsed[choice.index].finish_reason
        return ([Content(choice.delta_text)] if choice.delta_text else []), choice.finish_reason

    def _take(self, choice: CompletionOutput) -> list[Event]:
        events = self._parsed[choice.index].take(choice)
        self._usage.num_reasoning_tokens = sum(parsed.num_reasoning_tokens for parsed in self._parsed)
        return events

    # -- streamed -----------------------------------------------------------------------------------------------------

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as chunks: for each choice the role, then text, then the reason why it ended."""
        body = self._body
        writer = self._call.writer("chat.completion.chunk", with_usage=body.wants_usage_chunk)
        is_plain = not body.logprobs and not body.return_token_ids and not body.wants_usage_always
        has_begun = False
        ended: set[int] = set()
        waiting = [ChunkExtras() for _ in range(self._params.n)]
        async with aclosing(self.outputs()) as stream:
            async for output in stream:
                if not has_begun:
                    has_begun = True
                    usage = self._usage.usage() if body.wants_usage_always else None
                    for index in range(self._params.n):
                        yield writer.choice(self._first_chunk(index, output), usage)
                for choice in output.outputs:
                    if choice.index in ended:
                        continue
                    finish_reason = choice.finish_reason
                    if self._parsed:
                        deltas = self._take(choice)
                        finish_reason = self._parsed[choice.index].finish_reason
                    usage = self._usage.usage() if body.wants_usage_always else None
                    if not is_plain:
                        waiting[choice.index].add(choice)
                    if self._parsed:
                        for event in deltas:
                            if is_plain and isinstance(event, Content):
                                yield writer.delta(choice.index, event.text)
                            elif (delta := delta_of(event)) is not None:
                                yield writer.choice(self._chunk(choice.index, delta, waiting[choice.index]), usage)
                    elif is_plain:
                        if choice.delta_text:
                            yield writer.delta(choice.index, choice.delta_text)
                    elif choice.delta_text or choice.delta_token_ids:
                        delta = {"content": choice.delta_text}
                        yield writer.choice(self._chunk(choice.index, delta, waiting[choice.index]), usage)
                    if finish_reason is not None:
                        ended.add(choice.index)
                        last = self._chunk(choice.index, {}, waiting[choice.index])
                        last["finish_reason"] = finish_reason
                        if choice.stop_reason is not None:
                            last["stop_reason"] = choice.stop_reason
                        yield writer.choice(last, usage)
        if body.wants_usage_chunk:
            yield writer.usage(self._usage.usage())

    def _first_chunk(self, index: int, output: RequestOutput) -> dict[str, Any]:
        delta = {"role": "assistant", "content": self._echoed()}
        chunk: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        if self._body.return_token_ids and index == 0:
            chunk["prompt_token_ids"] = output.prompt_token_ids
        return chunk

    def _chunk(self, index: int, delta: dict[str, Any], extras: ChunkExtras) -> dict[str, Any]:
        logprobs = self._texts.chat(extras.logprobs) if extras.logprobs else None
        chunk: dict[str, Any] = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        if self._body.return_token_ids and (extras.token_ids or delta):
            chunk["token_ids"] = extras.token_ids
        extras.clear()
        return chunk


class ChunkExtras:
    """What belongs to tokens whose text is not shown yet: it goes with the choice's next chunk."""

    def __init__(self) -> None:
        self.logprobs: list[TokenLogprobs] = []
        self.token_ids: list[int] = []

    def add(self, choice: CompletionOutput) -> None:
        """The choice's new tokens."""
        self.logprobs += choice.delta_logprobs or ()
        self.token_ids += choice.delta_token_ids

    def clear(self) -> None:
        """They were shown."""
        self.logprobs, self.token_ids = [], []
