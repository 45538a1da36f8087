"""What a phase has in hand: the device, the size of its work, the time it may take, and where results go.

Every measurement is announced in the results before it runs, so that one that crashes or hangs the device is known by
name and passed over when its phase is tried again.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Exit codes of a phase whose device is no longer usable, and of one that raised: it goes on in a new process.
DEVICE_LOST, RAISED = 3, 4
# One NVIDIA H200, for the case that the phase that measures them failed.
ASSUMED = {"copy bandwidth": 4.3e12, "matmul rate": 790e12}
_LOST = (
    "CUDA error",
    "CUDA driver error",
    "an illegal memory access",
    "unspecified launch failure",
    "device-side assert",
)


class DeviceLostError(Exception):
    """The device answers nothing any more in this process."""


class NotHereError(Exception):
    """What was to be measured cannot run on this device."""


class Check:
    """One try at one phase. `scale` is full, quick or tiny."""

    def __init__(self, phase: str, results: Path, *, device: str, scale: str, seconds: float, out: Path):
        self.phase = phase
        self.device_name = device
        self.scale = scale
        self.out = out
        self._results = results
        self._deadline = time.monotonic() + seconds
        self._seen = {row["name"] for row in read(results) if row["phase"] == phase and row["kind"] != "phase"}

    @property
    def device(self) -> Any:
        import torch

        return torch.device(self.device_name)

    @property
    def on_gpu(self) -> bool:
        return self.device_name == "cuda"

    @property
    def left(self) -> float:
        """Seconds until the phase should be over."""
        return self._deadline - time.monotonic()

    def choose(self, *, full: Any, quick: Any, tiny: Any) -> Any:
        """What suits the scale."""
        return {"full": full, "quick": quick, "tiny": tiny}[self.scale]

    def measure(self, name: str, work: Callable[[], None], *, needs: float = 1.0) -> bool:
        """Runs one measurement, which records its numbers itself; False where it failed or there was no time.

        `needs` is the time in seconds that must be left. Raises DeviceLostError where nothing else can run here.
        """
        if name in self._seen:
            return False
        self._seen.add(name)
        if self.left < needs:
            self.write("skipped", name, note="no time left")
            return False
        self.write("begun", name)
        try:
            work()
        except NotHereError as error:
            self.write("skipped", name, note=str(error))
        except Exception as error:
            self.fail(name, error)
            if any(sign in str(error) for sign in _LOST):
                raise DeviceLostError(name) from error
            return False
        self.write("ended", name)
        return True

    def record(
        self,
        name: str,
        value: float | int | str | bool,
        unit: str = "",
        *,
        goal: float | None = None,
        at_most: bool = False,
        note: str = "",
        quiet: bool = False,
    ) -> None:
        """One number. `goal` is the least it should be, with `at_most` the most; `quiet`: not in the table."""
        met = None if goal is None else (float(value) <= goal if at_most else float(value) >= goal)
        self.write("value", name, value=value, unit=unit, goal=goal, met=met, note=note, quiet=quiet)

    def check(self, name: str, passed: bool, note: str = "", *, quiet: bool = False) -> None:
        """A question of yes or no."""
        self.write("value", name, value=bool(passed), unit="", goal=True, met=bool(passed), note=note, quiet=quiet)

    def skip(self, name: str, why: str) -> None:
        """Something that cannot be measured here."""
        self._seen.add(name)
        self.write("skipped", name, note=why)

    def fail(self, name: str, error: BaseException) -> None:
        """What went wrong, in one line in the results and whole in the phase's log."""
        traceback.print_exception(error)
        lines = str(error).strip().splitlines() or [""]
        self.write("failed", name, note=f"{type(error).__name__}: {lines[0]}"[:300])

    def write(self, kind: str, name: str, **fields: Any) -> None:
        """Appends a line and sees it onto the disk: what comes after may end this process."""
        row = {"phase": self.phase, "kind": kind, "name": name, "left": round(self.left, 1), **fields}
        append(self._results, row)

    def ceiling(self, name: str) -> float:
        """What the first phase measured, "copy bandwidth" in bytes/s or "matmul rate" in FLOP/s."""
        rows = [row for row in read(self._results) if row["kind"] == "value" and row["name"] == name]
        return float(rows[-1]["value"]) if rows else ASSUMED[name]


def append(path: Path, row: dict[str, Any]) -> None:
    """One JSON line, on the disk when this returns; whole lines even where processes write at once."""
    line = (json.dumps(row, default=str) + "\n").encode()
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(handle, line)
        with contextlib.suppress(OSError):
            os.fsync(handle)
    finally:
        os.close(handle)


def read(path: Path) -> list[dict[str, Any]]:
    """The rows so far; a line that was cut off is left out."""
    rows = []
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict) and {"phase", "kind", "name"} <= row.keys():
                    rows.append(row)
    return rows


def percent(part: float, whole: float) -> float:
    return round(100 * part / whole, 1)
