"""Any decoder of transformers over our paged KV, through transformers' attention interface.

Everything but attention, linears and embeddings is transformers' own code. A step's tokens are one long row with
position ids of their own; which sequence a token belongs to only attention knows, and that is ours: batching, chunked
prompts, shared prefixes, forks and preemption work as for native models. Each model proves itself while it loads: its
logits over interleaved chunks must be those of transformers' own eager attention.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

from pagedserve.attention import AttentionBackend, AttentionMetadata
from pagedserve.errors import ModelLoadError, PagedServeError
from pagedserve.layers.attention import ForwardContext
from pagedserve.log import get_logger
from pagedserve.model_files import ModelFiles
from pagedserve.models import transformers_proof as proof
from pagedserve.models.sources import SafetensorsSource
from pagedserve.models.transformers_modules import (
    nbytes_of_rest,
    replace_experts,
    replace_linears,
    replace_rotary,
)
from pagedserve.models.transformers_probe import (
    LayerAttention,
    TransformersConfig,
    body_name,
    first_line,
    quiet_transformers,
)
from pagedserve.quantization.method import QuantMethod

logger = get_logger(__name__)

_NAME = "pagedserve"


class TransformersForCausalLM:
    """What `models.llama.LlamaForCausalLM` is for Llama, for whatever transformers knows. Runs eagerly."""

    config_class = TransformersConfig

    def __init__(self, config: TransformersConfig, model: Any, attention: AttentionBackend, weights_bytes: int):
        """Takes over a loaded `model` of transformers whose linears are replaced already."""
        self.config = config
        self.weights_bytes = weights_bytes
        self._attention = attention
        self._model = model
        self._layers = [_PagedLayer(attention, layer, attention.spec.scale) for layer in config.layers]
        for layer in self._layers:
            model.get_submodule(layer.asks.module).paged_layer = layer
        transformers.AttentionInterface.register(_NAME, _attend)
        expected = self._own_logits()
        # The whole model around a body that returns what it is given: the head, and what a model does to its logits.
        name = body_name(model)
        self._body, self._given = model.get_submodule(name), _GivenHiddenStates()
        setattr(model, name, self._given)
        proof.prove(self, attention, expected)

    @classmethod
    def from_files(
        cls,
        files: ModelFiles,
        config: TransformersConfig,
        *,
        attention: AttentionBackend,
        quant: QuantMethod,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
        dummy_seed: int | None = None,
    ) -> TransformersForCausalLM:
        """Loads the checkpoint's folder; ModelLoadError names what is missing, left over or not to be served."""
        logger.info(
            "%s runs through transformers' code with paged attention; native architectures are faster",
            config.architecture,
        )
        try:
            with quiet_transformers():
                model = _read(files, config) if dummy_seed is None else _random(config, dummy_seed)
                model.eval()
                num_bytes = _take_over(model, quant, dtype, device, max_model_len, on_cpu=device.type == "cpu")
                return cls(config, model, attention, num_bytes)
        except PagedServeError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise ModelLoadError(
                f"transformers cannot load {config.architecture} from {files.path}: {reason}"
            ) from error

    @classmethod
    def planned_bytes(
        cls,
        config: TransformersConfig,
        *,
        quant: QuantMethod,
        stored: torch.dtype,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
    ) -> int:
        """What `from_files` would hold of a checkpoint whose weights are of type `stored`; nothing is read."""
        meta = torch.device("meta")
        with quiet_transformers(), meta:
            model = config.model_class._from_config(config.hf_config, attn_implementation="eager", dtype=stored)
            return _take_over(model, quant, dtype, meta, max_model_len, on_cpu=device.type == "cpu")

    @property
    def num_layers(self) -> int:
        return self.config.num_layers

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """Of each layer: a token sees itself and the window - 1 tokens before it, or all."""
        return self.config.layer_windows

    @property
    def num_kv_heads(self) -> int:
        return self.config.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.config.head_dim

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,  # int64 [num_tokens]
        positions: torch.Tensor,  # int64 [num_tokens]
        context: ForwardContext,
    ) -> torch.Tensor:  # [num_tokens, hidden]
        """Hidden states after the last norm. Writes this step's keys and values into the cache of `context`."""
        # Not every model hands arguments down to its attention, so the layers hold the step while it runs.
        for layer, place in zip(self._layers, context.per_layer(), strict=True):
            layer.place = place
        try:
            output = self._body(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        finally:
            for layer in self._layers:
                layer.place = None
        return output[0][0]

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_rows, hidden] -> fp32 [num_rows, vocab]"""
        self._given.hidden_states = hidden[None]
        rows = torch.zeros((1, hidden.shape[0]), dtype=torch.int64, device=hidden.device)
        return self._model(input_ids=rows, use_cache=False).logits[0].float()

    @torch.inference_mode()
    def _own_logits(self) -> list[torch.Tensor]:
        """Logits of the proof's sequences by transformers alone, fp32 [num_tokens, vocab] each."""
        self._model.config._attn_implementation = "eager"
        sequences = proof.tokens(self.vocab_size, self._attention.spec.device)
        logits = [self._model(input_ids=ids[None], use_cache=False).logits[0].float() for ids in sequences]
        self._model.config._attn_implementation = _NAME
        return logits


class _GivenHiddenStates(nn.Module):
    """Stands where a model's body was, and returns `hidden_states`."""

    hidden_states: torch.Tensor  # [1, num_rows, hidden]

    def forward(self, *args: Any, **kwargs: Any) -> _GivenOutput:
        return _GivenOutput(self.hidden_states)

    @property
    def decoder(self) -> _GivenHiddenStates:
        """OPT calls its body's decoder and not its body."""
        return self


class _GivenOutput:
    """An output of transformers with nothing in it but hidden states, whatever else its kind may have."""

    def __init__(self, last_hidden_state: torch.Tensor):
        self.last_hidden_state = last_hidden_state

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


class _PagedLayer:
    """One attention layer's way to its part of the pool."""

    __slots__ = ("_backend", "_query_scale", "asks", "place")

    def __init__(self, backend: AttentionBackend, asks: LayerAttention, scale: float):
        self.asks = asks
        # While a step runs: the layer's view of the pool, and the metadata of its layer group.
        self.place: tuple[torch.Tensor, AttentionMetadata] | None = None
        self._backend = backend
        # The backend has one scale for all layers; a layer with another one scales its queries.
        self._query_scale = asks.scale / scale

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """[1, heads, num_tokens, dim] each -> [1, num_tokens, heads, value_dim]"""
        assert self.place is not None, "attention outside of a step"
        query, key, value = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
        if self._query_scale != 1.0:
            query = query * self._query_scale
        if self.asks.value_dim < self.asks.head_dim:
            value = nn.functional.pad(value, (0, self.asks.head_dim - self.asks.value_dim))
        attended = self._backend.forward(query, key, value, *self.place, sliding_window=self.asks.sliding_window)
        return attended[None, :, :, : self.asks.value_dim]


def _attend(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """The function of transformers' interface. No mask is made for it; scale and window are known since the probe."""
    return module.paged_layer(query, key, value), None


def _read(files: ModelFiles, config: TransformersConfig) -> Any:
    if files.kind != "safetensors":
        raise ModelLoadError(
            "models that run through transformers are read from folders with safetensors, not from GGUF"
        )
    # Our own reader says first what is cut short, doubled or of a type that cannot be served.
    dtype = SafetensorsSource(files.weight_files).common_dtype()
    model, info = config.model_class.from_pretrained(
        files.path,
        config=config.hf_config,
        dtype=dtype,
        attn_implementation="eager",
        local_files_only=True,
        use_safetensors=True,
        ignore_mismatched_sizes=True,  # they are refused below, by name
        output_loading_info=True,
    )
    for key, what in (
        ("missing_keys", "lacks tensors"),
        ("unexpected_keys", "holds tensors that this architecture does not have"),
        ("mismatched_keys", "holds tensors of other shapes than config.json asks for"),
    ):
        if names := sorted(map(str, info.get(key) or ())):
            more = f" and {len(names) - 8} more" if len(names) > 8 else ""
            raise ModelLoadError(f"the checkpoint {what}: {', '.join(names[:8])}{more}")
    return model


def _take_over(
    model: Any, quant: QuantMethod, dtype: torch.dtype, device: torch.device, max_model_len: int, *, on_cpu: bool
) -> int:
    """Puts our modules in the place of transformers' own; returns the bytes of all weights."""
    replace_rotary(model, max(max_model_len, *proof.LENGTHS), dtype)
    # On GPUs transformers' own grouped product is the faster one.
    num_bytes = replace_experts(model, quant) if on_cpu else 0
    num_bytes += replace_linears(model, quant, dtype, device)
    return num_bytes + nbytes_of_rest(model, dtype, device)


def _random(config: TransformersConfig, seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return config.model_class._from_config(config.hf_config, attn_implementation="eager", dtype=torch.float32)
