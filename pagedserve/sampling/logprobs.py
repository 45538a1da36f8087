"""Log-probabilities that are reported: log-softmax of the model's raw logits, before anything a request asks (C028)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from pagedserve.kernels import ops
from pagedserve.sampling.transfers import Later, Readback, to_device
from pagedserve.step import TokenLogprobs

# What stands for a probability of zero: JSON has no infinity, and OpenAI shows this number (C023).
LOGPROB_FLOOR = -9999.0
# The number of tokens ranked is one of these, chosen from the request's own number, so that the order among equal
# logits does not depend on what batch mates ask.
_WIDTHS = (32, 128, 1024)


def distributions(logits: torch.Tensor) -> torch.Tensor:
    """What the functions below take for `log_probs`, of usable logits [n, vocab_size] that are not changed any more:
    their log-softmax on CPUs; on GPUs, whose kernel finds it where it is asked for, the logits themselves."""
    return logits if ops.on_gpu(logits.device) else torch.log_softmax(logits, dim=-1)


def chosen_logprobs(log_probs: torch.Tensor, token_ids: torch.Tensor, readback: Readback) -> Later[list[float]]:
    """The logprob of one token a row: `log_probs` [n, vocab_size], `token_ids` int64 [n]."""
    if ops.on_gpu(log_probs.device):
        return readback.take(_finite(ops.logprobs(log_probs, token_ids, 0)[0])).tolist
    values = readback.take(_finite(log_probs.gather(1, token_ids.unsqueeze(1)).squeeze(1)))
    return values.tolist


def token_logprobs(
    log_probs: torch.Tensor,  # [n, vocab_size]
    token_ids: torch.Tensor,  # int64 [n]: the token drawn, or standing in the prompt
    num_top: list[int],  # [n]: how many of the most likely tokens are reported beside it
    readback: Readback,
) -> Later[list[TokenLogprobs]]:
    """One entry a row: the chosen token first, then exactly `num_top` (at most the vocabulary) tokens, best first."""
    vocab_size = log_probs.shape[1]
    if ops.on_gpu(log_probs.device):
        return _token_logprobs_of_gpu(log_probs, token_ids, num_top, readback)
    chosen = log_probs.gather(1, token_ids.unsqueeze(1))
    ids, values = readback.take(token_ids), readback.take(_finite(chosen.squeeze(1)))
    parts = []
    for width, rows in _by_width(num_top, vocab_size):
        part, part_chosen = take_rows(log_probs, rows), take_rows(chosen, rows)
        top_values, top_ids = _ranked(part, width)
        ranks = _ranks(part, part_chosen, top_values)
        parts.append((rows, *map(readback.take, (ranks, _finite(top_values), top_ids))))

    return partial(_entries, num_top, ids, values, parts)


def _token_logprobs_of_gpu(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: list[int], readback: Readback
) -> Later[list[TokenLogprobs]]:
    """`token_logprobs` in one op: it orders equals by id, so rows may rank as many as the row that asks for most."""
    most = min(max(num_top, default=0), logits.shape[1])
    values, ranks, top_values, top_ids = ops.logprobs(logits, token_ids, most)
    ids, values = readback.take(token_ids), readback.take(_finite(values))
    part = [list(range(len(num_top))), *map(readback.take, (ranks, _finite(top_values), top_ids))]
    return partial(_entries, num_top, ids, values, [part])


def _entries(
    num_top: list[int], ids: torch.Tensor, values: torch.Tensor, parts: Sequence[Sequence[Any]]
) -> list[TokenLogprobs]:
    """Of each part: its rows, and what was found of them as tensors: ranks, values and ids of the most likely."""
    result: list[TokenLogprobs | None] = [None] * len(num_top)
    all_ids, all_values = ids.tolist(), values.tolist()
    for rows, *columns in parts:
        for i, rank, row_values, row_ids in zip(rows, *(column.tolist() for column in columns), strict=True):
            result[i] = TokenLogprobs(
                token_ids=[all_ids[i], *row_ids[: num_top[i]]],
                logprobs=[all_values[i], *row_values[: num_top[i]]],
                rank=rank,
            )
    return [entry for entry in result if entry is not None]


def take_rows(values: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """`values[rows]` for ascending `rows`, without a copy where they are all."""
    return values if len(rows) == len(values) else values[to_device(rows, values.device, torch.int64)]


def _ranks(log_probs: torch.Tensor, chosen: torch.Tensor, top_values: torch.Tensor) -> torch.Tensor:
    """1 + how many tokens are likelier than the chosen one; the whole row is read only where the list is too short."""
    ranks = 1 + (top_values > chosen).sum(dim=-1)
    beyond = (chosen < top_values[:, -1:]).squeeze(1).nonzero().flatten()
    if len(beyond):
        ranks[beyond] = 1 + (log_probs[beyond] > chosen[beyond]).sum(dim=-1)
    return ranks


def best_tokens(
    log_probs: torch.Tensor, num_best: list[int], readback: Readback
) -> Later[list[list[tuple[int, float]]]]:
    """For each row of `log_probs` [n, vocab_size], its `num_best` [n] possible tokens as (id, logprob), best first;
    equal ones by id."""
    parts = []
    for width, rows in _by_width(num_best, log_probs.shape[1]):
        values, ids = _ranked(take_rows(log_probs, rows), width)
        parts.append((rows, readback.take(values), readback.take(ids)))

    def candidates() -> list[list[tuple[int, float]]]:
        result: list[list[tuple[int, float]]] = [[] for _ in num_best]
        for rows, values, ids in parts:
            for i, row_values, row_ids in zip(rows, values.tolist(), ids.tolist(), strict=True):
                pairs = zip(row_ids[: num_best[i]], row_values, strict=False)
                result[i] = [(token_id, value) for token_id, value in pairs if value > -math.inf]
        return result

    return candidates


def _by_width(num_top: list[int], vocab_size: int) -> list[tuple[int, list[int]]]:
    """The rows that rank the same number of tokens, by that number."""
    groups: dict[int, list[int]] = {}
    for i, k in enumerate(num_top):
        width = next((w for w in _WIDTHS if k <= w and w < vocab_size), vocab_size)
        groups.setdefault(width, []).append(i)
    return list(groups.items())


def _ranked(log_probs: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest `width` values of each row and their ids, best first, equal ones by ascending id."""
    values, ids = log_probs.topk(width, dim=-1)
    ids, order = ids.sort(dim=-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _finite(log_probs: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(log_probs, nan=LOGPROB_FLOOR, neginf=LOGPROB_FLOOR).clamp(min=LOGPROB_FLOOR)
