"""From a request's prompts to the engine's outputs: several prompts as one stream, each abortable."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request

from pagedserve.api.errors import ClientGoneError
from pagedserve.api.protocol.common import CompletionTokensDetails, GenerationRequest, PromptTokensDetails, Usage
from pagedserve.errors import ContextLengthError, PagedServeError, RequestAbortedError
from pagedserve.outputs import RequestMetrics, RequestOutput
from pagedserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pagedserve.api.state import ApiState
    from pagedserve.engine.async_llm_engine import AsyncLLMEngine

Result = TypeVar("Result")

# Texts above this many characters are tokenized in a thread.
LONG_TEXT = 4096
# Longer texts are refused unread, also where they would be cut or only counted: tokenizing 10 MB takes a minute of a
# core that nobody can stop. No tokenizer of the field makes one token of 64 characters on average.
MAX_TEXT = 1 << 20
MAX_CHARACTERS_PER_TOKEN = 64


async def outputs(
    engine: AsyncLLMEngine,
    prompts: list[str | list[int]],
    params: SamplingParams,
    request: GenerationRequest,
    request_id: str,
) -> AsyncIterator[tuple[int, RequestOutput]]:
    """Outputs of all prompts as (prompt index, output), in the order they come.

    Closing the iterator aborts what still runs. Raises what the engine raises, and an error for an output that failed.
    """
    # Two live requests may carry one id, so the engine's has a suffix that no client chooses.
    suffix = uuid.uuid4().hex[:8]

    def start(i: int) -> AsyncIterator[RequestOutput]:
        return engine.generate(
            prompts[i],
            params,
            request_id=f"{request_id}-{i}-{suffix}",
            timeout=request.timeout,
            priority=request.priority or 0,
            cache_salt=request.cache_salt,
        )

    if len(prompts) == 1:
        async with contextlib.aclosing(start(0)) as stream:
            async for output in stream:
                _raise_if_failed(output)
                yield 0, output
    else:
        async with contextlib.aclosing(_merged(len(prompts), start)) as merged:
            async for i, output in merged:
                _raise_if_failed(output)
                yield i, output


async def _merged(
    num_streams: int, start: Callable[[int], AsyncIterator[RequestOutput]]
) -> AsyncIterator[tuple[int, RequestOutput]]:
    queue: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue()

    async def drain(i: int) -> None:
        try:
            async with contextlib.aclosing(start(i)) as stream:
                async for output in stream:
                    queue.put_nowait((i, output))
            queue.put_nowait((i, None))
        except Exception as error:
            queue.put_nowait((i, error))

    tasks = [asyncio.create_task(drain(i)) for i in range(num_streams)]
    try:
        num_live = num_streams
        while num_live:
            i, item = await queue.get()
            if item is None:
                num_live -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield i, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _raise_if_failed(output: RequestOutput) -> None:
    """An answer that was cut short is an error, never a short answer."""
    if output.finished and any(choice.finish_reason in ("abort", "error", "timeout") for choice in output.outputs):
        raise RequestAbortedError(output.error or "the request was aborted")


async def until_gone(state: ApiState, request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled when the client leaves (ClientGoneError) or the server ends it."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(wait_gone(request))
    with state.in_flight.track(task, request) as running:
        try:
            await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                running.error = ClientGoneError("the client closed the connection")
                task.cancel()
            return await task
        except asyncio.CancelledError:
            if running.error is None:
                raise
            raise running.error from None
        finally:
            gone.cancel()
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, PagedServeError):
                    await task


async def wait_gone(request: Request) -> None:
    """Return when the client has closed its connection; the body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def longest_text(engine: AsyncLLMEngine) -> int:
    """Characters of the longest text that is tokenized."""
    return max(MAX_TEXT, engine.max_model_len * MAX_CHARACTERS_PER_TOKEN)


async def tokenize(engine: AsyncLLMEngine, text: str, *, add_special_tokens: bool, param: str = "prompt") -> list[int]:
    """Ids of a text; a long one does not hold up the event loop.

    A hopelessly long one is a ContextLengthError of the field `param`, which it came from.
    """
    limit = longest_text(engine)
    if len(text) > limit:
        raise ContextLengthError(f"the text has {len(text)} characters; at most {limit} are tokenized", param=param)
    encode = engine.tokenizer.encode
    if len(text) < LONG_TEXT:
        return encode(text, add_special_tokens=add_special_tokens)
    return await asyncio.to_thread(encode, text, add_special_tokens=add_special_tokens)


async def prepared_prompt(
    engine: AsyncLLMEngine, prompt: str | list[int], request: GenerationRequest, *, add_special_tokens: bool
) -> str | list[int]:
    """The prompt as the engine takes it: a text that it tokenizes itself, or ids where the request asks for more."""
    limit = request.truncate_prompt_tokens
    if isinstance(prompt, str):
        if add_special_tokens and limit is None:
            return prompt
        prompt = await tokenize(engine, prompt, add_special_tokens=add_special_tokens)
    if limit is None:
        return prompt
    if limit == -1:
        limit = max(1, engine.max_model_len - (request.max_tokens or 1))
    if len(prompt) <= limit:
        return prompt
    return prompt[:limit] if request.truncation_side == "right" else prompt[-limit:]


class UsageCounter:
    """Counts tokens of one HTTP request over its prompts and choices, as outputs come."""

    def __init__(self) -> None:
        # By prompt: tokens, tokens found in the prefix cache, times.
        self._prompts: dict[int, tuple[int, int, RequestMetrics | None]] = {}
        self._num_completion_tokens = 0
        # Whoever takes the text apart knows.
        self.num_reasoning_tokens = 0

    def take(self, prompt_index: int, output: RequestOutput) -> None:
        """Count what is new in `output`."""
        self._prompts[prompt_index] = (len(output.prompt_token_ids), output.num_cached_tokens, output.metrics)
        # What best_of computes and does not return is paid for all the same, as OpenAI counts it.
        self._num_completion_tokens += output.num_discarded_tokens
        for choice in output.outputs:
            self._num_completion_tokens += len(choice.delta_token_ids)

    @property
    def metrics(self) -> list[RequestMetrics]:
        """Times of the prompts that have begun."""
        return [metrics for _, _, metrics in self._prompts.values() if metrics is not None]

    def usage(self) -> Usage:
        """The usage so far."""
        prompts, metrics = self._prompts.values(), self.metrics
        num_prompt_tokens = sum(num_tokens for num_tokens, _, _ in prompts)
        return Usage(
            num_prompt_tokens,
            self._num_completion_tokens,
            num_prompt_tokens + self._num_completion_tokens,
            PromptTokensDetails(sum(num_cached for _, num_cached, _ in prompts)),
            CompletionTokensDetails(
                sum(m.num_preemptions for m in metrics),
                sum(m.num_wasted_tokens for m in metrics),
                self.num_reasoning_tokens,
            ),
        )
