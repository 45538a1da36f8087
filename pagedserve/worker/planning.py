"""What a worker would find if it loaded the model: the same rooms, asked before a weight is read."""

from __future__ import annotations

from typing import Any

import torch

from pagedserve import quantization
from pagedserve.attention import AttentionBackend, AttentionSpec, select
from pagedserve.attention.reference import ReferenceBackend
from pagedserve.config import CacheConfig, ModelConfig, SchedulerConfig
from pagedserve.errors import ConfigError
from pagedserve.model_files import ModelFiles
from pagedserve.models.hf_config import resolve_max_model_len
from pagedserve.models.loader import parse_config
from pagedserve.models.planning import plan_model
from pagedserve.step import LoadPlan
from pagedserve.worker.layer_groups import kv_cache_spec
from pagedserve.worker.memory import free_memory, make_plan
from pagedserve.worker.worker import activation_dtype, kv_cache_dtype

# What a CUDA context, cuBLAS and the allocator's rounding hold of a card beside tensors.
CUDA_OVERHEAD_BYTES = 1 << 30


def plan_loading(
    model: ModelConfig, cache: CacheConfig, scheduler: SchedulerConfig, files: ModelFiles, device_bytes: int | None
) -> LoadPlan:
    """The plan of a `Worker` with these settings.

    `device_bytes` is the memory of a card that need not be here; None means the device of this machine that serving
    would take. Raises ConfigError and ModelLoadError as loading would, as far as headers and settings show it.
    """
    device = torch.device("cuda") if device_bytes is not None else _device_here(model.device)
    dtype = activation_dtype(model.dtype, device, files)
    kv_dtype = kv_cache_dtype(cache, dtype, device)
    config = parse_config(files, model.model_impl)
    max_model_len = resolve_max_model_len(config.max_model_len, model.max_model_len)
    spec = config.attention_spec(block_size=cache.block_size, dtype=dtype, kv_cache_dtype=kv_dtype, device=device)
    backend = _backend(spec, model.attention_backend, is_here=device_bytes is None)
    planned = plan_model(
        files,
        config,
        attention=backend,
        quant=quantization.select(model.weights_dtype, device, dtype),
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        impl=model.model_impl,
        dummy=model.load_format == "dummy",
    )
    activations = activation_bytes(config, scheduler, dtype)
    total = free_memory(device) if device_bytes is None else device_bytes - CUDA_OVERHEAD_BYTES
    free_bytes = max(total - planned.weights_bytes - activations, 0)
    if total < planned.weights_bytes:
        raise ConfigError(
            f"the weights take {_gib(planned.weights_bytes)}, and only {_gib(max(total, 0))} are there: use a larger "
            "device or a smaller --weights-dtype"
        )
    free_host_bytes = free_memory(torch.device("cpu"))
    if device.type == "cpu":
        free_host_bytes -= planned.weights_bytes
    return LoadPlan(
        memory=make_plan(
            cache=cache,
            spec=kv_cache_spec(
                config, backend, kv_dtype=kv_dtype, block_size=cache.block_size, max_model_len=max_model_len
            ),
            weights_bytes=planned.weights_bytes,
            free_bytes=free_bytes,
            free_host_bytes=free_host_bytes,
            max_num_seqs=scheduler.max_num_seqs,
            max_model_len=max_model_len,
            on_cpu=device.type == "cpu",
        ),
        max_model_len=max_model_len,
        device=device.type,
        dtype=str(dtype).removeprefix("torch."),
        attention_backend=backend.name,
        weights=planned.sizes,
        read_bytes=planned.read_bytes,
        multiplications=planned.multiplications,
        activation_bytes=activations,
        free_bytes=free_bytes,
    )


def activation_bytes(config: Any, scheduler: SchedulerConfig, dtype: torch.dtype) -> int:
    """Most that a step holds besides weights and pools: the widest layer over a full step, or its logits.

    An estimate from shapes, for devices that are not here; a worker on a GPU measures it.
    """
    tokens, rows = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
    text = config.hf_config.get_text_config(decoder=True) if hasattr(config, "hf_config") else config
    hidden = int(getattr(text, "hidden_size", 0))
    heads = int(getattr(text, "num_heads", getattr(text, "num_attention_heads", 0)))
    inner = int(getattr(text, "expert_size", getattr(text, "intermediate_size", None) or 4 * hidden))
    inner *= int(getattr(text, "num_experts_per_token", getattr(text, "num_experts_per_tok", None) or 1))
    qkv = (heads + 2 * config.num_kv_heads) * config.head_dim
    # The residual and the layer's input, and what attention or the MLP have made of it.
    layer = tokens * (2 * hidden + max(qkv + heads * config.head_dim, 3 * inner)) * dtype.itemsize
    # Logits as the head gives them, in fp32, and as sampling changes them.
    logits = rows * config.vocab_size * (dtype.itemsize + 2 * torch.float32.itemsize)
    return max(layer, logits + 2 * tokens * hidden * dtype.itemsize)


def _device_here(name: str) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ConfigError("--device cuda: torch sees no CUDA device here; name one by --card, or give --device-memory")
    return torch.device("cuda" if has_cuda and name != "cpu" else "cpu")


def _backend(spec: AttentionSpec, forced: str | None, *, is_here: bool) -> AttentionBackend:
    """The backend that serves `spec`, or for a card that is elsewhere one with the layout that GPUs have."""
    if is_here:
        return select(spec, forced)(spec)
    return ReferenceBackend(spec)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
