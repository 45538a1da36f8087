"""What completions and chat share: fields of sampling, refusals of what is not built, usage."""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Any, ClassVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, field_validator

from pagedserve.api.protocol.structured_output import StructuredOutputFields
from pagedserve.errors import RequestError
from pagedserve.sampling_params import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_STRINGS,
    MAX_TOKEN_ID_LIST,
    BeamParams,
    RepetitionDetection,
    SamplingParams,
)

MAX_REQUEST_ID_LEN = 128
MAX_CACHE_SALT_LEN = 128
_SAFE_ID = re.compile(rf"[A-Za-z0-9._:+=-]{{1,{MAX_REQUEST_ID_LEN}}}")

# Fields of SamplingParams that a model's generation_config may give a default for.
SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
COPIED_FIELDS = (
    *SAMPLING_FIELDS,
    "seed",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "stop",
)

# Fields with a meaning that is not built, or not for every route: name -> values that ask for nothing, which pass.
UNSUPPORTED_FIELDS: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "chat_template": (),
    "documents": ([],),
    "ebnf": (),
    "ec_transfer_params": ({},),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "grammar": ("",),
    "json_schema": ({},),
    "kv_transfer_params": ({},),
    "logprob_token_ids": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"], []),
    "prediction": (),
    "prompt_embeds": ([],),
    "regex": (),
    "store": (False,),
    "stream_interval": (1,),
    "suffix": ("",),
    "thinking_token_budget": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "vllm_xargs": ({},),
    "watermarking": (False,),
    "web_search_options": (),
}
_REASONS = {
    "chat_template": "templates from clients are not rendered; the operator sets one with --chat-template",
    **dict.fromkeys(
        ("ebnf", "grammar", "json_schema", "regex"), "send it in structured_outputs, or as response_format"
    ),
    "suffix": "filling in the middle is not supported",
    "store": "answers are not stored",
    "functions": "deprecated since 2023; send tools, which are answered with tool_calls",
    "function_call": "deprecated since 2023; send tool_choice",
}
# Fields of OpenAI's that change nothing in an answer: accepted without a word.
HARMLESS_FIELDS = frozenset(
    {
        "user",
        "metadata",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "parallel_tool_calls",
        "include_reasoning",
        "session_id",
        "guided_decoding_backend",
        *UNSUPPORTED_FIELDS,
    }
)


class StreamOptions(BaseModel):
    """What a stream carries besides the text."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = Field(None, description="a last chunk with the usage and no choices")
    continuous_usage_stats: bool | None = Field(None, description="the usage so far on every chunk")
    include_obfuscation: bool | None = Field(None, description="accepted; no padding is ever sent")


class RepetitionDetectionFields(BaseModel):
    """End an output that ends in `min_count` copies of one pattern; max_pattern_size 0 is off."""

    model_config = ConfigDict(strict=True, extra="forbid")

    max_pattern_size: int = Field(description="tokens")
    min_pattern_size: int | None = Field(None, description="tokens (default: 1)")
    min_count: int | None = Field(None, description="copies (default: 3)")

    def rule(self) -> RepetitionDetection | None:
        """None where it is off; RequestError for what is out of range."""
        if self.max_pattern_size == 0:
            return None
        return RepetitionDetection(
            max_pattern_size=self.max_pattern_size,
            # Other servers take 0 for the smallest.
            min_pattern_size=self.min_pattern_size or 1,
            min_count=3 if self.min_count is None else self.min_count,
        )


class PromptChecks(BaseModel):
    """What is checked of fields that all requests with prompts have; each declares them in its own order."""

    @field_validator("truncation_side", check_fields=False)
    @classmethod
    def _check_truncation_side(cls, value: str) -> str:
        if value not in ("left", "right"):
            raise ValueError('truncation_side must be "left" or "right"')
        return value

    @field_validator("truncate_prompt_tokens", check_fields=False)
    @classmethod
    def _check_truncate(cls, value: int) -> int:
        if value != -1 and not 1 <= value < 2**31:
            raise ValueError("truncate_prompt_tokens must be -1 or at least 1")
        return value

    @field_validator("request_id", check_fields=False)
    @classmethod
    def _check_request_id(cls, value: str) -> str:
        if not is_safe_id(value):
            raise ValueError(f"request_id must be 1 to {MAX_REQUEST_ID_LEN} of the characters A-Z a-z 0-9 . _ : + = -")
        return value

    @field_validator("cache_salt", check_fields=False)
    @classmethod
    def _check_cache_salt(cls, value: str) -> str:
        if not 1 <= len(value) <= MAX_CACHE_SALT_LEN:
            raise ValueError(f"cache_salt must have 1 to {MAX_CACHE_SALT_LEN} characters")
        return value


class GenerationRequest(PromptChecks, StructuredOutputFields):
    """Fields of every request that generates text. A field that is null is as good as absent."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
    # How fields of SamplingParams are called here, where the names differ.
    PARAM_NAMES: ClassVar[dict[str, str]] = {}

    model: str | None = Field(None, description="a served model (default: the one that is served)")
    n: int | None = Field(None, description="choices to return")
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(None, description="0 or -1: off")
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = Field(None, description="token id (as a string) to a bias in [-100, 100]")
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    use_beam_search: bool | None = None
    beam_width: int | None = Field(None, description="beams kept (default: best_of, then n)")
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(None, description="keep this many prompt tokens; -1: what fits")
    truncation_side: str | None = Field(None, description="left (default) drops the beginning, right the end")
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    request_id: str | None = None
    repetition_detection: RepetitionDetectionFields | None = Field(
        None, description="ends an output that goes round in a circle, with stop_reason repetition_detected"
    )
    timeout: float | None = Field(None, gt=0, description="seconds after which the request fails with 408")
    priority: int | None = Field(None, ge=-(2**31), le=2**31 - 1, description="lower runs first (priority policy)")
    cache_salt: str | None = Field(None, description="requests share cached prefixes only under the same salt")
    service_tier: str | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _check_stop(cls, value: object) -> object:
        entries = [value] if isinstance(value, str) else value
        if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
            raise ValueError("stop must be a string or a list of strings")
        return _bounded("stop", entries, MAX_STOP_STRINGS)

    @field_validator("bad_words", mode="before")
    @classmethod
    def _check_bad_words(cls, value: object) -> object:
        return _bounded("bad_words", value, MAX_BAD_WORDS)

    @field_validator("stop_token_ids", mode="before")
    @classmethod
    def _check_stop_token_ids(cls, value: object) -> object:
        return _bounded("stop_token_ids", value, MAX_TOKEN_ID_LIST)

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _check_logit_bias(cls, value: object) -> object:
        return _bounded("logit_bias", value, MAX_LOGIT_BIAS)

    @property
    def wants_usage_chunk(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_usage_always(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def check(self) -> None:
        """Raise RequestError for fields that contradict each other."""
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream: true", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError("prompt_logprobs cannot be streamed", param="prompt_logprobs")
        if self.truncation_side is not None and self.truncate_prompt_tokens is None:
            raise RequestError("truncation_side needs truncate_prompt_tokens", param="truncation_side")
        if self.use_beam_search and self.repetition_detection is not None:
            raise RequestError("beam search does not look for repetition", param="repetition_detection")
        if not self.use_beam_search:
            # Clients of other servers send the defaults along.
            for name, default in (("beam_width", None), ("length_penalty", 1.0), ("early_stopping", False)):
                value = getattr(self, name)
                if value is not None and value != default:
                    raise RequestError(f"{name} needs use_beam_search: true", param=name)

    def sampling_params(
        self, defaults: dict[str, Any], *, max_tokens: int | None, logprobs: int | None, best_of: int | None = None
    ) -> SamplingParams:
        """What the engine needs; `defaults` (the model's) stand behind what the client sent.

        Raises RequestError with the client's name of the field.
        """
        values = {name: value for name in COPIED_FIELDS if (value := getattr(self, name)) is not None}
        if self.use_beam_search:
            values["beam"] = self._beam(best_of)
        else:
            values = {**{name: defaults[name] for name in SAMPLING_FIELDS if name in defaults}, **values}
            if best_of is not None:
                values["best_of"] = best_of
        if self.logit_bias is not None:
            values["logit_bias"] = {_token_id(key): bias for key, bias in self.logit_bias.items()}
        if self.repetition_detection is not None:
            values["repetition_detection"] = self.repetition_detection.rule()
        try:
            return SamplingParams(
                n=1 if self.n is None else self.n,
                max_tokens=max_tokens,
                logprobs=logprobs,
                prompt_logprobs=self.prompt_logprobs,
                structured_output=self.structured_output(),
                **values,
            )
        except RequestError as error:
            raise self.renamed(error) from error

    def renamed(self, error: RequestError) -> RequestError:
        """`error` with the field called as the client called it."""
        if error.param == "structured_output" and self.structured_field is not None:
            error.param = self.structured_field
            if error.message.startswith("structured_output"):
                error.message = error.param + error.message.removeprefix("structured_output")
        name = self.PARAM_NAMES.get(error.param or "")
        if name is not None:
            # Only where the message begins with the field: "prompt" is also a plain word.
            if error.message.startswith(f"{error.param} "):
                error.message = name + error.message[len(str(error.param)) :]
            error.param = name
        return error

    def _beam(self, best_of: int | None) -> BeamParams:
        for name, neutral in (("temperature", (0, 1)), ("top_p", (1,)), ("top_k", (0, -1)), ("min_p", (0,))):
            value = getattr(self, name)
            if value is not None and value not in neutral:
                raise RequestError(f"beam search draws nothing at random: leave {name} out", param=name)
        return BeamParams(
            width=self.beam_width or best_of or self.n or 1,
            length_penalty=1.0 if self.length_penalty is None else self.length_penalty,
            early_stopping=False if self.early_stopping is None else self.early_stopping,
        )


class PromptTokensDetails(msgspec.Struct):
    """How the prompt was computed."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    """How often memory ran out, how many tokens were computed again, and how many of the answer's were reasoning."""

    num_preemptions: int = 0
    num_wasted_tokens: int = 0
    reasoning_tokens: int = 0


class Usage(msgspec.Struct):
    """Tokens of a request: each prompt counted once, all choices summed."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


def refuse_unsupported(body: dict[str, Any], known: Container[str] = ()) -> None:
    """RequestError for a field that asks for something that is not built; an answer without it would be a surprise.

    `known` are fields that the route has all the same.
    """
    for name, accepted in UNSUPPORTED_FIELDS.items():
        if name in body and name not in known and not any(_same(body[name], value) for value in accepted):
            reason = _REASONS.get(name)
            message = f"{name}: {reason}" if reason else f"{name} is not supported yet"
            raise RequestError(message, param=name, code="unsupported_parameter")


def is_safe_id(text: str) -> bool:
    """True for ids that may be repeated in headers, logs and answers."""
    return _SAFE_ID.fullmatch(text) is not None


def _same(value: object, accepted: object) -> bool:
    # `==` alone would take 0 for False.
    return type(value) is type(accepted) and value == accepted


def _bounded(name: str, value: object, limit: int) -> object:
    """Long lists are refused before each entry is looked at."""
    if isinstance(value, list | dict) and len(value) > limit:
        raise ValueError(f"{name} may hold at most {limit} entries")
    return value


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdecimal() and len(key) < 19):
        raise RequestError(f"logit_bias key {key!r} is not a token id", param="logit_bias")
    return int(key)
