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

# How many of the likeliest tokens are looked at before all are: a trained model's nucleus nearly always lies there.
_WIDTH = 128
# The draw first finds a block of this many tokens, then the token: most of the float64 sums are never made.
_BLOCK = 128
# Logits worked on at a time: bounds memory, and keeps the passes over them in the cache.
_PIECE = 2**20


class RandomRows:
    """The rows of a batch that are drawn at random (ascending), and their parameters as columns."""

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
            first, last = self.rows[part][0], self.rows[part][-1]
            # Neighbouring rows, the usual case, need no copy before the division makes one.
            is_range = last - first + 1 == len(self.rows[part])
            chosen = logits[first : last + 1] if is_range else logits[self._index[part]]
            scaled = chosen / self._temperature[part]
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
    probabilities = torch.softmax(logits, dim=-1)
    if probabilities.shape[1] <= 2 * _BLOCK:
        return _inverse_cdf(probabilities, uniform)[0].squeeze(1)
    padding = -probabilities.shape[1] % _BLOCK
    blocks = torch.nn.functional.pad(probabilities, (0, padding)).view(len(logits), -1, _BLOCK)
    block, within = _inverse_cdf(blocks.sum(dim=-1), uniform)
    offset, _ = _inverse_cdf(blocks.gather(1, block.unsqueeze(2).expand(-1, 1, _BLOCK)).squeeze(1), within)
    return (block * _BLOCK + offset).squeeze(1)


def _inverse_cdf(mass: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the cumulated `mass` [n, width] (not all zero) passes the share `uniform` [n, 1] of its total.

    Returns the place [n, 1], whose mass is above 0, and how far into it the share reaches, as a share of it [n, 1].
    """
    # In float64: over 128k tokens a float32 sum would lose the tail.
    cdf = mass.cumsum(dim=-1, dtype=torch.float64)
    total = cdf[:, -1:].contiguous()
    # Below the total even where the product rounds up to it, so that the step that is found is a step that rises.
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    place = torch.searchsorted(cdf, target, right=True)
    height = mass.gather(1, place).double()
    within = (target - (cdf.gather(1, place) - height)) / height
    return place, within.clamp(0.0, 1.0)


def _draw_truncated(
    scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, uniform: torch.Tensor
) -> torch.Tensor:
    """Draws from the top_k (0: no limit), then top_p, of `scaled` [n, vocab_size]; the others are [n, 1]."""
    num_rows, vocab_size = scaled.shape
    if vocab_size <= _WIDTH:
        return _draw_from_all(scaled, top_k, top_p, uniform)
    values, ids = scaled.topk(_WIDTH, dim=-1)
    masses = torch.softmax(scaled, dim=-1).gather(1, ids) if bool((top_k == 0).any()) else None
    threshold, border = _threshold(values, masses, top_k, top_p)
    # Whole where nothing beyond the list could reach the border; a list that has run out of possible tokens is, too.
    smallest = values[:, -1:]
    is_whole = ((smallest < border) | torch.isneginf(smallest)).squeeze(1)

    drawn = torch.empty(num_rows, dtype=torch.int64, device=scaled.device)
    done, rest = is_whole.nonzero().flatten(), (~is_whole).nonzero().flatten()
    if len(done):
        # By id, because among equal values the order of topk is nobody's promise.
        dropped = values[done] < threshold[done]
        ids_in_order, order = ids[done].masked_fill(dropped, vocab_size).sort(dim=-1)
        kept = values[done].masked_fill(dropped, -torch.inf).gather(1, order)
        drawn[done] = ids_in_order.gather(1, _pick(kept, uniform[done]).unsqueeze(1)).squeeze(1)
    if len(rest):
        drawn[rest] = _draw_from_all(scaled[rest], top_k[rest], top_p[rest], uniform[rest])
    return drawn


def _draw_from_all(
    scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, uniform: torch.Tensor
) -> torch.Tensor:
    """The same over the whole vocabulary in order: for flat distributions, large top_k, and ties at the border."""
    values = _descending(scaled)
    threshold, _ = _threshold(values, torch.softmax(values, dim=-1), top_k, top_p)
    return _pick(scaled.masked_fill(scaled < threshold, -torch.inf), uniform)


def _descending(values: torch.Tensor) -> torch.Tensor:
    if not values.is_cpu:
        return values.sort(dim=-1, descending=True).values
    # numpy sorts float32 with vector instructions, twenty times as fast as torch on a CPU.
    return torch.from_numpy(np.sort(values.numpy(), axis=-1)).flip(-1)


def _threshold(
    values: torch.Tensor,  # [n, width], the largest scaled logits in descending order
    masses: torch.Tensor | None,  # [n, width], their probabilities; None where every row has a top_k
    top_k: torch.Tensor,  # int64 [n, 1]
    top_p: torch.Tensor,  # float64 [n, 1]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest scaled logit that stays, and the one that must be known to say so; both [n, 1].

    top_p is a share of what top_k left, so with a top_k everything down to the k-th value must be known.
    """
    has_top_k = top_k > 0
    kth = values.gather(1, top_k.clamp(1, values.shape[1]) - 1)
    kth = torch.where(has_top_k, kth, -torch.inf)
    in_top_k = (values >= kth) & (values > -torch.inf)
    if masses is None or bool(has_top_k.any()):
        of_top_k = torch.softmax(values.masked_fill(~in_top_k, -torch.inf), dim=-1)
        masses = of_top_k if masses is None else torch.where(has_top_k, of_top_k, masses)
    mass_before = masses.cumsum(dim=-1, dtype=torch.float64) - masses
    num_kept = (in_top_k & (mass_before < top_p)).sum(dim=-1, keepdim=True).clamp(min=1)
    last = values.gather(1, num_kept - 1)
    return last, torch.where(has_top_k, kth, last)
