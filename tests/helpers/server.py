"""A live HTTP server on a free port: an app in a thread, or the real `pagedserve serve` as a child process."""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from pagedserve.api.http_protocol import NoUpgradeProtocol

STARTUP_SECONDS = 240.0


# Below what systems give to outgoing connections: between our look and the server's bind nobody is given the port.
PORTS = range(15_000, 32_000)


def free_port() -> int:
    """A port that nobody listens on right now; two processes that ask at once get different ones, almost surely."""
    while True:
        port = random.SystemRandom().choice(PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@contextlib.contextmanager
def app_server(app: FastAPI) -> Iterator[str]:
    """Serves an app from a thread; yields its base URL."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(2048)
        config = uvicorn.Config(
            app, ws="none", lifespan="off", log_config=None, access_log=False, http=NoUpgradeProtocol, loop="uvloop"
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.005)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        server.force_exit = True
        thread.join(timeout=10)


class ServerProcess:
    """`pagedserve serve` in a child process, with what it writes to stderr."""

    def __init__(
        self,
        model: Path | str,
        *flags: str,
        log: Path,
        env: dict[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
    ):
        self.port = free_port()
        self.base_url = f"{'http' if tls is None else 'https'}://127.0.0.1:{self.port}"
        self._verify = tls or True
        self._log = log
        command = [sys.executable, "-m", "pagedserve.cli", "serve", "--model", str(model), "--port", str(self.port)]
        with log.open("wb") as stderr:
            self.process = subprocess.Popen([*command, *flags], stdout=stderr, stderr=stderr, env=env)

    @property
    def output(self) -> str:
        """Everything it wrote so far."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def wait_until_ready(self, timeout: float = STARTUP_SECONDS) -> None:
        """Return when /ready says so; RuntimeError with the log where the process ends or time is up."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with {self.process.returncode}:\n{self.output}")
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.base_url}/ready", timeout=5, verify=self._verify).status_code == 200:
                    return
            time.sleep(0.05)
        self.kill()
        raise RuntimeError(f"the server was not ready after {timeout} s:\n{self.output}")

    def terminate(self, timeout: float = 40.0) -> int:
        """SIGTERM; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout)

    def kill(self) -> None:
        """SIGKILL, for tests of what is left then."""
        self.process.kill()
        self.process.wait(10)


@contextlib.contextmanager
def server_process(model: Path | str, *flags: str, log: Path, **options: Any) -> Iterator[ServerProcess]:
    """A ready server, ended politely afterwards."""
    server = ServerProcess(model, *flags, log=log, **options)
    try:
        server.wait_until_ready()
        yield server
    finally:
        if server.process.poll() is None:
            try:
                server.terminate()
            except subprocess.TimeoutExpired:
                server.kill()
                raise
