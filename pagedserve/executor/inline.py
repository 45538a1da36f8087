"""The worker in this very process and thread: one device, no transport, debuggable with a breakpoint."""

from __future__ import annotations

import sys
from concurrent.futures import Future
from typing import Any

from pagedserve.executor.base import Executor, PendingStep, Progress
from pagedserve.registry import load
from pagedserve.step import MemoryPlan, ModelRunnerOutput, SchedulerOutput

# By name, so that the control plane imports without torch.
WORKER = "pagedserve.worker.worker:Worker"


class InlineExecutor(Executor):
    """Runs each step while it is submitted; the pending step that comes back is always done."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self._worker: Any = None

    def load(self, progress: Progress) -> None:
        if WORKER.partition(":")[0] not in sys.modules:
            progress("importing torch")
        worker_class = load(WORKER)
        progress("loading weights")
        self._worker = worker_class(
            self.model, self.cache, self.scheduler, self.files, progress, vocab_limit=self.vocab_limit
        )
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
        if self._worker is not None:
            self._worker.shutdown()
            self._worker = None
