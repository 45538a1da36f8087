"""AsyncLLMEngine: what the API talks to. Prompts in, streams of RequestOutput out; the core runs in its own process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any, Self

from pagedserve import model_files
from pagedserve.config import EngineConfig
from pagedserve.engine.chat_template import ChatTemplate
from pagedserve.engine.core_client import OnProgress, ProcessCoreClient
from pagedserve.engine.core_spawn import SpawnedCore, spawn_core
from pagedserve.engine.input_processor import InputProcessor, default_sampling_params
from pagedserve.engine.output_processor import OutputProcessor, RequestState
from pagedserve.engine.pooling_defaults import default_pooling
from pagedserve.engine.tokenizer import Tokenizer
from pagedserve.engine.tokenizer_choice import choose_tokenizer
from pagedserve.errors import EngineDeadError, RequestAbortedError
from pagedserve.log import get_logger
from pagedserve.messages import AbortRequests, AddRequest, EngineCoreOutputs, Ready, SchedulerStats
from pagedserve.metrics import EngineMetrics
from pagedserve.model_files import ModelFiles
from pagedserve.outputs import RequestOutput
from pagedserve.pooling_params import PoolingParams
from pagedserve.sampling_params import SamplingParams
from pagedserve.step import MemoryPlan

log = get_logger(__name__)


class AsyncLLMEngine:
    """One model, served. Make it with `await AsyncLLMEngine.start(config)`; end it with `await engine.shutdown()`."""

    def __init__(self, config: EngineConfig, metrics: EngineMetrics | None = None):
        self._config = config
        self._metrics = metrics
        self._client = ProcessCoreClient(self._on_outputs, self._on_death)
        self._ids = itertools.count()
        self._active: dict[str, _Waiter] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_draining = False
        self.stats = SchedulerStats()
        self.model_files: ModelFiles
        self.tokenizer: Tokenizer
        self.chat_template: ChatTemplate
        self.default_sampling_params: dict[str, Any]
        self.default_pooling: PoolingParams
        self._input: InputProcessor
        self._output: OutputProcessor
        self._ready: Ready | None = None

    # -- start and end ------------------------------------------------------------------------------------------------

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        metrics: EngineMetrics | None = None,
        log_level: str = "info",
        log_format: str = "text",
        on_progress: OnProgress | None = None,
        core: SpawnedCore | None = None,
    ) -> Self:
        """Start the core process (or take over `core`) and load the model; the tokenizer is loaded here meanwhile.

        Raises ConfigError, ModelNotFoundError, ModelLoadError or EngineDeadError; nothing is left running then.
        """
        engine = cls(config, metrics)
        try:
            core = core or spawn_core(log_level=log_level, log_format=log_format)
            await engine._start(core, on_progress)
        except BaseException:
            await engine._client.shutdown(timeout=0.0)
            raise
        return engine

    async def _start(self, core: SpawnedCore, on_progress: OnProgress | None) -> None:
        config = self._config
        # The core imports torch while the files are looked for (and perhaps fetched) and the tokenizer is read.
        await self._client.connect(core, on_progress=on_progress)
        self.model_files = await asyncio.to_thread(model_files.resolve_model, config.model, log=on_progress or log.info)
        self.default_pooling = default_pooling(self.model_files, config.front.pooling_type)
        self.tokenizer = await asyncio.to_thread(self._load_tokenizer)
        loading = asyncio.ensure_future(self._client.start(config, vocab_limit=self.tokenizer.vocab_size))
        try:
            self.chat_template = await asyncio.to_thread(self._load_chat_template)
            ready = await loading
        finally:
            loading.cancel()
        self.default_sampling_params = default_sampling_params(self.model_files, config.front.generation_config)
        if self.default_sampling_params:
            log.info("defaults from generation_config.json: %s", self.default_sampling_params)
        self._input = InputProcessor(
            self.tokenizer,
            self.model_files,
            ready.plan,
            max_model_len=ready.max_model_len,
            front=config.front,
            scheduler=config.scheduler,
        )
        self._output = OutputProcessor(self.tokenizer)
        if self._metrics is not None:
            self._metrics.set_config(ready.plan, config.cache)
        self._ready = ready

    def _load_tokenizer(self) -> Tokenizer:
        return choose_tokenizer(self._config.model, self.model_files)

    def _load_chat_template(self) -> ChatTemplate:
        return ChatTemplate.load(self.tokenizer, self._config.front.chat_template)

    async def shutdown(self, timeout: float = 0.0) -> None:
        """Take no new requests, give those under way `timeout` seconds, abort the rest, end the core."""
        self._is_draining = True
        if self._active and timeout > 0 and not self.is_dead:
            log.info("waiting up to %.0f s for %d requests to finish", timeout, len(self._active))
            try:
                await asyncio.wait_for(self._idle.wait(), timeout)
            except TimeoutError:
                log.warning("aborting %d requests that did not finish in time", len(self._active))
        for waiter in list(self._active.values()):
            self._abort(waiter, RequestAbortedError("the server is shutting down"))
        await self._client.shutdown()

    # -- requests -----------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        timeout: float | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Outputs as they come, the last one with `finished`; a consumer that is slow gets larger deltas.

        Closing the iterator, or cancelling whoever waits for it, aborts the request and frees what it holds.
        Raises RequestError and its children (bad request, before anything ran), QueueFullError, DeadlineExceededError,
        EngineStepError, RequestAbortedError (shutdown, `abort`), EngineDeadError. After an error that came with text
        still to deliver, that text comes first.
        """
        self._check_open()
        public_id = request_id or uuid.uuid4().hex
        # Two live requests may carry the same name; the number keeps them apart.
        internal_id = f"{public_id[:64]}#{next(self._ids)}"
        processed = await self._input.process_async(
            prompt, params, request_id=internal_id, timeout=timeout, priority=priority, cache_salt=cache_salt
        )
        self._check_open()
        waiter = _Waiter()
        waiter.state = self._output.add(processed.request, processed.prompt, public_id, waiter.wake)
        self._active[internal_id] = waiter
        self._idle.clear()
        try:
            self._client.send(AddRequest(request=processed.request))
            while True:
                await waiter.wait()
                output = waiter.state.take()
                if waiter.state.error is None:
                    yield output
                    if output.finished:
                        return
                else:
                    if any(choice.delta_token_ids for choice in output.outputs):
                        output.finished = False
                        yield output
                    raise waiter.state.error
        finally:
            self._forget(waiter.state)

    def abort(self, request_id: str) -> bool:
        """Abort every live request of that name: its consumers get RequestAbortedError. False where there is none."""
        named = [w for w in self._active.values() if w.state.public_id == request_id]
        for waiter in named:
            self._abort(waiter, RequestAbortedError(f"request {request_id} was aborted"))
        return bool(named)

    async def call(self, method: str) -> Any:
        """Ask the core: `reset_prefix_cache`, `ping`."""
        return await self._client.call(method)

    # -- state --------------------------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """True while requests are taken."""
        return self._ready is not None and not self.is_dead and not self._is_draining

    @property
    def is_dead(self) -> bool:
        """True where the core is gone; it does not come back."""
        return self._client.is_dead

    @property
    def max_model_len(self) -> int:
        return self._started().max_model_len

    @property
    def plan(self) -> MemoryPlan:
        return self._started().plan

    @property
    def startup_phases(self) -> dict[str, float]:
        """Seconds of each phase of the core's start."""
        return self._started().phases

    @property
    def num_unfinished_requests(self) -> int:
        return len(self._active)

    @property
    def core_pid(self) -> int | None:
        """Process id of the core."""
        return self._client.pid

    def health(self) -> str | None:
        """What is wrong, in one line, or None: not ready yet, dead, or stuck for --health-timeout seconds."""
        if self._client.death is not None:
            return self._client.death
        if self._ready is None:
            return "the model is still loading"
        seconds = self._client.seconds_without_answer
        if seconds > self._config.front.health_timeout:
            return f"the engine core has not answered for {seconds:.0f} s"
        return None

    # -- inside -------------------------------------------------------------------------------------------------------

    def _started(self) -> Ready:
        if self._ready is None:
            raise EngineDeadError("the engine has not started")
        return self._ready

    def _check_open(self) -> None:
        if self._client.death is not None:
            raise EngineDeadError(self._client.death)
        if self._is_draining or self._ready is None:
            raise EngineDeadError("the server is shutting down" if self._is_draining else "the engine has not started")

    def _on_outputs(self, outputs: EngineCoreOutputs) -> None:
        try:
            processed = self._output.process(outputs)
            for message in processed.messages:
                self._client.send(message)
            for state in processed.changed:
                state.notify()
        except EngineDeadError:
            pass  # the channel's end tells everybody
        except Exception:
            log.exception("a step's outputs could not be processed; the engine ends")
            self._client.abandon()
            return
        if outputs.stats is not None:
            self.stats = outputs.stats
        if self._metrics is not None:
            self._metrics.record_step(outputs.stats, processed.changed, time.monotonic())

    def _on_death(self, reason: str) -> None:
        if self._ready is None:
            return
        self.stats = SchedulerStats()
        for state in self._output.fail_all(reason):
            state.notify()
        if self._metrics is not None:
            self._metrics.record_death()

    def _abort(self, waiter: _Waiter, error: RequestAbortedError) -> None:
        self._release(waiter.state, error)
        waiter.state.notify()

    def _forget(self, state: RequestState) -> None:
        self._active.pop(state.request.request_id, None)
        if not self._active:
            self._idle.set()
        self._release(state, RequestAbortedError("the client went away"))

    def _release(self, state: RequestState, error: RequestAbortedError) -> None:
        """End a request before its time; nothing to do where it is over already."""
        request_id = state.request.request_id
        if self._output.remove(request_id) is None:
            return
        state.fail(error, time.monotonic())
        if self._metrics is not None:
            self._metrics.record_step(None, [state], time.monotonic())
        with contextlib.suppress(EngineDeadError):
            self._client.send(AbortRequests(request_ids=[request_id]))


class _Waiter:
    """Wakes the one consumer of a request."""

    state: RequestState

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def wake(self) -> None:
        self._event.set()

    async def wait(self) -> None:
        await self._event.wait()
        self._event.clear()
