"""The front's hold on a core: in this thread, or in a process of its own. Messages in, EngineCoreOutputs out."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import subprocess
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from pagedserve import errors
from pagedserve.config import EngineConfig
from pagedserve.engine.async_channel import AsyncChannel
from pagedserve.engine.channel import ChannelClosedError, Codec
from pagedserve.engine.core_spawn import SpawnedCore
from pagedserve.errors import EngineDeadError, PagedServeError
from pagedserve.log import get_logger
from pagedserve.messages import (
    FROM_CORE,
    TO_CORE,
    Call,
    CallResult,
    EngineCoreOutputs,
    FromCore,
    Progress,
    Ready,
    Shutdown,
    StartCore,
    StartupFailed,
    ToCore,
)

if TYPE_CHECKING:
    from pagedserve.engine.core import EngineCore

log = get_logger(__name__)

PING_SECONDS = 2.0
SHUTDOWN_SECONDS = 5.0

OnProgress = Callable[[str], None]


class CoreClient(Protocol):
    """What the front may do with a core, wherever it runs."""

    ready: Ready | None

    @property
    def is_dead(self) -> bool: ...

    def send(self, message: ToCore) -> None:
        """Hand over a message; EngineDeadError where nobody takes it."""


class InlineCoreClient:
    """The core in the caller's thread: it moves when `step` is called."""

    def __init__(self, config: EngineConfig, *, vocab_limit: int | None = None, on_progress: OnProgress | None = None):
        self._outbox: list[EngineCoreOutputs] = []
        self._results: dict[int, CallResult] = {}
        self._on_progress = on_progress
        self._call_ids = itertools.count()
        self.is_dead = False
        from pagedserve.engine.core import build_core  # a server's front does without

        self._core: EngineCore
        self._core, self.ready = build_core(config, vocab_limit, self._take)

    @property
    def core(self) -> EngineCore:
        """The core itself, for tests that look at its accounts."""
        return self._core

    @property
    def has_work(self) -> bool:
        """True where a step would do something."""
        return self._core.has_work or bool(self._outbox)

    def send(self, message: ToCore) -> None:
        """Hand over a message; its answers wait for `receive`."""
        if self.is_dead:
            raise EngineDeadError("the engine was shut down")
        self._core.handle(message)

    def step(self) -> list[EngineCoreOutputs]:
        """One step where there is work, and everything that the core has said since the last call."""
        try:
            if self._core.has_work:
                self._core.step()
            else:
                self._core.check()
        except Exception:
            self.is_dead = True
            raise
        return self.receive()

    def receive(self) -> list[EngineCoreOutputs]:
        """What the core has said since the last call."""
        outputs, self._outbox = self._outbox, []
        return outputs

    def call(self, method: str) -> Any:
        """Ask the core and return its answer."""
        call_id = next(self._call_ids)
        self.send(Call(call_id=call_id, method=method))
        return _value(self._results.pop(call_id))

    def shutdown(self) -> None:
        """Free the worker; safe to call twice."""
        if not self.is_dead:
            self.is_dead = True
            self._core.shutdown()

    def _take(self, message: FromCore) -> None:
        match message:
            case EngineCoreOutputs():
                self._outbox.append(message)
            case CallResult():
                self._results[message.call_id] = message
            case Progress(phase=phase):
                if self._on_progress is not None:
                    self._on_progress(phase)


class ProcessCoreClient:
    """The core in a child process, driven from an event loop.

    `on_outputs` gets each step's outputs; `on_death` is called once if the core ends on its own. Both run on the loop
    and must not raise.
    """

    def __init__(self, on_outputs: Callable[[EngineCoreOutputs], None], on_death: Callable[[str], None]):
        self._on_outputs = on_outputs
        self._on_death = on_death
        self._on_progress: OnProgress | None = None
        self._channel: AsyncChannel | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._started: asyncio.Future[Ready] | None = None
        self._closed: asyncio.Future[None] | None = None
        self._calls: dict[int, asyncio.Future[CallResult]] = {}
        self._call_ids = itertools.count()
        self._pinger: asyncio.Task[None] | None = None
        self._ping_sent: float | None = None
        self._is_closing = False
        # Why the core is gone, in one line.
        self.death: str | None = None
        self.ready: Ready | None = None

    @property
    def is_dead(self) -> bool:
        return self.death is not None

    @property
    def pid(self) -> int | None:
        """Process id of the core."""
        return self._process.pid if self._process else None

    @property
    def seconds_without_answer(self) -> float:
        """How long the core has left a ping unanswered: it answers between any two steps, and at once when idle."""
        return 0.0 if self._ping_sent is None else time.monotonic() - self._ping_sent

    async def connect(self, core: SpawnedCore, *, on_progress: OnProgress | None = None) -> None:
        """Take over a process that was spawned; `start` tells it what to load."""
        self._on_progress = on_progress
        loop = asyncio.get_running_loop()
        self._started, self._closed = loop.create_future(), loop.create_future()
        self._process = core.process
        codec = Codec(sends=TO_CORE, receives=FROM_CORE)
        self._channel = await AsyncChannel.open(core.socket, codec, self._take, self._lost)

    async def start(self, config: EngineConfig, *, vocab_limit: int | None = None) -> Ready:
        """Load the model. Raises the core's ConfigError, ModelNotFoundError, ModelLoadError or EngineDeadError."""
        assert self._started is not None
        self.send(StartCore(config=config, vocab_limit=vocab_limit))
        self.ready = await self._started
        self._pinger = asyncio.create_task(self._ping(), name="core-ping")
        return self.ready

    def send(self, message: ToCore) -> None:
        """Queue a message for the core; EngineDeadError where it is gone."""
        if self.death is not None:
            raise EngineDeadError(self.death)
        if self._channel is None:
            raise EngineDeadError("the engine core is not running")
        try:
            self._channel.send(message)
        except ChannelClosedError as error:
            raise EngineDeadError("the engine core is gone") from error

    async def call(self, method: str) -> Any:
        """Ask the core and wait for its answer."""
        call_id = next(self._call_ids)
        answer: asyncio.Future[CallResult] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = answer
        try:
            self.send(Call(call_id=call_id, method=method))
            return _value(await answer)
        finally:
            self._calls.pop(call_id, None)

    async def shutdown(self, timeout: float = SHUTDOWN_SECONDS) -> None:
        """End the process: politely, and after `timeout` seconds by force. Safe to call twice, and in any state."""
        self._is_closing = True
        if self._pinger is not None:
            self._pinger.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._pinger
            self._pinger = None
        if self._channel is not None:
            with contextlib.suppress(ChannelClosedError):
                self._channel.send(Shutdown())
            # A core that still loads reads no messages; the end of the channel ends it.
            if self.ready is None:
                self._channel.close()
        if self._process is not None:
            await self._reap(self._process, timeout)
        if self._channel is not None and self._closed is not None:
            self._channel.close()
            await self._closed

    def abandon(self) -> None:
        """Let go of a core that cannot be understood: it ends, and everybody who waits for it is told."""
        if self._channel is not None:
            self._channel.close()

    async def _reap(self, process: subprocess.Popen[bytes], timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        if process.poll() is None:
            if timeout:
                log.warning("the engine core did not end within %.0f s and is killed", timeout)
            process.kill()
            await asyncio.to_thread(process.wait)

    async def _ping(self) -> None:
        # A core that dies is reported by the end of its channel.
        with contextlib.suppress(EngineDeadError):
            while True:
                await asyncio.sleep(PING_SECONDS)
                self._ping_sent = time.monotonic()
                await self.call("ping")
                self._ping_sent = None

    def _take(self, message: FromCore) -> None:
        match message:
            case EngineCoreOutputs():
                self._on_outputs(message)
            case CallResult():
                answer = self._calls.pop(message.call_id, None)
                if answer is not None and not answer.done():
                    answer.set_result(message)
            case Progress(phase=phase):
                if self._on_progress is not None:
                    self._on_progress(phase)
            case Ready():
                self._settle(message)
            case StartupFailed(kind=kind, message=text):
                self._settle(getattr(errors, kind, EngineDeadError)(text))

    def _lost(self, error: Exception | None) -> None:
        """The channel ended: the core is gone, whatever the reason. Nobody may wait for it any longer."""
        assert self._closed is not None
        if not self._closed.done():
            self._closed.set_result(None)
        self.death = self._obituary(error)
        if not self._is_closing and self.ready is not None:
            log.error("%s", self.death)
        self._settle(EngineDeadError(self.death))
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(EngineDeadError(self.death))
        self._calls.clear()
        if not self._is_closing:
            self._on_death(self.death)

    def _obituary(self, error: Exception | None) -> str:
        if self._is_closing:
            return "the engine was shut down"
        if error is not None:
            return f"the engine core is unreachable: {error}"
        assert self._process is not None
        try:
            code = self._process.wait(timeout=0.1)
        except subprocess.TimeoutExpired:
            return "the engine core closed its channel"
        if code >= 0:
            return f"the engine core ended with exit code {code}"
        hint = ", as the system does when memory is short" if code == -signal.SIGKILL else ""
        return f"the engine core died of signal {-code}{hint}"

    def _settle(self, result: Ready | PagedServeError) -> None:
        if self._started is None or self._started.done():
            return
        if isinstance(result, Ready):
            self._started.set_result(result)
        else:
            self._started.set_exception(result)
            # Where start() was never awaited, nobody else will look at it.
            self._started.exception()


def _value(result: CallResult) -> Any:
    if result.error is not None:
        raise PagedServeError(result.error)
    return result.value
