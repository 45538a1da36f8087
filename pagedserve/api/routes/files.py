"""`/v1/files`: upload, list, read and delete."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from fastapi import APIRouter, Request, Response
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.responses import FileResponse

from pagedserve.api.batch.store import BatchStore
from pagedserve.api.body import parts
from pagedserve.api.call import json_response
from pagedserve.api.errors import BodyTooLargeError, MediaTypeError
from pagedserve.api.openapi import documented, documented_text, documented_upload
from pagedserve.api.protocol.files import FileDeleted, FileList, FileObject
from pagedserve.api.state import ApiState
from pagedserve.errors import RequestError

router = APIRouter(tags=["batches"])

MAX_FILE_BYTES = 512 << 20
MAX_FIELDS = 16
MAX_PAGE = 10_000
MAX_FILENAME_LEN = 255
# OpenAI's default for this purpose.
BATCH_FILE_SECONDS = 30 * 86_400
_SECONDS = (3600, 2_592_000)


async def _store(request: Request) -> BatchStore:
    state: ApiState = request.app.state.api
    return await state.batches.start()


@router.post("/v1/files", **documented_upload(FileObject))
async def upload_file(request: Request) -> Response:
    """Store a file of JSON lines for a batch (purpose `batch`)."""
    form = await _form(request)
    try:
        file, purpose = form.get("file"), form.get("purpose")
        if not isinstance(file, UploadFile):
            raise RequestError("file is required: a file part of the form", param="file")
        if purpose != "batch":
            raise RequestError('purpose must be "batch": files serve nothing else here', param="purpose")
        seconds = _expiry(form)
        store = await _store(request)
        name = (file.filename or "file")[-MAX_FILENAME_LEN:]
        stored = await asyncio.to_thread(store.add_file, file.file, filename=name, purpose=purpose, seconds=seconds)
        return json_response(stored)
    finally:
        await form.close()


@router.get("/v1/files", **documented(None, FileList))
async def list_files(
    request: Request,
    purpose: str | None = None,
    after: str | None = None,
    limit: str | None = None,
    order: str | None = None,
) -> Response:
    """Stored files, newest first."""
    store = await _store(request)
    count = page_size(limit, default=MAX_PAGE, most=MAX_PAGE)
    if order not in (None, "asc", "desc"):
        raise RequestError("order must be asc or desc", param="order")
    files = await asyncio.to_thread(
        store.files, purpose=purpose, after=after, limit=count + 1, ascending=order == "asc"
    )
    page = files[:count]
    first, last = (page[0].id, page[-1].id) if page else (None, None)
    return json_response(FileList(page, first, last, len(files) > count))


@router.get("/v1/files/{file_id}", **documented(None, FileObject))
async def retrieve_file(request: Request, file_id: str) -> Response:
    """What is known of a file."""
    store = await _store(request)
    return json_response(await asyncio.to_thread(store.file, file_id))


@router.get("/v1/files/{file_id}/content", **documented_text("application/jsonl"))
async def retrieve_file_content(request: Request, file_id: str) -> Response:
    """The file itself."""
    store = await _store(request)
    path = await asyncio.to_thread(store.path, file_id)
    return FileResponse(path, media_type="application/jsonl")


@router.delete("/v1/files/{file_id}", **documented(None, FileDeleted))
async def delete_file(request: Request, file_id: str) -> Response:
    """Delete a file that no batch reads."""
    store = await _store(request)
    await asyncio.to_thread(store.delete_file, file_id)
    return json_response(FileDeleted(file_id))


def page_size(limit: str | None, *, default: int, most: int) -> int:
    """The number of items a client wants; RequestError where it is none."""
    if limit is None:
        return default
    if not (limit.isascii() and limit.isdecimal() and 1 <= int(limit[:9]) <= most):
        raise RequestError(f"limit must be between 1 and {most}", param="limit")
    return int(limit)


async def _form(request: Request) -> FormData:
    """The multipart form; the file in it is on disk, not in memory."""
    if request.headers.get("content-type", "").split(";")[0].strip().lower() != "multipart/form-data":
        raise MediaTypeError("send the file as multipart/form-data")
    try:
        return await MultiPartParser(
            request.headers, _bounded(request), max_files=1, max_fields=MAX_FIELDS, max_part_size=64 << 10
        ).parse()
    except (MultiPartException, KeyError, ValueError) as error:
        raise RequestError(f"the form cannot be read: {getattr(error, 'message', 'it has no boundary')}") from error


async def _bounded(request: Request) -> AsyncGenerator[bytes, None]:
    size = 0
    async for part in parts(request):
        size += len(part)
        if size > MAX_FILE_BYTES:
            raise BodyTooLargeError(f"the file exceeds the limit of {MAX_FILE_BYTES} bytes")
        yield part


def _expiry(form: FormData) -> int:
    seconds, anchor = form.get("expires_after[seconds]"), form.get("expires_after[anchor]")
    if seconds is None and anchor is None:
        return BATCH_FILE_SECONDS
    low, high = _SECONDS
    is_number = isinstance(seconds, str) and seconds.isascii() and seconds.isdecimal() and len(seconds) < 9
    if anchor != "created_at" or not is_number or not low <= int(str(seconds)) <= high:
        raise RequestError(
            f'expires_after needs anchor "created_at" and seconds from {low} to {high}', param="expires_after"
        )
    return int(str(seconds))
