"""What each op means, in plain torch: any device, any float dtype. Other implementations are checked against it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pagedserve.kernels import reference_logits, reference_sampling
from pagedserve.kernels.grouped import GroupedMatrix

sample = reference_sampling.sample
usable = reference_sampling.usable
best_logits = reference_logits.best_logits
logprobs = reference_logits.logprobs
apply_penalties = reference_logits.apply_penalties


def rms_norm(
    x: torch.Tensor,  # [..., dim]
    weight: torch.Tensor,  # [dim]
    eps: float,
    residual: torch.Tensor | None,  # like x
    out: torch.Tensor | None,
) -> torch.Tensor:
    if residual is not None:
        residual += x
        x = residual
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return _into(out, (normed * weight.float()).to(x.dtype))


def layer_norm(
    x: torch.Tensor,  # [..., dim]
    weight: torch.Tensor,  # [dim]
    bias: torch.Tensor | None,  # [dim]
    eps: float,
    residual: torch.Tensor | None,  # like x
    out: torch.Tensor | None,
) -> torch.Tensor:
    if residual is not None:
        residual += x
        x = residual
    return _into(out, F.layer_norm(x, weight.shape, weight, bias, eps))


def rotary_embedding(
    positions: torch.Tensor,  # int64 [num_tokens]
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    key: torch.Tensor | None,  # [num_tokens, num_kv_heads, head_dim]
    cos_sin: torch.Tensor,  # [max_position, rotary_dim]
) -> None:
    half = cos_sin.shape[1] // 2
    cos, sin = cos_sin[positions].float().unsqueeze(1).split(half, dim=-1)  # [num_tokens, 1, half]
    for heads in (query,) if key is None else (query, key):
        first, second = heads[..., :half].float(), heads[..., half : 2 * half].float()
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        heads[..., : 2 * half] = rotated.to(heads.dtype)


def gated_activation(kind: str, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return _into(out, activation(kind, gate, None) * up)


def activation(kind: str, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    match kind:
        case "silu":
            activated = F.silu(x)
        case "gelu_tanh":
            activated = F.gelu(x, approximate="tanh")
        case "gelu_erf":
            activated = F.gelu(x)
        case "relu":
            activated = F.relu(x)
        case _:
            raise ValueError(f"unknown activation {kind!r}")
    return _into(out, activated)


def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x.mul_(factor)


def soft_cap(x: torch.Tensor, cap: float) -> torch.Tensor:
    return x.div_(cap).tanh_().mul_(cap)


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.add_(y)


def route(logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    wide = logits.float()
    # By logits: two shares may be one number where their logits are not. NaN comes first.
    experts = wide.sort(dim=-1, descending=True, stable=True).indices[:, :top_k].contiguous()
    weights = torch.softmax(wide, dim=-1).gather(1, experts)
    return weights / weights.sum(-1, keepdim=True) if renormalize else weights, experts


def experts(
    x: torch.Tensor,  # [num_tokens, hidden]
    weights: torch.Tensor,  # float32 [num_tokens, top_k]
    chosen: torch.Tensor,  # int64 [num_tokens, top_k]
    gate_up: torch.Tensor,  # [num_experts, 2 * expert_size, hidden]
    down: torch.Tensor,  # [num_experts, hidden, expert_size]
    kind: str,
    out: torch.Tensor | None,
) -> torch.Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    found = x.new_zeros((*chosen.shape, x.shape[1]), dtype=wide)
    for expert in chosen.unique().tolist():
        tokens, ranks = (chosen == expert).nonzero(as_tuple=True)
        hidden = gated_activation(kind, F.linear(x[tokens], gate_up[expert].to(x.dtype)), None)
        found[tokens, ranks] = F.linear(hidden, down[expert].to(x.dtype)).to(wide)
    total = torch.zeros_like(found[:, 0])
    for rank in range(chosen.shape[1]):
        total += weights[:, rank, None] * found[:, rank]
    return _into(out, total.to(x.dtype))


def embedding(table: torch.Tensor, row_ids: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    return _into(out, table.index_select(0, row_ids))


SCALE_BYTES = 4  # of a token's fp32 scale in an 8-bit cache
LARGEST_CODES = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # 8-bit cache dtypes: what a head's largest becomes


def kv_token_size(head_dim: int, kv_dtype: torch.dtype) -> int:
    """Elements that one token's K (or V) takes in one head's part of a block: an 8-bit cache keeps a scale with it."""
    return head_dim + SCALE_BYTES if kv_dtype in LARGEST_CODES else head_dim


def split_kv(kv_cache: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as views [num_blocks, num_kv_heads, block_size, head_dim] of a layer's cache in either layout; of an
    8-bit cache they are the codes.

    [num_blocks, 2, num_kv_heads, runs, run_size] are tokens after each other: a run holds its tokens' codes, then, with
    8 bits, their scales. The reference has runs of one token, GPUs one run of the whole block when there are scales.
    [num_blocks, 2, num_kv_heads, block_size * token_size] has K transposed within a block, as csrc wants it.
    """
    token_size = kv_token_size(head_dim, kv_cache.dtype)
    if kv_cache.dim() == 5:
        run = kv_cache.shape[-1] // token_size
        codes = kv_cache[..., : run * head_dim].unflatten(-1, (run, head_dim))
        return _join_runs(codes[:, 0]), _join_runs(codes[:, 1])
    block_size = kv_cache.shape[-1] // token_size
    codes = kv_cache[..., : block_size * head_dim]
    keys = codes[:, 0].unflatten(-1, (head_dim, block_size)).transpose(-1, -2)
    return keys, codes[:, 1].unflatten(-1, (block_size, head_dim))


def split_kv_scales(kv_cache: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales of an 8-bit cache's K and V, as views of their bytes: [num_blocks, num_kv_heads, block_size, 4].

    They follow the codes of a run in the first layout of `split_kv`, and all codes of a head in the second."""
    token_size = kv_token_size(head_dim, kv_cache.dtype)
    count = kv_cache.shape[-1] // token_size
    scales = kv_cache[..., count * head_dim :].unflatten(-1, (count, SCALE_BYTES))
    if kv_cache.dim() == 5:
        return _join_runs(scales[:, 0]), _join_runs(scales[:, 1])
    return scales[:, 0], scales[:, 1]


def _join_runs(x: torch.Tensor) -> torch.Tensor:
    """[num_blocks, num_kv_heads, runs, run, n] as a view without runs: either there is one, or each has one token."""
    return x.squeeze(2) if x.shape[2] == 1 else x.squeeze(3)


def quantize_kv(x: torch.Tensor, kv_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes like x [..., head_dim] and fp32 scales [..., 1]: the largest magnitude becomes the largest code.

    A head that holds inf or NaN gets the scale NaN; one whose numbers are all below 1e-33 becomes 0.
    """
    limit = x.float().abs().amax(-1, keepdim=True)
    # A tensor: `number / tensor` is a product with a rounded reciprocal.
    largest = torch.full_like(limit, LARGEST_CODES[kv_dtype])
    codes = torch.where(limit > 1e-33, x * (largest / limit), 0.0)
    scales = torch.where(limit > 1e-33, limit / largest, 0.0)
    finite = x.isfinite().all(-1, keepdim=True)
    codes = codes.masked_fill(~finite, 0)
    codes = codes.round().to(kv_dtype) if kv_dtype is torch.int8 else codes.to(kv_dtype)
    return codes, scales.masked_fill(~finite, torch.nan)


def apply_token_bitmask(
    logits: torch.Tensor,  # [num_rows, vocab_size]
    rows: torch.Tensor,  # int64 [num_masked]
    masks: torch.Tensor,  # int32 [num_masked, num_words]
) -> None:
    # Through bytes: the shifted bits of a whole vocabulary as words would take four times the memory.
    shifts = torch.arange(8, dtype=torch.uint8, device=masks.device)
    bits = (masks.contiguous().view(torch.uint8).unsqueeze(-1) >> shifts) & 1  # [num_masked, num_words * 4, 8]
    forbidden = bits.view(len(rows), -1)[:, : logits.shape[1]] == 0
    logits[rows] = logits[rows].masked_fill(forbidden, -torch.inf)


def write_kv(
    key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    value: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    kv_cache: torch.Tensor,  # one layer, either layout of split_kv
    slot_mapping: torch.Tensor,  # int64 [num_tokens]
) -> None:
    keys, values = split_kv(kv_cache, key.shape[-1])
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    blocks, offsets = slots // keys.shape[2], slots % keys.shape[2]
    if kv_cache.dtype not in LARGEST_CODES:
        if kv_cache.dtype is torch.float16:  # held within its range: an infinity would make all later answers NaN
            largest = torch.finfo(torch.float16).max
            key, value = key.float().clamp(-largest, largest), value.float().clamp(-largest, largest)
        keys[blocks, :, offsets] = key[kept].to(keys.dtype)
        values[blocks, :, offsets] = value[kept].to(values.dtype)
        return
    for x, codes, scales in zip((key, value), (keys, values), split_kv_scales(kv_cache, key.shape[-1]), strict=True):
        quantized, scale = quantize_kv(x[kept], kv_cache.dtype)
        # As bytes: fp8 tensors take no indexed writes.
        codes.view(torch.uint8)[blocks, :, offsets] = quantized.view(torch.uint8)
        scales.view(torch.uint8)[blocks, :, offsets] = scale.contiguous().view(torch.uint8)


def paged_attention(
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    kv_cache: torch.Tensor,  # one layer, either layout of split_kv
    query_start_loc: torch.Tensor,  # int32 [num_seqs + 1]
    seq_lens: torch.Tensor,  # int32 [num_seqs]
    block_tables: torch.Tensor,  # int32 [num_seqs, max_blocks_per_seq]
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    head_dim = query.shape[-1]
    keys, values = split_kv(kv_cache, head_dim)
    key_scales, value_scales = split_kv_scales(kv_cache, head_dim) if kv_cache.dtype in LARGEST_CODES else (None, None)
    out = torch.empty_like(query, memory_format=torch.contiguous_format) if out is None else out
    starts = query_start_loc.tolist()
    for row, seq_len in enumerate(seq_lens.tolist()):
        start, end = starts[row], starts[row + 1]
        if start == end:
            continue
        first_position = seq_len - (end - start)
        # Blocks behind the window may be gone: only what some query sees is read.
        seen = 0 if sliding_window is None else max(0, first_position + 1 - sliding_window)
        positions = torch.arange(seen, seq_len, device=query.device)
        k = _gather(keys, key_scales, block_tables[row], positions)  # [num_kv_heads, context, head_dim]
        v = _gather(values, value_scales, block_tables[row], positions)
        q = query[start:end].float().transpose(0, 1)  # [num_heads, query_len, head_dim]
        group = q.shape[0] // k.shape[0]
        scores = (q * scale) @ k.repeat_interleave(group, 0).transpose(1, 2)
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        distance = torch.arange(first_position, seq_len, device=query.device)[:, None] - positions
        visible = distance >= 0
        if sliding_window is not None:
            visible &= distance < sliding_window
        weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1)
        attended = weights @ v.repeat_interleave(group, 0)
        out[start:end] = attended.transpose(0, 1).to(out.dtype)
    return out


def _gather(
    blocks: torch.Tensor, scales: torch.Tensor | None, table: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    block_size = blocks.shape[2]
    block_ids, offsets = table[positions // block_size].long(), positions % block_size
    if blocks.element_size() == 1:  # as bytes: fp8 tensors take no indices
        found = blocks.view(torch.uint8)[block_ids, :, offsets].view(blocks.dtype).float()
    else:
        found = blocks[block_ids, :, offsets].float()
    if scales is not None:
        found = found * scales[block_ids, :, offsets].contiguous().view(torch.float32)
    return found.transpose(0, 1)  # [num_kv_heads, context, head_dim]


def swap_blocks(src_pool: torch.Tensor, dst_pool: torch.Tensor, pairs: torch.Tensor) -> None:
    for src, dst in pairs.tolist():
        dst_pool[dst].copy_(src_pool[src], non_blocking=True)


def _into(out: torch.Tensor | None, result: torch.Tensor) -> torch.Tensor:
    return result if out is None else out.copy_(result)


def linear(
    x: torch.Tensor,  # [num_tokens, in_features]
    weight: torch.Tensor | GroupedMatrix,  # [out_features, in_features]
    bias: torch.Tensor | None,  # [out_features]
    residual: torch.Tensor | None,  # [num_tokens, out_features]
    out: torch.Tensor | None,
) -> torch.Tensor:
    """The float formats of packed weights; the integer ones pass x through `round_activations` first."""
    weight = weight.dequantize(x.dtype) if isinstance(weight, GroupedMatrix) else weight
    y = F.linear(x, weight, bias)
    return _into(out, y if residual is None else y + residual)


LARGEST_ACTIVATION_CODES = {8: 256 * 127, 4: 16 * 127 + 7}  # beside weights of so many bits


def round_activations(x: torch.Tensor, weight_bits: int, group: int = 32) -> torch.Tensor:
    """x as the integer formats see it: per row and group of inputs, 256 * high + low in 32512ths of the largest
    magnitude (beside 4-bit weights in 2039ths), both codes within -127 .. 127.

    Groups that hold inf or NaN become NaN; those whose numbers are all below 1e-33 become 0.
    """
    groups = x.float().unflatten(-1, (-1, group))
    limit = groups.abs().amax(-1, keepdim=True)
    largest = torch.full_like(
        limit, LARGEST_ACTIVATION_CODES[weight_bits]
    )  # a tensor: `number / tensor` is a product with a rounded reciprocal
    steps = torch.where(limit > 1e-33, groups * (largest / limit), 0.0).round()
    high = ((steps + 128) / 256).floor()
    rounded = (256 * high + (steps - 256 * high).clamp(min=-127)) * (limit / largest)
    return rounded.masked_fill(~groups.isfinite().all(-1, keepdim=True), torch.nan).flatten(-2).to(x.dtype)


def linear_rows(weight: torch.Tensor | GroupedMatrix, row_ids: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    return _into(out, weight.dequantize(rows=row_ids) if isinstance(weight, GroupedMatrix) else weight[row_ids])
