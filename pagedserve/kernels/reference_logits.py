"""What `ops.logprobs`, `ops.best_logits` and `ops.apply_penalties` mean, in plain torch on any device."""

from __future__ import annotations

import torch

from pagedserve.kernels.reference_sampling import usable


def best_logits(logits: torch.Tensor) -> torch.Tensor:
    return usable(logits).amax(dim=-1)


def logprobs(
    logits: torch.Tensor,  # float32 [num_rows, vocab_size]
    token_ids: torch.Tensor,  # int64 [num_rows]
    num_top: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = usable(logits)
    log_probs = torch.log_softmax(logits, dim=-1)
    column = token_ids.unsqueeze(1)
    ranks = 1 + (logits > logits.gather(1, column)).sum(dim=-1)
    top_ids = logits.sort(dim=-1, descending=True, stable=True).indices[:, :num_top]
    return log_probs.gather(1, column).squeeze(1), ranks, log_probs.gather(1, top_ids), top_ids


def apply_penalties(
    logits: torch.Tensor,  # float32 [num_rows, vocab_size]
    rows: torch.Tensor,  # int64 [n], all different
    token_ids: torch.Tensor,  # int32 [num_slots, capacity]
    slots: torch.Tensor,  # int64 [n]
    prompt_lens: torch.Tensor,  # int64 [n]
    lengths: torch.Tensor,  # int64 [n]
    repetition: torch.Tensor,  # float32 [n]
    presence: torch.Tensor,  # float32 [n]
    frequency: torch.Tensor,  # float32 [n]
) -> None:
    num_entries, vocab_size = len(rows), logits.shape[1]
    tokens = token_ids[slots].long()  # [n, capacity]
    places = torch.arange(tokens.shape[1], device=logits.device)
    is_token = (places < lengths[:, None]) & (tokens >= 0) & (tokens < vocab_size)
    is_output = is_token & (places >= prompt_lens[:, None])
    seen, counts = (torch.zeros(num_entries, vocab_size, device=logits.device) for _ in range(2))
    known = tokens.clamp(0, vocab_size - 1)
    seen.scatter_add_(1, known, is_token.float())
    counts.scatter_add_(1, known, is_output.float())
    values = logits[rows]
    repeated = torch.where(values > 0, values / repetition[:, None], values * repetition[:, None])
    values = torch.where(seen > 0, repeated, values)
    logits[rows] = values - (frequency[:, None] * counts + presence[:, None] * (counts > 0))
