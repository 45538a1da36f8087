"""Batches: every line answered once, behind everybody else, whatever ends the server in between."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from pagedserve.api.batch import service
from pagedserve.sequence import IDLE_PRIORITY
from tests.api.conftest import Front, FrontFactory
from tests.helpers.server import server_process
from tests.helpers.streams import check_error, strict_json

URL = "/v1/completions"


def client_of(front: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{front.base_url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def client(front: Front) -> openai.OpenAI:
    return client_of(front)


def line(custom_id: str, url: str = URL, **body: object) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": {"prompt": "say x", **body}})


def create(client: openai.OpenAI, lines: list[str], **options: Any) -> Any:
    file = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    options = {"endpoint": URL, "completion_window": "24h", **options}
    return client.batches.create(input_file_id=file.id, **options)


def wait(client: openai.OpenAI, batch_id: str, until: Callable[[Any], bool] | None = None) -> Any:
    """The batch once it is over (or `until` holds)."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        batch = client.batches.retrieve(batch_id)
        if until(batch) if until else batch.status in ("completed", "failed", "expired", "cancelled"):
            return batch
        time.sleep(0.02)
    raise AssertionError(f"still {batch}")


def lines_of(client: openai.OpenAI, file_id: str) -> list[dict[str, Any]]:
    return [strict_json(raw) for raw in client.files.content(file_id).text.splitlines()]


def test_answers_errors_counts_and_usage(client: openai.OpenAI) -> None:
    lines = [line(f"r{i}", prompt=f"say {i}") for i in range(20)]
    lines[3] = line("r3", max_tokens=-1)
    lines[7] = line("r7", prompt="fail EngineStepError 1")
    lines.insert(5, "")
    batch = create(client, lines, metadata={"for": "test"})
    assert (batch.object, batch.status, batch.metadata) == ("batch", "validating", {"for": "test"})
    assert batch.expires_at == batch.created_at + 86_400
    batch = wait(client, batch.id)
    assert batch.status == "completed"
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (20, 18, 2)
    answered, failed = lines_of(client, batch.output_file_id), lines_of(client, batch.error_file_id)
    # In the order of the input, whatever finished first.
    assert [entry["custom_id"] for entry in answered] == [f"r{i}" for i in range(20) if i not in (3, 7)]
    for entry in answered:
        assert entry["response"]["status_code"] == 200
        assert entry["response"]["body"]["choices"][0]["text"] == entry["custom_id"][1:]
        assert entry["error"] is None
    usage = [entry["response"]["body"]["usage"] for entry in answered]
    assert batch.usage.input_tokens == sum(u["prompt_tokens"] for u in usage)
    assert batch.usage.output_tokens == sum(u["completion_tokens"] for u in usage)
    assert [(e["custom_id"], e["response"]["status_code"]) for e in failed] == [("r3", 400), ("r7", 500)]
    assert failed[0]["response"]["body"]["error"]["param"] == "max_tokens"
    ids = [entry["id"] for entry in answered + failed] + [e["response"]["request_id"] for e in answered + failed]
    assert len(set(ids)) == 40


def test_lines_run_behind_everybody_else(front: Front, client: openai.OpenAI) -> None:
    batch = create(client, [line("idle", prompt="say idle")])
    wait(client, batch.id)
    front.complete(prompt="say busy")
    priorities = {entry["prompt"]: entry["priority"] for entry in front.engine.seen}
    assert priorities["say idle"] == IDLE_PRIORITY
    assert priorities["say busy"] == 0
    # Nobody from outside gets there, or in front of others by it.
    check_error(front.complete(priority=IDLE_PRIORITY), 400, param="priority")


@pytest.mark.parametrize("url", ["/v1/chat/completions"])
def test_other_routes(client: openai.OpenAI, url: str) -> None:
    body = {"messages": [{"role": "user", "content": "say yes"}]}
    lines = [json.dumps({"custom_id": "a", "method": "POST", "url": url, "body": body})]
    batch = wait(client, create(client, lines, endpoint=url).id)
    (entry,) = lines_of(client, batch.output_file_id)
    assert entry["response"]["body"]["choices"][0]["message"]["content"] == "yes"
    assert batch.error_file_id is None


@pytest.mark.parametrize(
    ("lines", "code", "number"),
    [
        (["{"], "invalid_json_line", 1),
        ([line("a"), "[]"], "invalid_json_line", 2),
        ([line("a"), '{"custom_id": "b", "method": "POST", "url": "/v1/completions"}'], "invalid_json_line", 2),
        ([line("a"), '{"custom_id": 5, "url": "/v1/completions", "body": {}}'], "invalid_json_line", 2),
        ([line("a").replace("POST", "GET")], "invalid_method", 1),
        ([line("a"), line("b", "/v1/chat/completions")], "invalid_url", 2),
        ([line("a"), line("b"), line("a")], "duplicate_custom_id", 3),
        ([line("")], "invalid_custom_id", 1),
        ([line("a", stream=True)], "invalid_request", 1),
        ([line("a", model="fake"), line("b", model="other")], "mismatched_model", 2),
        ([line("a", model="nope")], "model_not_found", 1),
        ([" "], "empty_file", None),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_file_with_mistakes_fails_with_their_lines(
    front: Front, client: openai.OpenAI, lines: list[str], code: str, number: int | None
) -> None:
    num_seen = len(front.engine.seen)
    batch = wait(client, create(client, lines).id)
    assert batch.status == "failed"
    assert batch.failed_at is not None
    assert [(error.code, error.line) for error in batch.errors.data] == [(code, number)]
    assert len(front.engine.seen) == num_seen


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"endpoint": "/v1/audio"}, 400, "endpoint"),
        ({"endpoint": "/v1/files"}, 400, "endpoint"),
        ({"completion_window": "forever"}, 400, "completion_window"),
        ({"completion_window": "31d"}, 400, "completion_window"),
        ({"input_file_id": "file-nope"}, 404, "file_id"),
        ({"input_file_id": None}, 400, "input_file_id"),
        ({"metadata": {"k" * 65: "v"}}, 400, "metadata"),
        ({"metadata": {"k": 5}}, 400, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, 400, "output_expires_after"),
    ],
    ids=str,
)
def test_fields_that_are_wrong_are_named(front: Front, body: dict[str, object], status: int, param: str) -> None:
    file = front.client.post("/v1/files", files={"file": ("f", b"x")}, data={"purpose": "batch"}).json()
    body = {"input_file_id": file["id"], "endpoint": URL, "completion_window": "24h", **body}
    check_error(front.client.post("/v1/batches", json=body), status, param=param)


def test_unknown_batches_are_a_404(front: Front) -> None:
    check_error(front.client.get("/v1/batches/batch_nope"), 404)
    check_error(front.client.post("/v1/batches/batch_nope/cancel"), 404)
    check_error(front.client.get("/v1/batches?after=batch_nope"), 400, param="after")


def test_pages_of_batches(make_front: FrontFactory) -> None:
    client = client_of(make_front())
    made = [create(client, [line("a")]).id for _ in range(3)]
    assert [batch.id for batch in client.batches.list(limit=2).data] == made[:0:-1]
    assert [batch.id for batch in client.batches.list(limit=1)] == made[::-1]
    for batch_id in made:
        wait(client, batch_id)


def test_a_cancelled_batch_keeps_what_was_answered(make_front: FrontFactory) -> None:
    front = make_front(batch_concurrency=2)
    client = client_of(front)
    batch = create(client, [line("a"), line("b"), line("c", prompt="hang 0"), line("d", prompt="hang 0"), line("e")])
    wait(client, batch.id, lambda b: b.request_counts.completed == 2)
    with pytest.raises(openai.BadRequestError) as refused:
        client.files.delete(batch.input_file_id)
    assert batch.id in refused.value.message
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = wait(client, batch.id)
    assert batch.status == "cancelled"
    assert batch.cancelled_at >= batch.cancelling_at
    assert [entry["custom_id"] for entry in lines_of(client, batch.output_file_id)] == ["a", "b"]
    assert batch.error_file_id is None
    assert not front.engine.live
    with pytest.raises(openai.BadRequestError, match="cancelled already"):
        client.batches.cancel(batch.id)
    client.files.delete(batch.input_file_id)


def test_an_expired_batch_says_so_in_every_line(make_front: FrontFactory) -> None:
    front = make_front()
    client = client_of(front)
    batch = create(client, [line("a"), line("b", prompt="hang 0")], completion_window="1s")
    batch = wait(client, batch.id)
    assert batch.status == "expired"
    assert [entry["custom_id"] for entry in lines_of(client, batch.output_file_id)] == ["a"]
    (entry,) = lines_of(client, batch.error_file_id)
    assert (entry["custom_id"], entry["response"], entry["error"]["code"]) == ("b", None, "batch_expired")
    assert not front.engine.live


def test_a_full_queue_is_waited_for(front: Front, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "RETRY_SECONDS", 0.02)
    batch = create(client, [line("a", prompt="fail EngineDeadError 0"), line("b")])
    wait(client, batch.id, lambda b: b.request_counts.completed == 1)
    # The engine is not there for "a" again and again, which is no answer.
    assert client.batches.retrieve(batch.id).request_counts.failed == 0
    client.batches.cancel(batch.id)
    wait(client, batch.id)


def test_a_stopped_server_goes_on_without_repeating(make_front: FrontFactory, tmp_path: Path) -> None:
    front = make_front(data_dir=str(tmp_path), batch_concurrency=2)
    client = client_of(front)
    batch = create(client, [line(f"r{i}", prompt=f"say {i}" if i < 6 else "hang 1") for i in range(8)])
    wait(client, batch.id, lambda b: b.request_counts.completed == 6)
    front.stop_batches()
    assert not front.engine.live
    again = make_front(data_dir=str(tmp_path))
    client = client_of(again)
    assert client.batches.retrieve(batch.id).status == "in_progress"
    deadline = time.monotonic() + 60
    while len(again.engine.live) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [entry["prompt"] for entry in again.engine.seen] == ["hang 1", "hang 1"]
    client.batches.cancel(batch.id)
    batch = wait(client, batch.id)
    assert batch.request_counts.completed == 6
    assert [e["custom_id"] for e in lines_of(client, batch.output_file_id)] == [f"r{i}" for i in range(6)]


def test_an_input_that_has_expired_is_kept_for_its_batch(make_front: FrontFactory, tmp_path: Path) -> None:
    front = make_front(data_dir=str(tmp_path))
    client = client_of(front)
    batch = create(client, [line("a", prompt="hang 0"), line("b")])
    wait(client, batch.id, lambda b: b.request_counts.completed == 1)
    front.stop_batches()
    with sqlite3.connect(tmp_path / "state.sqlite3") as database:
        database.execute("update files set expires_at = 1")
        database.execute("update files set document = json_set(document, '$.expires_at', 1)")
    database.close()
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(batch.input_file_id)
    client.batches.cancel(batch.id)
    batch = wait(client, batch.id)
    assert (batch.status, batch.request_counts.completed) == ("cancelled", 1)
    front.stop_batches()
    assert batch.input_file_id not in {file.id for file in client.files.list()}


def test_batches_of_models_that_are_not_served_wait(make_front: FrontFactory, tmp_path: Path) -> None:
    front = make_front(data_dir=str(tmp_path))
    batch = create(client_of(front), [line("a", prompt="hang 0")])
    wait(client_of(front), batch.id, lambda b: b.status == "in_progress")
    front.stop_batches()
    other = make_front(names=("other",), data_dir=str(tmp_path))
    assert wait(client_of(other), create(client_of(other), [line("a")]).id).status == "completed"
    assert client_of(other).batches.retrieve(batch.id).status == "in_progress"
    assert not any(entry["prompt"] == "hang 0" for entry in other.engine.seen)


def test_a_killed_server_loses_and_repeats_no_line(tiny_model: Path, tmp_path: Path) -> None:
    flags = ("--num-device-blocks", "200", "--num-threads", "1", "--served-model-name", "tiny")
    flags += ("--data-dir", str(tmp_path / "data"), "--batch-concurrency", "4")
    with server_process(tiny_model, *flags, log=tmp_path / "first.log") as server:
        client = client_of(server)
        lines = [line(f"r{i}", max_tokens=24, temperature=0, ignore_eos=True, prompt=f"{i}") for i in range(30)]
        batch = create(client, lines)
        before = wait(client, batch.id, lambda b: b.request_counts.completed >= 5).request_counts.completed
        server.kill()
    with server_process(tiny_model, *flags, log=tmp_path / "second.log") as server:
        client = client_of(server)
        batch = wait(client, batch.id)
        entries = lines_of(client, batch.output_file_id)
        alone = client.completions.create(
            model="tiny", prompt="7", max_tokens=24, temperature=0, extra_body={"ignore_eos": True}
        )
        assert f"batch {batch.id} goes on after" in server.output
    assert (batch.status, batch.request_counts.completed) == ("completed", 30)
    assert 5 <= before < 30
    assert [entry["custom_id"] for entry in entries] == [f"r{i}" for i in range(30)]
    assert entries[7]["response"]["body"]["choices"][0]["text"] == alone.choices[0].text
