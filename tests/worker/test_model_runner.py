"""The runner with a real tiny Llama: whatever a scheduler does around a sequence, its tokens stay the same."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from pagedserve.kernels import native
from pagedserve.sampling.sampler import UNUSABLE_LOGITS
from pagedserve.sampling_params import BeamParams, SamplingParams
from pagedserve.step import SchedulerOutput
from tests.helpers.checkpoints import llama_config, random_tensors, tiny_llama, write_checkpoint
from tests.worker.driver import BLOCK_SIZE, Driver, execute

PROMPTS = [
    [(31 * i * i + 7 * i + p) % 320 for i in range(length)] for p, length in ((3, 23), (50, 1), (9, 8), (77, 40))
]
SEEDED = SamplingParams(temperature=1.3, top_p=0.95, repetition_penalty=1.1, presence_penalty=0.5)
NUM_TOKENS = 10


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> AutoModelForCausalLM:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> list[list[int]]:
    """What each prompt gives by itself, seeded, in one chunk."""
    driver = Driver(checkpoint)
    outputs = []
    for i, prompt in enumerate(PROMPTS):
        driver.add(i, prompt, SEEDED, seed=100 + i)
        outputs += driver.generate([i], NUM_TOKENS)
        driver.release(i)
    return outputs


def greedy_by_transformers(oracle: AutoModelForCausalLM, prompt: list[int]) -> list[int]:
    generated = oracle.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=NUM_TOKENS,
        min_new_tokens=NUM_TOKENS,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    return generated[0, len(prompt) :].tolist()


@torch.inference_mode()
def logprobs_by_transformers(oracle: AutoModelForCausalLM, token_ids: list[int]) -> torch.Tensor:
    """[len(token_ids), vocab_size]: row p is the distribution of the token after position p."""
    return torch.log_softmax(oracle(torch.tensor([token_ids])).logits[0].float(), dim=-1)


@pytest.mark.parametrize("chunk", [1, 3, 7, 1000])
def test_greedy_together_equals_transformers(checkpoint: Path, oracle: AutoModelForCausalLM, chunk: int) -> None:
    driver = Driver(checkpoint)
    for i, prompt in enumerate(PROMPTS):
        driver.add(i, prompt)
    outputs = driver.generate(range(len(PROMPTS)), NUM_TOKENS, chunk=chunk)
    assert outputs == [greedy_by_transformers(oracle, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("chunk", [1, 5, 1000])
def test_seeded_draws_do_not_depend_on_chunks_or_neighbours(
    checkpoint: Path, alone: list[list[int]], chunk: int
) -> None:
    driver = Driver(checkpoint)
    for i in (2, 0, 3, 1):
        driver.add(i, PROMPTS[i], SEEDED, seed=100 + i)
    assert driver.generate([1, 3, 0, 2], NUM_TOKENS, chunk=chunk) == [alone[i] for i in (1, 3, 0, 2)]


@pytest.mark.skipif(not native.available(), reason="the native CPU library was not built")
def test_native_kernels_give_the_same_bits_alone_and_together(checkpoint: Path, oracle: AutoModelForCausalLM) -> None:
    """Not the same tokens only: logprobs are equal to the last bit, whatever the chunks and the neighbours."""
    params = SamplingParams(temperature=0.0, logprobs=5)

    def run(driver: Driver, seq_ids: list[int], chunk: int) -> dict[int, list]:
        for i in seq_ids:
            driver.add(i, PROMPTS[i], params)
        entries: dict[int, list] = {i: [] for i in seq_ids}
        while pending := [i for i in seq_ids if len(driver.output(i)) < NUM_TOKENS]:
            result = driver.run([(i, min(chunk, driver.need(i))) for i in pending])
            for i, found in result.logprobs.items():
                entries[i] += found
        return entries

    alone = {i: run(Driver(checkpoint, native=True), [i], 1000)[i] for i in range(4)}
    for i, entries in alone.items():
        assert [e.token_ids[0] for e in entries] == greedy_by_transformers(oracle, PROMPTS[i])
    for order, chunk in (([0, 1, 2, 3], 1000), ([3, 1, 0, 2], 5), ([2, 3], 1)):
        together = run(Driver(checkpoint, native=True), order, chunk)
        assert together == {i: alone[i] for i in order}


def test_a_sequence_is_sampled_only_when_all_its_tokens_are_computed(checkpoint: Path) -> None:
    driver = Driver(checkpoint)
    driver.add(0, PROMPTS[0])
    driver.add(1, PROMPTS[1])
    result = driver.run([(0, 10), (1, 1)])
    assert result.seq_ids == [1]
    assert driver.run([(0, 12)]).seq_ids == []
    assert driver.run([(0, 1), (1, 1)]).seq_ids == [0, 1]


@pytest.mark.parametrize("is_new", [False, True], ids=["forked", "sent beside the parent"])
@pytest.mark.parametrize("prompt_len", [5, 8])
def test_choices_share_the_prompt_and_copy_on_write(checkpoint: Path, prompt_len: int, is_new: bool) -> None:  # C079
    """n=4: one prefill, children draw from the parent's logits; each is what it would be as a request of its own."""
    prompt = PROMPTS[0][:prompt_len]
    separate = Driver(checkpoint)
    for choice in range(4):
        separate.add(choice, prompt, SEEDED, seed=7, choice_index=choice)
    expected = separate.generate(range(4), NUM_TOKENS)
    assert len({tuple(o) for o in expected}) == 4

    driver = Driver(checkpoint)
    driver.add(0, prompt, SEEDED, seed=7)
    if not is_new:
        driver.run([(0, 2)])
    for choice in (1, 2, 3):
        driver.fork(0, choice, choice, shares_logits=True)
    first = driver.run([(0, driver.need(0))])
    assert first.seq_ids == [0, 1, 2, 3]
    assert [s.block_ids for s in driver.sequences.values()] == [driver.sequences[0].block_ids] * 4
    assert driver.generate([3, 0, 2, 1], NUM_TOKENS) == [expected[c] for c in (3, 0, 2, 1)]
    shared = prompt_len // BLOCK_SIZE
    assert len({tuple(s.block_ids[:shared]) for s in driver.sequences.values()}) == 1
    assert len({s.block_ids[shared] for s in driver.sequences.values()}) == 4


def test_a_fork_in_mid_flight_continues_like_its_parent(checkpoint: Path) -> None:
    """Greedy child of a running parent; penalties know what the parent generated."""
    params = SamplingParams(temperature=0.0, repetition_penalty=1.4, frequency_penalty=0.3)
    driver = Driver(checkpoint)
    driver.add(0, PROMPTS[2], params)
    driver.generate([0], 5)
    driver.fork(0, 1, 1)
    first, second = driver.generate([0, 1], NUM_TOKENS)
    assert first == second
    # Separate from now on: the child loses its parent and its row is unharmed.
    driver.release(0)
    driver.add(2, PROMPTS[3], params)
    assert driver.generate([1], 2 * NUM_TOKENS)[0][:NUM_TOKENS] == first


def test_swapped_out_and_in_again_nothing_changes(checkpoint: Path, alone: list[list[int]]) -> None:
    driver = Driver(checkpoint, num_blocks=24)
    driver.add(0, PROMPTS[0], SEEDED, seed=100)
    driver.generate([0], 4)
    used = len(driver.sequences[0].block_ids)
    driver.swap_out(0, list(range(5, 5 + used)))
    # Others take the blocks in the same step, which only works when blocks leave before they are written.
    driver.add(3, PROMPTS[3], SEEDED, seed=103)
    driver.generate([3], NUM_TOKENS)
    driver.release(3)
    driver.swap_in(0, list(range(5, 5 + used)))
    assert driver.generate([0], NUM_TOKENS) == [alone[0]]


@pytest.mark.parametrize("seed", range(4))
def test_whatever_the_schedule_each_sequence_gets_its_own_tokens(
    checkpoint: Path, alone: list[list[int]], seed: int
) -> None:
    """Random arrivals, chunks, preemptions of both kinds and releases over few rows and few blocks."""
    pick = random.Random(seed)
    driver = Driver(checkpoint, num_rows=2, num_blocks=40, num_host_blocks=40)
    arriving, running, swapped = list(range(8)), [], {}
    host_free = list(range(40))
    finished = 0
    while finished < 8:
        returned, host_blocks = [], []
        if arriving and pick.random() < 0.4 and len(driver.free) > 14:
            seq_id = arriving.pop(0)
            driver.add(seq_id, PROMPTS[seq_id % 4], SEEDED, seed=100 + seq_id % 4)
            running.append(seq_id)
        if swapped and pick.random() < 0.5 and len(driver.free) > 14:
            seq_id, host_blocks = swapped.popitem()
            driver.swap_in(seq_id, host_blocks)
            returned = [seq_id]
        scheduled = []
        for seq_id in list(running):
            chance = pick.random()
            used = len(driver.sequences[seq_id].block_ids)
            if len(driver.output(seq_id)) == NUM_TOKENS:
                assert driver.output(seq_id) == alone[seq_id % 4]
                driver.release(seq_id)
                running.remove(seq_id)
                finished += 1
            elif chance < 0.08 and used and not scheduled:
                driver.recompute(seq_id)
            elif chance < 0.16 and 0 < used <= len(host_free) and driver.sequences[seq_id].num_computed:
                swapped[seq_id] = [host_free.pop() for _ in range(used)]
                driver.swap_out(seq_id, swapped[seq_id])
                running.remove(seq_id)
                break
            elif chance < 0.8 and len(driver.free) > 12 * (len(scheduled) + 1):
                scheduled.append((seq_id, pick.randint(1, driver.need(seq_id))))
        pick.shuffle(scheduled)
        driver.run(scheduled)
        # Only now: in one step blocks go out before others come in, so a host block cannot change hands in it.
        running += returned
        host_free += host_blocks
    driver.run([])
    assert len(driver.rows) == 0 and sorted(driver.free) == list(range(40))


def test_swap_time_is_reported_beside_forward_time(checkpoint: Path) -> None:
    driver = Driver(checkpoint)
    driver.add(0, PROMPTS[0])
    first = driver.run([(0, 23)])
    assert first.forward_seconds > 0.0
    driver.swap_out(0, list(range(6)))
    driver.swap_in(0, list(range(6)))
    swapped = driver.run([])
    assert swapped.swap_seconds > 0.0 and swapped.forward_seconds == 0.0


def test_recomputed_after_preemption_nothing_changes(checkpoint: Path, alone: list[list[int]]) -> None:
    driver = Driver(checkpoint)
    driver.add(0, PROMPTS[0], SEEDED, seed=100)
    driver.generate([0], 6)
    driver.recompute(0)
    assert driver.generate([0], NUM_TOKENS, chunk=9) == [alone[0]]


def test_rows_are_used_again(checkpoint: Path, alone: list[list[int]]) -> None:
    driver = Driver(checkpoint, num_rows=2)
    for round_ in range(5):
        for i in (round_ % 4, (round_ + 1) % 4):
            driver.add(10 * round_ + i, PROMPTS[i], SEEDED, seed=100 + i)
        for i in (round_ % 4, (round_ + 1) % 4):
            assert driver.generate([10 * round_ + i], NUM_TOKENS) == [alone[i]]
            driver.release(10 * round_ + i)
    assert len(driver.rows.states) == 2
    driver.run([])
    assert len(driver.rows) == 0


def test_returning_in_the_step_it_was_released_in(checkpoint: Path, alone: list[list[int]]) -> None:
    """Same sequence, same row, new state: nothing that was kept for the old one may be used."""
    driver = Driver(checkpoint)
    driver.add(0, PROMPTS[0], SEEDED, seed=100)
    driver.generate([0], 3)
    driver.release(0)
    driver.add(0, PROMPTS[2], SEEDED, seed=102)
    assert driver.generate([0], NUM_TOKENS) == [alone[2]]


@pytest.mark.parametrize("chunk", [1, 16, 33, 100])
def test_prompt_logprobs_are_those_of_transformers(
    checkpoint: Path, oracle: AutoModelForCausalLM, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C024: two prompts of 100 and 40 tokens together, any chunk size, in pieces of a few rows."""
    monkeypatch.setattr("pagedserve.worker.prompt_logprobs._PIECE", 7 * 320)
    params = SamplingParams(temperature=0.0, prompt_logprobs=3)
    prompts = [[(17 * i * i + i) % 320 for i in range(100)], PROMPTS[3]]
    driver = Driver(checkpoint)
    for i, prompt in enumerate(prompts):
        driver.add(i, prompt, params)
    driver.add(2, PROMPTS[2])
    entries: dict[int, list] = {0: [], 1: []}
    while pending := [i for i in range(3) if not driver.output(i)]:
        result = driver.run([(i, min(chunk, driver.need(i))) for i in pending])
        for i, found in result.prompt_logprobs.items():
            entries[i] += found
    for i, prompt in enumerate(prompts):
        raw = logprobs_by_transformers(oracle, prompt)
        assert len(entries[i]) == len(prompt) - 1
        for position, entry in enumerate(entries[i], start=1):
            row = raw[position - 1]
            best = row.topk(3)
            assert entry.token_ids == [prompt[position], *best.indices.tolist()]
            expected = [float(row[prompt[position]]), *best.values.tolist()]
            assert entry.logprobs == pytest.approx(expected, abs=1e-4)
            assert entry.rank == int((row > row[prompt[position]]).sum()) + 1


def test_prompt_logprobs_are_not_told_twice(checkpoint: Path) -> None:
    driver = Driver(checkpoint)
    driver.add(0, PROMPTS[0], SamplingParams(temperature=0.0, prompt_logprobs=0))
    assert len(driver.run([(0, 23)]).prompt_logprobs[0]) == 22
    assert driver.run([(0, 1)]).prompt_logprobs == {}
    driver.recompute(0)
    assert driver.run([(0, 24)]).prompt_logprobs == {}


def test_logprobs_of_drawn_tokens(checkpoint: Path, oracle: AutoModelForCausalLM) -> None:
    driver = Driver(checkpoint)
    driver.add(0, PROMPTS[0], SamplingParams(temperature=1.2, logprobs=4), seed=3)
    driver.add(1, PROMPTS[2])
    result = driver.run([(0, 23), (1, 8)])
    raw = logprobs_by_transformers(oracle, PROMPTS[0])[-1]
    token = driver.output(0)[0]
    (entry,) = result.logprobs[0]
    assert entry.token_ids == [token, *raw.topk(4).indices.tolist()]
    assert entry.logprobs[0] == pytest.approx(float(raw[token]), abs=1e-4)
    assert result.sampled_logprobs[0] == entry.logprobs[0]
    assert 1 not in result.logprobs


def test_beams_get_candidates_and_the_control_plane_appends(checkpoint: Path, oracle: AutoModelForCausalLM) -> None:
    params = SamplingParams(beam=BeamParams(width=2), n=2)
    driver = Driver(checkpoint)
    driver.add(0, PROMPTS[0], params)
    result = driver.run([(0, 23)])
    assert result.sampled_token_ids == [[]]
    best = result.candidates[0]
    raw = logprobs_by_transformers(oracle, PROMPTS[0])[-1].topk(4)
    assert [t for t, _ in best] == raw.indices.tolist()
    assert [v for _, v in best] == pytest.approx(raw.values.tolist(), abs=1e-4)

    driver.fork(0, 1, 1)
    driver.append(0, best[0][0])
    driver.append(1, best[1][0])
    result = driver.run([(0, 1), (1, 1)])
    for seq_id, (token, _) in enumerate(best[:2]):
        raw = logprobs_by_transformers(oracle, [*PROMPTS[0], token])[-1].topk(4)
        assert [t for t, _ in result.candidates[seq_id]] == raw.indices.tolist()


def test_more_beams_than_rows_for_a_moment(checkpoint: Path) -> None:
    """Forks come before releases, so a full house needs more rows until the dead beams have left."""
    driver = Driver(checkpoint, num_rows=2)
    for i in (0, 1):
        driver.add(i, PROMPTS[2])
    driver.generate([0, 1], 2)
    driver.fork(0, 2, 2)
    driver.fork(0, 3, 3)
    driver.release(1)
    driver.run([(2, 1)])
    outputs = driver.generate([0, 2, 3], NUM_TOKENS)
    assert outputs[0] == outputs[1] == outputs[2]


def test_a_sequence_without_a_number_fails_alone(tmp_path: Path, checkpoint: Path, alone: list[list[int]]) -> None:
    tensors = random_tensors(llama_config())
    tensors["model.embed_tokens.weight"][319] = math.nan
    driver = Driver(write_checkpoint(tmp_path / "nan", llama_config(), tensors))
    driver.add(0, PROMPTS[2], SEEDED, seed=102)
    driver.add(1, [5, 319, 6])
    result = driver.run([(0, 8), (1, 3)])
    assert result.errors == {1: UNUSABLE_LOGITS}
    assert result.seq_ids == [0, 1] and result.sampled_token_ids[1] == []
    driver.release(1)
    assert driver.generate([0], NUM_TOKENS) == [alone[2]]


def test_ids_that_the_tokenizer_lacks_are_never_drawn(checkpoint: Path) -> None:
    driver = Driver(checkpoint, vocab_limit=60)
    driver.add(0, PROMPTS[0], SamplingParams(temperature=3.0, prompt_logprobs=2, logprobs=3), seed=1)
    result = driver.run([(0, 23)])
    for entry in result.prompt_logprobs[0] + result.logprobs[0]:
        assert all(t < 60 for t in entry.token_ids[1:])
        assert all(math.isfinite(v) for v in entry.logprobs)
    assert max(driver.generate([0], 40)[0]) < 60


def test_decisions_that_make_no_sense_are_refused(checkpoint: Path) -> None:
    def step(**fields: object) -> None:
        execute(driver.runner, SchedulerOutput(step_id=1, **fields))

    driver = Driver(checkpoint)
    driver.add(0, PROMPTS[2])
    driver.run([(0, 4)])
    with pytest.raises(KeyError, match="sequence 9 has no row"):
        step(seq_ids=[9], num_scheduled=[1], num_computed=[0], new_block_ids=[[]])
    with pytest.raises(ValueError, match="no block"):
        step(seq_ids=[0], num_scheduled=[4], num_computed=[4], new_block_ids=[[]])
    with pytest.raises(ValueError, match="does not have"):
        step(seq_ids=[0], num_scheduled=[5], num_computed=[4], new_block_ids=[[40, 41]])
    with pytest.raises(ValueError, match="already has a row"):
        step(forks=[(0, 0, 1)])
