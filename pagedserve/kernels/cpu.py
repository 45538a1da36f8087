"""The native ops: every argument checked once, then one call into csrc. fp32 activations on the CPU.

Each op is defined by its namesake in `reference`; `ops` chooses between the two.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from pagedserve.kernels import native, reference
from pagedserve.kernels.arguments import check_ints, check_rows, check_shape

_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu_erf": 2, "relu": 3}


@lru_cache(maxsize=1024)
def _kv_cache(
    data: int, block_stride: int, num_blocks: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: int
) -> native.KVCacheStruct:
    return native.KVCacheStruct(data, block_stride, num_blocks, num_kv_heads, head_dim, block_size, dtype)


def _kv_struct(kv_cache: torch.Tensor, head_dim: int) -> native.KVCacheStruct:
    """The C description of a layer's view [num_blocks, 2, num_kv_heads, block_size * head_dim] (int8: head_dim + 4)."""
    dtype = native.KV_DTYPES.get(kv_cache.dtype)
    if dtype is None or not kv_cache.is_cpu:
        raise TypeError(f"kv_cache must be fp32, bf16, fp16 or int8 on the CPU, it is {kv_cache.dtype}")
    token_size = reference.kv_token_size(head_dim, kv_cache.dtype)
    if kv_cache.dim() != 4 or kv_cache.shape[1] != 2 or kv_cache.shape[3] % token_size:
        raise ValueError(
            f"kv_cache must be [num_blocks, 2, num_kv_heads, block_size * {token_size}] with head_dim "
            f"{head_dim}, it is {tuple(kv_cache.shape)}"
        )
    num_blocks, _, num_kv_heads, head_size = kv_cache.shape
    block_stride = kv_cache.stride(0)
    if kv_cache.stride()[1:] != (num_kv_heads * head_size, head_size, 1):
        raise ValueError(f"kv_cache must be contiguous within a block: strides {kv_cache.stride()}")
    return _kv_cache(
        kv_cache.data_ptr(), block_stride, num_blocks, num_kv_heads, head_dim, head_size // token_size, dtype
    )


def _cos_sin(cos_sin: torch.Tensor) -> tuple[int, int]:
    check_rows(cos_sin, "cos_sin", 2)
    if not cos_sin.is_contiguous():
        raise ValueError("cos_sin must be contiguous")
    max_position, rotary_dim = cos_sin.shape
    return max_position, rotary_dim


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
    check_rows(x, "x", num_dims)
    check_rows(out, "out", num_dims)
    check_rows(weight, "weight", 1)
    dim = x.shape[-1]
    check_shape(out.shape, tuple(x.shape), "out")
    check_shape(weight.shape, (dim,), "weight")
    if residual is not None:
        check_rows(residual, "residual", 2)
        check_shape(residual.shape, tuple(x.shape), "residual")
    num_inner = x.shape[1] if num_dims == 3 else 1
    native.call(
        "ps_rms_norm", out.data_ptr(), out.stride(0), dim, x.data_ptr(), x.stride(0), dim,
        None if residual is None else residual.data_ptr(), 0 if residual is None else residual.stride(0),
        weight.data_ptr(), x.shape[0], num_inner, dim, eps,
    )  # fmt: skip
    return out


def layer_norm(
    x: torch.Tensor,  # [num_tokens, dim]
    weight: torch.Tensor,  # [dim]
    bias: torch.Tensor | None,  # [dim]
    eps: float,
    residual: torch.Tensor | None,  # [num_tokens, dim]
    out: torch.Tensor | None,
) -> torch.Tensor:
    if out is None:
        out = torch.empty(x.shape, dtype=torch.float32)
    for tensor, name in ((x, "x"), (out, "out")):
        check_rows(tensor, name, 2)
    num_rows, dim = x.shape
    check_shape(out.shape, (num_rows, dim), "out")
    for tensor, name in ((weight, "weight"), (bias, "bias")):
        if tensor is not None:
            check_rows(tensor, name, 1)
            check_shape(tensor.shape, (dim,), name)
    if residual is not None:
        check_rows(residual, "residual", 2)
        check_shape(residual.shape, (num_rows, dim), "residual")
    native.call(
        "ps_layer_norm", out.data_ptr(), out.stride(0), x.data_ptr(), x.stride(0),
        None if residual is None else residual.data_ptr(), 0 if residual is None else residual.stride(0),
        weight.data_ptr(), None if bias is None else bias.data_ptr(), num_rows, dim, eps,
    )  # fmt: skip
    return out


def rotary_embedding(
    positions: torch.Tensor,  # int64 [num_tokens]
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    key: torch.Tensor | None,  # [num_tokens, num_kv_heads, head_dim]
    cos_sin: torch.Tensor,  # [max_position, rotary_dim]
) -> None:
    check_ints(positions, "positions", torch.int64, 1)
    check_rows(query, "query", 3)
    num_tokens, num_heads, head_dim = query.shape
    check_shape(positions.shape, (num_tokens,), "positions")
    max_position, rotary_dim = _cos_sin(cos_sin)
    key_pointer, key_stride, num_kv_heads = None, 0, 0
    if key is not None:
        check_rows(key, "key", 3)
        check_shape((key.shape[0], key.shape[2]), (num_tokens, head_dim), "key's first and last dimension")
        key_pointer, key_stride, num_kv_heads = key.data_ptr(), key.stride(0), key.shape[1]
    native.call(
        "ps_rotary_embedding", positions.data_ptr(), query.data_ptr(), query.stride(0), num_heads, key_pointer,
        key_stride, num_kv_heads, cos_sin.data_ptr(), max_position, num_tokens, head_dim, rotary_dim,
    )  # fmt: skip


def gated_activation(kind: str, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    check_rows(x, "x", 2)
    num_rows, double = x.shape
    if double % 2:
        raise ValueError(f"x must be [num_tokens, 2 * dim], its shape is {tuple(x.shape)}")
    dim = double // 2
    if out is None:
        out = torch.empty((num_rows, dim), dtype=torch.float32)
    check_rows(out, "out", 2)
    check_shape(out.shape, (num_rows, dim), "out")
    native.call(
        "ps_gated_activation", _ACTIVATIONS[kind], out.data_ptr(), out.stride(0), x.data_ptr(), x.stride(0),
        num_rows, dim,
    )  # fmt: skip
    return out


def activation(kind: str, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    if out is None:
        out = torch.empty(x.shape, dtype=torch.float32)
    check_rows(x, "x", 2)
    check_rows(out, "out", 2)
    check_shape(out.shape, tuple(x.shape), "out")
    native.call("ps_activation", _ACTIVATIONS[kind], out.data_ptr(), out.stride(0), x.data_ptr(), x.stride(0), *x.shape)
    return out


def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    check_rows(x, "x", 2)
    native.call("ps_scale", x.data_ptr(), x.stride(0), *x.shape, factor)
    return x


def soft_cap(x: torch.Tensor, cap: float) -> torch.Tensor:
    check_rows(x, "x", 2)
    native.call("ps_soft_cap", x.data_ptr(), x.stride(0), *x.shape, cap)
    return x


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    check_rows(x, "x", 2)
    check_rows(y, "y", 2)
    check_shape(y.shape, tuple(x.shape), "y")
    native.call("ps_add", x.data_ptr(), x.stride(0), y.data_ptr(), y.stride(0), *x.shape)
    return x


def embedding(
    table: torch.Tensor,  # [num_rows, dim], fp32, bf16 or fp16
    row_ids: torch.Tensor,  # int64 [num_tokens]
    out: torch.Tensor | None,
) -> torch.Tensor:
    check_ints(row_ids, "row_ids", torch.int64, 1)
    if table.dtype not in native.DTYPES or not table.is_cpu or table.dim() != 2 or table.stride(1) != 1:
        raise TypeError(f"table must be fp32, bf16 or fp16 rows on the CPU, it is {table.dtype} {tuple(table.shape)}")
    shape = (row_ids.shape[0], table.shape[1])
    if out is None:
        out = torch.empty(shape, dtype=torch.float32)
    check_rows(out, "out", 2)
    check_shape(out.shape, shape, "out")
    native.call(
        "ps_embedding", out.data_ptr(), out.stride(0), table.data_ptr(), table.stride(0), table.shape[0],
        native.DTYPES[table.dtype], row_ids.data_ptr(), *shape,
    )  # fmt: skip
    return out


def write_kv(
    key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    value: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    kv_cache: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size * head_dim]
    slot_mapping: torch.Tensor,  # int64 [num_tokens]
) -> None:
    check_rows(key, "key", 3)
    check_rows(value, "value", 3)
    check_ints(slot_mapping, "slot_mapping", torch.int64, 1)
    num_tokens, _, head_dim = key.shape
    struct = _kv_struct(kv_cache, head_dim)
    check_shape(key.shape, (num_tokens, struct.num_kv_heads, head_dim), "key")
    check_shape(value.shape, (num_tokens, struct.num_kv_heads, head_dim), "value")
    check_shape(slot_mapping.shape, (num_tokens,), "slot_mapping")
    native.call(
        "ps_write_kv", struct, key.data_ptr(), key.stride(0), value.data_ptr(), value.stride(0),
        slot_mapping.data_ptr(), num_tokens,
    )  # fmt: skip


class AttentionRows:
    """The rows of one step, checked and described to C once for all layers."""

    __slots__ = ("_tensors", "num_tokens", "struct")

    def __init__(
        self,
        query_start_loc: torch.Tensor,  # int32 [num_seqs + 1]
        seq_lens: torch.Tensor,  # int32 [num_seqs]
        block_tables: torch.Tensor,  # int32 [num_seqs, max_blocks_per_seq]
        num_tokens: int,
    ) -> None:
        check_ints(query_start_loc, "query_start_loc", torch.int32, 1)
        check_ints(seq_lens, "seq_lens", torch.int32, 1)
        check_ints(block_tables, "block_tables", torch.int32, 2)
        num_seqs = seq_lens.shape[0]
        check_shape(query_start_loc.shape, (num_seqs + 1,), "query_start_loc")
        check_shape(block_tables.shape[:1], (num_seqs,), "block_tables' first dimension")
        self.num_tokens = num_tokens
        self._tensors = (query_start_loc, seq_lens, block_tables)  # kept alive: the struct points into them
        self.struct = native.AttentionRowsStruct(
            query_start_loc.data_ptr(),
            seq_lens.data_ptr(),
            block_tables.data_ptr(),
            block_tables.stride(0),
            num_seqs,
            num_tokens,
        )

    @property
    def nbytes(self) -> int:
        return self.struct.nbytes


def attend(
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    kv_cache: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size * head_dim]
    rows: AttentionRows,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    out: torch.Tensor | None,
) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
    """`paged_attention` over rows that are checked already."""
    check_rows(query, "query", 3)
    num_tokens, num_heads, head_dim = query.shape
    if num_tokens != rows.num_tokens:
        raise ValueError(f"query has {num_tokens} tokens, the rows have {rows.num_tokens}")
    if out is None:
        out = torch.empty((num_tokens, num_heads, head_dim), dtype=torch.float32)
    else:
        check_rows(out, "out", 3)
        check_shape(out.shape, (num_tokens, num_heads, head_dim), "out")
    struct = _kv_struct(kv_cache, head_dim)
    native.call(
        "ps_paged_attention", out.data_ptr(), out.stride(0), query.data_ptr(), query.stride(0), num_heads,
        struct, rows.struct.address, scale, sliding_window or 0, soft_cap or 0.0,
    )  # fmt: skip
    return out


def rotate_and_attend(
    qkv: torch.Tensor,  # [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
    head_dim: int,
    positions: torch.Tensor,  # int64 [num_tokens]
    cos_sin: torch.Tensor,  # [max_position, rotary_dim]
    slot_mapping: torch.Tensor,  # int64 [num_tokens]
    kv_cache: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size * head_dim]
    rows: AttentionRows,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
    """rotary_embedding (query and key inside qkv, in place), write_kv and attend in one call."""
    check_rows(qkv, "qkv", 2)
    check_ints(positions, "positions", torch.int64, 1)
    check_ints(slot_mapping, "slot_mapping", torch.int64, 1)
    struct = _kv_struct(kv_cache, head_dim)
    num_tokens, width = qkv.shape
    num_heads, rest = divmod(width - 2 * struct.num_kv_heads * head_dim, head_dim)
    if rest or num_heads <= 0:
        raise ValueError(f"qkv of {width} numbers a token does not fit {struct.num_kv_heads} KV heads of {head_dim}")
    if not num_tokens == rows.num_tokens == positions.shape[0] == slot_mapping.shape[0]:
        raise ValueError(
            f"qkv has {num_tokens} tokens, the rows {rows.num_tokens}, positions {positions.shape[0]}, "
            f"slot_mapping {slot_mapping.shape[0]}"
        )
    max_position, rotary_dim = _cos_sin(cos_sin)
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=torch.float32)
    native.call(
        "ps_rotary_attention", out.data_ptr(), num_heads * head_dim, qkv.data_ptr(), qkv.stride(0), num_heads,
        positions.data_ptr(), cos_sin.data_ptr(), max_position, rotary_dim, slot_mapping.data_ptr(), struct,
        rows.struct.address, scale, sliding_window or 0, soft_cap or 0.0,
    )  # fmt: skip
    return out


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
) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
    rows = AttentionRows(query_start_loc, seq_lens, block_tables, query.shape[0])
    return attend(query, kv_cache, rows, scale, sliding_window, soft_cap, out)


def apply_token_bitmask(
    logits: torch.Tensor,  # [num_rows, vocab_size]
    rows: torch.Tensor,  # int64 [num_masked]
    masks: torch.Tensor,  # int32 [num_masked, num_words]
) -> None:
    check_rows(logits, "logits", 2)
    check_ints(rows, "rows", torch.int64, 1)
    check_ints(masks, "masks", torch.int32, 2)
    num_rows, vocab_size = logits.shape
    if masks.shape[0] != rows.shape[0] or masks.shape[1] * 32 < vocab_size:
        needed = -(-vocab_size // 32)
        raise ValueError(f"masks must be [{rows.shape[0]}, at least {needed}], it is {tuple(masks.shape)}")
    native.call(
        "ps_token_bitmask", logits.data_ptr(), logits.stride(0), num_rows, vocab_size, rows.data_ptr(),
        masks.data_ptr(), masks.stride(0), len(rows),
    )  # fmt: skip


def swap_blocks(src_pool: torch.Tensor, dst_pool: torch.Tensor, pairs: torch.Tensor) -> None:
    check_ints(pairs, "pairs", torch.int64, 2)
    check_shape(pairs.shape[1:], (2,), "pairs' last dimension")
    if src_pool.dtype is not dst_pool.dtype or src_pool.shape[1:] != dst_pool.shape[1:]:
        raise ValueError("the two pools must hold blocks of one dtype and shape")
    for pool in (src_pool, dst_pool):
        if not pool.is_cpu or not pool.is_contiguous():
            raise ValueError("a pool must be contiguous and on the CPU")
    if pairs.numel() == 0:
        return
    block_bytes = src_pool.stride(0) * src_pool.element_size()
    native.call(
        "ps_copy_blocks", dst_pool.data_ptr(), dst_pool.shape[0], src_pool.data_ptr(), src_pool.shape[0],
        block_bytes, pairs.contiguous().data_ptr(), pairs.shape[0],
    )  # fmt: skip


def linear(
    x: torch.Tensor,  # [num_tokens, in_features]
    weight: native.PackedMatrix,
    bias: torch.Tensor | None,  # [out_features]
    residual: torch.Tensor | None,  # [num_tokens, out_features]
    out: torch.Tensor | None,
) -> torch.Tensor:
    check_rows(x, "x", 2)
    num_tokens = x.shape[0]
    check_shape(x.shape[1:], (weight.in_features,), "x's last dimension")
    shape = (num_tokens, weight.out_features)
    if out is None:
        out = torch.empty(shape, dtype=torch.float32)
    check_rows(out, "out", 2)
    check_shape(out.shape, shape, "out")
    if bias is not None:
        check_rows(bias, "bias", 1)
        check_shape(bias.shape, shape[1:], "bias")
    if residual is not None:
        check_rows(residual, "residual", 2)
        check_shape(residual.shape, shape, "residual")
    native.call(
        "ps_linear", out.data_ptr(), out.stride(0), x.data_ptr(), x.stride(0), num_tokens, weight.address,
        None if bias is None else bias.data_ptr(), None if residual is None else residual.data_ptr(),
        0 if residual is None else residual.stride(0),
    )  # fmt: skip
    return out


def linear_rows(weight: native.PackedMatrix, row_ids: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    check_ints(row_ids, "row_ids", torch.int64, 1)
    shape = (row_ids.shape[0], weight.in_features)
    if out is None:
        out = torch.empty(shape, dtype=torch.float32)
    check_rows(out, "out", 2)
    check_shape(out.shape, shape, "out")
    native.call("ps_linear_rows", out.data_ptr(), out.stride(0), weight.address, row_ids.data_ptr(), row_ids.shape[0])
    return out


def route(logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    check_rows(logits, "logits", 2)
    num_tokens, num_experts = logits.shape
    weights = torch.empty((num_tokens, top_k), dtype=torch.float32)
    chosen = torch.empty((num_tokens, top_k), dtype=torch.int64)
    native.call(
        "ps_route", weights.data_ptr(), chosen.data_ptr(), logits.data_ptr(), logits.stride(0), num_tokens, num_experts,
        top_k, int(renormalize),
    )  # fmt: skip
    return weights, chosen


def experts(
    x: torch.Tensor,  # [num_tokens, hidden]
    weights: torch.Tensor,  # [num_tokens, top_k]
    chosen: torch.Tensor,  # int64 [num_tokens, top_k]
    gate_up: native.PackedExperts,  # [num_experts, 2 * expert_size, hidden], gate and up apart
    down: native.PackedExperts,  # [num_experts, hidden, expert_size]
    kind: str,
    out: torch.Tensor | None,
) -> torch.Tensor:
    check_rows(x, "x", 2)
    check_rows(weights, "weights", 2)
    check_ints(chosen, "chosen", torch.int64, 2)
    num_experts, hidden_size, expert_size = down.shape
    check_shape(gate_up.shape, (num_experts, 2 * expert_size, hidden_size), "gate_up")
    check_shape(tuple(gate_up.part_sizes), (expert_size, expert_size), "a gate and up")
    check_shape(tuple(down.part_sizes), (hidden_size,), "a down")
    check_shape(x.shape[1:], (hidden_size,), "x's last dimension")
    check_shape(chosen.shape[:1], (x.shape[0],), "chosen's first dimension")
    check_shape(weights.shape, tuple(chosen.shape), "weights")
    if not (weights.is_contiguous() and chosen.is_contiguous()):
        raise ValueError("weights and chosen must be contiguous")
    if out is None:
        out = torch.empty(x.shape, dtype=torch.float32)
    check_rows(out, "out", 2)
    check_shape(out.shape, tuple(x.shape), "out")
    native.call(
        "ps_experts_sum", out.data_ptr(), out.stride(0), x.data_ptr(), x.stride(0), x.shape[0], weights.data_ptr(),
        chosen.data_ptr(), chosen.shape[1], gate_up.address, down.address, num_experts, _ACTIVATIONS[kind],
    )  # fmt: skip
    return out


def ggml_rows(table: np.ndarray, ggml_type: int, in_features: int, row_ids: torch.Tensor) -> torch.Tensor:
    """Rows of a GGUF tensor as it lies in the file, uint8 [num_table_rows, row_bytes]: fp32 [num_rows, in_features]."""
    check_ints(row_ids, "row_ids", torch.int64, 1)
    if table.dtype != np.uint8 or table.ndim != 2 or table.strides[1] != 1:
        raise ValueError(f"table must be uint8 [num_rows, row_bytes], it is {table.dtype} {table.shape}")
    out = torch.empty((row_ids.shape[0], in_features), dtype=torch.float32)
    native.call(
        "ps_ggml_rows", out.data_ptr(), in_features, table.ctypes.data, table.strides[0], table.shape[0], in_features,
        ggml_type, row_ids.data_ptr(), row_ids.shape[0],
    )  # fmt: skip
    return out


def sample(
    logits: torch.Tensor,  # [num_rows, vocab_size]
    temperature: torch.Tensor,  # [num_rows]
    min_p: torch.Tensor,  # [num_rows]
    top_k: torch.Tensor,  # int64 [num_rows]
    top_p: torch.Tensor,  # float64 [num_rows]
    uniform: torch.Tensor,  # float64 [num_rows]
) -> torch.Tensor:  # int64 [num_rows]
    check_rows(logits, "logits", 2)
    num_rows, vocab_size = logits.shape
    for tensor, name, dtype in (
        (temperature, "temperature", torch.float32),
        (min_p, "min_p", torch.float32),
        (top_k, "top_k", torch.int64),
        (top_p, "top_p", torch.float64),
        (uniform, "uniform", torch.float64),
    ):
        check_ints(tensor, name, dtype, 1)
        check_shape(tensor.shape, (num_rows,), name)
    token_ids = torch.empty(num_rows, dtype=torch.int64)
    native.call(
        "ps_sample", logits.data_ptr(), logits.stride(0), num_rows, vocab_size, temperature.data_ptr(),
        min_p.data_ptr(), top_k.data_ptr(), top_p.data_ptr(), uniform.data_ptr(), token_ids.data_ptr(),
    )  # fmt: skip
    return token_ids
