"""The file of a model's packed weights: where it lies, how it is laid out, and how it is read beside other work.

One file a model and weight format, `~/.cache/pagedserve/packed/<key>`: a head (magic, length, SHA-256 of the index, the
index as JSON), then each matrix as it lies in memory, page-aligned. The layout is that of every instruction set, so the
file outlives a change of CPU. The key names the model's files by path, size and time.

Small models are read into huge pages, which a decode step reads faster than mapped ones; a thread does it, and a start
has it begin while torch is still imported (`begin`). Large ones stay mapped, for nothing of them should be held twice:
mapped pages are the page cache's, processes that serve one model share them, and under pressure the system drops them.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from pagedserve import envs, huge_pages

# Part of every key: raise it when a format's layout or the way weights are quantised changes.
LAYOUT_VERSION = 1
# Larger models stay mapped.
MAX_COPIED_BYTES = 1 << 30
MAGIC = b"PSPACK01"
HEAD = struct.Struct("<8sQ32s")  # magic, bytes of the index, its SHA-256
_PAGE = 4096
_READ_BYTES = 4 << 20  # at once


def folder() -> Path:
    """Where the files of all models lie."""
    return envs.cache_dir() / "packed"


def method_key(weights_dtype: str) -> str:
    """Names the way of packing that `--weights-dtype` asks for."""
    return f"packed-{weights_dtype}"


def key_of(weight_files: Sequence[Path], method: str, abi_version: int) -> str:
    """The file's name, for a model's files under one way of packing. OSError where one of them is missing."""
    identity = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in weight_files]
    about = json.dumps([LAYOUT_VERSION, abi_version, sys.byteorder, method, identity])
    return hashlib.sha256(about.encode()).hexdigest()[:32]


def padded(num_bytes: int) -> int:
    """Up to a whole page."""
    return -(-num_bytes // _PAGE) * _PAGE


class Content(Protocol):
    """The bytes of a file, however they are had."""

    def piece(self, offset: int, num_bytes: int) -> np.ndarray:
        """uint8 [num_bytes], not to be written to; ValueError or OSError where the file does not have them."""


# What `read` gives: the content, and the index with offsets into it.
Packed = tuple[Content, dict[str, Any]]


def read(path: Path) -> Packed:
    """What the file holds. ValueError if it is not what was written, OSError if it cannot be opened."""
    begun = _Begun.take(path)
    return _open(path) if begun is None else begun


def begin(path: Path) -> None:
    """Has a thread read the file for whoever calls `read` next; nothing, where there is none or it is damaged."""
    with suppress(OSError, ValueError):
        _Begun.put(path, _open(path))


def forget() -> None:
    """Lets go of what was begun and nobody asked for."""
    _Begun.take(None)


class _Begun:
    """At most one file."""

    _lock = threading.Lock()
    _file: tuple[Path, Packed] | None = None

    @classmethod
    def put(cls, path: Path, packed: Packed) -> None:
        with cls._lock:
            cls._file = path, packed

    @classmethod
    def take(cls, path: Path | None) -> Packed | None:
        with cls._lock:
            file, cls._file = cls._file, None
        return file[1] if file is not None and file[0] == path else None


class _Mapped:
    """The pages of the file itself."""

    def __init__(self, file: BinaryIO, size: int):
        # Private: nothing here writes to it, but torch has no tensors that say so.
        self._pages = np.frombuffer(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY), dtype=np.uint8)

    def piece(self, offset: int, num_bytes: int) -> np.ndarray:
        if offset + num_bytes > len(self._pages):
            raise ValueError("cut short")
        return self._pages[offset : offset + num_bytes]


class _Copied:
    """A copy in huge pages, which a thread fills from front to back."""

    def __init__(self, file: BinaryIO, size: int):
        self._data = huge_pages.reserve(size)[:size]
        self._num_read = 0
        self._error: Exception | None = None
        self._progress = threading.Condition()
        reader = open(os.dup(file.fileno()), "rb", buffering=0)  # noqa: SIM115 (the thread closes it)
        threading.Thread(target=self._fill, args=(reader,), name="packed-weights", daemon=True).start()

    def piece(self, offset: int, num_bytes: int) -> np.ndarray:
        end = offset + num_bytes
        if end > len(self._data):
            raise ValueError("cut short")
        with self._progress:
            self._progress.wait_for(lambda: self._num_read >= end or self._error is not None)
            if self._num_read < end and self._error is not None:
                raise self._error
        return self._data[offset:end]

    def _fill(self, reader: BinaryIO) -> None:
        view, at, error = memoryview(self._data), 0, None
        with reader:
            reader.seek(0)
            while at < len(view) and error is None:
                num_read = 0
                try:
                    num_read = reader.readinto(view[at : at + _READ_BYTES])
                    error = None if num_read else ValueError("cut short")
                except OSError as raised:
                    error = raised
                at += num_read
                with self._progress:
                    self._num_read, self._error = at, error
                    self._progress.notify_all()


def _open(path: Path) -> Packed:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(HEAD.size)
        if len(head) < HEAD.size:
            raise ValueError("cut short")
        magic, length, digest = HEAD.unpack(head)
        index = file.read(min(length, size))
        if magic != MAGIC or hashlib.sha256(index).digest() != digest:
            raise ValueError("its index does not match")
        found = json.loads(index)
        first = padded(HEAD.size + length)
        if size != first + found["bytes"]:
            raise ValueError(f"{size} bytes instead of {first + found['bytes']}")
        content = (_Copied if size <= MAX_COPIED_BYTES else _Mapped)(file, size)
    for parts in found["entries"].values():
        for part in parts:
            part["offset"] += first
    return content, found["entries"]
