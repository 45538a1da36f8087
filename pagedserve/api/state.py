"""What all routes share: the engine, the names it is served under, and the requests that are running."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.requests import HTTPConnection

from pagedserve.api.parsed_output import OutputFormats
from pagedserve.api.request_log import RequestLog
from pagedserve.api.responses_store import ResponseStore
from pagedserve.config import ServerConfig, parse_bytes
from pagedserve.errors import EngineDeadError, NotFoundError, PagedServeError
from pagedserve.log import get_logger
from pagedserve.metrics import EngineMetrics

if TYPE_CHECKING:
    from pagedserve.api.batch.service import BatchService
    from pagedserve.engine.async_llm_engine import AsyncLLMEngine

logger = get_logger(__name__)

MAX_REMEMBERED_FIELDS = 1000
# Of one request, and of one name.
MAX_LOGGED_NAMES = 20
MAX_LOGGED_NAME = 64


@dataclass(slots=True, eq=False)
class Running:
    """One request that is being answered; `error` says why the server itself ended it."""

    task: asyncio.Task[object]
    request_id: str | None = None
    error: PagedServeError | None = None


class InFlight:
    """The requests that are being answered, so that shutdown can wait for them or end them."""

    def __init__(self) -> None:
        self._running: set[Running] = set()

    def __len__(self) -> int:
        return len(self._running)

    @contextmanager
    def track(self, task: asyncio.Task[object], request: HTTPConnection) -> Iterator[Running]:
        """Count `task`, which answers `request`, as running inside the block."""
        running = Running(task, getattr(request.state, "request_id", None))
        self._running.add(running)
        try:
            yield running
        finally:
            self._running.discard(running)

    def request_ids(self) -> set[str | None]:
        """Ids of the requests that are being answered."""
        return {running.request_id for running in self._running}

    def abort(self, error: PagedServeError, request_id: str | None = None) -> bool:
        """End all of them, or those of that id; each client is told `error`. False where there was none."""
        ended = [running for running in self._running if request_id in (None, running.request_id)]
        for running in ended:
            running.error = error
            running.task.cancel()
        return bool(ended)


@dataclass(slots=True, eq=False)
class ApiState:
    """State of one server. `engine` is None while the model loads; `phase` then says how far it is."""

    config: ServerConfig
    model_names: tuple[str, ...]
    metrics: EngineMetrics
    engine: AsyncLLMEngine | None = None
    phase: str = "starting"
    is_draining: bool = False
    priorities_count: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    in_flight: InFlight = field(default_factory=InFlight)
    responses: ResponseStore = field(default_factory=ResponseStore)
    requests: RequestLog = field(default_factory=RequestLog)
    max_body_bytes: int = field(init=False)
    # Set by `build_app`, whose routes answer the lines of batches.
    batches: BatchService = field(init=False)
    _logged_fields: set[str] = field(default_factory=set)
    _formats: OutputFormats | None = None

    def __post_init__(self) -> None:
        self.max_body_bytes = parse_bytes(self.config.max_body_size, "--max-body-size")

    def why_not_ready(self) -> str | None:
        """None where requests can be served; the reason otherwise."""
        if self.engine is None:
            return f"the model is loading ({self.phase})"
        if self.engine.is_dead:
            return "the engine has stopped"
        if not self.engine.is_ready:
            return "the engine is starting"
        if self.is_draining:
            return "the server is shutting down"
        return None

    def why_unhealthy(self) -> str | None:
        """None where the engine lives and moves; the reason otherwise."""
        if self.engine is None:
            return f"the model is loading ({self.phase})"
        return self.engine.health()

    def ready_engine(self) -> AsyncLLMEngine:
        """The engine; EngineDeadError (503) where it cannot serve."""
        reason = self.why_not_ready()
        if reason is not None or self.engine is None:
            raise EngineDeadError(reason or "there is no engine")
        return self.engine

    def output_formats(self) -> OutputFormats:
        """How the served model writes tool calls and reasoning."""
        if self._formats is None:
            engine, config = self.ready_engine(), self.config
            template = engine.chat_template.source
            self._formats = OutputFormats.choose(
                config.tool_call_parser, config.reasoning_parser, template, engine.tokenizer
            )
        return self._formats

    def served_name(self, name: str | None) -> str:
        """The model's name for an answer: what the client called it, or the first name. NotFoundError otherwise."""
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            raise NotFoundError(f"The model `{name}` does not exist.", param="model", code="model_not_found")
        return name

    def log_unknown_fields(self, names: list[str]) -> None:
        """One mention in the log for each unknown field name, ever; a client's fancy does not fill memory or disk."""
        new = [name for name in (name[:MAX_LOGGED_NAME] for name in names) if name not in self._logged_fields]
        new = new[: min(MAX_LOGGED_NAMES, MAX_REMEMBERED_FIELDS - len(self._logged_fields))]
        if new:
            self._logged_fields.update(new)
            logger.warning("clients send fields that are unknown here and have no effect: %s", ascii(", ".join(new)))
