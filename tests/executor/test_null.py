"""The server without a model: real HTTP, scheduling and text around tokens that are made up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pagedserve import LLM, SamplingParams
from pagedserve.sampling_params import BeamParams
from tests.helpers.checkpoints import tiny_llama


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder: Path = tiny_llama(tmp_path_factory.mktemp("null") / "tiny")
    with LLM(model=str(folder), executor="null", max_num_batched_tokens=16) as llm:
        yield llm


def test_a_prompt_is_repeated(llm: LLM) -> None:
    prompt = list(range(20, 60))
    params = SamplingParams(n=3, temperature=1.0, max_tokens=50, ignore_eos=True)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    assert [choice.token_ids for choice in output.outputs] == [(prompt * 2)[:50]] * 3


@pytest.mark.parametrize(
    "params",
    [SamplingParams(logprobs=1), SamplingParams(prompt_logprobs=0), SamplingParams(n=2, beam=BeamParams(width=2))],
)
def test_what_needs_a_model_fails_and_says_so(llm: LLM, params: SamplingParams) -> None:
    healthy = SamplingParams(max_tokens=5, ignore_eos=True)
    failed, fine = llm.generate([[20, 21, 22], [30, 31]], [params, healthy], use_tqdm=False)
    assert failed.error is not None and "without a model" in str(failed.error)
    assert fine.outputs[0].token_ids == [30, 31, 30, 31, 30]
