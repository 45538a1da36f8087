"""Fields of requests against a real engine with a random model: what they change, and what they must not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.helpers.byte_tokenizer import BOS_ID, EOS_ID, IM_END_ID, VOCAB_SIZE, byte_ids
from tests.helpers.server import ServerProcess
from tests.helpers.streams import check_error, check_stream, strict_json

PROMPT = "The number of the thing is"


class Asker:
    """Short ways to ask the server."""

    def __init__(self, server: ServerProcess):
        self.client = httpx.Client(base_url=server.base_url, timeout=60)

    def post(self, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def whole(self, **body: Any) -> dict[str, Any]:
        """The answer of /v1/completions."""
        response = self.post(**{"prompt": PROMPT, "max_tokens": 12, **body})
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = strict_json(response.content)
        return answer

    def texts(self, **body: Any) -> list[str]:
        return [choice["text"] for choice in self.whole(**body)["choices"]]

    def ids(self, **body: Any) -> list[list[int]]:
        return [choice["token_ids"] for choice in self.whole(return_token_ids=True, **body)["choices"]]


@pytest.fixture(scope="module")
def ask(tiny: ServerProcess) -> Iterator[Asker]:
    asker = Asker(tiny)
    canary = asker.texts(temperature=0)
    yield asker
    assert asker.texts(temperature=0) == canary
    assert asker.client.get("/health").status_code == 200
    asker.client.close()


# -- logprobs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [PROMPT, [BOS_ID, *byte_ids("some ids")], [PROMPT, "another, longer prompt é"]])
def test_echo_with_logprobs_lines_up(ask: Asker, prompt: Any) -> None:  # C022
    fixed = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    answer = ask.whole(**fixed, return_token_ids=True)
    for choice in answer["choices"]:
        columns = choice["logprobs"]
        num_tokens = len(choice["prompt_token_ids"]) + 3
        assert {len(column) for column in columns.values()} == {num_tokens}
        assert columns["token_logprobs"][0] is None
        assert columns["top_logprobs"][0] is None
        assert all(isinstance(value, float) for value in columns["token_logprobs"][1:])
        text = choice["text"]
        for token, offset in list(zip(columns["tokens"], columns["text_offset"], strict=True))[1:]:
            assert text.startswith(token, offset) or token.startswith("bytes:")
        assert all(len(top) in (2, 3) for top in columns["top_logprobs"][1:])
        # The output's logprobs are what the same tokens get as a prompt.
        again = ask.whole(
            prompt=[*choice["prompt_token_ids"], *choice["token_ids"]], echo=True, logprobs=2, max_tokens=0
        )["choices"][0]["logprobs"]
        assert again["token_logprobs"][1:] == pytest.approx(columns["token_logprobs"][1:], abs=1e-4)
    raw = ask.post(**fixed, stream=True).content
    stream = check_stream(raw, chat=False, num_choices=len(answer["choices"]))
    for choice in answer["choices"]:
        streamed = stream.choices[choice["index"]]
        assert streamed.text == choice["text"]
        assert [row[0] for row in streamed.logprobs] == choice["logprobs"]["tokens"]
        assert [row[2] for row in streamed.logprobs] == choice["logprobs"]["text_offset"]


def test_special_tokens_that_the_client_wrote_show_in_echo(ask: Asker) -> None:
    prompt = "<|im_start|>user\nhi<|im_end|>"
    choice = ask.whole(prompt=prompt, echo=True, logprobs=0, max_tokens=0)["choices"][0]
    assert choice["text"] == prompt
    columns = choice["logprobs"]
    for token, offset in list(zip(columns["tokens"], columns["text_offset"], strict=True))[1:]:
        assert prompt.startswith(token, offset)
    assert columns["text_offset"][-1] == len(prompt) - len("<|im_end|>")


def test_prompt_logprobs(ask: Asker) -> None:
    choice = ask.whole(prompt_logprobs=2, return_token_ids=True, temperature=0)["choices"][0]
    entries = choice["prompt_logprobs"]
    assert len(entries) == len(choice["prompt_token_ids"])
    assert entries[0] is None
    for token_id, entry in zip(choice["prompt_token_ids"][1:], entries[1:], strict=True):
        own = entry[str(token_id)]
        assert set(own) == {"logprob", "rank", "decoded_token"}
        assert len(entry) in (2, 3)
        assert sorted(e["rank"] for e in entry.values())[:2] == [1, 2]
    check_error(ask.post(prompt="a", prompt_logprobs=1, stream=True), 400, param="prompt_logprobs")


@pytest.mark.parametrize(
    "body", [{"top_k": 1}, {"logit_bias": {str(i): -100 for i in range(1, VOCAB_SIZE)}}, {"allowed_token_ids": [70]}]
)
def test_impossible_tokens_do_not_break_json(ask: Asker, body: dict[str, Any]) -> None:  # C023
    fixed = {"logprobs": 5, "echo": True, "max_tokens": 3, "ignore_eos": True, **body}
    ask.whole(**fixed)
    check_stream(ask.post(prompt=PROMPT, stream=True, **fixed).content, chat=False)


@pytest.mark.parametrize(("name", "value"), [("logprobs", 21), ("logprobs", 10**6), ("prompt_logprobs", 10**6)])
def test_too_many_logprobs(ask: Asker, name: str, value: int) -> None:  # C027
    error = check_error(ask.post(prompt="a", **{name: value}), 400, param=name)
    assert "20" in error["message"]


def test_tokens_named_by_their_ids(ask: Asker) -> None:
    choice = ask.whole(logprobs=1, return_tokens_as_token_ids=True, return_token_ids=True, temperature=0)["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in choice["token_ids"]]


# -- sampling ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1e-8, 1e-5, 1e-4])
@pytest.mark.parametrize("top_p", [1.0, 0.0001])
def test_tiny_temperatures_are_greedy(ask: Asker, temperature: float, top_p: float) -> None:  # C029
    assert ask.texts(temperature=temperature, top_p=top_p) == ask.texts(temperature=0)


def test_values_that_switch_a_filter_off(ask: Asker) -> None:  # C031
    fixed = {"seed": 5, "temperature": 1.5}
    outputs = [ask.texts(**fixed, top_k=k) for k in (0, -1, VOCAB_SIZE, VOCAB_SIZE + 1, 10**9)]
    assert outputs.count(outputs[0]) == len(outputs)
    assert ask.texts(**fixed, top_k=1) == ask.texts(temperature=0)
    assert ask.texts(**fixed, min_p=1.0) == ask.texts(temperature=0)
    assert ask.texts(**fixed, min_p=0) == outputs[0]


def test_seeds(ask: Asker) -> None:  # C036, C038
    fixed = {"temperature": 1.5, "max_tokens": 10}
    assert len({ask.texts(**fixed)[0] for _ in range(20)}) >= 15
    assert len({ask.texts(**fixed, seed=0)[0] for _ in range(3)}) == 1
    eight = ask.texts(**fixed, seed=1234, n=8)
    assert len(set(eight)) >= 7
    assert ask.texts(**fixed, seed=1234, n=8) == eight
    raw = ask.post(prompt=PROMPT, stream=True, n=8, seed=1234, **fixed).content
    stream = check_stream(raw, chat=False, num_choices=8)
    assert [stream.choices[i].text for i in range(8)] == eight


@pytest.mark.parametrize("temperature", [0, 1])
def test_logit_bias(ask: Asker, temperature: float) -> None:  # C032
    sure = ask.ids(logit_bias={"70": 100}, temperature=temperature)[0]
    assert sure == [70] * 12
    favourite = ask.ids(temperature=0)[0][0]
    assert favourite not in ask.ids(logit_bias={str(favourite): -100}, temperature=temperature)[0]


def test_allowed_token_ids(ask: Asker) -> None:
    assert set(ask.ids(allowed_token_ids=[70, 71], temperature=2, seed=1)[0]) == {70, 71}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logit_bias", {str(VOCAB_SIZE + 7): -100}),
        ("stop_token_ids", [VOCAB_SIZE]),
        ("stop_token_ids", [2**40]),
        ("allowed_token_ids", [VOCAB_SIZE + 3]),
        ("prompt", [-1]),
        ("prompt", [[-1]]),
        ("prompt", [VOCAB_SIZE]),
        ("prompt", [2**63]),
        ("prompt", [10**30]),
    ],
    ids=str,
)
def test_ids_outside_the_vocabulary(ask: Asker, name: str, value: Any) -> None:  # C032, C033, C071
    check_error(ask.post(**{"prompt": "a", name: value}), 400, param=name)
    assert ask.post(prompt=[VOCAB_SIZE - 1], max_tokens=1).status_code == 200


def test_both_ends_of_a_text_are_masked_by_min_tokens(ask: Asker) -> None:  # C012, C013
    for end in (EOS_ID, IM_END_ID):
        ids = ask.ids(logit_bias={str(end): 100}, min_tokens=5, max_tokens=8)[0]
        assert end not in ids[:5]
        assert ids[5] == end
        assert len(ask.ids(logit_bias={str(end): 100}, ignore_eos=True, max_tokens=8)[0]) == 8


def test_best_of_returns_the_most_likely(ask: Asker) -> None:  # C039
    fixed = {"seed": 3, "temperature": 1.5, "logprobs": 0, "ignore_eos": True}
    four = ask.whole(**fixed, n=4)["choices"]
    means = {c["text"]: sum(c["logprobs"]["token_logprobs"]) / len(c["logprobs"]["tokens"]) for c in four}
    answer = ask.whole(**fixed, n=2, best_of=4)
    assert answer["usage"]["completion_tokens"] == 4 * 12
    best = answer["choices"]
    assert [choice["index"] for choice in best] == [0, 1]
    assert [choice["text"] for choice in best] == sorted(means, key=lambda text: -means[text])[:2]
    check_error(ask.post(prompt="a", best_of=1, n=2), 400, param="best_of")
    check_error(ask.post(prompt="a", best_of=4, stream=True), 400, param="best_of")
    assert ask.post(prompt="a", best_of=3, n=3, temperature=0, stream=True, max_tokens=2).status_code == 200


def test_beam_search(ask: Asker) -> None:
    fixed = {"use_beam_search": True, "n": 3, "max_tokens": 6}
    texts = ask.texts(**fixed)
    assert len(set(map(tuple, ask.ids(**fixed)))) == 3
    assert ask.texts(**fixed, temperature=0) == texts
    assert ask.texts(use_beam_search=True, beam_width=3, max_tokens=6) == texts[:1]
    assert ask.texts(use_beam_search=True, best_of=3, max_tokens=6) == texts[:1]
    stream = check_stream(ask.post(prompt=PROMPT, stream=True, **fixed).content, chat=False, num_choices=3)
    assert [stream.choices[i].text for i in range(3)] == texts
    check_error(ask.post(prompt="a", use_beam_search=True, n=3, beam_width=2), 400, param="n")
    check_error(ask.post(prompt="a", use_beam_search=True, temperature=0.5), 400, param="temperature")


# -- prompts ----------------------------------------------------------------------------------------------------------


def test_lists_of_prompts(ask: Asker) -> None:  # C045
    prompts = ["one:", "two two:", "three:"]
    fixed = {"n": 2, "best_of": 2, "echo": True, "seed": 1, "max_tokens": 4}
    answer = ask.whole(prompt=prompts, **fixed)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    for choice in answer["choices"]:
        assert choice["text"].startswith(prompts[choice["index"] // 2])
    lone = [ask.whole(prompt=prompt, **fixed) for prompt in prompts]
    assert [c["text"] for one in lone for c in one["choices"]] == [c["text"] for c in answer["choices"]]
    assert answer["usage"]["prompt_tokens"] == sum(one["usage"]["prompt_tokens"] for one in lone)


def test_one_prompt_too_long_fails_the_list(ask: Asker) -> None:  # C018
    error = check_error(ask.post(prompt=["short", "long " * 600, "short"]), 400, param="prompt")
    assert error["code"] == "context_length_exceeded"
    wait_idle(ask)


@pytest.mark.parametrize("prompt", ["", [""], ["a", ""]])
def test_an_empty_prompt_is_bos_alone(ask: Asker, prompt: Any) -> None:  # C070
    assert ask.post(prompt=prompt, max_tokens=1).status_code == 200
    check_error(ask.post(prompt=prompt, max_tokens=1, add_special_tokens=False), 400, param="prompt")


def test_special_tokens_are_added_where_wanted(ask: Asker) -> None:  # C063
    def prompt_ids(**body: Any) -> list[int]:
        ids: list[int] = ask.whole(return_token_ids=True, max_tokens=1, **body)["choices"][0]["prompt_token_ids"]
        return ids

    assert prompt_ids(prompt="ab") == [BOS_ID, *byte_ids("ab")]
    assert prompt_ids(prompt="ab", add_special_tokens=False) == byte_ids("ab")
    assert prompt_ids(prompt="uvwxyz", truncate_prompt_tokens=3) == byte_ids("xyz")
    assert prompt_ids(prompt="uvwxyz", truncate_prompt_tokens=3, truncation_side="right") == [BOS_ID, *byte_ids("uv")]
    assert len(prompt_ids(prompt="a" * 2000, truncate_prompt_tokens=-1)) == 511
    for body in ({"prompt": "héllo", "add_special_tokens": False}, {"prompt": "the thing"}):
        count = ask.post("/tokenize", **body).json()["count"]
        assert count == ask.whole(**body)["usage"]["prompt_tokens"]


def test_chat_prompts_are_what_the_template_wrote(ask: Asker) -> None:  # C063
    messages = [{"role": "system", "content": "Be."}, {"role": "user", "content": "A"}]
    body = {"messages": messages, "max_tokens": 1, "return_token_ids": True}
    ids = ask.post("/v1/chat/completions", **body).json()["prompt_token_ids"]
    text = "<|im_start|>system\nBe.<|im_end|>\n<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\n"
    assert ids == ask.post("/tokenize", prompt=text, add_special_tokens=False).json()["tokens"]
    assert ids == ask.post("/tokenize", messages=messages).json()["tokens"]
    assert BOS_ID not in ids
    parts = [{"type": "text", "text": "Be."}]
    same = ask.post(
        "/v1/chat/completions", **{**body, "messages": [{"role": "developer", "content": parts}, messages[1]]}
    )
    assert same.json()["prompt_token_ids"] == ids


def test_going_on_with_the_last_message(ask: Asker) -> None:
    messages = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "I am"}]
    fixed = {"messages": messages, "continue_final_message": True, "max_tokens": 4, "temperature": 0}
    answer = ask.post("/v1/chat/completions", **fixed, return_token_ids=True).json()
    text = "<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\nI am"
    tokens = ask.post("/tokenize", prompt=text, add_special_tokens=False).json()["tokens"]
    assert answer["prompt_token_ids"] == tokens
    echoed = ask.post("/v1/chat/completions", **fixed, echo=True).json()
    assert echoed["choices"][0]["message"]["content"] == "I am" + answer["choices"][0]["message"]["content"]
    both = ask.post("/v1/chat/completions", **fixed, add_generation_prompt=True)
    check_error(both, 400, param="continue_final_message")
    alone = ask.post("/v1/chat/completions", messages=messages[:1], echo=True)
    check_error(alone, 400, param="echo")


@pytest.mark.parametrize("stream", [False, True])
def test_what_does_not_fit_is_refused_with_the_numbers(ask: Asker, stream: bool) -> None:  # C016
    ids = [BOS_ID, *byte_ids("x" * 499)]
    error = check_error(ask.post(prompt=ids, max_tokens=20, stream=stream), 400, param="max_tokens")
    assert error["code"] == "context_length_exceeded"
    assert "500" in error["message"]
    assert "512" in error["message"]
    error = check_error(ask.post(prompt=ids + ids, max_tokens=1, stream=stream), 400, param="prompt")
    assert "1000" in error["message"]
    check_error(ask.post(prompt=ids + byte_ids("x" * 12), max_tokens=1, stream=stream), 400, param="prompt")
    error = check_error(
        ask.post("/v1/chat/completions", messages=[{"role": "user", "content": "x" * 600}], stream=stream), 400
    )
    assert error["param"] == "messages"


@pytest.mark.parametrize("free", [1, 2])
def test_the_last_position_can_be_used(ask: Asker, free: int) -> None:  # C015
    ids = [BOS_ID, *byte_ids("x" * (511 - free))]
    answer = ask.whole(prompt=ids, max_tokens=free, ignore_eos=True)
    assert answer["usage"]["total_tokens"] == 512
    assert answer["choices"][0]["finish_reason"] == "length"


def test_too_many_choices_are_refused_with_the_limit(ask: Asker) -> None:
    error = check_error(ask.post(prompt="a", n=65), 400, param="n")
    assert "64" in error["message"]


# -- together ---------------------------------------------------------------------------------------------------------


def wait_idle(ask: Asker) -> None:
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        gauges = metrics(ask)
        if not any(gauges[name] for name in names):
            return
        time.sleep(0.02)
    raise AssertionError({name: gauges[name] for name in names})


def metrics(ask: Asker) -> dict[str, float]:
    """Every sample of a scrape; labels but model_name stay in the name."""
    samples = {}
    for line in ask.client.get("/metrics").text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            samples[name.replace('{model_name="tiny"}', "")] = float(value)
    return samples


@pytest.mark.parametrize(
    "body",
    [
        {"stream": True},
        {},
        {"n": 3},
        {"best_of": 3},
        {"use_beam_search": True, "n": 3},
        {"prompt": ["a", "b", "c"]},
        {"prompt": "p" * 480, "max_tokens": 30},
    ],
    ids=str,
)
def test_a_client_that_leaves_gives_everything_back(ask: Asker, body: dict[str, Any]) -> None:  # C072
    body = {"prompt": PROMPT, "max_tokens": 450, "ignore_eos": True, **body}
    for wait in (0.02, 0.1, 0.2):
        with (
            pytest.raises(httpx.ReadTimeout),
            httpx.stream(
                "POST", f"{ask.client.base_url}/v1/completions", json=body, timeout=httpx.Timeout(10, read=wait)
            ) as response,
        ):
            for _ in response.iter_bytes():
                raise httpx.ReadTimeout("that is enough")
            raise httpx.ReadTimeout("answered before we left")
        wait_idle(ask)


def test_gauges_fall_when_everybody_leaves_at_once(ask: Asker) -> None:
    async def everybody() -> None:
        async with httpx.AsyncClient(base_url=ask.client.base_url, timeout=60) as client:
            body = {"prompt": PROMPT, "max_tokens": 450, "ignore_eos": True, "stream": True}
            streams = [client.stream("POST", "/v1/completions", json=body) for _ in range(32)]
            await asyncio.gather(*(stream.__aenter__() for stream in streams))
            await asyncio.gather(*(stream.__aexit__(None, None, None) for stream in streams))

    num_series = len(metrics(ask))
    asyncio.run(everybody())
    wait_idle(ask)
    assert len(metrics(ask)) <= num_series + 10, "series must not grow with requests"


def test_equal_ids_at_the_same_time_get_their_own_text(ask: Asker) -> None:  # C100
    prompts = [f"prompt number {i}" for i in range(8)]
    alone = [ask.texts(prompt=prompt, temperature=0)[0] for prompt in prompts]

    async def together() -> list[str]:
        async with httpx.AsyncClient(base_url=ask.client.base_url, timeout=60) as client:
            bodies = [{"prompt": p, "temperature": 0, "max_tokens": 12, "request_id": "same"} for p in prompts]
            answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
        return [answer.json()["choices"][0]["text"] for answer in answers]

    assert asyncio.run(together()) == alone


def test_totals_agree_with_usage(ask: Asker) -> None:  # C114
    wait_idle(ask)
    before = metrics(ask)
    usages = [ask.whole(n=3, seed=1)["usage"], ask.whole(prompt=["a", "b"])["usage"]]
    usages.append(ask.whole(n=1, best_of=2)["usage"])
    options = {"stream": True, "stream_options": {"include_usage": True}}
    usages.append(check_stream(ask.post(prompt=PROMPT, **options).content, chat=False).usage)
    check_error(ask.post(prompt="a", n=0), 400)
    wait_idle(ask)
    after = metrics(ask)

    def grown(name: str) -> float:
        return after.get(name, 0) - before.get(name, 0)

    assert grown("vllm:prompt_tokens_total") == sum(usage["prompt_tokens"] for usage in usages)
    assert grown("vllm:generation_tokens_total") == sum(usage["completion_tokens"] for usage in usages)
    assert grown("vllm:e2e_request_latency_seconds_count") == 5
    success = [name for name in after if name.startswith("vllm:request_success_total")]
    assert sum(map(grown, success)) == 7  # the choice that best_of discarded is no success
    assert all(grown(name) >= 0 for name in before if "_total" in name)


def test_a_cached_prefix_shows_in_the_usage(ask: Asker) -> None:  # C080
    prompt = "a prefix of some length, long enough for several blocks of sixteen tokens each"
    ask.whole(prompt=prompt, cache_salt="mine")
    again = ask.whole(prompt=prompt, cache_salt="mine")["usage"]
    assert again["prompt_tokens_details"]["cached_tokens"] >= 32
    other = ask.whole(prompt=prompt, cache_salt="other")["usage"]
    assert other["prompt_tokens_details"]["cached_tokens"] == 0
    assert ask.post("/reset_prefix_cache").json() == {"reset": True}
    assert ask.whole(prompt=prompt, cache_salt="mine")["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_hundreds_at_once_each_get_their_own_answer(ask: Asker) -> None:  # C102
    prompts = [f"{i} things and {i * i} more" for i in range(20)]
    alone = [ask.texts(prompt=prompt, temperature=0)[0] for prompt in prompts]
    assert len(set(alone)) >= 15

    async def one(client: httpx.AsyncClient, i: int) -> None:
        body = {"prompt": prompts[i % 20], "max_tokens": 12, "temperature": 0, "stream": i % 2 == 0}
        response = await client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        if i % 2 == 0:
            text = check_stream(response.content, chat=False, num_choices=1).choices[0].text
        else:
            text = response.json()["choices"][0]["text"]
        assert text == alone[i % 20]

    async def everybody() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=ask.client.base_url, timeout=120, limits=limits) as client:
            await asyncio.gather(*(one(client, i) for i in range(300)))

    asyncio.run(everybody())
    wait_idle(ask)
