"""The core in a process of its own, which `core_main` begins.

Two threads. The main one steps and sends; the reader takes messages off the channel the moment they come, so it also
sees at once when the parent is gone (end of file), even in the middle of a step that hangs. Nothing of this process
outlives its parent.
"""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable

from pagedserve import log as log_module
from pagedserve.engine.channel import BlockingChannel, ChannelClosedError, ChannelFormatError, Codec
from pagedserve.engine.core import EngineCore, PhaseClock, build_core
from pagedserve.errors import ConfigError, DeviceLostError, EngineDeadError, ModelLoadError, ModelNotFoundError
from pagedserve.log import get_logger
from pagedserve.messages import FROM_CORE, TO_CORE, StartCore, StartupFailed, ToCore
from pagedserve.model_files import ModelFiles
from pagedserve.registry import load

log = get_logger(__name__)

# Heavy and sure to be needed: imported while the parent still looks for the model's files.
PRELOAD = "pagedserve.worker.worker"
# Meanwhile, in a thread: finds the model's files once the parent has said which, and begins to read them.
AHEAD = "pagedserve.worker.ahead:begin"

# What a step may still take when the parent is gone, before the process ends anyway.
GRACE_SECONDS = 2.0
# Idle for this long, the core proves its block accounts.
IDLE_CHECK_SECONDS = 1.0
# Nobody asked for anything for this long: work that makes later steps faster may begin, a piece at a time.
QUIET_SECONDS = 0.1
# A step that had nothing to run although requests wait: give messages this long before trying again.
STALLED_WAIT_SECONDS = 0.005


def serve(channel: BlockingChannel) -> int:
    """Wait for StartCore, build the core, loop until Shutdown or the parent's end. The exit code of the process."""
    inbox = Inbox(channel, at_end=_end_process)
    inbox.start()
    try:
        core = _start(channel, inbox)
        if core is None:
            return 2
        try:
            run(core, inbox)
        finally:
            core.shutdown()
    except ChannelClosedError:
        return 0
    except DeviceLostError as error:
        log.error("the engine core ends: %s; a new process may find the device well", error)
        return 1
    except Exception:
        log.exception("the engine core ends")
        return 1
    return 0


def _start(channel: BlockingChannel, inbox: Inbox) -> EngineCore | None:
    clock = PhaseClock(channel.send)
    clock.begin("importing torch")
    groundwork = Groundwork(inbox)
    _preload()
    clock.end()
    start = groundwork.start_message()
    try:
        core, ready = build_core(start.config, start.vocab_limit, channel.send, clock, groundwork.files)
    except ChannelClosedError:
        raise
    except (ConfigError, ModelNotFoundError, ModelLoadError) as error:
        channel.send(StartupFailed(kind=type(error).__name__, message=str(error)))
        return None
    except Exception as error:
        log.exception("the engine core could not start")
        message = f"the engine core could not start: {_one_line(error)}"
        channel.send(StartupFailed(kind=EngineDeadError.__name__, message=message))
        return None
    channel.send(ready)
    # What was loaded stays for good, and holds no garbage worth looking for: the collector need not walk it.
    gc.freeze()
    gc.enable()
    return core


def run(core: EngineCore, inbox: Inbox) -> None:
    """Messages between steps, steps while there is work, sleep while there is none."""
    checked = True
    is_ready = False  # nothing is left to do in quiet moments
    pause: float | None = None
    while not core.is_closing:
        if pause is not None:
            messages, pause = inbox.wait(pause), None
        elif core.has_work:
            messages = inbox.take()
        else:
            messages = inbox.wait(QUIET_SECONDS if not is_ready else None if checked else IDLE_CHECK_SECONDS)
            if not messages:
                if not is_ready:
                    is_ready = not core.use_quiet_moment()
                else:
                    core.check()
                    checked = True
                continue
        for message in messages:
            core.handle(message)
        if core.has_work and not core.is_closing:
            checked = is_ready = False
            if not core.step():
                pause = STALLED_WAIT_SECONDS


class Groundwork:
    """A thread that takes StartCore and does what needs no torch, while that is imported."""

    def __init__(self, inbox: Inbox):
        self._inbox = inbox
        self._start: ToCore | None = None
        self._error: Exception | None = None
        # None: they were not found. The core will look again, and tell what is wrong.
        self.files: ModelFiles | None = None
        self._thread = threading.Thread(target=self._run, name="groundwork", daemon=True)
        self._thread.start()

    def start_message(self) -> StartCore:
        """Waits until all is done. ChannelClosedError: the parent is gone."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        if not isinstance(self._start, StartCore):
            raise ChannelFormatError(f"the first message must be StartCore, not {type(self._start).__name__}")
        return self._start

    def _run(self) -> None:
        try:
            self._start = self._inbox.wait()[0]
        except ChannelClosedError as error:
            self._error = error
            return
        if isinstance(self._start, StartCore):
            with contextlib.suppress(Exception):
                self.files = load(AHEAD)(self._start.config.model)


class Inbox:
    """Messages of the channel in the order they came, read by a thread of its own, which calls `at_end` last."""

    def __init__(self, channel: BlockingChannel, at_end: Callable[[], None]):
        self._channel = channel
        self._at_end = at_end
        self._queue: queue.SimpleQueue[ToCore | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read, name="inbox", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def take(self) -> list[ToCore]:
        """What has come, without waiting."""
        messages: list[ToCore] = []
        with contextlib.suppress(queue.Empty):
            while True:
                messages.append(self._checked(self._queue.get_nowait()))
        return messages

    def wait(self, timeout: float | None = None) -> list[ToCore]:
        """What has come, waiting for the first; empty after `timeout` seconds."""
        try:
            first = self._checked(self._queue.get(timeout=timeout))
        except queue.Empty:
            return []
        return [first, *self.take()]

    def _checked(self, message: ToCore | None) -> ToCore:
        if message is None:
            raise ChannelClosedError("the API process is gone")
        return message

    def _read(self) -> None:
        try:
            while True:
                self._queue.put(self._channel.receive())
        except ChannelClosedError:
            pass
        except ChannelFormatError:
            log.exception("the API process sent a message that cannot be read")
        self._queue.put(None)
        self._at_end()


def _end_process() -> None:
    # The loop ends by itself between two steps; a step that hangs, or a model that still loads, must not hold us.
    time.sleep(GRACE_SECONDS)
    os._exit(1)


def _one_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _preload() -> None:
    # Whatever is wrong with the import is told when the model is loaded.
    with contextlib.suppress(Exception):
        __import__(PRELOAD)


def main() -> int:
    """The entry point: the number of the inherited socket, and how to log."""
    # Ctrl-C and a service manager's SIGTERM reach the whole group; draining is the parent's business.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    fd, log_level, log_format = sys.argv[1:]
    log_module.configure(process="core", level=log_level, fmt=log_format)
    sock = socket.socket(fileno=int(fd))
    return serve(BlockingChannel(sock, Codec(sends=FROM_CORE, receives=TO_CORE)))
