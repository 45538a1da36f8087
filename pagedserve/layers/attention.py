"""What the layers need to know of a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagedserve.attention import AttentionMetadata


@dataclass(slots=True, kw_only=True)
class ForwardContext:
    """Everything of a step that is not a token: handed down as an argument, never looked up.

    Layers whose windows differ keep their keys and values in different blocks: they form layer groups, each with
    metadata of its own, and `places` says for each layer its group, and its place in the blocks of that group. Without
    `places` there is one group, and a layer's place is its index.
    """

    metadata: AttentionMetadata  # of the first layer group
    kv_cache: torch.Tensor  # [num_blocks, num_layers of a group, *layer_block_shape]
    more_metadata: tuple[AttentionMetadata, ...] = ()  # of the other groups
    places: tuple[tuple[int, int], ...] = ()

    def per_layer(self) -> list[tuple[torch.Tensor, AttentionMetadata]]:
        """For each layer its view of the pool, [num_blocks, *layer_block_shape], and its group's metadata."""
        views = self.kv_cache.unbind(1)
        if not self.places:
            return [(view, self.metadata) for view in views]
        metadata = (self.metadata, *self.more_metadata)
        return [(views[place], metadata[group]) for group, place in self.places]
