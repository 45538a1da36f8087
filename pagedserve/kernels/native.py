"""The native CPU library (csrc): finds it, binds it, describes C structs; its ops are in `kernels/cpu.py`.

The only module that touches ctypes. Nothing here falls back: `ops` asks `available()` first.
"""

from __future__ import annotations

import ctypes
import struct
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

import pagedserve
from pagedserve import envs
from pagedserve.errors import ConfigError
from pagedserve.kernels import ABI_VERSION, huge_pages
from pagedserve.log import get_logger

logger = get_logger(__name__)

LIBRARY_NAME = "libpagedserve_cpu" + (".dylib" if sys.platform == "darwin" else ".so")

_TYPES: dict[str, Any] = {
    "p": ctypes.c_void_p,
    "i": ctypes.c_int,
    "l": ctypes.c_int64,
    "f": ctypes.c_float,
    "s": ctypes.c_char_p,
}

# C function -> its argument types, one letter each (see _TYPES); all of these return a ps_status.
SIGNATURES: dict[str, str] = {
    "ps_select_isa": "s",
    "ps_set_num_threads": "i",
    "ps_rms_norm": "pllpllplplllf",
    "ps_layer_norm": "plplplppllf",
    "ps_rotary_embedding": "ppllpllpllll",
    "ps_gated_activation": "iplplll",
    "ps_activation": "iplplll",
    "ps_scale": "plllf",
    "ps_soft_cap": "plllf",
    "ps_add": "plplll",
    "ps_token_bitmask": "plllppll",
    "ps_embedding": "plpllipll",
    "ps_write_kv": "pplplpl",
    "ps_paged_attention": "plpllppflf",
    "ps_rotary_attention": "plpllppllpppflf",
    "ps_copy_blocks": "plpllpl",
    "ps_linear_pack": "pllpli",
    "ps_linear_pack_ggml": "pllpli",
    "ps_linear_rows": "plppl",
    "ps_ggml_rows": "plplllipl",
    "ps_linear": "plpllpppl",
    "ps_route": "ppplllli",
    "ps_experts_sum": "plpllpplppli",
    "ps_sample": "plllpppppp",
    "ps_program_create": "pll",
    "ps_program_add_buffer": "pll",
    "ps_program_add_op": "pspl",
    "ps_program_run": "pppp",
}

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
KV_DTYPES = {**DTYPES, torch.int8: 3}
LINEAR_FORMATS = {
    name: number
    for number, name in enumerate(
        ("float32", "bfloat16", "float16", "int8", "int8_g16", "int8_min", "int4_sym", "int4", "int4_f32")
    )
}
_UNSUPPORTED, _OUT_OF_MEMORY = 2, 3


class _Struct(ctypes.Structure):
    @property
    def address(self) -> int:
        """Where C finds it, as long as this object lives."""
        return ctypes.addressof(self)

    @property
    def nbytes(self) -> int:
        return ctypes.sizeof(self)

    @property
    def _as_parameter_(self) -> int:
        # What ctypes passes where a struct itself is given to `call`.
        return ctypes.addressof(self)


class KVCacheStruct(_Struct):
    """ps_kv_cache: one layer's view of a pool."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("block_stride", ctypes.c_int64),
        ("num_blocks", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
    )


class AttentionRowsStruct(_Struct):
    """ps_attention_rows: the rows of a step."""

    _fields_ = (
        ("query_start_loc", ctypes.c_void_p),
        ("seq_lens", ctypes.c_void_p),
        ("block_tables", ctypes.c_void_p),
        ("block_tables_stride", ctypes.c_int64),
        ("num_seqs", ctypes.c_int64),
        ("num_tokens", ctypes.c_int64),
    )


class LinearWeightStruct(_Struct):
    """ps_linear_weight: a packed matrix."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("out_features", ctypes.c_int64),
        ("in_features", ctypes.c_int64),
        ("format", ctypes.c_int32),
    )


# ---- the library ------------------------------------------------------------------------------------------


def installed(name: str) -> Path | None:
    """The file of a library that was built with this package, or None."""
    # An editable install has two entries: the source tree, and site-packages with what CMake built.
    for entry in pagedserve.__path__:
        candidate = Path(entry) / "lib" / name
        if candidate.is_file():
            return candidate
    return None


def _bind(path: Path) -> ctypes.CDLL:
    lib = ctypes.CDLL(str(path))
    lib.ps_abi_version.restype = ctypes.c_int
    version = lib.ps_abi_version()
    if version != ABI_VERSION:
        raise OSError(f"{path} has ABI version {version}, this package needs {ABI_VERSION}: install again")
    for name in ("ps_last_error", "ps_available_isas", "ps_isa"):
        getattr(lib, name).restype = ctypes.c_char_p
    lib.ps_linear_packed_bytes.restype = ctypes.c_int64
    lib.ps_linear_packed_bytes.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    lib.ps_program_destroy.argtypes = [ctypes.c_void_p]
    lib.ps_program_destroy.restype = None
    for name, letters in SIGNATURES.items():
        function = getattr(lib, name)
        function.argtypes = [_TYPES[letter] for letter in letters]
        function.restype = ctypes.c_int
    return lib


@cache
def library() -> ctypes.CDLL | None:
    """The loaded library, or None (after one warning) where it was not built or cannot be loaded.

    Raises ConfigError when PAGEDSERVE_CPU_ISA names kernels that this machine cannot run.
    """
    # Where Triton is interpreted, the CPU stands in for a GPU.
    if envs.native_disabled() or envs.triton_interpreted():
        return None
    path = installed(LIBRARY_NAME)
    if path is None:
        logger.warning("no native CPU kernels in this install (no C++ compiler?): running on slower torch ops")
        return None
    try:
        lib = _bind(path)
    except (OSError, AttributeError) as error:
        logger.warning("native CPU kernels cannot be loaded (%s): running on slower torch ops", error)
        return None
    forced = envs.cpu_isa()
    if forced is not None and lib.ps_select_isa(forced.encode()) != 0:
        raise ConfigError(f"PAGEDSERVE_CPU_ISA={forced}: {lib.ps_last_error().decode()}")
    lib.ps_set_num_threads(torch.get_num_threads())
    return lib


def available() -> bool:
    """Whether the functions below can be called."""
    return library() is not None


def _loaded() -> ctypes.CDLL:
    lib = library()
    if lib is None:
        raise RuntimeError("the native CPU kernels are not available")
    return lib


class Recorder(Protocol):
    """Takes calls down instead of making them."""

    def record(self, name: str, arguments: tuple[Any, ...]) -> None: ...


_RECORDING = threading.Lock()
_recorder: Recorder | None = None
_recording_thread = 0


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Within, this thread's `call`s go to `recorder` and nothing is computed. One recording at a time."""
    global _recorder, _recording_thread
    with _RECORDING:
        _recorder, _recording_thread = recorder, threading.get_ident()
        try:
            yield
        finally:
            _recorder = None


def call(name: str, *arguments: Any) -> None:
    """Calls C function `name` of SIGNATURES; tensors are passed as their `data_ptr()`, None as NULL.

    Raises ValueError (or MemoryError) with the library's own words when it refuses.
    """
    if _recorder is not None and _recording_thread == threading.get_ident():
        _recorder.record(name, arguments)
        return
    status = getattr(_loaded(), name)(*arguments)
    if status:
        _fail(name, status)


def _fail(name: str, status: int) -> None:
    message = f"{name}: {_loaded().ps_last_error().decode()}"
    if status == _OUT_OF_MEMORY:
        raise MemoryError(message)
    if status == _UNSUPPORTED:
        raise ConfigError(message)
    raise ValueError(message)


def describe() -> str:
    """One line for people: the instruction set and the threads, or that there are no native kernels."""
    if not available():
        return "none (torch reference ops)"
    return f"{isa()}, {num_threads()} threads (can run: {', '.join(available_isas())})"


def available_isas() -> list[str]:
    """Instruction sets of the library that this CPU runs, best first."""
    return _loaded().ps_available_isas().decode().split(",")


def isa() -> str:
    """The instruction set whose kernels run."""
    return _loaded().ps_isa().decode()


def select_isa(name: str | None) -> None:
    """Takes the kernels of one instruction set (None: the best). Not while kernels run."""
    call("ps_select_isa", None if name is None else name.encode())


def num_threads() -> int:
    """Threads that compute, the calling one included."""
    return _loaded().ps_num_threads()


def set_num_threads(count: int) -> None:
    """Sizes the process's one pool of native threads."""
    call("ps_set_num_threads", count)


# ---- packed linear weights ----------------------------------------------------------------------------------


class PackedMatrix:
    """A matrix [out_features, in_features] in one of LINEAR_FORMATS, in the layout of csrc/cpu/linear_format.h.

    Starts as zeros; `pack` and `pack_ggml` fill rows. `data` is all of it, `address` its ps_linear_weight. With `data`
    (uint8, aligned to 64 bytes) it is a matrix that was packed before.
    """

    def __init__(self, fmt: str, out_features: int, in_features: int, data: torch.Tensor | None = None) -> None:
        num_bytes = self.num_bytes(fmt, out_features, in_features)
        self.format = fmt
        self.out_features = out_features
        self.in_features = in_features
        if data is None:
            data = huge_pages.take(num_bytes)
        elif data.dtype is not torch.uint8 or data.shape != (num_bytes,) or data.data_ptr() % 64:
            raise ValueError(f"{fmt} {out_features} x {in_features} takes {num_bytes} bytes, aligned to 64")
        self.data = data
        self._struct = LinearWeightStruct(self.data.data_ptr(), out_features, in_features, LINEAR_FORMATS[fmt])
        self.address = self._struct.address

    @staticmethod
    def num_bytes(fmt: str, out_features: int, in_features: int) -> int:
        """Bytes of a packed matrix. ValueError for a format or a shape that there is not."""
        number = LINEAR_FORMATS.get(fmt, -1)
        num_bytes = _loaded().ps_linear_packed_bytes(number, out_features, in_features)
        if num_bytes == 0:
            raise ValueError(_loaded().ps_last_error().decode())
        return num_bytes

    def pack(self, first_row: int, rows: torch.Tensor) -> None:
        """Fills rows from `first_row` with dense ones, fp32, bf16 or fp16 [num_rows, in_features]."""
        if rows.dtype not in DTYPES or not rows.is_cpu:
            raise TypeError(f"rows must be fp32, bf16 or fp16 on the CPU, they are {rows.dtype} on {rows.device}")
        if rows.dim() != 2 or rows.shape[1] != self.in_features:
            raise ValueError(f"rows must be [num_rows, {self.in_features}], they are {tuple(rows.shape)}")
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        call(
            "ps_linear_pack", self.address, first_row, rows.shape[0], rows.data_ptr(), rows.stride(0),
            DTYPES[rows.dtype],
        )  # fmt: skip

    def pack_ggml(self, first_row: int, rows: np.ndarray, ggml_type: int) -> None:
        """Fills rows from `first_row` with uint8 [num_rows, row_bytes] of a GGUF tensor, losslessly."""
        if rows.dtype != np.uint8 or rows.ndim != 2 or rows.strides[1] != 1:
            raise ValueError(f"rows must be uint8 [num_rows, row_bytes], they are {rows.dtype} {rows.shape}")
        if rows.strides[0] != rows.shape[1]:
            rows = np.ascontiguousarray(rows)
        call("ps_linear_pack_ggml", self.address, first_row, rows.shape[0], rows.ctypes.data, rows.shape[1], ggml_type)


class PackedExperts:
    """One projection of every expert: several packed matrices each, of one input, whose rows count as stacked.

    [num_experts, out_features, in_features] in `shape`. Any matrix may have a format of its own.
    """

    def __init__(self, experts: Sequence[Sequence[PackedMatrix]]) -> None:
        """Raises ValueError where experts differ in their shapes."""
        shapes = {tuple((matrix.out_features, matrix.in_features) for matrix in expert) for expert in experts}
        if len(shapes) != 1 or len({columns for _, columns in next(iter(shapes))}) != 1:
            raise ValueError(f"experts must have one shape, these have {sorted(shapes)}")
        self.matrices = [list(expert) for expert in experts]
        self.part_sizes = [rows for rows, _ in next(iter(shapes))]
        self.shape = (len(experts), sum(self.part_sizes), self.matrices[0][0].in_features)
        structs = [LinearWeightStruct.from_address(m.address) for expert in experts for m in expert]
        self._array = (LinearWeightStruct * len(structs))(*structs)
        self.address = ctypes.addressof(self._array)


def linear_format_of_ggml_type(ggml_type: int) -> str | None:
    """The format that holds a quant type of GGUF files without loss, if there is one."""
    number = _loaded().ps_linear_format_of_ggml_type(ggml_type)
    return None if number < 0 else list(LINEAR_FORMATS)[number]


# ---- step programs ------------------------------------------------------------------------------------------


class ArgumentStruct(_Struct):
    """ps_argument: how one argument of a recorded call comes about."""

    _fields_ = (("kind", ctypes.c_int32), ("index", ctypes.c_int32), ("value", ctypes.c_int64))


# ps_argument_kind
VALUE, COUNT, BUFFER, INPUT = 0, 1, 2, 3


def pointer_positions(name: str) -> list[bool]:
    """Which arguments of C function `name` are addresses."""
    return [letter == "p" for letter in SIGNATURES[name]]


def word(value: float | int | None) -> int:
    """An argument's 64 bits: NULL, an integer, or the 32 bits of a float."""
    if isinstance(value, float):
        return struct.unpack("<i", struct.pack("<f", value))[0]
    return 0 if value is None else int(value)


class StepProgram:
    """ps_program: native calls in order, replayed by one call for any counts of rows. One thread at a time runs it."""

    def __init__(self, num_counts: int, num_inputs: int) -> None:
        handle = ctypes.c_void_p()
        call("ps_program_create", ctypes.byref(handle), num_counts, num_inputs)
        self._handle = handle
        self._counts = (ctypes.c_int64 * num_counts)()
        self._inputs = (ctypes.c_void_p * num_inputs)()
        self.ops: list[tuple[str, Sequence[tuple[int, int, int]]]] = []  # name, arguments
        weakref.finalize(self, _loaded().ps_program_destroy, handle)

    def add_buffer(self, num_bytes: int, count_index: int | None) -> None:
        """Working memory: `num_bytes` for each of a count's rows, or in all where it belongs to no count."""
        call("ps_program_add_buffer", self._handle, num_bytes, -1 if count_index is None else count_index)

    def add_op(self, name: str, arguments: Sequence[tuple[int, int, int]]) -> None:
        """A call of C function `name`; each argument is (kind, index, value). ConfigError where C does not know it."""
        array = (ArgumentStruct * len(arguments))(*arguments)
        call("ps_program_add_op", self._handle, name.encode(), ctypes.byref(array), len(arguments))
        self.ops.append((name, arguments))

    def run(self, counts: Sequence[int], inputs: Sequence[int]) -> None:
        """Replays the calls. `inputs` are addresses."""
        self._counts[:] = counts
        self._inputs[:] = inputs
        if _observer is None:
            call("ps_program_run", self._handle, ctypes.byref(self._counts), ctypes.byref(self._inputs), None)
            return
        seconds = np.zeros(len(self.ops))
        call(
            "ps_program_run", self._handle, ctypes.byref(self._counts), ctypes.byref(self._inputs), seconds.ctypes.data
        )
        _observer(self, counts, inputs, seconds)


# Is told of every run: the program, its counts and inputs, and the seconds of each op, float64 [num_ops].
Observer = Callable[[StepProgram, Sequence[int], Sequence[int], np.ndarray], None]
_observer: Observer | None = None


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Within, ops of step programs are timed and `observer` is told."""
    global _observer
    _observer = observer
    try:
        yield
    finally:
        _observer = None


def packed_bytes(fmt: int, out_features: int, in_features: int) -> int:
    """Bytes of a packed matrix of ps_linear_format `fmt`."""
    return _loaded().ps_linear_packed_bytes(fmt, out_features, in_features)


def int32s_at(address: int, count: int) -> np.ndarray:
    """A copy of `count` int32 numbers that a recorded call points to."""
    return np.array((ctypes.c_int32 * count).from_address(address), dtype=np.int64)
