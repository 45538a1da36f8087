"""Rows to sample, written the way a test thinks of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from pagedserve.sampling.batch import SamplingBatch, SamplingState, TokenHistory, TokenMasks
from pagedserve.sampling.sampler import Sampler, SamplerOutput
from pagedserve.sampling.transfers import Readback
from pagedserve.sampling_params import SamplingParams

CPU = torch.device("cpu")


@dataclass
class Row:
    """One sequence: its logits, what it asked for, and its tokens so far."""

    logits: torch.Tensor  # [vocab_size]
    params: SamplingParams = field(default_factory=SamplingParams)
    prompt: Sequence[int] = (1, 2, 3)
    output: Sequence[int] = ()
    seed: int = 0
    choice_index: int = 0
    eos_token_ids: tuple[int, ...] = ()

    def state(self) -> SamplingState:
        return SamplingState(self.params, self.seed, self.choice_index, len(self.prompt), self.eos_token_ids)


def history_of(rows: Sequence[Row]) -> TokenHistory:
    tokens = [[*row.prompt, *row.output] for row in rows]
    kept = np.full((len(rows), max(map(len, tokens)) + 4), -7, dtype=np.int32)
    for place, row_tokens in enumerate(tokens):
        kept[place, : len(row_tokens)] = row_tokens
    return TokenHistory(kept, np.arange(len(rows)), np.array([len(t) for t in tokens]))


def sample(rows: Sequence[Row], vocab_limit: int | None = None, masks: TokenMasks | None = None) -> SamplerOutput:
    """Samples all rows in one batch; their logits are left as they are."""
    logits = torch.stack([row.logits for row in rows]).float()
    sampler = Sampler(logits.shape[1], vocab_limit)
    batch = SamplingBatch([r.state() for r in rows], sampler.vocab_size, CPU)
    readback = Readback(CPU)
    drawn = sampler.draw(logits, sampler.prepare(batch, history_of(rows), masks), readback)
    readback.wait()
    return drawn.output()


def token_of(logits: torch.Tensor, prompt: Sequence[int] = (1, 2, 3), output: Sequence[int] = (), **params: Any) -> int:
    """The token of one row alone, whose parameters are given by name; greedy unless they say otherwise."""
    row = Row(logits, SamplingParams(**{"temperature": 0.0, **params}), prompt, output)
    return int(sample([row]).token_ids[0])


def random_logits(vocab_size: int, seed: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * scale
