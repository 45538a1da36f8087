"""A batch without a server: one file in, one file out, the same routes between."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
from tqdm import tqdm

from pagedserve.api.app import build_app
from pagedserve.api.batch.lines import check_file, error_line, output_line, parse, read_lines
from pagedserve.api.batch.service import custom_id_of, patient
from pagedserve.api.state import ApiState
from pagedserve.config import EngineConfig, ServerConfig
from pagedserve.engine.async_llm_engine import AsyncLLMEngine
from pagedserve.errors import ConfigError, RequestError
from pagedserve.metrics import EngineMetrics


@dataclass(slots=True)
class Counts:
    """How it went; `skipped` lines had an answer already."""

    completed: int = 0
    failed: int = 0
    skipped: int = 0


async def run_file(
    config: EngineConfig, source: Path, target: Path, *, names: tuple[str, ...], concurrency: int, resume: bool
) -> Counts:
    """Answer every line of `source` into `target`, each as soon as it is there.

    With `resume` the lines that `target` has a good answer for are left out, and new answers are added to it.
    Raises ConfigError for files that cannot be read or written, and what the engine's start raises.
    """
    state = ApiState(ServerConfig(), names, EngineMetrics(names[0]))
    build_app(state)
    urls = state.batches.urls
    try:
        checked = await asyncio.to_thread(check_file, source, urls)
        done = await asyncio.to_thread(_answered, target) if resume else set()
        if target.exists() and not resume:
            raise ConfigError(f"{target} is there already; go on with it by --resume, or remove it")
        output = target.open("ab")
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from error
    with output:
        if not checked.num_lines:
            raise ConfigError(f"{source} has no lines")
        engine = await AsyncLLMEngine.start(config, log_level="warning")
        state.engine = engine
        try:
            return await _answer(state, read_lines(source), output, done, concurrency, checked.num_lines)
        finally:
            await engine.shutdown()


async def _answer(
    state: ApiState,
    lines: Iterator[tuple[int, bytes]],
    output: BinaryIO,
    done: Collection[str],
    concurrency: int,
    total: int,
) -> Counts:
    counts = Counts()
    bar = tqdm(total=total, desc="run-batch", unit="req", file=sys.stderr, disable=not sys.stderr.isatty())

    async def work() -> None:
        for number, raw in lines:
            custom_id = custom_id_of(raw)
            if custom_id in done:
                counts.skipped += 1
            else:
                document, is_ok = await _document(state, number, raw, custom_id)
                output.write(document + b"\n")
                output.flush()
                counts.completed += is_ok
                counts.failed += not is_ok
            bar.update()

    with contextlib.closing(bar):
        await asyncio.gather(*(work() for _ in range(concurrency)))
    return counts


async def _document(state: ApiState, number: int, raw: bytes, custom_id: str) -> tuple[bytes, bool]:
    try:
        line = parse(raw, state.batches.urls)
    except RequestError as error:
        return error_line(custom_id, error.code or "invalid_request", f"line {number}: {error.message}"), False
    request_id = f"line-{number}"
    answer = await patient(state.batches.app, line.url, bytes(line.body), request_id)
    return output_line(custom_id, request_id, answer), 200 <= answer.status < 300


class _Response(msgspec.Struct):
    status_code: int


class _Written(msgspec.Struct):
    custom_id: str
    response: _Response | None = None


def _answered(target: Path) -> set[str]:
    """The custom ids that have a good answer; a line that a crash cut short is cut off."""
    done: set[str] = set()
    if not target.exists():
        return done
    with target.open("r+b") as file:
        good = 0
        for raw in file:
            if not raw.endswith(b"\n"):
                break
            good += len(raw)
            with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
                line = msgspec.json.decode(raw, type=_Written)
                if line.response is not None and 200 <= line.response.status_code < 300:
                    done.add(line.custom_id)
        file.truncate(good)
    return done
