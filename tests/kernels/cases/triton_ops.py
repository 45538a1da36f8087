"""The small Triton kernels against their definitions in fp64: norms, rotation, activations, rows, masks, routing.

Outputs are poisoned with NaN, rows lie apart in wider tensors, sizes are odd.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from pagedserve.kernels import gpu, reference
from pagedserve.kernels.grouped import GroupedMatrix
from pagedserve.kernels.triton import linear as linear_kernels
from tests.kernels.cases import Case

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# One unit in the last place, twice where the interpreter truncates.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def randn(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """The same numbers on every device."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)


def apart(x: torch.Tensor, gap: int = 16) -> torch.Tensor:
    """x, its rows (of the first dimension) `gap` numbers apart in a wider tensor of NaN."""
    wide = torch.full((x.shape[0], x[0].numel() + gap), float("nan"), dtype=x.dtype, device=x.device)
    view = wide[:, : x[0].numel()].view(x.shape) if x.dim() == 2 else wide[:, : x[0].numel()].unflatten(1, x.shape[1:])
    return view.copy_(x)


def poisoned(x: torch.Tensor) -> torch.Tensor:
    return torch.full_like(x, float("nan"))


def assert_near(found: torch.Tensor, wanted: torch.Tensor, *, factor: float = 1.0) -> None:
    """Within the tolerance of found's dtype of fp64 numbers."""
    tolerance = TOLERANCE[found.dtype] * factor
    torch.testing.assert_close(found.double(), wanted, atol=tolerance, rtol=tolerance, equal_nan=True)


def rms_norm(rows: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
    x, weight = apart(randn(device, rows, dim, dtype=dtype) * 3), randn(device, dim, dtype=dtype)
    out = gpu.rms_norm(x, weight, 1e-5, None, poisoned(x))
    assert_near(out, reference.rms_norm(x.double(), weight.double(), 1e-5, None, None))
    residual = apart(randn(device, rows, dim, dtype=dtype, seed=1) * 5, gap=48)
    total = (x.float() + residual.float()).to(dtype)
    assert gpu.rms_norm(x, weight, 1e-6, residual, x) is x  # over its own input
    assert torch.equal(residual, total)
    assert_near(x, reference.rms_norm(total.double(), weight.double(), 1e-6, None, None))


def rms_norm_of_heads(rows: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
    qkv = randn(device, rows, heads + 4, dim, dtype=dtype)
    inside, weight, before = qkv[:, 2:-2], randn(device, dim, dtype=dtype), qkv.clone()
    wanted = reference.rms_norm(inside.double(), weight.double(), 1e-6, None, None)
    gpu.rms_norm(inside, weight, 1e-6, None, inside)
    assert_near(inside, wanted)
    assert torch.equal(qkv[:, :2], before[:, :2]) and torch.equal(qkv[:, -2:], before[:, -2:])


def layer_norm(rows: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
    x, weight, bias = (
        apart(randn(device, rows, dim, dtype=dtype) + 20), *(randn(device, dim, dtype=dtype, seed=s) for s in (1, 2))
    )  # fmt: skip
    for shift in (bias, None):
        out = gpu.layer_norm(x, weight, shift, 1e-5, None, poisoned(x))
        wide = None if shift is None else shift.double()
        assert_near(out, reference.layer_norm(x.double(), weight.double(), wide, 1e-5, None, None), factor=10)
    residual = randn(device, rows, dim, dtype=dtype, seed=3) * 5
    total = (x.float() + residual.float()).to(dtype)
    gpu.layer_norm(x, weight, bias, 1e-5, residual, residual)  # into the residual, which norm-after models do
    wanted = reference.layer_norm(total.double(), weight.double(), bias.double(), 1e-5, None, None)
    assert_near(residual, wanted, factor=10)


def norm_keeps_nan_in_its_row(device: torch.device) -> None:
    x, weight = randn(device, 5, 40), randn(device, 40)
    x[2, 3], x[4, 0] = float("nan"), float("inf")
    out = gpu.rms_norm(x, weight, 1e-5, None, None)
    assert out[2].isnan().all() and out[4].isnan().any() and not out[[0, 1, 3]].isnan().any()


def rotary(
    rows: int, heads: tuple[int, int], head_dim: int, rotary_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    qkv = randn(device, rows, heads[0] + 2 * heads[1], head_dim, dtype=dtype)
    query, key, value = qkv.split((heads[0], heads[1], heads[1]), dim=1)
    positions = torch.randint(0, 50, (rows,), generator=torch.Generator().manual_seed(1)).to(device)
    cos_sin, before = randn(device, 50, rotary_dim).clamp(-1, 1), qkv.double()
    reference.rotary_embedding(positions, before[:, : heads[0]], before[:, heads[0] : -heads[1]], cos_sin.double())
    kept = value.clone()
    gpu.rotary_embedding(positions, query, key, cos_sin)
    assert_near(qkv, before)
    assert torch.equal(value, kept)
    alone = query.clone()
    gpu.rotary_embedding(positions, alone, None, cos_sin)
    wanted = query.double()
    reference.rotary_embedding(positions, wanted, None, cos_sin.double())
    assert_near(alone, wanted)


def rotary_beyond_the_table(device: torch.device) -> None:
    query = randn(device, 3, 2, 16)
    gpu.rotary_embedding(torch.tensor([4, 5, 0], device=device), query, None, randn(device, 5, 16))
    assert query[1].isnan().all() and not query[[0, 2]].isnan().any()


def activations(rows: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
    double = randn(device, rows, 2 * dim, dtype=dtype) * 4
    double[0, 0], double[-1, dim - 1] = 120.0, -120.0  # where a careless e^x overflows
    double[0, -1] = float("nan")
    double = apart(double)
    for kind in ("silu", "gelu_tanh", "gelu_erf", "relu"):
        out = gpu.gated_activation(kind, double, poisoned(double[:, :dim]))
        assert_near(out, reference.gated_activation(kind, double.double(), None), factor=2)
        x = apart(double)
        wanted = reference.activation(kind, x.double(), None)
        assert gpu.activation(kind, x, x) is x
        assert_near(x, wanted, factor=2)


def arithmetic(rows: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
    y = randn(device, rows, dim, dtype=dtype, seed=1)
    for op, operand in (("scale", 0.75), ("soft_cap", 30.0), ("add", y)):
        x = apart(randn(device, rows, dim, dtype=dtype) * 40)
        x[0, :2] = torch.tensor([1e-3, -3e-5])  # where 1 - e^x has no digits left
        wanted = getattr(reference, op)(x.double(), operand.double() if op == "add" else operand)
        assert getattr(gpu, op)(x, operand) is x
        assert_near(x, wanted, factor=2)
        if op == "soft_cap" and dtype is torch.float32:
            torch.testing.assert_close(x[0, :2].double(), wanted[0, :2], rtol=1e-6, atol=0)


def embedding(rows: int, dim: int, table_dtype: torch.dtype, dtype: torch.dtype, device: torch.device) -> None:
    table = apart(randn(device, 9, dim, dtype=table_dtype))[2:]
    ids = torch.randint(0, 7, (rows,), generator=torch.Generator().manual_seed(rows)).to(device)
    out = gpu.embedding(table, ids, torch.full((rows, dim), float("nan"), dtype=dtype, device=device))
    assert torch.equal(out, table[ids].to(dtype))
    ids[0], ids[-1] = -1, 7
    out = gpu.embedding(table, ids, torch.zeros(rows, dim, dtype=dtype, device=device))
    assert out[0].isnan().all() and out[-1].isnan().all() and not out[1:-1].isnan().any()


def linear(device: torch.device) -> None:
    x, weight, bias, residual = randn(device, 5, 40), randn(device, 24, 40), randn(device, 24), randn(device, 5, 24)
    product = x.double() @ weight.double().T
    assert_near(gpu.linear(x, weight, None, None, None), product, factor=10)
    assert_near(gpu.linear(x, weight, bias, residual, poisoned(residual)), product + bias + residual, factor=10)
    assert_near(gpu.linear(x, weight, None, residual, None), product + residual, factor=10)
    wanted = product + residual.double()
    assert gpu.linear(x, weight, None, residual, residual) is residual
    assert_near(residual, wanted, factor=10)
    ids = torch.tensor([23, 0, 5], device=device)
    assert torch.equal(gpu.linear_rows(weight, ids, None), weight[ids])


def grouped_linear(
    bits: int, rows: int, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device
) -> None:
    weight = GroupedMatrix.quantize(randn(device, out_features, in_features) / in_features**0.5, bits)
    x = apart(randn(device, rows, in_features, dtype=dtype))
    bias, residual = randn(device, out_features, dtype=dtype), apart(randn(device, rows, out_features, dtype=dtype))
    product = x.double() @ weight.dequantize(dtype).double().T  # weights are rounded to the activations' dtype
    assert_near(gpu.linear(x, weight, None, None, None), product, factor=4)
    wanted = product + bias.double() + residual.double()
    assert gpu.linear(x, weight, bias, residual, residual) is residual
    assert_near(residual, wanted, factor=4)
    ids = torch.tensor([out_features - 1, 0, out_features], device=device)
    found = gpu.linear_rows(weight, ids, None)
    torch.testing.assert_close(found[:2], weight.dequantize(rows=ids[:2]), rtol=1e-6, atol=1e-7)
    assert found[2].isnan().all()


def token_bitmask(rows: int, vocab_size: int, device: torch.device) -> None:
    logits = apart(randn(device, rows, vocab_size))
    words = -(-vocab_size // 32) + 1
    chosen = torch.randperm(rows, generator=torch.Generator().manual_seed(0))[: max(1, rows // 2)].to(device)
    masks = torch.randint(-(2**31), 2**31, (len(chosen), words), generator=torch.Generator().manual_seed(1))
    masks = masks.to(device=device, dtype=torch.int32)
    masks[0] = 0
    wanted = logits.clone()
    reference.apply_token_bitmask(wanted, chosen, masks)
    gpu.apply_token_bitmask(logits, chosen, masks)
    assert torch.equal(logits, wanted)


def route(rows: int, num_experts: int, top_k: int, dtype: torch.dtype, device: torch.device) -> None:
    logits = (randn(device, rows, num_experts, dtype=dtype) * 2).round(decimals=1)  # ties
    inf = float("inf")
    for row, numbers in enumerate(([0.0, -0.0], [float("nan"), 1.0], [inf, 0.0], [-inf, -inf])[: rows - 1]):
        logits[row, :2] = torch.tensor(numbers, dtype=dtype)
    if rows > 5:
        logits[4] = -inf
    for renormalize in (True, False):
        wanted_weights, wanted = reference.route(logits, top_k, renormalize)
        weights, experts = gpu.route(apart(logits), top_k, renormalize)
        assert torch.equal(experts, wanted)
        torch.testing.assert_close(weights, wanted_weights, atol=1e-6, rtol=1e-5, equal_nan=True)


def experts(
    num_tokens: int, hidden: int, size: int, num_experts: int, top_k: int, dtype: torch.dtype, device: torch.device
) -> None:
    x = apart(randn(device, num_tokens, hidden, dtype=dtype))
    gate_up = randn(device, num_experts, 2 * size, hidden, dtype=dtype) / hidden**0.5
    down = randn(device, num_experts, hidden, size, dtype=dtype) / size**0.5
    router = randn(device, num_tokens, num_experts) - 3 * (torch.arange(num_experts, device=device) == 1)
    weights, chosen = reference.route(router, top_k, True)  # hardly anybody takes expert 1
    for kind in ("silu", "gelu_tanh"):
        found = gpu.experts(x, weights, chosen, gate_up, down, kind, poisoned(x))
        wide = (x.double(), weights.double(), chosen, gate_up.double(), down.double())
        assert_near(found, reference.experts(*wide, kind, None), factor=4)


def cases() -> list[Case]:
    found: dict[str, Callable[[torch.device], None]] = {
        "norm_keeps_nan_in_its_row": norm_keeps_nan_in_its_row,
        "rotary_beyond_the_table": rotary_beyond_the_table,
        "linear": linear,
        "experts-float32": partial(experts, 5, 40, 72, 3, 2, torch.float32),
        "experts-float16": partial(experts, 37, 32, 24, 2, 1, torch.float16),
        "experts-bfloat16": partial(experts, 1, 72, 20, 5, 3, torch.bfloat16),
        "w8-float32": partial(grouped_linear, 8, 3, 50, 160, torch.float32),
        "w4-float32": partial(grouped_linear, 4, 3, 50, 160, torch.float32),
        "w4-float16": partial(grouped_linear, 4, 17, 33, 96, torch.float16),
        "w8-bfloat16": partial(grouped_linear, 8, 1, 40, 32, torch.bfloat16),
        "w8-many": partial(grouped_linear, 8, linear_kernels.MAX_ROWS + 1, 20, 64, torch.float32),
        "token_bitmask-1x33": partial(token_bitmask, 1, 33),
        "token_bitmask-5x5000": partial(token_bitmask, 5, 5000),
    }
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        for rows, dim in ((1, 1), (3, 100), (17, 64), (2, 2600)):
            found[f"rms_norm-{name}-{rows}x{dim}"] = partial(rms_norm, rows, dim, dtype)
            found[f"layer_norm-{name}-{rows}x{dim}"] = partial(layer_norm, rows, dim, dtype)
        for rows, dim in ((1, 1), (3, 31), (2, 1100)):
            found[f"activations-{name}-{rows}x{dim}"] = partial(activations, rows, dim, dtype)
            found[f"arithmetic-{name}-{rows}x{dim + 1}"] = partial(arithmetic, rows, dim + 1, dtype)
        for head_dim, rotary_dim in ((16, 16), (80, 80), (80, 32), (24, 6)):
            found[f"rotary-{name}-{rotary_dim}of{head_dim}"] = partial(rotary, 3, (5, 2), head_dim, rotary_dim, dtype)
        found[f"rms_norm_of_heads-{name}"] = partial(rms_norm_of_heads, 3, 7, 80, dtype)
        found[f"embedding-{name}"] = partial(embedding, 5, 100, dtype, torch.float32)
        found[f"embedding-float32-{name}-wide"] = partial(embedding, 3, 1500, torch.float32, dtype)
        found[f"route-{name}"] = partial(route, 7, 60, 6, dtype)
        found[f"route-one-{name}"] = partial(route, 1, 8, 2, dtype)
    small = [Case(name=name, run=run) for name, run in found.items()]
    full_size: dict[str, Callable[[torch.device], None]] = {
        "rms_norm-8192x4096": partial(rms_norm, 8192, 4096, torch.bfloat16),
        "rms_norm_of_heads-4096x32x128": partial(rms_norm_of_heads, 4096, 32, 128, torch.bfloat16),
        "layer_norm-2048x5120": partial(layer_norm, 2048, 5120, torch.float16),
        "rotary-4096x32x128": partial(rotary, 4096, (32, 8), 128, 128, torch.bfloat16),
        "activations-2048x14336": partial(activations, 2048, 14336, torch.bfloat16),
        "arithmetic-256x128256": partial(arithmetic, 256, 128256, torch.float32),
        "token_bitmask-256x128256": partial(token_bitmask, 256, 128256),
        "experts-64-of-128": partial(experts, 64, 2048, 768, 128, 8, torch.bfloat16),
        "experts-4096-of-8": partial(experts, 4096, 1024, 3584, 8, 2, torch.bfloat16),
        "w8-64x4096x14336": partial(grouped_linear, 8, 64, 4096, 14336, torch.bfloat16),
        "w4-1x28672x4096": partial(grouped_linear, 4, 1, 28672, 4096, torch.bfloat16),
        "route-4096x128": partial(route, 4096, 128, 8, torch.bfloat16),
    }
    return small + [Case(name=name, run=run, full_size=True) for name, run in full_size.items()]
