"""The worker in this very process: one device, no transport, debuggable with a breakpoint."""

from __future__ import annotations

import sys
from typing import Any

from pagedserve.executor.base import Executor, PendingStep, Progress
from pagedserve.registry import load
from pagedserve.step import MemoryPlan, ModelRunnerOutput, SamplingInput, SchedulerOutput

# By name, so that the control plane imports without torch.
WORKER = "pagedserve.worker.worker:Worker"


class InlineStep:
    """A step of the worker, and the first thing that went wrong with it."""

    def __init__(self, worker: Any, output: SchedulerOutput):
        self._worker = worker
        self._step: Any = None
        self._error: Exception | None = None
        try:
            self._step = worker.submit(output)
        except Exception as error:
            self._error = error

    def sample(self, sampling: SamplingInput) -> None:
        if self._error is None:
            try:
                self._worker.sample(self._step, sampling)
            except Exception as error:
                self._error = error

    def result(self) -> ModelRunnerOutput:
        if self._error is not None:
            raise self._error
        return self._worker.result(self._step)


class InlineExecutor(Executor):
    """Calls the worker; whether a step is computed meanwhile or at once is the device's business."""

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

    @property
    def computes_beside_host(self) -> bool:
        return self._worker.computes_beside_host

    def submit(self, output: SchedulerOutput) -> PendingStep:
        return InlineStep(self._worker, output)

    def use_quiet_moment(self) -> bool:
        return self._worker.use_quiet_moment()

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()
            self._worker = None
