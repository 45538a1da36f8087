from __future__ import annotations

from pagedserve.sampling.batch import SamplingBatch, SamplingState
from pagedserve.sampling_params import BeamParams, SamplingParams
from tests.sampling.rows import CPU


def state(eos_token_ids: tuple[int, ...] = (), **params: object) -> SamplingState:
    return SamplingState(SamplingParams(**params), 9, 0, 3, eos_token_ids)


def test_rows_are_split_by_what_they_need() -> None:
    states = [
        state(temperature=0.0),
        state(),
        state(beam=BeamParams(width=2)),
        state(top_k=1, logprobs=0),
        state(n=2, best_of=3),
        state(n=2),
    ]
    batch = SamplingBatch(states, 50, CPU)
    assert batch.beam == [2]
    assert batch.logprobs == [3, 4]
    assert batch.processors == []
    assert not batch.is_plain
    assert SamplingBatch([states[0], states[1], states[5]], 50, CPU).is_plain


def test_a_processor_is_built_only_where_a_row_needs_it() -> None:
    batch = SamplingBatch([state(), state(min_tokens=2), state(logit_bias={4: 1.0})], 50, CPU)
    assert [type(p).__name__ for p in batch.processors] == ["LogitBias", "MinTokens"]


def test_end_tokens_are_all_of_the_models_and_the_requests() -> None:
    assert state((2, 3), stop_token_ids=[3, 8]).end_token_ids == (2, 3, 8)


def test_candidates_suffice_where_every_end_token_leads() -> None:
    """As transformers' beam search: max(2, 1 + number of EOS ids) times the width."""
    assert state((), beam=BeamParams(width=4)).num_candidates == 8
    assert state((2,), beam=BeamParams(width=4)).num_candidates == 8
    assert state((2, 3, 4), beam=BeamParams(width=4)).num_candidates == 16


def test_a_fork_differs_only_in_its_stream() -> None:
    parent = state((2,))
    child = parent.fork(3)
    assert child.stream != parent.stream
    assert child.stream == SamplingState(parent.params, parent.seed, 3, 3).stream
    assert (child.params, child.num_prompt_tokens, child.eos_token_ids) == (parent.params, 3, (2,))
