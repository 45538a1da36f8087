"""Parallel sampling and beam search: what they return, and what they share."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from pagedserve.sampling_params import BeamParams, SamplingParams
from pagedserve.scheduler.branching import nearest_sibling
from pagedserve.sequence import Request, Sequence
from tests.helpers.factories import make_request
from tests.helpers.fake_executor import Chain, HashModel
from tests.scheduler.running import answers, assert_right, make_driver

# -- parallel sampling -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("prompt_len", [7, 8, 9])
@pytest.mark.parametrize("budget", [4, 64])
def test_the_prompt_is_computed_and_stored_once(n: int, prompt_len: int, budget: int) -> None:  # C079
    driver = make_driver(max_num_batched_tokens=budget)
    request = make_request(prompt_len, n=n, temperature=1.0, max_tokens=2)
    driver.add(request)
    while not driver.results[request.request_id].token_ids:
        driver.step()
    assert sum(o.num_tokens for o in driver.steps) == prompt_len
    assert len(driver.executor.rows) == n
    assert driver.scheduler.stats().kv_cache_usage * 64 == -(-prompt_len // 4)
    driver.run()
    assert_right(driver, request)
    # The first write into a partial last block copies it, for all but its last owner; a full one is never copied.
    assert driver.scheduler.stats().num_copied_blocks == (0 if prompt_len % 4 == 0 else n - 1)
    driver.assert_idle()


def test_children_of_a_prompt_that_came_whole_are_sent_beside_it_and_forked_otherwise() -> None:
    whole = make_driver()
    whole.add(make_request(6, n=3, temperature=1.0))
    output = whole.step()
    assert len(output.new) == 3 and not output.forks and len(output.shared_logits) == 2
    chunked = make_driver(max_num_batched_tokens=4)
    chunked.add(make_request(6, n=3, temperature=1.0))
    first, second = chunked.step(), chunked.step()
    assert len(first.new) == 1 and not first.forks
    assert not second.new and len(second.forks) == len(second.shared_logits) == 2


def test_choices_of_one_seed_differ_repeat_and_do_not_depend_on_n() -> None:  # C036
    def run(n: int) -> list[list[int]]:
        driver = make_driver()
        request = make_request(list(range(6)), n=n, temperature=1.0, seed=1234, max_tokens=12)
        driver.add(request)
        result = driver.run()[request.request_id]
        return [result.token_ids[i] for i in range(n)]

    eight = run(8)
    assert len({tuple(tokens) for tokens in eight}) >= 7
    assert eight == run(8) and eight[:3] == run(3)


def test_best_of_computes_all_candidates_with_their_scores() -> None:  # C039
    def run(**options: int) -> list[tuple[list[int], str, float]]:
        driver = make_driver()
        request = make_request(list(range(6)), temperature=1.0, seed=5, max_tokens=7, **options)
        driver.add(request)
        return answers(driver.run()[request.request_id])

    # Which two are shown is decided where the text is; what it is decided by is all here.
    assert run(n=2, best_of=4) == run(n=4)


def test_siblings_end_at_different_times_and_leave_the_others_their_blocks() -> None:  # C079
    driver = make_driver()
    requests = [
        make_request(length, n=5, temperature=1.0, max_tokens=30, stop_token_ids=tuple(range(6)))
        for length in (3, 4, 5)
    ]
    driver.add(*requests)
    results = driver.run()
    assert_right(driver, *requests)
    lengths = {len(tokens) for r in requests for tokens in results[r.request_id].token_ids.values()}
    assert len(lengths) > 5
    driver.assert_idle()


def sequence_of(*token_ids: int, num_computed: int = 0) -> Sequence:
    return Sequence(0, 0, list(token_ids), 2, num_computed)


def test_the_nearest_sibling_shares_the_most_and_never_the_last_token() -> None:
    sequence = sequence_of(1, 2, 3, 4, 5)
    far, near = sequence_of(1, 2, 9, 9), sequence_of(1, 2, 3, 4, 9)
    assert nearest_sibling(sequence, [far, near, far]) == (near, 4)
    equal = sequence_of(1, 2, 3, 4, 5)
    assert nearest_sibling(sequence, [near, equal])[1] == 4
    ahead = sequence_of(1, 2, 8, num_computed=3)
    assert nearest_sibling(sequence_of(1, 2, 7), [sequence_of(1, 2, 6), ahead]) == (ahead, 2)


# -- beam search against transformers ----------------------------------------------------------------------------------

VOCAB = 40


@functools.cache
def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.4,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


class LlamaModel(HashModel):
    """The fake worker's logits are those of a real model: a chain is simply all tokens so far."""

    root: Chain = ()

    def extend(self, chain: Chain, token_id: int) -> Chain:
        return (*chain, token_id)

    @functools.cache  # noqa: B019 - one model a process
    def logprobs(self, chain: Chain) -> list[float]:
        with torch.inference_mode():
            logits = tiny_llama()(torch.tensor([chain])).logits[0, -1].float()
        return torch.log_softmax(logits, dim=-1).tolist()


LLAMA = LlamaModel()


def reference(
    prompt: list[int], params: SamplingParams, eos_token_ids: tuple[int, ...]
) -> list[tuple[list[int], float]]:
    """transformers' beam search: the output ids and score of each returned beam, best first."""
    assert params.beam is not None
    generated = tiny_llama().generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        generation_config=GenerationConfig(
            num_beams=params.beam.width,
            num_return_sequences=params.n,
            do_sample=False,
            max_new_tokens=params.max_tokens,
            length_penalty=params.beam.length_penalty,
            early_stopping=params.beam.early_stopping,
            eos_token_id=list(eos_token_ids) or None,
            pad_token_id=VOCAB - 1,
            return_dict_in_generate=True,
            output_scores=True,
        ),
    )
    beams = []
    for row, score in zip(generated.sequences.tolist(), generated.sequences_scores.tolist(), strict=True):
        output = row[len(prompt) :]
        ends = [i for i, token in enumerate(output) if token in eos_token_ids]
        beams.append((output[: ends[0] + 1] if ends else output, score))
    return beams


def beam_request(prompt: list[int], beam: BeamParams, eos_token_ids: tuple[int, ...], n: int | None = None) -> Request:
    return make_request(prompt, beam=beam, n=n or beam.width, max_tokens=12, eos_token_ids=eos_token_ids)


PROMPTS = {"short": [5, 6, 7], "long": [(7 * i) % VOCAB for i in range(40)]}
EOS = {"none": (), "one": (3,), "two": (3, 11)}


@pytest.mark.parametrize(("prompt", "eos"), [("short", "none"), ("short", "two"), ("long", "one")])
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("width", [2, 4])
def test_beam_search_equals_transformers(
    width: int, length_penalty: float, early_stopping: bool | str, prompt: str, eos: str
) -> None:  # C040
    beam = BeamParams(width=width, length_penalty=length_penalty, early_stopping=early_stopping)
    request = beam_request(PROMPTS[prompt], beam, EOS[eos])
    driver = make_driver(model=LLAMA)
    driver.add(request)
    result = driver.run()[request.request_id]
    expected = reference(request.prompt_token_ids, request.sampling_params, EOS[eos])
    assert [result.token_ids[i] for i in range(width)] == [tokens for tokens, _ in expected]
    assert [result.scores[i] for i in range(width)] == pytest.approx([score for _, score in expected], abs=1e-4)
    for index, (tokens, _) in enumerate(expected):
        assert result.finish_reasons[index] == ("stop" if tokens[-1] in EOS[eos] else "length")
    driver.assert_idle()


def test_the_searches_above_have_beams_that_end_early_and_late() -> None:
    lengths = set()
    for prompt, penalty in itertools.product(PROMPTS.values(), (-1.0, 1.0)):
        params = SamplingParams(beam=BeamParams(width=4, length_penalty=penalty), n=4, max_tokens=12)
        lengths |= {len(tokens) for tokens, _ in reference(prompt, params, EOS["two"])}
    assert len(lengths) >= 4


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 1},
        {"max_num_batched_tokens": 7},
        {"num_blocks": 40, "preemption_mode": "recompute"},
        {"num_blocks": 40, "preemption_mode": "recompute", "enable_prefix_caching": False},
        {"num_blocks": 40, "num_host_blocks": 40, "preemption_mode": "swap"},
        {"block_size": 1, "num_blocks": 160},
    ],
    ids=str,
)
def test_eight_searches_at_once_give_what_each_gives_alone(options: dict[str, object]) -> None:  # C040
    driver = make_driver(model=LLAMA, **options)
    requests = [
        beam_request([(i * 7 + t * 3) % VOCAB for t in range(3 + 4 * i)], BeamParams(width=2 + i % 3), EOS["one"])
        for i in range(8)
    ]
    driver.add(*requests)
    results = driver.run()
    for request in requests:
        alone = make_driver(model=LLAMA)
        twin = beam_request(request.prompt_token_ids, request.sampling_params.beam, EOS["one"])
        alone.add(twin)
        assert answers(results[request.request_id]) == answers(alone.run()[twin.request_id])
    if "num_blocks" in options and options.get("block_size") != 1:
        assert driver.scheduler.stats().num_preemptions > 0
    driver.assert_idle()


def test_fewer_choices_than_beams_are_the_best_of_them() -> None:
    everything, best = beam_request([1, 2], BeamParams(width=4), ()), beam_request([1, 2], BeamParams(width=4), (), n=2)
    driver = make_driver(model=LLAMA)
    driver.add(everything, best)
    results = driver.run()
    assert answers(results[best.request_id]) == answers(results[everything.request_id])[:2]


def test_nothing_is_told_of_a_search_before_its_end() -> None:
    driver = make_driver(model=LLAMA)
    request = beam_request([1, 2, 3], BeamParams(width=3), ())
    driver.add(request)
    for _ in range(11):
        driver.step()
        assert not driver.results[request.request_id].token_ids
    driver.run()
    assert len(driver.results[request.request_id].token_ids) == 3


@pytest.mark.parametrize("width", [2, 3, 4, 5])
@pytest.mark.parametrize("prompt_len", [7, 8, 9])
def test_beams_share_blocks_and_dead_ones_leave_none(width: int, prompt_len: int) -> None:  # C079
    driver = make_driver(256)
    request = make_request(prompt_len, beam=BeamParams(width=width), n=width, max_tokens=30)
    driver.add(request)
    while driver.scheduler.has_work():
        driver.step()
        rows = driver.executor.rows.values()
        held = {block for row in rows for block in row.block_ids}
        if len(rows) == width:
            assert len(held) < sum(len(row.block_ids) for row in rows)
    assert driver.scheduler.stats().num_copied_blocks < 30 * width
    driver.assert_idle()


def test_logprobs_of_a_beam_add_up_to_its_score() -> None:
    driver = make_driver(model=LLAMA)
    request = make_request([1, 2, 3], beam=BeamParams(width=3, length_penalty=1.0), n=2, logprobs=2, max_tokens=6)
    driver.add(request)
    result = driver.run()[request.request_id]
    for index in range(2):
        entries = result.logprobs[index]
        assert [e.token_ids[0] for e in entries] == result.token_ids[index]
        assert all(len(e.token_ids) == 3 and e.logprobs[1] >= e.logprobs[2] for e in entries)
        assert all(math.isclose(e.logprobs[0], e.logprobs[e.rank]) for e in entries if e.rank <= 2)
        assert sum(e.logprobs[0] for e in entries) / len(entries) == pytest.approx(result.scores[index])


def test_stop_token_ids_end_a_beam_and_are_named() -> None:
    driver = make_driver(model=LLAMA)
    stops = tuple(range(0, VOCAB, 4))
    request = make_request([5, 6, 7], beam=BeamParams(width=3), n=3, max_tokens=12, stop_token_ids=stops)
    driver.add(request)
    result = driver.run()[request.request_id]
    ended = [i for i in range(3) if result.finish_reasons[i] == "stop"]
    assert ended and all(result.stop_reasons[i] == result.token_ids[i][-1] in stops for i in ended)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_beams_may_be_preempted_when_some_of_them_have_told_their_candidates(mode: str) -> None:
    def run(preempt_after: int | None) -> list[tuple[list[int], str, float]]:
        driver = make_driver(64, 64, max_num_batched_tokens=2, preemption_mode=mode)
        request = make_request([1, 2, 3], beam=BeamParams(width=4), n=4, max_tokens=6)
        driver.add(request)
        while driver.scheduler.has_work():
            if len(driver.steps) == preempt_after:
                driver.scheduler._preemption.preempt(driver.scheduler._groups.running[0])
            driver.step()
        driver.assert_idle()
        return answers(driver.results[request.request_id])

    calm = run(None)
    for preempt_after in range(4, 12):
        assert run(preempt_after) == calm


def test_what_beams_told_before_a_preemption_does_not_count_after_it() -> None:
    # Some beams have told their candidates when all lose their blocks. If those counted, the last beam to come back
    # would move the search on while others are still parked.
    def run(preempt_after: int | None) -> list[tuple[list[int], str, float]]:
        driver = make_driver(max_num_batched_tokens=3, preemption_mode="recompute")
        request = make_request([5, 6], beam=BeamParams(width=4), n=4, max_tokens=20)
        driver.add(request)
        while driver.scheduler.has_work():
            if len(driver.steps) == preempt_after:
                driver.scheduler._preemption.preempt(driver.scheduler._groups.running[0])
            driver.step()
        driver.assert_idle()
        return answers(driver.results[request.request_id])

    calm = run(None)
    assert all(run(preempt_after) == calm for preempt_after in range(6, 36))


@pytest.mark.parametrize(("prompt_len", "num_blocks", "budget", "preempt_after"), [(6, 10, 2, 17), (13, 11, 3, 19)])
def test_beams_that_no_longer_fit_beside_each_other_end_and_do_not_wait_for_ever(
    prompt_len: int, num_blocks: int, budget: int, preempt_after: int
) -> None:
    driver = make_driver(num_blocks, max_num_batched_tokens=budget, preemption_mode="recompute")
    request = make_request(list(range(3, 3 + prompt_len)), beam=BeamParams(width=4), n=4, max_tokens=14)
    driver.add(request)
    while driver.scheduler.num_unfinished:
        if len(driver.steps) == preempt_after:
            driver.scheduler._preemption.preempt(driver.scheduler._groups.running[0])
        output = driver.step()
        assert output.num_tokens or output.released or not driver.scheduler.num_unfinished
    assert set(driver.results[request.request_id].finish_reasons.values()) <= {"length", "stop"}
    driver.run()
    driver.assert_idle()
