"""`/v1/models`: what is served."""

from __future__ import annotations

import msgspec


class ModelCard(msgspec.Struct):
    """One served name."""

    id: str
    object: str
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None


class ModelList(msgspec.Struct):
    """All served names."""

    object: str
    data: list[ModelCard]
