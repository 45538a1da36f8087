"""Temperature, min_p, top_k, top_p and the draw, against transformers' warpers and the law of large numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from pagedserve.kernels import native, ops, reference_sampling
from pagedserve.sampling.filters import Filters
from pagedserve.sampling.uniform import stream_of, uniforms
from pagedserve.sampling_params import SamplingParams
from tests.sampling.rows import CPU, random_logits, token_of

SMALL, LARGE = 120, 3000


@pytest.fixture(params=["native", "reference"], autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Everything here holds for csrc and for what defines it."""
    if request.param == "reference":
        monkeypatch.setattr(native, "available", lambda: False)
    elif not native.available():
        pytest.skip("the native library is not built in this environment")
    return request.param


def draw(logits: torch.Tensor, params: SamplingParams, num_draws: int, seed: int = 0) -> np.ndarray:
    """Tokens at output positions 0 .. num_draws - 1, all from the same logits: int64 [num_draws]."""
    filters = Filters([params] * num_draws, [stream_of(seed, 0)] * num_draws, len(logits), CPU)
    return filters.draw(logits.expand(num_draws, -1), filters.uniforms(np.arange(num_draws))).numpy()


def warped(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Probabilities that transformers' warpers leave, in the order that the package documents: float64 [vocab_size]."""
    scores, ids = logits.clone().unsqueeze(0), torch.tensor([[0]])
    scores = TemperatureLogitsWarper(params.temperature)(ids, scores)
    if params.min_p > 0:
        scores = MinPLogitsWarper(params.min_p)(ids, scores)
    if params.top_k > 0:
        scores = TopKLogitsWarper(params.top_k)(ids, scores)
    if params.top_p < 1.0:
        scores = TopPLogitsWarper(params.top_p)(ids, scores)
    return torch.softmax(scores[0].double(), dim=-1)


SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 7.0},
    {"top_k": 2},
    {"top_k": 50},
    {"top_k": 128},
    {"top_k": 2000},
    {"top_p": 0.05},
    {"top_p": 0.5},
    {"top_p": 0.9, "temperature": 1.5},
    {"top_p": 0.999, "temperature": 4.0},
    {"min_p": 0.02},
    {"min_p": 0.3, "temperature": 2.0},
    {"top_k": 30, "top_p": 0.7},
    {"top_k": 1500, "top_p": 0.95, "temperature": 4.0},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.05, "temperature": 2.0},
    {"top_p": 0.9, "min_p": 0.001, "temperature": 3.0},
]


@pytest.mark.parametrize("vocab_size", [SMALL, LARGE])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_inverse_cdf_over_what_transformers_keeps(setting: dict, vocab_size: int) -> None:
    """Token t is drawn when the uniform number lies in t's interval of the CDF, tokens in the order of their ids."""
    params = SamplingParams(**setting)
    logits = random_logits(vocab_size, 1)
    num_draws = 200
    tokens = draw(logits, params, num_draws, seed=3)
    uniform = uniforms(np.full(num_draws, stream_of(3, 0), dtype=np.uint64), np.arange(num_draws))

    probabilities = warped(logits, params).numpy()
    upper = np.cumsum(probabilities)
    assert (probabilities[tokens] > 0).all()
    assert (uniform < upper[tokens] + 1e-5).all()
    assert (uniform > upper[tokens] - probabilities[tokens] - 1e-5).all()


@pytest.mark.parametrize("setting", [{}, {"temperature": 0.5}, {"top_p": 0.8}, {"top_k": 7, "min_p": 0.05}], ids=str)
def test_draws_follow_the_distribution(setting: dict) -> None:
    """Chi-square of 8,000 draws with fixed seeds: statistic below mean + 4 standard deviations."""
    params = SamplingParams(**setting)
    logits = random_logits(20, 4, scale=1.5)
    num_draws = 8000
    counts = np.bincount(draw(logits, params, num_draws, seed=11), minlength=20)
    probabilities = warped(logits, params).numpy()
    assert counts[probabilities == 0].sum() == 0
    kept = probabilities > 0
    expected = probabilities[kept] * num_draws
    statistic = ((counts[kept] - expected) ** 2 / expected).sum()
    freedom = kept.sum() - 1
    assert statistic < freedom + 4 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("setting", [{"top_k": 3}, {"top_p": 0.4}, {"min_p": 1.0}, {"top_k": 3, "top_p": 0.2}], ids=str)
@pytest.mark.parametrize("vocab_size", [SMALL, LARGE])
def test_tokens_tied_at_the_border_stay_together(setting: dict, vocab_size: int) -> None:
    """All of 200 (or 2,000) equal best tokens are kept, though top_k and top_p could do with fewer."""
    logits = torch.full((vocab_size,), -30.0)
    tied = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(0))[: vocab_size * 2 // 3]
    logits[tied] = 2.0
    tokens = set(draw(logits, SamplingParams(**setting), 4000).tolist())
    assert tokens <= set(tied.tolist())
    assert len(tokens) > 0.8 * min(len(tied), 1700)


def test_off_values_change_nothing() -> None:
    """C031: top_k -1, 0, the vocabulary's size and beyond are the same."""
    logits = random_logits(SMALL, 5)
    base = draw(logits, SamplingParams(), 100).tolist()
    for off in (
        {"top_k": -1},
        {"top_k": SMALL},
        {"top_k": SMALL + 1},
        {"top_k": 10**9},
        {"top_p": 1.0},
        {"min_p": 0.0},
    ):
        assert draw(logits, SamplingParams(**off), 100).tolist() == base, off


def test_min_p_of_one_keeps_ties_with_the_best() -> None:
    logits = random_logits(SMALL, 6)
    logits[[7, 70]] = logits.max() + 1
    assert set(draw(logits, SamplingParams(min_p=1.0), 60).tolist()) == {7, 70}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("top_p", [1.0, 0.0001])
def test_tiny_temperatures_are_greedy(dtype: torch.dtype, top_p: float) -> None:
    """C029: nothing overflows, whatever type the logits were computed in."""
    logits = (random_logits(SMALL, 7) * 100).to(dtype).float()
    best = int(logits.argmax())
    logits[best] += 1
    for temperature in (0.0, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3):
        assert token_of(logits, temperature=temperature, top_p=top_p) == best


def test_the_numbers_at_both_ends_of_the_unit_interval_draw_possible_tokens() -> None:
    logits = torch.full((300,), -torch.inf)
    logits[[40, 200]] = 0.0
    one, none = torch.ones(1), torch.zeros(1)
    for top_k in (0, 2, 5):
        for uniform, expected in ((0.0, 40), (1.0 - 2**-53, 200)):
            columns = (torch.tensor([top_k]), one.double(), torch.tensor([uniform], dtype=torch.float64))
            assert ops.sample(logits.unsqueeze(0), one, none, *columns).tolist() == [expected]


def test_a_peaked_distribution_is_drawn_from_the_short_list() -> None:
    """A trained model's kind of row, where the nucleus lies in the first width: same rule, other way of finding it."""
    logits = torch.full((LARGE,), -20.0)
    logits[500:520] = torch.linspace(0.0, 4.0, 20)
    for setting in ({"top_p": 0.9}, {"top_k": 5}, {"top_k": 12, "top_p": 0.8}, {"top_k": 100, "min_p": 0.01}):
        params = SamplingParams(**setting)
        counts = np.bincount(draw(logits, params, 3000), minlength=LARGE)
        probabilities = warped(logits, params).numpy()
        assert (counts > 0).tolist() == (probabilities > 0).tolist()
        np.testing.assert_allclose(counts / 3000, probabilities, atol=0.03)


def test_mixed_rows_draw_what_each_draws_alone() -> None:
    """Plain, min_p and truncated rows of every kind in one piece, in two orders (C037)."""
    settings = [SamplingParams(**s) for s in SETTINGS]
    logits = torch.stack([random_logits(LARGE, 50 + i) for i in range(len(settings))])
    streams = [stream_of(i, 0) for i in range(len(settings))]
    alone = [
        int((alone := Filters([p], [s], LARGE, CPU)).draw(x.unsqueeze(0), alone.uniforms(np.array([4])))[0])
        for p, s, x in zip(settings, streams, logits, strict=True)
    ]
    order = np.random.default_rng(0).permutation(len(settings)).tolist()
    for places in (list(range(len(settings))), order):
        filters = Filters([settings[i] for i in places], [streams[i] for i in places], LARGE, CPU)
        drawn = filters.draw(logits[places], filters.uniforms(np.full(len(places), 4)))
        assert drawn.tolist() == [alone[i] for i in places]


def test_more_rows_than_one_piece_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.stack([random_logits(SMALL, s) for s in range(9)])
    params = [SamplingParams(top_p=0.9 if i % 2 else 1.0) for i in range(9)]
    filters = Filters(params, [stream_of(i, 0) for i in range(9)], SMALL, CPU)
    whole = filters.draw(logits, filters.uniforms(np.zeros(9, dtype=np.int64))).tolist()
    monkeypatch.setattr(reference_sampling, "_PIECE", 2 * SMALL)
    assert filters.draw(logits, filters.uniforms(np.zeros(9, dtype=np.int64))).tolist() == whole
