"""Starting the core's process, from a module that is light enough to be the first thing a server imports.

The process imports torch at once, which takes longer than all that the API process imports; so it is started first and
told what to load later (`core_client.ProcessCoreClient`).
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import Self

from pagedserve import envs

# Room for some hundred steps' outputs, so that a busy event loop does not hold up the core.
_SOCKET_BUFFER_BYTES = 4 << 20


@dataclass(slots=True)
class SpawnedCore:
    """A core process that waits for its StartCore, and our end of the channel to it."""

    process: subprocess.Popen[bytes]
    socket: socket.socket

    def close(self) -> None:
        """End the process where it still runs; safe to call twice."""
        self.socket.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def spawn_core(*, log_level: str = "info", log_format: str = "text") -> SpawnedCore:
    """Start the process; it inherits one socket and nothing else of ours but stdout and stderr."""
    ours, theirs = socket_pair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "pagedserve.engine.core_main", str(theirs.fileno()), log_level, log_format],
            stdin=subprocess.DEVNULL,
            env=envs.of_core(),
            pass_fds=[theirs.fileno()],
        )
    return SpawnedCore(process, ours)


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a new channel."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in ends:
        # The kernel grants what its own limit allows.
        with contextlib.suppress(OSError):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
    return ends
