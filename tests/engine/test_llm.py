from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagedserve import LLM, SamplingParams
from pagedserve.engine.llm import make_config
from pagedserve.errors import ConfigError, ContextLengthError, ModelLoadError, ModelNotFoundError, RequestError
from pagedserve.sampling_params import BeamParams
from tests.helpers.byte_tokenizer import BOS_ID, EOS_ID, IM_END_ID, byte_ids
from tests.helpers.checkpoints import bigram_llama, scripted_llama, tiny_llama

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def load(model: Path, **settings: Any) -> LLM:
    return LLM(str(model), **{"num_device_blocks": 200, "num_threads": 1, **settings})


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with load(tiny_model) as loaded:
        yield loaded


def assert_idle(llm: LLM) -> None:
    """Nothing is left of any request, and the accounts add up."""
    core = llm.engine.client.core
    core.check()
    stats = core.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_swapped) == (0, 0, 0)
    assert stats.kv_cache_usage == 0.0
    assert llm.engine.num_unfinished_requests == 0


def test_a_stop_string_cuts_a_beam_and_leaves_search_and_score_alone(llm: LLM) -> None:
    asked = SamplingParams(n=3, beam=BeamParams(width=3), max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=1)
    [whole] = llm.generate("beams", asked, use_tqdm=False)
    stop = whole.outputs[1].text[4:6]
    [cut] = llm.generate("beams", asked.with_(stop=(stop,)), use_tqdm=False)
    assert any(stop not in choice.text for choice in whole.outputs), "one beam is not cut"
    for ours, theirs in zip(cut.outputs, whole.outputs, strict=True):
        assert ours.cumulative_logprob == theirs.cumulative_logprob
        assert ours.token_ids == theirs.token_ids[: len(ours.token_ids)] and len(ours.logprobs) == len(ours.token_ids)
        assert ours.text == theirs.text.partition(stop)[0]
        assert (ours.finish_reason, ours.stop_reason) == (("stop", stop) if stop in theirs.text else ("length", None))
    assert_idle(llm)


# -- settings ---------------------------------------------------------------------------------------------------------


def test_settings_go_to_the_slice_that_knows_them() -> None:
    config = make_config(model="m", block_size=8, max_num_seqs=3, max_logprobs=5, device="cpu")
    assert (config.model.model, config.model.device) == ("m", "cpu")
    assert (config.cache.block_size, config.scheduler.max_num_seqs, config.front.max_logprobs) == (8, 3, 5)


@pytest.mark.parametrize(
    ("name", "hint"), [("max_model_length", "max_model_len"), ("blocksize", "block_size"), ("zzz", "known: model")]
)
def test_an_unknown_setting_is_answered_with_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        make_config(**{name: 1})


def test_no_setting_has_two_owners() -> None:
    import dataclasses

    from pagedserve.engine.llm import _SLICES

    names = [field.name for kind in _SLICES.values() for field in dataclasses.fields(kind)]
    assert len(names) == len(set(names))


def test_a_model_that_is_nowhere_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="nothing-here"):
        LLM(str(tmp_path / "nothing-here"))


# -- prompts and results ----------------------------------------------------------------------------------------------


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["long " * 20, "s", "middle " * 5, "x" * 60]
    lengths = [1, 9, 3, 30]
    params = [GREEDY.with_(max_tokens=length) for length in lengths]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)
    assert_idle(llm)


def test_one_prompt_as_text_or_ids_gives_one_result(llm: LLM) -> None:
    [by_text] = llm.generate("hello", GREEDY, use_tqdm=False)
    [by_ids] = llm.generate(by_text.prompt_token_ids, GREEDY, use_tqdm=False)
    assert by_text.outputs[0].token_ids == by_ids.outputs[0].token_ids
    assert llm.generate([], GREEDY) == []


def test_a_mistake_in_one_item_is_raised_before_anything_runs(llm: LLM) -> None:  # C018
    steps = llm.engine.client.core.scheduler.stats().num_steps
    with pytest.raises(ContextLengthError) as caught:
        llm.generate(["short", "x" * 5000, "short"], GREEDY, use_tqdm=False)
    assert caught.value.__notes__ == ["in prompt 1"]
    with pytest.raises(RequestError, match="3 prompts, but 2"):
        llm.generate(["a", "b", "c"], [GREEDY, GREEDY])
    assert llm.engine.client.core.scheduler.stats().num_steps == steps
    assert_idle(llm)


def test_more_prompts_than_the_queue_holds_are_all_answered(tiny_model: Path) -> None:
    with load(tiny_model, max_queue_len=3, max_num_seqs=2) as llm:
        outputs = llm.generate([f"{i}" for i in range(20)], GREEDY.with_(max_tokens=2), use_tqdm=False)
        assert [output.prompt for output in outputs] == [f"{i}" for i in range(20)]
        assert all(output.error is None for output in outputs)
        assert_idle(llm)


def test_an_interrupt_leaves_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, num_steps = llm.engine.step, 0

    def interrupted(**options: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 3:
            raise KeyboardInterrupt
        return step(**options)

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], GREEDY.with_(max_tokens=100), use_tqdm=False)
    monkeypatch.undo()
    assert_idle(llm)
    assert len(llm.generate("a", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 8


def test_conversations_go_through_the_chat_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    [output] = llm.chat(messages, GREEDY, use_tqdm=False)
    expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert output.prompt_token_ids == llm.get_tokenizer().encode(expected, add_special_tokens=False)
    several = llm.chat([messages, messages], GREEDY, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in several] == [output.outputs[0].token_ids] * 2
    with pytest.raises(RequestError):
        llm.chat([], GREEDY)


def test_long_work_shows_a_bar_on_stderr_unless_told_not_to(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm.generate(["a", "b"], GREEDY)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("pagedserve.engine.llm.BAR_DELAY_SECONDS", 0.0)
    llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""
    llm.generate(["a", "b"], GREEDY)
    captured = capsys.readouterr()
    assert "2/2" in captured.err and "tokens/s" in captured.err
    assert captured.out == ""


# -- tokens -----------------------------------------------------------------------------------------------------------


def test_seeds_repeat_and_choices_differ(llm: LLM) -> None:
    params = SamplingParams(n=4, temperature=1.5, seed=7, max_tokens=12, ignore_eos=True)
    first, second = (llm.generate("abc", params, use_tqdm=False)[0] for _ in range(2))
    ids = [choice.token_ids for choice in first.outputs]
    assert ids == [choice.token_ids for choice in second.outputs]
    assert len({tuple(i) for i in ids}) == 4
    # A choice does not depend on how many others there are.
    fewer = llm.generate("abc", params.with_(n=2), use_tqdm=False)[0]
    assert [choice.token_ids for choice in fewer.outputs] == ids[:2]
    unseeded = [llm.generate("abc", params.with_(n=1, seed=None), use_tqdm=False)[0] for _ in range(5)]
    assert len({tuple(o.outputs[0].token_ids) for o in unseeded}) == 5
    assert_idle(llm)


def test_best_of_returns_the_most_likely_of_what_n_would_give(llm: LLM) -> None:
    params = SamplingParams(n=4, temperature=1.0, seed=11, max_tokens=6, ignore_eos=True)
    everything = llm.generate("abc", params.with_(logprobs=0), use_tqdm=False)[0].outputs
    best = llm.generate("abc", params.with_(n=2, best_of=4), use_tqdm=False)[0].outputs
    ranked = sorted(everything, key=lambda c: -(c.cumulative_logprob or 0.0) / len(c.token_ids))
    assert [c.token_ids for c in best] == [c.token_ids for c in ranked[:2]]
    assert best[0].cumulative_logprob == pytest.approx(ranked[0].cumulative_logprob, abs=1e-5)
    assert llm.generate("abc", params, use_tqdm=False)[0].outputs[0].cumulative_logprob is None
    assert [c.index for c in best] == [0, 1]


def test_every_token_has_its_logprobs_and_every_prompt_token_too(llm: LLM) -> None:
    params = GREEDY.with_(logprobs=3, prompt_logprobs=2)
    [output] = llm.generate("hello world", params, use_tqdm=False)
    choice = output.outputs[0]
    assert choice.logprobs is not None and output.prompt_logprobs is not None
    assert [entry.token_ids[0] for entry in choice.logprobs] == choice.token_ids
    assert all(len(entry.token_ids) >= 3 and entry.rank == 1 for entry in choice.logprobs)
    assert choice.cumulative_logprob == pytest.approx(sum(e.logprobs[0] for e in choice.logprobs), abs=1e-4)
    assert output.prompt_logprobs[0] is None
    told = [entry.token_ids[0] for entry in output.prompt_logprobs if entry is not None]
    assert told == output.prompt_token_ids[1:]
    assert all(sum(map(math.exp, e.logprobs[1:])) <= 1 + 1e-5 for e in choice.logprobs)
    # What a prompt's position is told must be what generation told there.
    longer = output.prompt_token_ids + choice.token_ids
    [scored] = llm.generate(longer, GREEDY.with_(prompt_logprobs=0, max_tokens=0), use_tqdm=False)
    assert scored.prompt_logprobs is not None
    tail = [entry.logprobs[0] for entry in scored.prompt_logprobs[-len(choice.token_ids) :] if entry is not None]
    assert tail == pytest.approx([entry.logprobs[0] for entry in choice.logprobs], abs=1e-4)
    assert (scored.outputs[0].token_ids, scored.outputs[0].finish_reason) == ([], "length")
    assert_idle(llm)


def test_scripts_with_stops(tmp_path: Path) -> None:
    script = byte_ids("Total: 42\nResult: x, Result: y") + [EOS_ID] * 8
    prompt = [BOS_ID]
    with load(scripted_llama(tmp_path / "script", script)) as llm:

        def say(**options: Any) -> tuple[str, str | None, Any, int]:
            params = SamplingParams(temperature=0.0, **{"max_tokens": 60, **options})
            [output] = llm.generate(prompt, params, use_tqdm=False)
            choice = output.outputs[0]
            return choice.text, choice.finish_reason, choice.stop_reason, len(choice.token_ids)

        whole = "Total: 42\nResult: x, Result: y"
        text, reason, _, num_tokens = say()
        assert (text, reason, num_tokens) == (whole, "stop", len(whole) + 1)
        assert say(stop="\nResult:") == ("Total: 42", "stop", "\nResult:", len("Total: 42\nResult:"))
        assert say(stop="\nResult:", include_stop_str_in_output=True)[0] == "Total: 42\nResult:"
        assert say(stop=["2\nR", "zzz"])[:3] == ("Total: 4", "stop", "2\nR")
        assert say(stop="T")[:3] == ("", "stop", "T")
        assert say(stop="never", max_tokens=5)[:2] == ("Total", "length")
        assert say(stop="Total?", max_tokens=5)[:2] == ("Total", "length")
        assert say(stop="Result", min_tokens=18)[0] == "Total: 42\nResult: x, "
        comma = byte_ids(",")[0]
        assert say(stop_token_ids=[comma])[:3] == ("Total: 42\nResult: x", "stop", comma)
        # EOS may not come before min_tokens, and the model then has to say something else.
        assert say(min_tokens=len(whole) + 3)[3] >= len(whole) + 3
        assert say(ignore_eos=True, max_tokens=len(whole) + 4)[1:] == ("length", None, len(whole) + 4)
        assert_idle(llm)


def test_both_eos_ids_of_the_generation_config_end_a_text(tmp_path: Path) -> None:
    letters = byte_ids("abc")
    successors = list(range(320))
    successors[letters[0]], successors[letters[1]], successors[letters[2]] = letters[1], letters[2], IM_END_ID
    with load(bigram_llama(tmp_path / "bigram", successors)) as llm:
        [output] = llm.generate("a", SamplingParams(temperature=0.0), use_tqdm=False)
        assert output.outputs[0].text == "bc"
        assert output.outputs[0].token_ids == [*letters[1:], IM_END_ID]
        assert output.outputs[0].finish_reason == "stop"


def test_the_context_is_filled_to_the_last_position(tiny_model: Path) -> None:
    with load(tiny_model, max_model_len=64) as llm:
        for num_prompt in (62, 63):
            [output] = llm.generate([5] * num_prompt, GREEDY.with_(max_tokens=None), use_tqdm=False)
            assert len(output.outputs[0].token_ids) == 64 - num_prompt
            assert output.outputs[0].finish_reason == "length"


def test_a_pool_smaller_than_the_context_limits_the_context(tiny_model: Path) -> None:
    with load(tiny_model, num_device_blocks=8) as llm:
        assert llm.engine.max_model_len == 128
        [output] = llm.generate([5] * 100, GREEDY.with_(max_tokens=None), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 28
        with pytest.raises(ContextLengthError, match="128"):
            llm.generate([5] * 200, GREEDY)
        assert_idle(llm)


def test_ids_past_the_tokenizer_are_never_drawn(tmp_path: Path) -> None:
    from tests.helpers.checkpoints import llama_config, random_tensors, write_checkpoint

    config = llama_config(vocab_size=384)
    tensors = random_tensors(config)
    tensors["lm_head.weight"][320:] *= 50.0
    with load(write_checkpoint(tmp_path / "padded", config, tensors)) as llm:
        params = SamplingParams(temperature=1.0, n=8, max_tokens=16, ignore_eos=True, logprobs=5)
        for choice in llm.generate("abc", params, use_tqdm=False)[0].outputs:
            assert max(choice.token_ids) < 320
            assert all(max(entry.token_ids) < 320 for entry in choice.logprobs or [])


def test_a_closed_llm_says_so(tiny_model: Path) -> None:
    llm = load(tiny_model)
    llm.close()
    llm.close()
    with pytest.raises(Exception, match="shut down"):
        llm.generate("a", GREEDY, use_tqdm=False)


def test_random_weights_need_no_files_of_weights(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"no \*.safetensors files"):
        LLM(str(folder))
    with LLM(str(folder), load_format="dummy") as llm:
        output = llm.generate("hello", SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)[0]
    assert len(output.outputs[0].token_ids) == 3
