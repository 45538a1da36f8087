"""LLMEngine: front and core in one thread, moved step by step. What `LLM` and scripts use."""

from __future__ import annotations

import itertools
import sys
import time
from typing import Any

from pagedserve import model_files
from pagedserve.config import EngineConfig
from pagedserve.engine.core_client import InlineCoreClient, OnProgress
from pagedserve.engine.input_processor import InputProcessor, ProcessedInput, default_sampling_params
from pagedserve.engine.output_processor import OutputProcessor, RequestState
from pagedserve.engine.pooling_defaults import default_pooling
from pagedserve.engine.tokenizer_choice import choose_tokenizer
from pagedserve.errors import EngineDeadError, RequestAbortedError
from pagedserve.log import get_logger
from pagedserve.messages import AbortRequests, AddRequest, SchedulerStats
from pagedserve.outputs import RequestOutput
from pagedserve.sampling_params import SamplingParams

log = get_logger(__name__)


class LLMEngine:
    """Add requests, call `step` until none is unfinished. Everything happens in the calling thread."""

    def __init__(self, config: EngineConfig, on_progress: OnProgress | None = None):
        self.model_files = model_files.resolve_model(config.model, log=log.info)
        self.default_pooling = default_pooling(self.model_files, config.front.pooling_type)
        self.tokenizer = choose_tokenizer(config.model, self.model_files)
        self.client = InlineCoreClient(config, vocab_limit=self.tokenizer.vocab_size, on_progress=on_progress)
        ready = self.client.ready
        self.plan = ready.plan
        self.max_model_len = ready.max_model_len
        # Requests that may be under way at once: the queue, or what any run can need where it has no bound.
        self.queue_room = config.scheduler.max_queue_len or sys.maxsize
        self.stats = SchedulerStats()
        self.default_sampling_params = default_sampling_params(self.model_files, config.front.generation_config)
        self._ids = itertools.count()
        self._input = InputProcessor(
            self.tokenizer,
            self.model_files,
            ready.plan,
            max_model_len=ready.max_model_len,
            front=config.front,
            scheduler=config.scheduler,
        )
        self._output = OutputProcessor(self.tokenizer)

    @property
    def num_unfinished_requests(self) -> int:
        return len(self._output)

    def prepare(self, prompt: str | list[int], params: SamplingParams, **options: Any) -> ProcessedInput:
        """Tokenize and check, run nothing; raises RequestError. `options` are those of InputProcessor.process."""
        return self._input.process(prompt, params, request_id=str(next(self._ids)), **options)

    def submit(self, prepared: ProcessedInput) -> str:
        """Queue a prepared request; its outputs carry the id that is returned."""
        request = prepared.request
        self._output.add(request, prepared.prompt, request.request_id)
        self.client.send(AddRequest(request=request))
        return request.request_id

    def add_request(self, prompt: str | list[int], params: SamplingParams, **options: Any) -> str:
        """`prepare` and `submit` in one."""
        return self.submit(self.prepare(prompt, params, **options))

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request; what it has so far, or None where it is not under way."""
        state = self._output.remove(request_id)
        if state is None:
            return None
        self.client.send(AbortRequests(request_ids=[request_id]))
        state.fail(RequestAbortedError(f"request {request_id} was aborted"), time.monotonic())
        return state.take()

    def step(self, *, only_finished: bool = False) -> list[RequestOutput]:
        """One step; every request that has something new (or has ended). A failed one is finished with `error` set."""
        changed: dict[str, RequestState] = {}
        for outputs in self.client.step():
            processed = self._output.process(outputs)
            if outputs.stats is not None:
                self.stats = outputs.stats
            for message in processed.messages:
                self.client.send(message)
            changed.update((state.public_id, state) for state in processed.changed)
        if not changed and len(self._output) and not self.client.has_work:
            raise EngineDeadError(f"the core has nothing to do, but {len(self._output)} requests wait for it")
        return [state.take() for state in changed.values() if state.is_finished or not only_finished]

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False where blocks are still in use."""
        return bool(self.client.call("reset_prefix_cache"))

    def shutdown(self) -> None:
        """Free the worker."""
        self.client.shutdown()
