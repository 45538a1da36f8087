from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path
from typing import Any

import pytest

from pagedserve.config import FrontConfig, SchedulerConfig
from pagedserve.engine.input_processor import INLINE_TEXT_LENGTH, InputProcessor, default_sampling_params, eos_ids
from pagedserve.engine.tokenizer import Tokenizer
from pagedserve.errors import ContextLengthError, RequestError
from pagedserve.model_files import TOKENIZER_FILES, ModelFiles
from pagedserve.sampling_params import BeamParams, SamplingParams
from pagedserve.sequence import Request
from pagedserve.step import KVCacheSpec, MemoryPlan
from tests.helpers.byte_tokenizer import BOS_ID, EOS_ID, IM_END_ID, VOCAB_SIZE, byte_ids, write_tokenizer

SPEC = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32", bytes_per_block=2048)
MODEL_VOCAB_SIZE = VOCAB_SIZE + 64


def model_files(folder: Path, **generation_config: Any) -> ModelFiles:
    return ModelFiles(
        kind="safetensors",
        path=folder,
        name="bytes",
        config={"vocab_size": MODEL_VOCAB_SIZE, "eos_token_id": IM_END_ID},
        generation_config=generation_config,
        weight_files=(),
        tokenizer_files={name: folder / name for name in TOKENIZER_FILES if (folder / name).is_file()},
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return model_files(folder)


@pytest.fixture(scope="module")
def tokenizer(files: ModelFiles) -> Tokenizer:
    return Tokenizer.load(files)


def make(
    tokenizer: Tokenizer,
    files: ModelFiles,
    *,
    max_model_len: int = 64,
    num_blocks: int = 100,
    front: FrontConfig | None = None,
    scheduler: SchedulerConfig | None = None,
) -> InputProcessor:
    plan = MemoryPlan(weights_bytes=0, kv_bytes=0, num_device_blocks=num_blocks, num_host_blocks=0, spec=SPEC)
    return InputProcessor(
        tokenizer,
        files,
        plan,
        max_model_len=max_model_len,
        front=front or FrontConfig(),
        scheduler=scheduler or SchedulerConfig(),
    )


@pytest.fixture(scope="module")
def processor(tokenizer: Tokenizer, files: ModelFiles) -> InputProcessor:
    return make(tokenizer, files)


def request(processor: InputProcessor, prompt: str | list[int] = "hi", **options: Any) -> Request:
    names = ("timeout", "priority", "cache_salt")
    passed = {name: options.pop(name) for name in names if name in options}
    return processor.process(prompt, SamplingParams(**options), request_id="r", **passed).request


def test_text_and_ids_become_the_same_request(processor: InputProcessor) -> None:
    from_text = processor.process("hello", SamplingParams(seed=3), request_id="r")
    assert from_text.prompt == "hello"
    ids = from_text.request.prompt_token_ids
    assert ids[0] == BOS_ID
    from_ids = processor.process(ids, SamplingParams(seed=3), request_id="r")
    assert from_ids.prompt is None
    assert from_ids.request.prompt_token_ids == ids
    assert from_ids.request.sampling_params == from_text.request.sampling_params


def test_unseeded_requests_get_seeds_of_their_own_and_seeds_are_kept(processor: InputProcessor) -> None:
    assert len({request(processor).seed for _ in range(20)}) == 20
    assert request(processor, seed=0).seed == 0


@pytest.mark.parametrize(
    "prompt", [[], [-1], [MODEL_VOCAB_SIZE], [2**63], [1.5], [True], ["a"], None, ("a",)], ids=repr
)
def test_prompts_that_are_no_prompts_are_refused(processor: InputProcessor, prompt: Any) -> None:
    with pytest.raises(RequestError) as caught:
        request(processor, prompt)
    assert caught.value.param == "prompt"


def test_the_last_id_of_the_model_may_stand_in_a_prompt(processor: InputProcessor) -> None:
    assert request(processor, [MODEL_VOCAB_SIZE - 1]).prompt_token_ids == [MODEL_VOCAB_SIZE - 1]


def test_an_empty_text_is_served_where_the_tokenizer_begins_with_bos(processor: InputProcessor, tmp_path: Path) -> None:
    # C070
    assert request(processor, "").prompt_token_ids == [BOS_ID]
    write_tokenizer(tmp_path, add_bos=False)
    files = model_files(tmp_path)
    with pytest.raises(RequestError, match="empty"):
        request(make(Tokenizer.load(files), files), "")


@pytest.mark.parametrize(
    "options",
    [
        {"stop_token_ids": (VOCAB_SIZE,)},
        {"stop_token_ids": (2**40,), "min_tokens": 1},
        {"allowed_token_ids": (3, VOCAB_SIZE + 3)},
        {"logit_bias": {VOCAB_SIZE + 7: -100.0}},
    ],
    ids=lambda o: next(iter(o)),
)
def test_ids_that_cannot_be_drawn_are_refused(processor: InputProcessor, options: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=str(VOCAB_SIZE - 1)) as caught:
        request(processor, **options)
    assert caught.value.param == next(iter(options))


@pytest.mark.parametrize("param", ["logprobs", "prompt_logprobs"])
def test_too_many_logprobs_are_refused_with_the_limit(processor: InputProcessor, param: str) -> None:
    assert request(processor, **{param: 20}).sampling_params is not None
    with pytest.raises(RequestError, match="20") as caught:
        request(processor, **{param: 21})
    assert caught.value.param == param


def test_prompt_logprobs_do_not_read_the_prefix_cache(processor: InputProcessor) -> None:
    assert request(processor).read_prefix_cache
    assert not request(processor, prompt_logprobs=0).read_prefix_cache


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(62, 2), (63, 1), (64, 0), (1, 63)])
def test_the_context_can_be_filled_exactly(processor: InputProcessor, num_prompt: int, max_tokens: int) -> None:
    assert request(processor, [5] * num_prompt, max_tokens=max_tokens).sampling_params.max_tokens == max_tokens


@pytest.mark.parametrize("num_prompt", [1, 50, 62, 63])
def test_no_max_tokens_means_all_that_fits(processor: InputProcessor, num_prompt: int) -> None:
    assert request(processor, [5] * num_prompt, max_tokens=None).sampling_params.max_tokens == 64 - num_prompt


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "param", "numbers"),
    [
        (50, 20, "max_tokens", {"50", "20", "70", "64"}),
        (70, 1, "prompt", {"70", "64"}),
        (64, 1, "prompt", {"64"}),
        (64, None, "prompt", {"64"}),
        (65, 0, "prompt", {"65", "64"}),
    ],
)
def test_what_does_not_fit_the_context_is_refused_with_the_numbers(
    processor: InputProcessor, num_prompt: int, max_tokens: int | None, param: str, numbers: set[str]
) -> None:
    with pytest.raises(ContextLengthError) as caught:
        request(processor, [5] * num_prompt, max_tokens=max_tokens)
    assert caught.value.param == param
    assert caught.value.code == "context_length_exceeded"
    assert numbers == set(re.findall(r"\d+", str(caught.value)))


def test_a_hopelessly_long_text_is_refused_before_it_is_tokenized(processor: InputProcessor) -> None:  # C107
    with pytest.raises(ContextLengthError, match="100000"):
        request(processor, "x" * 100_000)


def test_beams_that_cannot_be_in_the_pool_together_are_refused(tokenizer: Tokenizer, files: ModelFiles) -> None:
    processor = make(tokenizer, files, num_blocks=10)

    def beams(width: int, max_tokens: int | None) -> int | None:
        params = {"beam": BeamParams(width=width), "max_tokens": max_tokens}
        return request(processor, [5] * 32, **params).sampling_params.max_tokens

    # The prompt's two full blocks are shared; each beam needs one more.
    assert beams(8, 16) == 16
    with pytest.raises(ContextLengthError, match="11 KV blocks") as caught:
        beams(9, 16)
    assert caught.value.param == "beam_width"
    assert beams(4, None) == 32
    # Samples may wait for each other.
    assert request(processor, [5] * 32, n=9, max_tokens=16).sampling_params.n == 9


@pytest.mark.parametrize(
    ("options", "param"),
    [({"n": 5}, "n"), ({"n": 1, "best_of": 5}, "best_of"), ({"n": 1, "beam": BeamParams(width=5)}, "beam_width")],
)
def test_more_choices_than_run_at_once_are_refused(
    tokenizer: Tokenizer, files: ModelFiles, options: dict[str, Any], param: str
) -> None:
    processor = make(tokenizer, files, scheduler=SchedulerConfig(max_num_seqs=4))
    with pytest.raises(RequestError, match="4 at once") as caught:
        request(processor, **options)
    assert caught.value.param == param


def test_bad_words_are_banned_in_every_form_that_a_text_may_give_them(
    processor: InputProcessor, tokenizer: Tokenizer
) -> None:  # C034
    forms = request(processor, bad_words=("the moon",)).sampling_params.bad_words_token_ids
    bare = tuple(tokenizer.encode("the moon", add_special_tokens=False))
    spaced = tuple(tokenizer.encode(" the moon", add_special_tokens=False))
    assert {bare, spaced} <= set(forms)
    assert len(forms) == len(set(forms))
    assert all("the moon" in tokenizer.decode(form) for form in forms)


@pytest.mark.parametrize("options", [{"stop": ("a\ud83d",)}, {"bad_words": ("\ud83d",)}, {"cache_salt": "\ud83d"}])
def test_lone_surrogates_are_refused_wherever_they_are(processor: InputProcessor, options: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        request(processor, **options)
    assert caught.value.param == next(iter(options))
    with pytest.raises(RequestError) as caught:
        request(processor, "a\ud83d")
    assert caught.value.param == "prompt"


def test_control_characters_are_text(processor: InputProcessor) -> None:
    assert request(processor, "\x00\ufeff").prompt_token_ids == [BOS_ID, *byte_ids("\x00\ufeff")]


def test_deadlines_come_from_the_request_or_the_server(tokenizer: Tokenizer, files: ModelFiles) -> None:
    processor = make(tokenizer, files, scheduler=SchedulerConfig(request_timeout=100.0))
    now = time.monotonic()
    by_server, by_client = request(processor), request(processor, timeout=5)
    assert by_server.deadline is not None and by_server.deadline - by_server.arrival_time == pytest.approx(100.0)
    assert by_client.deadline is not None and by_client.deadline - by_client.arrival_time == pytest.approx(5.0)
    assert now <= by_client.arrival_time <= time.monotonic()
    assert request(make(tokenizer, files)).deadline is None


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), True, "5"], ids=repr)
def test_timeouts_that_are_no_time_are_refused(processor: InputProcessor, timeout: Any) -> None:
    with pytest.raises(RequestError) as caught:
        request(processor, timeout=timeout)
    assert caught.value.param == "timeout"


@pytest.mark.parametrize("priority", [True, 1.5, 2**40, "1"], ids=repr)
def test_priorities_are_small_integers(processor: InputProcessor, priority: Any) -> None:
    with pytest.raises(RequestError) as caught:
        request(processor, priority=priority)
    assert caught.value.param == "priority"


async def test_a_long_text_is_tokenized_off_the_loop_to_the_same_ids(tokenizer: Tokenizer, files: ModelFiles) -> None:
    # C107
    processor = make(tokenizer, files, max_model_len=100_000, num_blocks=10_000)
    text = "the moon is here " * (INLINE_TEXT_LENGTH // 8)
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    ticker = asyncio.create_task(tick())
    processed = await processor.process_async(text, SamplingParams(), request_id="r")
    ticker.cancel()
    assert processed.request.prompt_token_ids == tokenizer.encode(text)
    assert processed.prompt == text
    assert ticks > 1


def test_every_eos_id_of_the_model_counts(files: ModelFiles, tokenizer: Tokenizer) -> None:
    with_two = model_files(files.path, eos_token_id=[7, EOS_ID])
    assert eos_ids(with_two, tokenizer) == (7, EOS_ID, IM_END_ID)
    assert eos_ids(model_files(files.path), tokenizer) == (IM_END_ID, EOS_ID)
    assert eos_ids(model_files(files.path, eos_token_id=None), tokenizer) == (IM_END_ID, EOS_ID)


def test_defaults_of_the_generation_config_are_taken_unless_ignored(files: ModelFiles) -> None:  # C041
    with_defaults = model_files(
        files.path, temperature=0.2, top_k=1, repetition_penalty=1.1, top_p=1.0, max_new_tokens=99, do_sample=True
    )
    expected = {"temperature": 0.2, "top_k": 1, "repetition_penalty": 1.1, "max_tokens": 99}
    assert default_sampling_params(with_defaults, "auto") == expected
    assert default_sampling_params(with_defaults, "ignore") == {}
    broken = model_files(files.path, temperature="hot", top_k=1.5, min_p=2, top_p=None)
    assert default_sampling_params(broken, "auto") == {}
