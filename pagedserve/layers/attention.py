"""What the layers need to know of a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagedserve.attention import AttentionMetadata


@dataclass(slots=True, kw_only=True)
class ForwardContext:
    """Everything of a step that is not a token: handed down as an argument, never looked up."""

    metadata: AttentionMetadata
    kv_cache: torch.Tensor  # [num_blocks, num_layers, *layer_block_shape]
