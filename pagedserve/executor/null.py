"""No model at all: what the rest of the server costs (`--executor null`).

A step takes as long as on a machine of 15,000 tokens/s, for a front end that cannot keep up joins tokens to fewer
chunks and looks cheaper than it is. Scheduling, the channel, text and HTTP are real; a sequence goes on by repeating
its prompt. What only a model can tell (log-probabilities, beams, vectors) fails the request that asks for it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from pagedserve.executor.base import Executor, PendingStep, Progress
from pagedserve.step import KVCacheSpec, MemoryPlan, ModelRunnerOutput, NewSequence, SamplingInput, SchedulerOutput

_NUM_BLOCKS = 65_536
_MAX_MODEL_LEN = 2048
_TOKENS_PER_SECOND = 15_000


@dataclass(slots=True)
class _Row:
    prompt: list[int]
    num_tokens: int
    complaint: str | None


@dataclass(slots=True)
class _Step:
    """Done as soon as it was submitted, and told when a device would be done."""

    output: ModelRunnerOutput
    done_at: float

    def sample(self, sampling: SamplingInput) -> None:
        pass

    def result(self) -> ModelRunnerOutput:
        time.sleep(max(self.done_at - time.monotonic(), 0.0))
        return self.output


class NullExecutor(Executor):
    """Plans a pool that nobody allocates, and answers with tokens of the prompt."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self._rows: dict[int, _Row] = {}
        self._done_at = 0.0

    def load(self, progress: Progress) -> None:
        progress("loading nothing")

    @property
    def max_model_len(self) -> int:
        return self.model.max_model_len or int(self.files.config.get("max_position_embeddings", _MAX_MODEL_LEN))

    def plan_memory(self) -> MemoryPlan:
        spec = KVCacheSpec(
            num_layers=1,
            num_kv_heads=1,
            head_dim=1,
            block_size=self.cache.block_size,
            dtype="float32",
            bytes_per_block=8 * self.cache.block_size,
        )
        num_blocks = self.cache.num_device_blocks or _NUM_BLOCKS
        return MemoryPlan(
            weights_bytes=0,
            kv_bytes=num_blocks * spec.bytes_per_block,
            num_device_blocks=num_blocks,
            num_host_blocks=0,
            spec=spec,
        )

    def allocate(self, plan: MemoryPlan) -> None:
        pass

    def submit(self, output: SchedulerOutput) -> PendingStep:
        result = self._execute(output)
        result.forward_seconds = len(result.seq_ids) / _TOKENS_PER_SECOND
        self._done_at = max(self._done_at, time.monotonic()) + result.forward_seconds
        return _Step(result, self._done_at)

    def shutdown(self) -> None:
        self._rows.clear()

    def _execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        rows = self._rows
        for parent, child, _ in output.forks:
            row = rows[parent]
            rows[child] = _Row(row.prompt, row.num_tokens, row.complaint)
        for seq_id in output.released:
            del rows[seq_id]
        for new in output.new:
            rows[new.seq_id] = _Row(new.token_ids, len(new.token_ids), _complaint(new))
        result = ModelRunnerOutput(step_id=output.step_id)
        columns = zip(output.seq_ids, output.num_scheduled, output.num_computed, strict=True)
        sampled = [s for s, scheduled, computed in columns if scheduled + computed == rows[s].num_tokens]
        for seq_id in sampled + [child for child, _ in output.shared_logits]:
            row = rows[seq_id]
            row.num_tokens += 1
            if row.complaint is not None:
                result.errors[seq_id] = row.complaint
                continue
            result.seq_ids.append(seq_id)
            result.sampled_token_ids.append([row.prompt[(row.num_tokens - 1) % len(row.prompt)]])
            result.sampled_logprobs.append(0.0)
        return result


def _complaint(new: NewSequence) -> str | None:
    params = new.sampling_params
    needs_model = (
        params.pooling is not None
        or params.beam is not None
        or params.logprobs is not None
        or params.prompt_logprobs is not None
        or params.structured_output is not None
    )
    return "this server runs without a model (--executor null) and makes up its tokens" if needs_model else None
