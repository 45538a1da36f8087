"""How a device runs steps: CPUs by a step program, NVIDIA GPUs by CUDA graphs of decode steps, or op by op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pagedserve.attention import AttentionBackend
from pagedserve.log import get_logger
from pagedserve.worker.decode_graphs import DecodeGraphs, DecodeShape
from pagedserve.worker.step_inputs import StepGraph, StepInputs
from pagedserve.worker.step_program import StepProgramGraph

logger = get_logger(__name__)

Samples = Callable[[], tuple[StepInputs, StepInputs]]
MakeGraph = Callable[[Any, Samples], StepGraph]


def is_captured(attention: AttentionBackend, device: torch.device, *, enforce_eager: bool) -> bool:
    """Whether decode steps will be captured by size."""
    return device.type != "cpu" and not enforce_eager and attention.why_not_captured is None


def graph_maker(
    attention: AttentionBackend, device: torch.device, shape: DecodeShape, *, enforce_eager: bool
) -> MakeGraph:
    """What a ModelRunner makes its graph with."""
    if is_captured(attention, device, enforce_eager=enforce_eager):
        return lambda model, samples: DecodeGraphs(model, attention, _capture_device(device), shape)
    if device.type == "cpu" and not enforce_eager:
        return StepProgramGraph
    if not enforce_eager:
        reason = attention.why_not_captured
        logger.info("decode steps run op by op: attention by %s cannot be captured: %s", attention.name, reason)
    return lambda model, samples: StepGraph(model)


def _capture_device(device: torch.device) -> Any:
    from pagedserve.worker.cuda_graphs import CudaCapture

    return CudaCapture(device)
