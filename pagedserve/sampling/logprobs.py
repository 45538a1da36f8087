"""Log-probabilities that are reported: log-softmax of the model's raw logits, before anything a request asks (C028)."""

from __future__ import annotations

import torch

from pagedserve.step import TokenLogprobs

# What stands for a probability of zero: JSON has no infinity, and OpenAI shows this number (C023).
LOGPROB_FLOOR = -9999.0
# The number of tokens ranked is one of these, chosen from the request's own number, so that the order among equal
# logits does not depend on what batch mates ask.
_WIDTHS = (32, 128, 1024)


def chosen_logprobs(log_probs: torch.Tensor, token_ids: torch.Tensor) -> list[float]:
    """The logprob of one token a row: `log_probs` [n, vocab_size], `token_ids` int64 [n]."""
    return _finite(log_probs.gather(1, token_ids.unsqueeze(1)).squeeze(1)).tolist()


def token_logprobs(
    log_probs: torch.Tensor,  # [n, vocab_size]
    token_ids: torch.Tensor,  # int64 [n]: the token drawn, or standing in the prompt
    num_top: list[int],  # [n]: how many of the most likely tokens are reported beside it
) -> list[TokenLogprobs]:
    """One entry a row: the chosen token first, then exactly `num_top` (at most the vocabulary) tokens, best first."""
    vocab_size = log_probs.shape[1]
    chosen = log_probs.gather(1, token_ids.unsqueeze(1))
    ids, values = token_ids.tolist(), _finite(chosen.squeeze(1)).tolist()
    widths = [_width(k, vocab_size) for k in num_top]
    result: list[TokenLogprobs | None] = [None] * len(ids)
    for width in set(widths):
        rows = [i for i, w in enumerate(widths) if w == width]
        part, part_chosen = take_rows(log_probs, rows), take_rows(chosen, rows)
        top_values, top_ids = _ranked(part, width)
        ranks = _ranks(part, part_chosen, top_values)
        top_values, top_ids = _finite(top_values).tolist(), top_ids.tolist()
        for i, rank, row_values, row_ids in zip(rows, ranks, top_values, top_ids, strict=True):
            result[i] = TokenLogprobs(
                token_ids=[ids[i], *row_ids[: num_top[i]]],
                logprobs=[values[i], *row_values[: num_top[i]]],
                rank=rank,
            )
    return [entry for entry in result if entry is not None]


def take_rows(values: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """`values[rows]` for ascending `rows`, without a copy where they are all."""
    return values if len(rows) == len(values) else values[rows]


def _ranks(log_probs: torch.Tensor, chosen: torch.Tensor, top_values: torch.Tensor) -> list[int]:
    """1 + how many tokens are likelier than the chosen one; the whole row is read only where the list is too short."""
    ranks = 1 + (top_values > chosen).sum(dim=-1)
    beyond = (chosen < top_values[:, -1:]).squeeze(1).nonzero().flatten()
    if len(beyond):
        ranks[beyond] = 1 + (log_probs[beyond] > chosen[beyond]).sum(dim=-1)
    return ranks.tolist()


def best_tokens(log_probs: torch.Tensor, num_best: int) -> list[tuple[int, float]]:
    """The `num_best` possible tokens of `log_probs` [vocab_size] as (id, logprob), best first; equal ones by id."""
    values, ids = _ranked(log_probs.unsqueeze(0), _width(num_best, len(log_probs)))
    pairs = zip(ids[0].tolist(), values[0].tolist(), strict=True)
    return [(i, v) for i, v in pairs if v > -torch.inf][:num_best]


def _width(num_top: int, vocab_size: int) -> int:
    return next((w for w in _WIDTHS if num_top <= w and w < vocab_size), vocab_size)


def _ranked(log_probs: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest `width` values of each row and their ids, best first, equal ones by ascending id."""
    values, ids = log_probs.topk(width, dim=-1)
    ids, order = ids.sort(dim=-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _finite(log_probs: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(log_probs, nan=LOGPROB_FLOOR, neginf=LOGPROB_FLOOR).clamp(min=LOGPROB_FLOOR)
