"""`POST /inference/v1/generate`: token ids in, token ids out, for callers that have a tokenizer of their own."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from pagedserve.api import sse
from pagedserve.api.body import unknown_fields, validate
from pagedserve.api.call import GenerationCall, call_for, read_body
from pagedserve.api.openapi import documented
from pagedserve.api.protocol.common import HARMLESS_FIELDS, refuse_unsupported
from pagedserve.api.protocol.completions import CompletionRequest
from pagedserve.api.protocol.generate import GenerateChoice, GenerateRequest, GenerateResponse
from pagedserve.api.routes.completions import CompletionAnswer
from pagedserve.api.token_texts import TokenTexts
from pagedserve.errors import RequestError
from pagedserve.outputs import CompletionOutput, RequestOutput
from pagedserve.step import TokenLogprobs

router = APIRouter(tags=["generation"])

_COPIED = ("model", "stream", "stream_options", "request_id", "cache_salt", "priority", "timeout")
# Fields of /v1/completions that have a place of their own here, or are about text.
_NOT_SAMPLING = frozenset({*_COPIED, "prompt", "echo", "suffix"})


@router.post("/inference/v1/generate", **documented(GenerateRequest, GenerateResponse, stream=True))
async def generate(request: Request) -> Response:
    """Continue token ids."""
    body, ignored = await read_body(request.app.state.api, request, GenerateRequest)
    completion, more = _as_completion(body)
    call = call_for(request, completion, ignored + more, "")
    answer = GenerateAnswer(call)
    return await (call.stream(answer.events()) if completion.stream else call.answer(answer.whole()))


def _as_completion(body: GenerateRequest) -> tuple[CompletionRequest, list[str]]:
    """The same as a request of /v1/completions, and the names of fields without effect."""
    if not body.token_ids:
        raise RequestError("token_ids must hold at least one id", param="token_ids")
    params = {name: value for name, value in (body.sampling_params or {}).items() if value is not None}
    misplaced = next((name for name in params if name in _NOT_SAMPLING), None)
    if misplaced is not None:
        raise RequestError(f"sampling_params.{misplaced} does not belong there", param=f"sampling_params.{misplaced}")
    fields: dict[str, Any] = {**params, "prompt": body.token_ids}
    fields |= {name: value for name in _COPIED if (value := getattr(body, name)) is not None}
    try:
        refuse_unsupported(params, CompletionRequest.model_fields)
        completion = validate(CompletionRequest, fields)
    except RequestError as error:
        if error.param is not None and error.param.partition(".")[0] in params:
            error.param = f"sampling_params.{error.param}"
        raise
    ignored = [name for name in unknown_fields(CompletionRequest, params) if name not in HARMLESS_FIELDS]
    return completion, [f"sampling_params.{name}" for name in ignored]


class GenerateAnswer:
    """One answer in the making."""

    def __init__(self, call: GenerationCall[CompletionRequest]):
        engine = call.state.ready_engine()
        self._call = call
        self._answer = CompletionAnswer(call, engine)
        self._texts = TokenTexts(engine.tokenizer, as_ids=True)

    async def whole(self) -> GenerateResponse:
        """The answer once everything is there."""
        last: RequestOutput | None = None
        async with aclosing(self._answer.outputs()) as stream:
            async for _, output in stream:
                last = output
        assert last is not None
        choices = [self._choice(choice, choice.token_ids, choice.logprobs) for choice in last.outputs]
        response = self._response(choices)
        response.usage = self._call.usage.usage()
        if last.prompt_logprobs is not None:
            response.prompt_logprobs = self._texts.prompt(last.prompt_logprobs)
        return response

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as chunks of new ids."""
        body = self._call.body
        ended: set[int] = set()
        async with aclosing(self._answer.outputs()) as stream:
            async for _, output in stream:
                choices = []
                for choice in output.outputs:
                    if choice.index in ended or not (choice.delta_token_ids or choice.finish_reason):
                        continue
                    if choice.finish_reason is not None:
                        ended.add(choice.index)
                    choices.append(self._choice(choice, choice.delta_token_ids, choice.delta_logprobs))
                if choices:
                    response = self._response(choices)
                    if body.wants_usage_always:
                        response.usage = self._call.usage.usage()
                    yield sse.event(msgspec.json.encode(response))
        if body.wants_usage_chunk:
            response = self._response([])
            response.usage = self._call.usage.usage()
            yield sse.event(msgspec.json.encode(response))

    def _response(self, choices: list[GenerateChoice]) -> GenerateResponse:
        return GenerateResponse(self._call.request_id, self._call.model_name, choices)

    def _choice(
        self, choice: CompletionOutput, token_ids: list[int], logprobs: list[TokenLogprobs] | None
    ) -> GenerateChoice:
        shown = self._texts.chat(logprobs) if logprobs else None
        return GenerateChoice(choice.index, token_ids, choice.finish_reason, shown, choice.stop_reason)
