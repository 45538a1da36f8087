"""What a model of transformers asks of attention, found out before its weights are read.

The model is built without storage (torch's meta device) and run over a few tokens with an attention function that only
takes notes. So there is no table of how each architecture spells its number of heads, and one whose layers do not go
through the interface is refused before gigabytes are read.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import nn

from pagedserve.attention import AttentionSpec
from pagedserve.errors import ModelLoadError
from pagedserve.layers.rotary import RopeConfig
from pagedserve.models import ARCHITECTURES

_PROBE = "pagedserve_probe"
_NUM_PROBE_TOKENS = 5
# Arguments that say nothing of the numbers, or that are taken care of. Any other one that is set asks for something
# that paged attention would leave out: sinks, biases, sparse patterns.
_UNDERSTOOD = frozenset(
    ("dropout", "scaling", "sliding_window", "softcap", "position_ids", "use_cache", "output_attentions", "layer_idx")
)
_LAYER_TYPES = frozenset(("full_attention", "sliding_attention"))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAttention:
    """What one attention module asks for; `module` is its name within the model."""

    module: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    sliding_window: int | None
    soft_cap: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersConfig:
    """A config of transformers, and what its attention layers were seen to ask for, in the order of their calls."""

    architecture: str
    hf_config: Any
    model_class: Any
    layers: tuple[LayerAttention, ...]
    vocab_size: int
    max_model_len: int

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> TransformersConfig:
        """Reads config.json through transformers; ModelLoadError says why a model cannot be served."""
        architecture = str((config.get("architectures") or ["?"])[0])
        hf_config, model_class = _known_to_transformers(config, architecture)
        text = hf_config.get_text_config(decoder=True)
        layers = tuple(_probe(hf_config, model_class, architecture))
        _check_layers(layers, text, architecture)
        vocab_size = getattr(text, "vocab_size", None)
        if not isinstance(vocab_size, int) or vocab_size < 1:
            raise ModelLoadError(f"config.json: vocab_size is {vocab_size!r}, not a whole number above 0")
        max_model_len = _max_model_len(config, text, layers[0].head_dim, architecture)
        _check_layer_types(layers, text, max_model_len, architecture)
        return cls(
            architecture=architecture,
            hf_config=hf_config,
            model_class=model_class,
            layers=layers,
            vocab_size=vocab_size,
            max_model_len=max_model_len,
        )

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_kv_heads(self) -> int:
        return self.layers[0].num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.layers[0].head_dim

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """Of each layer: a token sees itself and the window - 1 tokens before it, or all."""
        return tuple(layer.sliding_window for layer in self.layers)

    @property
    def sliding_window(self) -> int | None:
        """The window of all layers, where they share one."""
        windows = {layer.sliding_window for layer in self.layers}
        return windows.pop() if len(windows) == 1 else None

    def attention_spec(
        self, *, block_size: int, dtype: torch.dtype, kv_cache_dtype: torch.dtype, device: torch.device
    ) -> AttentionSpec:
        """What the model asks of an attention backend."""
        first = self.layers[0]
        return AttentionSpec(
            num_heads=first.num_heads,
            num_kv_heads=first.num_kv_heads,
            head_dim=first.head_dim,
            block_size=block_size,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            device=device,
            sliding_window=self.sliding_window,
            soft_cap=first.soft_cap,
            scale=first.scale,
        )


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """transformers neither logs nor draws progress bars inside the block: what matters is raised."""
    log = transformers.utils.logging
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()


def body_name(model: Any) -> str:
    """The attribute that holds the model without its head; ModelLoadError where there is none."""
    for name in (model.base_model_prefix, "model", "transformer"):
        if name and isinstance(getattr(model, name, None), nn.Module):
            return name
    raise ModelLoadError(f"{type(model).__name__} has no body apart from its head")


def _known_to_transformers(config: Mapping[str, Any], architecture: str) -> tuple[Any, Any]:
    """The config object and the class that transformers itself has for it; code of repositories is never run."""
    model_type = config.get("model_type")
    if config.get("is_encoder_decoder"):
        raise ModelLoadError(f"{architecture} is an encoder-decoder model; decoder-only models are supported")
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        raise ModelLoadError(f"checkpoints quantised with {method!r} are not supported; give the full-precision one")
    if model_type not in transformers.CONFIG_MAPPING:
        raise ModelLoadError(
            f"architecture {architecture} (model_type {model_type!r}) is neither native here nor part of "
            f"transformers {transformers.__version__}; code that comes with a model is never run"
        )
    try:
        hf_config = transformers.CONFIG_MAPPING[model_type].from_dict(dict(config))
    except Exception as error:
        raise ModelLoadError(f"config.json: transformers does not accept it: {first_line(error)}") from error
    if hasattr(hf_config, "output_router_logits"):
        hf_config.output_router_logits = False  # only losses read them
    known = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(hf_config), ())
    classes = {c.__name__: c for c in (known if isinstance(known, tuple | list) else (known,))}
    decoder = architecture.removesuffix("Model") + "ForCausalLM"
    if architecture not in classes and decoder in classes:
        # A checkpoint without a head, for embeddings.
        hf_config.tie_word_embeddings = True
        return hf_config, classes[decoder]
    if architecture not in classes:
        served = f" (of its kind it has {', '.join(classes)})" if classes else ""
        raise ModelLoadError(
            f"architecture {architecture} is neither native nor a decoder of transformers{served}; "
            "encoders such as BERT are not served (embeddings come from decoders, by last-token or mean pooling); "
            f"native ones known: {', '.join(ARCHITECTURES)}"
        )
    return hf_config, classes[architecture]


def _probe(hf_config: Any, model_class: Any, architecture: str) -> list[LayerAttention]:
    """One entry for each call of attention in one forward."""
    calls: list[tuple[nn.Module, LayerAttention]] = []

    def take_notes(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        odd = sorted(name for name, setting in kwargs.items() if name not in _UNDERSTOOD and setting is not None)
        if odd or kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
            what = ", ".join(odd) or "attention to later tokens"
            raise ModelLoadError(f"{architecture} asks its attention for {what}, which paged attention does not have")
        scale = kwargs.get("scaling")
        note = LayerAttention(
            module="",
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_dim=query.shape[3],
            value_dim=value.shape[3],
            scale=query.shape[3] ** -0.5 if scale is None else float(scale),
            sliding_window=kwargs.get("sliding_window") or None,
            soft_cap=kwargs.get("softcap") or None,
        )
        calls.append((module, note))
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None

    transformers.AttentionInterface.register(_PROBE, take_notes)
    try:
        with quiet_transformers(), torch.device("meta"), torch.inference_mode():
            model = model_class._from_config(hf_config, attn_implementation=_PROBE).eval()
            if hasattr(model, "set_experts_implementation"):
                # The one that routes tokens without looking at numbers.
                with contextlib.suppress(ValueError):
                    model.set_experts_implementation("batched_mm")
            for module in model.modules():
                # Rules that look at the positions have no numbers to look at here.
                if "dynamic" in str(getattr(module, "rope_type", "")):
                    module.rope_type = "default"
            body = model.get_submodule(body_name(model))
            if "position_ids" not in inspect.signature(body.forward).parameters:
                raise ModelLoadError(
                    f"{architecture} takes no position_ids (it keeps a state, or counts positions by itself), so its "
                    "sequences cannot share a batch here"
                )
            positions = torch.arange(_NUM_PROBE_TOKENS)[None]
            body(input_ids=torch.zeros_like(positions), position_ids=positions, use_cache=False)
    except ModelLoadError:
        raise
    except Exception as error:
        # Older models look their attention up in a table of their own.
        why = "it has its own" if _PROBE in str(error) else f"{type(error).__name__}: {first_line(error)}"
        raise ModelLoadError(
            f"{architecture} cannot be run through transformers' attention interface: {why}"
        ) from error
    finally:
        # The register has no way out but its table.
        transformers.AttentionInterface._global_mapping.pop(_PROBE, None)
    names = {module: name for name, module in model.named_modules()}
    return [replace(note, module=names[module]) for module, note in calls]


def _check_layers(layers: tuple[LayerAttention, ...], text: Any, architecture: str) -> None:
    expected = getattr(text, "num_hidden_layers", len(layers))
    if not layers:
        raise ModelLoadError(
            f"{architecture}: no layer's attention goes through transformers' attention interface, so its keys and "
            "values cannot be paged"
        )
    if len({layer.module for layer in layers}) != len(layers) or len(layers) != expected:
        raise ModelLoadError(
            f"{architecture}: of {expected} layers each must call attention once, but there were {len(layers)} calls "
            "(some layers keep a state instead, or attend several times)"
        )
    shapes = {(n.num_heads, n.num_kv_heads, n.head_dim, n.value_dim, n.soft_cap) for n in layers}
    if len(shapes) > 1:
        raise ModelLoadError(f"{architecture}: layers whose attention heads differ in number or size are not supported")
    first = layers[0]
    if first.value_dim > first.head_dim:
        raise ModelLoadError(f"{architecture}: values of {first.value_dim} numbers for keys of {first.head_dim}")


def _check_layer_types(layers: tuple[LayerAttention, ...], text: Any, max_model_len: int, architecture: str) -> None:
    """What the config says of each layer must be what the layer asked for."""
    kinds = getattr(text, "layer_types", None)
    window = getattr(text, "sliding_window", None) or max_model_len
    if not kinds:
        if window < max_model_len and getattr(text, "use_sliding_window", True) and not layers[0].sliding_window:
            raise ModelLoadError(f"{architecture}: its sliding window does not reach its attention")
        return
    chunk = getattr(text, "attention_chunk_size", None)
    for kind, layer in zip(kinds, layers, strict=True):
        if kind == "chunked_attention" and chunk is not None and chunk >= max_model_len:
            continue
        if kind not in _LAYER_TYPES:
            raise ModelLoadError(f"{architecture}: layers of type {kind!r} are not supported")
        if kind == "sliding_attention" and layer.sliding_window is None and window < max_model_len:
            raise ModelLoadError(f"{architecture}: the sliding window of {layer.module} does not reach its attention")


def _max_model_len(config: Mapping[str, Any], text: Any, head_dim: int, architecture: str) -> int:
    """Positions that the model was made for, stretching included."""
    length = getattr(text, "max_position_embeddings", None)
    if not isinstance(length, int) or length < 1:
        raise ModelLoadError(f"{architecture}: config.json does not say max_position_embeddings")
    with contextlib.suppress(ModelLoadError):
        return RopeConfig.from_hf(config, head_dim=head_dim, max_position_embeddings=length).max_model_len
    return length


def first_line(error: Exception) -> str:
    """What an exception says, short enough for one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
