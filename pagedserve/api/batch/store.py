"""Files, batches and answered lines on disk: one SQLite database beside a folder of files.

All methods block, for milliseconds, and may be called from any thread. What a method has returned from survives a crash
of the process: every change is one transaction.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from pagedserve.api.protocol.batches import Batch
from pagedserve.api.protocol.files import FileObject
from pagedserve.errors import ConfigError, NotFoundError, RequestError

Document = TypeVar("Document")

_SCHEMA = """
create table if not exists files (id text primary key, serial integer, purpose text, expires_at integer, document blob);
create table if not exists batches (id text primary key, serial integer, document blob);
create table if not exists lines (
    batch_id text, line integer, is_ok integer, document blob, primary key (batch_id, line)) without rowid;
"""
_encode = msgspec.json.encode


class StorageFullError(RequestError):
    """The files exceed --data-dir-quota: HTTP 413."""

    status_code = 413


class BatchStore:
    """The data folder, which one server at a time may use (ConfigError otherwise)."""

    def __init__(self, folder: Path, *, quota_bytes: int, clock: Callable[[], float] = time.time):
        self._files = folder / "files"
        self._quota_bytes = quota_bytes
        self._clock = clock
        self._lock = threading.RLock()
        try:
            self._files.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._guard = (folder / "lock").open("wb")
        except OSError as error:
            raise ConfigError(f"--data-dir {folder}: {error.strerror}") from error
        try:
            fcntl.flock(self._guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._guard.close()
            raise ConfigError(f"--data-dir {folder} is in use by another server; give each its own") from error
        self._db = sqlite3.connect(folder / "state.sqlite3", check_same_thread=False, isolation_level=None)
        self._db.execute("pragma journal_mode = wal")
        self._db.executescript(_SCHEMA)

    def close(self) -> None:
        """Let another server have the folder."""
        with self._lock:
            self._db.close()
            self._guard.close()

    # -- files --------------------------------------------------------------------------------------------------------

    def add_file(self, source: BinaryIO, *, filename: str, purpose: str, seconds: int | None) -> FileObject:
        """Copy a file in; it is deleted after `seconds`. StorageFullError where an uploaded one does not fit."""
        file_id = f"file-{uuid.uuid4().hex}"
        path = self._files / file_id
        try:
            with path.open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
            size = path.stat().st_size
            with self._lock:
                used = sum(file.bytes for file in self._all_files())
                if purpose == "batch" and used + size > self._quota_bytes:
                    raise StorageFullError(
                        f"{used} bytes of files are stored and {size} more exceed the quota of {self._quota_bytes} "
                        "(--data-dir-quota); delete files that are not needed"
                    )
                now = int(self._clock())
                expires_at = None if seconds is None else now + seconds
                file = FileObject(file_id, size, now, filename, purpose, expires_at)
                self._insert("files", file_id, file, "purpose, expires_at", (purpose, expires_at))
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return file

    def file(self, file_id: str) -> FileObject:
        """NotFoundError where there is none, or none any more."""
        file = self._document("files", file_id, FileObject)
        if file is None or (file.expires_at is not None and file.expires_at <= self._clock()):
            raise NotFoundError(f"there is no file {file_id!a}", param="file_id")
        return file

    def path(self, file_id: str) -> Path:
        """Where a file's content is; NotFoundError as for `file`."""
        return self._files / self.file(file_id).id

    def input_path(self, batch: Batch) -> Path:
        """Where a batch's input is, also when it has outlived its time: then it is kept for the batch."""
        return self._files / batch.input_file_id

    def files(self, *, purpose: str | None, after: str | None, limit: int, ascending: bool) -> list[FileObject]:
        """At most `limit` files behind `after`."""
        self.remove_expired_files()
        where, values = ("purpose = ?", (purpose,)) if purpose is not None else ("1", ())
        return self._page("files", FileObject, where, values, after, limit, ascending)

    def delete_file(self, file_id: str) -> None:
        """RequestError while a batch reads it."""
        with self._lock:
            self.file(file_id)
            user = next((batch for batch in self.unfinished_batches() if batch.input_file_id == file_id), None)
            if user is not None:
                raise RequestError(
                    f"batch {user.id} still reads this file; cancel it or wait for its end", param="file_id"
                )
            self._remove(file_id)

    def remove_expired_files(self) -> None:
        """Delete what has outlived its time, but for the inputs of batches that run."""
        with self._lock:
            used = {batch.input_file_id for batch in self.unfinished_batches()}
            rows = self._db.execute("select id from files where expires_at <= ?", (int(self._clock()),)).fetchall()
            for (file_id,) in rows:
                if file_id not in used:
                    self._remove(file_id)

    # -- batches ------------------------------------------------------------------------------------------------------

    def add_batch(self, batch: Batch) -> None:
        with self._lock:
            self._insert("batches", batch.id, batch)

    def batch(self, batch_id: str) -> Batch:
        """NotFoundError where there is none."""
        batch = self._document("batches", batch_id, Batch)
        if batch is None:
            raise NotFoundError(f"there is no batch {batch_id!a}", param="batch_id")
        return batch

    def batches(self, *, after: str | None, limit: int) -> list[Batch]:
        """At most `limit` batches behind `after`, newest first."""
        return self._page("batches", Batch, "1", (), after, limit, False)

    def unfinished_batches(self) -> list[Batch]:
        """What is still to do, oldest first."""
        with self._lock:
            rows = self._db.execute("select document from batches order by serial").fetchall()
        batches = (msgspec.json.decode(row[0], type=Batch) for row in rows)
        return [batch for batch in batches if not batch.is_over]

    def change_batch(self, batch_id: str, change: Callable[[Batch], object]) -> Batch:
        """Read, change and write a batch as one step."""
        with self._lock:
            batch = self.batch(batch_id)
            change(batch)
            self._db.execute("update batches set document = ? where id = ?", (_encode(batch), batch_id))
        return batch

    # -- lines --------------------------------------------------------------------------------------------------------

    def add_line(
        self, batch_id: str, line: int, document: bytes, change: Callable[[Batch], object], *, is_ok: bool
    ) -> None:
        """Keep a line's answer, and change the batch (its counts), both or neither."""
        with self._lock, self._transaction():
            self.change_batch(batch_id, change)
            self._db.execute("insert into lines values (?, ?, ?, ?)", (batch_id, line, is_ok, document))

    def answered_lines(self, batch_id: str) -> set[int]:
        """Numbers of the lines that have been answered."""
        with self._lock:
            rows = self._db.execute("select line from lines where batch_id = ?", (batch_id,)).fetchall()
        return {row[0] for row in rows}

    def write_lines(self, batch_id: str, target: BinaryIO, *, is_ok: bool) -> int:
        """Write the answers with or without success, in the order of the input; returns their number."""
        count, last = 0, -1
        while True:
            with self._lock:
                row = self._db.execute(
                    "select line, document from lines where batch_id = ? and is_ok = ? and line > ? order by line",
                    (batch_id, is_ok, last),
                ).fetchone()
            if row is None:
                return count
            last, document = row
            target.write(document + b"\n")
            count += 1

    def drop_lines(self, batch_id: str) -> None:
        """Forget the answers, once the files hold them."""
        with self._lock:
            self._db.execute("delete from lines where batch_id = ?", (batch_id,))

    # -- inside -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("begin immediate")
        try:
            yield
        except BaseException:
            self._db.execute("rollback")
            raise
        self._db.execute("commit")

    def _insert(
        self, table: str, key: str, document: object, columns: str = "", values: tuple[object, ...] = ()
    ) -> None:
        names = f"id, serial, document{', ' if columns else ''}{columns}"
        places = ", ?" * len(values)
        serial = f"(select coalesce(max(serial), 0) + 1 from {table})"
        self._db.execute(
            f"insert into {table} ({names}) values (?, {serial}, ?{places})", (key, _encode(document), *values)
        )

    def _document(self, table: str, key: str, kind: type[Document]) -> Document | None:
        with self._lock:
            row = self._db.execute(f"select document from {table} where id = ?", (key,)).fetchone()
        return None if row is None else msgspec.json.decode(row[0], type=kind)

    def _page(
        self,
        table: str,
        kind: type[Document],
        where: str,
        values: tuple[object, ...],
        after: str | None,
        limit: int,
        ascending: bool,
    ) -> list[Document]:
        order, sign = ("asc", ">") if ascending else ("desc", "<")
        with self._lock:
            if after is not None:
                row = self._db.execute(f"select serial from {table} where id = ?", (after,)).fetchone()
                if row is None:
                    raise RequestError(f"after: there is no {after!a}", param="after")
                where, values = f"{where} and serial {sign} ?", (*values, row[0])
            rows = self._db.execute(
                f"select document from {table} where {where} order by serial {order} limit ?", (*values, limit)
            ).fetchall()
        return [msgspec.json.decode(row[0], type=kind) for row in rows]

    def _all_files(self) -> list[FileObject]:
        rows = self._db.execute("select document from files").fetchall()
        return [msgspec.json.decode(row[0], type=FileObject) for row in rows]

    def _remove(self, file_id: str) -> None:
        self._db.execute("delete from files where id = ?", (file_id,))
        (self._files / file_id).unlink(missing_ok=True)
