"""Layer groups: which layers keep their keys and values in the same blocks.

Layers of one window share block tables, for what one of them no longer sees none of them does. All groups hold equally
many layers, so that one pool of equal blocks serves every group and none has a share of its own that could lie idle.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from pagedserve.attention import AttentionBackend
from pagedserve.step import KVCacheSpec, LayerGroup

# One large group with a few unused places is better than two small ones (fewer, larger blocks) up to this ratio.
_MAX_PADDING = 1.25


def layer_groups(windows: Sequence[int | None], max_model_len: int) -> tuple[LayerGroup, ...]:
    """The groups of layers with these windows, those that see furthest first.

    A window that no sequence outgrows is none. Groups have as many layers as the rarest window has, so that at most the
    last group of each window has unused places: 5 local layers for 1 global one, 18 in all, make 6 groups of 3.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(None if window is None or window >= max_model_len else window, []).append(layer)
    fewest, most = min(map(len, kinds.values())), max(map(len, kinds.values()))
    size = most if most <= fewest * _MAX_PADDING else fewest
    groups = []
    for window in sorted(kinds, key=lambda window: -(window or max_model_len)):
        layers = kinds[window]
        num_groups = -(-len(layers) // size)
        # Spread evenly: 22 layers in groups of 4 are 4, 4, 4, 4, 3, 3 rather than 4, 4, 4, 4, 4, 2.
        groups += [LayerGroup(layers=tuple(layers[i::num_groups]), window=window) for i in range(num_groups)]
    return tuple(groups)


def kv_cache_spec(
    model: Any, attention: AttentionBackend, *, kv_dtype: torch.dtype, block_size: int, max_model_len: int
) -> KVCacheSpec:
    """The shape of one KV block for `model`, which is a loaded one or its config."""
    groups = layer_groups(model.layer_windows, max_model_len)
    layer_bytes = math.prod(attention.layer_block_shape) * kv_dtype.itemsize
    return KVCacheSpec(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=block_size,
        dtype=str(kv_dtype).removeprefix("torch."),
        bytes_per_block=max(len(group.layers) for group in groups) * layer_bytes,
        groups=groups,
    )


def layer_places(groups: Sequence[LayerGroup]) -> tuple[tuple[int, int], ...]:
    """Of each layer: its group, and its place in that group's blocks. Empty for one group that has all in order."""
    if len(groups) == 1:
        return ()
    places = {layer: (g, i) for g, group in enumerate(groups) for i, layer in enumerate(group.layers)}
    return tuple(places[layer] for layer in range(len(places)))
