"""The sampler's ways on GPUs (logits as they are, logprobs by one op, tokens on the device) tell what a CPU's do."""

from __future__ import annotations

import pytest
import torch

from pagedserve.kernels import ops
from pagedserve.sampling.sampler import NO_TOKEN_LEFT, UNUSABLE_LOGITS, SamplerOutput
from pagedserve.sampling_params import BeamParams, SamplingParams
from tests.sampling.rows import Row, random_logits, sample

VOCAB_SIZE = 60
GREEDY = {"temperature": 0.0}


def rows() -> list[Row]:
    nan, inf = float("nan"), float("inf")
    partly = random_logits(VOCAB_SIZE, 3)
    partly[7], partly[9] = nan, -inf
    infinite = random_logits(VOCAB_SIZE, 5)
    infinite[20], infinite[21] = inf, nan
    beam = random_logits(VOCAB_SIZE, 4)
    beam[5] = nan
    wishes = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2, "logit_bias": {4: 2.5}}
    return [
        Row(random_logits(VOCAB_SIZE, 0), SamplingParams(**GREEDY, logprobs=3)),
        Row(random_logits(VOCAB_SIZE, 1), SamplingParams(seed=5, logprobs=0, **wishes), output=(9, 9, 30)),
        Row(partly, SamplingParams(**GREEDY, logprobs=5, **wishes)),
        Row(torch.full((VOCAB_SIZE,), nan), SamplingParams(**GREEDY, logprobs=2)),
        Row(torch.full((VOCAB_SIZE,), nan), SamplingParams(**GREEDY, logit_bias={3: 1.0})),
        Row(beam, SamplingParams(n=2, beam=BeamParams(width=2), temperature=0.0)),
        Row(infinite, SamplingParams(**GREEDY, **wishes)),
        Row(torch.where(torch.arange(VOCAB_SIZE) == 8, 1.0, -inf), SamplingParams(**GREEDY, allowed_token_ids=[2])),
    ]


def test_the_results_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = sample(rows())
    monkeypatch.setattr(ops, "on_gpu", lambda device: True)  # the tensors stay on the CPU, and so do the ops
    found = sample(rows())
    assert found.token_ids.tolist() == wanted.token_ids.tolist()
    assert found.errors == wanted.errors == {3: UNUSABLE_LOGITS, 4: UNUSABLE_LOGITS, 7: NO_TOKEN_LEFT}
    assert found.logprobs[:3] == pytest.approx(wanted.logprobs[:3], abs=1e-5)
    for mine, other in zip(entries(found), entries(wanted), strict=True):
        assert mine == pytest.approx(other, abs=1e-5)
    assert [token for token, _ in found.candidates[5]] == [token for token, _ in wanted.candidates[5]]


def entries(output: SamplerOutput) -> list[list[float]]:
    return [[*e.token_ids, *e.logprobs, e.rank] for _, e in sorted(output.top_logprobs.items())]
