from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pagedserve.config import EngineConfig
from pagedserve.engine import core_process
from pagedserve.engine.channel import BlockingChannel, ChannelClosedError, Codec
from pagedserve.engine.core_process import Inbox, run
from pagedserve.engine.core_spawn import socket_pair
from pagedserve.messages import FROM_CORE, TO_CORE, AbortRequests, Call, Ready, Shutdown, StartCore
from tests.engine.test_channel import PLAN


class RecordingCore:
    """What the loop does to a core, in order. `work` steps are left; a step may be slow or find nothing to run."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.work = 0
        self.is_closing = False
        self.moves = True
        self.num_pieces = 0  # of work for quiet moments
        self.in_step: Callable[[], None] = lambda: None
        self.at_message: Callable[[], None] = lambda: None

    @property
    def has_work(self) -> bool:
        return self.work > 0

    def handle(self, message: object) -> None:
        self.events.append(type(message).__name__)
        if isinstance(message, Shutdown):
            self.is_closing = True
        self.at_message()

    def step(self) -> bool:
        self.events.append("step")
        self.in_step()
        self.work -= self.moves
        return self.moves

    def use_quiet_moment(self) -> bool:
        if self.num_pieces:
            self.num_pieces -= 1
            self.events.append("prepare")
            return True
        return False

    def check(self) -> None:
        self.events.append("check")


class Loop:
    """`run` in a thread of its own, with the API's end of the channel."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(core_process, "IDLE_CHECK_SECONDS", 0.05)
        monkeypatch.setattr(core_process, "QUIET_SECONDS", 0.01)
        ours, theirs = socket_pair()
        self.api = BlockingChannel(ours, Codec(sends=TO_CORE, receives=FROM_CORE))
        self.their_end = BlockingChannel(theirs, Codec(sends=FROM_CORE, receives=TO_CORE))
        self.inbox = Inbox(self.their_end, at_end=lambda: None)
        self.inbox.start()
        self.core: Any = RecordingCore()
        self.outcome: list[BaseException | None] = []
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            run(self.core, self.inbox)
            self.outcome.append(None)
        except BaseException as error:
            self.outcome.append(error)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60.0
        while not condition():
            assert time.monotonic() < deadline, f"it never came true: {self.core.events}"
            time.sleep(0.002)


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    loop = Loop(monkeypatch)
    yield loop
    loop.api.close()
    if loop.thread.ident:
        loop.thread.join(60)
    loop.inbox._thread.join(60)
    assert not loop.inbox._thread.is_alive()
    loop.their_end.close()


def test_an_idle_core_sleeps_until_a_message_comes(loop: Loop) -> None:
    loop.thread.start()
    time.sleep(0.2)
    assert loop.core.events == []
    loop.api.send(Call(call_id=1, method="ping"))
    loop.until(lambda: loop.core.events == ["Call"])
    loop.api.send(Shutdown())
    loop.thread.join(60)
    assert loop.core.events == ["Call", "Shutdown"]
    assert loop.outcome == [None]


def test_messages_are_taken_between_steps_in_their_order(loop: Loop) -> None:
    loop.core.work = 3

    def send_once() -> None:
        loop.core.in_step = lambda: None
        loop.api.send(AbortRequests(request_ids=["a"]))
        loop.api.send(Call(call_id=1, method="ping"))
        loop.until(lambda: loop.inbox._queue.qsize() == 2)

    loop.core.in_step = send_once
    loop.thread.start()
    loop.until(lambda: loop.core.work == 0)
    assert loop.core.events[:5] == ["step", "AbortRequests", "Call", "step", "step"]


def test_accounts_are_checked_once_after_work(loop: Loop) -> None:
    loop.core.work = 2
    loop.thread.start()
    loop.until(lambda: "check" in loop.core.events)
    time.sleep(0.2)
    assert loop.core.events == ["step", "step", "check"]


def test_quiet_moments_are_used_until_somebody_comes(loop: Loop) -> None:
    loop.core.num_pieces = 3
    loop.thread.start()
    loop.until(lambda: loop.core.num_pieces == 0)

    # By the loop's own thread: it sees all of it at once, and not before the message.
    def bring_work() -> None:
        loop.core.at_message = lambda: None
        loop.core.num_pieces, loop.core.work = 10**9, 1

    loop.core.at_message = bring_work
    loop.api.send(Call(call_id=1, method="ping"))
    loop.until(lambda: "step" in loop.core.events and loop.core.events[-1] == "prepare")
    loop.api.send(Shutdown())
    loop.thread.join(60)
    events = loop.core.events
    assert loop.outcome == [None] and events[-1] == "Shutdown"
    assert events[: events.index("step")] == ["prepare"] * 3 + ["Call"], (
        "between messages and steps nothing is prepared"
    )


def test_a_step_that_finds_nothing_to_run_does_not_spin(loop: Loop) -> None:
    loop.core.work = 1
    loop.core.moves = False
    begin = time.monotonic()
    loop.thread.start()
    loop.until(lambda: loop.core.events.count("step") > 20)
    num_steps = loop.core.events.count("step")
    assert num_steps <= (time.monotonic() - begin) / core_process.STALLED_WAIT_SECONDS + 1
    loop.api.send(Shutdown())
    loop.thread.join(60)
    assert loop.outcome == [None]


@pytest.mark.parametrize("work", [0, 10**9])
def test_the_end_of_the_parent_ends_the_loop(loop: Loop, work: int) -> None:
    loop.core.work = work
    loop.core.in_step = lambda: time.sleep(0.001)
    loop.thread.start()
    loop.api.close()
    loop.thread.join(60)
    assert len(loop.outcome) == 1 and isinstance(loop.outcome[0], ChannelClosedError)


def test_a_message_that_cannot_be_read_ends_the_loop(loop: Loop) -> None:
    loop.thread.start()
    loop.api._socket.sendall(b"\x01\x00\x00\x00\x63\x00")
    loop.thread.join(60)
    assert isinstance(loop.outcome[0], ChannelClosedError)


def test_the_collector_works_again_once_the_model_is_loaded(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """`core_main` switches it off for the start; what was made until then is not walked any more."""
    ready = Ready(plan=PLAN, max_model_len=16)
    monkeypatch.setattr(core_process, "build_core", lambda *args: (loop.core, ready))
    monkeypatch.setattr(core_process, "PRELOAD", "json")
    monkeypatch.setattr(core_process, "AHEAD", "builtins:repr")
    gc.disable()
    try:
        loop.api.send(StartCore(config=EngineConfig()))
        assert core_process._start(loop.their_end, loop.inbox) is loop.core
        assert gc.isenabled() and gc.get_freeze_count() > 0
    finally:
        gc.enable()
        gc.unfreeze()


def test_no_extension_module_waits_for_torchs_library() -> None:
    """The system loads one library at a time: whatever the core needs is there before torch's is begun."""
    code = (
        "import sys; from importlib import import_module\n"
        "from pagedserve.engine import core_main\n"
        "for name in (*core_main._WITH_EXTENSIONS, core_main._TORCH_AHEAD): import_module(name)\n"
        "before = set(sys.modules)\n"
        "import pagedserve.engine.core_process\n"
        "late = {name: getattr(module, '__file__', None) or '' for name, module in sys.modules.items()}\n"
        "print(*(name for name, file in late.items() if file.endswith('.so') and name not in before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_what_the_core_does_without_at_first_waits() -> None:
    """Grammars and tokenizers are for the requests that ask for them."""
    code = "import sys, pagedserve.engine.core_process; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"asyncio", "llguidance", "tokenizers", "torch"} & set(modules)


def test_a_front_holds_no_core() -> None:
    """What steps and schedules lives in the core's process; the front's own imports run beside that of torch, on cores
    that this wants too."""
    code = "import sys, pagedserve.api.server; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"pagedserve.engine.core", "pagedserve.scheduler", "pagedserve.executor"} & set(modules)
    assert not {"llguidance", "numpy"} & set(modules)


def test_what_begins_the_core_is_light() -> None:
    """Torch's import is the longest part of a start: nothing that can wait comes before it."""
    code = "import sys, pagedserve.cli.serve, pagedserve.engine.core_spawn; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"asyncio", "msgspec", "numpy", "torch", "fastapi", "pydantic", "uvicorn", "tokenizers"} & set(modules)
