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
    ranks = (1 + (log_probs > chosen).sum(dim=-1)).tolist()
    ids = token_ids.tolist()
    values = _finite(chosen.squeeze(1)).tolist()
    result = [TokenLogprobs(token_ids=[i], logprobs=[v], rank=r) for i, v, r in zip(ids, values, ranks, strict=True)]
    for width in {_width(k, vocab_size) for k in num_top if k > 0}:
        rows = [i for i, k in enumerate(num_top) if k > 0 and _width(k, vocab_size) == width]
        top_values, top_ids = _ranked(log_probs[rows] if len(rows) < len(num_top) else log_probs, width)
        for i, row_values, row_ids in zip(rows, _finite(top_values).tolist(), top_ids.tolist(), strict=True):
            result[i].token_ids += row_ids[: num_top[i]]
            result[i].logprobs += row_values[: num_top[i]]
    return result


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
