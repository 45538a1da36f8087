"""The native CPU library (csrc) behind typed functions: finds it, binds it, checks every argument once.

The only module that touches ctypes. Nothing here falls back: `ops` asks `available()` first.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import pagedserve
from pagedserve import envs
from pagedserve.errors import ConfigError
from pagedserve.log import get_logger

logger = get_logger(__name__)

ABI_VERSION = 1
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
    "ps_rotary_embedding": "ppllpllpllll",
    "ps_gated_activation": "iplplll",
    "ps_write_kv": "pplplpl",
    "ps_paged_attention": "plpllppflf",
    "ps_copy_blocks": "plpllpl",
    "ps_linear_pack": "pllpli",
    "ps_linear_pack_ggml": "pllpli",
    "ps_linear_rows": "plppl",
    "ps_linear": "plpllpppl",
}

_KV_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_DENSE_DTYPES = _KV_DTYPES
LINEAR_FORMATS = {
    name: number
    for number, name in enumerate(
        ("float32", "bfloat16", "float16", "int8", "int8_g16", "int8_min", "int4_sym", "int4", "int4_f32")
    )
}
_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu_erf": 2}
_UNSUPPORTED, _OUT_OF_MEMORY = 2, 3


class _KVCache(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("block_stride", ctypes.c_int64),
        ("num_blocks", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
    )


class _AttentionRows(ctypes.Structure):
    _fields_ = (
        ("query_start_loc", ctypes.c_void_p),
        ("seq_lens", ctypes.c_void_p),
        ("block_tables", ctypes.c_void_p),
        ("block_tables_stride", ctypes.c_int64),
        ("num_seqs", ctypes.c_int64),
        ("num_tokens", ctypes.c_int64),
    )


class _LinearWeight(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("out_features", ctypes.c_int64),
        ("in_features", ctypes.c_int64),
        ("format", ctypes.c_int32),
    )


# ---- the library ------------------------------------------------------------------------------------------


def _find() -> Path | None:
    # An editable install has two entries: the source tree, and site-packages with what CMake built.
    for entry in pagedserve.__path__:
        candidate = Path(entry) / "lib" / LIBRARY_NAME
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
    if envs.native_disabled():
        return None
    path = _find()
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


def call(name: str, *arguments: Any) -> None:
    """Calls C function `name` of SIGNATURES; tensors are passed as their `data_ptr()`, None as NULL.

    Raises ValueError (or MemoryError) with the library's own words when it refuses.
    """
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


# ---- argument checks ----------------------------------------------------------------------------------------


def _rows(tensor: torch.Tensor, name: str, num_dims: int) -> None:
    """An fp32 CPU tensor, contiguous but for the stride of its first dimension (where it has two or more)."""
    if tensor.dtype is not torch.float32 or not tensor.is_cpu:
        raise TypeError(f"{name} must be fp32 on the CPU, it is {tensor.dtype} on {tensor.device}")
    if tensor.dim() != num_dims:
        raise ValueError(f"{name} must have {num_dims} dimensions, its shape is {tuple(tensor.shape)}")
    if tensor.is_contiguous():
        return
    expected = 1
    for size, stride in zip(tensor.shape[:0:-1], tensor.stride()[:0:-1], strict=True):
        if stride != expected and size != 1:
            break
        expected *= size
    else:
        if num_dims > 1:
            return
    raise ValueError(f"{name} must be contiguous but for its first dimension: strides {tensor.stride()}")


def _ints(tensor: torch.Tensor, name: str, dtype: torch.dtype, num_dims: int) -> None:
    if tensor.dtype is not dtype or not tensor.is_cpu:
        raise TypeError(f"{name} must be {dtype} on the CPU, it is {tensor.dtype} on {tensor.device}")
    if tensor.dim() != num_dims or not (tensor.is_contiguous() or (num_dims == 2 and tensor.stride(1) == 1)):
        raise ValueError(f"{name} must be contiguous with {num_dims} dimensions: {tuple(tensor.shape)}")


def _same(found: tuple[int, ...], wanted: tuple[int, ...], name: str) -> None:
    if tuple(found) != wanted:
        raise ValueError(f"{name} has shape {tuple(found)}, it must be {wanted}")


@lru_cache(maxsize=1024)
def _kv_cache(
    data: int, block_stride: int, num_blocks: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: int
) -> _KVCache:
    return _KVCache(data, block_stride, num_blocks, num_kv_heads, head_dim, block_size, dtype)


def _kv_struct(kv_cache: torch.Tensor, head_dim: int) -> _KVCache:
    """The C description of a layer's view [num_blocks, 2, num_kv_heads, block_size * head_dim]."""
    dtype = _KV_DTYPES.get(kv_cache.dtype)
    if dtype is None or not kv_cache.is_cpu:
        raise TypeError(f"kv_cache must be fp32, bf16 or fp16 on the CPU, it is {kv_cache.dtype}")
    if kv_cache.dim() != 4 or kv_cache.shape[1] != 2 or kv_cache.shape[3] % head_dim:
        raise ValueError(
            "kv_cache must be [num_blocks, 2, num_kv_heads, block_size * head_dim] with head_dim "
            f"{head_dim}, it is {tuple(kv_cache.shape)}"
        )
    num_blocks, _, num_kv_heads, head_size = kv_cache.shape
    block_stride = kv_cache.stride(0)
    if kv_cache.stride()[1:] != (num_kv_heads * head_size, head_size, 1):
        raise ValueError(f"kv_cache must be contiguous within a block: strides {kv_cache.stride()}")
    return _kv_cache(
        kv_cache.data_ptr(), block_stride, num_blocks, num_kv_heads, head_dim, head_size // head_dim, dtype
    )


# ---- the ops ------------------------------------------------------------------------------------------------


def rms_norm(
    x: torch.Tensor,  # [num_tokens, dim] or [num_tokens, num_heads, dim]
    weight: torch.Tensor,  # [dim]
    eps: float,
    residual: torch.Tensor | None,  # [num_tokens, dim]
    out: torch.Tensor | None,
) -> torch.Tensor:
    if out is None:
        out = torch.empty(x.shape, dtype=torch.float32)
    num_dims = x.dim()
    if num_dims not in (2, 3):
        raise ValueError(f"x must have 2 or 3 dimensions, its shape is {tuple(x.shape)}")
    _rows(x, "x", num_dims)
    _rows(out, "out", num_dims)
    _rows(weight, "weight", 1)
    dim = x.shape[-1]
    _same(out.shape, tuple(x.shape), "out")
    _same(weight.shape, (dim,), "weight")
    if residual is not None:
        _rows(residual, "residual", 2)
        _same(residual.shape, tuple(x.shape), "residual")
    num_inner = x.shape[1] if num_dims == 3 else 1
    call(
        "ps_rms_norm", out.data_ptr(), out.stride(0), dim, x.data_ptr(), x.stride(0), dim,
        None if residual is None else residual.data_ptr(), 0 if residual is None else residual.stride(0),
        weight.data_ptr(), x.shape[0], num_inner, dim, eps,
    )  # fmt: skip
    return out


def rotary_embedding(
    positions: torch.Tensor,  # int64 [num_tokens]
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    key: torch.Tensor | None,  # [num_tokens, num_kv_heads, head_dim]
    cos_sin: torch.Tensor,  # [max_position, rotary_dim]
) -> None:
    _ints(positions, "positions", torch.int64, 1)
    _rows(query, "query", 3)
    _rows(cos_sin, "cos_sin", 2)
    num_tokens, num_heads, head_dim = query.shape
    _same(positions.shape, (num_tokens,), "positions")
    max_position, rotary_dim = cos_sin.shape
    if cos_sin.stride(0) != rotary_dim:
        raise ValueError("cos_sin must be contiguous")
    key_pointer, key_stride, num_kv_heads = None, 0, 0
    if key is not None:
        _rows(key, "key", 3)
        _same((key.shape[0], key.shape[2]), (num_tokens, head_dim), "key's first and last dimension")
        key_pointer, key_stride, num_kv_heads = key.data_ptr(), key.stride(0), key.shape[1]
    call(
        "ps_rotary_embedding", positions.data_ptr(), query.data_ptr(), query.stride(0), num_heads, key_pointer,
        key_stride, num_kv_heads, cos_sin.data_ptr(), max_position, num_tokens, head_dim, rotary_dim,
    )  # fmt: skip


def gated_activation(kind: str, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    _rows(x, "x", 2)
    num_rows, double = x.shape
    if double % 2:
        raise ValueError(f"x must be [num_tokens, 2 * dim], its shape is {tuple(x.shape)}")
    dim = double // 2
    if out is None:
        out = torch.empty((num_rows, dim), dtype=torch.float32)
    _rows(out, "out", 2)
    _same(out.shape, (num_rows, dim), "out")
    call(
        "ps_gated_activation", _ACTIVATIONS[kind], out.data_ptr(), out.stride(0), x.data_ptr(), x.stride(0),
        num_rows, dim,
    )  # fmt: skip
    return out


def write_kv(
    key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    value: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    kv_cache: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size * head_dim]
    slot_mapping: torch.Tensor,  # int64 [num_tokens]
) -> None:
    _rows(key, "key", 3)
    _rows(value, "value", 3)
    _ints(slot_mapping, "slot_mapping", torch.int64, 1)
    num_tokens, _, head_dim = key.shape
    struct = _kv_struct(kv_cache, head_dim)
    _same(key.shape, (num_tokens, struct.num_kv_heads, head_dim), "key")
    _same(value.shape, (num_tokens, struct.num_kv_heads, head_dim), "value")
    _same(slot_mapping.shape, (num_tokens,), "slot_mapping")
    call(
        "ps_write_kv", ctypes.byref(struct), key.data_ptr(), key.stride(0), value.data_ptr(), value.stride(0),
        slot_mapping.data_ptr(), num_tokens,
    )  # fmt: skip


def paged_attention(
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    kv_cache: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size * head_dim]
    query_start_loc: torch.Tensor,  # int32 [num_seqs + 1]
    seq_lens: torch.Tensor,  # int32 [num_seqs]
    block_tables: torch.Tensor,  # int32 [num_seqs, max_blocks_per_seq]
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    _rows(query, "query", 3)
    _ints(query_start_loc, "query_start_loc", torch.int32, 1)
    _ints(seq_lens, "seq_lens", torch.int32, 1)
    _ints(block_tables, "block_tables", torch.int32, 2)
    num_tokens, num_heads, head_dim = query.shape
    num_seqs = seq_lens.shape[0]
    _same(query_start_loc.shape, (num_seqs + 1,), "query_start_loc")
    _same(block_tables.shape[:1], (num_seqs,), "block_tables' first dimension")
    if out is None:
        out = torch.empty((num_tokens, num_heads, head_dim), dtype=torch.float32)
    _rows(out, "out", 3)
    _same(out.shape, tuple(query.shape), "out")
    struct = _kv_struct(kv_cache, head_dim)
    rows = _AttentionRows(
        query_start_loc.data_ptr(),
        seq_lens.data_ptr(),
        block_tables.data_ptr(),
        block_tables.stride(0),
        num_seqs,
        num_tokens,
    )
    call(
        "ps_paged_attention", out.data_ptr(), out.stride(0), query.data_ptr(), query.stride(0), num_heads,
        ctypes.byref(struct), ctypes.byref(rows), scale, sliding_window or 0, soft_cap or 0.0,
    )  # fmt: skip
    return out


def swap_blocks(src_pool: torch.Tensor, dst_pool: torch.Tensor, pairs: torch.Tensor) -> None:
    _ints(pairs, "pairs", torch.int64, 2)
    _same(pairs.shape[1:], (2,), "pairs' last dimension")
    if src_pool.dtype is not dst_pool.dtype or src_pool.shape[1:] != dst_pool.shape[1:]:
        raise ValueError("the two pools must hold blocks of one dtype and shape")
    for pool in (src_pool, dst_pool):
        if not pool.is_cpu or not pool.is_contiguous():
            raise ValueError("a pool must be contiguous and on the CPU")
    if pairs.numel() == 0:
        return
    block_bytes = src_pool.stride(0) * src_pool.element_size()
    call(
        "ps_copy_blocks", dst_pool.data_ptr(), dst_pool.shape[0], src_pool.data_ptr(), src_pool.shape[0],
        block_bytes, pairs.contiguous().data_ptr(), pairs.shape[0],
    )  # fmt: skip


# ---- packed linear weights ----------------------------------------------------------------------------------


class PackedMatrix:
    """A matrix [out_features, in_features] in one of LINEAR_FORMATS, in the layout of csrc/cpu/linear_format.h.

    Starts as zeros; `pack` and `pack_ggml` fill rows. `data` is all of it, `address` its ps_linear_weight.
    """

    def __init__(self, fmt: str, out_features: int, in_features: int) -> None:
        num_bytes = _loaded().ps_linear_packed_bytes(LINEAR_FORMATS[fmt], out_features, in_features)
        if num_bytes == 0:
            raise ValueError(_loaded().ps_last_error().decode())
        self.format = fmt
        self.out_features = out_features
        self.in_features = in_features
        self.data = torch.zeros(num_bytes, dtype=torch.uint8)
        self._struct = _LinearWeight(self.data.data_ptr(), out_features, in_features, LINEAR_FORMATS[fmt])
        self.address = ctypes.addressof(self._struct)

    def pack(self, first_row: int, rows: torch.Tensor) -> None:
        """Fills rows from `first_row` with dense ones, fp32, bf16 or fp16 [num_rows, in_features]."""
        if rows.dtype not in _DENSE_DTYPES or not rows.is_cpu:
            raise TypeError(f"rows must be fp32, bf16 or fp16 on the CPU, they are {rows.dtype} on {rows.device}")
        _same(rows.shape[1:], (self.in_features,), "rows' last dimension")
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        call(
            "ps_linear_pack", self.address, first_row, rows.shape[0], rows.data_ptr(), rows.stride(0),
            _DENSE_DTYPES[rows.dtype],
        )  # fmt: skip

    def pack_ggml(self, first_row: int, rows: np.ndarray, ggml_type: int) -> None:
        """Fills rows from `first_row` with uint8 [num_rows, row_bytes] of a GGUF tensor, losslessly."""
        if rows.dtype != np.uint8 or rows.ndim != 2 or rows.strides[1] != 1:
            raise ValueError(f"rows must be uint8 [num_rows, row_bytes], they are {rows.dtype} {rows.shape}")
        if rows.strides[0] != rows.shape[1]:
            rows = np.ascontiguousarray(rows)
        call(
            "ps_linear_pack_ggml", self.address, first_row, rows.shape[0], rows.ctypes.data, rows.shape[1], ggml_type
        )


def linear_format_of_ggml_type(ggml_type: int) -> str | None:
    """The format that holds a quant type of GGUF files without loss, if there is one."""
    number = _loaded().ps_linear_format_of_ggml_type(ggml_type)
    return None if number < 0 else list(LINEAR_FORMATS)[number]


def linear(
    x: torch.Tensor,  # [num_tokens, in_features]
    weight: PackedMatrix,
    bias: torch.Tensor | None,  # [out_features]
    residual: torch.Tensor | None,  # [num_tokens, out_features]
    out: torch.Tensor | None,
) -> torch.Tensor:
    _rows(x, "x", 2)
    num_tokens = x.shape[0]
    _same(x.shape[1:], (weight.in_features,), "x's last dimension")
    shape = (num_tokens, weight.out_features)
    if out is None:
        out = torch.empty(shape, dtype=torch.float32)
    _rows(out, "out", 2)
    _same(out.shape, shape, "out")
    if bias is not None:
        _rows(bias, "bias", 1)
        _same(bias.shape, shape[1:], "bias")
    if residual is not None:
        _rows(residual, "residual", 2)
        _same(residual.shape, shape, "residual")
    call(
        "ps_linear", out.data_ptr(), out.stride(0), x.data_ptr(), x.stride(0), num_tokens, weight.address,
        None if bias is None else bias.data_ptr(), None if residual is None else residual.data_ptr(),
        0 if residual is None else residual.stride(0),
    )  # fmt: skip
    return out


def linear_rows(weight: PackedMatrix, row_ids: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    _ints(row_ids, "row_ids", torch.int64, 1)
    shape = (row_ids.shape[0], weight.in_features)
    if out is None:
        out = torch.empty(shape, dtype=torch.float32)
    _rows(out, "out", 2)
    _same(out.shape, shape, "out")
    call("ps_linear_rows", out.data_ptr(), out.stride(0), weight.address, row_ids.data_ptr(), row_ids.shape[0])
    return out
