"""Temperature, min_p, top_k, top_p, and the draw.

A filter keeps the tokens whose scaled logit reaches a threshold, so tokens tied at the border stay or go together and
the kept set does not depend on how a sort breaks ties. The draw is the inverse CDF over the kept tokens in the order of
their ids. Every choice of algorithm below is made from the row's own parameters and logits, and every reduction runs
along the row: the same row gives the same bits in any batch.
"""

from __future__ import annotations

import numpy as np
import torch

from pagedserve.sampling.uniform import uniforms
from pagedserve.sampling_params import SamplingParams

# How many of the likeliest tokens are looked at before falling back to the whole vocabulary. The nucleus of a trained
# model nearly always lies in the first width, and a partial sort costs a small part of a whole one.
_WIDTHS = (128, 1024)
# Logits worked on at a time: bounds memory, and keeps the passes over them in the cache.
_PIECE = 2**20


class RandomRows:
    """The rows of a batch that are drawn at random, and their parameters as columns."""

    def __init__(
        self,
        rows: list[int],
        params: list[SamplingParams],
        streams: list[int],
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self.rows = rows
        self._vocab_size = vocab_size
        self._streams = np.array(streams, dtype=np.uint64)
        # A top_k of the whole vocabulary or more is none, and a top_p that no sum can reach is none.
        top_k = [p.top_k if 0 < p.top_k < vocab_size else 0 for p in params]
        self._index = torch.tensor(rows, dtype=torch.int64, device=device)
        self._temperature = _column([p.temperature for p in params], torch.float32, device)
        self._min_p = _column([p.min_p for p in params], torch.float32, device)
        self._top_k = _column(top_k, torch.int64, device)
        self._top_p = _column([p.top_p if p.top_p < 1.0 else 2.0 for p in params], torch.float64, device)
        self._has_min_p = [p.min_p > 0.0 for p in params]
        self._is_truncated = [k > 0 or p.top_p < 1.0 for k, p in zip(top_k, params, strict=True)]

    def draw(self, logits: torch.Tensor, positions: np.ndarray) -> torch.Tensor:
        """Draws a token for each of `rows` from `logits` [batch, vocab_size]: int64 [len(rows)].

        `positions` is int64 [len(rows)], the number of tokens that each row has generated so far.
        """
        uniform = torch.from_numpy(uniforms(self._streams, positions)).unsqueeze(1).to(logits.device)
        drawn = torch.empty(len(self.rows), dtype=torch.int64, device=logits.device)
        step = max(1, _PIECE // self._vocab_size)
        for start in range(0, len(self.rows), step):
            part = slice(start, start + step)
            scaled = logits[self._index[part]].float() / self._temperature[part]
            drawn[part] = self._draw_piece(scaled, part, uniform[part])
        return drawn

    def _draw_piece(self, scaled: torch.Tensor, part: slice, uniform: torch.Tensor) -> torch.Tensor:
        if any(self._has_min_p[part]):
            # log(0) is -inf, below which nothing lies.
            floor = scaled.amax(dim=-1, keepdim=True) + self._min_p[part].log()
            scaled.masked_fill_(scaled < floor, -torch.inf)
        is_truncated = torch.tensor(self._is_truncated[part], device=scaled.device)
        if not any(self._is_truncated[part]):
            return _pick(scaled, uniform)
        if all(self._is_truncated[part]):
            return _draw_truncated(scaled, self._top_k[part], self._top_p[part], uniform)
        drawn = torch.empty(len(scaled), dtype=torch.int64, device=scaled.device)
        whole, cut = ~is_truncated, is_truncated
        drawn[whole] = _pick(scaled[whole], uniform[whole])
        drawn[cut] = _draw_truncated(scaled[cut], self._top_k[part][cut], self._top_p[part][cut], uniform[cut])
        return drawn


def _column(values: list, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device).unsqueeze(1)


def _pick(logits: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Inverse CDF of softmax(logits [n, width]) at uniform [n, 1]: int64 [n], an index that has probability above 0."""
    # Summed in float64: over 128k tokens a float32 sum would lose the tail.
    cdf = torch.softmax(logits, dim=-1).cumsum(dim=-1, dtype=torch.float64)
    total = cdf[:, -1:].contiguous()
    # Below the total even where the product rounds up to it, so that the step that is found is a step that rises.
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cdf, target, right=True).squeeze(1)


def _draw_truncated(
    scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, uniform: torch.Tensor
) -> torch.Tensor:
    """Draws from the top_k (0: no limit), then top_p, of `scaled` [n, vocab_size]; the others are [n, 1].

    Rows whose kept set may not end within the first width go on to the next.
    """
    num_rows, vocab_size = scaled.shape
    drawn = torch.empty(num_rows, dtype=torch.int64, device=scaled.device)
    pending = torch.arange(num_rows, device=scaled.device)
    for width in (*(w for w in _WIDTHS if w < vocab_size), vocab_size):
        rows = scaled if len(pending) == num_rows else scaled[pending]
        values, ids = rows.topk(width, dim=-1)
        kept, is_whole = _kept(rows, values, ids, top_k[pending], top_p[pending])
        done = is_whole.nonzero().flatten()
        if len(done):
            # By id, because among equal values the order of topk is nobody's promise.
            ids_in_order, order = ids[done].masked_fill(~kept[done], vocab_size).sort(dim=-1)
            kept_values = values[done].masked_fill(~kept[done], -torch.inf).gather(1, order)
            choice = _pick(kept_values, uniform[pending[done]])
            drawn[pending[done]] = ids_in_order.gather(1, choice.unsqueeze(1)).squeeze(1)
        pending = pending[~is_whole]
        if not len(pending):
            break
    return drawn


def _kept(
    rows: torch.Tensor,  # [n, vocab_size] scaled logits
    values: torch.Tensor,  # [n, width] the largest of them, in descending order
    ids: torch.Tensor,  # [n, width]
    top_k: torch.Tensor,  # int64 [n, 1]
    top_p: torch.Tensor,  # float64 [n, 1]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of `values` stay, bool [n, width], and for which rows nothing beyond them could stay, bool [n]."""
    width = values.shape[1]
    has_top_k = top_k > 0
    kth = values.gather(1, (top_k.clamp(1, width) - 1))
    kth = torch.where(has_top_k, kth, -torch.inf)
    in_top_k = (values >= kth) & (values > -torch.inf)

    # top_p is a share of what top_k left; without top_k, of everything.
    probabilities = torch.softmax(values.masked_fill(~in_top_k, -torch.inf), dim=-1)
    if not bool(has_top_k.all()):
        probabilities = torch.where(has_top_k, probabilities, torch.softmax(rows, dim=-1).gather(1, ids))
    mass_before = probabilities.cumsum(dim=-1, dtype=torch.float64) - probabilities
    in_top_p = in_top_k & (mass_before < top_p)
    num_kept = in_top_p.sum(dim=-1, keepdim=True).clamp(min=1)
    last = values.gather(1, num_kept - 1)
    kept = in_top_k & (values >= last)

    border = torch.where(has_top_k, kth, last)
    smallest = values[:, -1:]
    is_whole = (smallest < border) | torch.isneginf(smallest) | (width == rows.shape[1])
    return kept, is_whole.squeeze(1)
