"""Packed weights kept on disk, so that a second start reads or maps them instead of packing them again.

The file is that of `packed_file`. Files appear whole or not at all, so starts at once do not disturb each other; one
that is cut short or damaged is noticed by its sums and made again; a folder that cannot be written to only costs the
time of packing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pagedserve import envs, packed_file
from pagedserve.kernels import ABI_VERSION, native
from pagedserve.log import get_logger
from pagedserve.packed_file import Content, padded
from pagedserve.quantization.method import LinearWeight, RoundingError
from pagedserve.quantization.packed import PackedWeight, StackedWeight

logger = get_logger(__name__)

# Smaller models are packed faster than they are looked up.
MIN_BYTES = 16 << 20
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
        self._content: Content | None = None
        self._entries: dict[str, Any] = {}
        try:
            self._content, self._entries = packed_file.read(self.path)
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
        return cls(packed_file.folder(), packed_file.key_of(files, method_key, ABI_VERSION), limit)

    def get(self, name: str, shape: tuple[int, int]) -> LinearWeight | None:
        """The weight [out_features, in_features] that was added under this name; None if there is none."""
        entry = self._entries.get(name)
        if entry is not None and self._content is not None:
            try:
                weight = _weight(self._content, entry)
                if (weight.out_features, weight.in_features) == shape:
                    self._weights[name] = weight
                    return weight
            except (KeyError, TypeError, ValueError, OSError) as error:
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
            if self._content is not None:
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
        self._content, self._entries = None, {}
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
            offset += padded(data.nbytes)
        entries[name] = parts
    index = json.dumps({"bytes": offset, "entries": entries}).encode()
    with path.open("wb") as file:
        file.write(packed_file.HEAD.pack(packed_file.MAGIC, len(index), hashlib.sha256(index).digest()))
        file.write(index)
        file.write(bytes(padded(file.tell()) - file.tell()))
        for weight in weights.values():
            for part in _parts(weight):
                file.write(part.packed.data.numpy())
                file.write(bytes(padded(file.tell()) - file.tell()))


def _weight(content: Content, entry: list[dict[str, Any]]) -> PackedWeight | StackedWeight:
    parts = []
    for part in entry:
        rows, columns = part["shape"]
        data = content.piece(part["offset"], native.PackedMatrix.num_bytes(part["format"], rows, columns))
        if _checksum(data) != part["sum"]:
            raise ValueError("the sums of its weights do not match")
        error = None if part["error"] is None else RoundingError(*part["error"])
        parts.append(
            PackedWeight(native.PackedMatrix(part["format"], rows, columns, data=torch.from_numpy(data)), error)
        )
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
    if len(rest) % 8:
        rest = np.append(rest, np.zeros(-len(rest) % 8, dtype=np.uint8))
    rest = rest.view(np.uint64)
    digest.update(np.dot(rest, _odd_numbers()[: len(rest)]).tobytes())
    return digest.hexdigest()


@cache
def _odd_numbers() -> np.ndarray:
    return np.arange(1, 2 * _CHUNK_WORDS, 2, dtype=np.uint64)


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
