"""`/v1/batches`: many requests from one file (OpenAI's Batch API), and the lines of its files."""

from __future__ import annotations

import re

import msgspec
from pydantic import BaseModel, ConfigDict, Field, field_validator

from pagedserve.errors import RequestError

MAX_METADATA_ENTRIES = 16
MAX_METADATA_KEY_LEN = 64
MAX_METADATA_VALUE_LEN = 512
MAX_WINDOW_SECONDS = 30 * 86_400
_WINDOW = re.compile(r"([1-9][0-9]{0,6})([smhd])")
_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def check_metadata(value: dict[str, str]) -> dict[str, str]:
    """OpenAI's limits of `metadata`; ValueError names the one that is exceeded."""
    if len(value) > MAX_METADATA_ENTRIES:
        raise ValueError(f"metadata may hold at most {MAX_METADATA_ENTRIES} entries")
    for key, text in value.items():
        if len(key) > MAX_METADATA_KEY_LEN or len(text) > MAX_METADATA_VALUE_LEN:
            raise ValueError(
                f"metadata keys may have {MAX_METADATA_KEY_LEN} characters and values {MAX_METADATA_VALUE_LEN}"
            )
    return value


class ExpiresAfterRequest(BaseModel):
    """When a file may be deleted."""

    model_config = ConfigDict(strict=True, extra="forbid")

    anchor: str = Field("created_at", pattern="^created_at$")
    seconds: int = Field(ge=3600, le=2_592_000)


class BatchRequest(BaseModel):
    """Run every line of an uploaded file."""

    model_config = ConfigDict(strict=True, extra="ignore")

    input_file_id: str = Field(description="a file of JSON lines, uploaded with purpose batch")
    endpoint: str = Field(description="the route that every line is a request to")
    completion_window: str = Field(
        description="24h, or any of Ns, Nm, Nh, Nd up to 30d; what is not done then, expires"
    )
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfterRequest | None = None

    _metadata = field_validator("metadata")(check_metadata)

    @property
    def window_seconds(self) -> int:
        """Seconds until the batch expires; RequestError for what is no such time."""
        match = _WINDOW.fullmatch(self.completion_window)
        seconds = int(match[1]) * _UNIT_SECONDS[match[2]] if match else 0
        if not 0 < seconds <= MAX_WINDOW_SECONDS:
            raise RequestError(
                f"completion_window {self.completion_window!r}: use 24h, or another time up to 30d",
                param="completion_window",
            )
        return seconds


class ExpiresAfter(msgspec.Struct):
    """When the files that a batch writes will be deleted."""

    seconds: int
    anchor: str = "created_at"


class BatchError(msgspec.Struct):
    """Why a batch failed validation; `line` counts from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(msgspec.Struct):
    data: list[BatchError]
    object: str = "list"


class BatchRequestCounts(msgspec.Struct):
    """Lines of the input; `completed` were answered with 2xx, `failed` otherwise."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchInputTokensDetails(msgspec.Struct):
    cached_tokens: int = 0


class BatchOutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int = 0


class BatchUsage(msgspec.Struct):
    """Tokens of all answered lines."""

    input_tokens: int = 0
    input_tokens_details: BatchInputTokensDetails = msgspec.field(default_factory=BatchInputTokensDetails)
    output_tokens: int = 0
    output_tokens_details: BatchOutputTokensDetails = msgspec.field(default_factory=BatchOutputTokensDetails)
    total_tokens: int = 0


class Batch(msgspec.Struct):
    """The state of a batch. Times are Unix seconds.

    `status`: validating, then failed or in_progress; finalizing; then completed, expired or (by cancelling) cancelled.
    """

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    object: str = "batch"
    status: str = "validating"
    model: str | None = None
    errors: BatchErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: BatchRequestCounts = msgspec.field(default_factory=BatchRequestCounts)
    usage: BatchUsage = msgspec.field(default_factory=BatchUsage)
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None

    @property
    def is_over(self) -> bool:
        return self.status in ("completed", "failed", "expired", "cancelled")


class BatchList(msgspec.Struct):
    """A page of batches, newest first; `after` with `last_id` gives the next one."""

    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class LineResponse(msgspec.Struct):
    """What the route answered."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class LineError(msgspec.Struct):
    """Why a line was not answered."""

    code: str
    message: str


class LineOutput(msgspec.Struct):
    """A line of the output file (2xx) or of the error file (all else)."""

    id: str
    custom_id: str
    response: LineResponse | None = None
    error: LineError | None = None
