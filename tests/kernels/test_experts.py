"""Experts of a mixture and their router, at every instruction set that runs here."""

from __future__ import annotations

import math

import pytest
import torch
from gguf.constants import GGMLQuantizationType
from torch.testing import assert_close

from pagedserve.kernels import cpu, native, reference
from pagedserve.kernels.native import PackedExperts, PackedMatrix
from tests.helpers.gguf_rows import random_rows

FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Formats that only files fill, and a quant type that they hold.
FILE_ONLY = {"int8_g16": "Q6_K", "int8_min": "Q5_K", "int4_f32": "Q4_K"}
FORMATS = (*FLOATS, "int8", "int4_sym", "int4", *FILE_ONLY)
HIDDEN, INNER, NUM_EXPERTS, TOP_K = 256, 256, 7, 3


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def packed(fmt: str, out_features: int, in_features: int, seed: int) -> PackedMatrix:
    matrix = PackedMatrix(fmt, out_features, in_features)
    if fmt in FILE_ONLY:
        kind = FILE_ONLY[fmt]
        matrix.pack_ggml(0, random_rows(kind, out_features, in_features, seed), int(GGMLQuantizationType[kind]))
    else:
        matrix.pack(0, randn(out_features, in_features, seed=seed) / in_features**0.5)
    return matrix


def make_experts(
    gate: str, up: str, down: str, *, num_experts: int = NUM_EXPERTS, hidden: int = HIDDEN, inner: int = INNER
) -> tuple[PackedExperts, PackedExperts]:
    pairs = [[packed(gate, inner, hidden, 3 * e), packed(up, inner, hidden, 3 * e + 1)] for e in range(num_experts)]
    return PackedExperts(pairs), PackedExperts([[packed(down, hidden, inner, 3 * e + 2)] for e in range(num_experts)])


def choices(num_tokens: int, num_experts: int = NUM_EXPERTS) -> tuple[torch.Tensor, torch.Tensor]:
    return reference.route(randn(num_tokens, num_experts, seed=num_tokens), TOP_K, False)


def by_single_ops(
    x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, gate_up: PackedExperts, down: PackedExperts, kind: str
) -> torch.Tensor:
    """Token by token and expert by expert."""
    found = torch.empty(*chosen.shape, x.shape[1])
    for token in range(x.shape[0]):
        for rank, expert in enumerate(chosen[token].tolist()):
            row = x[token : token + 1]
            both = torch.cat([cpu.linear(row, part, None, None, None) for part in gate_up.matrices[expert]], dim=-1)
            hidden = cpu.gated_activation(kind, both, None)
            found[token, rank] = cpu.linear(hidden, down.matrices[expert][0], None, None, None)[0]
    # In the order of the choices; product and sum are rounded once but where there is no fused instruction.
    total = torch.zeros(x.shape, dtype=torch.float32)
    for rank in range(chosen.shape[1]):
        if native.isa() == "scalar":
            total += weights[:, rank, None] * found[:, rank]
        else:
            total = (weights[:, rank, None].double() * found[:, rank].double() + total.double()).float()
    return total


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_token_gets_the_bits_of_its_experts_one_by_one(isa: str, num_threads: int, fmt: str) -> None:
    gate_up, down = make_experts(fmt, fmt, fmt)
    for num_tokens in (1, 5, 33):  # with 33, some experts fill a tile of AMX
        x = randn(num_tokens, HIDDEN)
        weights, chosen = choices(num_tokens)
        out = torch.full_like(x, torch.nan)
        assert cpu.experts(x, weights, chosen, gate_up, down, "silu", out) is out
        assert torch.equal(out, by_single_ops(x, weights, chosen, gate_up, down, "silu"))


@pytest.mark.parametrize("formats", [("int4", "int8", "float32"), ("bfloat16", "int4_sym", "int8_min")], ids=str)
def test_matrices_of_one_expert_may_differ_in_their_formats(isa: str, formats: tuple[str, str, str]) -> None:
    gate_up, down = make_experts(*formats)
    x, (weights, chosen) = randn(40, HIDDEN), choices(40)
    found = cpu.experts(x, weights, chosen, gate_up, down, "gelu_tanh", None)
    assert torch.equal(found, by_single_ops(x, weights, chosen, gate_up, down, "gelu_tanh"))


@pytest.mark.parametrize("kind", ["silu", "gelu_erf", "gelu_tanh"])
@pytest.mark.parametrize(("hidden", "inner"), [(1, 1), (19, 37), (70, 101), (64, 200)])
def test_it_is_what_the_reference_says(isa: str, hidden: int, inner: int, kind: str) -> None:
    gate_up, down = make_experts("float32", "float32", "float32", hidden=hidden, inner=inner)
    wide = randn(9, hidden + 3) * 2
    x = wide[:, :hidden]  # rows that lie apart
    weights, chosen = choices(9)
    dense = [
        torch.stack(
            [torch.cat([cpu.linear_rows(m, torch.arange(m.out_features), None) for m in e]) for e in p.matrices]
        )
        for p in (gate_up, down)
    ]
    wanted = reference.experts(x.double(), weights.double(), chosen, *(d.double() for d in dense), kind, None)
    found = cpu.experts(x, weights, chosen, gate_up, down, kind, None)
    assert_close(found, wanted.float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("fmt", ["float32", "int8", "int4"])
def test_no_bit_of_a_row_depends_on_its_neighbours(isa: str, num_threads: int, fmt: str) -> None:
    gate_up, down = make_experts(fmt, fmt, fmt, num_experts=4)
    x, (weights, chosen) = randn(200, HIDDEN), choices(200, 4)  # some 150 rows an expert: more than a block
    x[7] = torch.nan
    x[8, 0] = torch.inf
    together = cpu.experts(x, weights, chosen, gate_up, down, "silu", None)
    assert together[7].isnan().all()
    for rows in (range(1), range(3, 20), range(9, 200), range(199, -1, -1)):
        rows = list(rows)
        some = cpu.experts(x[rows], weights[rows], chosen[rows], gate_up, down, "silu", None)
        assert_close(some, together[rows], atol=0, rtol=0, equal_nan=True)


def test_no_tokens(isa: str) -> None:
    gate_up, down = make_experts("int8", "int8", "int8")
    empty = torch.empty(0, HIDDEN), torch.empty(0, TOP_K), torch.empty(0, TOP_K, dtype=torch.int64)
    assert cpu.experts(*empty, gate_up, down, "silu", None).shape == (0, HIDDEN)


def test_more_rows_than_one_pass_takes(isa: str) -> None:
    """The working memory of a call is bounded: many rows go through in several passes."""
    gate_up, down = make_experts("int4", "int4", "int4", num_experts=2, hidden=4096, inner=32)
    num_tokens = (96 << 20) // (6 * (4096 + 32) * 2) + 5
    x = randn(num_tokens, 4096)
    weights, chosen = torch.ones(num_tokens, 2), torch.tensor([[0, 1]]).repeat(num_tokens, 1)
    found = cpu.experts(x, weights, chosen, gate_up, down, "silu", None)
    last = cpu.experts(x[-9:], weights[-9:], chosen[-9:], gate_up, down, "silu", None)
    assert torch.equal(found[-9:], last)


@pytest.mark.parametrize("number", [-1, NUM_EXPERTS])
def test_an_expert_that_there_is_not_is_refused(number: int, isa: str) -> None:
    gate_up, down = make_experts("int8", "int8", "int8")
    chosen = torch.tensor([[0, 1, number]])
    with pytest.raises(ValueError, match=f"a token has expert {number}, there are 7"):
        cpu.experts(randn(1, HIDDEN), torch.ones(1, 3), chosen, gate_up, down, "silu", None)


def test_shapes_that_do_not_fit_are_named() -> None:
    if not native.available():
        pytest.skip("the native library is not built in this environment")
    gate_up, down = make_experts("int8", "int8", "int8", num_experts=2)
    x, weights, chosen = randn(1, HIDDEN), torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="gate_up has shape"):
        cpu.experts(x, weights, chosen, down, down, "silu", None)
    with pytest.raises(ValueError, match="x's last dimension"):
        cpu.experts(x[:, 1:], weights, chosen, gate_up, down, "silu", None)
    with pytest.raises(ValueError, match="weights has shape"):
        cpu.experts(x, weights.repeat(1, 2), chosen, gate_up, down, "silu", None)
    with pytest.raises(ValueError, match="experts must have one shape"):
        PackedExperts([[packed("int8", 32, 64, 0)], [packed("int8", 32, 32, 0)]])


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (8, 2), (60, 4), (128, 8), (5, 5)])
@pytest.mark.parametrize("num_tokens", [0, 1, 40])
def test_route(isa: str, num_tokens: int, num_experts: int, top_k: int, renormalize: bool) -> None:
    wide = randn(num_tokens, num_experts + 2) * 4
    wide = (wide * 2).round() / 2  # many equal ones, of which the first comes first
    logits = wide[:, :num_experts]
    weights, chosen = cpu.route(logits, top_k, renormalize)
    wanted_weights, wanted = reference.route(logits, top_k, renormalize)
    assert torch.equal(chosen, wanted)
    assert_close(weights, wanted_weights)


def test_route_of_what_is_no_number(isa: str) -> None:
    logits = randn(6, 11)
    logits[0, 4] = math.nan
    logits[1, 9] = math.inf
    logits[2] = -math.inf
    logits[3, 2:] = -math.inf
    logits[4, :4] = torch.tensor([-math.nan, math.nan, math.inf, -math.inf])
    logits[5] = torch.tensor([0.0, -0.0] * 5 + [-0.0])
    weights, chosen = cpu.route(logits, 3, True)
    wanted_weights, wanted = reference.route(logits, 3, True)
    assert torch.equal(chosen, wanted)
    assert_close(weights, wanted_weights, equal_nan=True)


def test_route_takes_no_more_experts_than_there_are(isa: str) -> None:
    with pytest.raises(ValueError, match="top_k is 4 of 3 experts"):
        cpu.route(randn(2, 3), 4, False)
