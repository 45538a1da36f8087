"""Loading: from files to a model that computes."""

from __future__ import annotations

from typing import Any

import torch

from pagedserve import packed_file
from pagedserve.attention import AttentionBackend
from pagedserve.errors import ModelLoadError
from pagedserve.log import get_logger
from pagedserve.model_files import ModelFiles
from pagedserve.models import ARCHITECTURES, model_class
from pagedserve.models.sources import DummySource, GGUFSource, SafetensorsSource, WeightSource
from pagedserve.models.streaming import StreamedSource
from pagedserve.models.weights import Weights
from pagedserve.quantization.method import QuantMethod
from pagedserve.quantization.packed_cache import PackedCache

logger = get_logger(__name__)

# Kinds of devices whose weights are copied; CPUs map the files instead.
STREAMED_DEVICES = ("cuda",)


def parse_config(files: ModelFiles, impl: str = "auto") -> Any:
    """The model's own config object: its geometry, before a weight is read. `impl` is `--model-impl`.

    Raises ModelLoadError for an architecture or a setting that is not supported.
    """
    config = decoder_config(files)
    return model_class(config, impl).config_class.from_hf(config)


@torch.inference_mode()
def load_model(
    files: ModelFiles,
    config: Any,
    *,
    attention: AttentionBackend,
    quant: QuantMethod,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int | None = None,
    dummy_seed: int | None = None,
    impl: str = "auto",
    use_packed_cache: bool = False,
) -> Any:
    """Builds the model of `files` with its weights, or with random ones where `dummy_seed` is given.

    `config` comes from `parse_config` with the same `impl`; `max_model_len` (default: the model's own) is the number of
    positions served. With `use_packed_cache` matrices that an earlier start packed are mapped, and what is packed now
    is kept.
    Raises ModelLoadError naming the file and tensor that is missing, left over, wrongly shaped, cut short or of a type
    that cannot be served.
    """
    chosen = model_class(decoder_config(files), impl)
    if hasattr(chosen, "from_files"):  # it has a reader of its own
        return chosen.from_files(
            files,
            config,
            attention=attention,
            quant=quant,
            dtype=dtype,
            device=device,
            max_model_len=max_model_len or config.max_model_len,
            dummy_seed=dummy_seed,
        )
    source = _source(files, device) if dummy_seed is None else DummySource(dummy_seed, stored_dtype(files), device)
    cache = None
    if use_packed_cache and dummy_seed is None and quant.cache_key is not None:
        cache = PackedCache.for_files(files.weight_files, quant.cache_key)
    weights = Weights(source, quant=quant, dtype=dtype, device=device, cache=cache)
    try:
        model = chosen(
            config, weights, attention=attention, max_model_len=max_model_len or config.max_model_len, device=device
        )
    finally:
        source.close()
        packed_file.forget()
    weights.finish()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what parts of stacked matrices took: the KV pool is sized by what is free
    if cache is not None:
        cache.save()
    if weights.rounding_error is not None:
        logger.info(
            "weights quantised while loading: relative RMS error %.2f %%", 100 * weights.rounding_error.relative
        )
    return model


def decoder_config(files: ModelFiles) -> dict[str, Any]:
    """config.json, and for a checkpoint without a head that of the decoder it was made of.

    The embedding then stands for the head; requests that would draw from it are refused in front. ModelLoadError for
    attention to later tokens, which paged decoders do not have.
    """
    config = files.config
    if config.get("is_causal") is False or config.get("use_bidirectional_attention"):
        raise ModelLoadError(
            "config.json asks for attention to later tokens (is_causal: false, or use_bidirectional_attention); "
            "only causal decoders are served"
        )
    if not files.has_head:
        decoder = config["architectures"][0].removesuffix("Model") + "ForCausalLM"
        if decoder in ARCHITECTURES:
            return {**config, "architectures": [decoder], "tie_word_embeddings": True}
    return config


def _source(files: ModelFiles, device: torch.device) -> WeightSource:
    if files.gguf is not None:
        return GGUFSource(files.gguf)
    if device.type in STREAMED_DEVICES:
        return StreamedSource(files.weight_files, device)
    return SafetensorsSource(files.weight_files)


def stored_dtype(files: ModelFiles) -> torch.dtype:
    """The float type that config.json says the weights have; fp32 where it says nothing that we know."""
    name = files.config.get("dtype") or files.config.get("torch_dtype")
    return {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(name, torch.float32)
