"""The worker in this very process and thread: one device, no transport, debuggable with a breakpoint."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from pagedserve.config import CacheConfig, ModelConfig, SchedulerConfig
from pagedserve.executor.base import Executor, PendingStep, Progress
from pagedserve.model_files import ModelFiles
from pagedserve.registry import load
from pagedserve.step import MemoryPlan, ModelRunnerOutput, SchedulerOutput

# By name, so that the control plane imports without torch.
WORKER = "pagedserve.worker.worker:Worker"


class InlineExecutor(Executor):
    """Runs each step while it is submitted; the pending step that comes back is always done."""

    def __init__(
        self,
        *,
        model: ModelConfig,
        cache: CacheConfig,
        scheduler: SchedulerConfig,
        files: ModelFiles,
        worker: str = WORKER,
    ):
        self._model = model
        self._cache = cache
        self._scheduler = scheduler
        self._files = files
        self._worker_target = worker
        self._worker: Any = None

    def load(self, progress: Progress) -> None:
        progress("importing torch")
        worker_class = load(self._worker_target)
        progress("loading weights")
        self._worker = worker_class(self._model, self._cache, self._scheduler, self._files, progress)
        self._worker.load_model()

    @property
    def max_model_len(self) -> int:
        return self._worker.max_model_len()

    def plan_memory(self) -> MemoryPlan:
        return self._worker.plan_memory()

    def allocate(self, plan: MemoryPlan) -> None:
        self._worker.allocate(plan)

    def submit(self, output: SchedulerOutput) -> PendingStep:
        step: Future[ModelRunnerOutput] = Future()
        try:
            step.set_result(self._worker.execute(output))
        except Exception as error:
            step.set_exception(error)
        return step

    def shutdown(self) -> None:
        self._worker = None
