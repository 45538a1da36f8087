"""`/v1/score` and `/v1/rerank`: requests and answers."""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic import Field, field_validator

from pagedserve.api.protocol.embeddings import MAX_INPUTS, PoolingRequest, PoolingUsage
from pagedserve.errors import RequestError


def _texts(name: str, value: Any) -> list[str]:
    """A text, or a list of texts or of objects with a `text`, as a list of texts."""
    entries = value if isinstance(value, list) else [value]
    if len(entries) > MAX_INPUTS:
        raise ValueError(f"{name} may hold at most {MAX_INPUTS} texts, not {len(entries)}")
    texts = [entry.get("text") if isinstance(entry, dict) and set(entry) == {"text"} else entry for entry in entries]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{name} must be a text or a non-empty list of texts")
    return texts


class ScoreRequest(PoolingRequest):
    """One text against each of several, or pairs of texts."""

    text_1: str | list[str]
    text_2: str | list[str]

    @field_validator("text_1", "text_2", mode="wrap")
    @classmethod
    def _check_texts(cls, value: Any, _: Any, info: Any) -> list[str]:
        return _texts(info.field_name, value)

    def check(self) -> None:
        super().check()
        if len(self.text_1) not in (1, len(self.text_2)):
            raise RequestError(
                f"text_1 has {len(self.text_1)} texts and text_2 has {len(self.text_2)}: give one, or as many",
                param="text_1",
            )


class RerankRequest(PoolingRequest):
    """Documents to order by how near they are to a query."""

    query: str
    documents: list[str | dict[str, Any]]
    top_n: int | None = Field(None, ge=0, description="best documents to return (default, and 0: all)")
    return_documents: bool | None = Field(None, description="repeat each document's text (default: true)")

    @field_validator("documents", mode="wrap")
    @classmethod
    def _check_documents(cls, value: Any, _: Any) -> list[str]:
        if not isinstance(value, list):
            raise ValueError("documents must be a non-empty list of texts")
        return _texts("documents", value)


class Score(msgspec.Struct):
    """The cosine of two texts' vectors."""

    index: int
    object: str
    score: float


class ScoreResponse(msgspec.Struct):
    """The answer of /v1/score, in the order of text_2."""

    id: str
    object: str
    created: int
    model: str
    data: list[Score]
    usage: PoolingUsage


class RerankedDocument(msgspec.Struct):
    """The text as it was sent."""

    text: str


class RerankResult(msgspec.Struct, omit_defaults=True):
    """`index` is the document's place in the request."""

    index: int
    relevance_score: float
    document: RerankedDocument | None = None


class RerankResponse(msgspec.Struct):
    """The answer of /v1/rerank, best first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: PoolingUsage
