"""EngineCore: the loop's body. Decide, compute, record, send; and what happens when a step fails.

The core is one class for both ways to run it: `core_client.InlineCoreClient` calls it in the caller's thread,
`core_process` runs it in a process of its own. It speaks only in `messages`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from pagedserve import model_files
from pagedserve.config import EngineConfig
from pagedserve.engine.structured_output import StructuredOutputs
from pagedserve.errors import (
    DeviceLostError,
    EngineDeadError,
    PagedServeError,
    QueueFullError,
    RequestError,
)
from pagedserve.executor import EXECUTORS, Executor
from pagedserve.executor.base import PendingStep
from pagedserve.kv_cache.geometry import Geometry
from pagedserve.log import get_logger
from pagedserve.messages import (
    AbortRequests,
    AddRequest,
    Call,
    CallResult,
    EngineCoreOutputs,
    FinishedRequest,
    FromCore,
    Progress,
    Ready,
    Shutdown,
    StopSequences,
    ToCore,
)
from pagedserve.model_files import ModelFiles
from pagedserve.scheduler.scheduler import Scheduler
from pagedserve.sequence import Request
from pagedserve.step import MemoryPlan, SchedulerOutput

if TYPE_CHECKING:
    from pagedserve.engine.tokenizer import Tokenizer

log = get_logger(__name__)

# A worker that fails this often in a row will not recover; dying lets a supervisor start afresh.
MAX_FAILED_STEPS = 5

# Requests that can never be served would wait for ever; better a restart than a server that hangs.
MAX_STALLED_STEPS = 1000

# With nothing to compute but a grammar under way, give it so long before looking again.
GRAMMAR_WAIT_SECONDS = 0.005

SHORTEST_PHASE_LOGGED = 0.01

STEP_FAILED = "the model's step for this request failed; other requests go on and the server's log has the details"

Send = Callable[[FromCore], None]


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step under way: what was decided, and what will come of it."""

    decision: SchedulerOutput
    pending: PendingStep


class EngineCore:
    """Scheduler and executor, and the messages between them and the outside."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        send: Send,
        grammars: StructuredOutputs | None = None,
        *,
        looks_ahead: bool = False,
    ):
        """Without `grammars`, requests for structured output are refused. With `looks_ahead`, a step is launched before
        the results of the one before it are known, wherever it does not hang on them."""
        self._looks_ahead = looks_ahead
        self._launched: _Launched | None = None
        self.scheduler = scheduler
        self._executor = executor
        self._send = send
        self._grammars = grammars
        self._num_failed_steps = 0
        self._num_stalled_steps = 0
        # True while the front's picture of the scheduler (gauges) is older than the truth.
        self._stats_are_stale = False
        self.is_closing = False

    @property
    def has_work(self) -> bool:
        """True where a step would do something, or where a state is still to be reported."""
        return self.scheduler.has_work() or self._launched is not None or self._stats_are_stale

    def handle(self, message: ToCore) -> None:
        """Take one message in; answers go out at once, tokens with the steps."""
        match message:
            case AddRequest(request=request):
                self._add(request)
            case AbortRequests(request_ids=request_ids):
                if self._grammars is not None:
                    self._grammars.forget(request_ids)
                self._answer(self.scheduler.abort(request_ids))
            case StopSequences(request_ids=request_ids, choice_indices=choice_indices):
                for request_id, choice_index in zip(request_ids, choice_indices, strict=True):
                    self._answer(self.scheduler.stop_sequence(request_id, choice_index))
            case Call(call_id=call_id, method=method):
                self._send(self._call(call_id, method))
            case Shutdown():
                self.is_closing = True

    def step(self) -> bool:
        """Bring one step to its end, and maybe launch the next before; False where requests wait but none could run.

        A step that raises costs the requests in it, and nothing else; EngineDeadError after five of them in a row.
        """
        if self._launched is None and not self.scheduler.has_work():
            self._send_stats()
            return True
        if self._grammars is not None and self._grammars.num_pending:
            self._take_grammars(self._grammars)
        step = self._launched
        if step is None:
            step = self._launch(self.scheduler.schedule())
            step.pending.sample(self.scheduler.sampling_input(step.decision))
        ahead = self.scheduler.schedule_ahead() if self._looks_ahead else None
        self._launched = None if ahead is None else self._launch(ahead)
        outputs = self._record(step)
        if self._launched is not None:
            self._launched.pending.sample(self.scheduler.sampling_input(self._launched.decision))
        self._stats_are_stale = False
        self._send(outputs)
        if self._num_failed_steps >= MAX_FAILED_STEPS:
            raise EngineDeadError(f"{MAX_FAILED_STEPS} steps in a row failed; the engine core ends")
        return self._has_moved(step.decision, outputs)

    def _launch(self, decision: SchedulerOutput) -> _Launched:
        return _Launched(decision, self._executor.submit(decision))

    def _record(self, step: _Launched) -> EngineCoreOutputs:
        decision = step.decision
        try:
            outputs = self.scheduler.update(decision, step.pending.result())
            self._num_failed_steps = 0
        except DeviceLostError:
            raise
        except Exception:
            log.exception("step %d failed; its requests: %s", decision.step_id, self._names(decision))
            outputs = self.scheduler.fail_step(decision, STEP_FAILED)
            self._num_failed_steps += 1
        return outputs

    def _has_moved(self, decision: SchedulerOutput, outputs: EngineCoreOutputs) -> bool:
        has_moved = not decision.is_empty or bool(outputs.finished) or self._launched is not None
        if not has_moved and self._grammars is not None:
            has_moved = self._grammars.wait(GRAMMAR_WAIT_SECONDS)
        self._num_stalled_steps = 0 if has_moved else self._num_stalled_steps + 1
        if self._num_stalled_steps >= MAX_STALLED_STEPS:
            raise EngineDeadError("requests wait, but no step serves any of them; the engine core ends")
        return has_moved

    def use_quiet_moment(self) -> bool:
        """Do one piece of work that makes later steps faster; False where none is left. For when nothing waits."""
        try:
            return self._executor.use_quiet_moment()
        except DeviceLostError:
            raise
        except Exception:
            log.exception("preparing for later steps failed")
            return False

    def check(self) -> None:
        """Prove the block accounts; called when nothing else is to do. A mistake is logged with its facts."""
        try:
            self.scheduler.check()
        except Exception:
            log.exception("the KV cache's accounts do not add up; please report this")

    def shutdown(self) -> None:
        """Free the devices."""
        self._executor.shutdown()

    def _add(self, request: Request) -> None:
        try:
            self.scheduler.add(request)
            if request.sampling_params.structured_output is not None:
                self._begin_grammar(request)
        except PagedServeError as error:
            self._send(EngineCoreOutputs(finished=[refusal(request.request_id, error)]))
        self._stats_are_stale = True

    def _begin_grammar(self, request: Request) -> None:
        try:
            if self._grammars is None:
                raise RequestError("this engine offers no structured output", param="structured_output")
            constraint = self._grammars.begin(request)
        except RequestError:
            self.scheduler.withdraw(request.request_id)
            raise
        if constraint is not None:
            self.scheduler.constrain(request.request_id, constraint)

    def _take_grammars(self, grammars: StructuredOutputs) -> None:
        for request_id, result in grammars.take_ready():
            if not isinstance(result, RequestError):
                self.scheduler.constrain(request_id, result)
            elif self.scheduler.withdraw(request_id):
                self._send(EngineCoreOutputs(finished=[refusal(request_id, result)]))

    def _answer(self, outputs: EngineCoreOutputs | None) -> None:
        self._stats_are_stale = True
        if outputs is not None and (outputs.request_ids or outputs.finished):
            self._send(outputs)

    def _send_stats(self) -> None:
        self._stats_are_stale = False
        self._send(EngineCoreOutputs(stats=self.scheduler.stats()))

    def _call(self, call_id: int, method: str) -> CallResult:
        match method:
            case "ping":
                return CallResult(call_id=call_id, value=True)
            case "reset_prefix_cache":
                self._stats_are_stale = True
                return CallResult(call_id=call_id, value=self.scheduler.reset_prefix_cache())
        return CallResult(call_id=call_id, error=f"the engine core knows no call {method!r}")

    def _names(self, decision: SchedulerOutput) -> str:
        return f"{len(decision.seq_ids)} sequences, {decision.num_tokens} tokens"


def refusal(request_id: str, error: PagedServeError) -> FinishedRequest:
    """What a client hears of a request that was not taken in."""
    return FinishedRequest(
        request_id=request_id,
        error_kind=type(error).__name__,
        error=str(error),
        error_param=error.param if isinstance(error, RequestError) else None,
        retry_after=error.retry_after if isinstance(error, QueueFullError) else None,
    )


def build_core(
    config: EngineConfig,
    vocab_limit: int | None,
    send: Send,
    clock: PhaseClock | None = None,
    files: ModelFiles | None = None,
) -> tuple[EngineCore, Ready]:
    """Load the model, size the pools, make the scheduler. `send` gets a Progress as each phase begins; `files`: those
    of the model, where they were found already.

    Raises ConfigError, ModelNotFoundError or ModelLoadError with one clear line.
    """
    clock = clock or PhaseClock(send)
    if files is None:
        clock.begin("finding the model")
        files = model_files.resolve_model(config.model, log=log.info)
    executor_class = EXECUTORS.resolve(config.parallel.executor)
    executor = executor_class(
        model=config.model, cache=config.cache, scheduler=config.scheduler, files=files, vocab_limit=vocab_limit
    )
    executor.load(clock.begin)
    clock.begin("sizing the KV cache")
    plan = executor.plan_memory()
    geometry = Geometry.of(plan.spec, config.scheduler.max_num_batched_tokens)
    max_model_len = _fitting_length(executor.max_model_len, plan, geometry)
    executor.allocate(plan)
    grammars = StructuredOutputs(partial(_load_tokenizer, config, files), config.structured_output)
    scheduler = Scheduler(
        config.scheduler,
        config.cache,
        num_device_blocks=plan.num_device_blocks,
        num_host_blocks=plan.num_host_blocks,
        max_model_len=max_model_len,
        bytes_per_block=plan.spec.bytes_per_block,
        num_resident_blocks=plan.num_resident_blocks,
        windows=plan.spec.windows,
        fill_masks=grammars.fill_masks,
    )
    clock.end()
    log.info("%s", describe_plan(plan, max_model_len, geometry))
    looks_ahead = config.scheduler.async_scheduling
    if looks_ahead is None:
        looks_ahead = executor.computes_beside_host
    core = EngineCore(scheduler, executor, send, grammars, looks_ahead=looks_ahead)
    return core, Ready(plan=plan, max_model_len=max_model_len, phases=clock.seconds)


def _load_tokenizer(config: EngineConfig, files: ModelFiles) -> Tokenizer:
    from pagedserve.engine.tokenizer_choice import choose_tokenizer  # no start waits for it

    return choose_tokenizer(config.model, files)


def describe_plan(plan: MemoryPlan, max_model_len: int, geometry: Geometry) -> str:
    """The operator's line: weights, KV pool, blocks, full-length requests."""
    num_blocks, num_groups = plan.num_device_blocks, geometry.num_groups
    kind = f"in {num_groups} layer groups" if num_groups > 1 else f"({num_blocks * geometry.block_size} tokens)"
    line = (
        f"plan: weights {_gib(plan.weights_bytes)}, KV pool {_gib(plan.kv_bytes)} = {num_blocks} blocks of "
        f"{geometry.block_size} tokens {kind}, {num_blocks / geometry.num_blocks_of(max_model_len):.1f} requests of "
        f"{max_model_len} tokens at once"
    )
    if plan.step_bytes:
        line += f"; left free: {_gib(plan.step_bytes)} for the largest step, {_gib(plan.graph_bytes)} for captured ones"
    if plan.num_resident_blocks is not None:
        line += f"; while fewer are needed, {_gib(plan.num_resident_blocks * plan.spec.bytes_per_block)} stay in memory"
    return line + (f"; host pool {plan.num_host_blocks} blocks" if plan.num_host_blocks else "")


class PhaseClock:
    """Start-up phases with their seconds: progress for whoever waits, numbers for the log."""

    def __init__(self, send: Send):
        self._send = send
        self._phase: str | None = None
        self._began = 0.0
        self.seconds: dict[str, float] = {}

    def begin(self, phase: str) -> None:
        """A phase begins, and the one before it ends."""
        self.end()
        self._phase, self._began = phase, time.monotonic()
        self._send(Progress(phase=phase))

    def end(self) -> None:
        """The last phase ends."""
        if self._phase is not None:
            took = time.monotonic() - self._began
            self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + took
            if took >= SHORTEST_PHASE_LOGGED:
                log.info("%s took %.2f s", self._phase, took)
        self._phase = None


def _fitting_length(max_model_len: int, plan: MemoryPlan, geometry: Geometry) -> int:
    num_tokens = geometry.longest(plan.num_device_blocks)
    if num_tokens >= max_model_len:
        return max_model_len
    log.warning(
        "the KV pool holds %d tokens, fewer than the model's %d: requests are limited to %d tokens "
        "(raise --gpu-memory-utilization or --kv-cache-memory for longer ones)",
        num_tokens,
        max_model_len,
        num_tokens,
    )
    return num_tokens


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**28 else f"{num_bytes / 2**20:.1f} MiB"
