"""The native CUDA library (csrc/cuda): finds it, binds it, describes its C structs; its ops are in `kernels/cuda.py`.

Beside `native.py` the only module that touches ctypes. Loading needs no driver; calls that need a device fail with the
library's words where there is none.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch

from pagedserve import envs
from pagedserve.errors import ConfigError
from pagedserve.kernels import native
from pagedserve.log import get_logger

logger = get_logger(__name__)

ABI_VERSION = 1
LIBRARY_NAME = "libpagedserve_cuda.so"

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
KV_DTYPES = {**DTYPES, torch.int8: 3, torch.float8_e4m3fn: 4}
_UNSUPPORTED, _OUT_OF_MEMORY, _NO_DEVICE, _FAILED = 2, 3, 4, 5

_p, _i, _l, _f = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
# C function -> its argument types; all of these return a ps_cuda_status.
_SIGNATURES: dict[str, list[Any]] = {
    "ps_cuda_decode_resident_ctas": [_l, _l, _i, _i, _p],
    "ps_cuda_plan_decode": [_p, _p, _l, _l, _p],
    "ps_cuda_paged_decode": [_p, _l, _p, _l, _l, _i, _p, _p, _p, _f, _l, _f, _p],
    "ps_cuda_copy_blocks": [_p, _l, _l, _p, _l, _p],
    "ps_cuda_swap_blocks": [_p, _l, _p, _l, _l, _p, _l, _p],
}
_SIZES: dict[str, list[Any]] = {
    "ps_cuda_decode_row_tile": [_l, _l, _i],
    "ps_cuda_decode_shared_bytes": [_l, _l, _i, _i],
    "ps_cuda_decode_max_items": [_l, _l, _l],
    "ps_cuda_decode_partial_floats": [_l, _l, _l, _l],
}


class KVCacheStruct(ctypes.Structure):
    """ps_cuda_kv_cache: one layer's view of a pool."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("block_stride_bytes", ctypes.c_int64),
        ("num_blocks", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
    )


class RowsStruct(ctypes.Structure):
    """ps_cuda_rows: the rows of a decode step."""

    _fields_ = (
        ("seq_lens", ctypes.c_void_p),
        ("block_tables", ctypes.c_void_p),
        ("query_start_loc", ctypes.c_void_p),
        ("block_tables_stride", ctypes.c_int64),
        ("num_seqs", ctypes.c_int64),
        ("max_query_len", ctypes.c_int64),
    )


class DecodePlanStruct(ctypes.Structure):
    """ps_cuda_decode_plan: the pieces of a step, and working memory."""

    _fields_ = (
        ("items", ctypes.c_void_p),
        ("max_items", ctypes.c_int64),
        ("resident_ctas", ctypes.c_int64),
        ("partials", ctypes.c_void_p),
        ("counters", ctypes.c_void_p),
    )


def address(struct: ctypes.Structure) -> int:
    """Where C finds it, as long as the object lives."""
    return ctypes.addressof(struct)


def _find() -> Path | None:
    chosen = envs.cuda_library()
    if chosen is not None:
        if not chosen.is_file():
            raise ConfigError(f"PAGEDSERVE_CUDA_LIBRARY={chosen}: there is no such file")
        return chosen
    return native.installed(LIBRARY_NAME)


def _bind(path: Path) -> ctypes.CDLL:
    lib = ctypes.CDLL(str(path))
    lib.ps_cuda_abi_version.restype = ctypes.c_int
    version = lib.ps_cuda_abi_version()
    if version != ABI_VERSION:
        raise OSError(f"{path} has ABI version {version}, this package needs {ABI_VERSION}: install again")
    lib.ps_cuda_last_error.restype = ctypes.c_char_p
    lib.ps_cuda_device_count.restype = ctypes.c_int
    for names, result in ((_SIGNATURES, ctypes.c_int), (_SIZES, ctypes.c_int64)):
        for name, types in names.items():
            function = getattr(lib, name)
            function.argtypes = types
            function.restype = result
    return lib


@cache
def library() -> ctypes.CDLL | None:
    """The loaded library, or None (after one warning where it is there but broken)."""
    path = _find()
    if path is None:
        return None
    try:
        return _bind(path)
    except (OSError, AttributeError) as error:
        logger.warning("native CUDA kernels cannot be loaded (%s): running on Triton ones", error)
        return None


@cache
def is_emulated() -> bool:
    """Whether the library is the one that runs csrc/cuda on the CPU, and so takes CPU tensors."""
    return hasattr(library(), "ps_emulation_set")


@cache
def why_not() -> str | None:
    """Why no kernel can run here, or None."""
    lib = library()
    if lib is None:
        return "the native CUDA library is not there (no nvcc when pagedserve was installed?)"
    if lib.ps_cuda_device_count() == 0:
        return lib.ps_cuda_last_error().decode()
    return None


def describe() -> str:
    """One line for people."""
    reason = why_not()
    return "emulated on the CPU" if reason is None and is_emulated() else reason or "ready"


def size(name: str, *arguments: int) -> int:
    """Calls one of the functions that tell sizes; they need no device."""
    return getattr(_loaded(), name)(*arguments)


def call(name: str, *arguments: Any) -> None:
    """Calls C function `name`; None is passed as NULL.

    Raises ConfigError where there is no device or no kernel, MemoryError, ValueError for arguments that it refuses, and
    RuntimeError with what the CUDA runtime said.
    """
    status = getattr(_loaded(), name)(*arguments)
    if status:
        _fail(name, status)


def resident_ctas(head_dim: int, max_rows: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> int:
    """CTAs of the decode kernel that the current device holds at a time. ConfigError where it has no such kernel."""
    found = ctypes.c_int64()
    call("ps_cuda_decode_resident_ctas", head_dim, max_rows, DTYPES[dtype], KV_DTYPES[kv_dtype], ctypes.byref(found))
    return found.value


def _loaded() -> ctypes.CDLL:
    lib = library()
    if lib is None:
        raise RuntimeError("the native CUDA kernels are not available")
    return lib


def _fail(name: str, status: int) -> None:
    message = f"{name}: {_loaded().ps_cuda_last_error().decode()}"
    if status in (_UNSUPPORTED, _NO_DEVICE):
        raise ConfigError(message)
    if status == _OUT_OF_MEMORY:
        raise MemoryError(message)
    if status == _FAILED:
        raise RuntimeError(message)
    raise ValueError(message)
