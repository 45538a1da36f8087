"""Logprobs of prompt tokens, for the few sequences that ask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from pagedserve.sampling.sampler import Sampler
from pagedserve.sampling.transfers import Later, Readback, to_device
from pagedserve.step import TokenLogprobs
from pagedserve.worker.input_batch import InputBatch
from pagedserve.worker.rows import Rows

# Logits computed at a time: all of a long prompt's, times the vocabulary, would not fit anywhere.
_PIECE = 2**22


@dataclass(frozen=True, slots=True)
class PromptWish:
    """Positions of one prompt whose logprobs this step can tell."""

    seq_id: int
    start: int  # of the hidden states that tell, among the step's
    token_ids: np.ndarray  # int64 [count]: what stands behind each of them
    num_top: int


def prompt_wishes(rows: Rows, seq_ids: list[int], batch: InputBatch) -> list[PromptWish]:
    """For each sequence of the batch that asks: prompt positions num_computed + 1, num_computed + 2, ..., as far as
    this step tells of them.

    A sequence that had output before this step was told of its prompt when it was first computed, and is only being
    computed again.
    """
    wishes = []
    for i, seq_id in enumerate(seq_ids if rows.with_prompt_logprobs else ()):
        if seq_id not in rows.with_prompt_logprobs:
            continue
        state = rows.state_of(seq_id)
        # Each computed position tells of the next; the prompt's last one tells of the output.
        first = int(batch.num_computed[i])
        count = min(int(batch.seq_lens[i]), state.num_prompt_tokens - 1) - first
        if count <= 0 or batch.num_tokens[i] > state.num_prompt_tokens:
            continue
        stands = rows.token_ids[batch.rows[i], first + 1 : first + 1 + count].astype(np.int64)
        wishes.append(PromptWish(seq_id, int(batch.query_start_loc[i]), stands, state.params.prompt_logprobs or 0))
    return wishes


def prompt_logprobs(
    wishes: list[PromptWish],
    hidden: torch.Tensor,  # [num_tokens, hidden]
    compute_logits: Callable[[torch.Tensor], torch.Tensor],
    sampler: Sampler,
    readback: Readback,
) -> Later[dict[int, list[TokenLogprobs]]]:
    """By sequence, an entry for each of its positions."""
    step = max(1, _PIECE // sampler.vocab_size)
    told: dict[int, list[Later[list[TokenLogprobs]]]] = {}
    for wish in wishes:
        states = hidden[wish.start :][: len(wish.token_ids)]
        token_ids = to_device(wish.token_ids, hidden.device, torch.int64)
        told[wish.seq_id] = [
            sampler.score(compute_logits(states[part]), token_ids[part], wish.num_top, readback)
            for part in (slice(start, start + step) for start in range(0, len(token_ids), step))
        ]
    return partial(_entries, told)


def _entries(told: dict[int, list[Later[list[TokenLogprobs]]]]) -> dict[int, list[TokenLogprobs]]:
    return {seq_id: [entry for part in parts for entry in part()] for seq_id, parts in told.items()}
