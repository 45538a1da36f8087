"""`/v1/embeddings`: the request and its answer; and what it shares with scoring and reranking."""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic import ConfigDict, Field, field_validator

from pagedserve.api.protocol.common import PromptChecks, PromptTokensDetails
from pagedserve.errors import RequestError
from pagedserve.pooling_params import PoolingParams

# OpenAI's limit.
MAX_INPUTS = 2048


class PoolingRequest(PromptChecks):
    """Fields of every request whose texts become vectors."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    model: str | None = Field(None, description="a served model (default: the one that is served)")
    truncate_prompt_tokens: int | None = Field(None, description="keep this many tokens of each text; -1: what fits")
    truncation_side: str | None = Field(None, description="right (default) drops the end of a text, left its beginning")
    add_special_tokens: bool | None = None
    request_id: str | None = None
    timeout: float | None = Field(None, gt=0, description="seconds after which the request fails with 408")
    priority: int | None = Field(None, ge=-(2**31), le=2**31 - 1, description="lower runs first (priority policy)")
    cache_salt: str | None = Field(None, description="requests share cached prefixes only under the same salt")
    user: str | None = None

    def check(self) -> None:
        """Raise RequestError for fields that contradict each other."""
        if self.truncation_side is not None and self.truncate_prompt_tokens is None:
            raise RequestError("truncation_side needs truncate_prompt_tokens", param="truncation_side")


class EmbeddingRequest(PoolingRequest):
    """Texts, or token ids, to turn into vectors."""

    input: str | list[str] | list[int] | list[list[int]]
    encoding_format: str | None = Field(None, description="float (default) or base64: little-endian fp32")
    dimensions: int | None = Field(None, description="leading numbers to keep, of models trained for it")
    normalize: bool | None = Field(None, description="length 1 (default: as the model's files say, else true)")
    use_activation: bool | None = Field(None, description="another name of normalize")
    embed_dtype: str | None = Field(None, description="float32")
    endianness: str | None = Field(None, description="little, or native, which is the same")

    @field_validator("input", mode="wrap")
    @classmethod
    def _check_input(cls, value: Any, _: Any) -> Any:
        # By hand: pydantic would report every arm of the union, and take a list of a million entries apart first.
        if isinstance(value, str):
            return [value]
        if not isinstance(value, list) or not value:
            raise ValueError("input must be a string, a list of strings, a list of token ids, or a list of such lists")
        if _are_ids(value):
            return [value]
        if len(value) > MAX_INPUTS:
            raise ValueError(f"input may hold at most {MAX_INPUTS} texts, not {len(value)}")
        if all(isinstance(entry, str) for entry in value):
            return value
        if all(isinstance(entry, list) and _are_ids(entry) for entry in value):
            return value
        raise ValueError("input must hold strings, or token ids, or lists of token ids: one kind only")

    @field_validator("encoding_format")
    @classmethod
    def _check_encoding_format(cls, value: str) -> str:
        if value not in ("float", "base64"):
            raise ValueError('encoding_format must be "float" or "base64"')
        return value

    @field_validator("embed_dtype")
    @classmethod
    def _check_embed_dtype(cls, value: str) -> str:
        if value != "float32":
            raise ValueError('embed_dtype must be "float32"')
        return value

    @field_validator("endianness")
    @classmethod
    def _check_endianness(cls, value: str) -> str:
        if value not in ("little", "native"):
            raise ValueError('endianness must be "little" or "native"')
        return value

    def check(self) -> None:
        super().check()
        if None not in (self.normalize, self.use_activation) and self.normalize != self.use_activation:
            raise RequestError("normalize and use_activation are one setting: give one of them", param="use_activation")

    def pooling_params(self, default: PoolingParams) -> PoolingParams:
        """What the engine needs; `default` is the model's. Raises RequestError."""
        wishes = [wish for wish in (self.normalize, self.use_activation) if wish is not None]
        normalize = wishes[0] if wishes else default.normalize
        return PoolingParams(pooling_type=default.pooling_type, normalize=normalize, dimensions=self.dimensions)


def _are_ids(value: list[Any]) -> bool:
    return all(type(entry) is int for entry in value)


class PoolingUsage(msgspec.Struct):
    """Tokens of all texts; nothing is generated."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Embedding(msgspec.Struct):
    """The vector of one text: numbers, or base64 of little-endian fp32."""

    object: str
    index: int
    embedding: list[float] | str


class EmbeddingResponse(msgspec.Struct):
    """The answer of /v1/embeddings, in the order of the input."""

    object: str
    data: list[Embedding]
    model: str
    usage: PoolingUsage
