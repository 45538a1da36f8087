"""The face of all executors: how one step's decision reaches the workers and its result comes back.

An executor knows transport and devices. It knows neither requests nor policy, and it never looks into the
`SchedulerOutput` that it carries.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

from pagedserve.config import CacheConfig, ModelConfig, SchedulerConfig
from pagedserve.model_files import ModelFiles
from pagedserve.step import MemoryPlan, ModelRunnerOutput, SamplingInput, SchedulerOutput

# Called with the name of a start-up phase as it begins.
Progress = Callable[[str], None]


class PendingStep(Protocol):
    """A step that was submitted. What goes wrong in it is raised by `result`, and by nothing else."""

    def sample(self, sampling: SamplingInput) -> None:
        """Hand over what its draws need; to be called once, when the results of all steps before it are known."""

    def result(self) -> ModelRunnerOutput:
        """Wait for what it drew."""


class Executor(ABC):
    """Workers behind one face. Called in this order: load, plan_memory, allocate, then for each step submit and the
    pending step's sample and result. A second step may be submitted before the first one's result is asked for.

    `vocab_limit` is the number of ids that the tokenizer can decode, or None for all that the model has.
    """

    def __init__(
        self,
        *,
        model: ModelConfig,
        cache: CacheConfig,
        scheduler: SchedulerConfig,
        files: ModelFiles,
        vocab_limit: int | None = None,
    ):
        self.model = model
        self.cache = cache
        self.scheduler = scheduler
        self.files = files
        self.vocab_limit = vocab_limit

    @abstractmethod
    def load(self, progress: Progress) -> None:
        """Make the workers and load the weights; raises ModelLoadError or ConfigError with one clear line."""

    @property
    @abstractmethod
    def max_model_len(self) -> int:
        """Longest sequence in tokens that the loaded model (and --max-model-len) permits."""

    @abstractmethod
    def plan_memory(self) -> MemoryPlan:
        """What fits: sizes of the weights and of both pools, for the smallest of the workers."""

    @abstractmethod
    def allocate(self, plan: MemoryPlan) -> None:
        """Make the KV pools of that size on every worker, and whatever must be warm before the first step."""

    @property
    def computes_beside_host(self) -> bool:
        """Whether steps run while this thread goes on, so that it pays to decide the next one meanwhile."""
        return False

    @abstractmethod
    def submit(self, output: SchedulerOutput) -> PendingStep:
        """Start one step's forward; steps run in the order in which they were submitted."""

    def use_quiet_moment(self) -> bool:
        """Do one piece of work that makes later steps faster, while nobody waits; False where none is left."""
        return False

    @abstractmethod
    def shutdown(self) -> None:
        """Free what the workers hold; safe to call twice."""
