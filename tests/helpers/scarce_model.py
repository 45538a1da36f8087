"""A device with too little memory: a model and a sampler that raise what torch raises when a step is too large."""

from __future__ import annotations

from typing import Any

import torch

from pagedserve.worker.device import Device

SAYS = "CUDA out of memory. Tried to allocate 20.00 GiB."


class ScarceModel:
    """A model whose forward fails for more than `max_tokens` tokens, or for a token of `poison`; its head for more than
    `max_rows` rows. A forward that fails has written some layers' keys and values, as a real one would."""

    def __init__(
        self, model: Any, *, max_tokens: int = 10**9, max_rows: int = 10**9, poison: int | None = None
    ) -> None:
        self._model = model
        self.max_tokens = max_tokens
        self.max_rows = max_rows
        self.poison = poison
        self.error: type[Exception] = torch.OutOfMemoryError
        self.sizes: list[int] = []  # of the forwards that went through
        self.num_failures = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, context: Any) -> torch.Tensor:
        hidden = self._model.forward(token_ids, positions, context)
        if len(token_ids) > self.max_tokens or (self.poison is not None and bool((token_ids == self.poison).any())):
            self._fail()
        self.sizes.append(len(token_ids))
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if len(hidden) > self.max_rows:
            self._fail()
        return self._model.compute_logits(hidden)

    def _fail(self) -> None:
        self.num_failures += 1
        raise self.error(SAYS)


class ScarceSampler:
    """A sampler that fails for more than `max_rows` rows, after it has changed the logits in place."""

    def __init__(self, sampler: Any, max_rows: int) -> None:
        self._sampler = sampler
        self._max_rows = max_rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def draw(self, logits: torch.Tensor, *arguments: Any) -> Any:
        if len(logits) > self._max_rows:
            logits.zero_()
            raise torch.OutOfMemoryError(SAYS)
        return self._sampler.draw(logits, *arguments)


class CountingDevice(Device):
    """Counts how often caches were given back; `lost` is what it says of itself."""

    def __init__(self) -> None:
        self.num_released = 0
        self.lost: str | None = None

    def release_caches(self) -> None:
        self.num_released += 1

    def why_lost(self) -> str | None:
        return self.lost
