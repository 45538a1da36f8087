"""Start and end of `pagedserve serve`: ports, signals, a core that dies, what is left behind (C101, C103)."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.helpers.server import ServerProcess, server_process
from tests.helpers.streams import check_error, check_stream

FLAGS = ("--num-device-blocks", "300", "--num-threads", "1", "--served-model-name", "m")
LONG = {"prompt": "x", "max_tokens": 480, "ignore_eos": True, "stream": True}


@pytest.fixture
def server(tiny_model: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    """A server of this test's own, to end in any way."""
    server = ServerProcess(tiny_model, *FLAGS, log=tmp_path / "log")
    server.wait_until_ready()
    yield server
    if server.process.poll() is None:
        server.kill()


class Reader:
    """Reads one stream in a thread."""

    def __init__(self, server: ServerProcess, key: str = "none", **body: Any):
        self.raw = b""
        self.status = 0
        self.failure: Exception | None = None
        self.has_begun = threading.Event()
        self._url = f"{server.base_url}/v1/completions"
        self._headers = {"Authorization": f"Bearer {key}"}
        self._body = {**LONG, **body}
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, headers=self._headers, timeout=60) as response:
                self.status = response.status_code
                for piece in response.iter_raw():
                    self.raw += piece
                    self.has_begun.set()
        except httpx.HTTPError as error:
            self.failure = error
        self.has_begun.set()

    def join(self, timeout: float = 30.0) -> None:
        self._thread.join(timeout)
        assert not self._thread.is_alive()


def children(server: ServerProcess) -> list[psutil.Process]:
    return psutil.Process(server.process.pid).children(recursive=True)


def lives(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def test_a_whole_life(tiny_model: Path, tmp_path: Path) -> None:  # C101, C103
    """503 while the model loads, then answers, then SIGTERM: streams finish, the port is free, nobody is left."""
    env = {**os.environ, "PAGEDSERVE_API_KEY": "env-secret"}
    flags = (*FLAGS, "--api-key", "flag-secret", "--log-requests", "--log-level", "debug")
    server = ServerProcess(tiny_model, *flags, log=tmp_path / "log", env=env)
    with httpx.Client(base_url=server.base_url, timeout=5) as client:
        statuses: set[int] = set()
        wait_for(lambda: _health(client, statuses) == 200, seconds=90)
        assert statuses == {0, 503, 200} or statuses == {503, 200}
        for key, status in (("env-secret", 200), ("flag-secret", 200), ("wrong-secret", 401)):
            assert client.get("/v1/models", headers={"x-api-key": key}).status_code == status
        descendants = children(server)
        assert descendants
        readers = [Reader(server, "flag-secret", prompt=f"number {i}") for i in range(5)]
        for reader in readers:
            assert reader.has_begun.wait(30)
        # The client's idle connection must not hold the server up.
        assert server.terminate() == 0
    for reader in readers:
        reader.join()
        stream = check_stream(reader.raw, chat=False, num_choices=1)
        assert stream.error is None
        assert stream.choices[0].finish_reason == "length"
    wait_for(lambda: not any(map(lives, descendants)))
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", server.port))
    assert "Traceback" not in server.output
    assert "/v1/models 401" in server.output
    assert "secret" not in server.output


def test_streams_that_take_too_long_end_with_an_error(tiny_model: Path, tmp_path: Path) -> None:  # C103
    log = tmp_path / "log"
    with server_process(tiny_model, *FLAGS, "--shutdown-timeout", "0", log=log) as server:
        readers = [Reader(server, n=8) for _ in range(3)]
        for reader in readers:
            assert reader.has_begun.wait(30)
        assert server.terminate() == 0
        for reader in readers:
            reader.join()
            stream = check_stream(reader.raw, chat=False)
            assert stream.error is not None
            assert "shutting down" in stream.error["message"]


def test_a_second_signal_ends_at_once(server: ServerProcess) -> None:  # C103
    reader = Reader(server, n=8)
    assert reader.has_begun.wait(30)
    server.process.send_signal(signal.SIGINT)
    wait_for(lambda: "shutting down" in server.output)
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(60) == 0
    reader.join()
    assert check_stream(reader.raw, chat=False).error is not None


def test_a_stuck_core_and_a_dead_one_are_a_503_and_nobody_waits(tiny_model: Path, tmp_path: Path) -> None:  # C101
    with (
        server_process(tiny_model, *FLAGS, "--health-timeout", "1", log=tmp_path / "log") as server,
        httpx.Client(base_url=server.base_url, timeout=30) as client,
    ):
        (core,) = children(server)
        core.suspend()
        wait_for(lambda: client.get("/health").status_code == 503)
        core.resume()
        wait_for(lambda: client.get("/health").status_code == 200)
        assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200

        readers = [Reader(server, n=8) for _ in range(3)]
        for reader in readers:
            assert reader.has_begun.wait(30)
        core.kill()
        for reader in readers:
            reader.join()
            stream = check_stream(reader.raw, chat=False)
            assert stream.error is not None
            assert stream.error["type"] == "service_unavailable_error"
        check_error(client.get("/health"), 503)
        check_error(client.get("/ready"), 503)
        check_error(client.post("/v1/completions", json={"prompt": "a"}), 503)
        check_error(client.post("/v1/completions", json={"prompt": "a", "stream": True}), 503)
        assert client.get("/metrics").status_code == 200
        assert server.terminate() == 0


def test_the_core_ends_with_its_parent(server: ServerProcess) -> None:  # C103
    descendants = children(server)
    server.kill()
    wait_for(lambda: not any(map(lives, descendants)))


def _health(client: httpx.Client, statuses: set[int]) -> int:
    """The status of /health, 0 where nobody listens yet; remembered in `statuses`."""
    try:
        status = client.get("/health").status_code
    except httpx.ConnectError:
        status = 0
    statuses.add(status)
    return status


def test_sigterm_while_the_model_loads(tiny_model: Path, tmp_path: Path) -> None:  # C103
    server = ServerProcess(tiny_model, *FLAGS, log=tmp_path / "log")
    try:
        wait_for(lambda: _answers(server))
        descendants = children(server)
        assert server.terminate() == 0
        wait_for(lambda: not any(map(lives, descendants)))
    finally:
        if server.process.poll() is None:
            server.kill()


def _answers(server: ServerProcess) -> bool:
    try:
        httpx.get(f"{server.base_url}/version", timeout=5)
    except httpx.HTTPError:
        return False
    return True


def serve(*flags: str) -> subprocess.CompletedProcess[str]:
    """Run a server that will not start."""
    command = [sys.executable, "-m", "pagedserve.cli", "serve", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_taken_port_is_one_line(tiny_model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = serve("--model", str(tiny_model), "--port", str(taken.getsockname()[1]))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "--port" in done.stderr.splitlines()[-1]


def test_a_parser_that_is_not_there_is_one_line(tiny_model: Path) -> None:
    done = serve("--model", str(tiny_model), "--port", "0", "--tool-call-parser", "nope")
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert "unknown tool-call parser 'nope'; known: " in done.stderr.splitlines()[-1]


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    done = serve("--model", str(tmp_path / "nothing"), "--port", "0")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert str(tmp_path / "nothing") in done.stderr


def test_a_broken_model_is_one_line(tiny_model: Path, tmp_path: Path) -> None:  # C088
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in tiny_model.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "architectures": ["NoSuchModel"]}))
    done = serve("--model", str(broken), "--port", "0")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "NoSuchModel" in done.stderr


def test_the_log_tells_how_to_ask(tiny: ServerProcess) -> None:
    assert "curl" in tiny.output
    assert tiny.base_url in tiny.output
