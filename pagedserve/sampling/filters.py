"""Temperature, min_p, top_k, top_p, and the draw: what each row of a batch asked for, as columns."""

from __future__ import annotations

import numpy as np
import torch

from pagedserve.kernels import ops
from pagedserve.sampling.transfers import to_device
from pagedserve.sampling.uniform import uniforms
from pagedserve.sampling_params import SamplingParams


class Filters:
    """How a token is chosen for each row of a batch. A greedy row has temperature 0."""

    def __init__(self, params: list[SamplingParams], streams: list[int], vocab_size: int, device: torch.device) -> None:
        self._streams = np.array(streams, dtype=np.uint64)
        self._device = device
        temperature = [0.0 if p.is_greedy else p.temperature for p in params]
        self._temperature = to_device(temperature, device, torch.float32)
        self._min_p = to_device([p.min_p for p in params], device, torch.float32)
        # A top_k of the whole vocabulary or more is none, and a top_p that no sum can reach is none.
        top_k = [p.top_k if 0 < p.top_k < vocab_size else 0 for p in params]
        self._top_k = to_device(top_k, device, torch.int64)
        self._top_p = to_device([p.top_p if p.top_p < 1.0 else 2.0 for p in params], device, torch.float64)
        is_random = any(not p.is_greedy for p in params)
        self._no_uniform = None if is_random else torch.zeros(len(params), dtype=torch.float64, device=device)

    def uniforms(self, positions: np.ndarray) -> torch.Tensor:
        """What the rows draw with, float64 [batch]: `positions` (int64 [batch]) is how many tokens each has drawn."""
        if self._no_uniform is not None:
            return self._no_uniform
        return to_device(uniforms(self._streams, positions), self._device, torch.float64)

    def draw(self, logits: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        """A token for each row of `logits` float32 [batch, vocab_size]: int64 [batch]; -1 where all are impossible."""
        return ops.sample(logits, self._temperature, self._min_p, self._top_k, self._top_p, uniform)
