"""From texts to vectors through the engine: what embeddings, scores and reranking share."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from starlette.requests import Request

from pagedserve.api.call import make_idle, read_body, warning_headers
from pagedserve.api.generation import LONG_TEXT, longest_text
from pagedserve.api.protocol.common import PromptTokensDetails
from pagedserve.api.protocol.embeddings import PoolingRequest, PoolingUsage
from pagedserve.api.state import ApiState
from pagedserve.errors import ContextLengthError, RequestAbortedError, RequestError
from pagedserve.outputs import RequestOutput
from pagedserve.pooling_params import PoolingParams
from pagedserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pagedserve.engine.async_llm_engine import AsyncLLMEngine

Body = TypeVar("Body", bound=PoolingRequest)
# Texts of one request that are with the engine at a time: enough to fill its steps, and no more than its queue takes.
MAX_AT_ONCE = 128


@dataclass(slots=True)
class PoolingCall(Generic[Body]):
    """One request for vectors, as its route needs it."""

    state: ApiState
    http: Request
    body: Body
    model_name: str
    headers: dict[str, str]
    request_id: str


@dataclass(slots=True)
class Vectors:
    """What the engine made of the texts, in their order."""

    vectors: list[bytes]
    usage: PoolingUsage


async def open_pooling(request: Request, model: type[Body]) -> PoolingCall[Body]:
    """Read and check a request for vectors."""
    state: ApiState = request.app.state.api
    body, ignored = await read_body(state, request, model)
    body.check()
    if body.priority and not state.priorities_count:
        raise RequestError("priority has a meaning only with --scheduling-policy priority", param="priority")
    make_idle(request, body)
    request_id = body.request_id or request.state.client_request_id or uuid.uuid4().hex
    request.state.request_id = request_id
    return PoolingCall(
        state=state,
        http=request,
        body=body,
        model_name=state.served_name(body.model),
        headers=warning_headers(state, ignored),
        request_id=request_id,
    )


async def embed(
    engine: AsyncLLMEngine,
    texts: Sequence[tuple[str, str | list[int]]],
    params: PoolingParams,
    call: PoolingCall[Body],
) -> Vectors:
    """The vector of each text; `texts` are (the field it came from, text or ids).

    All are checked before the first runs. Raises RequestError with the field's name, and what the engine raises; the
    others are aborted then.
    """
    prompts = await _prompts(engine, texts, call.body)
    sampling = SamplingParams(max_tokens=0, pooling=params)
    outputs: list[RequestOutput | None] = [None] * len(prompts)
    remaining = iter(enumerate(prompts))
    suffix = uuid.uuid4().hex[:8]  # two live requests may carry one id

    async def work() -> None:
        for i, ids in remaining:
            try:
                outputs[i] = await _one(engine, ids, sampling, call.body, f"{call.request_id}-{i}-{suffix}")
            except RequestError as error:
                if error.param == "prompt":
                    error.param = texts[i][0]
                raise

    tasks = [asyncio.create_task(work()) for _ in range(min(len(prompts), MAX_AT_ONCE))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    finished = [output for output in outputs if output is not None]
    vectors = [output.pooled or b"" for output in finished]
    if params.dimensions is not None and len(vectors[0]) < 4 * params.dimensions:
        size = len(vectors[0]) // 4
        raise RequestError(
            f"dimensions is {params.dimensions}; this model's embeddings have {size} numbers", param="dimensions"
        )
    num_tokens = sum(len(output.prompt_token_ids) for output in finished)
    cached = sum(output.num_cached_tokens for output in finished)
    return Vectors(vectors, PoolingUsage(num_tokens, num_tokens, PromptTokensDetails(cached)))


async def _one(
    engine: AsyncLLMEngine, ids: list[int], params: SamplingParams, body: PoolingRequest, request_id: str
) -> RequestOutput:
    last: RequestOutput | None = None
    async for output in engine.generate(
        ids,
        params,
        request_id=request_id,
        timeout=body.timeout,
        priority=body.priority or 0,
        cache_salt=body.cache_salt,
    ):
        last = output
    if last is None or last.pooled is None:
        raise RequestAbortedError((last and last.error) or "the request was aborted")
    return last


async def _prompts(
    engine: AsyncLLMEngine, texts: Sequence[tuple[str, str | list[int]]], body: PoolingRequest
) -> list[list[int]]:
    """Ids of all texts, cut as the request asks for; RequestError where there are none, or too many."""
    limit = longest_text(engine)
    for field, text in texts:
        if not text:
            raise RequestError(f"{field} holds an empty text", param=field)
        if isinstance(text, str) and len(text) > limit:
            raise ContextLengthError(
                f"a text of {field} has {len(text)} characters; at most {limit} are tokenized", param=field
            )

    def encode() -> list[list[int]]:
        special = body.add_special_tokens is not False
        return [engine.tokenizer.encode(t, add_special_tokens=special) if isinstance(t, str) else t for _, t in texts]

    is_long = sum(len(text) for _, text in texts) >= LONG_TEXT
    prompts = await asyncio.to_thread(encode) if is_long else encode()
    return [_cut(engine, field, ids, body) for (field, _), ids in zip(texts, prompts, strict=True)]


def _cut(engine: AsyncLLMEngine, field: str, ids: list[int], body: PoolingRequest) -> list[int]:
    limit = body.truncate_prompt_tokens
    if limit is not None:
        if limit == -1:
            limit = engine.max_model_len
        if len(ids) > limit:
            ids = ids[-limit:] if body.truncation_side == "left" else ids[:limit]
    if len(ids) > engine.max_model_len:
        raise ContextLengthError(
            f"a text of {field} has {len(ids)} tokens; this model takes {engine.max_model_len} "
            "(truncate_prompt_tokens: -1 cuts it)",
            param=field,
        )
    return ids
