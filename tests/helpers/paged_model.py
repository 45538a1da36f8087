"""Runs a loaded model over paged KV by hand: shuffled block tables, prompts cut into chunks, several rows at once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pagedserve.attention import BACKENDS
from pagedserve.layers.attention import ForwardContext
from pagedserve.model_files import resolve
from pagedserve.models.loader import load_model, parse_config
from pagedserve.quantization.method import QuantMethod
from tests.helpers.dense_weights import DenseMethod

BLOCK_SIZE = 16
CPU = torch.device("cpu")


class PagedModel:
    """A model with a pool of its own. `kv_cache` starts as NaN: reading what nobody wrote shows."""

    def __init__(
        self,
        path: Path,
        *,
        dtype: torch.dtype = torch.float32,
        kv_cache_dtype: torch.dtype | None = None,
        backend: str = "reference",
        quant: QuantMethod | None = None,
        max_model_len: int | None = None,
        num_blocks: int = 128,
        seed: int = 0,
        dummy_seed: int | None = None,
        impl: str = "auto",
    ):
        files = resolve(str(path), require_weights=dummy_seed is None)
        config = parse_config(files, impl)
        kv_cache_dtype = kv_cache_dtype or dtype
        spec = config.attention_spec(block_size=BLOCK_SIZE, dtype=dtype, kv_cache_dtype=kv_cache_dtype, device=CPU)
        chosen = BACKENDS.resolve(backend)
        assert chosen.why_not(spec) is None, chosen.why_not(spec)
        self.backend = chosen(spec)
        self.model: Any = load_model(
            files,
            config,
            attention=self.backend,
            quant=quant or DenseMethod(),
            dtype=dtype,
            device=CPU,
            max_model_len=max_model_len,
            dummy_seed=dummy_seed,
            impl=impl,
        )
        shape = (num_blocks, config.num_layers, *self.backend.layer_block_shape)
        self.kv_cache = torch.full(shape, float("nan"), dtype=kv_cache_dtype)
        self._free = list(range(num_blocks))
        random.Random(seed).shuffle(self._free)
        self._tables: dict[int, list[int]] = {}
        self._num_computed: dict[int, int] = {}

    def step(self, rows: Sequence[tuple[int, Sequence[int]]]) -> torch.Tensor:
        """One forward. rows: (sequence id, its next tokens); a new id starts a sequence.

        Returns fp32 logits of every token, [num_tokens, vocab].
        """
        token_ids, positions, slots, starts, seq_lens = [], [], [], [0], []
        for seq_id, tokens in rows:
            first = self._num_computed.get(seq_id, 0)
            end = first + len(tokens)
            table = self._tables.setdefault(seq_id, [])
            while len(table) * BLOCK_SIZE < end:
                table.append(self._free.pop())
            token_ids += tokens
            positions += range(first, end)
            slots += [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(first, end)]
            starts.append(len(token_ids))
            seq_lens.append(end)
            self._num_computed[seq_id] = end
        tables = [self._tables[seq_id] for seq_id, _ in rows]
        width = max(map(len, tables))
        metadata = self.backend.build_metadata(
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            block_tables=torch.tensor([[*table, *[0] * (width - len(table))] for table in tables], dtype=torch.int32),
            slot_mapping=torch.tensor(slots),
            max_query_len=max(len(tokens) for _, tokens in rows),
            max_seq_len=max(seq_lens),
        )
        hidden = self.model.forward(
            torch.tensor(token_ids), torch.tensor(positions), ForwardContext(metadata=metadata, kv_cache=self.kv_cache)
        )
        return self.model.compute_logits(hidden)

    def logits(self, token_ids: Sequence[int], *, chunk: int, seq_id: int = 0) -> torch.Tensor:
        """Logits of every position of one sequence, computed `chunk` tokens at a time. [num_tokens, vocab]"""
        chunks = [token_ids[i : i + chunk] for i in range(0, len(token_ids), chunk)]
        return torch.cat([self.step([(seq_id, part)]) for part in chunks])
