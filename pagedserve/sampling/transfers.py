"""Between host and device without either waiting for the other.

A GPU works through a queue of its own. A copy that does not say `non_blocking` waits until all of the queue is done,
and with it the host, which should be preparing the next step meanwhile. On CPUs there is one memory and nothing to do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch

T = TypeVar("T")

# What can be told once the copies that it looks at have arrived.
Later = Callable[[], T]


def to_device(values: np.ndarray | Sequence[float], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """The values on the device, [len(values)] or the array's shape; an array of that type is not copied on CPUs."""
    host = torch.from_numpy(values) if isinstance(values, np.ndarray) else torch.tensor(values, dtype=dtype)
    return host.to(device, dtype, non_blocking=True)


class Mark:
    """A moment in the device's work."""

    def __init__(self, device: torch.device) -> None:
        """Now, or when the device has done all that it has been given so far."""
        self._event: torch.cuda.Event | None = None
        self._time = 0.0
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()
        else:
            self._time = time.perf_counter()

    def wait(self) -> None:
        """Until that moment."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: Mark) -> float:
        """Between two moments that have passed."""
        if self._event is not None and earlier._event is not None:
            return earlier._event.elapsed_time(self._event) / 1e3
        return self._time - earlier._time


class Readback:
    """Copies from the device to the host, which nobody may look at before `wait`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._end: Mark | None = None

    def take(self, values: torch.Tensor) -> torch.Tensor:
        """`values` on the host; on CPUs the same tensor. The device's memory may be used for something else at once."""
        return values.to("cpu", non_blocking=True)

    def close(self) -> Mark:
        """All copies have been asked for; the moment when they are there."""
        self._end = Mark(self._device)
        return self._end

    def wait(self) -> None:
        """Until all copies are there."""
        (self._end or self.close()).wait()
