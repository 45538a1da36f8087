from __future__ import annotations

import math

import pytest
import torch

from pagedserve.sampling.logprobs import LOGPROB_FLOOR, _token_logprobs_of_gpu, best_tokens, token_logprobs
from pagedserve.sampling.transfers import Readback
from tests.sampling.rows import CPU, random_logits

HERE = Readback(CPU)


@pytest.mark.parametrize("vocab_size", [20, 500, 3000])
def test_exactly_the_best_in_order_and_the_rank_of_the_chosen(vocab_size: int) -> None:
    """C021: k entries beside the chosen token, for several k in one call."""
    num_top = [0, 1, 5, 20, 40, vocab_size]
    log_probs = torch.log_softmax(torch.stack([random_logits(vocab_size, s) for s in range(len(num_top))]), dim=-1)
    chosen = torch.tensor([3, int(log_probs[1].argmax()), 7, 0, 19, 11])
    entries = token_logprobs(log_probs, chosen, num_top, HERE)()
    for entry, k, row, token in zip(entries, num_top, log_probs, chosen.tolist(), strict=True):
        values, ids = row.sort(descending=True)
        k = min(k, vocab_size)
        assert entry.token_ids == [token, *ids[:k].tolist()]
        assert entry.logprobs == [float(row[token]), *values[:k].tolist()]
        assert entry.rank == ids.tolist().index(token) + 1


def test_more_than_the_vocabulary_is_the_vocabulary() -> None:
    log_probs = torch.log_softmax(random_logits(6, 0), dim=-1).unsqueeze(0)
    entry = token_logprobs(log_probs, torch.tensor([2]), [100], HERE)()[0]
    assert sorted(entry.token_ids[1:]) == list(range(6))


@pytest.mark.parametrize("neighbour", [0, 1, 40, 200])
def test_order_among_equals_is_by_id_whatever_neighbours_ask(neighbour: int) -> None:
    row = torch.zeros(300)
    row[100:] = -1.0
    log_probs = torch.log_softmax(torch.stack([row, random_logits(300, 1)]), dim=-1)
    entry = token_logprobs(log_probs, torch.tensor([0, 0]), [5, neighbour], HERE)()[0]
    alone = token_logprobs(log_probs[:1], torch.tensor([0]), [5], HERE)()[0]
    assert entry == alone
    assert entry.rank == 1


def test_a_gpu_tells_the_same_from_the_logits() -> None:
    logits = torch.stack([random_logits(500, s).round(decimals=1) for s in range(4)])  # equals among them
    chosen, num_top = torch.tensor([0, 3, 499, 7]), [0, 5, 20, 1]
    wanted = token_logprobs(torch.log_softmax(logits, dim=-1), chosen, num_top, HERE)()
    for entry, other in zip(_token_logprobs_of_gpu(logits, chosen, num_top, HERE)(), wanted, strict=True):
        assert (entry.token_ids, entry.rank) == (other.token_ids, other.rank)
        assert entry.logprobs == pytest.approx(other.logprobs, abs=1e-6)


def test_impossible_tokens_have_a_finite_logprob() -> None:
    """C023: JSON has neither infinity nor NaN."""
    logits = torch.full((40,), -torch.inf)
    logits[3] = 0.0
    nothing = torch.full((40,), torch.nan)
    log_probs = torch.stack([torch.log_softmax(logits, dim=-1), nothing])
    entries = token_logprobs(log_probs, torch.tensor([4, 4]), [3, 3], HERE)()
    assert entries[0].logprobs == [LOGPROB_FLOOR, 0.0, LOGPROB_FLOOR, LOGPROB_FLOOR]
    assert all(math.isfinite(value) for value in entries[1].logprobs)


def test_best_tokens_leaves_impossible_ones_out() -> None:
    row = torch.tensor([-1.0, -torch.inf, -0.5, -1.0, -torch.inf])
    expected = [(2, -0.5), (0, -1.0), (3, -1.0)]
    assert best_tokens(torch.stack([row, row]), [4, 2], HERE)() == [expected, expected[:2]]


def test_best_tokens_of_several_widths() -> None:
    log_probs = torch.log_softmax(torch.stack([random_logits(500, s) for s in range(3)]), dim=-1)
    for row, found, count in zip(log_probs, best_tokens(log_probs, [4, 100, 8], HERE)(), [4, 100, 8], strict=True):
        best = row.topk(count)
        assert found == list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
