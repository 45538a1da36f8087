"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response

from pagedserve.api.call import GenerationCall, open_call
from pagedserve.api.generation import outputs, prepared_prompt
from pagedserve.api.openapi import documented
from pagedserve.api.protocol.completions import (
    DEFAULT_MAX_TOKENS,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
)
from pagedserve.api.token_texts import LogprobColumns, TokenTexts
from pagedserve.errors import RequestError
from pagedserve.outputs import CompletionOutput, RequestOutput
from pagedserve.sampling_params import SamplingParams
from pagedserve.step import TokenLogprobs

if TYPE_CHECKING:
    from pagedserve.engine.async_llm_engine import AsyncLLMEngine

router = APIRouter(tags=["generation"])


@router.post("/v1/completions", **documented(CompletionRequest, CompletionResponse, stream=True))
async def create_completion(request: Request) -> Response:
    """Continue one prompt or several."""
    call = await open_call(request, CompletionRequest, "cmpl-")
    answer = CompletionAnswer(call, call.state.ready_engine())
    return await (call.stream(answer.events()) if call.body.stream else call.answer(answer.whole()))


class CompletionAnswer:
    """One answer in the making: choice `p * n + i` is continuation `i` of prompt `p`."""

    def __init__(self, call: GenerationCall[CompletionRequest], engine: AsyncLLMEngine):
        self._call = call
        self._body = call.body
        self._engine = engine
        self._params = self._sampling_params()
        self._n = self._params.n
        self._texts = TokenTexts(engine.tokenizer, as_ids=bool(self._body.return_tokens_as_token_ids))
        self._columns: dict[int, LogprobColumns] = {}
        self._usage = call.usage

    def _sampling_params(self) -> SamplingParams:
        body = self._body
        params = body.sampling_params(
            self._engine.default_sampling_params,
            max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
            logprobs=body.logprobs,
            best_of=body.best_of,
        )
        if body.echo and body.logprobs is not None:
            params = params.with_(prompt_logprobs=max(body.logprobs, body.prompt_logprobs or 0))
        return params

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """What the engine says, with the number of the prompt."""
        add_special_tokens = self._body.add_special_tokens is not False
        prompts = [
            await prepared_prompt(self._engine, prompt, self._body, add_special_tokens=add_special_tokens)
            for prompt in self._body.prompts()
        ]
        source = outputs(self._engine, prompts, self._params, self._body, self._call.request_id)
        try:
            async with aclosing(source) as stream:
                async for prompt_index, output in stream:
                    self._usage.take(prompt_index, output)
                    yield prompt_index, output
        except RequestError as error:
            raise self._body.renamed(error) from error

    # -- not streamed -------------------------------------------------------------------------------------------------

    async def whole(self) -> CompletionResponse:
        """The answer once everything is there."""
        last: dict[int, RequestOutput] = {}
        async with aclosing(self.outputs()) as stream:
            async for prompt_index, output in stream:
                last[prompt_index] = output
        choices = [
            self._choice(prompt_index, output, choice)
            for prompt_index, output in sorted(last.items())
            for choice in output.outputs
        ]
        return CompletionResponse(
            self._call.response_id,
            "text_completion",
            self._call.created,
            self._call.model_name,
            choices,
            self._call.fingerprint,
            self._usage.usage(),
        )

    def _choice(self, prompt_index: int, output: RequestOutput, choice: CompletionOutput) -> CompletionChoice:
        body = self._body
        index = prompt_index * self._n + choice.index
        echoed = self._prompt_text(prompt_index, output) if body.echo else None
        logprobs = None
        if body.logprobs is not None:
            logprobs = self._logprobs(index, output, choice.token_ids, choice.logprobs or [], echoed)
        result = CompletionChoice(
            index,
            (echoed or "") + choice.text,
            logprobs,
            choice.finish_reason,
            choice.stop_reason,
        )
        if body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            result.prompt_logprobs = self._texts.prompt(output.prompt_logprobs)
        if body.return_token_ids:
            result.prompt_token_ids = output.prompt_token_ids
            result.token_ids = choice.token_ids
        return result

    # -- streamed -----------------------------------------------------------------------------------------------------

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as chunks."""
        body = self._body
        writer = self._call.writer("text_completion", with_usage=body.wants_usage_chunk)
        is_plain = body.logprobs is None and not body.return_token_ids and not body.wants_usage_always
        begun: set[int] = set()
        ended: set[int] = set()
        async with aclosing(self.outputs()) as stream:
            async for prompt_index, output in stream:
                for choice in output.outputs:
                    index = prompt_index * self._n + choice.index
                    if index in ended:
                        continue
                    is_first = index not in begun
                    if is_first:
                        begun.add(index)
                    elif is_plain and choice.finish_reason is None:
                        if choice.delta_text:
                            yield writer.text(index, choice.delta_text)
                        continue
                    elif choice.finish_reason is None and not choice.delta_token_ids and not choice.delta_text:
                        continue
                    if choice.finish_reason is not None:
                        ended.add(index)
                    usage = self._usage.usage() if body.wants_usage_always else None
                    yield writer.choice(self._chunk(prompt_index, output, choice, is_first=is_first), usage)
        if body.wants_usage_chunk:
            yield writer.usage(self._usage.usage())

    def _chunk(
        self, prompt_index: int, output: RequestOutput, choice: CompletionOutput, *, is_first: bool
    ) -> dict[str, Any]:
        body = self._body
        index = prompt_index * self._n + choice.index
        echoed = self._prompt_text(prompt_index, output) if body.echo and is_first else None
        logprobs = None
        if body.logprobs is not None:
            logprobs = self._logprobs(index, output, choice.delta_token_ids, choice.delta_logprobs or [], echoed)
        chunk: dict[str, Any] = {"index": index, "text": (echoed or "") + choice.delta_text, "logprobs": logprobs}
        chunk["finish_reason"] = choice.finish_reason
        if choice.finish_reason is not None and choice.stop_reason is not None:
            chunk["stop_reason"] = choice.stop_reason
        if body.return_token_ids:
            chunk["token_ids"] = choice.delta_token_ids
            if is_first:
                chunk["prompt_token_ids"] = output.prompt_token_ids
        return chunk

    # -- both ---------------------------------------------------------------------------------------------------------

    def _prompt_text(self, prompt_index: int, output: RequestOutput) -> str:
        """What echo repeats: the text as it was sent, or the ids' text where ids were sent or the prompt was cut."""
        prompt = self._body.prompts()[prompt_index]
        if isinstance(prompt, str) and self._body.truncate_prompt_tokens is None:
            return prompt
        return self._engine.tokenizer.decode(
            output.prompt_token_ids, skip_special_tokens=self._params.skip_special_tokens
        )

    def _logprobs(
        self, index: int, output: RequestOutput, token_ids: list[int], entries: list[TokenLogprobs], echoed: str | None
    ) -> CompletionLogprobs:
        """Logprobs of the next tokens of a choice; with `echoed`, of the prompt's tokens before them."""
        columns = self._columns.get(index)
        if columns is None:
            columns = self._columns[index] = LogprobColumns(
                self._texts,
                self._engine.tokenizer,
                num_top=self._body.logprobs or 0,
                skip_special_tokens=self._params.skip_special_tokens,
            )
        if echoed is not None and output.prompt_logprobs is not None:
            columns.add_prompt(output.prompt_token_ids, output.prompt_logprobs, echoed)
        columns.add(token_ids, entries)
        return columns.take()
