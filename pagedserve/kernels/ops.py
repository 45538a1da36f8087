"""The ops models and backends call: a typed function each, run by csrc or Triton where they can, else by the reference.

csrc takes fp32 activations on the CPU, `gpu` those of NVIDIA GPUs; everything else (other dtypes, other devices, no
native library) runs on `reference`, which is also each op's definition.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType

import torch

from pagedserve import envs
from pagedserve.kernels import cpu, cuda, native, native_cuda, reference
from pagedserve.kernels.grouped import GroupedMatrix

_GPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Triton's own switch, read once as Triton does: then CPU tensors take the way of a GPU's, and csrc is not loaded.
_INTERPRETED = envs.triton_interpreted()
# Within `meta_as_gpu`: tensors without storage take it too.
_META_AS_GPU = False


@contextmanager
def meta_as_gpu() -> Iterator[None]:
    """Within, "meta" tensors stand for a GPU's: to see what would be launched, see kernels/triton/variants.py."""
    global _META_AS_GPU
    _META_AS_GPU = True
    try:
        yield
    finally:
        _META_AS_GPU = False


def _takes_gpu_way(x: torch.Tensor | GroupedMatrix) -> bool:
    return x.is_cuda or _INTERPRETED or (_META_AS_GPU and x.is_meta)


def on_gpu(device: torch.device) -> bool:
    """Whether ops on this device's tensors run on a GPU's kernels, which reward other ways than a CPU's."""
    return device.type == "cuda" or _INTERPRETED


@cache
def _gpu() -> ModuleType:
    # Imported late: Triton takes a second to load, and a CPU server needs none of it.
    from pagedserve.kernels import gpu

    return gpu


def _implementation(x: torch.Tensor) -> ModuleType:
    if x.dtype is torch.float32 and x.is_cpu and native.available():
        return cpu
    return _gpu() if _takes_gpu_way(x) and x.dtype in _GPU_DTYPES else reference


def _dense_implementation(weight: torch.Tensor | GroupedMatrix) -> ModuleType:
    return _gpu() if _takes_gpu_way(weight) else reference


def _kv_implementation(x: torch.Tensor, kv_cache: torch.Tensor) -> ModuleType:
    implementation = _implementation(x)
    # Four dimensions: K lies transposed within a block, the layout that the native kernels read.
    return reference if implementation is cpu and kv_cache.dim() != 4 else implementation


def rms_norm(
    x: torch.Tensor,  # [num_tokens, dim] or [num_tokens, num_heads, dim]
    weight: torch.Tensor,  # [dim]
    eps: float,
    *,
    residual: torch.Tensor | None = None,  # [num_tokens, dim]
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv 1910.07467).

    With a residual: residual += x in place, and the sum is what gets normalized. `out` may be x.
    """
    return _implementation(x).rms_norm(x, weight, eps, residual, out)


def layer_norm(
    x: torch.Tensor,  # [num_tokens, dim]
    weight: torch.Tensor,  # [dim]
    bias: torch.Tensor | None,  # [dim]
    eps: float,
    *,
    residual: torch.Tensor | None = None,  # [num_tokens, dim]
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias over the last dimension (arXiv 1607.06450).

    With a residual: residual += x in place, and the sum is what gets normalized. `out` may be x or the residual.
    """
    return _implementation(x).layer_norm(x, weight, bias, eps, residual, out)


def rotary_embedding(
    positions: torch.Tensor,  # int64 [num_tokens]
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    key: torch.Tensor | None,  # [num_tokens, num_kv_heads, head_dim]
    cos_sin: torch.Tensor,  # [max_position, rotary_dim], cosines then sines, rotary_dim / 2 of each
) -> None:
    """Rotates query and key in place (arXiv 2104.09864), half against half within the first rotary_dim elements."""
    _implementation(query).rotary_embedding(positions, query, key, cos_sin)


def silu_mul(x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """silu(x[:, :dim]) * x[:, dim:]. x: [num_tokens, 2 * dim] -> [num_tokens, dim]."""
    return _implementation(x).gated_activation("silu", x, out)


def gelu_mul(x: torch.Tensor, *, approximate: str = "none", out: torch.Tensor | None = None) -> torch.Tensor:
    """gelu(x[:, :dim]) * x[:, dim:], exact or by tanh, as in torch. x: [num_tokens, 2 * dim] -> [num_tokens, dim]."""
    kind = {"none": "gelu_erf", "tanh": "gelu_tanh"}[approximate]
    return _implementation(x).gated_activation(kind, x, out)


def activation(kind: str, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Each number of x, [num_tokens, dim], through "silu", "gelu_erf", "gelu_tanh" or "relu". `out` may be x."""
    return _implementation(x).activation(kind, x, out)


def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    """x *= factor in place; returns x, [num_tokens, dim]."""
    return _implementation(x).scale(x, factor)


def soft_cap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """x = cap * tanh(x / cap) in place (arXiv 2408.00118, section 2); returns x, [num_tokens, dim]."""
    return _implementation(x).soft_cap(x, cap)


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x += y in place; returns x. Both [num_tokens, dim]."""
    return _implementation(x).add(x, y)


def route(
    logits: torch.Tensor,  # [num_tokens, num_experts]
    top_k: int,
    *,
    renormalize: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # float32 [num_tokens, top_k], int64 [num_tokens, top_k]
    """A token's best experts and their softmax weights over all experts, best first; renormalized to sum to 1.

    Of equal logits the first expert's comes first, and NaN before all numbers. With NaN or +inf among a token's logits,
    or nothing above -inf, its weights are NaN.
    """
    return _implementation(logits).route(logits, top_k, renormalize)


def experts(
    x: torch.Tensor,  # [num_tokens, hidden]
    weights: torch.Tensor,  # float32 [num_tokens, top_k]
    chosen: torch.Tensor,  # int64 [num_tokens, top_k], numbers of experts
    gate_up: torch.Tensor | native.PackedExperts,  # [num_experts, 2 * expert_size, hidden], the gate's rows first
    down: torch.Tensor | native.PackedExperts,  # [num_experts, hidden, expert_size]
    activation: str,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # [num_tokens, hidden]
    """Each token's sum of weight * down(act(gate(x)) * up(x)) over its experts (arXiv 1701.06538, 2401.04088).

    `activation` is "silu", "gelu_erf" or "gelu_tanh". Products are added in fp32 in the order of the token's choices,
    so that a token's result does not depend on its neighbours; with packed weights no bit of it does.
    """
    implementation = cpu if isinstance(gate_up, native.PackedExperts) else _dense_implementation(gate_up)
    return implementation.experts(x, weights, chosen, gate_up, down, activation, out)


def embedding(
    table: torch.Tensor,  # [num_rows, dim], any float dtype
    row_ids: torch.Tensor,  # int64 [num_tokens]
    dtype: torch.dtype,
) -> torch.Tensor:  # [num_tokens, dim] in `dtype`
    """Rows of a table, as new memory that the caller may write to."""
    if dtype is torch.float32 and table.is_cpu and table.dtype in native.DTYPES and native.available():
        return cpu.embedding(table, row_ids, None)
    if _takes_gpu_way(table) and table.dtype in _GPU_DTYPES and dtype in _GPU_DTYPES:
        return _gpu().embedding(table, row_ids, table.new_empty((*row_ids.shape, table.shape[1]), dtype=dtype))
    return reference.embedding(table, row_ids, None).to(dtype)


def write_kv(
    key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    value: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    kv_cache: torch.Tensor,  # one layer, in either layout of reference.split_kv
    slot_mapping: torch.Tensor,  # int64 [num_tokens]
) -> None:
    """Stores each token's key and value in its slot (block * block_size + offset); slot -1 is skipped."""
    _kv_implementation(key, kv_cache).write_kv(key, value, kv_cache, slot_mapping)


def paged_attention(
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    kv_cache: torch.Tensor,  # one layer, in either layout of reference.split_kv
    query_start_loc: torch.Tensor,  # int32 [num_seqs + 1]
    seq_lens: torch.Tensor,  # int32 [num_seqs]
    block_tables: torch.Tensor,  # int32 [num_seqs, max_blocks_per_seq]
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
    """Causal attention of each row's query tokens, the last of its seq_lens tokens, over the paged context."""
    implementation = _kv_implementation(query, kv_cache)
    return implementation.paged_attention(
        query, kv_cache, query_start_loc, seq_lens, block_tables, scale, sliding_window, soft_cap, out
    )


def apply_token_bitmask(
    logits: torch.Tensor,  # [num_rows, vocab_size]
    rows: torch.Tensor,  # int64 [num_masked], all different
    masks: torch.Tensor,  # int32 [num_masked, at least ceil(vocab_size / 32)]
) -> None:
    """logits[rows[i], t] = -inf, in place, for every token t whose bit (t % 32 of word t // 32) is 0 in masks[i].

    Logits are finite or -inf, as the sampler makes them.
    """
    _implementation(logits).apply_token_bitmask(logits, rows, masks)


def apply_penalties(
    logits: torch.Tensor,  # float32 [num_rows, vocab_size]
    rows: torch.Tensor,  # int64 [n], all different: the rows that are changed
    token_ids: torch.Tensor,  # int32 [num_slots, capacity]: prompts, each followed by its output
    slots: torch.Tensor,  # int64 [n]: where each row's tokens are
    prompt_lens: torch.Tensor,  # int64 [n]
    lengths: torch.Tensor,  # int64 [n], of prompt and output
    repetition: torch.Tensor,  # float32 [n]; 1: none
    presence: torch.Tensor,  # float32 [n]; 0: none
    frequency: torch.Tensor,  # float32 [n]; 0: none
) -> None:
    """Penalties over each row's own tokens, in place.

    First repetition, on tokens of prompt and output (Keskar et al. 2019; positive logits are divided, others
    multiplied), then presence and frequency, on tokens of the output (logit - frequency * count - presence). Ids
    outside the vocabulary count for nothing.
    """
    implementation = _implementation(logits)
    (reference if implementation is cpu else implementation).apply_penalties(
        logits, rows, token_ids, slots, prompt_lens, lengths, repetition, presence, frequency
    )


def best_logits(logits: torch.Tensor) -> torch.Tensor:
    """The largest logit of each row, [num_rows, vocab_size] -> [num_rows]: NaN counts as -inf, +inf as a huge number.

    -inf: there is nothing to choose from.
    """
    implementation = _implementation(logits)
    return (reference if implementation is cpu else implementation).best_logits(logits)


def logprobs(
    logits: torch.Tensor,  # float32 [num_rows, vocab_size]
    token_ids: torch.Tensor,  # int64 [num_rows]
    num_top: int,  # at most the vocabulary
) -> tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
]:  # float32 [num_rows], int64 [num_rows], float32 [num_rows, num_top], int64 [num_rows, num_top]
    """The log-softmax of one token a row, its rank (1 + how many tokens are likelier), and the `num_top` likeliest
    tokens as logprobs and ids, best first, equal ones by id.

    NaN counts as -inf and +inf as a huge number; NaN where a row has nothing above -inf.
    """
    implementation = _implementation(logits)
    return (reference if implementation is cpu else implementation).logprobs(logits, token_ids, num_top)


def copy_blocks(pool: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copies whole blocks within a pool, in order. pool: [num_blocks, ...]; pairs: int64 [n, 2] of (src, dst)."""
    if _blocks_implementation(pool, pool) is cuda:
        cuda.copy_blocks(pool, pairs)
    else:
        swap_blocks(pool, pool, pairs)


def swap_blocks(src_pool: torch.Tensor, dst_pool: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copies whole blocks from one pool to another, in order. pools: [num_blocks, ...]; pairs: int64 [n, 2]."""
    _blocks_implementation(src_pool, dst_pool).swap_blocks(src_pool, dst_pool, pairs)


def _blocks_implementation(src_pool: torch.Tensor, dst_pool: torch.Tensor) -> ModuleType:
    if src_pool.is_cpu and dst_pool.is_cpu:
        return cpu if native.available() else reference
    in_vectors = dst_pool.stride(0) * dst_pool.element_size() % 16 == 0
    return cuda if in_vectors and native_cuda.why_not() is None else reference


def linear(
    x: torch.Tensor,  # [num_tokens, in_features]
    weight: torch.Tensor | native.PackedMatrix | GroupedMatrix,  # [out_features, in_features]
    *,
    bias: torch.Tensor | None = None,  # [out_features]
    residual: torch.Tensor | None = None,  # [num_tokens, out_features]
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # [num_tokens, out_features]
    """x @ weight.T + bias + residual; `out` may be the residual. Packed weights take fp32 on the CPU.

    With packed weights a row's bits depend neither on the other rows nor on the number of threads.
    """
    implementation = cpu if isinstance(weight, native.PackedMatrix) else _dense_implementation(weight)
    return implementation.linear(x, weight, bias, residual, out)


def linear_rows(
    weight: torch.Tensor | native.PackedMatrix | GroupedMatrix,  # [out_features, in_features]
    row_ids: torch.Tensor,  # int64 [num_rows]
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # [num_rows, in_features]
    """Rows of a weight, dequantised: embedding lookup."""
    implementation = cpu if isinstance(weight, native.PackedMatrix) else _dense_implementation(weight)
    return implementation.linear_rows(weight, row_ids, out)


def sample(
    logits: torch.Tensor,  # float32 [num_rows, vocab_size]
    temperature: torch.Tensor,  # float32 [num_rows]; 0 takes the likeliest token, the first of equals
    min_p: torch.Tensor,  # float32 [num_rows]; 0: none
    top_k: torch.Tensor,  # int64 [num_rows]; 0: none
    top_p: torch.Tensor,  # float64 [num_rows]; 1 or more: none
    uniform: torch.Tensor,  # float64 [num_rows], in [0, 1)
) -> torch.Tensor:  # int64 [num_rows]
    """One token a row: temperature, min_p, top_k, top_p (of what is left), then the inverse CDF at `uniform`.

    NaN counts as -inf and +inf as a huge number; -1 where nothing is above -inf. A row's token depends on nothing but
    its own numbers.
    """
    return _implementation(logits).sample(logits, temperature, min_p, top_k, top_p, uniform)
