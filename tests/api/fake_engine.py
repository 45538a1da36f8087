"""An engine without a core, for what only the front end decides: errors at chosen moments, hangs, thousands of streams.

It has the real tokenizer, chat template and input processor. What it says is in the prompt's last line:
`say TEXT`, `fail KIND AFTER_TOKENS` (a class of pagedserve.errors), `hang AFTER_TOKENS`; anything else gets "Hello."
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from pagedserve import errors, model_files
from pagedserve.config import FrontConfig, SchedulerConfig
from pagedserve.engine.chat_template import ChatTemplate
from pagedserve.engine.input_processor import InputProcessor
from pagedserve.engine.tokenizer import Tokenizer
from pagedserve.outputs import CompletionOutput, RequestMetrics, RequestOutput
from pagedserve.sampling_params import SamplingParams
from pagedserve.step import KVCacheSpec, MemoryPlan
from tests.helpers.byte_tokenizer import EOS_ID, byte_ids, write_tokenizer

DEFAULT_ANSWER = "Hello."


class FakeEngine:
    """Same face as AsyncLLMEngine; `live` names requests that somebody still waits for, `loop` is the server's."""

    def __init__(self, folder: Path, *, token_seconds: float = 0.0, template: str | None = None):
        """With a template of its own, which may be longer than a script has to be, the context is 2048 tokens."""
        write_tokenizer(folder)
        self.tokenizer = Tokenizer.load(model_files.resolve(str(folder), require_weights=False))
        self.chat_template = ChatTemplate.load(self.tokenizer, template)
        files = model_files.resolve(str(folder), require_weights=False)
        spec = KVCacheSpec(
            num_layers=1, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32", bytes_per_block=1024
        )
        plan = MemoryPlan(weights_bytes=0, kv_bytes=0, num_device_blocks=10_000, num_host_blocks=0, spec=spec)
        front, scheduler = FrontConfig(), SchedulerConfig(max_num_seqs=256)
        self.max_model_len = 512 if template is None else 2048
        self._input = InputProcessor(
            self.tokenizer, files, plan, max_model_len=self.max_model_len, front=front, scheduler=scheduler
        )
        self.default_sampling_params: dict[str, Any] = {}
        self.is_dead = False
        self.is_ready = True
        self.complaint: str | None = None
        self.loop: asyncio.AbstractEventLoop
        self.live: set[str] = set()
        self.seen: list[dict[str, Any]] = []
        self._token_seconds = token_seconds
        # Said whatever the prompt is, so many tokens at a time.
        self.script: str | None = None
        self.stride = 1

    def health(self) -> str | None:
        return self.complaint

    async def call(self, method: str) -> bool:
        return method == "reset_prefix_cache"

    async def generate(
        self, prompt: str | list[int], params: SamplingParams, *, request_id: str, **options: Any
    ) -> AsyncIterator[RequestOutput]:
        self.loop = asyncio.get_running_loop()
        self.seen.append({"prompt": prompt, "params": params, "request_id": request_id, **options})
        # The script is what it is, whatever a grammar would say.
        params = params.with_(structured_output=None)
        processed = await self._input.process_async(prompt, params, request_id=request_id, **options)
        ids, params = processed.request.prompt_token_ids, processed.request.sampling_params
        text = prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt)
        command, _, argument = _last_line(text).partition(" ")
        answer = argument if command == "say" else DEFAULT_ANSWER
        if self.script is not None:
            answer = self.script
        kind, _, count = argument.rpartition(" ")
        stop_at = int(count) if command in ("fail", "hang") else -1
        tokens = byte_ids(answer)[: params.max_tokens]
        reason = "stop" if params.max_tokens is None or len(byte_ids(answer)) < params.max_tokens else "length"
        self.live.add(request_id)
        try:
            for i in range(len(tokens) + 1):
                if i == stop_at and command == "hang":
                    await asyncio.Event().wait()
                if i == stop_at:
                    raise _error(kind)
                await asyncio.sleep(self._token_seconds)
                if i == 0 or (i % self.stride and i < len(tokens)):
                    continue
                yield self._output(request_id, prompt, ids, tokens, i, reason, params)
        finally:
            self.live.discard(request_id)

    def _output(
        self,
        request_id: str,
        prompt: str | list[int],
        ids: list[int],
        tokens: list[int],
        count: int,
        reason: str,
        params: SamplingParams,
    ) -> RequestOutput:
        is_last = count == len(tokens)
        decode = self.tokenizer.decode
        start = (count - 1) // self.stride * self.stride
        before = decode(tokens[:start]).rstrip("\ufffd")
        text = decode(tokens[:count]) if is_last else decode(tokens[:count]).rstrip("\ufffd")
        choices = [
            CompletionOutput(
                index=index,
                text=text,
                token_ids=tokens[:count],
                finish_reason=reason if is_last else None,
                stop_reason=EOS_ID if is_last and reason == "stop" else None,
                delta_text=text[len(before) :],
                delta_token_ids=tokens[start:count],
            )
            for index in range(params.n)
        ]
        return RequestOutput(
            request_id=request_id,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=ids,
            outputs=choices,
            finished=is_last,
            metrics=RequestMetrics(arrival_time=time.monotonic()),
        )


def _last_line(text: str) -> str:
    lines = [line for line in text.replace("<|im_end|>", "\n").splitlines() if line.strip()]
    lines = [line for line in lines if "assistant" not in line]
    return lines[-1] if lines else ""


def _error(kind: str) -> Exception:
    if kind == "QueueFullError":
        return errors.QueueFullError("the queue is full", retry_after=3)
    if kind == "Exception":
        return RuntimeError("/secret/path is broken")
    error: Exception = getattr(errors, kind)(f"{kind} on purpose")
    return error
