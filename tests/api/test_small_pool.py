"""A server whose pool is far too small for its clients: answers, totals and gauges are those of a roomy one."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.helpers.server import ServerProcess, server_process
from tests.helpers.streams import Stream, check_error, check_stream

NUM_BLOCKS = 12
PROMPTS = ["a", "The number of", "to be or not to be", "one, two", "is it the end?", "there were other things"]
GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


@pytest.fixture(scope="module")
def tight(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The model of `tiny` with 12 blocks: two of the sequences below, not six."""
    flags = ("--num-device-blocks", str(NUM_BLOCKS), "--num-threads", "1", "--served-model-name", "tiny")
    flags += ("--kv-cache-dtype", "float32")  # as the roomy one
    steps = ("--max-num-batched-tokens", "32", "--max-num-seqs", "16", "--watermark", "0")
    with server_process(tiny_model, *flags, *steps, log=tmp_path_factory.mktemp("log") / "tight.log") as server:
        yield server


def totals(client: httpx.Client) -> dict[str, float]:
    """Every sample of a scrape, by its name and labels."""
    lines = [line for line in client.get("/metrics").text.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def gauge(samples: dict[str, float], name: str) -> float:
    return samples[f'{name}{{model_name="tiny"}}']


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def wait_idle(server: ServerProcess, seconds: float = 60.0) -> None:
    with httpx.Client(base_url=server.base_url) as client:
        wait_for(lambda: not any(gauge(totals(client), name) for name in GAUGES), seconds)


def ask_all(server: ServerProcess, bodies: list[dict[str, Any]]) -> list[httpx.Response]:
    """Every body at the same time."""

    async def together() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=server.base_url, timeout=120) as client:
            return await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))

    responses = asyncio.run(together())
    assert [response.status_code for response in responses] == [200] * len(bodies), responses[0].text
    return responses


class Scraper:
    """Scrapes while it is entered; no total may ever fall (C112)."""

    def __init__(self, server: ServerProcess):
        self.num_scrapes = 0
        self.fallen: list[str] = []
        self._url = server.base_url
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Scraper:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_done.set()
        self._thread.join()

    def _run(self) -> None:
        last: dict[str, float] = {}
        with httpx.Client(base_url=self._url) as client:
            while not self._is_done.wait(0.05):
                now = totals(client)
                names = [name for name in last if name.partition("{")[0].endswith(("_total", "_count", "_sum"))]
                self.fallen += [name for name in names if now[name] < last[name]]
                last, self.num_scrapes = now, self.num_scrapes + 1


GREEDY = {"max_tokens": 60, "temperature": 0, "ignore_eos": True, "logprobs": 2}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalties and min_tokens": {"frequency_penalty": 0.5, "repetition_penalty": 1.2, "min_tokens": 50},
    "seeded, two choices": {"temperature": 1.0, "seed": 7, "n": 2},
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_preempted_answers_are_those_of_a_roomy_server(
    tiny: ServerProcess, tight: ServerProcess, way: dict[str, Any]
) -> None:
    """C073, C112: text, logprobs and usage, streamed (no delta twice) and whole, with a stop string that occurs."""
    bodies = [{"prompt": prompt, **GREEDY, **way} for prompt in PROMPTS]
    roomy = [response.json() for response in ask_all(tiny, bodies)]
    # A stop that some answers have in their second half and others lack.
    text = roomy[0]["choices"][0]["text"]
    stop = next(text[i : i + 2] for i in range(len(text) // 2, len(text)) if text[i : i + 2].isprintable())
    bodies = [{**body, "stop": [stop]} for body in bodies]
    expected = [response.json() for response in ask_all(tiny, bodies)]
    assert "stop" in {choice["finish_reason"] for answer in expected for choice in answer["choices"]}
    with Scraper(tight) as scraper, httpx.Client(base_url=tight.base_url) as client:
        before = gauge(totals(client), "vllm:num_preemptions_total")
        whole = [response.json() for response in ask_all(tight, bodies)]
        options = {"stream": True, "stream_options": {"include_usage": True}}
        raw = ask_all(tight, [{**body, **options} for body in bodies])
        after = gauge(totals(client), "vllm:num_preemptions_total")
    assert after > before
    assert scraper.num_scrapes > 0
    assert scraper.fallen == []
    streams: list[Stream] = [check_stream(response.content, chat=False) for response in raw]
    for roomy_answer, answer, stream in zip(expected, whole, streams, strict=True):
        assert stream.usage is not None
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert answer["usage"][name] == stream.usage[name] == roomy_answer["usage"][name]
        for calm, choice in zip(roomy_answer["choices"], answer["choices"], strict=True):
            streamed = stream.choices[choice["index"]]
            assert choice["text"] == streamed.text == calm["text"]
            assert choice["finish_reason"] == streamed.finish_reason == calm["finish_reason"]
            assert choice["logprobs"]["tokens"] == [row[0] for row in streamed.logprobs] == calm["logprobs"]["tokens"]
            numbers = calm["logprobs"]["token_logprobs"]
            assert choice["logprobs"]["token_logprobs"] == pytest.approx(numbers, abs=1e-4)
    wait_idle(tight)


def test_more_choices_than_the_pool_holds(tiny: ServerProcess, tight: ServerProcess) -> None:
    """C076: sixteen samples of 50 tokens need over three times the pool, and are those of a roomy server."""
    body = {"prompt": "number", "n": 16, "seed": 3, "temperature": 1.2, "max_tokens": 40, "ignore_eos": True}
    [calm], [squeezed] = ask_all(tiny, [body]), ask_all(tight, [body])
    texts = [choice["text"] for choice in squeezed.json()["choices"]]
    assert texts == [choice["text"] for choice in calm.json()["choices"]]
    assert len(set(texts)) >= 14
    with httpx.Client(base_url=tight.base_url) as client:
        error = check_error(client.post("/v1/completions", json={**body, "n": 17}), 400, param="n")
        assert "16" in error["message"]
    wait_idle(tight)


def test_what_exceeds_the_pool_is_refused_and_the_rest_served(tight: ServerProcess) -> None:
    """C074: the pool caps the context; a request that fills it to the last slot ends, and short ones get through."""
    limit = NUM_BLOCKS * 16
    with httpx.Client(base_url=tight.base_url, timeout=60) as client:
        assert client.get("/v1/models").json()["data"][0]["max_model_len"] == limit
        error = check_error(client.post("/v1/completions", json={"prompt": [5] * 300, "max_tokens": 5}), 400)
        assert error["code"] == "context_length_exceeded"
        assert str(limit) in error["message"]
        error = check_error(client.post("/v1/completions", json={"prompt": [5] * 100, "max_tokens": 100}), 400)
        assert error["param"] == "max_tokens"
    short = {"prompt": "hi", "max_tokens": 5, "ignore_eos": True}
    long = {"prompt": [5] * 100, "max_tokens": limit - 100, "ignore_eos": True}
    answers = [response.json() for response in ask_all(tight, [long, short, long, short])]
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [92, 5, 92, 5]
    wait_idle(tight)


def test_gauges_fall_when_every_client_leaves_at_once(tight: ServerProcess) -> None:
    """C113: 32 streams, running, waiting and preempted; nothing else is asked afterwards."""
    bodies = [{"prompt": f"{i}", "max_tokens": 180, "ignore_eos": True, "stream": True} for i in range(32)]

    async def leave() -> None:
        async with httpx.AsyncClient(base_url=tight.base_url, timeout=60) as client:
            tasks = [asyncio.create_task(client.post("/v1/completions", json=body)) for body in bodies]
            while gauge(totals(watch), "vllm:num_requests_waiting") < 8:
                await asyncio.sleep(0.01)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    with httpx.Client(base_url=tight.base_url) as watch:
        asyncio.run(leave())
    wait_idle(tight)


def test_totals_are_the_sums_of_what_clients_were_told(tight: ServerProcess) -> None:
    """C114, C112: streams, lists, choices, best_of, stops, beams and prompts that are only scored, under preemption."""
    ways: list[dict[str, Any]] = [
        {},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"n": 3},
        {"best_of": 3, "n": 2},
        {"prompt": ["a", "bc", "def"]},
        {"stop": ["e", "a", "t"]},
        {"use_beam_search": True, "n": 2, "max_tokens": 8},
        {"max_tokens": 0, "echo": True, "logprobs": 1},
    ]
    bodies = [{"prompt": f"prompt {i}", "max_tokens": 20 + i, **ways[i % len(ways)]} for i in range(48)]
    wait_idle(tight)
    with httpx.Client(base_url=tight.base_url) as client:
        before = totals(client)
        with Scraper(tight) as scraper:
            responses = ask_all(tight, bodies)
            check_error(client.post("/v1/completions", json={"prompt": "a", "n": 0}), 400)
            check_error(client.post("/v1/completions", json={"prompt": [5] * 500}), 400)
        wait_idle(tight)
        after = totals(client)
    assert scraper.fallen == []
    usages, num_choices, num_requests = [], 0, 0
    for body, response in zip(bodies, responses, strict=True):
        if body.get("stream"):
            stream = check_stream(response.content, chat=False)
            usages.append(stream.usage or {})
            num_choices += len(stream.choices)
        else:
            usages.append(response.json()["usage"])
            num_choices += len(response.json()["choices"])
        num_requests += len(body["prompt"]) if isinstance(body["prompt"], list) else 1

    def grown(name: str) -> float:
        names = [key for key in after if key.partition("{")[0] == name]
        return sum(after[key] - before.get(key, 0) for key in names)

    assert grown("vllm:prompt_tokens_total") == sum(usage["prompt_tokens"] for usage in usages)
    assert grown("vllm:generation_tokens_total") == sum(usage["completion_tokens"] for usage in usages)
    assert grown("vllm:request_success_total") == num_choices
    assert grown("vllm:e2e_request_latency_seconds_count") == num_requests


def test_connections_and_series_do_not_pile_up(tight: ServerProcess) -> None:
    """C102, C115: hundreds of clients at once, then many requests on one connection; no file or series stays."""
    process = psutil.Process(tight.process.pid)
    with httpx.Client(base_url=tight.base_url) as client:
        wait_idle(tight)
        before, series = process.num_fds(), len(totals(client))
        ask_all(tight, [{"prompt": f"{i}", "max_tokens": 2, "stream": i % 2 == 0} for i in range(200)])
        for i in range(100):
            assert client.post("/v1/completions", json={"prompt": f"{i}", "max_tokens": 1}).status_code == 200
        wait_for(lambda: process.num_fds() <= before + 2)
        # Status classes and finish reasons that had not occurred before may have come.
        assert len(totals(client)) <= series + 12
    wait_idle(tight)


def test_nothing_but_the_api_listens(tight: ServerProcess) -> None:
    """C110: the core and the server talk over a pair of inherited sockets."""
    parent = psutil.Process(tight.process.pid)
    listening = {
        (connection.laddr.ip, connection.laddr.port)
        for process in (parent, *parent.children(recursive=True))
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {("127.0.0.1", tight.port)}
