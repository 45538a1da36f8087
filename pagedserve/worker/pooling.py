"""Vectors of prompts: hidden states pooled as their sequences' tokens are computed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pagedserve.pooling_params import PoolingParams
from pagedserve.sampling.transfers import Readback
from pagedserve.worker.input_batch import InputBatch
from pagedserve.worker.rows import Rows

_SMALLEST_NORM = 1e-12
NOT_FINITE = "the model's hidden states are not finite numbers"


@dataclass(slots=True)
class PoolingWish:
    """One sequence's part of a step."""

    seq_id: int
    params: PoolingParams
    tokens: slice  # whose hidden states are looked at, among the step's
    length: int | None  # of the prompt, where the step computes its end
    states: torch.Tensor | None = None  # float64 [num_tokens, hidden], on their way to the host

    @property
    def is_needed(self) -> bool:
        return self.params.needs_all_tokens or self.length is not None


def pooling_wishes(rows: Rows, seq_ids: list[int], batch: InputBatch) -> list[PoolingWish]:
    """The sequences of the batch that asked for a vector."""
    wishes = []
    for i, seq_id in enumerate(seq_ids if rows.with_pooling else ()):
        if seq_id not in rows.with_pooling:
            continue
        params = rows.state_of(seq_id).params.pooling
        assert params is not None
        start, end = int(batch.query_start_loc[i]), int(batch.query_start_loc[i + 1])
        length = int(batch.seq_lens[i]) if batch.seq_lens[i] == batch.num_tokens[i] else None
        wishes.append(PoolingWish(seq_id, params, slice(start if params.needs_all_tokens else end - 1, end), length))
    return wishes


def read_states(wishes: list[PoolingWish], hidden: torch.Tensor, readback: Readback) -> None:
    """Sends for what the wishes look at of `hidden`, [num_tokens, hidden]."""
    for wish in wishes:
        if wish.is_needed:
            wish.states = readback.take(hidden[wish.tokens].double())


def pooled(rows: Rows, wishes: list[PoolingWish]) -> tuple[dict[int, bytes], dict[int, str]]:
    """Once the states are there: the vectors of prompts whose tokens are all computed now, as little-endian fp32, and
    what went wrong with those that have none."""
    vectors: dict[int, bytes] = {}
    errors: dict[int, str] = {}
    for wish in wishes:
        if wish.states is None or wish.seq_id not in rows.with_pooling:
            continue
        if wish.params.needs_all_tokens:
            total = rows.with_pooling[wish.seq_id] = _added(rows.with_pooling[wish.seq_id], wish.states.numpy())
            vector = total / wish.length if wish.length else total
        else:
            vector = wish.states[0].numpy()
        if wish.length is None:
            continue
        if np.isfinite(vector).all():
            vectors[wish.seq_id] = _finished(vector, wish.params)
        else:
            errors[wish.seq_id] = NOT_FINITE
    return vectors, errors


def _added(total: np.ndarray | None, tokens: np.ndarray) -> np.ndarray:
    """total + the sum of states (float64 [num_tokens, hidden]), one token after the other: the same bits however the
    prompt was cut into chunks."""
    if total is not None:
        tokens = np.concatenate((total[None], tokens))
    return np.cumsum(tokens, axis=0)[-1]


def _finished(vector: np.ndarray, params: PoolingParams) -> bytes:
    vector = vector[: params.dimensions]
    if params.normalize:
        vector = vector / max(float(np.sqrt(np.square(vector).sum())), _SMALLEST_NORM)
    return vector.astype("<f4").tobytes()
