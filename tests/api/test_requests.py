"""What is under way and what became of it: `/v1/requests`, `/abort_requests`, `/load`."""

from __future__ import annotations

import threading
import time
from typing import Any

import httpx
import openai
import pytest

from pagedserve.api.request_log import Entry, RequestLog
from tests.api.conftest import Front
from tests.helpers.server import ServerProcess
from tests.helpers.streams import check_error, check_stream


def wait_for(front: Front, request_id: str, status: str) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        response = front.client.get(f"/v1/requests/{request_id}")
        if response.status_code == 200 and response.json()["status"] == status:
            return response.json()
        time.sleep(0.01)
    raise AssertionError(response.text)


def test_the_times_of_a_request(tiny: ServerProcess) -> None:
    prompt = "a prompt that was not seen before " * 4
    body = {"prompt": [prompt, "b"], "max_tokens": 8, "n": 2, "seed": 1, "ignore_eos": True}
    with httpx.Client(base_url=tiny.base_url, timeout=60) as client:
        usage = client.post("/v1/completions", json=body, headers={"X-Request-Id": "timed-1"}).json()["usage"]
        record = client.get("/v1/requests/timed-1").json()
        assert (record["status"], record["route"], record["model"]) == ("finished", "/v1/completions", "tiny")
        assert abs(record["created"] - time.time()) < 60
        assert 0 <= record["queued_seconds"] <= record["first_token_seconds"] <= record["finished_seconds"]
        assert (record["num_prompts"], record["num_preemptions"], record["num_wasted_tokens"]) == (2, 0, 0)
        for name in ("prompt_tokens", "completion_tokens"):
            assert record[name] == usage[name]
        assert record["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
        client.post("/v1/completions", json={**body, "stream": True}, headers={"X-Request-Id": "timed-2"})
        again = client.get("/v1/requests/timed-2").json()
        assert again["status"] == "finished"
        assert again["cached_tokens"] > 0
        listed = client.get("/v1/requests?limit=1").json()
        assert [entry["id"] for entry in listed["data"]] == ["timed-2"]
        assert listed["has_more"]
        load = client.get("/load").json()
        assert load["server_load"] == 0
        assert set(load) == {"server_load", "num_running", "num_waiting", "num_swapped", "kv_cache_usage"}


def test_requests_that_run_wait_or_failed(front: Front) -> None:
    clients = []
    for request_id, prompt in (("waits", "hang 0"), ("runs", "hang 2")):
        body = {"prompt": prompt, "request_id": request_id}
        clients.append(threading.Thread(target=front.complete, kwargs=body))
        clients[-1].start()
    assert wait_for(front, "runs", "running")["completion_tokens"] > 0
    assert wait_for(front, "waits", "queued")["first_token_seconds"] is None
    front.complete(prompt="fail EngineStepError 1", request_id="fails")
    assert wait_for(front, "fails", "failed")["finished_seconds"] is None
    aborted = front.client.post("/abort_requests", json={"request_ids": ["runs", "waits", "nope", "fails"]})
    assert aborted.json() == {"aborted": ["runs", "waits"]}
    for client in clients:
        client.join(20)
    assert wait_for(front, "runs", "failed")
    assert not front.engine.live


def test_an_aborted_request_is_told_so_and_not_tried_again(front: Front) -> None:
    num_seen = len(front.engine.seen)
    caught: list[openai.APIStatusError] = []

    def ask() -> None:
        with (
            openai.OpenAI(base_url=f"{front.base_url}/v1", api_key="none", max_retries=5) as client,
            pytest.raises(openai.APIStatusError) as raised,
        ):
            client.completions.create(model="fake", prompt="hang 1", extra_headers={"X-Request-Id": "mine"})
        caught.append(raised.value)

    asking = threading.Thread(target=ask)
    asking.start()
    wait_for(front, "mine", "queued")
    assert front.client.post("/abort_requests", json={"request_ids": ["mine"]}).json() == {"aborted": ["mine"]}
    asking.join(20)
    assert caught[0].status_code == 499
    assert caught[0].code == "aborted"
    assert len(front.engine.seen) == num_seen + 1


def test_an_aborted_stream_ends_with_an_error(front: Front) -> None:
    body = {"prompt": "hang 2", "stream": True, "request_id": "streamed"}
    with front.client.stream("POST", "/v1/completions", json=body) as response:
        parts = response.iter_raw()
        raw = next(parts)
        with httpx.Client(base_url=front.base_url) as other:
            assert other.post("/abort_requests", json={"request_ids": ["streamed"]}).json() == {"aborted": ["streamed"]}
        raw += b"".join(parts)
    error = check_stream(raw, chat=False).error
    assert error is not None and error["code"] == "aborted"


def test_mistakes(front: Front) -> None:
    check_error(front.client.get("/v1/requests/nope"), 404, param="request_id")
    check_error(front.client.get("/v1/requests?limit=0"), 400, param="limit")
    check_error(front.client.post("/abort_requests", json={}), 400, param="request_ids")
    check_error(front.client.post("/abort_requests", json={"request_ids": []}), 400, param="request_ids")
    check_error(front.client.post("/abort_requests", json={"request_ids": ["x"] * 2000}), 400, param="request_ids")


def test_the_log_is_bounded() -> None:
    log = RequestLog(3)
    entries = [Entry(name, "/", "m", 1) for name in ("a", "b", "a", "c", "d")]
    for entry in entries:
        log.add(entry)
    assert list(log) == entries[:1:-1]
    assert log.get("a") is entries[2]
    assert log.get("b") is None
    log.add(Entry("e", "/", "m", 1))
    assert log.get("a") is None
    assert len(log) == 3
