"""The phases in order, and how each runs: a fork of a process that has imported torch and touched no device."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.check import DEVICE_LOST, RAISED, Check, DeviceLostError, append

_POLL_SECONDS = 0.02
# Less than this is no time for a phase, or for another try at one.
_LEAST_SECONDS = 3.0


def _call(target: str, *arguments: str) -> Callable[[Check, int], None]:
    """`target` names module and function below benchmarks.gpu; imported in the phase's process."""

    def run(check: Check, attempt: int) -> None:
        from importlib import import_module

        module, _, function = target.partition(":")
        extra: list[Any] = [attempt] if "attempt" in arguments else []
        getattr(import_module(f"benchmarks.gpu.{module}"), function)(check, *extra)

    return run


def _conformance(shard: int, num_shards: int) -> Callable[[Check, int], None]:
    def run(check: Check, attempt: int) -> None:
        from benchmarks.gpu import conformance

        if check.on_gpu:
            conformance.run(check, shard, num_shards)
        elif shard == 0:  # one of each kind is all that is run then
            conformance.run(check)

    return run


def _jit(shard: int, num_shards: int) -> Callable[[Check, int], None]:
    def run(check: Check, attempt: int) -> None:
        from benchmarks.gpu import compiling

        if check.on_gpu:
            compiling.on_card(check, shard, num_shards)
        else:
            check.skip("jit", "there is no card to compile for; --compile-only does it ahead of time")

    return run


def _ahead_of_time(check: Check, attempt: int) -> None:
    from benchmarks.gpu import compiling

    compiling.ahead_of_time(check, pattern=os.environ.get("GPU_CHECK_VARIANTS", ""))


def _nvcc(check: Check, attempt: int) -> None:
    from benchmarks.gpu import build

    check.measure("cuda library", lambda: build.build_cuda(check, "80-real;90-real"))


@dataclass(frozen=True, slots=True)
class Phase:
    """`full`, `quick`: seconds it may take, 0 where it is left out; `beside`: runs beside the phases before it.

    `interpreted`: on the CPU its kernels run under Triton's interpreter. `attempts`: processes it may use up.
    """

    name: str
    run: Callable[[Check, int], None]
    full: float
    quick: float
    tiny: float = 240.0
    beside: bool = False
    interpreted: bool = False
    attempts: int = 1

    def limit(self, scale: str) -> float:
        return {"full": self.full, "quick": self.quick, "tiny": self.tiny}[scale]


_NUM_SHARDS = max(1, min(8, (os.cpu_count() or 2) // 2))
PHASES = (
    Phase("environment", _call("environment:run"), 60, 30),
    Phase("build", _call("build:run"), 75, 35, beside=True),
    *(Phase("jit", _jit(i, _NUM_SHARDS), 75, 35, beside=True, attempts=3) for i in range(_NUM_SHARDS)),
    Phase("conformance", _conformance(0, _NUM_SHARDS), 65, 18, interpreted=True, attempts=8),
    *(
        Phase("conformance", _conformance(i, _NUM_SHARDS), 65, 18, beside=True, interpreted=True, attempts=8)
        for i in range(1, _NUM_SHARDS)
    ),
    Phase("llama", _call("engine:llama", "attempt"), 75, 28, attempts=4),
    Phase("decode", _call("attention:decode"), 40, 9, interpreted=True, attempts=4),
    Phase("answers", _call("answers:run"), 35, 12, attempts=2),
    Phase("prefill", _call("attention:prefill"), 18, 6, interpreted=True, attempts=4),
    Phase("opt", _call("engine:opt", "attempt"), 40, 0, attempts=2),
    Phase("host", _call("engine:host", "attempt"), 15, 8, attempts=2),
    Phase("eager", _call("engine:eager", "attempt"), 18, 0),
    Phase("ops", _call("ops:fused"), 15, 5, interpreted=True, attempts=3),
    Phase("sampling", _call("ops:sampling"), 12, 4, interpreted=True, attempts=3),
    Phase("swap", _call("ops:swap"), 12, 4, attempts=2),
    Phase("launches", _call("ops:launches"), 8, 4, interpreted=True, attempts=2),
    Phase("http", _call("http:run"), 55, 0),
)
COMPILE_PHASES = (
    Phase("triton", _ahead_of_time, 1800, 1800, 300),
    Phase("nvcc", _nvcc, 1800, 1800, 60),
)


class Runner:
    """Runs phases one after the other (those that may, side by side) within a budget of seconds."""

    def __init__(self, out: Path, *, device: str, scale: str, budget: float, pattern: str = ""):
        self.results = out / "gpu_check.jsonl"
        self.results.unlink(missing_ok=True)
        self._out = out
        self._log = out / "gpu_check.log"
        self._log.unlink(missing_ok=True)
        self._device, self._scale = device, scale
        self._end = time.monotonic() + budget
        os.environ["GPU_CHECK_VARIANTS"] = pattern
        # Once, for all phases: nothing of this touches a device.
        import torch  # noqa: F401

        if device == "cuda":
            import triton  # noqa: F401

    def run(self, phases: list[Phase]) -> None:
        running: list[_Running] = []
        for index, phase in enumerate(phases):
            limit = phase.limit(self._scale)
            if limit <= 0:
                continue
            following = phases[index + 1] if index + 1 < len(phases) else None
            left = self._end - time.monotonic()
            if left < _LEAST_SECONDS:
                self._write(phase.name, "skipped: no time left", 0.0)
                continue
            running.append(_Running(self, phase, min(limit, left)))
            if following is None or not following.beside:
                self._wait(running)
                running = []

    def _wait(self, running: list[_Running]) -> None:
        try:
            while any([one.is_running() for one in running]):
                time.sleep(_POLL_SECONDS)
        except BaseException:
            for one in running:
                one.kill()
            raise

    def start(self, phase: Phase, attempt: int, seconds: float) -> int:
        """Forks; returns the child's process id."""
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child:
            return child
        code = 1
        try:
            os.setsid()
            log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(log, 1)
            os.dup2(log, 2)
            print(f"==== {phase.name}, attempt {attempt + 1}", flush=True)
            if phase.interpreted and self._device == "cpu":
                os.environ["TRITON_INTERPRET"] = "1"
            check = Check(
                phase.name, self.results, device=self._device, scale=self._scale, seconds=seconds, out=self._out
            )
            code = self._child(phase, check, attempt)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    @staticmethod
    def _child(phase: Phase, check: Check, attempt: int) -> int:
        try:
            phase.run(check, attempt)
        except DeviceLostError:
            return DEVICE_LOST
        except Exception as error:
            check.fail(phase.name, error)
            return RAISED
        return 0

    def _write(self, name: str, status: str, seconds: float) -> None:
        append(
            self.results, {"phase": name, "kind": "phase", "name": name, "status": status, "seconds": round(seconds, 1)}
        )
        print(f"{name:14}{status:40}{seconds:7.1f} s", flush=True)


class _Running:
    """A phase that runs, through all its attempts."""

    def __init__(self, runner: Runner, phase: Phase, seconds: float):
        self._runner, self._phase = runner, phase
        self._started = time.monotonic()
        self._until = self._started + seconds
        self._attempt = 0
        self._child: int | None = runner.start(phase, 0, _inside(seconds))

    def is_running(self) -> bool:
        """Looks after it: ends it at its limit, and starts it again after a crash."""
        if self._child is None:
            return False
        done, status = os.waitpid(self._child, os.WNOHANG)
        now = time.monotonic()
        if not done:
            if now < self._until:
                return True
            self.kill()
            self._runner._write(self._phase.name, "stopped at its time limit", now - self._started)
            return False
        self._kill_group(self._child)  # whatever it has started
        self._child = None
        code = os.waitstatus_to_exitcode(status)
        crashed = code < 0 or code in (DEVICE_LOST, RAISED)
        left = self._until - now
        self._attempt += 1
        if crashed and self._attempt < self._phase.attempts and left > _LEAST_SECONDS:
            self._child = self._runner.start(self._phase, self._attempt, _inside(left))
            return True
        states = {0: "done", RAISED: "ended with an error", DEVICE_LOST: "lost the device"}
        state = states.get(code, f"crashed ({_signal_name(-code)})" if code < 0 else f"ended with code {code}")
        if self._attempt > 1:
            state += f", {self._attempt} processes"
        self._runner._write(self._phase.name, state, now - self._started)
        return False

    def kill(self) -> None:
        """Ends it and all it has started."""
        if self._child is not None:
            self._kill_group(self._child)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._child, 0)
            self._child = None

    @staticmethod
    def _kill_group(child: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)


def _inside(seconds: float) -> float:
    """What a phase plans with, so that it ends by itself before it is ended."""
    return seconds - min(2.0, 0.1 * seconds)


def _signal_name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"
