"""Which kernels a model will launch on its GPU, found on tensors without storage, and compiled while weights load."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from pagedserve.attention import AttentionBackend
from pagedserve.kernels import ops
from pagedserve.layers.attention import ForwardContext
from pagedserve.log import get_logger
from pagedserve.worker.step_inputs import StepGraph, StepInputs

if TYPE_CHECKING:
    from pagedserve.kernels.triton.variants import Launch
    from pagedserve.kernels.triton.warm_up import CompileAhead

logger = get_logger(__name__)

META = torch.device("meta")
# Rows and tokens of the steps that are looked at: both divide by 16, as most numbers of a busy server's steps do, and
# compilations for numbers that do not are left to the first launch.
_DECODE_ROWS = 16
_PROMPT_TOKENS = 64


def compile_ahead(make: Callable[[], tuple[Any, AttentionBackend]], *, capability: int) -> CompileAhead | None:
    """Begins to compile what a model launches; None where that cannot be told ahead.

    `make` gives the model (see models.planning) and its attention backend, both for the meta device.
    """
    from pagedserve.kernels.triton.warm_up import CompileAhead

    try:
        launches = launches_of(*make())
    except Exception as error:
        # Nothing depends on it: each kernel is compiled at its first launch.
        logger.info("kernels are compiled at their first launch: %s: %s", type(error).__name__, error)
        return None
    return CompileAhead(launches, capability) if launches else None


@torch.inference_mode()
def launches_of(model: Any, attention: AttentionBackend) -> list[Launch]:
    """What a step of prompts and a decode step launch, sampling included. `model` lies on the meta device."""
    from pagedserve.kernels.triton.variants import collecting

    graph = StepGraph(model)
    with collecting() as launches, ops.meta_as_gpu():
        for num_tokens, num_rows in ((_PROMPT_TOKENS, _DECODE_ROWS), (_DECODE_ROWS, _DECODE_ROWS)):
            inputs = _inputs(model, attention, num_tokens, num_rows)
            _, logits = graph(inputs)
            _sample(logits)
    return launches


def _inputs(model: Any, attention: AttentionBackend, num_tokens: int, num_rows: int) -> StepInputs:
    spec = attention.spec
    num_blocks = 16
    metadata = attention.build_metadata(
        query_start_loc=torch.empty(num_rows + 1, dtype=torch.int32, device=META),
        seq_lens=torch.empty(num_rows, dtype=torch.int32, device=META),
        block_tables=torch.empty((num_rows, num_blocks), dtype=torch.int32, device=META),
        slot_mapping=torch.empty(num_tokens, dtype=torch.int64, device=META),
        max_query_len=num_tokens // num_rows,
        max_seq_len=num_blocks * spec.block_size,
    )
    pool = torch.empty(
        (num_blocks, model.num_layers, *attention.layer_block_shape), dtype=spec.kv_cache_dtype, device=META
    )
    return StepInputs(
        token_ids=torch.empty(num_tokens, dtype=torch.int64, device=META),
        positions=torch.empty(num_tokens, dtype=torch.int64, device=META),
        last_tokens=torch.empty(num_rows, dtype=torch.int64, device=META),
        context=ForwardContext(metadata=metadata, kv_cache=pool),
    )


def _sample(logits: torch.Tensor) -> None:
    floats = torch.empty(len(logits), device=META)
    ops.sample(logits, floats, floats, floats.long(), floats.double(), floats.double())
