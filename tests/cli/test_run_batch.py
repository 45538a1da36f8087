"""`pagedserve run-batch`: a file in, a file out, no server; again after a crash only what is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagedserve.cli import main
from tests.helpers.checkpoints import tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


def line(custom_id: str, url: str = "/v1/completions", **body: object) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def read(path: Path) -> dict[str, dict[str, Any]]:
    return {entry["custom_id"]: entry for entry in map(json.loads, path.read_text().splitlines())}


def test_a_file_is_answered_and_completed_later(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    messages = [{"role": "user", "content": "hi"}]
    good = [
        line("text", prompt="Once", max_tokens=3, model="m"),
        line("chat", "/v1/chat/completions", messages=messages, max_tokens=3),
    ]
    source.write_text("\n".join([*good, line("bad", prompt="a", n=0), "nonsense", line("url", "/v1/x")]))
    command = ["run-batch", "-i", str(source), "-o", str(target), "--model", str(model), "--served-model-name", "m"]
    command += ["--num-device-blocks", "50", "--num-threads", "1", "--concurrency", "2"]
    assert main(command) == 1
    entries = read(target)
    assert set(entries) == {"text", "chat", "bad", "", "url"}
    assert entries["text"]["response"]["body"]["usage"]["completion_tokens"] == 3
    assert entries["chat"]["response"]["body"]["object"] == "chat.completion"
    assert entries["bad"]["response"]["body"]["error"]["param"] == "n"
    assert entries[""]["error"]["code"] == "invalid_json_line"
    assert entries["url"]["error"]["code"] == "invalid_url"
    assert "2 answered, 3 failed" in capsys.readouterr().err
    # Not over the answers that are there.
    assert main(command) == 2
    assert "--resume" in capsys.readouterr().err
    with target.open("a") as file:
        file.write('{"custom_id": "torn')
    source.write_text("\n".join([*good, line("new", prompt="a", max_tokens=1)]))
    assert main([*command, "--resume"]) == 0
    assert "1 answered, 0 failed, 2 answered before" in capsys.readouterr().err
    assert read(target)["new"]["response"]["status_code"] == 200


def test_files_that_are_not_there(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["run-batch", "-i", str(tmp_path / "nope"), "-o", str(tmp_path / "out"), "--model", str(model)]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "nope" in error and error.count("\n") == 1
