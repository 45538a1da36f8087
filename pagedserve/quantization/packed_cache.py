"""Packed weights kept on disk, so that a second start reads or maps them instead of packing them again.

One file a model and weight format, `~/.cache/pagedserve/packed/<key>`: a head (magic, length, SHA-256 of the index, the
index as JSON), then each matrix as it lies in memory, page-aligned. The layout is that of every instruction set, so the
file outlives a change of CPU. The key names the model's files by path, size and time.

Small models are copied into huge pages, which a decode step reads faster than mapped ones. Large ones stay mapped, for
nothing of them should be held twice: mapped pages are the page cache's, processes that serve one model share them, and
under pressure the system drops them.
Files appear whole or not at all, so starts at once do not disturb each other; one that is cut short or damaged is
noticed by its sums and made again; a folder that cannot be written to only costs the time of packing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import shutil
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pagedserve import envs
from pagedserve.kernels import huge_pages, native
from pagedserve.log import get_logger
from pagedserve.quantization.method import LinearWeight, RoundingError
from pagedserve.quantization.packed import PackedWeight, StackedWeight

logger = get_logger(__name__)

# Part of every key: raise it when a format's layout or the way weights are quantised changes.
LAYOUT_VERSION = 1
# Smaller models are packed faster than they are looked up.
MIN_BYTES = 16 << 20
# Larger models stay mapped.
MAX_COPIED_BYTES = 1 << 30
_MAGIC = b"PSPACK01"
_HEAD = struct.Struct("<8sQ32s")  # magic, bytes of the index, its SHA-256
_PAGE = 4096
_CHUNK_WORDS = 1 << 17  # a sum is kept of each MiB
_STALE_SECONDS = 3600.0


class PackedCache:
    """The packed matrices of one model: those that an earlier start left, and those that this one adds."""

    def __init__(self, folder: Path, key: str, limit: int):
        """`limit` is the most bytes that all files of the folder may take."""
        self._folder = folder
        self.path = folder / key
        self._limit = limit
        self._weights: dict[str, LinearWeight] = {}
        self._is_complete = True  # nothing was asked for that the file lacks
        self._map: mmap.mmap | None = None
        self._entries: dict[str, Any] = {}
        try:
            self._map, self._entries = _read(self.path)
            os.utime(self.path)  # the least recently used file goes first
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            self._drop(error)

    @classmethod
    def for_files(cls, files: Sequence[Path], method_key: str) -> PackedCache | None:
        """The cache of a model's files under one way of packing; None where PAGEDSERVE_PACKED_CACHE says 0."""
        limit = envs.packed_cache_bytes()
        if limit == 0:
            return None
        identity = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        about = json.dumps([LAYOUT_VERSION, native.ABI_VERSION, sys.byteorder, method_key, identity])
        return cls(envs.cache_dir() / "packed", hashlib.sha256(about.encode()).hexdigest()[:32], limit)

    def get(self, name: str, shape: tuple[int, int]) -> LinearWeight | None:
        """The weight [out_features, in_features] that was added under this name; None if there is none."""
        entry = self._entries.get(name)
        if entry is not None and self._map is not None:
            try:
                weight = _weight(self._map, entry, copy=len(self._map) <= MAX_COPIED_BYTES)
                if (weight.out_features, weight.in_features) == shape:
                    self._weights[name] = weight
                    return weight
            except (KeyError, TypeError, ValueError) as error:
                self._drop(error)
        self._is_complete = False
        return None

    def add(self, name: str, weight: LinearWeight) -> None:
        """Remembers a weight that `get` did not have; weights that are not packed are left out."""
        if isinstance(weight, PackedWeight | StackedWeight):
            self._weights[name] = weight

    def save(self) -> None:
        """Writes the file anew if something was missing in it. What goes wrong is logged, never raised."""
        if self._is_complete:
            if self._map is not None:
                logger.info("packed weights taken from %s", self.path)
            return
        num_bytes = sum(weight.nbytes for weight in self._weights.values())
        if num_bytes < MIN_BYTES:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if not _make_room(self._folder, self.path.name, num_bytes, self._limit):
                logger.info(
                    "packed weights (%d MB) are not kept: no room for them in %s", num_bytes >> 20, self._folder
                )
                return
            temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.{time.monotonic_ns()}")
            try:
                _write(temporary, self._weights)
                temporary.replace(self.path)
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as error:
            logger.info("packed weights are not kept: %s", error)

    def _drop(self, reason: Exception) -> None:
        logger.warning("%s is damaged (%s): the weights are packed again", self.path, reason)
        self._map, self._entries = None, {}
        self._is_complete = False
        with contextlib.suppress(OSError):
            self.path.unlink()


# ---- the file ---------------------------------------------------------------------------------------------------


def _write(path: Path, weights: dict[str, LinearWeight]) -> None:
    entries: dict[str, Any] = {}
    offset = 0  # from the first page after the index
    for name, weight in weights.items():
        parts = []
        for part in _parts(weight):
            data = part.packed.data.numpy()
            parts.append(
                {
                    "format": part.format,
                    "shape": [part.out_features, part.in_features],
                    "offset": offset,
                    "sum": _checksum(data),
                    "error": None if part.rounding_error is None else part.rounding_error.sums,
                }
            )
            offset += _padded(data.nbytes)
        entries[name] = parts
    index = json.dumps({"bytes": offset, "entries": entries}).encode()
    with path.open("wb") as file:
        file.write(_HEAD.pack(_MAGIC, len(index), hashlib.sha256(index).digest()))
        file.write(index)
        file.write(bytes(-file.tell() % _PAGE))
        for weight in weights.values():
            for part in _parts(weight):
                file.write(part.packed.data.numpy())
                file.write(bytes(-file.tell() % _PAGE))


def _read(path: Path) -> tuple[mmap.mmap, dict[str, Any]]:
    """The whole file, mapped, and its entries with offsets into it. ValueError if it is not what was written."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size:
            raise ValueError("cut short")
        magic, length, digest = _HEAD.unpack(head)
        index = file.read(min(length, size))
        if magic != _MAGIC or hashlib.sha256(index).digest() != digest:
            raise ValueError("its index does not match")
        found = json.loads(index)
        first = _padded(_HEAD.size + length)
        if size != first + found["bytes"]:
            raise ValueError(f"{size} bytes instead of {first + found['bytes']}")
        # Private: nothing here writes to it, but torch has no tensors that say so.
        mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    for parts in found["entries"].values():
        for part in parts:
            part["offset"] += first
    return mapped, found["entries"]


def _weight(mapped: mmap.mmap, entry: list[dict[str, Any]], *, copy: bool) -> PackedWeight | StackedWeight:
    parts = []
    for part in entry:
        rows, columns = part["shape"]
        num_bytes = native.PackedMatrix.num_bytes(part["format"], rows, columns)
        data = torch.frombuffer(mapped, dtype=torch.uint8, count=num_bytes, offset=part["offset"])
        if _checksum(data.numpy()) != part["sum"]:
            raise ValueError("the sums of its weights do not match")
        if copy:
            data = huge_pages.take(num_bytes).copy_(data)
        error = None if part["error"] is None else RoundingError(*part["error"])
        parts.append(PackedWeight(native.PackedMatrix(part["format"], rows, columns, data=data), error))
    return parts[0] if len(parts) == 1 else StackedWeight(parts)


def _parts(weight: LinearWeight) -> Iterator[PackedWeight]:
    if isinstance(weight, StackedWeight):
        yield from weight.parts
    elif isinstance(weight, PackedWeight):
        yield weight


def _checksum(data: np.ndarray) -> str:
    """A hash of the sums of 64-bit words, one for each MiB: at the speed of memory, and no damaged page escapes it."""
    whole = len(data) // (8 * _CHUNK_WORDS) * _CHUNK_WORDS
    words = data[: 8 * whole].view(np.uint64).reshape(-1, _CHUNK_WORDS)
    digest = hashlib.sha256(np.add.reduce(words, axis=1))
    rest = data[8 * whole :]
    rest = np.append(rest, np.zeros(-len(rest) % 8, dtype=np.uint8)).view(np.uint64)
    digest.update(np.add.reduce(rest * np.arange(1, 2 * len(rest), 2, dtype=np.uint64)).tobytes())
    return digest.hexdigest()


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE


def _make_room(folder: Path, keep: str, num_bytes: int, limit: int) -> bool:
    """Removes the files that were not used for longest until `num_bytes` more keep within the limit.

    False, and nothing removed, where they never would, or where they would fill the disk.
    """
    files = []
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            status = path.stat()
            if path.name.startswith("."):  # being written, or left by a start that was killed
                if time.time() - status.st_mtime > _STALE_SECONDS:
                    path.unlink()
            elif path.name != keep:
                files.append((status.st_mtime, status.st_size, path))
    if num_bytes > limit or shutil.disk_usage(folder).free < 2 * num_bytes:
        return False
    total = num_bytes + sum(size for _, size, _ in files)
    for _, size, path in sorted(files, key=lambda file: file[0]):
        if total <= limit:
            break
        path.unlink(missing_ok=True)
        total -= size
    return True
