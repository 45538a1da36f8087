"""Penalties where a kernel counts tokens: the rows' tokens lie on the device, and a step brings only what is new."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from pagedserve.kernels import ops
from pagedserve.sampling.transfers import to_device

if TYPE_CHECKING:
    from pagedserve.sampling.batch import SamplingState, TokenHistory

_ROOM = 256  # tokens by which rows may grow before all of them are copied again


class GpuPenalties:
    """The penalties of some rows of a batch, `rows` int64 [n]; lives as long as the batch has the same members."""

    def __init__(self, rows: np.ndarray, states: Sequence[SamplingState], device: torch.device) -> None:
        self._rows = rows
        self._device = device
        self._lengths = np.zeros(len(rows), dtype=np.int64)
        self._tokens = torch.empty((len(rows), 0), dtype=torch.int32, device=device)
        params = [state.params for state in states]
        self._apply = partial(
            ops.apply_penalties,
            rows=to_device(rows, device, torch.int64),
            slots=torch.arange(len(rows), device=device),
            prompt_lens=to_device([state.num_prompt_tokens for state in states], device, torch.int64),
            repetition=to_device([p.repetition_penalty for p in params], device, torch.float32),
            presence=to_device([p.presence_penalty for p in params], device, torch.float32),
            frequency=to_device([p.frequency_penalty for p in params], device, torch.float32),
        )

    def prepare(self, history: TokenHistory) -> Callable[[torch.Tensor], None]:
        """What to do to logits [batch, vocab_size] that follow these tokens."""
        lengths, places = history.lengths[self._rows], history.rows[self._rows]
        grown = lengths - self._lengths
        longest = int(lengths.max())
        if longest > self._tokens.shape[1] or grown.min() < 0 or grown.max() > 1:
            tokens = np.zeros((len(places), longest + _ROOM), dtype=np.int32)
            known = history.token_ids[places, :longest]
            tokens[:, : known.shape[1]] = known
            self._tokens = to_device(tokens, self._device, torch.int32)
        elif grown.max() > 0:
            changed = np.flatnonzero(grown)
            last = lengths[changed] - 1
            new = history.token_ids[places[changed], last]
            where = (to_device(changed, self._device, torch.int64), to_device(last, self._device, torch.int64))
            self._tokens[where] = to_device(new, self._device, torch.int32)
        self._lengths = lengths
        return partial(self._apply, token_ids=self._tokens, lengths=to_device(lengths, self._device, torch.int64))
