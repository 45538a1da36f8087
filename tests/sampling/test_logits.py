"""Processors against transformers' of the same meaning, and against the formulas of the OpenAI reference."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessor as TransformersProcessor,
)
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from pagedserve.sampling.logits import PROCESSORS, TokenCounts, sanitize
from pagedserve.sampling_params import SamplingParams
from tests.sampling.rows import CPU, Row, history_of, random_logits, sample, token_of

VOCAB = 50
INF = float("inf")


def processed(rows: list[Row]) -> torch.Tensor:
    """[len(rows), vocab_size]: what all processors together make of the rows' logits."""
    logits = torch.stack([row.logits for row in rows]).clone()
    states = [row.state() for row in rows]
    for kind in PROCESSORS:
        members = [i for i, state in enumerate(states) if kind.applies(state)]
        if members:
            kind(members, [states[i] for i in members], logits.shape[1], CPU).prepare(history_of(rows))(logits)
    return logits


def with_neighbours(row: Row) -> list[Row]:
    """The row between others that use every processor, which must neither change it nor be changed."""
    noisy = SamplingParams(
        logit_bias={0: -5.0, 3: 5.0},
        allowed_token_ids=tuple(range(40)),
        bad_words_token_ids=((7,), (2, 3)),
        min_tokens=9,
        stop_token_ids=(11,),
        repetition_penalty=1.7,
        presence_penalty=1.0,
        frequency_penalty=0.5,
    )
    plain = Row(random_logits(VOCAB, 91), prompt=[4])
    return [Row(random_logits(VOCAB, 90), noisy, [1, 2], [5, 5, 6], eos_token_ids=(9,)), row, plain]


CASES: dict[str, tuple[SamplingParams, Callable[[list[int]], TransformersProcessor], list[int], list[int]]] = {
    "repetition up": (
        SamplingParams(repetition_penalty=1.3),
        lambda prompt: RepetitionPenaltyLogitsProcessor(1.3),
        [3, 3, 8],
        [8, 20],
    ),
    "repetition down": (
        SamplingParams(repetition_penalty=0.6),
        lambda prompt: RepetitionPenaltyLogitsProcessor(0.6),
        [3, 3, 8, 49],
        [],
    ),
    "min tokens not reached": (
        SamplingParams(min_tokens=3, stop_token_ids=(17,)),
        lambda prompt: MinNewTokensLengthLogitsProcessor(len(prompt), 3, [9, 10, 17]),
        [1, 2],
        [5, 6],
    ),
    "min tokens reached": (
        SamplingParams(min_tokens=3, stop_token_ids=(17,)),
        lambda prompt: MinNewTokensLengthLogitsProcessor(len(prompt), 3, [9, 10, 17]),
        [1, 2],
        [5, 6, 7],
    ),
    "bad word of one token": (
        SamplingParams(bad_words_token_ids=((12,),)),
        lambda prompt: NoBadWordsLogitsProcessor([[12]]),
        [1],
        [],
    ),
    "bad phrase begun": (
        SamplingParams(bad_words_token_ids=((12, 13, 14), (13, 20), (40, 13, 21))),
        lambda prompt: NoBadWordsLogitsProcessor([[12, 13, 14], [13, 20], [40, 13, 21]]),
        [1],
        [12, 13],
    ),
    "bad phrase not begun": (
        SamplingParams(bad_words_token_ids=((12, 13, 14),)),
        lambda prompt: NoBadWordsLogitsProcessor([[12, 13, 14]]),
        [1, 12],
        [15],
    ),
    "bad phrase longer than the text": (
        SamplingParams(bad_words_token_ids=((12, 13, 14, 15, 16),)),
        lambda prompt: NoBadWordsLogitsProcessor([[12, 13, 14, 15, 16]]),
        [14, 15],
        [],
    ),
    "bias": (
        SamplingParams(logit_bias={4: 2.5, 30: -100.0}),
        lambda prompt: SequenceBiasLogitsProcessor([[[4], 2.5], [[30], -100.0]]),
        [1],
        [2],
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("batched", [False, True], ids=["alone", "batched"])
def test_as_transformers(name: str, batched: bool) -> None:
    params, make_oracle, prompt, output = CASES[name]
    row = Row(random_logits(VOCAB, 5), params, prompt, output, eos_token_ids=(9, 10))
    rows = with_neighbours(row) if batched else [row]
    result = processed(rows)

    oracle = make_oracle(prompt)
    expected = oracle(torch.tensor([[*prompt, *output]]), row.logits.clone().unsqueeze(0))[0]
    assert torch.equal(result[1 if batched else 0], expected)
    if batched:
        assert torch.equal(result[0], processed([rows[0]])[0])
        assert torch.equal(result[2], rows[2].logits)


@pytest.mark.parametrize("output", [[], [7], [7, 7, 8], [3, 3, 3, 3]])
def test_presence_and_frequency_count_output_only(output: list[int]) -> None:
    prompt = [3, 3, 7]
    logits = random_logits(VOCAB, 6)
    params = SamplingParams(presence_penalty=1.5, frequency_penalty=-0.25)
    counts = torch.from_numpy(np.bincount(np.array(output, dtype=np.int64), minlength=VOCAB)).float()
    expected = logits - 1.5 * (counts > 0) - (-0.25) * counts
    torch.testing.assert_close(processed([Row(logits, params, prompt, output)])[0], expected)


def test_all_penalties_together_step_by_step() -> None:
    """Penalties keep counts between steps: each step must equal one that starts from nothing (C035)."""
    prompt = [3, 3, 8, 8, 8]
    params = SamplingParams(temperature=0.0, repetition_penalty=1.2, presence_penalty=0.7, frequency_penalty=0.3)
    row = Row(random_logits(VOCAB, 0), params, prompt)
    state = row.state()
    kind = PROCESSORS[-1]
    output: list[int] = []
    for step in range(12):
        logits = random_logits(VOCAB, 100 + step, scale=1.0)
        kept = logits.clone().unsqueeze(0)
        kind([0], [state], VOCAB, CPU).prepare(history_of([Row(logits, params, prompt, output)]))(kept)
        expected = RepetitionPenaltyLogitsProcessor(1.2)(torch.tensor([prompt + output]), logits.clone().unsqueeze(0))
        counts = torch.tensor([float(output.count(t)) for t in range(VOCAB)])
        expected = expected - 0.7 * (counts > 0) - 0.3 * counts
        torch.testing.assert_close(kept, expected)
        output.append(int(expected.argmax()))


def test_counts_of_a_fork_go_their_own_way() -> None:
    parent = TokenCounts(2, VOCAB, with_prompt=True)
    parent.catch_up(np.array([1, 2, 5]))
    child = parent.copy()
    parent.catch_up(np.array([1, 2, 5, 6]))
    child.catch_up(np.array([1, 2, 5, 5, 7]))
    assert dict(zip(parent.ids.tolist(), parent.counts.tolist(), strict=True)) == {1: 0.0, 2: 0.0, 5: 1.0, 6: 1.0}
    assert dict(zip(child.ids.tolist(), child.counts.tolist(), strict=True)) == {1: 0.0, 2: 0.0, 5: 2.0, 7: 1.0}


def test_counts_of_many_distinct_tokens() -> None:
    tokens = np.arange(1000) % 700
    counts = TokenCounts(100, 600, with_prompt=True)
    counts.catch_up(tokens[:300])
    counts.catch_up(tokens)
    expected = {t: float((tokens[100:] == t).sum()) for t in range(600)}
    assert dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True)) == expected


def test_allowed_tokens_are_all_that_is_left() -> None:
    logits = random_logits(VOCAB, 8)
    result = processed([Row(logits, SamplingParams(allowed_token_ids=[5, 44, 6]))])[0]
    assert torch.isfinite(result).nonzero().flatten().tolist() == [5, 6, 44]
    assert torch.equal(result[[5, 6, 44]], logits[[5, 6, 44]])


def test_bias_makes_certain_and_bans_in_greedy_too() -> None:
    logits = random_logits(VOCAB, 9)
    best = int(logits.argmax())
    other = (best + 1) % VOCAB
    for temperature in (0.0, 1.0):
        assert token_of(logits, logit_bias={other: 100.0}, temperature=temperature) == other
        assert token_of(logits, logit_bias={best: -100.0}, temperature=temperature) != best
    assert token_of(logits, logit_bias={}) == best


@pytest.mark.parametrize("unknown", [VOCAB, VOCAB + 3, 2**40])
def test_ids_outside_the_vocabulary_touch_nobody(unknown: int) -> None:
    """C032, C033: the front refuses them; should one get here, neighbours' logits stay as they were."""
    neighbours = [Row(random_logits(VOCAB, s), SamplingParams(temperature=0.0)) for s in (20, 21)]
    odd = SamplingParams(
        temperature=0.0,
        logit_bias={unknown: 50.0},
        stop_token_ids=(unknown,),
        min_tokens=2,
        bad_words_token_ids=((unknown,), (3, unknown)),
        allowed_token_ids=(4, unknown),
        repetition_penalty=1.5,
    )
    rows = [neighbours[0], Row(random_logits(VOCAB, 22), odd, prompt=[3, VOCAB + 1]), neighbours[1]]
    result = processed(rows)
    assert torch.equal(result[0], neighbours[0].logits)
    assert torch.equal(result[2], neighbours[1].logits)
    assert sample(rows).token_ids.tolist() == [int(rows[0].logits.argmax()), 4, int(rows[2].logits.argmax())]


def test_bad_words_block_phrases_as_a_whole() -> None:
    """C034: "garden" in both its tokenizations and "blue moon"; "blue sky" and "blue" stay possible."""
    garden, space_garden, gar, den, blue, moon, sky = range(10, 17)
    words = ((space_garden,), (gar, den), (blue, moon))
    bias = {t: 30.0 for t in (garden, space_garden, gar, den, blue, moon, sky)}
    output: list[int] = []
    for step in range(400):
        row = Row(
            torch.zeros(VOCAB),
            SamplingParams(temperature=1.0, logit_bias=bias, bad_words_token_ids=words),
            prompt=[1],
            output=output,
            seed=5,
        )
        output.append(int(sample([row]).token_ids[0]))
        assert len(output) == step + 1
    pairs = set(itertools.pairwise(output))
    assert space_garden not in output
    assert not pairs & {(gar, den), (blue, moon)}
    assert {(blue, sky), (gar, gar), (moon, moon), (den, den), (sky, blue)} <= pairs


def test_sanitize_leaves_usable_rows_alone() -> None:
    logits = torch.stack([random_logits(VOCAB, s) for s in range(3)])
    before = logits.clone()
    assert not sanitize(logits).any()
    assert torch.equal(logits, before)


def test_sanitize_takes_nan_for_impossible_and_reports_rows_with_nothing_else() -> None:
    logits = torch.stack([random_logits(VOCAB, s) for s in range(4)])
    logits[0, 3] = float("nan")
    logits[1] = float("nan")
    logits[2] = -INF
    logits[3, 5], logits[3, 6] = INF, -INF
    expected = logits.clone()
    assert sanitize(logits).tolist() == [False, True, True, False]
    assert logits[0, 3] == -INF and torch.equal(logits[0, 4:], expected[0, 4:])
    assert torch.isfinite(logits[1:3]).all()
    assert int(logits[3].argmax()) == 5 and torch.isfinite(logits[3, 5])
