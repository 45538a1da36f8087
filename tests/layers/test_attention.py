from __future__ import annotations

import torch

from pagedserve.attention import AttentionMetadata
from pagedserve.layers.attention import ForwardContext


def metadata() -> AttentionMetadata:
    empty = torch.zeros(0, dtype=torch.int32)
    return AttentionMetadata(
        query_start_loc=empty, seq_lens=empty, block_tables=empty, slot_mapping=empty, max_query_len=0, max_seq_len=0
    )


def test_each_layer_gets_its_place_in_the_blocks_and_the_metadata_of_its_group() -> None:
    pool = torch.arange(5 * 2 * 3).view(5, 2, 3)
    full, local = metadata(), metadata()
    alone = ForwardContext(metadata=full, kv_cache=pool).per_layer()
    assert [given for _, given in alone] == [full, full]
    assert all(torch.equal(view, pool[:, layer]) for layer, (view, _) in enumerate(alone))
    places = ((1, 0), (0, 0), (1, 1))
    mixed = ForwardContext(metadata=full, more_metadata=(local,), kv_cache=pool, places=places).per_layer()
    assert [given is local for _, given in mixed] == [True, False, True]
    assert [view.data_ptr() for view, _ in mixed] == [pool[:, place].data_ptr() for _, place in places]
