"""What steps take beside weights and pools: the largest ones are run and measured before the pools are sized."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

from pagedserve.attention import AttentionBackend
from pagedserve.config import SchedulerConfig
from pagedserve.errors import ConfigError
from pagedserve.step import KVCacheSpec, SamplingInput, SchedulerOutput
from pagedserve.worker.decode_graphs import DecodeGraphs, DecodeShape, decode_sizes
from pagedserve.worker.device import Device, is_out_of_memory
from pagedserve.worker.graphs import MakeGraph
from pagedserve.worker.model_runner import ModelRunner
from pagedserve.worker.step_inputs import StepGraph
from pagedserve.worker.worst_steps import decode_step, worst_steps

# What a driver keeps of a captured step beside its tensors.
BYTES_PER_CAPTURE = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """Bytes beside weights and pools. Nothing is known of a CPU, whose pool leaves enough."""

    step_bytes: int = 0  # of the largest step
    decode_bytes: int = 0  # of the largest decode step that is captured: what all captures divide
    graph_bytes: int = 0  # of all captures, their inputs and results

    @property
    def total(self) -> int:
        """What the pool leaves free."""
        return self.step_bytes + self.graph_bytes


def measure_steps(
    device: Device,
    make_runner: Callable[[MakeGraph], ModelRunner],
    *,
    attention: AttentionBackend,
    scheduler: SchedulerConfig,
    spec: KVCacheSpec,
    max_model_len: int,
    is_captured: bool,
) -> StepMemory:
    """Runs the largest steps on runners over a pool of one block. ConfigError where they do not fit."""
    num_groups = len(spec.layer_groups)
    steps = worst_steps(
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_num_seqs=scheduler.max_num_seqs,
        max_model_len=max_model_len,
        block_size=spec.block_size,
        num_groups=num_groups,
    )
    try:
        step_bytes = device.measure(lambda: _run(make_runner(lambda model, samples: StepGraph(model)), steps))
        if step_bytes is None or not is_captured:
            return StepMemory(step_bytes=step_bytes or 0)
        shape = DecodeShape(
            max_num_rows=scheduler.max_num_seqs,
            max_model_len=max_model_len,
            block_size=spec.block_size,
            num_groups=num_groups,
        )
        scale = _Scale(device)
        runner = make_runner(lambda model, samples: DecodeGraphs(model, attention, scale, shape))
        sizes = decode_sizes(scheduler.max_num_seqs)
        _run(runner, decode_step(sizes[-1], num_groups))
        runner.capture_next()
        static_bytes = runner.graph.static_bytes
        del runner
        # What is free is asked for next: nothing of these runners may wait for the collector.
        gc.collect()
        return StepMemory(
            step_bytes=step_bytes,
            decode_bytes=scale.num_bytes,
            graph_bytes=scale.num_bytes + static_bytes + len(sizes) * BYTES_PER_CAPTURE,
        )
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(
            f"a step of {scheduler.max_num_batched_tokens} tokens and {scheduler.max_num_seqs} sequences does not fit "
            f"beside the weights: lower --max-num-batched-tokens or --max-num-seqs"
        ) from error


def _run(runner: ModelRunner, steps: list[SchedulerOutput]) -> None:
    for step in steps:
        running = runner.submit(step)
        runner.sample(running, SamplingInput(step_id=step.step_id))
        runner.result(running)


class _Scale:
    """A `CaptureDevice` that captures nothing and weighs what it is given."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.num_bytes = 0

    def reserve(self, num_bytes: int) -> None:
        pass

    def release(self) -> None:
        pass

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        function()  # the first run makes what stays
        self.num_bytes = self._device.measure(function) or 0
        return function
