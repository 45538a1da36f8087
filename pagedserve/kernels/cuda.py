"""The ops of csrc/cuda: what they take is checked here, where tensors still have a dtype and a device.

With the emulated library (csrc/tests) the same functions take CPU tensors.
"""

from __future__ import annotations

import torch

from pagedserve.kernels import native_cuda, reference

HEAD_DIMS = (64, 80, 96, 128, 256)
BLOCK_SIZES = (8, 16, 32, 64, 128)
_MAX_SEQS = 65535


def _stream(device: torch.device) -> int | None:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None


def _on_device(x: torch.Tensor, name: str) -> None:
    if not (x.is_cuda or (x.is_cpu and native_cuda.is_emulated())):
        raise ValueError(f"{name} must be on a CUDA device, it is on {x.device}")


def _vector(x: torch.Tensor, name: str, shape: tuple[int, ...]) -> None:
    _on_device(x, name)
    if x.dtype is not torch.int32 or x.shape != shape or x.stride(-1) != 1:
        raise ValueError(f"{name} must be int32 {list(shape)} with dense rows, it is {x.dtype} {list(x.shape)}")


class DecodeStep:
    """The rows of one decode step, and how their contexts are cut into pieces for each window.

    Plans are made on the device by the first layer of a window that attends, and again when that layer comes back: so
    they are part of what a CUDA graph captures, and a replay plans for the lengths that it finds.
    """

    def __init__(
        self,
        *,
        seq_lens: torch.Tensor,  # int32 [num_seqs]; rows of 0 are skipped
        block_tables: torch.Tensor,  # int32 [num_seqs, max_blocks_per_seq]
        query_start_loc: torch.Tensor | None = None,  # int32 [num_seqs + 1]; None: one query each
        max_query_len: int = 1,
    ) -> None:
        num_seqs = seq_lens.shape[0]
        if num_seqs > _MAX_SEQS:
            raise ValueError(f"a decode step has at most {_MAX_SEQS} rows, this one has {num_seqs}")
        _vector(seq_lens, "seq_lens", (num_seqs,))
        _vector(block_tables, "block_tables", (num_seqs, block_tables.shape[-1]))
        if query_start_loc is not None:
            _vector(query_start_loc, "query_start_loc", (num_seqs + 1,))
        elif max_query_len != 1:
            raise ValueError("rows of several queries need query_start_loc")
        self.num_seqs = num_seqs
        self.one_query_each = query_start_loc is None
        self.max_query_len = max_query_len
        self.device = seq_lens.device
        self._tensors = (seq_lens, block_tables, query_start_loc)
        self._rows = native_cuda.RowsStruct(
            seq_lens.data_ptr(),
            block_tables.data_ptr(),
            None if query_start_loc is None else query_start_loc.data_ptr(),
            block_tables.stride(0),
            num_seqs,
            max_query_len,
        )
        self.rows_address = native_cuda.address(self._rows)
        self._plans: dict[int, DecodePlan] = {}

    def plan(self, kv: KVLayer, group: int, dtype: torch.dtype, window: int) -> DecodePlan:
        """The plan of a window, made anew where a forward begins with it."""
        plan = self._plans.get(window)
        if plan is None or plan.first_layer == kv.data:
            plan = self._plans[window] = DecodePlan(self, kv, group, dtype, window)
        return plan


class DecodePlan:
    """ps_cuda_decode_plan: the pieces of a step's contexts, and working memory for them."""

    def __init__(self, step: DecodeStep, kv: KVLayer, group: int, dtype: torch.dtype, window: int) -> None:
        max_rows = group * step.max_query_len
        row_tile = native_cuda.size("ps_cuda_decode_row_tile", kv.head_dim, max_rows, native_cuda.DTYPES[dtype])
        grid_heads = kv.num_kv_heads * -(-max_rows // row_tile)
        ctas = kv.resident_ctas(max_rows, dtype)
        max_items = native_cuda.size("ps_cuda_decode_max_items", step.num_seqs, grid_heads, ctas)
        partials = native_cuda.size("ps_cuda_decode_partial_floats", max_items, grid_heads, row_tile, kv.head_dim)
        self.first_layer = kv.data
        # From the graph's own memory where a step is being captured, so that they live as long as it.
        self.items = torch.empty(4 + 4 * max_items, dtype=torch.int32, device=step.device)
        self._partials = torch.empty(partials, dtype=torch.float32, device=step.device)
        self._counters = torch.zeros(step.num_seqs * grid_heads, dtype=torch.int32, device=step.device)
        self._struct = native_cuda.DecodePlanStruct(
            self.items.data_ptr(), max_items, ctas, self._partials.data_ptr(), self._counters.data_ptr()
        )
        self.address = native_cuda.address(self._struct)
        native_cuda.call(
            "ps_cuda_plan_decode", self.address, step.rows_address, grid_heads, window, _stream(step.device)
        )


class KVLayer:
    """One layer's view of a KV pool in the GPU layout, described in C once."""

    def __init__(self, kv_cache: torch.Tensor, head_dim: int, block_size: int) -> None:
        """kv_cache: [num_blocks, 2, num_kv_heads, block_size, head_dim], or, with 8 bits, codes of a head first, then
        its scales: [num_blocks, 2, num_kv_heads, 1, block_size * (head_dim + 4)]."""
        _on_device(kv_cache, "kv_cache")
        if kv_cache.dtype not in native_cuda.KV_DTYPES:
            raise ValueError(f"no CUDA kernel reads a KV cache of {kv_cache.dtype}")
        token_size = reference.kv_token_size(head_dim, kv_cache.dtype)
        inner = kv_cache.shape[-2] * kv_cache.shape[-1]
        if kv_cache.dim() != 5 or kv_cache.shape[1] != 2 or inner != block_size * token_size:
            raise ValueError(f"kv_cache {list(kv_cache.shape)} does not hold blocks of {block_size} x {head_dim}")
        if not kv_cache[0].is_contiguous():
            raise ValueError("what a block holds of a layer must be contiguous")
        block_stride = kv_cache.stride(0) * kv_cache.element_size()
        if kv_cache.data_ptr() % 16 or block_stride % 16:
            raise ValueError("blocks must be aligned to 16 bytes")
        self.data = kv_cache.data_ptr()
        self.dtype = kv_cache.dtype
        self.num_kv_heads = kv_cache.shape[2]
        self.head_dim = head_dim
        self.device = kv_cache.device
        self._struct = native_cuda.KVCacheStruct(
            self.data, block_stride, kv_cache.shape[0], self.num_kv_heads, head_dim, block_size,
            native_cuda.KV_DTYPES[kv_cache.dtype],
        )  # fmt: skip
        self.address = native_cuda.address(self._struct)
        self._resident: dict[int, int] = {}  # max_rows -> CTAs

    def resident_ctas(self, max_rows: int, dtype: torch.dtype) -> int:
        found = self._resident.get(max_rows)
        if found is None:
            found = self._resident[max_rows] = native_cuda.resident_ctas(self.head_dim, max_rows, dtype, self.dtype)
        return found


def paged_decode(
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    kv: KVLayer,
    step: DecodeStep,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    out: torch.Tensor | None = None,  # like query
) -> torch.Tensor:
    """Causal attention of each row's last tokens over its context; rows of length 0 keep what `out` holds."""
    num_tokens, num_heads, head_dim = query.shape
    if out is None:
        out = torch.empty(num_tokens, num_heads, head_dim, dtype=query.dtype, device=query.device)
    elif out.shape != query.shape or out.dtype is not query.dtype or out.device != query.device:
        raise ValueError(
            f"out must be like query {list(query.shape)} {query.dtype}, it is {list(out.shape)} {out.dtype}"
        )
    if query.dtype not in native_cuda.DTYPES or head_dim != kv.head_dim or query.device != kv.device:
        raise ValueError(f"query {list(query.shape)} {query.dtype} on {query.device} does not fit the cache")
    if step.one_query_each and num_tokens != step.num_seqs:
        raise ValueError(f"query has {num_tokens} tokens, the step {step.num_seqs} rows")
    for x, name in ((query, "query"), (out, "out")):
        if x.stride(2) != 1 or x.stride(1) != head_dim:
            raise ValueError(f"{name}'s heads must be contiguous")
    window = 0 if sliding_window is None else sliding_window
    plan = step.plan(kv, num_heads // kv.num_kv_heads, query.dtype, window).address
    native_cuda.call(
        "ps_cuda_paged_decode", out.data_ptr(), out.stride(0), query.data_ptr(), query.stride(0), num_heads,
        native_cuda.DTYPES[query.dtype], kv.address, step.rows_address, plan, scale, window,
        0.0 if soft_cap is None else soft_cap, _stream(query.device),
    )  # fmt: skip
    return out


def _pool(pool: torch.Tensor, pairs: torch.Tensor) -> int:
    """Bytes of a block."""
    if pairs.dtype is not torch.int64 or pairs.dim() != 2 or pairs.shape[1] != 2 or not pairs.is_cpu:
        raise ValueError(f"pairs must be int64 [n, 2] on the CPU, they are {pairs.dtype} {list(pairs.shape)}")
    if not pool.is_contiguous():
        raise ValueError("a pool must be contiguous")
    return pool.stride(0) * pool.element_size()


def copy_blocks(pool: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copies whole blocks within a device pool, in order. pool: [num_blocks, ...]; pairs: int64 [n, 2] on the CPU."""
    _on_device(pool, "pool")
    block_bytes = _pool(pool, pairs)
    pairs = pairs.contiguous()
    native_cuda.call(
        "ps_cuda_copy_blocks", pool.data_ptr(), pool.shape[0], block_bytes, pairs.data_ptr(), pairs.shape[0],
        _stream(pool.device),
    )  # fmt: skip


def swap_blocks(src_pool: torch.Tensor, dst_pool: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copies whole blocks between a device pool and a pinned host pool, in order, on the device's current stream."""
    if src_pool.dtype is not dst_pool.dtype or src_pool.shape[1:] != dst_pool.shape[1:]:
        raise ValueError("the two pools must hold blocks of one dtype and shape")
    device = src_pool if src_pool.is_cuda else dst_pool
    _on_device(device, "one of the pools")
    host = dst_pool if src_pool.is_cuda else src_pool
    if device.is_cuda and host.is_cpu and not host.is_pinned():
        raise ValueError("the host pool must be pinned")
    block_bytes = _pool(src_pool, pairs)
    _pool(dst_pool, pairs)
    pairs = pairs.contiguous()
    native_cuda.call(
        "ps_cuda_swap_blocks", dst_pool.data_ptr(), dst_pool.shape[0], src_pool.data_ptr(), src_pool.shape[0],
        block_bytes, pairs.data_ptr(), pairs.shape[0], _stream(device.device),
    )  # fmt: skip
