"""Modules that take the place of transformers' own: linears and embeddings in our formats, rotary tables."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import ExpertsInterface
from transformers.pytorch_utils import Conv1D

from pagedserve.errors import ConfigError
from pagedserve.layers.embedding import DenseEmbedding, Embedding, SharedEmbedding
from pagedserve.layers.linear import Linear
from pagedserve.quantization.method import QuantMethod

EXPERTS = "pagedserve"


class LinearModule(nn.Module):
    """A Linear of ours where transformers calls a module."""

    def __init__(self, linear: Linear, dtype: torch.dtype):
        super().__init__()
        self._linear = linear
        self._dtype = dtype
        self.out_features, self.in_features = linear.weight.out_features, linear.weight.in_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]"""
        if not x.numel():  # an expert that no token chose
            return x.new_empty((*x.shape[:-1], self.out_features))
        rows = x.reshape(-1, x.shape[-1])
        return self._linear(rows).view(*x.shape[:-1], self.out_features)

    @property
    def weight(self) -> torch.Tensor:
        """The matrix as floats, made when asked for: some models look at a weight's type, or multiply by it."""
        return self._linear.weight.dequantize().to(self._dtype)

    @property
    def bias(self) -> torch.Tensor | None:
        return self._linear.bias


class EmbeddingModule(nn.Module):
    """An Embedding of ours where transformers calls a module."""

    def __init__(self, embedding: Embedding, like: torch.Tensor):
        super().__init__()
        self._embedding = embedding
        # Some models look at the weight's type and device; rows are only to be had through `forward`.
        self.weight = like.new_empty(0)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [...] -> [..., hidden]"""
        rows = self._embedding(token_ids.reshape(-1))
        return rows.view(*token_ids.shape, rows.shape[-1])


class PackedExperts:
    """Experts whose matrices transformers holds in one tensor, as one weight of ours each.

    What the module itself knows stays with it: its activation or gate, and its biases.
    """

    def __init__(self, experts: Any, quant: QuantMethod):
        up = experts.gate_up_proj if experts.has_gate else experts.up_proj
        self._up = [quant.from_dense(self._matrix(experts, up.data[e])) for e in range(up.shape[0])]
        self._down = [quant.from_dense(self._matrix(experts, part)) for part in experts.down_proj.data]
        self.nbytes = sum(weight.nbytes for weight in self._up + self._down)

    @staticmethod
    def _matrix(experts: Any, stored: torch.Tensor) -> torch.Tensor:
        return stored.T.contiguous() if experts.is_transposed else stored

    def __call__(
        self,
        experts: Any,
        x: torch.Tensor,  # [num_tokens, hidden]
        top_k_index: torch.Tensor,  # int64 [num_tokens, k]
        top_k_weights: torch.Tensor,  # [num_tokens, k]
    ) -> torch.Tensor:  # [num_tokens, hidden]
        """Every expert once, over the tokens that chose it; a token's sum is in the order of its choices, so that its
        neighbours change no bit of it."""
        num_tokens, k = top_k_index.shape
        chosen = top_k_index.reshape(-1)
        up_bias, down_bias = (getattr(experts, name, None) for name in self._bias_names(experts))
        outputs = x.new_empty((num_tokens * k, x.shape[1]))
        for e in chosen.unique().tolist():
            places = (chosen == e).nonzero()[:, 0]
            y = self._up[e].matmul(x[places // k])
            if up_bias is not None:
                y = y + up_bias[e]
            y = self._down[e].matmul(experts._apply_gate(y) if experts.has_gate else experts.act_fn(y))
            if down_bias is not None:
                y = y + down_bias[e]
            outputs[places] = experts.post_expert_norm(y) if getattr(experts, "has_post_expert_norm", False) else y
        return (outputs.view(num_tokens, k, -1) * top_k_weights[:, :, None]).sum(dim=1).to(x.dtype)

    @staticmethod
    def _bias_names(experts: Any) -> tuple[str, str]:
        if not experts.has_bias:
            return "", ""
        return "gate_up_proj_bias" if experts.has_gate else "up_proj_bias", "down_proj_bias"


def _run_experts(experts: Any, *arguments: torch.Tensor) -> torch.Tensor:
    """The function of transformers' interface for experts."""
    return experts.packed_experts(experts, *arguments)


def replace_experts(model: nn.Module, quant: QuantMethod) -> int:
    """Experts that go through transformers' interface are packed; returns their bytes."""
    ExpertsInterface.register(EXPERTS, _run_experts)
    num_bytes = 0
    for module in model.modules():
        # What the interface's decorator leaves on a class of experts.
        if not hasattr(module, "_apply_gate") or not hasattr(module, "is_transposed"):
            continue
        module.packed_experts = PackedExperts(module, quant)
        num_bytes += module.packed_experts.nbytes
        for name in ("gate_up_proj", "up_proj", "down_proj"):
            if name in module._parameters:
                delattr(module, name)
        module.config._experts_implementation = EXPERTS
    return num_bytes


class RotaryTable(nn.Module):
    """Cosines and sines of every position, as the module it replaces gives them to a sequence that grows by one token
    at a time.

    Rules that look at the longest position of the batch (dynamic NTK, LongRoPE) would let neighbours change each
    other's angles; a table cannot. Dynamic NTK keeps for each position the base of the moment when it was the last
    one. LongRoPE has two sets of divisors; the length that is served decides for one of them.
    """

    def __init__(self, rotary: nn.Module, kinds: dict[str | None, str], num_positions: int, dtype: torch.dtype):
        super().__init__()
        self._tables = {
            layer_type: _table(rotary, layer_type, kind, num_positions, dtype) for layer_type, kind in kinds.items()
        }

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [1, num_tokens] -> cosines and sines, [1, num_tokens, dim] each"""
        cos, sin = self._tables[layer_type]
        return cos[position_ids].to(x.dtype), sin[position_ids].to(x.dtype)


def _table(
    rotary: nn.Module, layer_type: str | None, kind: str, num_positions: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    options = {} if layer_type is None else {"layer_type": layer_type}
    device = next(rotary.buffers()).device
    x = torch.zeros(1, dtype=torch.float32, device=device)
    positions = torch.arange(num_positions, device=device)
    start = min(int(rotary.original_max_seq_len), num_positions) if "dynamic" in kind else num_positions
    parts = [rotary(x, positions[None, :start], **options)] if start else []
    parts += [rotary(x, positions[None, p : p + 1], **options) for p in range(start, num_positions)]
    cos, sin = (torch.cat([part[i][0] for part in parts]) for i in (0, 1))
    return cos.to(dtype), sin.to(dtype)


def replace_rotary(model: nn.Module, num_positions: int, dtype: torch.dtype) -> None:
    """Rotary modules whose angles depend on the batch become tables."""
    for name, module in list(model.named_modules()):
        kinds = getattr(module, "rope_type", None)
        by_layer_type = kinds if isinstance(kinds, dict) else {None: kinds}
        if any(isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in by_layer_type.values()):
            _put(model, name, RotaryTable(module, by_layer_type, num_positions, dtype))


def replace_linears(model: nn.Module, quant: QuantMethod, dtype: torch.dtype, device: torch.device) -> int:
    """Every nn.Linear (and GPT-2's Conv1D) becomes one of ours, the head with the method for heads, and an input
    embedding that is tied to the head reads the head's rows. Returns their bytes.

    Modules of other classes stay as they are, in the type of the activations. ConfigError where weights are to be
    held in another type and the bulk of them lies in such modules.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head is not None and getattr(head, "weight", None) is embedding.weight
    like = torch.empty(0, dtype=dtype, device=device)
    num_bytes = 0
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            matrix = module.weight.data
        elif type(module) is Conv1D:
            matrix = module.weight.data.T.contiguous()
        else:
            continue
        method = quant.for_head() if module is head else quant
        bias = None if module.bias is None else module.bias.data.to(device=device, dtype=dtype)
        linear = Linear(method.from_dense(matrix), bias)
        num_bytes += linear.nbytes
        _put(model, name, LinearModule(linear, dtype))
        if module is head and tied and type(embedding) is nn.Embedding:
            model.set_input_embeddings(EmbeddingModule(SharedEmbedding(linear.weight, dtype), like))
    if type(embedding) is nn.Embedding and model.get_input_embeddings() is embedding:
        lookup = DenseEmbedding(embedding.weight.data.to(device), dtype)
        num_bytes += lookup.nbytes
        model.set_input_embeddings(EmbeddingModule(lookup, like))
    fused = next((name for name, p in model.named_parameters() if p.dim() > 2), None)
    if fused is not None and quant.changes_weights:
        raise ConfigError(
            f"--weights-dtype: {fused} is a tensor of several matrices, which transformers multiplies by itself and "
            "which stays in the type of the activations; use --weights-dtype auto for this model"
        )
    return num_bytes


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, module)


def nbytes_of_rest(model: nn.Module, dtype: torch.dtype, device: torch.device) -> int:
    """Brings parameters that were not replaced to the type of the activations, and counts them."""
    model.to(device)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    return sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers())
