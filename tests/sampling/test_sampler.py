"""The sampler whole: order of steps, logprobs, unusable logits, beams, and independence of batch mates."""

from __future__ import annotations

import dataclasses
import math
import random

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from pagedserve.sampling.batch import TokenMasks
from pagedserve.sampling.sampler import NO_TOKEN_LEFT, UNUSABLE_LOGITS
from pagedserve.sampling_params import BeamParams, SamplingParams
from tests.sampling.rows import CPU, Row, random_logits, sample

VOCAB = 400
GREEDY = SamplingParams(temperature=0.0)


def varied_rows(num_rows: int) -> list[Row]:
    """Rows of every kind, none like another."""
    pick = random.Random(0)
    rows = []
    for i in range(num_rows):
        params = SamplingParams(
            temperature=pick.choice([0.0, 0.5, 1.0, 1.7]),
            top_k=pick.choice([0, 0, 1, 20, 200]),
            top_p=pick.choice([1.0, 1.0, 0.9, 0.3]),
            min_p=pick.choice([0.0, 0.0, 0.05]),
            presence_penalty=pick.choice([0.0, 0.0, 1.0]),
            frequency_penalty=pick.choice([0.0, 0.0, 0.4]),
            repetition_penalty=pick.choice([1.0, 1.0, 1.3]),
            logit_bias=pick.choice([None, None, {i: 3.0}]),
            bad_words_token_ids=pick.choice([(), (), ((i,), (5, i + 1))]),
            min_tokens=pick.choice([0, 0, 4]),
            logprobs=pick.choice([None, None, 0, 5, 40]),
            allowed_token_ids=pick.choice([None, None, tuple(range(100, 350))]),
        )
        output = [pick.randrange(VOCAB) for _ in range(pick.randrange(6))]
        # Rounded as bfloat16 does, so that ties are common.
        logits = random_logits(VOCAB, i).bfloat16().float()
        rows.append(Row(logits, params, [5, 6, 7][: 1 + i % 3], output, seed=1000 + i, eos_token_ids=(2, 9)))
    return rows


def test_a_row_alone_and_among_32_shuffled_draws_the_same_bits() -> None:
    """C037: tokens, logprobs and alternatives of each row do not depend on who is beside it, or where it stands."""
    rows = varied_rows(33)
    alone = [sample([row]) for row in rows]
    for seed in range(4):
        order = np.random.default_rng(seed).permutation(len(rows)).tolist()
        together = sample([rows[i] for i in order])
        assert not together.errors
        for place, i in enumerate(order):
            assert together.token_ids[place] == alone[i].token_ids[0]
            assert together.logprobs[place] == alone[i].logprobs[0]
            assert together.top_logprobs.get(place) == alone[i].top_logprobs.get(0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_binds_a_row_that_wants_nothing_else(temperature: float) -> None:
    rows = [Row(random_logits(VOCAB, s), SamplingParams(temperature=temperature)) for s in range(3)]
    free = sample(rows).token_ids.tolist()
    words = np.zeros((2, -(-VOCAB // 32)), dtype=np.int32)
    words[0, 1] = 1 << 5  # token 37 alone; the other masked row is left nothing
    masks = TokenMasks.unpack([1, 2], words.tobytes(), CPU)
    masked = sample(rows, masks=masks)
    assert masked.token_ids.tolist() == [free[0], 37, -1] and masked.errors == {2: NO_TOKEN_LEFT}


def test_the_same_seed_twice_in_a_batch_draws_the_same() -> None:
    logits = random_logits(VOCAB, 1)
    params = SamplingParams(temperature=1.5)
    rows = [Row(logits, params, seed=s) for s in (42, 7, 42, 8)]
    tokens = sample(rows).token_ids.tolist()
    assert tokens[0] == tokens[2]


def test_choices_of_one_request_differ_and_do_not_depend_on_n() -> None:
    """C036: eight choices of one seed over twelve tokens."""

    def texts(n: int) -> list[tuple[int, ...]]:
        outputs: list[list[int]] = [[] for _ in range(n)]
        for step in range(12):
            params = SamplingParams(n=n, temperature=1.5)
            rows = [
                Row(random_logits(VOCAB, step), params, output=outputs[c], seed=1234, choice_index=c) for c in range(n)
            ]
            for output, token in zip(outputs, sample(rows).token_ids.tolist(), strict=True):
                output.append(token)
        return [tuple(output) for output in outputs]

    eight = texts(8)
    assert len(set(eight)) >= 7
    assert texts(8) == eight
    assert texts(3) == eight[:3]
    assert texts(1) == eight[:1]


def test_drawing_again_after_preemption_repeats_the_draw() -> None:
    """A draw is a function of seed, choice and number of output tokens, not of what was computed before."""
    logits = random_logits(VOCAB, 3)
    row = Row(logits, SamplingParams(temperature=2.0), prompt=[1, 2], output=[4, 5, 6], seed=9)
    first = sample([row]).token_ids[0]
    assert sample([row]).token_ids[0] == first
    longer = [sample([dataclasses.replace(row, output=[4] * n)]).token_ids[0] for n in range(12)]
    assert len(set(longer)) > 6


def test_unseeded_requests_vary_because_each_has_a_seed_of_its_own() -> None:
    logits = random_logits(VOCAB, 3, scale=1.0)
    rows = [Row(logits, SamplingParams(temperature=1.5), seed=s) for s in range(20)]
    assert len(set(sample(rows).token_ids.tolist())) >= 15


def test_greedy_is_the_first_best_token() -> None:
    logits = torch.zeros(VOCAB)
    logits[[30, 200]] = 1.0
    for rows in ([Row(logits, GREEDY)], [Row(logits, GREEDY), Row(logits, SamplingParams())]):
        assert sample(rows).token_ids[0] == 30


def test_reported_logprobs_are_of_raw_logits() -> None:
    """C019, C020, C028: the same table whatever temperature, filters and penalties do."""
    logits = random_logits(VOCAB, 5)
    raw = torch.log_softmax(logits, dim=-1)
    best = raw.topk(5)
    for asked in (
        {"temperature": 0.0},
        {"temperature": 0.5},
        {"temperature": 1.0, "top_p": 0.5},
        {"top_k": 1},
        {"logit_bias": {7: 100.0}, "repetition_penalty": 1.5, "temperature": 0.0},
        {"allowed_token_ids": (3,)},
    ):
        output = sample([Row(logits, SamplingParams(logprobs=5, **asked))])
        entry = output.top_logprobs[0]
        token = int(output.token_ids[0])
        assert entry.token_ids == [token, *best.indices.tolist()]
        torch.testing.assert_close(torch.tensor(entry.logprobs), torch.cat([raw[token : token + 1], best.values]))
        assert output.logprobs[0] == entry.logprobs[0]
        assert sum(map(math.exp, entry.logprobs[1:])) <= 1 + 1e-5
    nothing_beside = sample([Row(logits, SamplingParams(logprobs=0, temperature=0.0))]).top_logprobs[0]
    assert len(nothing_beside.token_ids) == 1 and nothing_beside.rank == 1


def test_best_of_needs_a_logprob_that_nobody_reports() -> None:
    logits = random_logits(VOCAB, 6)
    output = sample([Row(logits, SamplingParams(n=1, best_of=4)), Row(logits, SamplingParams(n=4))])
    assert output.logprobs[0] == pytest.approx(float(torch.log_softmax(logits, dim=-1)[output.token_ids[0]]), abs=1e-5)
    assert output.logprobs[1] == 0.0
    assert output.top_logprobs == {}


@pytest.mark.parametrize("damage", [float("nan"), float("-inf"), float("inf")])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(logprobs=3), SamplingParams(top_p=0.9, top_k=30)], ids=str)
def test_a_damaged_logit_is_not_drawn_and_crashes_nothing(damage: float, params: SamplingParams) -> None:
    logits = random_logits(VOCAB, 7)
    damaged = logits.clone()
    damaged[11] = damage
    output = sample([Row(logits, GREEDY), Row(damaged, params)])
    assert output.errors == {}
    assert output.token_ids[0] == int(logits.argmax())
    if math.isinf(damage) and damage > 0:
        assert output.token_ids[1] == 11
    else:
        assert output.token_ids[1] not in (-1, 11)
    for entry in output.top_logprobs.values():
        assert all(math.isfinite(v) for v in entry.logprobs)


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(),
        SamplingParams(top_p=0.5, min_p=0.1),
        SamplingParams(top_k=5, logprobs=2),
        SamplingParams(beam=BeamParams(width=2)),
        SamplingParams(repetition_penalty=1.2, logit_bias={3: 1.0}),
    ],
    ids=str,
)
def test_a_row_without_a_number_fails_alone(params: SamplingParams) -> None:
    neighbours = varied_rows(6)
    alone = sample(neighbours)
    rows = [*neighbours[:3], Row(torch.full((VOCAB,), torch.nan), params), *neighbours[3:]]
    output = sample(rows)
    assert output.errors == {3: UNUSABLE_LOGITS}
    assert output.token_ids[3] == -1
    assert 3 not in output.top_logprobs and 3 not in output.candidates
    assert np.delete(output.token_ids, 3).tolist() == alone.token_ids.tolist()


def test_wishes_that_leave_nothing_are_an_error_of_that_row() -> None:
    impossible = SamplingParams(allowed_token_ids=(5,), bad_words_token_ids=((5,),))
    rows = [Row(random_logits(VOCAB, 1), GREEDY), Row(random_logits(VOCAB, 2), impossible)]
    output = sample(rows)
    assert output.errors == {1: NO_TOKEN_LEFT}
    assert output.token_ids.tolist() == [int(rows[0].logits.argmax()), -1]


def test_ids_that_the_tokenizer_cannot_decode_do_not_exist() -> None:
    """C042: the head is padded past the tokenizer, and the padding's logits are high."""
    limit = VOCAB - 64
    logits = random_logits(VOCAB, 8)
    logits[limit:] = 50.0
    rows = [
        Row(logits, SamplingParams(temperature=0.0, logprobs=5)),
        Row(logits, SamplingParams(temperature=1.0, logprobs=5), seed=3),
        Row(logits, SamplingParams(top_k=10)),
        Row(logits, SamplingParams(logit_bias={VOCAB - 1: 100.0})),
        Row(logits, SamplingParams(beam=BeamParams(width=3))),
    ]
    output = sample(rows, vocab_limit=limit)
    assert max(output.token_ids.tolist()) < limit
    assert output.token_ids[0] == int(logits[:limit].argmax())
    assert all(t < limit for entry in output.top_logprobs.values() for t in entry.token_ids)
    assert all(t < limit for t, _ in output.candidates[4])
    raw = torch.log_softmax(logits[:limit], dim=-1)
    assert output.logprobs[0] == pytest.approx(float(raw.max()), abs=1e-5)


def test_beams_see_the_best_of_processed_log_probabilities() -> None:
    """Processors act on log-probabilities, as in transformers' beam search; temperature and filters do not."""
    width, prompt, output = 3, [4, 5], [6, 6]
    logits = random_logits(VOCAB, 9)
    params = SamplingParams(
        beam=BeamParams(width=width), repetition_penalty=1.4, min_tokens=5, temperature=0.3, top_k=2
    )
    result = sample([Row(random_logits(VOCAB, 10), GREEDY), Row(logits, params, prompt, output, eos_token_ids=(2,))])
    assert result.token_ids[1] == -1

    scores = torch.log_softmax(logits, dim=-1).unsqueeze(0)
    scores = RepetitionPenaltyLogitsProcessor(1.4)(torch.tensor([prompt + output]), scores)[0]
    scores[2] = -torch.inf
    best = scores.topk(2 * width)
    assert [t for t, _ in result.candidates[1]] == best.indices.tolist()
    assert [s for _, s in result.candidates[1]] == pytest.approx(best.values.tolist(), abs=1e-6)
