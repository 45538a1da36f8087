"""The ops on a GPU, and on CPU tensors where Triton interprets its kernels: names and meaning are those of `reference`.

Nothing here waits for the device. Imported by `ops` when the first such tensor is met.
"""

from __future__ import annotations

from types import ModuleType

import torch
import torch.nn.functional as F

from pagedserve.kernels import reference
from pagedserve.kernels.grouped import GroupedMatrix
from pagedserve.kernels.triton import attention as attention_kernels
from pagedserve.kernels.triton import elementwise as elementwise_kernels
from pagedserve.kernels.triton import embedding as embedding_kernels
from pagedserve.kernels.triton import experts as experts_kernels
from pagedserve.kernels.triton import kv_cache as kv_kernels
from pagedserve.kernels.triton import linear as linear_kernels
from pagedserve.kernels.triton import logits as logits_kernels
from pagedserve.kernels.triton import logprobs as logprobs_kernels
from pagedserve.kernels.triton import moe as moe_kernels
from pagedserve.kernels.triton import norm as norm_kernels
from pagedserve.kernels.triton import rotary as rotary_kernels
from pagedserve.kernels.triton import sampling as sampling_kernels

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _rows(tensor: torch.Tensor, name: str, *num_dims: int) -> torch.Tensor:
    """A float tensor whose last dimension is contiguous."""
    if tensor.dtype not in _FLOATS:
        raise TypeError(f"{name} must be fp32, bf16 or fp16, it is {tensor.dtype}")
    if tensor.dim() not in num_dims or (tensor.stride(-1) != 1 and tensor.shape[-1] > 1):
        raise ValueError(
            f"{name} must have {' or '.join(map(str, num_dims))} dimensions and contiguous rows, "
            f"it is {tuple(tensor.shape)} with strides {tensor.stride()}"
        )
    return tensor


def _same(found: torch.Tensor, shape: tuple[int, ...], name: str) -> None:
    if found.shape != shape:
        raise ValueError(f"{name} has shape {tuple(found.shape)}, it must be {tuple(shape)}")


def rms_norm(
    x: torch.Tensor,  # [num_tokens, dim] or [num_tokens, num_heads, dim]
    weight: torch.Tensor,  # [dim]
    eps: float,
    residual: torch.Tensor | None,  # [num_tokens, dim]
    out: torch.Tensor | None,
) -> torch.Tensor:
    _rows(x, "x", 2, 3)
    _same(_rows(weight, "weight", 1), x.shape[-1:], "weight")
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _same(_rows(out, "out", x.dim()), x.shape, "out")
    if residual is not None:
        _same(_rows(residual, "residual", 2), x.shape, "residual")
    norm_kernels.rms_norm(x, weight, eps, residual, out).run()
    return out


def layer_norm(
    x: torch.Tensor,  # [num_tokens, dim]
    weight: torch.Tensor,  # [dim]
    bias: torch.Tensor | None,  # [dim]
    eps: float,
    residual: torch.Tensor | None,  # [num_tokens, dim]
    out: torch.Tensor | None,
) -> torch.Tensor:
    _rows(x, "x", 2)
    _same(_rows(weight, "weight", 1), x.shape[-1:], "weight")
    if bias is not None:
        _same(_rows(bias, "bias", 1), x.shape[-1:], "bias")
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _same(_rows(out, "out", 2), x.shape, "out")
    if residual is not None:
        _same(_rows(residual, "residual", 2), x.shape, "residual")
    norm_kernels.layer_norm(x, weight, bias, eps, residual, out).run()
    return out


def rotary_embedding(
    positions: torch.Tensor,  # int64 [num_tokens]
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    key: torch.Tensor | None,  # [num_tokens, num_kv_heads, head_dim]
    cos_sin: torch.Tensor,  # [max_position, rotary_dim]
) -> None:
    _rows(query, "query", 3)
    _same(positions, query.shape[:1], "positions")
    if not cos_sin.is_contiguous() or cos_sin.shape[1] > query.shape[2]:
        raise ValueError(f"cos_sin must be contiguous [max_position, at most {query.shape[2]}]: {tuple(cos_sin.shape)}")
    if key is not None:
        _same(_rows(key, "key", 3)[:, 0], (query.shape[0], query.shape[2]), "a head of key")
    rotary_kernels.rotary_embedding(positions, query, key, cos_sin).run()


def gated_activation(kind: str, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    _rows(x, "x", 2)
    if x.shape[1] % 2:
        raise ValueError(f"x must be [num_tokens, 2 * dim], its shape is {tuple(x.shape)}")
    shape = (x.shape[0], x.shape[1] // 2)
    if out is None:
        out = torch.empty(shape, dtype=x.dtype, device=x.device)
    _same(_rows(out, "out", 2), shape, "out")
    elementwise_kernels.gated_activation(kind, x, out).run()
    return out


def activation(kind: str, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    _rows(x, "x", 2)
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _same(_rows(out, "out", 2), x.shape, "out")
    elementwise_kernels.elementwise(kind, x, out).run()
    return out


def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    elementwise_kernels.elementwise("scale", _rows(x, "x", 2), x, factor=factor).run()
    return x


def soft_cap(x: torch.Tensor, cap: float) -> torch.Tensor:
    elementwise_kernels.elementwise("soft_cap", _rows(x, "x", 2), x, factor=cap).run()
    return x


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    _same(_rows(y, "y", 2), x.shape, "y")
    elementwise_kernels.elementwise("add", _rows(x, "x", 2), x, y=y).run()
    return x


def route(logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    _rows(logits, "logits", 2)
    weights = torch.empty(len(logits), top_k, dtype=torch.float32, device=logits.device)
    experts = torch.empty(len(logits), top_k, dtype=torch.int64, device=logits.device)
    moe_kernels.route(weights, experts, logits, renormalize).run()
    return weights, experts


def experts(
    x: torch.Tensor,  # [num_tokens, hidden]
    weights: torch.Tensor,  # float32 [num_tokens, top_k]
    chosen: torch.Tensor,  # int64 [num_tokens, top_k]
    gate_up: torch.Tensor,  # [num_experts, 2 * expert_size, hidden]
    down: torch.Tensor,  # [num_experts, hidden, expert_size]
    kind: str,
    out: torch.Tensor | None,
) -> torch.Tensor:
    _rows(x, "x", 2)
    num_experts, hidden_size, size = down.shape
    _same(gate_up, (num_experts, 2 * size, hidden_size), "gate_up")
    _same(x, (len(x), hidden_size), "x")
    _same(weights, chosen.shape, "weights")
    if not (gate_up.is_contiguous() and down.is_contiguous() and weights.is_contiguous()):
        raise ValueError("weights of experts and of the router must be contiguous")
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _same(_rows(out, "out", 2), x.shape, "out")
    experts_kernels.experts(out, x, weights, chosen, gate_up, down, kind)
    return out


def embedding(table: torch.Tensor, row_ids: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Ids outside the table give rows of NaN: finding them out would take a wait for the device."""
    _rows(table, "table", 2)
    _same(_rows(out, "out", 2), (*row_ids.shape, table.shape[1]), "out")
    embedding_kernels.embedding(table, row_ids, out).run()
    return out


def apply_token_bitmask(
    logits: torch.Tensor,  # [num_rows, vocab_size]
    rows: torch.Tensor,  # int64 [num_masked]
    masks: torch.Tensor,  # int32 [num_masked, num_words]
) -> None:
    _rows(logits, "logits", 2)
    if masks.shape[0] != rows.shape[0] or masks.shape[1] * 32 < logits.shape[1] or masks.stride(1) != 1:
        needed = -(-logits.shape[1] // 32)
        raise ValueError(f"masks must be [{rows.shape[0]}, at least {needed}], it is {tuple(masks.shape)}")
    logits_kernels.apply_token_bitmask(logits, rows, masks).run()


def apply_penalties(
    logits: torch.Tensor,  # float32 [num_rows, vocab_size]
    rows: torch.Tensor,  # int64 [n]
    token_ids: torch.Tensor,  # int32 [num_slots, capacity]
    slots: torch.Tensor,  # int64 [n]
    prompt_lens: torch.Tensor,  # int64 [n]
    lengths: torch.Tensor,  # int64 [n]
    repetition: torch.Tensor,  # float32 [n]
    presence: torch.Tensor,  # float32 [n]
    frequency: torch.Tensor,  # float32 [n]
) -> None:
    _rows(logits, "logits", 2)
    for column, name in (
        (slots, "slots"), (prompt_lens, "prompt_lens"), (lengths, "lengths"),
        (repetition, "repetition"), (presence, "presence"), (frequency, "frequency"),
    ):  # fmt: skip
        _same(column, rows.shape, name)
    logits_kernels.apply_penalties(
        logits, rows, token_ids, slots, prompt_lens, lengths, repetition, presence, frequency
    ).run()


def best_logits(logits: torch.Tensor) -> torch.Tensor:
    return sampling_kernels.best_logits(_rows(logits, "logits", 2))


def logprobs(
    logits: torch.Tensor,  # float32 [num_rows, vocab_size]
    token_ids: torch.Tensor,  # int64 [num_rows]
    num_top: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    _rows(logits, "logits", 2)
    _same(token_ids, logits.shape[:1], "token_ids")
    num_rows, device = len(logits), logits.device
    chosen = torch.empty(num_rows, dtype=torch.float32, device=device)
    ranks = torch.empty(num_rows, dtype=torch.int64, device=device)
    top_values = torch.empty(num_rows, num_top, dtype=torch.float32, device=device)
    top_ids = torch.empty(num_rows, num_top, dtype=torch.int64, device=device)
    top = (top_values, top_ids) if num_top else (None, None)
    for launch in logprobs_kernels.logprobs(chosen, ranks, *top, logits, token_ids):
        launch.run()
    return chosen, ranks, top_values, top_ids


def linear(
    x: torch.Tensor,  # [num_tokens, in_features]
    weight: torch.Tensor | GroupedMatrix,  # [out_features, in_features]
    bias: torch.Tensor | None,  # [out_features]
    residual: torch.Tensor | None,  # [num_tokens, out_features]
    out: torch.Tensor | None,
) -> torch.Tensor:
    """cuBLAS, where a residual alone is added within the product; codes, at few rows, are multiplied as they are."""
    if isinstance(weight, GroupedMatrix):
        if len(x) <= linear_kernels.MAX_ROWS:
            if out is None:
                out = torch.empty(len(x), weight.shape[0], dtype=x.dtype, device=x.device)
            _same(_rows(x, "x", 2), (len(x), weight.shape[1]), "x")
            _same(_rows(out, "out", 2), (len(x), weight.shape[0]), "out")
            linear_kernels.grouped_linear(out, x, weight, bias, residual).run()
            return out
        weight = _dequantized(weight, None, x.dtype)
    if residual is None:
        y = F.linear(x, weight, bias)
        return y if out is None else out.copy_(y)
    if bias is not None:
        y = F.linear(x, weight, bias).add_(residual)
        return y if out is None else out.copy_(y)
    if out is residual:
        return residual.addmm_(x, weight.t())
    return torch.addmm(residual, x, weight.t(), out=out)


def linear_rows(weight: torch.Tensor | GroupedMatrix, row_ids: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    if isinstance(weight, GroupedMatrix):
        rows = _dequantized(weight, row_ids, torch.float32 if out is None else out.dtype)
        return rows if out is None else out.copy_(rows)
    if out is None:
        out = torch.empty(len(row_ids), weight.shape[1], dtype=weight.dtype, device=weight.device)
    return embedding(weight, row_ids, out)


def _dequantized(weight: GroupedMatrix, row_ids: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    num_rows = weight.shape[0] if row_ids is None else len(row_ids)
    out = torch.empty(num_rows, weight.shape[1], dtype=dtype, device=weight.codes.device)
    linear_kernels.dequantize(out, weight, row_ids).run()
    return out


def write_kv(
    key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    value: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    kv_cache: torch.Tensor,  # one layer, either layout of reference.split_kv
    slot_mapping: torch.Tensor,  # int64 [num_tokens]
) -> None:
    _of_layout(kv_cache, kv_kernels).write_kv(key, value, kv_cache, slot_mapping)


def paged_attention(
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    kv_cache: torch.Tensor,  # one layer, either layout of reference.split_kv
    query_start_loc: torch.Tensor,  # int32 [num_seqs + 1]
    seq_lens: torch.Tensor,  # int32 [num_seqs]
    block_tables: torch.Tensor,  # int32 [num_seqs, max_blocks_per_seq]
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    return _of_layout(kv_cache, attention_kernels).paged_attention(
        query, kv_cache, query_start_loc, seq_lens, block_tables, scale, sliding_window, soft_cap, out
    )


def _of_layout(kv_cache: torch.Tensor, kernels: ModuleType) -> ModuleType:
    # K transposed within a block is a CPU's layout: no kernel here reads it.
    return kernels if kv_cache.dim() == 5 else reference


def sample(
    logits: torch.Tensor,  # float32 [num_rows, vocab_size]
    temperature: torch.Tensor,  # float32 [num_rows]
    min_p: torch.Tensor,  # float32 [num_rows]
    top_k: torch.Tensor,  # int64 [num_rows]
    top_p: torch.Tensor,  # float64 [num_rows]
    uniform: torch.Tensor,  # float64 [num_rows]
) -> torch.Tensor:  # int64 [num_rows]
    _rows(logits, "logits", 2)
    for column, name, dtype in (
        (temperature, "temperature", torch.float32),
        (min_p, "min_p", torch.float32),
        (top_k, "top_k", torch.int64),
        (top_p, "top_p", torch.float64),
        (uniform, "uniform", torch.float64),
    ):
        _same(column, logits.shape[:1], name)
        if column.dtype is not dtype:
            raise TypeError(f"{name} must be {dtype}, it is {column.dtype}")
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    # log(0) is -inf, below which nothing lies.
    for launch in sampling_kernels.sample(tokens, logits, temperature, min_p.log(), top_k, top_p, uniform):
        launch.run()
    return tokens
