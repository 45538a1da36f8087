"""The command line as people type it: subprocesses, a live server, a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from pagedserve import __version__
from tests.helpers.checkpoints import tiny_llama
from tests.helpers.server import ServerProcess, free_port, server_process

ENGINE_FLAGS = ("--num-device-blocks", "400", "--num-threads", "1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    flags = (*ENGINE_FLAGS, "--api-key", "secret", "--served-model-name", "tiny")
    with server_process(model, *flags, log=tmp_path_factory.mktemp("log") / "log") as running:
        yield running


def pagedserve(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pagedserve.cli", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120, check=False)


def chat(server: ServerProcess, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    fixed = ("--temperature", "0", "--max-tokens", "8", "--api-key", "secret")
    return pagedserve("chat", "--url", server.base_url, *fixed, *arguments, stdin=stdin)


def answer(server: ServerProcess, messages: list[dict[str, str]]) -> str:
    body = {"messages": messages, "temperature": 0, "max_tokens": 8}
    headers = {"Authorization": "Bearer secret"}
    response = httpx.post(f"{server.base_url}/v1/chat/completions", json=body, headers=headers, timeout=60)
    return response.raise_for_status().json()["choices"][0]["message"]["content"]


def test_version_is_the_packages() -> None:
    assert pagedserve("--version").stdout.strip() == f"pagedserve {__version__}"


def test_chat_asks_once(server: ServerProcess) -> None:
    done = chat(server, "-q", "hello there", "--stats")
    assert done.returncode == 0, done.stderr
    text, _, stats = done.stdout.rpartition("\n[")
    assert text == answer(server, [{"role": "user", "content": "hello there"}])
    assert "8 out" in stats


def test_chat_keeps_the_conversation_until_reset(server: ServerProcess) -> None:
    done = chat(server, "--system", "Be brief.", stdin="one\ntwo\n/reset\none\n/quit\n")
    assert done.returncode == 0, done.stderr
    system = {"role": "system", "content": "Be brief."}
    first = answer(server, [system, {"role": "user", "content": "one"}])
    turns = [system, {"role": "user", "content": "one"}, {"role": "assistant", "content": first}]
    second = answer(server, [*turns, {"role": "user", "content": "two"}])
    assert done.stdout == f"{first}\n{second}\n{first}\n"


def test_chat_says_what_is_wrong_in_one_line(server: ServerProcess) -> None:
    nobody = pagedserve("chat", "--url", f"http://127.0.0.1:{free_port()}", "-q", "hi")
    refused = pagedserve("chat", "--url", server.base_url, "--api-key", "wrong", "-q", "hi")
    unknown = chat(server, "--model", "nope", "-q", "hi")
    for done, word in ((nobody, "no server answers"), (refused, "401"), (unknown, "nope")):
        assert done.returncode == 2
        assert word in done.stderr
        assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_bench_serve_reports_what_it_sent(server: ServerProcess, endpoint: str) -> None:
    work = ("--num-prompts", "6", "--input-len", "5", "--output-len", "7", "--max-concurrency", "3")
    flags = ("--endpoint", endpoint, "--goodput", "ttft:60000", "--metric-percentiles", "50,99", "--json")
    done = pagedserve("bench", "serve", "--base-url", server.base_url, "--api-key", "secret", *work, *flags)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["completed"], result["failed"]) == (6, 0)
    assert result["output_tokens"] == 6 * 7
    assert result["goodput"] == pytest.approx(result["request_throughput"])
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms"):
        assert result[name]["p50"] == pytest.approx(result[name]["median"], abs=1e-2)
    assert result["e2el_ms"]["mean"] >= result["ttft_ms"]["mean"]


def test_bench_serve_counts_failures(server: ServerProcess) -> None:
    work = ("--num-prompts", "2", "--num-warmups", "0", "--input-len", "5000", "--json")
    done = pagedserve("bench", "serve", "--base-url", server.base_url, "--api-key", "secret", *work)
    result = json.loads(done.stdout)
    assert done.returncode == 1
    assert (result["completed"], result["failed"]) == (0, 2)
    assert "400" in result["first_error"]


def test_offline_benches_print_one_json_line(model: Path) -> None:
    work = ("--num-prompts", "3", "--input-len", "4", "--output-len", "5", "-m", str(model), *ENGINE_FLAGS, "--json")
    throughput = pagedserve("bench", "throughput", "-n", "2", *work)
    latency = pagedserve("bench", "latency", "--num-iters", "2", *work)
    assert throughput.returncode == latency.returncode == 0, throughput.stderr + latency.stderr
    assert json.loads(throughput.stdout)["output_tokens"] == 3 * 2 * 5
    assert json.loads(latency.stdout)["median_ms"] > 0


def test_bench_step_tells_where_the_time_of_a_step_goes(model: Path) -> None:
    sizes = ("--batch-sizes", "1,3", "--context-len", "9", "--num-steps", "4", "-m", str(model), *ENGINE_FLAGS)
    done = pagedserve("bench", "step", "--profile", "--json", *sizes)
    assert done.returncode == 0, done.stderr
    one, three = json.loads(done.stdout)
    assert (one["batch_size"], three["batch_size"]) == (1, 3) and one["step_ms"] >= one["forward_ms"] > 0
    calls = {row["op"]: row["calls"] for row in three["ops"]}
    assert calls["attention"] == 2 and sum(n for op, n in calls.items() if op.startswith("linear ")) == 2 * 4 + 1
    table = pagedserve("bench", "step", "--profile", "--compare-eager", *sizes)
    assert table.stdout.count("eager False") == table.stdout.count("eager True") == 2
    assert "GFLOP/s" in table.stdout and "attention" in table.stdout
    refused = pagedserve("bench", "step", "--batch-sizes", "1,none")
    assert refused.returncode != 0 and "--batch-sizes" in refused.stderr and refused.stderr.count("\n") == 1


def test_generate_reads_prompts_from_stdin(model: Path) -> None:
    flags = ("--max-tokens", "6", "-m", str(model), *ENGINE_FLAGS, "--json")
    by_flag = pagedserve("generate", "abc", "def", *flags)
    by_stdin = pagedserve("generate", *flags, stdin="abc\n\ndef\n")
    assert by_flag.returncode == 0, by_flag.stderr
    assert by_flag.stdout == by_stdin.stdout
    assert [json.loads(line)["prompt"] for line in by_flag.stdout.splitlines()] == ["abc", "def"]


def test_a_dataset_that_cannot_be_read_names_its_line(tmp_path: Path, model: Path) -> None:
    dataset = tmp_path / "work.jsonl"
    dataset.write_text('{"prompt": "abc"}\n{"text": "no prompt"}\n', encoding="utf-8")
    done = pagedserve("bench", "throughput", "--dataset-path", str(dataset), "-m", str(model))
    assert done.returncode == 2
    assert "line 2" in done.stderr


def test_collect_env_hides_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDSERVE_API_KEY", "very-secret")
    done = pagedserve("collect-env", "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["pagedserve"]["version"] == __version__
    assert facts["environment"]["PAGEDSERVE_API_KEY"] == "(set)"
    assert "very-secret" not in done.stdout
