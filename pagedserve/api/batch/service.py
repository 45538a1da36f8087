"""Runs batches one after the other, a few lines at a time, behind everybody else; goes on where a crash ended it."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from starlette.types import ASGIApp

from pagedserve.api.batch.lines import Answer, ask, check_file, error_line, output_line, parse, read_lines
from pagedserve.api.batch.store import BatchStore
from pagedserve.api.protocol.batches import Batch, BatchError, BatchErrors, BatchRequest, ExpiresAfter
from pagedserve.config import ServerConfig, parse_bytes
from pagedserve.errors import PagedServeError, RequestError
from pagedserve.log import get_logger

logger = get_logger(__name__)

# Full queues and engines that come back: a line is asked again after this, or what Retry-After says.
RETRY_SECONDS = 2.0
# How often batches and files are looked through for those that have expired.
SWEEP_SECONDS = 60.0


class _Tokens(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0


class _Answered(msgspec.Struct):
    usage: _Tokens | None = None


class BatchService:
    """Files and batches of one server. `app` answers the lines; its POST routes in `urls` may be asked."""

    def __init__(self, config: ServerConfig, model_names: tuple[str, ...], app: ASGIApp, urls: frozenset[str]):
        self.urls = urls
        self._folder = None if config.data_dir is None else Path(config.data_dir)
        self._quota_bytes = parse_bytes(config.data_dir_quota, "--data-dir-quota")
        self._num_workers = config.batch_concurrency
        self._model_names = model_names
        self.app = app
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._store: BatchStore | None = None
        self._opening = asyncio.Lock()
        self._runner: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        # Ends the lines that run now: the batch was cancelled.
        self._halt = asyncio.Event()

    async def start(self) -> BatchStore:
        """Open the data folder and go on with what is unfinished; ConfigError where another server has the folder.

        Without --data-dir the folder is a temporary one, made here and removed by `stop`.
        """
        async with self._opening:
            if self._store is None:
                folder = self._folder
                if folder is None:
                    self._scratch = tempfile.TemporaryDirectory(prefix="pagedserve-")
                    folder = Path(self._scratch.name)
                    logger.info("files and batches end with this server; --data-dir keeps them")
                self._store = await asyncio.to_thread(BatchStore, folder, quota_bytes=self._quota_bytes)
                self._runner = asyncio.create_task(self._run(self._store), name="batches")
        return self._store

    async def stop(self) -> None:
        """End the lines that run, which a later start repeats, and close the folder."""
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.gather(self._runner, return_exceptions=True)
            self._runner = None
        if self._store is not None:
            self._store.close()
            self._store = None
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None

    async def create(self, request: BatchRequest) -> Batch:
        """Take a batch in; its lines are checked and run later."""
        if request.endpoint not in self.urls:
            raise RequestError(f"endpoint {request.endpoint!a}: use {', '.join(sorted(self.urls))}", param="endpoint")
        seconds = request.window_seconds
        store = await self.start()
        file = await asyncio.to_thread(store.file, request.input_file_id)
        if file.purpose != "batch":
            raise RequestError(f"file {file.id} was not uploaded with purpose batch", param="input_file_id")
        now = int(time.time())
        batch = Batch(
            id=f"batch_{uuid.uuid4().hex}",
            endpoint=request.endpoint,
            input_file_id=file.id,
            completion_window=request.completion_window,
            created_at=now,
            expires_at=now + seconds,
            output_expires_after=request.output_expires_after and ExpiresAfter(request.output_expires_after.seconds),
            metadata=request.metadata,
        )
        await asyncio.to_thread(store.add_batch, batch)
        self._wake.set()
        return batch

    async def cancel(self, batch_id: str) -> Batch:
        """Begin to cancel; RequestError where the batch is over."""

        def change(batch: Batch) -> None:
            if batch.is_over:
                raise RequestError(f"batch {batch_id} is {batch.status} already", param="batch_id")
            if batch.status != "finalizing":
                batch.status = "cancelling"
                batch.cancelling_at = batch.cancelling_at or int(time.time())

        store = await self.start()
        batch = await asyncio.to_thread(store.change_batch, batch_id, change)
        self._halt.set()
        self._wake.set()
        return batch

    # -- the runner ---------------------------------------------------------------------------------------------------

    async def _run(self, store: BatchStore) -> None:
        while True:
            self._wake.clear()
            await asyncio.to_thread(store.remove_expired_files)
            batch = self._next(await asyncio.to_thread(store.unfinished_batches))
            if batch is None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), SWEEP_SECONDS)
                continue
            try:
                await self._advance(store, batch)
            except Exception as error:
                logger.exception("batch %s failed", batch.id)
                message = str(error) if isinstance(error, PagedServeError) else "internal error"
                await self._fail(store, batch, [BatchError("internal_error", message)])

    def _next(self, batches: list[Batch]) -> Batch | None:
        """The oldest batch with something to do here; those of models that others serve wait until they expire."""
        now = time.time()
        for batch in batches:
            is_served = batch.model is None or batch.model in self._model_names
            if is_served or batch.expires_at <= now or batch.status == "cancelling":
                return batch
        return None

    async def _advance(self, store: BatchStore, batch: Batch) -> None:
        """Take a batch to its end."""
        self._halt.clear()
        path = store.input_path(batch)
        if batch.status == "validating":
            batch = await self._validate(store, batch, path)
        if batch.status == "in_progress":
            await self._answer_lines(store, batch, path)
        if not batch.is_over:
            await self._finalize(store, batch.id, path)

    async def _validate(self, store: BatchStore, batch: Batch, path: Path) -> Batch:
        checked = await asyncio.to_thread(check_file, path, (batch.endpoint,))
        if not checked.errors and checked.model is not None and checked.model not in self._model_names:
            message = f"The model `{checked.model}` does not exist."
            checked.errors.append(BatchError("model_not_found", message, 1, "model"))
        if checked.errors:
            return await self._fail(store, batch, checked.errors)

        def change(batch: Batch) -> None:
            batch.model = checked.model or self._model_names[0]
            batch.request_counts.total = checked.num_lines
            if batch.status == "validating":
                batch.status = "in_progress"
                batch.in_progress_at = int(time.time())

        return await asyncio.to_thread(store.change_batch, batch.id, change)

    async def _fail(self, store: BatchStore, batch: Batch, errors: list[BatchError]) -> Batch:
        def change(batch: Batch) -> None:
            batch.status, batch.failed_at = "failed", int(time.time())
            batch.errors = BatchErrors(errors)

        return await asyncio.to_thread(store.change_batch, batch.id, change)

    async def _answer_lines(self, store: BatchStore, batch: Batch, path: Path) -> None:
        """Answer what has no answer yet, until it is done, cancelled or expired."""
        answered = await asyncio.to_thread(store.answered_lines, batch.id)
        if answered:
            logger.info("batch %s goes on after %d lines", batch.id, len(answered))
        lines = read_lines(path, skip=answered)
        reading = asyncio.Lock()
        workers = [
            asyncio.create_task(self._work(store, batch, lines, reading), name=f"{batch.id}-{i}")
            for i in range(self._num_workers)
        ]
        halt = asyncio.create_task(self._halt.wait())
        try:
            work = asyncio.gather(*workers)
            timeout = max(batch.expires_at - time.time(), 0)
            await asyncio.wait((work, halt), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                await work
        finally:
            for task in (halt, *workers):
                task.cancel()
            await asyncio.gather(halt, *workers, return_exceptions=True)

    async def _work(
        self, store: BatchStore, batch: Batch, lines: Iterator[tuple[int, bytes]], reading: asyncio.Lock
    ) -> None:
        while True:
            async with reading:
                item = await asyncio.to_thread(next, lines, None)
            if item is None:
                return
            number, raw = item
            line = parse(raw, (batch.endpoint,))
            request_id = f"{batch.id}-{number}"
            answer = await patient(self.app, line.url, bytes(line.body), request_id)
            is_ok = 200 <= answer.status < 300
            document = output_line(line.custom_id, request_id, answer)
            change = _counted(answer, is_ok)
            keeping = asyncio.ensure_future(
                asyncio.to_thread(store.add_line, batch.id, number, document, change, is_ok=is_ok)
            )
            try:
                await asyncio.shield(keeping)
            except asyncio.CancelledError:
                # What was answered is kept, so that nobody asks again.
                await keeping
                raise

    async def _finalize(self, store: BatchStore, batch_id: str, path: Path) -> None:
        now = int(time.time())

        def begin(batch: Batch) -> None:
            batch.finalizing_at = now
            if batch.status == "in_progress":
                batch.status = "finalizing"

        batch = await asyncio.to_thread(store.change_batch, batch_id, begin)
        counts = batch.request_counts
        is_whole = counts.completed + counts.failed >= counts.total and batch.in_progress_at is not None
        status = "completed" if is_whole else "cancelled" if batch.cancelling_at is not None else "expired"
        ids = await asyncio.to_thread(_write_files, store, batch, path, status == "expired")

        def end(batch: Batch) -> None:
            batch.status = status
            setattr(batch, f"{status}_at", int(time.time()))
            batch.output_file_id, batch.error_file_id = ids

        await asyncio.to_thread(store.change_batch, batch_id, end)
        await asyncio.to_thread(store.drop_lines, batch_id)
        logger.info("batch %s %s: %d answered, %d failed of %d", batch_id, status, *_counts(batch))


async def patient(app: ASGIApp, url: str, body: bytes, request_id: str) -> Answer:
    """The answer of a route, asked again for as long as the queue is full or the engine is not there."""
    while (answer := await ask(app, url, body, request_id)).status in (429, 503):
        await asyncio.sleep(answer.retry_after or RETRY_SECONDS)
    return answer


def _counts(batch: Batch) -> tuple[int, int, int]:
    counts = batch.request_counts
    return counts.completed, counts.failed, counts.total


def _counted(answer: Answer, is_ok: bool) -> Callable[[Batch], None]:
    """The change of a batch that counts one answer."""

    def change(batch: Batch) -> None:
        if not is_ok:
            batch.request_counts.failed += 1
            return
        batch.request_counts.completed += 1
        with contextlib.suppress(msgspec.ValidationError):
            tokens = msgspec.json.decode(answer.body, type=_Answered).usage or _Tokens()
            batch.usage.input_tokens += tokens.prompt_tokens + tokens.input_tokens
            batch.usage.output_tokens += tokens.completion_tokens + tokens.output_tokens
            batch.usage.total_tokens = batch.usage.input_tokens + batch.usage.output_tokens

    return change


def _write_files(store: BatchStore, batch: Batch, path: Path, has_expired: bool) -> tuple[str | None, str | None]:
    """The output file and the error file, where there is something to write into them."""
    ids: list[str | None] = []
    for name, is_ok in (("output", True), ("error", False)):
        with tempfile.TemporaryFile() as file:
            count = store.write_lines(batch.id, file, is_ok=is_ok)
            if has_expired and not is_ok:
                for _, raw in read_lines(path, skip=store.answered_lines(batch.id)):
                    message = "the batch expired before this request was run"
                    file.write(error_line(custom_id_of(raw), "batch_expired", message) + b"\n")
                    count += 1
            file.seek(0)
            filename = f"{batch.id}_{name}.jsonl"
            seconds = batch.output_expires_after.seconds if batch.output_expires_after else None
            stored = store.add_file(file, filename=filename, purpose="batch_output", seconds=seconds) if count else None
        ids.append(stored.id if stored else None)
    return ids[0], ids[1]


def custom_id_of(raw: bytes) -> str:
    """What a line calls itself, as far as it can be read."""
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
        value = msgspec.json.decode(raw)
        return str(value.get("custom_id", "")) if isinstance(value, dict) else ""
    return ""
