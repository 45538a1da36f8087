"""What `ops.sample` means, in plain torch on any device.

A filter keeps the tokens whose scaled logit reaches a threshold, so tokens tied at the border stay or go together and
the kept set does not depend on how a sort breaks ties. The draw is the inverse CDF over the kept tokens in the order of
their ids. Every choice of algorithm below is made from the row's own parameters and logits, and every reduction runs
along the row: the same row gives the same bits in any batch.
"""

from __future__ import annotations

import numpy as np
import torch

# Stands for +inf, which softmax cannot take; small enough to survive division by the smallest temperature.
LARGEST = 1e30
# How many of the likeliest tokens are looked at before all are: a trained model's nucleus nearly always lies there.
_WIDTH = 128
# The draw first finds a block of this many tokens, then the token: most of the float64 sums are never made.
_BLOCK = 128
# Logits worked on at a time: bounds memory, and keeps the passes over them in the cache.
_PIECE = 2**20


def usable(logits: torch.Tensor) -> torch.Tensor:
    """NaN counts as -inf, +inf as a huge number; a copy."""
    return torch.nan_to_num(logits, nan=-torch.inf, posinf=LARGEST, neginf=-torch.inf)


def sample(
    logits: torch.Tensor,  # float32 [n, vocab_size]
    temperature: torch.Tensor,  # float32 [n]
    min_p: torch.Tensor,  # float32 [n]
    top_k: torch.Tensor,  # int64 [n]
    top_p: torch.Tensor,  # float64 [n]
    uniform: torch.Tensor,  # float64 [n]
) -> torch.Tensor:  # int64 [n]
    best = logits.max(dim=-1)  # the first of equals, and several times as fast as argmax on CPUs
    if not bool(torch.isfinite(best.values).all()):
        logits = usable(logits)
        best = logits.max(dim=-1)
    is_possible = best.values > -torch.inf
    tokens = torch.where(is_possible, best.indices, -1)
    rows = (is_possible & (temperature > 0)).nonzero().flatten()
    for part in rows.split(max(1, _PIECE // logits.shape[1])):
        columns = (column[part].unsqueeze(1) for column in (temperature, min_p, top_k, top_p, uniform))
        tokens[part] = _draw(logits[part], *columns)
    return tokens


def _draw(
    logits: torch.Tensor,  # float32 [n, vocab_size]; all others [n, 1]
    temperature: torch.Tensor,
    min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    uniform: torch.Tensor,
) -> torch.Tensor:  # int64 [n]
    scaled = logits / temperature
    # log(0) is -inf, below which nothing lies.
    scaled.masked_fill_(scaled < scaled.amax(dim=-1, keepdim=True) + min_p.log(), -torch.inf)
    is_truncated = ((top_k > 0) | (top_p < 1.0)).squeeze(1)
    drawn = torch.empty(len(scaled), dtype=torch.int64, device=scaled.device)
    whole, cut = (~is_truncated).nonzero().flatten(), is_truncated.nonzero().flatten()
    if len(whole):
        drawn[whole] = _pick(scaled[whole], uniform[whole])
    if len(cut):
        drawn[cut] = _draw_truncated(scaled[cut], top_k[cut], top_p[cut], uniform[cut])
    return drawn


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
