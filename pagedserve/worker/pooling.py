"""Vectors of prompts: hidden states pooled as their sequences' tokens are computed."""

from __future__ import annotations

import numpy as np
import torch

from pagedserve.pooling_params import PoolingParams
from pagedserve.worker.input_batch import InputBatch
from pagedserve.worker.rows import Rows

_SMALLEST_NORM = 1e-12
NOT_FINITE = "the model's hidden states are not finite numbers"


def pooled(
    rows: Rows,
    seq_ids: list[int],
    batch: InputBatch,
    hidden: torch.Tensor,  # [num_tokens, hidden]
) -> tuple[dict[int, bytes], dict[int, str]]:
    """For the sequences of the batch that asked for a vector and whose tokens are all computed now: their vectors, as
    little-endian fp32, and what went wrong with those that have none."""
    vectors: dict[int, bytes] = {}
    errors: dict[int, str] = {}
    if not rows.with_pooling:
        return vectors, errors
    for i, seq_id in enumerate(seq_ids):
        if seq_id not in rows.with_pooling:
            continue
        params = rows.state_of(seq_id).params.pooling
        assert params is not None
        start, end = int(batch.query_start_loc[i]), int(batch.query_start_loc[i + 1])
        is_done = batch.seq_lens[i] == batch.num_tokens[i]
        if params.needs_all_tokens:
            rows.with_pooling[seq_id] = total = _added(rows.with_pooling[seq_id], hidden[start:end])
            vector = total / int(batch.seq_lens[i])
        elif is_done:
            vector = hidden[end - 1].double().cpu().numpy()
        if not is_done:
            continue
        if np.isfinite(vector).all():
            vectors[seq_id] = _finished(vector, params)
        else:
            errors[seq_id] = NOT_FINITE
    return vectors, errors


def _added(total: np.ndarray | None, states: torch.Tensor) -> np.ndarray:
    """total + the sum of states ([num_tokens, hidden]), one token after the other in fp64: the same bits however the
    prompt was cut into chunks."""
    tokens = states.double().cpu().numpy()
    if total is not None:
        tokens = np.concatenate((total[None], tokens))
    return np.cumsum(tokens, axis=0)[-1]


def _finished(vector: np.ndarray, params: PoolingParams) -> bytes:
    vector = vector[: params.dimensions]
    if params.normalize:
        vector = vector / max(float(np.sqrt(np.square(vector).sum())), _SMALLEST_NORM)
    return vector.astype("<f4").tobytes()
