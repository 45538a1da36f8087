"""`pagedserve serve`: bind, start the engine, answer, drain."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import ssl
import sys
import time
from collections.abc import Iterator

import uvicorn
import uvloop

from pagedserve.api.app import build_app
from pagedserve.api.http_protocol import NoUpgradeProtocol
from pagedserve.api.parsed_output import check_names
from pagedserve.api.state import ApiState
from pagedserve.config import EngineConfig, ServerConfig
from pagedserve.engine.async_llm_engine import AsyncLLMEngine
from pagedserve.engine.core_spawn import SpawnedCore
from pagedserve.errors import ConfigError, PagedServeError, RequestAbortedError
from pagedserve.log import get_logger
from pagedserve.metrics import EngineMetrics

logger = get_logger(__name__)

__all__ = ["build_app", "run"]

EXIT_FAILURE = 1
BACKLOG = 2048
# Longer than the idle time after which common clients and proxies drop a connection, so that they do it, not we.
KEEP_ALIVE_SECONDS = 75
# What ends after the drain: error events, closing sockets.
LAST_SECONDS = 5


def run(engine_config: EngineConfig, server_config: ServerConfig, core: SpawnedCore | None = None) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code. `core` may have been started already.

    The port is bound before the model loads, so /health can say 503 meanwhile and a taken port fails at once.
    """
    check_names(server_config.tool_call_parser, server_config.reasoning_parser)
    _check_tls(server_config)
    try:
        listener = _bind(server_config)
        with listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_Service(engine_config, server_config, listener, core).run())
    except ConfigError:
        raise
    except PagedServeError as error:
        print(f"pagedserve serve: {error}", file=sys.stderr)
        return EXIT_FAILURE


def _check_tls(config: ServerConfig) -> None:
    """Raise ConfigError for certificates that cannot be used, before anything slow begins."""
    if config.ssl_certfile is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password=_no_password)
        if config.ssl_ca_certs is not None:
            context.load_verify_locations(config.ssl_ca_certs)
    except (OSError, ssl.SSLError, ValueError) as error:
        files = ", ".join(filter(None, (config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs)))
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise ConfigError(f"--ssl-certfile, --ssl-keyfile, --ssl-ca-certs ({files}): {reason}") from error


def _no_password() -> str:
    raise ValueError("the private key is encrypted; give one that is not")


def _bind(config: ServerConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
        listener.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or error
        raise PagedServeError(
            f"cannot listen on {config.host} port {config.port}: {reason}; choose others with --host and --port"
        ) from error
    listener.setblocking(False)
    return listener


class _HttpServer(uvicorn.Server):
    """uvicorn without its own signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Service:
    """One life of the server."""

    def __init__(
        self,
        engine_config: EngineConfig,
        server_config: ServerConfig,
        listener: socket.socket,
        core: SpawnedCore | None,
    ):
        self._engine_config = engine_config
        self._core = core
        self._config = server_config
        self._listener = listener
        self._started = time.monotonic()
        names = server_config.served_model_name or (engine_config.model.model,)
        metrics = EngineMetrics(names[0])
        self._state = ApiState(
            server_config,
            names,
            metrics,
            priorities_count=engine_config.scheduler.policy == "priority",
        )
        self._http = self._http_server()
        self._num_signals = 0
        self._stop = asyncio.Event()

    def _http_server(self) -> _HttpServer:
        # uvicorn's few lines go where ours go.
        logging.getLogger("uvicorn").handlers = logging.getLogger("pagedserve").handlers
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        logging.getLogger("uvicorn").propagate = False
        return _HttpServer(
            uvicorn.Config(
                build_app(self._state),
                loop="none",
                http=NoUpgradeProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                ssl_certfile=self._config.ssl_certfile,
                ssl_keyfile=self._config.ssl_keyfile,
                ssl_ca_certs=self._config.ssl_ca_certs,
                ssl_cert_reqs=ssl.CERT_REQUIRED if self._config.ssl_ca_certs else ssl.CERT_NONE,
                timeout_graceful_shutdown=int(self._config.shutdown_timeout) + LAST_SECONDS,
            )
        )

    async def run(self) -> int:
        """Serve; returns the exit code. Raises what the engine's start raises."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        if self._config.data_dir is not None:
            # First: a folder that is in use is known in no time. Lines wait until there is an engine.
            await self._state.batches.start()
        http = asyncio.create_task(self._http.serve(sockets=[self._listener]), name="http")
        start = asyncio.create_task(self._start_engine(), name="engine-start")
        stop = asyncio.create_task(self._stop.wait(), name="stop")
        try:
            await asyncio.wait((start, stop, http), return_when=asyncio.FIRST_COMPLETED)
            if start.done():
                self._state.engine = start.result()
                gc.freeze()
                gc.enable()
                self._greet(self._state.engine)
                await asyncio.wait((stop, http), return_when=asyncio.FIRST_COMPLETED)
                await self._drain()
            return 0
        finally:
            start.cancel()
            stop.cancel()
            await asyncio.gather(start, stop, return_exceptions=True)
            self._http.should_exit = True
            await http
            if self._state.engine is not None:
                await self._state.engine.shutdown(timeout=0.0)

    async def _start_engine(self) -> AsyncLLMEngine:
        return await AsyncLLMEngine.start(
            self._engine_config,
            metrics=self._state.metrics,
            log_level=self._config.log_level,
            log_format=self._config.log_format,
            on_progress=self._on_progress,
            core=self._core,
        )

    def _on_progress(self, phase: str) -> None:
        self._state.phase = phase
        logger.info("%s (%.1f s)", phase, time.monotonic() - self._started)

    def _on_signal(self) -> None:
        self._num_signals += 1
        self._stop.set()
        if self._num_signals == 2:
            logger.warning("second signal: ending the running requests now")
            self._state.in_flight.abort(RequestAbortedError("the server is shutting down"))

    async def _drain(self) -> None:
        """Take no new requests, give the running ones --shutdown-timeout seconds, then end them with an error."""
        state, timeout = self._state, self._config.shutdown_timeout
        state.is_draining = True
        # Their lines are not waited for: the next start goes on with them.
        await state.batches.stop()
        self._http.should_exit = True
        if len(state.in_flight):
            logger.info("shutting down; %d requests have up to %.0f s to finish", len(state.in_flight), timeout)
        deadline = time.monotonic() + timeout
        while len(state.in_flight) and time.monotonic() < deadline and self._num_signals < 2:
            await asyncio.sleep(0.02)
        if len(state.in_flight):
            logger.warning("ending %d requests that did not finish in time", len(state.in_flight))
            state.in_flight.abort(RequestAbortedError("the server is shutting down"))
            await asyncio.sleep(0)
        if self._num_signals >= 2:
            self._http.force_exit = True

    def _greet(self, engine: AsyncLLMEngine) -> None:
        host, port = self._listener.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        base = f"{'http' if self._config.ssl_certfile is None else 'https'}://{host}:{port}"
        name = self._state.model_names[0]
        logger.info("serving %s at %s after %.1f s", name, base, time.monotonic() - self._started)
        formats = self._state.output_formats()
        if formats.tool_name or formats.reasoning_name:
            tools, thoughts = formats.tool_name or "none", formats.reasoning_name or "none"
            logger.info("tool calls are read as %s, reasoning as %s", tools, thoughts)
        route = "chat/completions" if engine.chat_template.exists else "completions"
        ask = '"messages":[{"role":"user","content":"Hello!"}]' if engine.chat_template.exists else '"prompt":"Hello"'
        logger.info("try: curl %s/v1/%s -H 'Content-Type: application/json' -d '{%s}'", base, route, ask)
        logger.info('or:  openai.OpenAI(base_url="%s/v1", api_key="none") in Python; docs at %s/docs', base, base)
