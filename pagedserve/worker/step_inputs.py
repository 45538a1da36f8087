"""What one forward is given, and the face of whatever runs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pagedserve.kernels import ops
from pagedserve.layers.attention import ForwardContext


@dataclass(slots=True, kw_only=True)
class StepInputs:
    """What one forward is given."""

    token_ids: torch.Tensor  # int64 [num_tokens]
    positions: torch.Tensor  # int64 [num_tokens]
    last_tokens: torch.Tensor  # int64 [num_sampled]: the tokens whose logits are wanted
    context: ForwardContext

    @property
    def counts(self) -> tuple[int, int]:
        return self.token_ids.shape[0], self.last_tokens.shape[0]

    @property
    def is_decode(self) -> bool:
        """Every sequence computes one token and is sampled from it."""
        num_tokens, num_sampled = self.counts
        metadata = self.context.metadata
        return num_tokens == num_sampled == metadata.seq_lens.shape[0] and metadata.max_query_len == 1


class StepGraph:
    """One model's forward and logits, op by op; subclasses replay what they have captured.

    The results may lie in memory that the next step overwrites.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [num_tokens, hidden] and logits fp32 [num_sampled, vocab]."""
        return self.run_eagerly(inputs)

    def run_eagerly(self, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """The same, op by op."""
        hidden = self._model.forward(inputs.token_ids, inputs.positions, inputs.context)
        last = ops.embedding(hidden, inputs.last_tokens, hidden.dtype)
        return hidden, self._model.compute_logits(last)

    def capture_next(self) -> bool:
        """Captures one thing that steps have asked for; False where nothing is left. For moments when nobody waits."""
        return False

    @property
    def static_bytes(self) -> int:
        """What captures' inputs and results take, beside what `drop` lets go of."""
        return 0

    def drop(self) -> None:
        """Lets go of the memory that captures hold; later steps may ask for them afresh."""


def pool_of(inputs: StepInputs) -> tuple[int, ...]:
    """What a capture holds on to: where the KV pool lies, and its shape."""
    kv_cache = inputs.context.kv_cache
    return (kv_cache.data_ptr(), *kv_cache.shape)
