"""GGUF files: metadata, tensor table, weights, under Hugging Face names and in Hugging Face row order.

The format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): magic, version, two counts, key-value pairs,
tensor table, aligned tensor data; all little-endian. The header is parsed here rather than by `gguf.GGUFReader` because
that one makes an array object of every token (2.6 s for a vocabulary of 49,152, against 0.01 s) and trusts counts and
offsets, which a broken file can set to anything: here each is checked against the file's size before it is used.
Dequantisation is the `gguf` package's. Only numbers of tensors need numpy: a server's front does without it.
"""

from __future__ import annotations

import math
import mmap
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedserve.errors import ModelLoadError
from pagedserve.gguf_architectures import Architecture, architecture_of
from pagedserve.gguf_config import hf_config, hf_generation_config

if TYPE_CHECKING:
    import numpy as np

_MAGIC = b"GGUF"
# Version 3 differs from 2 only in that big-endian files exist.
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4
_MAX_ARRAY_DEPTH = 4

# Value types of the key-value pairs: id -> struct format (fixed size) ...
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
# ... and the fewest bytes that a value, a key-value pair and a tensor entry take, to bound counts.
_MIN_VALUE_BYTES = {**{i: struct.calcsize(f) for i, f in _SCALARS.items()}, _STRING: 8, _ARRAY: 12}
_MIN_PAIR_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8


@dataclass(frozen=True, slots=True)
class QuantType:
    """How a tensor's numbers are packed: `block_bytes` bytes hold `block_len` numbers of one row."""

    name: str
    ggml_id: int
    block_len: int
    block_bytes: int


QUANT_TYPES = {
    q.ggml_id: q
    for q in (
        QuantType("F32", 0, 1, 4),
        QuantType("F16", 1, 1, 2),
        QuantType("Q4_0", 2, 32, 18),
        QuantType("Q4_1", 3, 32, 20),
        QuantType("Q5_0", 6, 32, 22),
        QuantType("Q5_1", 7, 32, 24),
        QuantType("Q8_0", 8, 32, 34),
        QuantType("Q4_K", 12, 256, 144),
        QuantType("Q5_K", 13, 256, 176),
        QuantType("Q6_K", 14, 256, 210),
        QuantType("BF16", 30, 1, 2),
    )
}


_FLOAT32 = QUANT_TYPES[0]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One entry of the tensor table. `shape` is row-major (out, in), the reverse of what the file writes."""

    gguf_name: str
    quant: QuantType
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    num_bytes: int

    def parts(self) -> list[TensorInfo]:
        """The tensors that lie behind one another along the first dimension."""
        count, size = self.shape[0], self.num_bytes // self.shape[0]
        return [
            replace(self, shape=self.shape[1:], offset=self.offset + i * size, num_bytes=size) for i in range(count)
        ]


class StringArray(Sequence[str]):
    """The texts of a metadata entry, decoded when they are asked for: starts need a few of a vocabulary's 100,000."""

    def __init__(self, view: memoryview, ends: array[int], start: int):
        """Text i ends at `ends[i]` in `view`; each has its length, 8 bytes, in front of it, the first at `start`."""
        self._view = view
        self._ends = ends
        self._start = start

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        before = self._ends[index - 1] if index else self._start
        return str(self._view[before + 8 : self._ends[index]], "utf-8", "replace")

    def __iter__(self) -> Iterator[str]:
        view, before = self._view, self._start
        for end in self._ends:
            yield str(view[before + 8 : end], "utf-8", "replace")
            before = end

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


class GGUFFile:
    """A memory-mapped GGUF file.

    Raises ModelLoadError for a file that is cut short, is no GGUF, has impossible counts or holds a tensor type that
    cannot be read; nothing larger than the file is ever allocated. With `header_only` the file may end behind its
    tensor table: it then says everything but its numbers.
    """

    def __init__(self, path: str | Path, *, header_only: bool = False):
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise ModelLoadError(f"cannot read GGUF file {self.path}: {error}") from error
        reader = _HeaderReader(memoryview(self._map), self.path)
        self.version, num_tensors, num_pairs = reader.preamble()
        self.metadata: dict[str, Any] = reader.pairs(num_pairs)
        self.alignment = self._read_alignment()
        table = reader.tensor_table(num_tensors, self.alignment, header_only=header_only)
        self.tensors: dict[str, TensorInfo] = {t.gguf_name: t for t in table}
        self.has_data = all(t.offset + t.num_bytes <= len(self._map) for t in table)

    # -- the file as a Hugging Face checkpoint ------------------------------------------------------------------------

    @cached_property
    def architecture(self) -> Architecture:
        """The table entry of `general.architecture`; ModelLoadError names an unknown one."""
        return architecture_of(self.metadata, self.path)

    def config(self) -> dict[str, Any]:
        """What a Hugging Face config.json would say about this model."""
        shapes = {name: info.shape for name, info in self.tensors.items()}
        return hf_config(self.architecture, self.metadata, shapes, self._rope_factors(), self.path)

    def generation_config(self) -> dict[str, Any]:
        """What a Hugging Face generation_config.json would say: the ids that end a turn."""
        return hf_generation_config(self.metadata)

    @cached_property
    def _by_hf_name(self) -> dict[str, TensorInfo]:
        found: dict[str, TensorInfo] = {}
        for name, info in self.tensors.items():
            if name in self.architecture.config_tensors:
                continue
            hf_name = self.architecture.hf_name(name, self.path)
            if "{}" in hf_name:
                found.update({hf_name.format(i): part for i, part in enumerate(info.parts())})
            else:
                found[hf_name] = info
        return found

    def tensor_names(self) -> list[str]:
        """Hugging Face names, in file order; tensors that are settings (rope_freqs) are in `config()` instead."""
        return list(self._by_hf_name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the tensor under its Hugging Face name, row-major."""
        return self._info(name).shape

    def quant_type(self, name: str) -> QuantType:
        """How the tensor is packed in the file."""
        return self._info(name).quant

    def raw(self, name: str) -> tuple[QuantType, np.ndarray]:
        """The tensor's bytes in file row order: a read-only view, uint8 [num_rows, bytes_per_row]."""
        info = self._info(name)
        return info.quant, self._rows(info)

    def row_permutation(self, name: str) -> np.ndarray | None:
        """`rows` such that `file_rows[rows]` are in Hugging Face order; None where the orders agree.

        The converter interleaves the two rotary halves of each q and k head (row 2i and 2i+1 turn together) where
        Hugging Face keeps them apart (row i and i + head_dim/2).
        """
        info = self._info(name)
        num_heads = self.architecture.rotary_heads(info.gguf_name, self.metadata)
        if num_heads is None:
            return None
        import numpy as np

        num_rows = info.shape[0]
        if num_rows % (2 * num_heads):
            raise ModelLoadError(f"{self.path}: tensor {info.gguf_name} has {num_rows} rows for {num_heads} heads")
        return np.arange(num_rows).reshape(num_heads, num_rows // num_heads // 2, 2).swapaxes(1, 2).reshape(-1)

    def quantized(self, name: str) -> tuple[QuantType, np.ndarray]:
        """The tensor's bytes in Hugging Face row order, norms without the converter's offset: uint8 [num_rows,
        bytes_per_row].

        Blocks run along a row, so permuting rows needs no dequantisation. A read-only view of the file where the
        orders agree, else a copy.
        """
        quant, rows = self.raw(name)
        offset = self.architecture.norm_offset
        if offset and name.endswith("norm.weight"):
            import numpy as np

            shifted = _dequantize(quant, rows) - np.float32(offset)
            return _FLOAT32, shifted.view(np.uint8).reshape(rows.shape[0], -1)
        permutation = self.row_permutation(name)
        if permutation is None:
            return quant, rows
        info = self._info(name)
        # A bias is one row of numbers; its elements are what the permutation moves.
        by_row = rows.reshape(info.shape[0], -1) if len(info.shape) == 1 else rows
        return quant, by_row[permutation].reshape(rows.shape)

    def dequantize(self, name: str) -> np.ndarray:
        """The tensor as float32 in Hugging Face layout and row order."""
        quant, rows = self.quantized(name)
        return _dequantize(quant, rows).reshape(self.shape(name))

    # -- inside -------------------------------------------------------------------------------------------------------

    def _info(self, name: str) -> TensorInfo:
        try:
            return self._by_hf_name[name]
        except KeyError:
            raise ModelLoadError(f"{self.path}: no tensor {name}") from None

    def _rows(self, info: TensorInfo) -> np.ndarray:
        import numpy as np

        flat = np.frombuffer(self._map, np.uint8, count=info.num_bytes, offset=info.offset)
        num_rows = math.prod(info.shape[:-1])
        return flat.reshape(num_rows, info.num_bytes // num_rows)

    def _rope_factors(self) -> dict[str, list[float]]:
        found = {name: info for name, info in self.tensors.items() if name in self.architecture.config_tensors}
        if not self.has_data:  # the length of the list is all that a plan needs
            return {name: [1.0] * math.prod(info.shape) for name, info in found.items()}
        return {name: _dequantize(info.quant, self._rows(info)).reshape(-1).tolist() for name, info in found.items()}

    def _read_alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1) or alignment > 2**20:
            raise ModelLoadError(f"{self.path}: general.alignment is {alignment!r}, not a power of two up to 1 MiB")
        return alignment


def _dequantize(quant: QuantType, rows: np.ndarray) -> np.ndarray:
    # They take a while to import, and only the weights need them.
    import numpy as np
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    if quant.name == "F32":
        return rows.view(np.float32).copy()
    data = rows.view(np.float16) if quant.name == "F16" else rows
    return dequantize(data, GGMLQuantizationType(quant.ggml_id)).astype(np.float32, copy=False)


class _HeaderReader:
    """A cursor over the header. Every step checks that the file is long enough for it."""

    def __init__(self, view: memoryview, path: Path):
        self._view = view
        self._size = len(view)
        self._at = 0
        self._path = path

    def preamble(self) -> tuple[int, int, int]:
        """Version, number of tensors, number of key-value pairs."""
        magic = bytes(self._take(4, "the magic"))
        if magic != _MAGIC:
            raise ModelLoadError(f"{self._path} is not a GGUF file: it begins with {magic!r}, not {_MAGIC!r}")
        version = self._scalar("<I", "the version")
        if version not in _VERSIONS:
            if version & 0xFFFF == 0:
                raise ModelLoadError(f"{self._path} is a big-endian GGUF file; only little-endian ones can be read")
            raise ModelLoadError(f"{self._path} has GGUF version {version}; versions 2 and 3 can be read")
        num_tensors = self._scalar("<Q", "the tensor count")
        num_pairs = self._scalar("<Q", "the metadata count")
        self._check_count(num_pairs, _MIN_PAIR_BYTES, "metadata entries")
        self._check_count(num_tensors, _MIN_TENSOR_BYTES, "tensors")
        return version, num_tensors, num_pairs

    def pairs(self, count: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for _ in range(count):
            key = self._string("a metadata key")
            if key in result:
                raise ModelLoadError(f"{self._path}: metadata key {key!r} appears twice")
            result[key] = self._value(self._scalar("<I", key), key, depth=0)
        return result

    def tensor_table(self, count: int, alignment: int, *, header_only: bool) -> list[TensorInfo]:
        entries: list[tuple[str, QuantType, tuple[int, ...], int, int]] = []
        names: set[str] = set()
        for _ in range(count):
            name = self._string("a tensor name")
            if name in names:
                raise ModelLoadError(f"{self._path}: tensor {name!r} appears twice")
            names.add(name)
            num_dims = self._scalar("<I", name)
            if not 1 <= num_dims <= _MAX_DIMS:
                raise ModelLoadError(f"{self._path}: tensor {name} has {num_dims} dimensions")
            dims = struct.unpack(f"<{num_dims}Q", self._take(8 * num_dims, name))
            quant = self._quant_type(self._scalar("<I", name), name)
            offset = self._scalar("<Q", name)
            if 0 in dims or dims[0] % quant.block_len:
                raise ModelLoadError(f"{self._path}: tensor {name} of type {quant.name} has impossible shape {dims}")
            num_bytes = math.prod(dims) // quant.block_len * quant.block_bytes
            entries.append((name, quant, tuple(reversed(dims)), offset, num_bytes))
        data_start = -(-self._at // alignment) * alignment
        for name, _, _, offset, num_bytes in entries:
            if offset % alignment:
                raise ModelLoadError(f"{self._path}: tensor {name} is not aligned to {alignment} bytes")
            if not header_only and data_start + offset + num_bytes > self._size:
                raise ModelLoadError(
                    f"{self._path} is cut short: tensor {name} ends at byte {data_start + offset + num_bytes}, "
                    f"the file has {self._size}; fetch it again"
                )
        return [TensorInfo(n, q, shape, data_start + offset, size) for n, q, shape, offset, size in entries]

    def _quant_type(self, ggml_id: int, tensor: str) -> QuantType:
        if ggml_id in QUANT_TYPES:
            return QUANT_TYPES[ggml_id]
        from gguf.constants import GGMLQuantizationType

        known = ", ".join(q.name for q in QUANT_TYPES.values())
        try:
            name = GGMLQuantizationType(ggml_id).name
        except ValueError:
            name = f"number {ggml_id}"
        raise ModelLoadError(f"{self._path}: tensor {tensor} has type {name}, which cannot be read; known: {known}")

    def _value(self, kind: int, key: str, depth: int) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind], key)
        if kind == _STRING:
            return self._string(key)
        if kind != _ARRAY or depth == _MAX_ARRAY_DEPTH:
            raise ModelLoadError(f"{self._path}: metadata {key!r} has unknown value type {kind}")
        item_kind = self._scalar("<I", key)
        count = self._scalar("<Q", key)
        if item_kind not in _MIN_VALUE_BYTES:
            raise ModelLoadError(f"{self._path}: metadata {key!r} has unknown item type {item_kind}")
        self._check_count(count, _MIN_VALUE_BYTES[item_kind], f"items of {key!r}")
        if item_kind in _SCALARS:
            width = struct.calcsize(_SCALARS[item_kind])
            return list(struct.unpack(f"<{count}{_SCALARS[item_kind][1]}", self._take(width * count, key)))
        if item_kind == _STRING:
            return self._strings(count, key)
        return [self._value(item_kind, key, depth + 1) for _ in range(count)]

    def _strings(self, count: int, key: str) -> StringArray:
        # The hot loop of the header (vocabulary and merges): it only finds where the texts are.
        unpack, view, at = struct.Struct("<Q").unpack_from, self._view, self._at
        ends = array("Q")
        try:
            for _ in range(count):
                at += 8 + unpack(view, at)[0]
                ends.append(at)
        except (struct.error, OverflowError):  # behind the end of the file
            self._cut_short(key)
        if at > self._size:
            self._cut_short(key)
        start, self._at = self._at, at
        return StringArray(view, ends, start)

    def _string(self, what: str) -> str:
        length = self._scalar("<Q", what)
        return str(self._take(length, what), "utf-8", "replace")

    def _scalar(self, fmt: str, what: str) -> Any:
        return struct.unpack(fmt, self._take(struct.calcsize(fmt), what))[0]

    def _take(self, num_bytes: int, what: str) -> memoryview:
        if self._at + num_bytes > self._size:
            self._cut_short(what)
        start, self._at = self._at, self._at + num_bytes
        return self._view[start : self._at]

    def _check_count(self, count: int, min_bytes: int, what: str) -> None:
        if count * min_bytes > self._size - self._at:
            raise ModelLoadError(
                f"{self._path} is broken or cut short: it announces {count} {what}, "
                f"but only {self._size - self._at} bytes follow"
            )

    def _cut_short(self, what: str) -> None:
        raise ModelLoadError(f"{self._path} is cut short: it ends inside {what}; fetch it again")
