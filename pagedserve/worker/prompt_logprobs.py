"""Logprobs of prompt tokens, for the few sequences that ask."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from pagedserve.sampling.sampler import Sampler
from pagedserve.step import TokenLogprobs
from pagedserve.worker.input_batch import InputBatch
from pagedserve.worker.rows import Rows

# Logits computed at a time: all of a long prompt's, times the vocabulary, would not fit anywhere.
_PIECE = 2**22


def prompt_logprobs(
    rows: Rows,
    seq_ids: list[int],
    batch: InputBatch,
    hidden: torch.Tensor,  # [num_tokens, hidden]
    compute_logits: Callable[[torch.Tensor], torch.Tensor],
    sampler: Sampler,
) -> dict[int, list[TokenLogprobs]]:
    """For each sequence of the batch that asks: entries of prompt positions num_computed + 1, num_computed + 2, ...,
    as far as this step tells of them.

    `rows` may hold the step's new token already. A sequence that had output before this step was told of its prompt
    when it was first computed, and is only being computed again.
    """
    result: dict[int, list[TokenLogprobs]] = {}
    if not rows.with_prompt_logprobs:
        return result
    step = max(1, _PIECE // sampler.vocab_size)
    for i, seq_id in enumerate(seq_ids):
        if seq_id not in rows.with_prompt_logprobs:
            continue
        state = rows.state_of(seq_id)
        # Each computed position tells of the next; the prompt's last one tells of the output.
        first = int(batch.num_computed[i])
        count = min(int(batch.seq_lens[i]), state.num_prompt_tokens - 1) - first
        if count <= 0 or batch.num_tokens[i] > state.num_prompt_tokens:
            continue
        states = hidden[batch.query_start_loc[i] :][:count]
        stands = rows.token_ids[batch.rows[i], first + 1 : first + 1 + count].astype(np.int64)
        token_ids = torch.from_numpy(stands).to(hidden.device)
        result[seq_id] = [
            entry
            for part in (slice(start, start + step) for start in range(0, count, step))
            for entry in sampler.score(compute_logits(states[part]), token_ids[part], state.params.prompt_logprobs or 0)
        ]
    return result
