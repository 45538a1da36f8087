"""Servers as child processes: started, watched for their memory, and ended for sure."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

_POLL_SECONDS = 0.02
_SAMPLE_SECONDS = 0.5
_TERM_SECONDS = 8.0


@dataclass
class Memory:
    """Peaks over all processes of a tree, in MiB of proportional set size: shared pages are counted once."""

    total: float = 0.0
    torch_libraries: float = 0.0  # what torch's own .so files take of it


@dataclass
class Server:
    """One engine's OpenAI-compatible server on a port of this machine."""

    label: str
    command: Sequence[str]
    port: int
    model: str
    log: Path
    env: dict[str, str] = field(default_factory=dict)
    memory: Memory = field(default_factory=Memory)
    seconds_to_first_token: float | None = None
    pid: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @contextlib.contextmanager
    def running(self, timeout: float) -> Iterator[Server]:
        """Starts it and waits for its first token; whatever happens, no process of it is left afterwards."""
        started = time.perf_counter()
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                list(self.command),
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=self.env,
                start_new_session=True,
            )
        self.pid = process.pid
        try:
            self._await_first_token(process, started + timeout)
            self.seconds_to_first_token = time.perf_counter() - started
            yield self
        finally:
            end_tree(process.pid)
            process.wait()

    def _await_first_token(self, process: subprocess.Popen[bytes], deadline: float) -> None:
        body = {"model": self.model, "prompt": "The capital of France is", "max_tokens": 1, "temperature": 0}
        while time.perf_counter() < deadline:
            if process.poll() is not None:
                raise RuntimeError(f"{self.label} ended with status {process.returncode}; see {self.log}")
            with contextlib.suppress(urllib.error.URLError, OSError):
                self.post(body, timeout=max(1.0, deadline - time.perf_counter()))
                return
            time.sleep(_POLL_SECONDS)
        raise TimeoutError(f"{self.label} gave no token in time; see {self.log}")

    def post(self, body: dict[str, Any], timeout: float) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return json.load(answer)

    @contextlib.contextmanager
    def memory_watched(self) -> Iterator[None]:
        """Keeps the peak of the server's processes while the block runs."""
        done = threading.Event()

        def watch() -> None:
            while not done.wait(_SAMPLE_SECONDS):
                self.memory.total = max(self.memory.total, memory_of_tree(self.pid))
            self.memory.torch_libraries = memory_of_tree(self.pid, "/torch/lib/")

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def tree_of(root: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(root)
        return [process, *process.children(recursive=True)]
    return []


def end_tree(root: int) -> None:
    """SIGTERM to the root, then SIGKILL to all that is left of its tree."""
    processes = tree_of(root)
    if processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes[0].terminate()
    _, alive = psutil.wait_procs(processes, timeout=_TERM_SECONDS)
    for process in {*alive, *tree_of(root)}:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=_TERM_SECONDS)


def memory_of_tree(root: int, only: str | None = None) -> float:
    """MiB of proportional set size; `only`: of mapped files whose path contains it."""
    total = 0.0
    for process in tree_of(root):
        counts = only is None
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process.pid}/{'smaps' if only else 'smaps_rollup'}").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) / 1024 if counts else 0.0
                elif (
                    only is not None and "-" in line.split(" ", 1)[0]
                ):  # a mapping begins: its addresses, ..., its file
                    counts = only in line
    return total


def run_for_json(command: Sequence[str], timeout: float, env: dict[str, str] | None = None) -> dict[str, Any]:
    """The last line of a command's output that is a JSON object; its processes are gone when this returns."""
    process = subprocess.Popen(
        list(command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        end_tree(process.pid)
    for line in reversed(output.splitlines()):
        if line.startswith("{"):
            return json.loads(line)
    raise RuntimeError(f"{Path(command[0]).name} gave no result (status {process.returncode}): {output[-300:]}")
