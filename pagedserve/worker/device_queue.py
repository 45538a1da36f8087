"""Where a device's work is begun: by the caller, or by a thread that computes while the caller goes on.

A GPU has a queue of its own, so whoever fills it hardly waits. On a CPU the work is done by whoever begins it; with a
thread for it, the next step can be decided meanwhile, as beside a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class DeviceQueue:
    """Begins work at once, in the caller's thread."""

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Work begins in the order in which it was submitted; the future raises what it raised."""
        future: Future[T] = Future()
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)
        return future

    def close(self) -> None:
        """No more work will come; returns when all is done."""


class ThreadQueue(DeviceQueue):
    """Does the work in one thread, one piece after the other."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="device")

    def submit(self, work: Callable[[], T]) -> Future[T]:
        return self._thread.submit(work)

    def close(self) -> None:
        self._thread.shutdown()
