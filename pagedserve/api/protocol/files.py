"""`/v1/files`: what is uploaded and what batches write (OpenAI's Files API)."""

from __future__ import annotations

import msgspec


class FileObject(msgspec.Struct):
    """One stored file. Times are Unix seconds."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int | None = None
    object: str = "file"
    status: str = "processed"
    status_details: str | None = None


class FileList(msgspec.Struct):
    """A page of files; `after` with `last_id` gives the next one."""

    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class FileDeleted(msgspec.Struct):
    """The file is gone."""

    id: str
    object: str = "file"
    deleted: bool = True
